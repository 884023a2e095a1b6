"""GEMMs of one rank's rows at a time, overlapped with the rows' transfers, and the gradients of weights."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from powertrain.parallel.cost_model import Product
from powertrain.parallel.overlap import Overlap, find
from powertrain.parallel.transport.base import AllGatherHandle, RowCounts
from powertrain.parallel.transport.collective import Collected

Tensors = Sequence[Tensor]
Maybe = Tensor | None
MAX_WEIGHTS = 3  # that share one all-gather: query, key and value


def multiply(x: Tensor, w_t: Tensor, bias: Maybe, out: Tensor, *, add: bool = False) -> None:
    """out = x w_t + bias, or out += x w_t."""
    if add:
        torch.addmm(out, x, w_t, out=out)
    elif bias is None:
        torch.mm(x, w_t, out=out)
    else:
        torch.addmm(bias, x, w_t, out=out)


def gather_multiply(
    x: Tensor, weights: Tensors, biases: Sequence[Maybe], rows: RowCounts, overlap: Overlap, ys: Tensors, *, keep: bool
) -> AllGatherHandle:
    """ys[i] = gather(x) weights[i]ᵀ + biases[i]; the caller finishes the handle. keep: it holds all rows of x."""
    product = Product("gather", rows.total, sum(w.shape[0] for w in weights), x.shape[1], x.dtype)
    choice = overlap.planner.choose(product)
    if choice.way == "sequential":
        collected = Collected(overlap.transport, x, rows)
        for w, bias, y in zip(weights, biases, ys, strict=True):
            multiply(collected.whole, w.T, bias, y)
        return collected
    fused = overlap.transport.fused(choice, x, weights, ys)
    if fused is not None:
        handle: AllGatherHandle = fused.all_gather_gemm(x, weights, biases, rows, ys, keep=keep)
        return handle
    gathering = overlap.transport.gather(x, rows, keep=keep)
    multiply_gathered(gathering, weights, biases, rows, ys)
    return gathering


def gather_parts(shard: Tensor, rows: RowCounts, product: Product, overlap: Overlap, *, keep: bool) -> AllGatherHandle:
    """Every rank's shard, all at once or one after the other, as is faster for a product of them."""
    if overlap.planner.choose(product).way == "sequential":
        return Collected(overlap.transport, shard, rows)
    return overlap.transport.gather(shard, rows, keep=keep)


def multiply_gathered(
    gathering: AllGatherHandle, weights: Tensors, biases: Sequence[Maybe], rows: RowCounts, ys: Tensors
) -> None:
    """ys[i] = gathered rows weights[i]ᵀ + biases[i], each rank's rows as they come."""
    factors = [(w.T, bias, rows.split(y)) for w, bias, y in zip(weights, biases, ys, strict=True)]
    # rank by rank, not weight by weight: all products of the rows that are here hide the transfer of the next
    for rank in gathering.order:
        part = gathering.wait(rank)
        for w_t, bias, y in factors:
            multiply(part, w_t, bias, y[rank])


def multiply_scatter(
    xs: Tensors, weights: Tensors, bias: Maybe, rows: RowCounts, overlap: Overlap, meanwhile: Any = None
) -> Tensor:
    """scatter(sum over ranks and i of xs[i] weights[i]ᵀ) + bias. `meanwhile` is called before the sum is waited for."""
    terms = [(x, w.T) for x, w in zip(xs, weights, strict=True)]

    def compute(out: Tensor, part: slice) -> None:
        for i, (x, w_t) in enumerate(terms):
            # the sum over weights is made before the transfer: one scatter for all of them
            multiply(x[part], w_t, None, out, add=i > 0)

    product = Product("scatter", rows.total, weights[0].shape[0], sum(x.shape[1] for x in xs), xs[0].dtype)
    return scatter_parts(compute, xs[0], product, rows, overlap, meanwhile, bias=bias)


