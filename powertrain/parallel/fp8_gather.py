"""FP8 products of gathered rows: layers sharded over tensor ranks by features out.

    fp8_all_gather_gemm        y_i = gather(x) w_iᵀ      x's rows are sharded; w_i's rows (features out) are this rank's

It is `all_gather_gemm` (collective_matmul.py) whose products, forward and backward, are those of `fp8_linear`. An
element has the scale that it would have after gathering (fp8_operands.py), so x is sent in FP8, rank by rank. In
backward it is sent once more, as xᵀ for dW: by tensor the same bytes; by row and block its scales are of 128 tokens, so
it is sent in FP8 if each rank's first token is a multiple of 128, else x as it is.

Saved: what backward sends, x in one byte an element or x, and the weights with their scales.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.fp8.formulas import GROUP, Quantized, padded
from powertrain.ops.fp8.gemm import fp8_gemm
from powertrain.parallel.cost_model import Product
from powertrain.parallel.fp8_operands import (
    COLUMNS,
    E4M3,
    HOW_SCHEMA,
    GradCopies,
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
from powertrain.parallel.matmul_arguments import checked_operands
from powertrain.parallel.overlap import Overlap, find
from powertrain.parallel.overlapped_products import (
    MAX_WEIGHTS,
    Maybe,
    Tensors,
    gather_parts,
    gradient_of,
    marks_broken,
    pairs_with_grad,
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

_PADDING = (None,) * MAX_WEIGHTS


# -- fp8_all_gather_gemm: (x, w0, w1, w2, b0, b1, b2, counts, key, by, grad_format, power_of_two, fast, keep)
#    -> (y0, y1, y2, sent, x_inv, w_scale)


def _sends_fp8(scaling: Scaling, counts: Sequence[int]) -> bool:
    """Whether xᵀ of each rank's rows is a part of that of all rows."""
    return scaling.by == "tensor" or all(count % GROUP == 0 for count in counts[:-1])


def _sent_format(scaling: Scaling) -> PartFormat:
    return PartFormat("tensor" if scaling.by == "tensor" else "group", E4M3)


@marks_broken
def _gather_fwd(x: Tensor, w0: Tensor, w1: Maybe, w2: Maybe, *rest: Any) -> tuple[Maybe, ...]:
    *biases, counts, key, by, gradients, power_of_two, fast, keep = rest
    scaling, overlap, rows = Scaling(by, gradients, power_of_two, fast), find(key), RowCounts(tuple(counts))
    weights = present(w0, w1, w2)
    with without_autocast(x.device):
        x_scale, *w_scales = scales_of(overlap, scaling, [x, *weights])
        both = keep and by == "tensor"
        copies = scaling.quantized(x, X, x_scale, columns=both)
        made = [weight_rows(w, scaling, scale) for w, scale in zip(weights, w_scales, strict=True)]
        ys = _gather_results(x, weights, counts)
        _gather_multiply(copies.rows, x.shape[1], [w for w, _ in made], biases, rows, overlap, ys, scaling)
        sent = x.new_empty((0, 16), dtype=torch.uint8)
        if keep and _sends_fp8(scaling, counts):
            columns = copies.columns if both else scaling.quantized(x, COLUMNS, rows=False).columns
            sent = _sent_format(scaling).pack(columns)
    scales = torch.cat([scale for _, scale in made]) if keep else x.new_empty(0, dtype=torch.float32)
    x_inv = copies.scale_inv.clone() if both else x.new_empty(0, dtype=torch.float32)
    return *(*ys, *_PADDING)[:MAX_WEIGHTS], sent, x_inv, scales


def _gather_multiply(
    q: Quantized, K: int, weights: Sequence[Quantized], biases: Sequence[Maybe], rows: RowCounts, overlap: Overlap,
    ys: Tensors, scaling: Scaling,
) -> None:  # fmt: skip
    """ys[i] = gather(q) weights[i]ᵀ + biases[i], each rank's rows as they come."""
    form = PartFormat(scaling.granularities[X], E4M3)
    units = RowCounts(tuple(form.units(count, K) for count in rows.counts))
    product = Product("gather", rows.total, sum(w.data.shape[0] for w in weights), K, E4M3)
    gathering = gather_parts(form.pack(q), units, product, overlap, keep=False)
    outs = [rows.split(y) for y in ys]
    for rank in gathering.order:
        part = form.unpack(gathering.wait(rank), rows.counts[rank], K, q.scale_inv)
        for w, bias, out in zip(weights, biases, outs, strict=False):
            fp8_gemm(part, w, bias=bias, out=out[rank], fast=scaling.fast)
    gathering.finish(ys)


