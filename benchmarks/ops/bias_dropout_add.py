"""Bias + dropout + residual, forward and backward, beside torch.compile."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.bias_dropout_add import bias_dropout_add
from powertrain.testing.bench import measure, table


def _plain(x: Tensor, bias: Tensor, residual: Tensor, p: float) -> Tensor:
    return residual + F.dropout(x + bias, p)


def run() -> Iterator[str]:
    M, N = 16384, 4096
    x, residual = (torch.randn(M, N, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    bias = torch.randn(N, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    for p in (0.1, 0.0):
        variants = {
            "powertrain": partial(bias_dropout_add, p=p),
            "torch.compile": partial(torch.compile(_plain, dynamic=False), p=p),
        }
        with torch.no_grad():
            forward = measure({name: lambda f=f: f(x, bias, residual) for name, f in variants.items()})
        yield table(f"bias_dropout_add {M}x{N} p{p} bf16 fwd", forward, num_bytes=3 * 2 * M * N)
        outputs = {name: f(x, bias, residual) for name, f in variants.items()}
        backward = measure(
            {
                n: lambda y=y: torch.autograd.grad(y, (x, bias, residual), dy, retain_graph=True)
                for n, y in outputs.items()
            }
        )
        yield table(f"bias_dropout_add {M}x{N} p{p} bf16 bwd", backward, num_bytes=2 * 2 * M * N)
