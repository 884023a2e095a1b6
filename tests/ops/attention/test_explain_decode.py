"""`explain_decode_attention` names the kernel that the call launches."""

import random
from typing import Any

import pytest
import torch

from powertrain import explain_decode_attention, rope_table
from powertrain.runtime.settings import settings

pytestmark = pytest.mark.skipif(settings().interpret, reason="Gluon has no interpreter")


def _call(
    queries: int = 1, batch: int = 4, page: int = 16, heads: tuple[int, int] = (32, 8), dim: int = 128,
    dtype: torch.dtype = torch.bfloat16, device: str = "meta",
) -> dict[str, Any]:  # fmt: skip
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    cache = empty(64, page, heads[1], dim) if page else empty(batch, 1024, heads[1], dim)
    call = {"query": empty(batch, queries, heads[0], dim), "key_cache": cache, "value_cache": cache}
    call["cache_seqlens"] = empty(batch, dtype=torch.int32)
    return call | ({"page_table": empty(batch, 16, dtype=torch.int32)} if page else {})


def test_on_hopper() -> None:
    found = explain_decode_attention(**_call(), arch="H200")
    assert (found.kernel, found.reasons) == ("hopper", {}) and "hopper_attention_fwd_kernel" in found.launches
    for options, why in (
        ({"cache_leftpad": torch.empty(4, dtype=torch.int32, device="meta")}, "it does not take cache_leftpad"),
        ({"num_splits": 4}, "num_splits is given"),
    ):
        found = explain_decode_attention(**_call(), arch="H200", **options)
        assert found.kernel == "universal" and found.reasons["hopper"] == why
    assert str(found).startswith("H200: universal, ")
    assert "why not hopper: num_splits is given" in str(found) and "launches decode_kernel" in str(found)


def test_on_other_gpus_the_arch_is_the_reason() -> None:
    """Without `num_splits`, or with 16 rows, the Hopper kernels would not run on an A100 either."""
    for options in ({"num_splits": 4}, {}, {"cu_seqlens_q": torch.empty(5, dtype=torch.int32, device="meta")}):
        call = _call(heads=(8, 1)) | options
        if "cu_seqlens_q" in options:
            call |= {"query": call["query"][:, 0], "max_seqlen_q": 1}
        found = explain_decode_attention(**call, arch="A100")
        assert found.kernel == "universal" and found.launches
        assert set(found.reasons.values()) == {"it runs on sm_90 only, got sm_80"}


def test_mla() -> None:
    call = _call(heads=(128, 1), dim=576) | {"value_cache": None, "head_dim_v": 512}
    found = explain_decode_attention(**call, arch="H200")
    assert found.kernel == "hopper-mla" and found.reasons == {
        "hopper": "it does not read values out of the keys (value_cache=None)"
    }
    assert explain_decode_attention(**call, arch="A100").kernel == "universal"


def test_of_tensors_on_a_cpu_and_of_keys_that_would_be_appended() -> None:
    call = _call(page=0, device="cpu")
    assert explain_decode_attention(**call).kernel == "reference"
    new = torch.ones(4, 1, 8, 128, dtype=torch.bfloat16)
    found = explain_decode_attention(**call, key_new=new, value_new=new, rotary=rope_table(128, 1024), arch="sm_90")
    assert found.kernel == "hopper" and found.launches[-3:] and not call["key_cache"].any()
    call["query"] = torch.zeros(4 * 32 * 128 + 1, dtype=torch.bfloat16)[1:].view(4, 1, 32, 128)
    found = explain_decode_attention(**call, arch="H200")
    assert found.kernel == "universal" and found.reasons["hopper"] == "an address is not a multiple of 16 bytes"


def test_wrong_arguments_are_those_of_the_call() -> None:
    with pytest.raises(ValueError, match="explain_decode_attention: arch must be given with tensors on device meta"):
        explain_decode_attention(**_call())
    with pytest.raises(ValueError, match="decode_attention: layout must be one of"):
        explain_decode_attention(**_call(), layout="thd", arch="H100")
    for options in ({"arch": "cpu"}, {"arch": "H100", "backend": "reference"}):
        with pytest.raises(ValueError, match="decode_attention: layout must be one of"):
            explain_decode_attention(**_call(), layout="thd", **options)
        with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
            explain_decode_attention(**_call(), window=3, **options)
        assert explain_decode_attention(**_call(), **options).kernel == "reference"
    assert explain_decode_attention(**_call(dtype=torch.float64), arch="cpu").kernel == "reference"
    with pytest.raises(ValueError, match="arch must be a GPU for backend 'triton', got cpu"):
        explain_decode_attention(**_call(), arch="cpu", backend="triton")
    with pytest.raises(ValueError, match="H2OO"):
        explain_decode_attention(**_call(), arch="H2OO")


@pytest.mark.parametrize("seed", range(8))
def test_the_answer_is_what_is_launched(seed: int) -> None:
    draws = random.Random(seed)
    for _ in range(5):
        mla = draws.random() < 0.3
        call = _call(
            draws.choice([1, 2, 30]), draws.choice([1, 5]), draws.choice([0, 1, 16, 24]),
            draws.choice([(128, 1), (8, 1)]) if mla else draws.choice([(32, 8), (7, 1)]), 576 if mla else 64,
            draws.choice([torch.bfloat16, torch.float16, torch.float32]),
        )  # fmt: skip
        options: dict[str, Any] = {"window_size": (draws.choice([-1, 50]), 0), "softcap": draws.choice([None, 9.0])}
        options |= {"num_splits": draws.choice([None, None, 3])}
        call |= {"value_cache": None, "head_dim_v": 512} if mla else {}
        found = explain_decode_attention(**call, **options, arch=draws.choice(["H100", "A100", "sm_120"]))
        kernel = {"hopper": "hopper_attention_fwd_kernel", "hopper-mla": "hopper_decode_mla_kernel"}
        assert kernel.get(found.kernel, "decode_kernel") in found.launches
        assert not set(kernel.values()) - {kernel.get(found.kernel)} & set(found.launches)
