"""FP8 products whose sum over ranks is scattered: layers sharded over tensor ranks by features in.

    fp8_gemm_reduce_scatter    y = scatter(sum(x wᵀ))    w's columns (features in) are this rank's; y's rows are sharded

It is `gemm_reduce_scatter` (collective_matmul.py) whose products, forward and backward, are those of `fp8_linear`, with
scales as in fp8_operands.py. Parts of y are sent in x's dtype. In backward dy is sent in FP8 by tensor only: by row and
block it would be two FP8 copies, as many bytes as dy.

Saved: xᵀ in FP8, the weight and its scales.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.fp8.formulas import DTYPES, GROUP, Quantized, padded
from powertrain.ops.fp8.gemm import fp8_gemm
from powertrain.ops.fp8.transpose import fp8_transpose
from powertrain.ops.shapes import acc_dtype, cdiv
from powertrain.parallel.cost_model import Product
from powertrain.parallel.fp8_operands import (
    COLUMNS,
    DY,
    E4M3,
    HOW_SCHEMA,
    Scaling,
    X,
    bias_grad,
    fold_of,
    product_alone,
    scales_of,
    scaling_of,
    weight_columns,
    weight_grad,
    weight_rows,
)
from powertrain.parallel.fp8_parts import PartFormat
from powertrain.parallel.matmul_arguments import checked_operands, checked_shares
from powertrain.parallel.overlap import Overlap, find
from powertrain.parallel.overlapped_products import (
    Maybe,
    gather_parts,
    gradient_of,
    marks_broken,
    present,
    save_for_backward,
    saved_tensors,
    scatter_parts,
)
from powertrain.parallel.transport.base import RowCounts
from powertrain.quant.recipe import Recipe
from powertrain.runtime.dispatch import Op, without_autocast
from powertrain.runtime.flops import Shape
from powertrain.runtime.nodes import ON_ONE_RANK, refuse_graph


@marks_broken
def _scatter_fwd(x: Tensor, w: Tensor, bias: Maybe, counts: Sequence[int], key: str, *rest: Any) -> tuple[Tensor, ...]:
    *options, keep = rest
    scaling, overlap, rows = Scaling(*options), find(key), RowCounts(tuple(counts))
    with without_autocast(x.device):
        x_scale, w_scale = scales_of(overlap, scaling, [x, w])
        weight, scale = weight_rows(w, scaling, w_scale)
        both = scaling.quantized(x, X, x_scale, columns=keep) if scaling.by == "tensor" else None

        def compute(out: Tensor, part: slice) -> None:
            if both is None:
                q = scaling.quantized(x[part], X, columns=False).rows
            else:
                q = Quantized(both.data[part], both.scale_inv)
            fp8_gemm(q, weight, out=out, fast=scaling.fast)

        product = Product("scatter", rows.total, w.shape[0], x.shape[1], x.dtype)
        y = scatter_parts(compute, x, product, rows, overlap, bias=bias)
        if not keep:
            none = scale.new_empty(0)
            return y, none.new_empty(0, dtype=E4M3), none, none
        columns = (scaling.quantized(x, COLUMNS, rows=False) if both is None else both).columns
    return y, columns.data, columns.scale_inv, scale


def _scatter_outputs(
    x: Tensor, w: Tensor, bias: Maybe, counts: Sequence[int], key: str, *rest: Any
) -> tuple[Tensor, ...]:
    *options, keep = rest
    scaling, (M, K), none = Scaling(*options), x.shape, x.new_empty(0, dtype=torch.float32)
    y = x.new_empty((counts[find(key).rank], w.shape[0]))
    if not keep:
        return y, none.new_empty(0, dtype=E4M3), none, none.new_empty(0)
    x_inv = none.new_empty(1) if scaling.by == "tensor" else none.new_empty((cdiv(M, GROUP), K)).T
    scale = none.new_empty({"tensor": 1, "row": w.shape[0], "block": 0}[scaling.by])
    return y, none.new_empty((K, padded(M)), dtype=E4M3), x_inv, scale


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, w, _, ctx.counts, ctx.key, *ctx.scaling, _ = inputs
    _, x_t, x_inv, scale = output
    save_for_backward(ctx, None, w, x_t, x_inv, scale)
    ctx.mark_non_differentiable(x_t, x_inv, scale)


def _scatter_backward(ctx: Any, dy: Maybe, *_: Any) -> tuple[Maybe, ...]:
    if dy is None:
        return (None,) * 10
    # x is saved in FP8: a second derivative by x would leave out a term
    refuse_graph(ctx, "fp8_gemm_reduce_scatter", ON_ONE_RANK)
    _, w, x_t, x_inv, scale = saved_tensors(ctx)
    need = ctx.needs_input_grad[:3]
    operands = (dy.contiguous(), w, x_t, x_inv, scale)
    grads = _scatter_grads_op(*operands, need, ctx.counts, ctx.key, *ctx.scaling, ctx.into_main)
    return *(grad if wanted else None for grad, wanted in zip(grads, need, strict=True)), *(None,) * 7


@marks_broken
def _scatter_grads(
    dy: Tensor, w: Tensor, x_t: Tensor, x_inv: Tensor, scale: Tensor, need: Sequence[bool], counts: Sequence[int],
    key: str, *rest: Any,
) -> tuple[Maybe, Maybe, Maybe]:  # fmt: skip
    """dx = gather(dy) w as dy's rows arrive; dw and db from all of them. need: of dx, dw and db."""
    *options, into_main = rest
    scaling, overlap, rows = Scaling(*options), find(key), RowCounts(tuple(counts))
    need_x, need_w, need_b = need
    with without_autocast(dy.device):
        arriving = _ArrivingGrad(dy, scaling, rows, overlap, fold_of(scaling, scale), keep=need_w or need_b)
        dx = None
        w_t = weight_columns(w, scaling, scale) if need_x else None
        if w_t is not None:
            dx = dy.new_empty((rows.total, w.shape[1]))
            outs = rows.split(dx)
        for rank in arriving.handle.order:
            part = arriving.wait(rank)
            if w_t is not None:
                fp8_gemm(arriving.rows(part, rank), w_t, out=outs[rank])
        dw = weight_grad(arriving.columns(), Quantized(x_t, x_inv), w, into_main) if need_w else None
        db = arriving.sum() if need_b else None
        arriving.handle.finish(present(dx, gradient_of(w, dw) if need_w else None, db))
    return dx, dw, db


