"""RMSNorm and LayerNorm, forward and backward, beside torch.compile, Liger and quack."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

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


class Case(NamedTuple):
    op: str
    label: str
    memory: tuple[int, ...]  # of which x is `view`
    view: Callable[[torch.Tensor], torch.Tensor] = lambda x: x


# 128: heads of qk-norm; 5120 to 18432: no powers of 2
_OF_BOTH = ((16384, 4096), (16384, 8192), (16384, 5120), (16384, 18432))
_SIZES = {
    "rms_norm": (*_OF_BOTH, (524288, 128), (16384, 6144)),
    "layer_norm": _OF_BOTH,
}
CASES = [
    *(Case(op, f"{M}x{N}", (M, N)) for op, sizes in _SIZES.items() for M, N in sizes),
    # rows that lie apart
    Case("rms_norm", "32 of 48 heads of a projection, 2x4096x128", (2, 4096, 48, 128), lambda x: x[:, :, :32]),
    Case("rms_norm", "heads before tokens, 4x32x2048x128", (4, 2048, 32, 128), lambda x: x.transpose(1, 2)),
    Case("layer_norm", "without the last token, 8x2048x4096", (8, 2049, 4096), lambda x: x[:, :-1]),
]


def _inputs(case: Case, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """x, weight and bias; those of them that have gradients; the result's gradient."""
    made = [
        torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in (case.memory, *2 * (case.memory[-1:],))
    ]
    inputs = [x.requires_grad_() for x in (case.view(made[0]), *made[1:])]
    leaves = inputs if case.op == "layer_norm" else inputs[:2]
    return inputs, leaves, torch.randn(inputs[0].shape, device=device, dtype=torch.bfloat16)


def launch() -> None:
    """Ours on meta tensors: for `ahead.build`."""
    for case in CASES:
        inputs, leaves, dy = _inputs(case, "meta")
        torch.autograd.grad(OURS[case.op](*inputs), leaves, dy)
        with torch.no_grad():
            OURS[case.op](*inputs)


def _rows(case: Case) -> Iterator[str]:
    inputs, leaves, dy = _inputs(case, "cuda")
    theirs = _theirs(case.op, dy.shape[-1])
    if not inputs[0].is_contiguous():
        # the others take no such views
        theirs = {"torch.compile": theirs["torch.compile"]}
    variants = {"powertrain": OURS[case.op]} | theirs
    with torch.no_grad():
        forward = measure({name: lambda f=f: f(*inputs) for name, f in variants.items()})
    yield table(f"{case.op} {case.label} bf16 fwd", forward, num_bytes=2 * 2 * dy.numel())
    outputs = {name: f(*inputs) for name, f in variants.items()}
    backward = measure(
        {n: lambda y=y: torch.autograd.grad(y, leaves, dy, retain_graph=True) for n, y in outputs.items()}
    )
    yield table(f"{case.op} {case.label} bf16 bwd", backward, num_bytes=3 * 2 * dy.numel())


def run() -> Iterator[str]:
    for case in CASES:
        yield from _rows(case)
