"""Every Hopper kernel many times over, on two streams at once: none hangs, none leaves anything to the next."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from powertrain.ops.attention import attention
from powertrain.ops.gemm.gemm import LAYOUTS, gemm
from powertrain.ops.gemm.hopper_activation import Epilogue, hopper_epilogue
from tests.gpu.arch import ON_SM90
from tests.ops.attention.attention_launches import any_order
from tests.ops.gemm_launches import operands

pytestmark = ON_SM90
CUDA = torch.device("cuda")
Step = Callable[[], list[Tensor]]


def _attentions(rng: random.Random) -> Step:
    """Forward and backward: two kernels that wait at barriers, of one tile to twice as many as there are SMs."""
    batch, length, kv_heads, head_dim = (
        rng.randint(1, 2),
        rng.randint(1, 500),
        rng.choice((1, 4)),
        rng.choice((64, 128)),
    )
    batch *= rng.choice((1, 1, 16))
    heads = (kv_heads * rng.choice((1, 3)), kv_heads, kv_heads)
    leaves = [
        torch.randn(batch, length, n, head_dim, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for n in heads
    ]
    dout = torch.randn_like(leaves[0])
    is_causal, in_turn = rng.random() < 0.5, rng.random() < 0.5

    def step() -> list[Tensor]:
        out = attention(*leaves, is_causal=is_causal, backend="hopper", deterministic=in_turn)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    return step


def _products(rng: random.Random) -> Step:
    """A product, and one with what follows it."""
    layout = rng.choice(LAYOUTS)
    M, N, K = (8 * rng.randint(1, top) for top in (100, 200, 60))
    a, b = operands(layout, M, N, K, torch.bfloat16, CUDA)
    x, weight = operands("nt", M, N, K, torch.bfloat16, CUDA)
    y, amax = torch.empty(M, N, device=CUDA, dtype=torch.bfloat16), torch.zeros(1, device=CUDA)

    def step() -> list[Tensor]:
        hopper_epilogue(x, weight, y, Epilogue("gelu", up=weight, amax=amax))
        return [gemm(a, b, layout=layout, backend="hopper"), y.clone(), amax.clone()]

    return step


def test_ten_thousand_launches() -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    streams = [torch.cuda.Stream() for _ in range(2)]
    steps = [
        [make(rng) for _ in range(6) for make in (_attentions, _products)] for _ in streams
    ]  # a stream's own memory
    found: list[tuple[list[Tensor], list[Tensor]]] = []
    with any_order():
        expected = [[step() for step in own] for own in steps]
        torch.cuda.synchronize()
        for n in range(2500):  # twice two kernels each
            for own, theirs, stream in zip(steps, expected, streams, strict=True):
                with torch.cuda.stream(stream):
                    results = own[n % 12]()
                if n >= 2488:
                    found.append((results, theirs[n % 12]))
        torch.cuda.synchronize()
    for results, theirs in found:
        for ours, right in zip(results, theirs, strict=True):  # all but the last bits of dq, added in no fixed order
            torch.testing.assert_close(ours, right, rtol=2**-6, atol=2**-6 * right.abs().max().item())