class _ArrivingGrad:
    """dy [m, N] of every rank, on its way: by tensor in FP8, else as it is."""

    def __init__(
        self, dy: Tensor, scaling: Scaling, rows: RowCounts, overlap: Overlap, fold: Maybe, *, keep: bool
    ) -> None:
        self.dy, self.scaling, self.all_rows, self.fold, self.overlap = dy, scaling, rows, fold, overlap
        self.N, self.form, self.scale_inv = dy.shape[1], PartFormat("tensor", DTYPES[scaling.grad_format]), None
        shard, units = dy, rows
        if scaling.by == "tensor":
            (scale,) = scales_of(overlap, scaling, [dy], scaling.grad_format)
            q = scaling.quantized(dy, DY, scale, gradient=True, columns=False).rows
            self.scale_inv = q.scale_inv
            shard, units = self.form.pack(q), RowCounts(tuple(self.form.units(m, self.N) for m in rows.counts))
        product = Product("gather", rows.total, self.N, self.N, shard.dtype)
        self.handle = gather_parts(shard, units, product, overlap, keep=keep)

    def wait(self, rank: int) -> Tensor:
        return self.handle.wait(rank)

    def rows(self, part: Tensor, rank: int) -> Quantized:
        """One rank's, of what `wait` returned."""
        if self.scale_inv is not None:
            return self.form.unpack(part, self.all_rows.counts[rank], self.N, self.scale_inv)
        return self.scaling.quantized(part, DY, gradient=True, fold=self.fold, columns=False).rows

    def columns(self) -> Quantized:
        """dyᵀ of all rows, once all were waited for."""
        if self.scale_inv is None:
            return self.scaling.quantized(self.handle.whole, COLUMNS, gradient=True, rows=False).columns
        whole = self.form.unpack(self.handle.whole, self.all_rows.total, self.N, self.scale_inv)
        return Quantized(fp8_transpose(whole.data, self.N), self.scale_inv)

    def sum(self) -> Tensor:
        """The bias's gradient: of dy as it is, ranks' sums added in their order."""
        if self.scale_inv is None:
            return bias_grad(self.handle.whole)
        acc = acc_dtype(self.dy.dtype)
        local_sum = self.dy.sum(0, keepdim=True, dtype=acc)
        everyone = self.overlap.transport.all_gather(local_sum, RowCounts((1,) * self.overlap.size))
        return everyone.sum(0).to(self.dy.dtype)


