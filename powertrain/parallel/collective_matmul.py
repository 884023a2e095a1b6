"""GEMMs overlapped with their collectives: tensor and sequence parallelism over one group of ranks.

    all_gather_gemm        y_i = gather(x) w_iᵀ          x's rows are sharded; w_i's rows (features out) are this rank's
    gemm_reduce_scatter    y = scatter(sum(x wᵀ))        w's columns (features in) are this rank's; y's rows are sharded
    gemm_all_reduce        y = sum(x wᵀ)                 the same, with all rows of y on every rank
    replicated_gemm        y_i = x w_iᵀ                  x whole on every rank; its gradient is the sum over ranks

They are each other's backward: dx of the first is a gemm_reduce_scatter of dy, dx of the second an all_gather_gemm, and
the rows gathered for one product serve the other. Products are computed one rank's rows at a time, in the order in
which rows arrive or are sent, so that transfers overlap with computation. Each has a sequential form (a collective,
then the product), which the planner takes where that is faster.

Saved: x (this rank's rows) and the weights; backward gathers x again, behind the product for dx. Products accumulate in
float32 and are rounded to the inputs' dtype; these parts are summed over ranks in float32 in rank order, so the bits
are reproducible (the sequential reduce-scatter: as the library does it).
"""

from collections.abc import Sequence
from math import prod
from typing import Any, overload

import torch
from torch import Tensor

from powertrain.ops.linear_cross_entropy import IntoMainGrad
from powertrain.parallel.cost_model import Product
from powertrain.parallel.matmul_arguments import checked_operands, checked_shares
from powertrain.parallel.overlap import Overlap, find
from powertrain.parallel.overlapped_products import (
    MAX_WEIGHTS,
    Maybe,
    Tensors,
    gather_multiply,
    gradient_of,
    marks_broken,
    multiply,
    multiply_all_reduce,
    multiply_gathered,
    multiply_scatter,
    pairs_with_grad,
    present,
    save_for_backward,
    saved_tensors,
    weight_grad,
)
from powertrain.parallel.transport.base import RowCounts
from powertrain.parallel.transport.collective import Collected
from powertrain.runtime.dispatch import Op
from powertrain.runtime.flops import Shape
from powertrain.runtime.positional import hinted

_PADDING = (None,) * MAX_WEIGHTS


# -- all_gather_gemm: (x, w0, w1, w2, b0, b1, b2, counts, key) -> (y0, y1, y2)


@marks_broken
def _all_gather_fwd(x: Tensor, w0: Tensor, w1: Maybe, w2: Maybe, *rest: Any) -> tuple[Maybe, ...]:
    *biases, counts, key = rest
    weights = present(w0, w1, w2)
    ys = [x.new_empty((sum(counts), w.shape[0])) for w in weights]
    # keep=False: the gathered rows are needed for this product only
    gathering = gather_multiply(x, weights, biases[: len(weights)], RowCounts(tuple(counts)), find(key), ys, keep=False)
    gathering.finish(ys)
    return (*ys, *_PADDING)[:MAX_WEIGHTS]


def _all_gather_outputs(x: Tensor, w0: Tensor, w1: Maybe, w2: Maybe, *rest: Any) -> tuple[Maybe, ...]:
    ys = [x.new_empty((sum(rest[-2]), w.shape[0])) for w in present(w0, w1, w2)]
    return (*ys, *_PADDING)[:MAX_WEIGHTS]


def _all_gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w0, w1, w2, *_, ctx.counts, ctx.key = inputs
    save_for_backward(ctx, x, w0, w1, w2)


def _all_gather_backward(ctx: Any, *dys: Maybe) -> tuple[Maybe, ...]:
    x, *weights = saved_tensors(ctx)
    need_x, *need = ctx.needs_input_grad[: 1 + 2 * MAX_WEIGHTS]
    need_w, need_b = need[:MAX_WEIGHTS], need[MAX_WEIGHTS:]
    dx, dw0, dw1, dw2 = _all_gather_grads_op(x, *weights, *dys, need_x, need_w, ctx.counts, ctx.key, ctx.into_main)
    dbs = [dy.sum(0) if n and dy is not None else None for dy, n in zip(dys, need_b, strict=True)]
    dws = [d if n and dy is not None else None for d, n, dy in zip((dw0, dw1, dw2), need_w, dys, strict=True)]
    return (dx if need_x else None, *dws, *dbs, None, None)


