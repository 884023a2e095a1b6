"""RMSNorm and LayerNorm, forward and backward, beside torch.compile, Liger and quack."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.peers import peer
from powertrain.ops.norm import layer_norm, rms_norm
from powertrain.testing.bench import measure, table

OURS = {"rms_norm": lambda x, w, b: rms_norm(x, w), "layer_norm": layer_norm}


def _theirs(op: str, N: int) -> dict[str, Callable[..., torch.Tensor]]:
    if op == "rms_norm":
        found = {
            "torch.compile": torch.compile(lambda x, w, b: F.rms_norm(x, (N,), w, 1e-6), dynamic=False),
            "liger": peer("liger_kernel.ops.rms_norm", "LigerRMSNormFunction"),
            "quack": peer("quack", "rmsnorm"),
        }
        liger, quack = found["liger"], found["quack"]
        found["liger"] = liger and (lambda x, w, b: liger.apply(x, w, 1e-6, 0.0, "llama", False))
        found["quack"] = quack and (lambda x, w, b: quack(x, w, eps=1e-6))
    else:
        liger = peer("liger_kernel.ops.layer_norm", "LigerLayerNormFunction")
        found = {
            "torch.compile": torch.compile(lambda x, w, b: F.layer_norm(x, (N,), w, b), dynamic=False),
            "liger": liger and (lambda x, w, b: liger.apply(x, w, b, 1e-5)),
        }
    return {name: function for name, function in found.items() if function is not None}


def _inputs(op: str, M: int, N: int, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """x, weight and bias; those of them that have gradients; the result's gradient."""
    shapes = (M, N), (N,), (N,)
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    return inputs, inputs if op == "layer_norm" else inputs[:2], torch.randn_like(inputs[0])


def launch() -> None:
    """Ours on meta tensors: for `ahead.build`."""
    for op, sizes in SIZES.items():
        for M, N in sizes:
            inputs, leaves, dy = _inputs(op, M, N, "meta")
            torch.autograd.grad(OURS[op](*inputs), leaves, dy)
            with torch.no_grad():
                OURS[op](*inputs)


def _rows(op: str, M: int, N: int) -> Iterator[str]:
    inputs, leaves, dy = _inputs(op, M, N, "cuda")
    variants = {"powertrain": OURS[op]} | _theirs(op, N)
    with torch.no_grad():
        forward = measure({name: lambda f=f: f(*inputs) for name, f in variants.items()})
    yield table(f"{op} {M}x{N} bf16 fwd", forward, num_bytes=2 * 2 * M * N)
    outputs = {name: f(*inputs) for name, f in variants.items()}
    backward = measure(
        {n: lambda y=y: torch.autograd.grad(y, leaves, dy, retain_graph=True) for n, y in outputs.items()}
    )
    yield table(f"{op} {M}x{N} bf16 bwd", backward, num_bytes=3 * 2 * M * N)


# 128: heads of qk-norm; 5120 to 18432: no powers of 2
_OF_BOTH = ((16384, 4096), (16384, 8192), (16384, 5120), (16384, 18432))
SIZES = {
    "rms_norm": (*_OF_BOTH, (524288, 128), (16384, 6144)),
    "layer_norm": _OF_BOTH,
}


def run() -> Iterator[str]:
    for op, sizes in SIZES.items():
        for M, N in sizes:
            yield from _rows(op, M, N)
