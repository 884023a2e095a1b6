"""Linear + cross entropy, forward and backward, beside torch.compile, eager PyTorch and Liger."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers import peer
from powertrain.ops.linear_cross_entropy import linear_cross_entropy
from powertrain.testing.bench import measure, table

# tokens, hidden size, vocabulary; 50257 and 100277 are odd
SIZES = (
    (8192, 4096, 128256),
    *((3000, 2048, V) for V in (32000, 50257, 50304, 100277, 128256, 151936, 152064, 256000)),
)


def _plain(x: Tensor, w: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y, reduction=reduction)


def _ours(main_grad: Tensor) -> dict[str, Callable[..., Tensor]]:
    return {
        "powertrain": linear_cross_entropy,
        "main_grad": lambda x, w, y: linear_cross_entropy(x, w, y, main_grad=main_grad),
        "none": lambda x, w, y: linear_cross_entropy(x, w, y, reduction="none").sum(),
    }


def _theirs() -> dict[str, Callable[..., Tensor]]:
    liger = peer("liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
    found: dict[str, Any] = {
        "torch.compile": torch.compile(_plain, dynamic=False),
        "torch": _plain,
        "liger": liger and (lambda x, w, y: liger.apply(x, w, y)[0]),
    }
    return {name: function for name, function in found.items() if function is not None}


def _both(function: Callable[..., Tensor], x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(function(x, w, y), (x, w), allow_unused=True)


def _inputs(T: int, D: int, V: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, targets, and the main gradient of the weight."""
    x = torch.randn(T, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(V, D, device=device, dtype=torch.bfloat16) * D**-0.5).requires_grad_()
    return x, w, torch.randint(0, V, (T,), device=device), torch.zeros(V, D, device=device)


def launch() -> None:
    """Ours on meta tensors: for `ahead.build`."""
    for size in SIZES:
        *inputs, main_grad = _inputs(*size, device="meta")
        for function in _ours(main_grad).values():
            _both(function, *inputs)


def run() -> Iterator[str]:
    for T, D, V in SIZES:
        *inputs, main_grad = _inputs(T, D, V, "cuda")
        every = _ours(main_grad) | _theirs()
        variants = {name: lambda f=f, inputs=inputs: _both(f, *inputs) for name, f in every.items()}
        yield table(f"linear_cross_entropy {T}x{D}x{V} bf16", measure(variants, seconds=0.3), flops=6 * T * D * V)