def _gather_results(x: Tensor, weights: Tensors, counts: Sequence[int]) -> list[Tensor]:
    return [x.new_empty((sum(counts), w.shape[0])) for w in weights]


def _gather_outputs(x: Tensor, w0: Tensor, w1: Maybe, w2: Maybe, *rest: Any) -> tuple[Maybe, ...]:
    *_, counts, _, by, gradients, power_of_two, fast, keep = rest
    scaling, weights = Scaling(by, gradients, power_of_two, fast), present(w0, w1, w2)
    ys = (*_gather_results(x, weights, counts), *_PADDING)[:MAX_WEIGHTS]
    sends = keep and _sends_fp8(scaling, counts)
    sent = x.new_empty((_sent_format(scaling).units(x.shape[1], x.shape[0]) if sends else 0, 16), dtype=torch.uint8)
    per_weight = {"tensor": len(weights), "row": sum(w.shape[0] for w in weights), "block": 0}[by]
    none = x.new_empty(0, dtype=torch.float32)
    return *ys, sent, none.new_empty(int(keep and by == "tensor")), none.new_empty(int(keep) * per_weight)


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Maybe, ...]) -> None:
    x, w0, w1, w2, _, _, _, ctx.counts, ctx.key, *ctx.scaling, _ = inputs
    *_, sent, x_inv, scales = output
    save_for_backward(
        ctx, None if _sends_fp8(Scaling(*ctx.scaling), ctx.counts) else x, w0, w1, w2, sent, x_inv, scales
    )
    ctx.mark_non_differentiable(*present(sent, x_inv, scales))


def _gather_backward(ctx: Any, *grads: Maybe) -> tuple[Maybe, ...]:
    # x is saved in FP8: a second derivative by x would leave out a term
    refuse_graph(ctx, "fp8_all_gather_gemm", ON_ONE_RANK)
    x, w0, w1, w2, sent, x_inv, scales = saved_tensors(ctx)
    dys = grads[:MAX_WEIGHTS]
    need_x, *need = ctx.needs_input_grad[: 1 + 2 * MAX_WEIGHTS]
    need_w, need_b = need[:MAX_WEIGHTS], need[MAX_WEIGHTS:]
    operands = (x, sent, x_inv, scales, w0, w1, w2, *dys)
    dx, *dws = _gather_grads_op(*operands, need_x, need_w, ctx.counts, ctx.key, *ctx.scaling, ctx.into_main)
    dbs = [bias_grad(dy) if n and dy is not None else None for dy, n in zip(dys, need_b, strict=True)]
    dws = [d if n and dy is not None else None for d, n, dy in zip(dws, need_w, dys, strict=True)]
    return (dx if need_x else None, *dws, *dbs, *(None,) * 7)


