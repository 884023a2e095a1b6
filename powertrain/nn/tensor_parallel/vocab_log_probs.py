"""`linear_log_probs` of a vocabulary that is sharded over the ranks of a group.

    peak = max over ranks of peak_r;   log_total = log sum over ranks of exp(peak_r - peak + log_total_r)
    entropy = sum over ranks of w_r (entropy_r - log w_r),  log w_r = peak_r - peak + log_total_r - log_total
    the target's z is on one rank; divergence, and the sum that its gradient subtracts: sums over ranks

Each rank sends four floats a token, ten with a teacher, and never logits. These statistics suffice for dlogits.

Source: Shoeybi et al., arXiv:1909.08053, section 3 (vocabulary-parallel loss). Formulas: ops/linear_log_probs.py.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from powertrain.nn.tensor_parallel.token_shards import even_rows
from powertrain.nn.tensor_parallel.vocab import summed_dx
from powertrain.ops.linear_cross_entropy import (
    blocks_within_scratch,
    grads_by_vocab_blocks,
    logits_into,
    new_scratch,
)
from powertrain.ops.linear_log_probs import LogProbs, Teacher, check_arguments, finish, new_results, weighted, z_of
from powertrain.ops.log_prob_kernels import Options, launch_divergence, launch_grads, launch_stats
from powertrain.ops.shapes import acc_dtype, as_flat, as_rows, empty, wanted
from powertrain.parallel.overlap import Overlap, find
from powertrain.parallel.transport.base import RowCounts
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, use_kernel
from powertrain.runtime.flops import Shape

_OP = "linear_log_probs"


# -- one rank's logits: by kernels, or by plain PyTorch on the CPU


def _shard_stats(logits: Tensor, target: Tensor, options: Options, entropy: bool, start: int, size: int) -> Tensor:
    """[4, rows]: peak, log_total, z of the target, entropy of this rank's softmax."""
    own = logits.new_zeros((4, logits.shape[0]), dtype=acc_dtype(logits.dtype))
    if use_kernel(_OP, logits):
        launch_stats(logits, target, options, own[:2], own[2], own[3] if entropy else None, start, size)
        return own
    z = z_of(logits, options)
    own[0] = z.amax(1)
    own[1] = (z - own[0][:, None]).logsumexp(1)
    # another rank's tokens read column 0 and count 0, so that the sum over ranks is the one rank's value
    index = target - start
    here = (index >= 0) & (index < logits.shape[1])
    own[2] = torch.where(here, z.gather(1, torch.where(here, index, 0).long()[:, None])[:, 0], 0.0)
    out_of_range = ((target < 0) | (target >= size)) & (target != options.ignore_index)
    # as the kernel gives it: an error on one rank alone would leave the others waiting
    own[2].masked_fill_(out_of_range, torch.nan)
    log_p = z - own[0][:, None] - own[1][:, None]
    own[3] = -weighted(log_p.exp(), log_p).sum(1)
    return own


def _shard_divergence(logits: Tensor, teacher_logits: Tensor, stats: Tensor, options: Options) -> Tensor:
    """[2, rows]: this rank's parts of the divergence and of its gradient's center."""
    own = logits.new_empty((2, logits.shape[0]), dtype=stats.dtype)
    if use_kernel(_OP, logits):
        launch_divergence(logits, teacher_logits, stats[:2], stats[3:5], options, own[0], own[1])
        return own
    log_p, log_q = _log_p(logits, stats[:2], options), _log_p(teacher_logits, stats[3:5], _of_teacher(options))
    p, q, beta = log_p.exp(), log_q.exp(), options.beta
    if options.kind == 0:
        own[0], own[1] = weighted(q, log_q - log_p).sum(1), 0.0
    elif options.kind == 1:
        own[:] = weighted(p, log_p - log_q).sum(1)
    else:
        ratio = (log_p - log_q).clamp(-80.0, 80.0).exp()
        own[1] = -weighted(p, (1 - beta + beta / ratio).log()).sum(1)
        own[0] = (1 - beta) * own[1] - beta * weighted(q, (beta + (1 - beta) * ratio).log()).sum(1)
    return own


def _log_p(logits: Tensor, total: Tensor, options: Options) -> Tensor:
    peak, log_total = total[:, :, None]
    return z_of(logits, options) - peak - log_total


def _of_teacher(options: Options) -> Options:
    return options._replace(softcap=options.teacher_softcap)


