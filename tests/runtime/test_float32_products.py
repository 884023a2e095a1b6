"""TF32 by either of PyTorch's settings; the older one's getters raise once the newer one is set."""

from collections.abc import Callable, Iterator

import pytest
import torch

import powertrain
from powertrain.ops.cases import cases
from powertrain.runtime import invalidation, signature
from powertrain.runtime.float32_products import allows_tf32
from powertrain.runtime.settings import settings


def _older(tf32: bool) -> None:
    torch.set_float32_matmul_precision("high" if tf32 else "highest")


def _of_products(tf32: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"


def _of_all(tf32: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.fp32_precision = "tf32" if tf32 else "ieee"


@pytest.fixture(params=[_older, _of_products, _of_all])
def allow(request: pytest.FixtureRequest) -> Iterator[Callable[[bool], None]]:
    yield request.param
    torch.backends.fp32_precision = "none"
    _older(False)


def test_what_either_setting_says(allow: Callable[[bool], None]) -> None:
    for tf32 in (True, False, True):
        allow(tf32)
        assert allows_tf32() is tf32


def test_a_changed_setting_compiles_again(allow: Callable[[bool], None]) -> None:
    compiled = torch.compile(lambda x: x + 1 if allows_tf32() else x, backend="eager", fullgraph=True)
    for tf32 in (False, True, False):
        allow(tf32)
        assert compiled(torch.zeros(1)).item() == tf32


# attention and grouped_gemm ask for it when they plan, decode_attention when it is called, replays in every call
@pytest.mark.skipif(not (settings().interpret or torch.cuda.is_available()), reason="no kernels")
@pytest.mark.parametrize("op", ["rms_norm", "attention", "grouped_gemm", "decode_attention"])
def test_kernels_run(
    op: str, allow: Callable[[bool], None], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signature, "in_interpreter", True)
    invalidation.changed()
    if op == "decode_attention":
        tensors = {"query": torch.randn(1, 1, 2, 16, device=device)}
        tensors |= {name: torch.randn(1, 8, 2, 16, device=device) for name in ("key_cache", "value_cache")}
        tensors["cache_seqlens"] = torch.full((1,), 5, dtype=torch.int32, device=device)
        run = powertrain.decode_attention
    else:
        case = next(case for case in cases() if case.op == op)
        tensors, run = case.inputs(case.tiny, torch.float32, device), case.run
    for tf32 in (False, True, True, True, True):
        allow(tf32)
        signed = signature.signature_of(tuple(tensors.values()))
        assert signed is not None and ("tf32" in signed.key) is tf32
        result = run(**tensors)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.sum().backward()
    invalidation.changed()
