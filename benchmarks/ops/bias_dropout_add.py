"""Bias + dropout + residual, forward and backward, beside torch.compile."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.bias_dropout_add import bias_dropout_add
from powertrain.testing.bench import measure, table

SIZES = ((16384, 4096), (87381, 768), (262144, 256), (32752, 2049), (2048, 3072))
PROBABILITIES = (0.1, 0.0)


def _plain(x: Tensor, bias: Tensor, residual: Tensor, p: float) -> Tensor:
    return residual + F.dropout(x + bias, p)


def _leaves(M: int, N: int, device: str) -> list[Tensor]:
    shapes = ((M, N), (N,), (M, N))
    return [torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def launch() -> None:
    for M, N in SIZES:
        leaves = _leaves(M, N, "meta")
        for p in PROBABILITIES:
            torch.autograd.grad(bias_dropout_add(*leaves, p), leaves, leaves[0].detach())


def _tables(M: int, N: int, p: float) -> Iterator[str]:
    leaves = _leaves(M, N, "cuda")
    dy = torch.randn_like(leaves[0])
    functions = {"powertrain": bias_dropout_add, "torch.compile": torch.compile(_plain, dynamic=False)}
    with torch.no_grad():
        forward = measure({name: lambda f=f: f(*leaves, p) for name, f in functions.items()})
    yield table(f"bias_dropout_add {M}x{N} p{p} bf16 fwd", forward, num_bytes=3 * 2 * M * N)
    outputs = {name: f(*leaves, p) for name, f in functions.items()}
    backward = measure(
        {name: lambda y=y: torch.autograd.grad(y, leaves, dy, retain_graph=True) for name, y in outputs.items()}
    )
    # without dropout dy is dx: it is read for the bias's gradient
    yield table(f"bias_dropout_add {M}x{N} p{p} bf16 bwd", backward, num_bytes=(2 if p else 1) * 2 * M * N)


def run() -> Iterator[str]:
    for M, N in SIZES:
        for p in PROBABILITIES:
            yield from _tables(M, N, p)
            torch._dynamo.reset()