@marks_broken
def _all_gather_grads(x: Tensor, *rest: Any) -> tuple[Maybe, ...]:
    """dx of this rank's rows, and dw_i: x is gathered during the GEMM for dx, and dx is sent during those for dw_i."""
    *tensors, need_x, need_w, counts, key, into_main = rest
    overlap, rows = find(key), RowCounts(tuple(counts))
    # a weight without any gradient takes part in neither product
    terms = pairs_with_grad(tensors)
    wanted = [term for term in terms if need_w[term[0]]]
    dws: list[Maybe] = [None] * MAX_WEIGHTS
    gathering = None
    if wanted:
        product = Product("gather", rows.total, sum(w.shape[0] for _, w, _ in terms), x.shape[1], x.dtype)
        in_sequence = overlap.planner.choose(product).way == "sequential"
        transport = overlap.transport
        # saved x is this rank's rows only: gathering again costs less memory than keeping [M, K]
        gathering = Collected(transport, x, rows) if in_sequence else transport.gather(x, rows, keep=True)

    # called while dx's parts are sent
    def weight_grads() -> None:
        if gathering is None:
            return
        for rank in gathering.order:
            gathering.wait(rank)
        for i, w, dy in wanted:
            dws[i] = weight_grad(dy, gathering.whole, w, into_main)
        gathering.finish([gradient_of(w, dws[i]) for i, w, _ in wanted])

    dx = None
    if need_x and terms:
        weights = [w.T for _, w, _ in terms]
        # one scatter for the sum over all weights, instead of one each
        dx = multiply_scatter([dy for *_, dy in terms], weights, None, rows, overlap, weight_grads)
    else:
        weight_grads()
    return (dx, *dws)


def _all_gather_grads_outputs(x: Tensor, *rest: Any) -> tuple[Maybe, ...]:
    *tensors, need_x, need_w, _, _, _ = rest
    dws = [torch.empty_like(w) if n and w is not None else None for w, n in zip(tensors[:3], need_w, strict=True)]
    return (torch.empty_like(x) if need_x else None, *dws)


def _weights_flops(rows: int, w0: Shape, w1: Shape | None, w2: Shape | None) -> int:
    return 2 * rows * sum(prod(w) for w in (w0, w1, w2) if w)


def _all_gather_flops(w0: Shape, w1: Shape | None, w2: Shape | None, counts: Sequence[int], **_: Any) -> int:
    return _weights_flops(sum(counts), w0, w1, w2)


def _grads_flops(need_x: bool, need_w: Sequence[bool], **arguments: Any) -> int:
    """FLOPs of the backward of `all_gather_gemm` and `replicated_gemm`, for outputs that have a gradient."""
    pairs = [(arguments[f"w{n}"], arguments[f"dy{n}"]) for n in range(3)]
    terms = zip(pairs, need_w, strict=True)
    return sum(2 * dy[0] * prod(w) * (need_x + need) for (w, dy), need in terms if w and dy)


_WEIGHTS = "Tensor w0, Tensor? w1, Tensor? w2"
_all_gather_grads_op = Op(
    f"all_gather_gemm_bwd(Tensor x, {_WEIGHTS}, Tensor? dy0, Tensor? dy1, Tensor? dy2, bool need_x, bool[] need_w, "
    "SymInt[] counts, str key, bool into_main) -> (Tensor, Tensor, Tensor, Tensor)",
    _all_gather_grads,
    _all_gather_grads_outputs,
    flops=_grads_flops,
    replays=False,
)
_all_gather_op = Op(
    f"all_gather_gemm(Tensor x, {_WEIGHTS}, Tensor? b0, Tensor? b1, Tensor? b2, SymInt[] counts, str key) "
    "-> (Tensor, Tensor, Tensor)",
    _all_gather_fwd,
    _all_gather_outputs,
    backward=_all_gather_backward,
    setup_context=_all_gather_setup,
    flops=_all_gather_flops,
    replays=False,
)