def _scatter_grads_outputs(
    dy: Tensor, w: Tensor, x_t: Tensor, x_inv: Tensor, scale: Tensor, need: Sequence[bool], counts: Sequence[int],
    *rest: Any,
) -> tuple[Maybe, Maybe, Maybe]:  # fmt: skip
    need_x, need_w, need_b = need
    return (
        dy.new_empty((sum(counts), w.shape[1])) if need_x else None,
        torch.empty_like(w) if need_w else None,
        dy.new_empty(dy.shape[1:]) if need_b else None,
    )


def _scatter_flops(x: Shape, w: Shape, **_: Any) -> int:
    return 2 * x[0] * prod(w)


def _scatter_grads_flops(w: Shape, need: Sequence[bool], counts: Sequence[int], **_: Any) -> int:
    need_x, need_w, _need_b = need
    return 2 * sum(counts) * prod(w) * (need_x + need_w)


_scatter_grads_op = Op(
    "fp8_gemm_reduce_scatter_bwd(Tensor dy, Tensor w, Tensor x_t, Tensor x_inv, Tensor scale, bool[] need, "
    f"{HOW_SCHEMA}, bool into_main) -> (Tensor, Tensor, Tensor)",
    _scatter_grads,
    _scatter_grads_outputs,
    flops=_scatter_grads_flops,
    replays=False,
)
_scatter_op = Op(
    f"fp8_gemm_reduce_scatter(Tensor x, Tensor w, Tensor? bias, {HOW_SCHEMA}, bool keep) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _scatter_fwd,
    _scatter_outputs,
    backward=_scatter_backward,
    setup_context=_scatter_setup,
    num_results=1,
    flops=_scatter_flops,
    replays=False,
)


def fp8_gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    overlap: Overlap,
    recipe: Recipe,
    *,
    bias: Maybe = None,
    rows: Sequence[int] | None = None,
    layer: str = "",
) -> Tensor:
    """This rank's rows of the sum over ranks of `x @ weightᵀ` in FP8, plus bias: a row-parallel layer's forward.

    Shapes: M rows on every rank, m of the result here, K features in on this rank, N features out.
        x        [M, K], weight [N, K], bias [N]: as of `gemm_reduce_scatter`, and so are rows and layer
        recipe             as of `fp8_all_gather_gemm`
    Returns y [m, N]. Numerics, backward and errors as there: each rank's part is `fp8_linear`'s product, rounded to x's
    dtype, and parts are added in float32. By tensor dy is sent in FP8 in backward.
    Memory: saves x in one byte an element.
    """
    op, scaling = "fp8_gemm_reduce_scatter", scaling_of("fp8_gemm_reduce_scatter", recipe)
    x, (weight, _, _, bias, *_) = checked_operands(op, x, [weight], [bias])  # type: ignore[assignment]
    rows = checked_shares(op, x, rows, overlap)
    if overlap.size == 1:
        return product_alone(x, weight, bias, scaling)
    overlap.transport.compare(f"{op} by {recipe}", tuple(rows), [x[:0], weight, bias])
    keep = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    y = _scatter_op(x, weight, bias, list(rows), overlap.key_for(layer), *scaling, keep)
    out: Tensor = y[0] if isinstance(y, tuple) else y
    return out