@marks_broken
def _gather_grads(x: Maybe, sent: Tensor, x_inv: Tensor, scales: Tensor, *rest: Any) -> tuple[Maybe, ...]:
    *tensors, need_x, need_w, counts, key, by, gradients, power_of_two, fast, into_main = rest
    scaling, overlap, rows = Scaling(by, gradients, power_of_two, fast), find(key), RowCounts(tuple(counts))
    # a weight without any gradient takes part in neither product
    terms = pairs_with_grad(tensors)
    weights, K = present(*tensors[:MAX_WEIGHTS]), tensors[0].shape[1]
    sizes = [1 if by == "tensor" else w.shape[0] for w in weights] if by != "block" else [0] * len(weights)
    of_weight = scales.split(sizes)
    dws: list[Maybe] = [None] * MAX_WEIGHTS
    with without_autocast(scales.device):
        dy_scales = scales_of(overlap, scaling, [dy for *_, dy in terms], gradients) if terms else []
        folds = [fold_of(scaling, of_weight[i]) for i, *_ in terms]
        grads = [
            GradCopies(dy, scaling, scale, fold) for (*_, dy), scale, fold in zip(terms, dy_scales, folds, strict=True)
        ]
        wanted = [(i, w, grad) for (i, w, _), grad in zip(terms, grads, strict=True) if need_w[i]]
        gathered = _start_columns(x, sent, x_inv, scaling, rows, K, overlap) if wanted else None

        # called while dx's parts are sent
        def weight_grads() -> None:
            if gathered is None:
                return
            columns, finish = gathered()
            for i, w, grad in wanted:
                dws[i] = weight_grad(grad.columns(), columns, w, into_main)
            finish([gradient_of(w, dws[i]) for i, w, _ in wanted])

        if not (need_x and terms):
            weight_grads()
            return (None, *dws)
        transposed = [weight_columns(w, scaling, of_weight[i]) for i, w, _ in terms]

        def compute(out: Tensor, part: slice) -> None:
            for n, (grad, w_t) in enumerate(zip(grads, transposed, strict=True)):
                _multiply(grad.rows(part), w_t, out, add=n > 0)

        depth = sum(dy.shape[1] for *_, dy in terms)
        product = Product("scatter", rows.total, K, depth, terms[0][2].dtype)
        dx = scatter_parts(compute, terms[0][2], product, rows, overlap, weight_grads)
    return (dx, *dws)


def _multiply(a: Quantized, b: Quantized, out: Tensor, *, add: bool) -> None:
    if add:
        # rounded to out's dtype each, as parts of several weights are in 16 bits
        out.add_(fp8_gemm(a, b, out_dtype=out.dtype))
    else:
        fp8_gemm(a, b, out=out)


def _start_columns(
    x: Maybe, sent: Tensor, x_inv: Tensor, scaling: Scaling, rows: RowCounts, K: int, overlap: Overlap
) -> Callable[[], tuple[Quantized, Callable[[Tensors], None]]]:
    """Start to bring xᵀ [K, M] here; what waits for it, and its `finish`."""
    if x is not None:
        product = Product("gather", rows.total, K, K, x.dtype)
        gathering = gather_parts(x, rows, product, overlap, keep=True)
    else:
        form = _sent_format(scaling)
        units = RowCounts(tuple(form.units(K, count) for count in rows.counts))
        gathering = gather_parts(sent, units, Product("gather", rows.total, K, K, E4M3), overlap, keep=False)

    def wait() -> tuple[Quantized, Callable[[Tensors], None]]:
        parts = [gathering.wait(rank) for rank in gathering.order]
        if x is not None:
            return scaling.quantized(gathering.whole, COLUMNS, rows=False).columns, gathering.finish
        there = dict(zip(gathering.order, parts, strict=True))
        gathered = [form.unpack(there[rank], K, count, x_inv) for rank, count in enumerate(rows.counts)]
        return _side_by_side(gathered, rows), gathering.finish

    return wait


def _side_by_side(parts: Sequence[Quantized], rows: RowCounts) -> Quantized:
    """[K, M] of parts [K, m]: whole groups each, but the last."""
    K, M = parts[0].data.shape[0], rows.total
    data = torch.zeros((K, padded(M)), dtype=torch.uint8, device=parts[0].data.device)
    for rank, part in enumerate(parts):
        data[:, rows.of(rank)] = part.data.view(torch.uint8)[:, : rows.counts[rank]]
    scale_inv = parts[0].scale_inv
    if scale_inv.dim() == 2:
        # groups with rows fastest: so cuBLAS reads them
        scale_inv = torch.cat([part.scale_inv.T for part in parts]).T
    return Quantized(data.view(E4M3), scale_inv)


def _gather_grads_outputs(x: Maybe, sent: Tensor, x_inv: Tensor, scales: Tensor, *rest: Any) -> tuple[Maybe, ...]:
    *tensors, need_x, need_w, counts, key, _, _, _, _, _ = rest
    weights = tensors[:MAX_WEIGHTS]
    dws = [torch.empty_like(w) if n and w is not None else None for w, n in zip(weights, need_w, strict=True)]
    dx = weights[0].new_empty((counts[find(key).rank], weights[0].shape[1])) if need_x else None
    return (dx, *dws)