# -- gemm_reduce_scatter: (x, w, bias, counts, key) -> y


@marks_broken
def _reduce_scatter_fwd(x: Tensor, w: Tensor, bias: Maybe, counts: Sequence[int], key: str) -> Tensor:
    return multiply_scatter([x], [w], bias, RowCounts(tuple(counts)), find(key))


def _reduce_scatter_outputs(x: Tensor, w: Tensor, bias: Maybe, counts: Sequence[int], key: str) -> Tensor:
    return x.new_empty((counts[find(key).rank], w.shape[0]))


def _reduce_scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, _, ctx.counts, ctx.key = inputs
    save_for_backward(ctx, x, w)


def _reduce_scatter_backward(ctx: Any, dy: Maybe) -> tuple[Maybe, ...]:
    if dy is None:
        return (None,) * 5
    x, w = saved_tensors(ctx)
    need = ctx.needs_input_grad[:3]
    grads = _reduce_scatter_grads_op(dy.contiguous(), x, w, need, ctx.counts, ctx.key, ctx.into_main)
    return *(grad if wanted else None for grad, wanted in zip(grads, need, strict=True)), None, None


@marks_broken
def _reduce_scatter_grads(
    dy: Tensor, x: Tensor, w: Tensor, need: Sequence[bool], counts: Sequence[int], key: str, into_main: bool
) -> tuple[Maybe, Maybe, Maybe]:
    """dx = gather(dy) w as dy's rows arrive; dw and db from all of them. need: of dx, dw and db."""
    overlap, rows = find(key), RowCounts(tuple(counts))
    need_x, need_w, need_b = need
    dx = x.new_empty(x.shape) if need_x else None
    keep = need_w or need_b
    if dx is not None:
        gathering = gather_multiply(dy, [w.T], [None], rows, overlap, [dx], keep=keep)
    else:
        gathering = overlap.transport.gather(dy, rows, keep=keep)
        multiply_gathered(gathering, [], [], rows, [])
    dw = weight_grad(gathering.whole, x, w, into_main) if need_w else None
    # every rank has the bias, so every one sums all rows
    db = gathering.whole.sum(0) if need_b else None
    gathering.finish(present(dx, gradient_of(w, dw) if need_w else None, db))
    return dx, dw, db


def _reduce_scatter_grads_outputs(
    dy: Tensor, x: Tensor, w: Tensor, need: Sequence[bool], counts: Sequence[int], key: str, into_main: bool
) -> tuple[Maybe, Maybe, Maybe]:
    need_x, need_w, need_b = need
    return (
        torch.empty_like(x) if need_x else None,
        torch.empty_like(w) if need_w else None,
        dy.new_empty(dy.shape[1:]) if need_b else None,
    )


def _product_flops(x: Shape, w: Shape, **_: Any) -> int:
    return 2 * x[0] * prod(w)


def _reduce_scatter_grads_flops(x: Shape, w: Shape, need: Sequence[bool], **_: Any) -> int:
    need_x, need_w, _need_b = need
    return 2 * x[0] * prod(w) * (need_x + need_w)


_reduce_scatter_grads_op = Op(
    "gemm_reduce_scatter_bwd(Tensor dy, Tensor x, Tensor w, bool[] need, SymInt[] counts, str key, bool into_main) "
    "-> (Tensor, Tensor, Tensor)",
    _reduce_scatter_grads,
    _reduce_scatter_grads_outputs,
    flops=_reduce_scatter_grads_flops,
    replays=False,
)
_reduce_scatter_op = Op(
    "gemm_reduce_scatter(Tensor x, Tensor w, Tensor? bias, SymInt[] counts, str key) -> Tensor",
    _reduce_scatter_fwd,
    _reduce_scatter_outputs,
    backward=_reduce_scatter_backward,
    setup_context=_reduce_scatter_setup,
    flops=_product_flops,
    replays=False,
)


