"""Floating-point operations of our ops' matrix products, for torch.utils.flop_counter.FlopCounterMode: name -> formula.

They count in a FlopCounterMode that is made after the op's module was imported, as a model's are when it is built. A
formula gets an op's arguments, tensors as their shapes. As PyTorch's own: 2 for a multiply-add, elementwise work not
counted, attention as if no mask hid anything (packed sequences: as if all were equally long).
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

Shape = Sequence[int]


def _gemm(a: Shape, b: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * prod(out_shape) * (prod(a) // out_shape[0])


def _gemm_into(a: Shape, b: Shape, out: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(out) * (prod(a) // out[0])


def _grouped(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * x[0] * weight[-1] * weight[-2]


def _grouped_wgrad(dy: Shape, x: Shape, *_: Any, **__: Any) -> int:
    return 2 * dy[0] * dy[1] * x[1]


def _linear_loss(
    x: Shape, weight: Shape, bias: Any, target: Any, main_grad: Any, ignore: int, *rest: Any, **__: Any
) -> int:
    reduction, need_dx, need_dw = rest[0], rest[4], rest[5]
    return 2 * x[0] * prod(weight) * (1 + (need_dx + need_dw) * (reduction != "none"))


def _linear_loss_bwd(dloss: Any, x: Shape, weight: Shape, *rest: Any, **__: Any) -> int:
    *_, need_dx, need_dw, _ = rest
    return 2 * x[0] * prod(weight) * (1 + need_dx + need_dw)


def _vocab_loss(x: Shape, weight: Shape, bias: Any, target: Shape, *rest: Any, **__: Any) -> int:
    *_, need_dx, need_dw, _ = rest
    return 2 * target[0] * prod(weight) * (1 + need_dx + need_dw)


def _attention(query: Shape, key: Shape, value: Shape, *args: Any, **_: Any) -> int:
    pairs = _pairs(query, key, args[6], args[11])
    return 2 * pairs * (query[-1] + value[-1])


def _attention_bwd(dout: Any, dlse: Any, query: Shape, key: Shape, value: Shape, *args: Any, **_: Any) -> int:
    pairs = _pairs(query, key, args[9], args[14])
    return 2 * pairs * (3 * query[-1] + 2 * value[-1])


def _pairs(query: Shape, key: Shape, starts: Shape | None, layout: str) -> int:
    """(query, key) pairs of all heads."""
    if layout == "thd":
        sequences = starts[0] - 1 if starts else 1
        return query[0] * key[0] // max(sequences, 1) * query[1]
    sizes = dict(zip(layout, query, strict=True))
    return sizes["b"] * sizes["h"] * sizes["s"] * dict(zip(layout, key, strict=True))["s"]


def _gathered(x: Shape, *args: Any, **_: Any) -> int:
    """all_gather_gemm: x and up to three weights, three biases, every rank's rows, key."""
    return 2 * sum(args[6]) * sum(prod(w) for w in args[:3] if w is not None)


def _gathered_bwd(x: Shape, *args: Any, **_: Any) -> int:
    weights, dys, need_x, need_w = args[:3], args[3:6], args[6], args[7]
    terms = zip(weights, dys, need_w, strict=True)
    return sum(2 * dy[0] * prod(w) * (need_x + need) for w, dy, need in terms if w and dy)


def _replicated(x: Shape, *args: Any, **_: Any) -> int:
    return 2 * x[0] * sum(prod(w) for w in args[:3] if w is not None)


def _product(x: Shape, w: Shape, *_: Any, **__: Any) -> int:
    return 2 * x[0] * prod(w)


def _scattered_bwd(dy: Any, x: Shape, w: Shape, need_x: bool, need_w: bool, *_: Any, **__: Any) -> int:
    return 2 * x[0] * prod(w) * (need_x + need_w)


FORMULAS: dict[str, Callable[..., int]] = {
    "gemm": _gemm,
    "gemm_into": _gemm_into,
    "grouped_gemm_fwd": _grouped,
    "grouped_gemm_dgrad": _grouped,
    "grouped_gemm_wgrad": _grouped_wgrad,
    "linear_cross_entropy_fwd": _linear_loss,
    "linear_cross_entropy_bwd": _linear_loss_bwd,
    "linear_cross_entropy_bwd_into": _linear_loss_bwd,
    "vocab_linear_cross_entropy": _vocab_loss,
    "attention": _attention,
    "attention_hopper": _attention,
    "attention_bwd": _attention_bwd,
    "attention_hopper_bwd": _attention_bwd,
    "all_gather_gemm": _gathered,
    "all_gather_gemm_bwd": _gathered_bwd,
    "replicated_gemm": _replicated,
    "replicated_gemm_bwd": _gathered_bwd,
    "gemm_reduce_scatter": _product,
    "gemm_reduce_scatter_bwd": _scattered_bwd,
    "gemm_all_reduce": _product,
}
