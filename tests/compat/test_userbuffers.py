"""initialize_ub and destroy_ub: taken, checked, and said what became of them."""

from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from powertrain.compat.transformer_engine import destroy_ub, initialize_ub


class Mode(Enum):
    NONE = "none"
    FP8 = "fp8"


def test_what_became_of_it_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    initialize_ub(
        [8192, 4096], 1, False, [Mode.NONE], torch.bfloat16, {"fc1_fprop": {"num_sm": 2}}, bootstrap_backend="mpi",
        with_cublasmp=True,
    )  # fmt: skip
    initialize_ub(shape=(64, 32), tp_size=1, ub_cfgs=[{"qkv_dgrad": {"method": "bulk"}}])
    first, second = capfd.readouterr().err.splitlines()
    initialize_ub(np.array([64, 32]).tolist(), np.int64(1))
    initialize_ub((np.int64(64), np.int64(32)), 1)
    assert capfd.readouterr().err.count("without effect: shape [64, 32]") == 2
    for words in ("shape [8192, 4096]", "ub_cfgs for fc1_fprop", "bootstrap_backend mpi", "with_cublasmp"):
        assert words in first
    assert second.endswith("without effect: shape [64, 32], ub_cfgs for qkv_dgrad")
    destroy_ub()
    destroy_ub()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"shape": [8]}, "shape must be [tokens, hidden size], both above 0, got [8]"),
        ({"shape": [8, 0]}, "got [8, 0]"),
        ({"shape": 8}, "shape must be [tokens, hidden size], both above 0, got 8"),
        ({"tp_size": None}, "tp_size must be a whole number, got None"),
        ({"tp_size": 2}, "tp_size must divide the 1 ranks, got 2"),
        ({"dtype": torch.int8}, "dtype must be float32, float16 or bfloat16"),
        ({"quantization_modes": ["MXFP8"]}, "quantization_modes must be of NONE, FP8, got ['MXFP8']"),
        ({"ub_cfgs": {"fc3_fprop": {}}}, "ub_cfgs must name products among qkv_fprop"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="initialize_ub") as caught:
        initialize_ub(**{"shape": [8, 4], "tp_size": 1, **options})
    assert said in str(caught.value)


@pytest.mark.parametrize("options", [{"use_fp8": True}, {"quantization_modes": [Mode.NONE, Mode.FP8]}], ids=str)
def test_fp8_is_taken_and_said(options: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    initialize_ub([8, 4], 1, **options)
    assert "rows of layers that quantize_model made FP8 are sent in FP8" in capfd.readouterr().err
    initialize_ub([8, 4], 1, quantization_modes=[Mode.NONE])
    assert "FP8" not in capfd.readouterr().err