# -- gemm_all_reduce: (x, w, bias, key) -> y


@marks_broken
def _all_reduce_fwd(x: Tensor, w: Tensor, bias: Maybe, key: str) -> Tensor:
    return multiply_all_reduce([x], [w], bias, find(key))


def _all_reduce_outputs(x: Tensor, w: Tensor, bias: Maybe, key: str) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0]))


def _all_reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, _, _ = inputs
    save_for_backward(ctx, x, w)


def _all_reduce_backward(ctx: Any, dy: Maybe) -> tuple[Maybe, ...]:
    if dy is None:
        return (None,) * 4
    x, w = saved_tensors(ctx)
    need_x, need_w, need_b = ctx.needs_input_grad[:3]
    # y, and so dy, is the same on every rank: no communication
    return (
        dy @ w if need_x else None,
        weight_grad(dy, x, w, ctx.into_main) if need_w else None,
        dy.sum(0) if need_b else None,
        None,
    )


_all_reduce_op = Op(
    "gemm_all_reduce(Tensor x, Tensor w, Tensor? bias, str key) -> Tensor",
    _all_reduce_fwd,
    _all_reduce_outputs,
    backward=_all_reduce_backward,
    setup_context=_all_reduce_setup,
    flops=_product_flops,
    replays=False,
)


# -- replicated_gemm: (x, w0, w1, w2, b0, b1, b2, key) -> (y0, y1, y2)


def _replicated_fwd(x: Tensor, w0: Tensor, w1: Maybe, w2: Maybe, *rest: Any) -> tuple[Maybe, ...]:
    ys = _replicated_outputs(x, w0, w1, w2, *rest)
    for w, bias, y in zip((w0, w1, w2), rest, ys, strict=False):
        if w is not None and y is not None:
            multiply(x, w.T, bias, y)
    return ys


def _replicated_outputs(x: Tensor, w0: Tensor, w1: Maybe, w2: Maybe, *rest: Any) -> tuple[Maybe, ...]:
    ys = [x.new_empty((x.shape[0], w.shape[0])) for w in present(w0, w1, w2)]
    return (*ys, *_PADDING)[:MAX_WEIGHTS]


def _replicated_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w0, w1, w2, *_, ctx.key = inputs
    save_for_backward(ctx, x, w0, w1, w2)


def _replicated_backward(ctx: Any, *dys: Maybe) -> tuple[Maybe, ...]:
    x, *weights = saved_tensors(ctx)
    need_x, *need = ctx.needs_input_grad[: 1 + 2 * MAX_WEIGHTS]
    need_w, need_b = need[:MAX_WEIGHTS], need[MAX_WEIGHTS:]
    grads = _replicated_grads_op(x, *weights, *dys, need_x, need_w, ctx.key, ctx.into_main)
    dws = [d if n and dy is not None else None for d, n, dy in zip(grads[1:], need_w, dys, strict=True)]
    dbs = [dy.sum(0) if n and dy is not None else None for dy, n in zip(dys, need_b, strict=True)]
    return (grads[0] if need_x else None, *dws, *dbs, None)


@marks_broken
def _replicated_grads(x: Tensor, *rest: Any) -> tuple[Maybe, ...]:
    *tensors, need_x, need_w, key, into_main = rest
    terms = pairs_with_grad(tensors)
    dws: list[Maybe] = [None] * MAX_WEIGHTS

    def weight_grads() -> None:
        for i, w, dy in terms:
            if need_w[i]:
                dws[i] = weight_grad(dy, x, w, into_main)

    dx = None
    if need_x and terms:
        dx = multiply_all_reduce([dy for *_, dy in terms], [w.T for _, w, _ in terms], None, find(key), weight_grads)
    else:
        weight_grads()
    return (dx, *dws)


def _replicated_grads_outputs(x: Tensor, *rest: Any) -> tuple[Maybe, ...]:
    *tensors, need_x, need_w, _, _ = rest
    dws = [torch.empty_like(w) if n and w is not None else None for w, n in zip(tensors[:3], need_w, strict=True)]
    return (torch.empty_like(x) if need_x else None, *dws)


