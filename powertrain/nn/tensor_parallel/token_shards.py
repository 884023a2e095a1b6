"""Tokens sharded over the ranks of a group: split, gather, scatter and sum of rows, with their gradients.

Rank r holds consecutive tokens, after those of the ranks before it. A residual stream sharded this way between the
products of tensor parallelism divides its memory and the work of norms and dropout by the ranks (sequence parallelism).
"""

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from powertrain.parallel.overlap import Overlap, find
from powertrain.parallel.transport.base import RowCounts
from powertrain.runtime.dispatch import Op

# gather   every rank's rows, on every rank          slice  this rank's rows of a tensor that all ranks have
# scatter  this rank's rows of the sum over ranks    sum    the sum over ranks, on every rank     same   unchanged
How = Literal["gather", "slice", "scatter", "sum", "same"]


def even_rows(count: int, size: int) -> tuple[int, ...]:
    """`count` rows divided over `size` ranks; the first ranks have one more where it does not divide."""
    return tuple(count // size + (rank < count % size) for rank in range(size))


def _move(x: Tensor, how: str, back: str, counts: Sequence[int], key: str) -> Tensor:
    overlap, rows = find(key), RowCounts(tuple(counts))
    if how in ("slice", "same"):
        return (x[rows.of(overlap.rank)] if how == "slice" else x).clone()
    moved = x.reshape(x.shape[0], x.shape[1:].numel()).contiguous()
    if how != "gather":
        moved = overlap.transport.reduce_scatter(moved, rows)
    if how != "scatter":
        moved = overlap.transport.all_gather(moved, rows)
    return moved.view(moved.shape[0], *x.shape[1:])


def _move_outputs(x: Tensor, how: str, back: str, counts: Sequence[int], key: str) -> Tensor:
    match how:
        case "gather":
            return x.new_empty((sum(counts), *x.shape[1:]))
        case "slice" | "scatter":
            return x.new_empty((counts[find(key).rank], *x.shape[1:]))
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.how, ctx.back, ctx.counts, ctx.key = inputs
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    dx = None if dy is None else _move_op(dy, ctx.back, ctx.how, ctx.counts, ctx.key)
    return dx, None, None, None, None


_move_op = Op(
    "move_rows(Tensor x, str how, str back, SymInt[] counts, str key) -> Tensor",
    _move,
    _move_outputs,
    backward=_backward,
    setup_context=_setup,
    replays=False,
)


def move_rows(x: Tensor, how: How, back: How, overlap: Overlap, rows: Sequence[int] | None = None) -> Tensor:
    """x [rows, ...] moved by `how`, its gradient by `back`. Any number of dims, any float dtype.

    rows   of each rank; None: even_rows of a whole x; for gather, equal counts on all ranks
    """
    if overlap.size == 1:
        return x
    if rows is None:
        rows = even_rows(x.shape[0] * (overlap.size if how == "gather" else 1), overlap.size)
    overlap.transport.compare(how, tuple(rows), [x[:0]])
    moved: Tensor = _move_op(x, how, back, list(rows), overlap.key)
    return moved


def split_tokens(x: Tensor, overlap: Overlap, rows: Sequence[int] | None = None) -> Tensor:
    """This rank's rows of a replicated x [T, ...]; the gradient is gathered."""
    return move_rows(x, "slice", "gather", overlap, rows)


def gather_tokens(
    x: Tensor, overlap: Overlap, rows: Sequence[int] | None = None, *, gradient: Literal["same", "parts"] = "same"
) -> Tensor:
    """Every rank's rows, [T, ...], from this rank's [t, ...].

    gradient   same: later operations, and the gradient, are alike on all ranks; parts: the ranks' gradients add up
    """
    return move_rows(x, "gather", "slice" if gradient == "same" else "scatter", overlap, rows)


def scatter_tokens(x: Tensor, overlap: Overlap, rows: Sequence[int] | None = None) -> Tensor:
    """This rank's rows of the sum over ranks of x [T, ...]; the gradient is gathered."""
    return move_rows(x, "scatter", "gather", overlap, rows)


def sum_ranks(x: Tensor, overlap: Overlap) -> Tensor:
    """The sum over ranks of x [T, ...], on every rank; later operations are the same on all, so the gradient is too."""
    return move_rows(x, "sum", "same", overlap)