def _shard_grads_(
    logits: Tensor, teacher_logits: Tensor | None, target: Tensor, stats: Tensor, grads: tuple[Tensor | None, ...],
    options: Options, start: int, size: int,
) -> None:  # fmt: skip
    """The logits become their gradients, in place."""
    if use_kernel(_OP, logits):
        launch_grads(logits, teacher_logits, target, stats, (grads[0], grads[1], grads[2]), options, start, size)
        return
    entropy, center = stats[2, :, None], stats[5, :, None]
    dlog_probs, dentropy, ddivergence = (None if g is None else g[:, None] for g in grads)
    log_p = _log_p(logits, stats[:2], options)
    p, d = log_p.exp(), torch.zeros_like(log_p)
    if dlog_probs is not None:
        index = target - start
        rows = ((index >= 0) & (index < logits.shape[1])).nonzero()[:, 0]
        d -= dlog_probs * p
        d[rows, index[rows]] += dlog_probs[rows, 0]
    if dentropy is not None:
        d -= dentropy * weighted(p, log_p + entropy)
    if ddivergence is not None and teacher_logits is not None:
        log_q = _log_p(teacher_logits, stats[3:5], _of_teacher(options))
        beta = options.beta
        if options.kind == 0:
            d += ddivergence * (p - log_q.exp())
        elif options.kind == 1:
            d += ddivergence * weighted(p, log_p - log_q - center)
        else:
            above = -(1 - beta + beta / (log_p - log_q).clamp(-80.0, 80.0).exp()).log()
            d += ddivergence * (1 - beta) * weighted(p, above - center)
    d /= options.temperature
    if options.softcap:
        d *= 1.0 - (z_of(logits, options) * options.temperature / options.softcap).square()
    logits.copy_(d.masked_fill_((target == options.ignore_index)[:, None], 0.0))


# -- all ranks' statistics. Ranks are added in their order, so all get the same bits


def _gathered(own: Tensor, overlap: Overlap) -> Tensor:
    """All-gather of a tensor: [...] on each rank -> [W, ...]."""
    return overlap.transport.all_gather(own[None].contiguous(), RowCounts((1,) * overlap.size))


def _combined_stats(own: Tensor, overlap: Overlap) -> Tensor:
    """Combine the ranks' `_shard_stats` to those of the whole vocabulary, [4, rows]."""
    if overlap.size == 1:
        return own
    peak_r, log_total_r, hit_r, entropy_r = _gathered(own, overlap).unbind(1)
    peak = peak_r.amax(0)
    lse_r = peak_r - peak + log_total_r
    log_total = lse_r.logsumexp(0)
    log_share = lse_r - log_total
    return torch.stack((peak, log_total, hit_r.sum(0), (log_share.exp() * (entropy_r - log_share)).sum(0)))


def _combined_top(logits: Tensor, top_k: int, options: Options, start: int, overlap: Overlap) -> tuple[Tensor, Tensor]:
    """z of the largest of all ranks, and their indices; [rows, top_k] each."""
    # the top k of all ranks are among the top k of each
    values, index = logits.topk(min(top_k, logits.shape[1]))
    values, index = z_of(values, options), index + start
    if overlap.size == 1:
        return values, index
    values, index = (_gathered(t, overlap).movedim(0, 1).flatten(1) for t in (values, index))
    best, at = values.topk(top_k)
    return best, index.gather(1, at)


def _whole(x: Tensor, counts: Sequence[int], overlap: Overlap) -> Tensor:
    return overlap.transport.all_gather(x, RowCounts(tuple(counts))) if counts else x


# -- the op