def _replicated_flops(x: Shape, w0: Shape, w1: Shape | None, w2: Shape | None, **_: Any) -> int:
    return _weights_flops(x[0], w0, w1, w2)


_replicated_grads_op = Op(
    f"replicated_gemm_bwd(Tensor x, {_WEIGHTS}, Tensor? dy0, Tensor? dy1, Tensor? dy2, bool need_x, bool[] need_w, "
    "str key, bool into_main) -> (Tensor, Tensor, Tensor, Tensor)",
    _replicated_grads,
    _replicated_grads_outputs,
    flops=_grads_flops,
    replays=False,
)
_replicated_op = Op(
    f"replicated_gemm(Tensor x, {_WEIGHTS}, Tensor? b0, Tensor? b1, Tensor? b2, str key) -> (Tensor, Tensor, Tensor)",
    _replicated_fwd,
    _replicated_outputs,
    backward=_replicated_backward,
    setup_context=_replicated_setup,
    flops=_replicated_flops,
    replays=False,
)


# -- public functions


def _as_list(value: Any) -> tuple[list[Any], bool]:
    return (list(value), True) if isinstance(value, list | tuple) else ([value], False)


def _alone(x: Tensor, weights: Tensors, biases: Sequence[Maybe]) -> list[Tensor]:
    """The GEMMs of a group of one rank."""
    # autograd's own linear knows no main_grad
    # a group of one rank needs no transport
    mains = [getattr(w, "main_grad", None) for w in weights]
    weights = [w if main is None else IntoMainGrad.apply(w, main) for w, main in zip(weights, mains, strict=True)]
    return [torch.nn.functional.linear(x, w, bias) for w, bias in zip(weights, biases, strict=True)]


@overload
def all_gather_gemm(
    x: Tensor,
    weight: Tensor,
    overlap: Overlap,
    *,
    bias: Maybe = None,
    rows: Sequence[int] | None = None,
    layer: str = "",
) -> Tensor: ...
@overload
def all_gather_gemm(
    x: Tensor, weight: Tensors, overlap: Overlap, *, bias: Sequence[Maybe] | None = None,
    rows: Sequence[int] | None = None, layer: str = "",
) -> list[Tensor]: ...  # fmt: skip
@hinted
def all_gather_gemm(
    x: Tensor,
    weight: Tensor | Tensors,
    overlap: Overlap,
    *,
    bias: Maybe | Sequence[Maybe] = None,
    rows: Sequence[int] | None = None,
    layer: str = "",
) -> Tensor | list[Tensor]:
    """`gather(x) @ weight.T + bias`, where x's rows are sharded over the ranks: a column-parallel layer's forward.

    Shapes: m rows here, M on all ranks, K features in, N features out on this rank.
        x        [m, K]   float32, float16, bfloat16 (float64 on the CPU)
        weight   [N, K]   this rank's rows of it; or up to three that share the all-gather (query, key, value)
        bias     [N]      one per weight, or None
        rows     every rank's m, where they differ (Overlap.exchange_rows gathers them); None: all have x's
        layer    the layer's name, for messages
    Returns y [M, N], rows in the order of the ranks; a list if weight is one.
    Memory: saves x and weight, not the gathered rows; [M, K] is allocated while the call runs, in backward too.
    Numerics, backward: above. A weight with `main_grad` gets its gradient added there, in its dtype; within
        torch.compile it gets it as `grad`.
    Errors: ValueError naming the argument; PeerTimeout if a rank is gone; CollectiveMismatch (Overlap(debug=True)).
    Source: Wang et al., Overlap communication with dependent computation via decomposition, ASPLOS 2023.
    """
    weights, many = _as_list(weight)
    biases, _ = _as_list(bias) if bias is not None else ([None] * len(weights), False)
    x, operands = checked_operands("all_gather_gemm", x, weights, biases)
    counts = overlap.rows(x.shape[0], rows).counts
    if overlap.size == 1:
        # no op and no key: a single process never opens an overlap's transport
        ys = _alone(x, *(operands[i : i + len(weights)] for i in (0, MAX_WEIGHTS)))  # type: ignore[arg-type]
    else:
        # in debug mode only: the comparison is a collective of its own
        overlap.transport.compare("all_gather_gemm", counts, [x[:0], *operands])
        ys = list(_all_gather_op(x, *operands, list(counts), overlap.key_for(layer)))[: len(weights)]
    return ys if many else ys[0]


