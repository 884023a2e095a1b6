"""Log-probabilities of a linear layer, forward and both ways, beside torch.compile, eager PyTorch and Liger's loss."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers import peer
from powertrain.ops.linear_log_probs import Teacher, linear_log_probs
from powertrain.testing.bench import measure, table

T, D = 8192, 4096
VOCABULARIES = (50257, 128256, 151936)  # GPT-NeoX, Llama 3, Qwen 3


def _plain(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.log_softmax(F.linear(x, w).float(), -1).gather(-1, y[:, None])[:, 0]


def _variants() -> dict[str, Callable[..., Tensor]]:
    liger = peer("liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
    found: dict[str, Any] = {
        "powertrain": lambda x, w, y: linear_log_probs(x, w, y).log_probs,
        "kept logits": lambda x, w, y: linear_log_probs(x, w, y, keep_logits=True).log_probs,
        "entropy": lambda x, w, y: linear_log_probs(x, w, y, entropy=True).log_probs,
        "invariant": lambda x, w, y: linear_log_probs(x, w, y, batch_invariant=True).log_probs,
        "teacher": lambda x, w, y: linear_log_probs(x, w, y, teacher=Teacher(x, w)).divergence,
        "torch.compile": torch.compile(_plain, dynamic=False),
        "torch": _plain,
        # its loss of each token: bias, class weights, ignore_index, z-loss, smoothing, reduction
        "liger": liger and (lambda x, w, y: -liger.apply(x, w, y, None, None, -100, 0.0, 0.0, "none")[0]),
    }
    return {name: function for name, function in found.items() if function is not None}


def _forward(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return function(*inputs)


def _both(function: Callable[..., Tensor], x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(function(x, w, y).sum(), (x, w), allow_unused=True)


def run() -> Iterator[str]:
    for V in VOCABULARIES:
        x = torch.randn(T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        w = (torch.randn(V, D, device="cuda", dtype=torch.bfloat16) * D**-0.5).requires_grad_()
        y = torch.randint(0, V, (T,), device="cuda")
        for name, call, products in (("forward", _forward, 1), ("both", _both, 3)):
            variants = {label: partial(call, f, x, w, y) for label, f in _variants().items()}
            title = f"linear_log_probs {name} {T}x{D}x{V} bf16"
            yield table(title, measure(variants, seconds=0.5), flops=2 * products * T * D * V)
