"""Embedding, head and cross entropy of a vocabulary that is sharded over the ranks of a group.

    lse = log sum over ranks of exp(lse of a rank's logits);   the target's logit is on one rank
    loss = lse - (1 - smoothing) z_target - smoothing mean(z) + z_loss lse²;   dlogits from lse alone, each rank its own

Ranks exchange three floats per token, never logits. With labels the head computes logits and their gradients in blocks
of tokens, as powertrain/ops/linear_cross_entropy.py does, and keeps dx of this rank's tokens and dweight of its rows.

Source: Shoeybi et al., arXiv:1909.08053, section 3 (vocabulary-parallel loss); blocks: see linear_cross_entropy.py.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from powertrain.nn.tensor_parallel.linear import (
    ColumnParallelLinear,
    Ranks,
    columns,
    local,
    open_overlap,
    shard_parameter,
)
from powertrain.nn.tensor_parallel.token_shards import even_rows, scatter_tokens, sum_ranks
from powertrain.ops.cross_entropy import (
    Reduction,
    check_loss_arguments,
    early_scale,
    late_scale,
    refuse_second_backward,
)
from powertrain.ops.cross_entropy_kernels import Terms, launch_dlogits, launch_row_stats
from powertrain.ops.linear_cross_entropy import (
    MAX_ROUNDINGS,
    blocks_within_scratch,
    logits_into,
    matmul_into,
    new_scratch,
)
from powertrain.ops.shapes import acc_dtype, as_flat, as_rows, empty, wanted
from powertrain.parallel.overlap import Overlap, find
from powertrain.parallel.transport.base import RowCounts
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, cast_by_autocast, is_traced, use_kernel
from powertrain.runtime.flops import Shape
from powertrain.runtime.positional import hinted


class VocabParallelEmbedding(nn.Embedding):
    """tokens [B, S] int64 -> [t, D] of this rank's tokens (even_rows); the V rows are sharded over the ranks.

    Every rank has all tokens. Without sequence_parallel -> [B, S, D] on every rank. weight [V, D]: a DTensor, Shard(0).
    Exact: of each token's row all ranks but one add zeros. Memory: [B * S, D] on every rank before they are summed.
    Raises ValueError naming the argument if the ranks do not divide V.
    """

    @hinted
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        ranks: Ranks,
        *,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.sizes(type(self).__name__, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)
        self.overlap, mesh = open_overlap(ranks)
        self.sequence_parallel = sequence_parallel
        good = num_embeddings % self.overlap.size == 0
        name = type(self).__name__
        checks.require(good, name, "num_embeddings", f"be a multiple of {self.overlap.size} ranks", num_embeddings)
        self.weight = shard_parameter(self.weight, mesh, Shard(0))

    def forward(self, tokens: Tensor) -> Tensor:
        # of a GPU's the host would have to wait: there the row of a token out of range is 0
        if tokens.device.type == "cpu" and tokens.numel() and not is_traced(tokens):
            for worst in (tokens.min().item(), tokens.max().item()):
                good = 0 <= worst < self.num_embeddings
                checks.require(good, type(self).__name__, "tokens", f"be in [0, {self.num_embeddings})", worst)
        weight = local(self.weight)
        index = tokens.flatten() - self.overlap.rank * weight.shape[0]
        here = (index >= 0) & (index < weight.shape[0])
        x = F.embedding(torch.where(here, index, 0), weight).masked_fill(~here[:, None], 0.0)
        if self.sequence_parallel:
            return scatter_tokens(x, self.overlap)
        return sum_ranks(x, self.overlap).unflatten(0, tokens.shape)


class VocabParallelHead(ColumnParallelLinear):
    """Hidden states [t, D] of this rank's tokens -> logits [T, V / W] of its vocabulary shard; with labels a mean loss.

    labels   [...] int64, T of all tokens, the same on every rank; -100 leaves one out
    The loss, float32 [], is equal on every rank, and each is to differentiate all of it. Without sequence_parallel
    states are [..., D], all tokens on every rank. The rest as ColumnParallelLinear and the function below.
    """

    def forward(  # type: ignore[override]
        self, states: Tensor, labels: Tensor | None = None, *, shape: Sequence[int] | None = None, z_loss: float = 0.0
    ) -> Tensor:
        if labels is None:
            return columns(states, self, shape=shape)[0]
        return vocab_parallel_linear_cross_entropy(
            states, local(self.weight), labels, self.overlap, bias=None if self.bias is None else local(self.bias),
            z_loss=z_loss, sequence_parallel=self.sequence_parallel,
        )  # fmt: skip


# -- statistics of one rank's logits, and of all ranks'


def _capped(logits: Tensor, terms: Terms) -> Tensor:
    z = logits.to(acc_dtype(logits.dtype))
    return terms.softcap * torch.tanh(z / terms.softcap) if terms.softcap else z


def _stats(logits: Tensor, target: Tensor, terms: Terms, overlap: Overlap) -> Tensor:
    """[3, rows] over all ranks' logits: lse, the target's logit (nan if out of range), the sum of logits.

    float32, float64 for float64. Ranks are added in their order, so all get the same bits.
    """
    start, total = overlap.rank * logits.shape[1], overlap.size * logits.shape[1]
    own = logits.new_zeros((3, logits.shape[0]), dtype=acc_dtype(logits.dtype))
    if use_kernel("cross_entropy", logits):
        launch_row_stats(logits, target, terms, *own, vocab_start=start, vocab_size=total)
    else:
        z = _capped(logits, terms)
        index = target - start
        here = (index >= 0) & (index < logits.shape[1])
        own[0], own[2] = z.logsumexp(1), z.sum(1)
        own[1] = torch.where(here, z.gather(1, torch.where(here, index, 0).long()[:, None])[:, 0], 0.0)
        out_of_range = (target < 0) | (target >= total)
        # every rank finds it alike, so the loss is NaN on all
        own[1].masked_fill_(out_of_range & (target != terms.ignore_index), torch.nan)
    if overlap.size == 1:
        return own
    # three numbers per token are exchanged, never the logits
    ranks = overlap.transport.all_gather(own[None], RowCounts((1,) * overlap.size))
    return torch.stack((ranks[:, 0].logsumexp(0), ranks[:, 1].sum(0), ranks[:, 2].sum(0)))


def _losses(stats: Tensor, target: Tensor, terms: Terms, vocab_size: int) -> Tensor:
    """Losses [rows], 0 where the target is ignore_index."""
    lse, hit, total = stats
    smoothing = terms.label_smoothing
    loss = lse - (1.0 - smoothing) * hit - smoothing / vocab_size * total + terms.z_loss * lse.square()
    return torch.where(target == terms.ignore_index, 0.0, loss)


def _gradient(
    logits: Tensor, target: Tensor, lse: Tensor, dloss: Tensor | None, terms: Terms, overlap: Overlap, out: Tensor
) -> None:
    """Write dlogits of this rank's vocabulary shard to `out`, which may be logits; dloss [rows], [] or None for 1."""
    start, total = overlap.rank * logits.shape[1], overlap.size * logits.shape[1]
    if use_kernel("cross_entropy", logits):
        launch_dlogits(logits, target, lse, dloss, terms, out, scale=None, vocab_start=start, vocab_size=total)
        return
    z = _capped(logits, terms)
    d = torch.exp(z - lse[:, None]) * (1.0 + 2.0 * terms.z_loss * lse)[:, None] - terms.label_smoothing / total
    index = target - start
    rows = ((index >= 0) & (index < logits.shape[1])).nonzero()[:, 0]
    # by index, and only rows whose target is here: no one-hot matrix
    d[rows, index[rows]] -= 1.0 - terms.label_smoothing
    if terms.softcap:
        d *= 1.0 - (z / terms.softcap).square()
    if dloss is not None:
        d *= dloss.reshape(-1, 1)
    out.copy_(d.masked_fill_((target == terms.ignore_index)[:, None], 0.0))


