"""Cross entropy, forward and backward, beside torch.compile, Liger and quack; an odd vocabulary too."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers import peer
from powertrain.ops.cross_entropy import cross_entropy
from powertrain.testing.bench import measure, table

# of classifiers and small vocabularies too; 159: rows that begin at odd addresses
SIZES = ((8192, 128256), (8192, 50257), (32768, 1000), (32768, 128), (65536, 159), (200000, 10))


def _variants() -> dict[str, Callable[..., Tensor]]:
    quack = peer("quack", "cross_entropy")
    liger = peer("liger_kernel.ops.cross_entropy", "LigerCrossEntropyFunction")
    found = {
        "powertrain": cross_entropy,
        "grad_in_fwd": lambda x, y: cross_entropy(x, y, grad_in_forward=True),
        "torch.compile": torch.compile(lambda x, y: F.cross_entropy(x.float(), y), dynamic=False),
        "quack": quack and (lambda x, y: quack(x, y, reduction="mean")),
        # overwrites its input, so each call needs a copy that is not timed elsewhere: shown with it
        "liger (+clone)": liger
        and (lambda x, y: liger.apply(x.clone(), y, None, -100, 0.0, 0.0, "mean", None, False)[0]),
    }
    return {name: function for name, function in found.items() if function is not None}


def _both(function: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    return torch.autograd.grad(function(x, y), x)[0]


def launch() -> None:
    """Ours on meta tensors: for `ahead.build`."""
    for T, V in SIZES:
        x = torch.empty(T, V, device="meta", dtype=torch.bfloat16, requires_grad=True)
        y = torch.empty(T, device="meta", dtype=torch.int64)
        with torch.no_grad():
            cross_entropy(x, y)
        for early in (False, True):
            torch.autograd.grad(cross_entropy(x, y, grad_in_forward=early), x)


def _measure(T: int, V: int) -> Iterator[str]:
    x = torch.randn(T, V, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.randint(0, V, (T,), device="cuda")
    variants = _variants()
    with torch.no_grad():
        forward = measure({name: lambda f=f: f(x, y) for name, f in variants.items() if name != "grad_in_fwd"})
    yield table(f"cross_entropy {T}x{V} bf16 fwd", forward, num_bytes=2 * T * V)
    both = measure({name: lambda f=f: _both(f, x, y) for name, f in variants.items()})
    yield table(f"cross_entropy {T}x{V} bf16 fwd+bwd", both, num_bytes=6 * T * V)


def run() -> Iterator[str]:
    for T, V in SIZES:
        yield from _measure(T, V)
        torch._dynamo.reset()
