"""SwiGLU, tanh GELU and GELU with a bias, forward and backward, beside torch.compile and Liger."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers import peer
from powertrain.ops.activations import gelu, swiglu
from powertrain.testing.bench import measure, table

# 4304: SigLIP's; 3072: BERT's; 2049: rows that begin at odd addresses
SIZES = ((16384, 14336), (25000, 4304), (21845, 3072), (32752, 2049))


OURS = {"swiglu": swiglu, "gelu_tanh": lambda x: gelu(x, approximate="tanh"), "gelu with a bias": gelu}


def _theirs(op: str) -> dict[str, Callable[..., Tensor]]:
    if op == "gelu_tanh":
        found = {
            "torch.compile": torch.compile(lambda x: F.gelu(x, approximate="tanh"), dynamic=False),
        }
    elif op == "gelu with a bias":
        found = {"torch.compile": torch.compile(lambda x, bias: F.gelu(x + bias), dynamic=False)}
    else:
        liger = peer("liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
        found = {
            "torch.compile": torch.compile(lambda gate, up: F.silu(gate) * up, dynamic=False),
            "liger": liger and liger.apply,
        }
    return {name: function for name, function in found.items() if function is not None}


def _measure(op: str, leaves: list[Tensor], dy: Tensor) -> Iterator[str]:
    variants, (M, N) = {"powertrain": OURS[op]} | _theirs(op), dy.shape
    large = sum(x.dim() == 2 for x in leaves)
    with torch.no_grad():
        forward = measure({name: lambda f=f: f(*leaves) for name, f in variants.items()})
    yield table(f"{op} {M}x{N} bf16 fwd", forward, num_bytes=(large + 1) * 2 * M * N)
    outputs = {name: f(*leaves) for name, f in variants.items()}
    backward = measure(
        {n: lambda y=y: torch.autograd.grad(y, leaves, dy, retain_graph=True) for n, y in outputs.items()}
    )
    yield table(f"{op} {M}x{N} bf16 bwd", backward, num_bytes=(2 * large + 1) * 2 * M * N)


def _inputs(size: tuple[int, int], device: str) -> tuple[dict[str, list[Tensor]], Tensor]:
    """Of each op, and the result's gradient."""
    gate, up = (torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    bias = torch.randn(size[1], device=device, dtype=torch.bfloat16, requires_grad=True)
    return {"swiglu": [gate, up], "gelu_tanh": [gate], "gelu with a bias": [gate, bias]}, torch.randn_like(gate)


def launch() -> None:
    """Ours on meta tensors: for `ahead.build`."""
    for size in SIZES:
        inputs, dy = _inputs(size, "meta")
        for op, leaves in inputs.items():
            torch.autograd.grad(OURS[op](*leaves), leaves, dy)
            with torch.no_grad():
                OURS[op](*leaves)


def run() -> Iterator[str]:
    for size in SIZES:
        inputs, dy = _inputs(size, "cuda")
        for op, leaves in inputs.items():
            yield from _measure(op, leaves, dy)