def scatter_parts(
    compute: Callable[[Tensor, slice], None], like: Tensor, product: Product, rows: RowCounts, overlap: Overlap,
    meanwhile: Any = None, *, bias: Maybe = None,
) -> Tensor:  # fmt: skip
    """scatter(sum over ranks of a product) + bias; compute(out, part) writes those rows of this rank's product.

    like: a tensor of the result's dtype. `meanwhile` is called before the sum is waited for.
    """
    if overlap.planner.choose(product).way == "sequential":
        whole = like.new_empty((rows.total, product.width))
        compute(whole, slice(0, rows.total))
        y = overlap.transport.reduce_scatter(whole, rows)
        if meanwhile is not None:
            meanwhile()
        return y if bias is None else y + bias
    scattering = overlap.transport.scatter(like, rows, product.width)
    # parts for other ranks come first, so that their transfers run behind the later products
    for rank in scattering.order:
        compute(scattering.part(rank), rows.of(rank))
        scattering.send(rank)
    if meanwhile is not None:
        meanwhile()
    return scattering.reduce(bias)


def marks_broken(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: an exception marks the transport broken, because a later call could receive this call's rows."""

    @wraps(function)
    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            find(next(arg for arg in args if isinstance(arg, str))).transport.mark_broken(error)
            raise

    return call


def weight_grad(dy: Tensor, x: Tensor, weight: Tensor, into_main: bool) -> Maybe:
    """dyᵀ x; or, where the weight has a main_grad, None: it is added there, in its dtype."""
    main = getattr(weight, "main_grad", None)
    # into_main was decided in forward: a traced weight has no attribute
    if main is None or not into_main:
        return dy.T @ x
    # one product of 16-bit operands added in float32; the general form would cast both operands first
    if dy.is_cuda and main.dtype is torch.float32 and dy.dtype is not torch.float32:
        torch.addmm(main, dy.T, x, out_dtype=torch.float32, out=main)
    else:
        main.addmm_(dy.T.to(main.dtype), x.to(main.dtype))
    return None


def gradient_of(weight: Tensor, dw: Maybe) -> Tensor:
    """The tensor that holds a weight's gradient: invalid once a peer was lost."""
    grad: Tensor = weight.main_grad if dw is None else dw  # type: ignore[attr-defined]
    return grad


def save_for_backward(ctx: Any, x: Maybe, *weights: Maybe) -> None:
    """For backward: keeps main_grads, which hooks on saved tensors would lose."""
    ctx.save_for_backward(x, *weights)
    ctx.mains = [getattr(w, "main_grad", None) for w in weights]
    # a traced weight has none, and the graph must return gradients when it runs on weights that have one
    ctx.into_main = any(main is not None for main in ctx.mains)
    # None tells which outputs have no gradient; zeros would be multiplied
    ctx.set_materialize_grads(False)


def saved_tensors(ctx: Any) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    for w, main in zip(weights, ctx.mains, strict=True):
        # hooks on saved tensors (offloading, FSDP) return other objects, without the attribute
        if main is not None:
            w.main_grad = main
    return x, *weights


def multiply_all_reduce(xs: Tensors, weights: Tensors, bias: Maybe, overlap: Overlap, meanwhile: Any = None) -> Tensor:
    """A reduce-scatter of the products, then an all-gather of the sums."""
    count, size = xs[0].shape[0], overlap.size
    # any number of rows: the first ranks take one more
    rows = RowCounts(tuple(count // size + (rank < count % size) for rank in range(size)))
    # in two halves, since the first overlaps with its products; an all-reduce begins when all are done
    local_rows = multiply_scatter(xs, weights, bias, rows, overlap, meanwhile)
    return overlap.transport.all_gather(local_rows, rows)


def pairs_with_grad(tensors: Sequence[Maybe]) -> list[tuple[int, Tensor, Tensor]]:
    """(i, weight, dy) of (w0, w1, w2, dy0, dy1, dy2); compiled, absent weights may have a dy, which is empty."""
    pairs = zip(tensors[:MAX_WEIGHTS], tensors[MAX_WEIGHTS:], strict=True)
    return [(i, w, dy) for i, (w, dy) in enumerate(pairs) if w is not None and dy is not None]


def present(*tensors: Maybe) -> list[Tensor]:
    return [t for t in tensors if t is not None]