def _outputs(x: Tensor, weight: Any, bias: Any, target: Tensor, teacher_x: Any, *rest: Any) -> tuple[Any, ...]:
    entropy, top_k = rest[-4:-2]
    return new_results(x, target.shape[0], teacher_x is not None, entropy, top_k)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, teacher_x: Tensor | None,
    teacher_weight: Tensor | None, teacher_bias: Tensor | None, main_grad: Tensor | None, ignore_index: int,
    temperature: float, softcap: float, teacher_softcap: float, beta: float, entropy: bool, top_k: int,
    counts: Sequence[int], key: str,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    overlap, options = find(key), Options(ignore_index, temperature, softcap, teacher_softcap, beta)
    outputs = _outputs(x, weight, bias, target, teacher_x, entropy, top_k, counts, key)
    log_probs, _, divergence, top, top_indices, stats = outputs
    whole, words = _whole(x, counts, overlap), weight.shape[0]
    teacher_rows = None if teacher_x is None else _whole(teacher_x, counts, overlap)
    start, size = overlap.rank * words, overlap.size * words
    num_logits = 1 if teacher_x is None else 2
    blocks = blocks_within_scratch(target.shape[0], num_logits * words, x.element_size())
    height = max((b.stop - b.start for b in blocks), default=0)
    scratch, teacher_scratch = (
        new_scratch(x, height, words),
        new_scratch(x, height if num_logits == 2 else 0, words),
    )
    for rows in blocks:
        count = rows.stop - rows.start
        logits = logits_into(whole[rows], weight, bias, scratch[:count])
        # every rank has the same blocks, as these collectives need: they follow from sizes that are equal on all
        found = _combined_stats(_shard_stats(logits, target[rows], options, entropy, start, size), overlap)
        stats[0, rows], stats[1, rows], log_probs[rows], stats[2, rows] = found
        if top is not None and top_indices is not None:
            top[rows], top_indices[rows] = _combined_top(logits, top_k, options, start, overlap)
        if teacher_rows is not None and teacher_weight is not None and divergence is not None:
            teacher_logits = logits_into(teacher_rows[rows], teacher_weight, teacher_bias, teacher_scratch[:count])
            own = _shard_stats(teacher_logits, target[rows], _of_teacher(options), False, start, size)
            stats[3:5, rows] = _combined_stats(own, overlap)[:2]
            own = _shard_divergence(logits, teacher_logits, stats[:, rows], options)
            divergence[rows], stats[5, rows] = _gathered(own, overlap).sum(0) if overlap.size > 1 else own
    # in this order, as `finish` subtracts them
    log_probs.sub_(stats[0]).sub_(stats[1]).masked_fill_(target == ignore_index, 0.0)
    finish(outputs, target, ignore_index)
    return outputs


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, *teacher, ctx.main_grad = inputs[:8]
    ctx.options, (ctx.counts, ctx.key) = inputs[8:13], inputs[15:]
    ctx.save_for_backward(x, weight, bias, target, output[5], *teacher)
    ctx.mark_non_differentiable(*(t for t in output[3:] if t is not None))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    wants = grads[:3]
    if not any(g is not None for g in wants):
        return (None,) * 17
    op = _bwd_op if ctx.main_grad is None else _bwd_into_op
    needs = ctx.needs_input_grad[:3]
    results = op(*wants, *ctx.saved_tensors, ctx.main_grad, *ctx.options, list(ctx.counts), ctx.key, *needs)
    dx, dw, db = results if ctx.main_grad is None else (results[0], None, results[1])
    return (wanted(dx, needs[0]), wanted(dw, needs[1]), wanted(db, needs[2]), *(None,) * 14)


