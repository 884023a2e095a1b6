"""A kernel that writes wrong bytes is found by its self-test, before its first use; in Triton's interpreter too."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.fp8 import current, dequantize, gated, quantize, transpose

pytestmark = pytest.mark.kernels


def _flip(t: Tensor) -> None:
    """One bit of one byte."""
    t.view(torch.uint8).view(-1)[-4] ^= 1


def _wrong(right: Any, result: Any) -> Any:
    def launch(*args: Any) -> None:
        right(*args)
        _flip(result(args[-1]))

    return launch


def _test(module: ModuleType, device: torch.device) -> str | None:
    found: str | None
    if module is transpose:
        found = module._self_test(device)
    else:
        dtype = torch.float8_e4m3fn if module is dequantize else torch.bfloat16
        found = module._self_test(device, dtype)
    return found


@pytest.mark.parametrize("module", [dequantize, transpose])
def test_under_another_default_device(module: ModuleType, device: torch.device) -> None:
    with torch.device("meta"):
        assert _test(module, device) is None


CASES = [
    (quantize, "launch", lambda out: out.data, "data by tensor in e4m3 differs"),
    (quantize, "launch", lambda out: out.data_t, "data_t by tensor in e4m3 differs"),
    (quantize, "launch", lambda out: out.scale_inv, "scale_inv by tensor in e4m3 differs"),
    (current, "_launch", lambda out: out.data, "data in e4m3 differs"),
    (current, "_launch", lambda out: out.data_t, "data_t in e4m3 differs"),
    (current, "_launch", lambda out: out.state, "state in e4m3 differs"),
    (transpose, "_launch", lambda out: out, "bytes of the transposed copy differ"),
    (dequantize, "_launch", lambda out: out, "values of float8_e4m3fn in bfloat16 differ"),
    (gated, "_launch", lambda out: out[1], "the kept form of gate differs"),
    (gated, "_launch", lambda out: out[4], "the kept form of up differs"),
]


IDS = [f"{module.__name__.rpartition('.')[2]}-{said[:8]}" for module, _, _, said in CASES]


@pytest.mark.parametrize(("module", "name", "result", "said"), CASES, ids=IDS)
def test_one_wrong_bit_is_found(
    module: ModuleType, name: str, result: Any, said: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _test(module, device) is None
    monkeypatch.setattr(module, name, _wrong(getattr(module, name), result))
    found = _test(module, device)
    assert found is not None and said in found and "(triton " in found