@hinted
def gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    overlap: Overlap,
    *,
    bias: Maybe = None,
    rows: Sequence[int] | None = None,
    layer: str = "",
) -> Tensor:
    """This rank's rows of the sum over ranks of `x @ weight.T`, plus bias: a row-parallel layer's forward.

    Shapes: M rows on every rank, m of the result here, K features in on this rank, N features out.
        x        [M, K]
        weight   [N, K]   this rank's columns of it
        bias     [N]      the same on every rank; added once
        rows     every rank's m, summing to M; None: M / ranks each, which must divide
        layer    as above
    Returns y [m, N]. Memory: saves x and weight; one buffer as large as the result per rank while the call runs.
    Numerics, backward, errors, dtypes and source: as `all_gather_gemm`.
    """
    op = "gemm_reduce_scatter"
    x, (weight, _, _, bias, *_) = checked_operands(op, x, [weight], [bias])  # type: ignore[assignment]
    rows = checked_shares(op, x, rows, overlap)
    if overlap.size == 1:
        return _alone(x, [weight], [bias])[0]
    overlap.transport.compare(op, tuple(rows), [x[:0], weight, bias])
    y: Tensor = _reduce_scatter_op(x, weight, bias, list(rows), overlap.key_for(layer))
    return y


@hinted
def gemm_all_reduce(x: Tensor, weight: Tensor, overlap: Overlap, *, bias: Maybe = None, layer: str = "") -> Tensor:
    """The sum over ranks of `x @ weight.T`, plus bias, on every rank: row-parallel without sequence parallelism.

    x [M, K], weight [N, K], bias [N]; returns y [M, N]. Backward needs no other rank. Else as
    `gemm_reduce_scatter`.
    """
    x, (weight, _, _, bias, *_) = checked_operands("gemm_all_reduce", x, [weight], [bias])  # type: ignore[assignment]
    if overlap.size == 1:
        return _alone(x, [weight], [bias])[0]
    overlap.transport.compare("gemm_all_reduce", (x.shape[0],), [weight, bias])
    y: Tensor = _all_reduce_op(x, weight, bias, overlap.key_for(layer))
    return y


@overload
def replicated_gemm(x: Tensor, weight: Tensor, overlap: Overlap, *, bias: Maybe = None, layer: str = "") -> Tensor: ...
@overload
def replicated_gemm(
    x: Tensor, weight: Tensors, overlap: Overlap, *, bias: Sequence[Maybe] | None = None, layer: str = ""
) -> list[Tensor]: ...
@hinted
def replicated_gemm(
    x: Tensor, weight: Tensor | Tensors, overlap: Overlap, *, bias: Maybe | Sequence[Maybe] = None, layer: str = ""
) -> Tensor | list[Tensor]:
    """`x @ weight.T + bias` for an x that every rank has: a column-parallel layer without sequence parallelism.

    x [M, K], weight [N, K] or up to three, this rank's rows; returns y [M, N], or a list. Only backward communicates:
    dx is summed over the ranks, overlapped with the weights' gradients. The rest as `all_gather_gemm`.
    """
    weights, many = _as_list(weight)
    biases, _ = _as_list(bias) if bias is not None else ([None] * len(weights), False)
    x, operands = checked_operands("replicated_gemm", x, weights, biases)
    if overlap.size == 1:
        ys = _alone(x, *(operands[i : i + len(weights)] for i in (0, MAX_WEIGHTS)))  # type: ignore[arg-type]
    else:
        ys = list(_replicated_op(x, *operands, overlap.key_for(layer)))[: len(weights)]
    return ys if many else ys[0]