# -- vocab_parallel_cross_entropy: (logits, target, terms, key) -> (losses, lse)


def _loss_fwd(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_loss: float, softcap: float, key: str
) -> tuple[Tensor, Tensor]:
    overlap, terms = find(key), Terms(ignore_index, smoothing, z_loss, softcap)
    stats = _stats(logits, target, terms, overlap)
    return _losses(stats, target, terms, logits.shape[1] * overlap.size), stats[0].clone()


def _loss_outputs(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = logits.new_empty(logits.shape[0], dtype=acc_dtype(logits.dtype))
    return lse, torch.empty_like(lse)


def _loss_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, *ctx.options = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _loss_backward(ctx: Any, dlosses: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    dlogits = None if dlosses is None else _loss_bwd_op(dlosses, *ctx.saved_tensors, *ctx.options)
    return (dlogits, *(None,) * 6)


def _loss_bwd(dlosses: Tensor, logits: Tensor, target: Tensor, lse: Tensor, *options: Any) -> Tensor:
    *terms, key = options
    dlogits = logits.new_empty(logits.shape)
    _gradient(logits, target, lse, dlosses.contiguous(), Terms(*terms), find(key), dlogits)
    return dlogits


_TERMS = "int ignore_index, float label_smoothing, float z_loss, float softcap"
_loss_bwd_op = Op(
    f"vocab_cross_entropy_bwd(Tensor dlosses, Tensor logits, Tensor target, Tensor lse, {_TERMS}, str key) -> Tensor",
    _loss_bwd,
    lambda dlosses, logits, *_: logits.new_empty(logits.shape),
    replays=False,
)
_loss_op = Op(
    f"vocab_cross_entropy(Tensor logits, Tensor target, {_TERMS}, str key) -> (Tensor, Tensor)",
    _loss_fwd,
    _loss_outputs,
    backward=_loss_backward,
    setup_context=_loss_setup,
    replays=False,
)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    overlap: Overlap,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """`powertrain.cross_entropy` of logits whose vocabulary is sharded over the ranks.

    Shapes: V words in all, W ranks.
        logits   [..., V / W]   words [rank * V / W, (rank + 1) * V / W), of the same tokens on every rank
        target   [...]          int64 or int32, the same on every rank
    Returns the loss, equal on every rank, float32 (float64 for float64); options as `cross_entropy` has them.
    Memory: saves logits and 4 bytes a token. Sends 12 bytes a token; backward sends nothing.
    Raises ValueError naming the argument.
    """
    op = "vocab_parallel_cross_entropy"
    check_loss_arguments(op, target, reduction, label_smoothing, z_loss, softcap)
    checks.require(logits.dim() > 0, op, "logits", "have at least one dim", "a scalar")
    checks.floating(op, logits=logits)
    checks.same_device(op, "logits", logits, target=target)
    checks.shape(op, "target", target, logits.shape[:-1], "logits without the last dim")
    flat = as_flat(target)
    overlap.transport.compare(op, flat.shape, [logits])
    terms = (ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0))
    losses: Tensor = _loss_op(as_rows(logits), flat, *terms, overlap.key)[0]
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (flat != ignore_index).sum()


# -- vocab_parallel_linear_cross_entropy: (x, weight, bias, target, main_grad, reduction, terms, counts, key, needs)
#    -> (loss, scale, dx, dw, db)


def _linear_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, main_grad: Tensor | None, reduction: str,
    ignore_index: int, smoothing: float, z_loss: float, softcap: float, counts: Sequence[int], key: str, need_dx: bool,
    need_dw: bool, need_db: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Forward. counts: tokens of each rank; empty: x has all tokens."""
    overlap, terms = find(key), Terms(ignore_index, smoothing, z_loss, softcap)
    whole = overlap.transport.all_gather(x, RowCounts(tuple(counts))) if counts else x
    count, words = target.shape[0], weight.shape[0]
    scale = None
    if reduction == "mean":
        # converted before it is divided: an integer's reciprocal would be float32
        scale = (target != ignore_index).sum().to(acc_dtype(x.dtype)).reciprocal()
    early = early_scale(x.dtype, scale)
    makes_grads = need_dx or need_dw or need_db
    dx = torch.empty_like(whole) if need_dx else None
    dw = torch.zeros_like(weight, dtype=weight.dtype if main_grad is None else main_grad.dtype) if need_dw else None
    db = weight.new_zeros(words, dtype=acc_dtype(x.dtype)) if need_db else None
    loss = weight.new_zeros((), dtype=acc_dtype(x.dtype))

    rounds = dw is not None and dw.dtype.itemsize < 4
    blocks = blocks_within_scratch(count, words, x.element_size(), least=-(-count // MAX_ROUNDINGS) if rounds else 1)
    scratch = new_scratch(x, max((b.stop - b.start for b in blocks), default=0), words)
    for rows in blocks:
        logits = logits_into(whole[rows], weight, bias, scratch[: rows.stop - rows.start])
        stats = _stats(logits, target[rows], terms, overlap)
        loss += _losses(stats, target[rows], terms, words * overlap.size).sum()
        if not makes_grads:
            continue
        _gradient(logits, target[rows], stats[0], early, terms, overlap, logits)
        if dx is not None:
            torch.mm(logits, weight, out=dx[rows])
        if dw is not None:
            matmul_into(logits.t(), whole[rows], dw, add=True)
        if db is not None:
            db += logits.sum(0, dtype=db.dtype)
    if scale is not None:
        loss *= scale
    if dx is not None:
        dx = summed_dx(dx, counts, overlap)
    return loss, loss.new_empty(0) if scale is None else scale, dx, dw, None if db is None else db.to(weight.dtype)


def summed_dx(dx: Tensor, counts: Sequence[int], overlap: Overlap) -> Tensor:
    """Sum over ranks of dx, to which each vocabulary shard contributes: for this rank's tokens, or for all of them."""
    if overlap.size == 1:
        return dx
    rows = RowCounts(tuple(counts) or even_rows(dx.shape[0], overlap.size))
    # in two halves, since every rank needs the sum of its own tokens only where sequences are parallel
    local_dx = overlap.transport.reduce_scatter(dx, rows)
    return local_dx if counts else overlap.transport.all_gather(local_dx, rows)


def _linear_outputs(x: Tensor, weight: Tensor, bias: Any, target: Any, main_grad: Any, *rest: Any) -> tuple[Any, ...]:
    reduction, need_dx, need_dw, need_db = rest[0], *rest[-3:]
    loss = x.new_empty((), dtype=acc_dtype(x.dtype))
    dw_dtype = weight.dtype if main_grad is None else main_grad.dtype
    return (
        loss,
        torch.empty_like(loss) if reduction == "mean" else loss.new_empty(0),
        torch.empty_like(x) if need_dx else None,
        torch.empty_like(weight, dtype=dw_dtype) if need_dw else None,
        weight.new_empty(weight.shape[0]) if need_db else None,
    )


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.dtype, ctx.main_grad, ctx.used = inputs[0].dtype, inputs[4], False
    grads = [empty(output[0]) if t is None else t for t in output[1:]]
    ctx.save_for_backward(*grads)
    ctx.mark_non_differentiable(*(t for t in output[1:] if t is not None))
    ctx.set_materialize_grads(False)


def _linear_backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * 15
    refuse_second_backward(ctx, "vocab_parallel_linear_cross_entropy", "a second forward")
    scale, dx, dw, db = ctx.saved_tensors
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    late = late_scale(ctx.dtype, scale if scale.numel() else None)
    factor = dloss if late is None else dloss * late
    if ctx.main_grad is not None and need_dw:
        ctx.main_grad.addcmul_(dw, factor.to(dw.dtype))
        need_dw = False
    grads = (wanted(t.mul_(factor) if n else t, n) for t, n in ((dx, need_dx), (dw, need_dw), (db, need_db)))
    return (*grads, *(None,) * 12)


def _linear_flops(weight: Shape, target: Shape, need_dx: bool, need_dw: bool, **_: Any) -> int:
    return 2 * target[0] * prod(weight) * (1 + need_dx + need_dw)


_linear_op = Op(
    "vocab_linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? main_grad, "
    f"str reduction, {_TERMS}, SymInt[] counts, str key, bool need_dx, bool need_dw, bool need_db) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _linear_fwd,
    _linear_outputs,
    backward=_linear_backward,
    setup_context=_linear_setup,
    flops=_linear_flops,
    replays=False,
)


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    overlap: Overlap,
    *,
    bias: Tensor | None = None,
    sequence_parallel: bool = True,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Cross entropy of `x @ weight.T + bias`, the vocabulary sharded over the ranks, without storing the logits.

    Shapes: T tokens in all, t on this rank (even_rows); D hidden size, V words in all, W ranks.
        x        [t, D]       float32, float16, bfloat16 (float64 on the CPU); [..., D] without sequence_parallel
        weight   [V / W, D]   this rank's rows, same dtype as x; with `main_grad` its gradient is added there
        target   [...]        T of them, int64 or int32, the same on every rank
        bias     [V / W]
    Returns the loss, float32 [], equal on every rank; options as `linear_cross_entropy` has them ("none" is not one).
    Memory: about 300 MiB of logits at a time, x of all tokens and its gradient while forward runs; dx [t, D] and
        dweight are made in forward and kept, so a second backward raises.
    Sends x once and its gradient once, and 12 bytes a token. Raises ValueError naming the argument.
    """
    op = "vocab_parallel_linear_cross_entropy"
    main_grad = getattr(weight, "main_grad", None)
    x, weight, bias = cast_by_autocast(x, weight, bias)
    check_loss_arguments(op, target, reduction, label_smoothing, z_loss, softcap)
    checks.one_of(op, "reduction", reduction, ("mean", "sum"))
    checks.floating(op, x=x, weight=weight, bias=bias)
    checks.same_device(op, "x", x, weight=weight, bias=bias, target=target)
    checks.shape(op, "weight", weight, (*weight.shape[:1], x.shape[-1]), "[words of this rank, last dim of x]")
    checks.shape(op, "bias", bias, weight.shape[:1], "first dim of weight")
    checks.same_dtype(op, "x", x, weight=weight, bias=bias)
    rows, flat = as_rows(x), as_flat(target)
    counts = even_rows(flat.shape[0], overlap.size) if sequence_parallel and overlap.size > 1 else ()
    have, tokens = rows.shape[0], counts[overlap.rank] if counts else flat.shape[0]
    checks.require(have == tokens, op, "x", f"have {tokens} of target's {flat.shape[0]} tokens", list(x.shape))
    overlap.transport.compare(op, counts, [rows[:0], weight, bias])
    needs = (torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias))
    terms = (ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0))
    loss: Tensor = _linear_op(
        rows, weight, bias, flat, main_grad, reduction, *terms, list(counts), overlap.key, *needs
    )[0]  # fmt: skip
    return loss