def _bwd_outputs(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias, main_grad, (need_dx, need_dw, need_db) = *args[3:6], args[11], args[-3:]
    dw = weight.new_empty(weight.shape) if need_dw and main_grad is None else empty(x)
    db = bias.new_empty(bias.shape) if need_db and bias is not None else empty(x)
    return x.new_empty(x.shape) if need_dx else empty(x), dw, db


def _bwd(
    dlog_probs: Tensor | None, dentropy: Tensor | None, ddivergence: Tensor | None, x: Tensor, weight: Tensor,
    bias: Tensor | None, target: Tensor, stats: Tensor, teacher_x: Tensor | None, teacher_weight: Tensor | None,
    teacher_bias: Tensor | None, main_grad: Tensor | None, ignore_index: int, temperature: float, softcap: float,
    teacher_softcap: float, beta: float, counts: Sequence[int], key: str, need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    overlap, options = find(key), Options(ignore_index, temperature, softcap, teacher_softcap, beta)
    whole, local_vocab_size = _whole(x, counts, overlap), weight.shape[0]
    teacher_rows = None if teacher_x is None or ddivergence is None else _whole(teacher_x, counts, overlap)
    start, size = overlap.rank * local_vocab_size, overlap.size * local_vocab_size

    def make_dlogits(logits: Tensor, cols: slice) -> None:
        teacher = None
        if teacher_rows is not None and teacher_weight is not None:
            part = None if teacher_bias is None else teacher_bias[cols]
            teacher = logits_into(teacher_rows, teacher_weight[cols], part, new_scratch(x, *logits.shape))
        grads = (dlog_probs, dentropy, ddivergence)
        _shard_grads_(logits, teacher, target, stats, grads, options, start + cols.start, size)

    dx = torch.empty_like(whole) if need_dx else empty(x)
    dw = torch.empty_like(weight) if need_dw and main_grad is None else empty(x)
    db = torch.empty_like(bias) if need_db and bias is not None else empty(x)
    needs = (need_dx, need_dw, need_db)
    grads_by_vocab_blocks(
        make_dlogits, whole, weight, bias, (dx, dw, db), main_grad, needs, other_logits=int(teacher_rows is not None)
    )
    return summed_dx(dx, counts, overlap) if need_dx else dx, dw, db


def _flops(target: Shape, weight: Shape, teacher_weight: Shape | None, **needs: Any) -> int:
    products = 1 + needs.get("need_dx", 0) + needs.get("need_dw", 0)
    return 2 * target[0] * (prod(weight) * products + (0 if teacher_weight is None else prod(teacher_weight)))


_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor target"
_TEACHER = "Tensor? teacher_x, Tensor? teacher_weight, Tensor? teacher_bias"
_OPTIONS = "int ignore_index, float temperature, float softcap, float teacher_softcap, float beta"
_GRADS = "Tensor? dlog_probs, Tensor? dentropy, Tensor? ddivergence"
_END = "SymInt[] counts, str key, bool need_dx, bool need_dw, bool need_db"
_fwd_op = Op(
    f"vocab_linear_log_probs({_INPUTS}, {_TEACHER}, Tensor? main_grad, {_OPTIONS}, bool entropy, int top_k, "
    "SymInt[] counts, str key) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _outputs,
    backward=_backward,
    setup_context=_setup_context,
    flops=_flops,
    replays=False,
)
_bwd_op = Op(
    f"vocab_linear_log_probs_bwd({_GRADS}, {_INPUTS}, Tensor stats, {_TEACHER}, Tensor? main_grad, {_OPTIONS}, "
    f"{_END}) -> (Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_outputs,
    flops=_flops,
    replays=False,
)
_bwd_into_op = Op(
    f"vocab_linear_log_probs_bwd_into({_GRADS}, {_INPUTS}, Tensor stats, {_TEACHER}, Tensor(a!) main_grad, {_OPTIONS}, "
    f"{_END}) -> (Tensor, Tensor)",
    lambda *args: _bwd(*args)[::2],
    lambda *args: _bwd_outputs(*args)[::2],
    flops=_flops,
    replays=False,
)


def vocab_parallel_linear_log_probs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    overlap: Overlap,
    *,
    bias: Tensor | None = None,
    sequence_parallel: bool = True,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    entropy: bool = False,
    top_k: int = 0,
    teacher: Teacher | None = None,
) -> LogProbs:
    """`linear_log_probs` with the vocabulary sharded over the ranks.

    Shapes: T tokens in all, t on this rank (even_rows); D hidden size, V words in all, W ranks.
        x        [t, D]       float32, float16, bfloat16 (float64 on the CPU); [..., D] without sequence_parallel
        weight   [V / W, D]   this rank's rows, same dtype as x; with `main_grad` its gradient is added there
        target   [...]        T of them, int64 or int32, the same on every rank
        bias     [V / W]
        teacher               its x as x is, its weight and bias this rank's rows
    Returns `LogProbs` of all tokens, equal on every rank, and each rank must differentiate all of it.
    Memory: about 300 MiB of logits at a time, and x of all tokens while forward or backward runs; saves the inputs.
    Sends x twice and its gradient once, and at most 40 bytes a token and rank beside top_k.
    Raises ValueError naming the argument.
    """
    op = "vocab_parallel_linear_log_probs"
    main_grad = getattr(weight, "main_grad", None)
    rows, flat = as_rows(x), as_flat(target)
    counts = even_rows(flat.shape[0], overlap.size) if sequence_parallel and overlap.size > 1 else ()
    have, tokens = rows.shape[0], counts[overlap.rank] if counts else flat.shape[0]
    checks.require(have == tokens, op, "x", f"have {tokens} of target's {flat.shape[0]} tokens", list(x.shape))
    rows_teacher = None if teacher is None else teacher._replace(x=as_rows(teacher.x))
    vocab_size = weight.shape[0] * overlap.size
    check_arguments(
        op, rows, weight, flat[:have], bias, temperature, softcap, top_k, rows_teacher, main_grad, vocab_size
    )
    overlap.transport.compare(op, counts, [rows[:0], weight, bias])
    teacher_tensors: list[Tensor | None] = [None, None, None]
    caps = (0.0, 0.0)
    if teacher is not None:
        teacher_tensors = [None if t is None else t.detach() for t in (as_rows(teacher.x), *teacher[1:3])]
        caps = (float(teacher.softcap or 0.0), float(teacher.beta))
    results = _fwd_op(
        rows, weight, bias, flat, *teacher_tensors, main_grad, ignore_index, float(temperature), float(softcap or 0.0),
        *caps, entropy, top_k, list(counts), overlap.key,
    )[:5]  # fmt: skip
    absent = (False, not entropy, teacher is None, not top_k, not top_k)
    shaped = (None if no else t.view((*target.shape, *t.shape[1:])) for t, no in zip(results, absent, strict=True))
    return LogProbs(*shaped)  # type: ignore[arg-type]