_WEIGHTS = "Tensor w0, Tensor? w1, Tensor? w2"


def _gather_flops(w0: Shape, w1: Shape | None, w2: Shape | None, counts: Sequence[int], **_: Any) -> int:
    return 2 * sum(counts) * sum(prod(w) for w in (w0, w1, w2) if w)


def _gather_grads_flops(need_x: bool, need_w: Sequence[bool], **arguments: Any) -> int:
    """For those outputs that have a gradient."""
    pairs = [(arguments[f"w{n}"], arguments[f"dy{n}"]) for n in range(3)]
    terms = zip(pairs, need_w, strict=True)
    return sum(2 * dy[0] * prod(w) * (need_x + need) for (w, dy), need in terms if w and dy)


_gather_grads_op = Op(
    f"fp8_all_gather_gemm_bwd(Tensor? x, Tensor sent, Tensor x_inv, Tensor scales, {_WEIGHTS}, Tensor? dy0, "
    f"Tensor? dy1, Tensor? dy2, bool need_x, bool[] need_w, {HOW_SCHEMA}, bool into_main) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _gather_grads,
    _gather_grads_outputs,
    flops=_gather_grads_flops,
    replays=False,
)
_gather_op = Op(
    f"fp8_all_gather_gemm(Tensor x, {_WEIGHTS}, Tensor? b0, Tensor? b1, Tensor? b2, {HOW_SCHEMA}, bool keep) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gather_fwd,
    _gather_outputs,
    backward=_gather_backward,
    setup_context=_gather_setup,
    num_results=MAX_WEIGHTS,
    flops=_gather_flops,
    replays=False,
)


def fp8_all_gather_gemm(
    x: Tensor,
    weights: Tensors,
    overlap: Overlap,
    recipe: Recipe,
    *,
    biases: Sequence[Maybe] | None = None,
    rows: Sequence[int] | None = None,
    layer: str = "",
) -> list[Tensor]:
    """`gather(x) @ weightᵀ + bias` in FP8, x's rows being sharded over the ranks: column-parallel layers' forward.

    Shapes: m rows here, M on all ranks, K features in, N_i features out on this rank.
        x         [m, K]   float32, float16, bfloat16 (float64 on the CPU)
        weights   [N_i, K] each, one to three that share the gather: this rank's rows of them
        recipe             `Tensor()` with the current scale, `Row()` or `Block()` of powertrain.quant
        biases    [N_i]    one per weight, or None
        rows, layer        as of `all_gather_gemm`
    Returns y_i [M, N_i], rows in the order of the ranks.
    Numerics: the bits of gathering x, then quantizing it by `fp8_linear`'s formulas, rank by rank; by tensor the scales
        are those of x, weights and gradients of all ranks. dx is the sum over ranks of parts in x's dtype.
    Memory: saves x in one byte an element by tensor, and by row and block if each rank's first row is a multiple of
        128; else x itself. M K bytes are allocated while the call runs, and in backward.
    A weight with `main_grad` gets its gradient added there. One rank: `fp8_linear`.
    Raises ValueError naming the argument; PeerTimeout if a rank is gone.
    """
    op, scaling = "fp8_all_gather_gemm", scaling_of("fp8_all_gather_gemm", recipe)
    weights, biases = list(weights), list(biases) if biases is not None else [None] * len(weights)
    x, operands = checked_operands(op, x, weights, biases)
    counts = overlap.rows(x.shape[0], rows).counts
    if overlap.size == 1:
        pairs = zip(present(*operands[:MAX_WEIGHTS]), operands[MAX_WEIGHTS:], strict=False)
        return [product_alone(x, w, bias, scaling) for w, bias in pairs]
    overlap.transport.compare(f"{op} by {recipe}", counts, [x[:0], *operands])
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *operands[:MAX_WEIGHTS]))
    ys = _gather_op(x, *operands, list(counts), overlap.key_for(layer), *scaling, keep)
    return list(ys[: len(weights)])
