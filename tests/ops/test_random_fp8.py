"""benchmarks/ops/random_fp8.py: its plain functions compute ours, trace in one graph, and every draw launches."""

import pytest
import torch

from benchmarks.ops.random_fp8 import _both, draws, launch, plain_linear, plain_quantize
from powertrain.ops.fp8.quantize import fp8_quantize
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings


@pytest.mark.parametrize("by", ["tensor", "row", "group", "block"])
def test_plain_quantization_is_ours(by: str) -> None:
    x = torch.randn(144, 272, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = torch.compile(plain_quantize, backend="eager", fullgraph=True, dynamic=False)(x, by)
    ours = fp8_quantize(x, by)
    assert torch.equal(found[0].view(torch.uint8), ours.data.view(torch.uint8))
    assert torch.equal(found[-1 if by != "group" else 2].view(torch.uint8), ours.data_t.view(torch.uint8))
    assert torch.equal(found[1].flatten(), ours.scale_inv.flatten())


def test_plain_linear_is_near_bf16() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(32, n).bfloat16().requires_grad_() for n in (64, 64))
    traced, dy = torch.compile(plain_linear, backend="aot_eager", fullgraph=True, dynamic=False), torch.randn(32, 32)
    found = _both(lambda x: traced(x, weight), (x, weight), dy.bfloat16())
    exact = _both(lambda x: x @ weight.T, (x, weight), dy.bfloat16())
    for one, other in zip(found, exact, strict=True):
        assert (one.float() - other.float()).norm() < 0.1 * other.float().norm()


@pytest.mark.skipif(settings().interpret, reason="nothing is recorded in the interpreter")
def test_draws_are_reproducible_and_launch() -> None:
    assert draws(4, 3) == draws(4, 3) != draws(4, 4)
    for seed in (1, 2):
        with record("sm_90") as wanted:
            for draw in draws(4, seed):
                launch(draw)
        assert len(wanted)
