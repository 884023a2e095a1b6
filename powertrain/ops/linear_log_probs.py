"""Log-probabilities of tokens under `softmax(x @ weight.T + bias)`, without storing the logits.

    z    = x weightᵀ + bias;   z = softcap tanh(z / softcap);   z = z / temperature
    log p = z - log sum exp z
    log_probs  = log p[target]                                     dz = g (onehot - p)
    entropy    = -sum p log p                                      dz = -g p (log p + entropy)
    divergence from a teacher's q, with m = beta q + (1 - beta) p:
      beta 0   KL(q | p) = sum q (log q - log p)                   dz = g (p - q)
      beta 1   KL(p | q) = sum p (log p - log q)                   dz = g p (log p - log q - KL)
      between  beta KL(q | m) + (1 - beta) KL(p | m)               dz = g (1 - beta) p (log p - log m - KL(p | m))

Forward makes the logits in blocks of rows, and the teacher's beside them. Backward makes them once more, in blocks of
the vocabulary, by the loop of linear_cross_entropy's reduction "none", and shares its scratch, its GEMMs and main_grad.
Four GEMMs of 2*T*D*V operations, and two of the teacher's. Saved: the inputs and four floats a token. With keep_logits
the logits are saved too, and backward copies its blocks from them: three GEMMs.

The kernels (log_prob_kernels.py) work on shards of a vocabulary too: nn/tensor_parallel/vocab_log_probs.py.

Sources: Agarwal et al., arXiv:2306.13649 (generalized Jensen-Shannon divergence); online softmax after Milakov and
Gimelshein, arXiv:1805.02867.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.batch_invariance import is_batch_invariant
from powertrain.ops.cross_entropy import refuse_targets_outside
from powertrain.ops.gemm.row_invariant import RowInvariantLinear, row_invariant_linear_
from powertrain.ops.linear_cross_entropy import (
    IntoMainGrad,
    blocks_within_scratch,
    grads_by_vocab_blocks,
    logits_into,
    new_scratch,
)
from powertrain.ops.log_prob_kernels import Options, launch_divergence, launch_grads, launch_stats, new_stats
from powertrain.ops.shapes import acc_dtype, as_flat, as_rows, empty, wanted
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, autocast_dtype, cast_by_autocast, falls_back, use_kernel, without_autocast
from powertrain.runtime.flops import Shape


class LogProbs(NamedTuple):
    """What `linear_log_probs` returns, in nats: float32 (float64 for float64), shaped like target; None for results
    that were not requested."""

    log_probs: Tensor
    entropy: Tensor | None = None
    divergence: Tensor | None = None
    top_log_probs: Tensor | None = None  # [..., top_k], largest first; without gradient
    top_indices: Tensor | None = None  # [..., top_k] int64


class Teacher(NamedTuple):
    """A distribution q to measure the divergence from; it gets no gradient.

    x [..., E], weight [V, E], bias [V] of one dtype (E may differ from the student's D); softcap of its logits
    beta   0: forward KL(q | p), 1: reverse KL(p | q), between: the generalized Jensen-Shannon divergence
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    beta: float = 0.0


def linear_log_probs_ref(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    entropy: bool = False,
    top_k: int = 0,
    teacher: Teacher | None = None,
    linear: Callable[..., Tensor] = F.linear,
) -> LogProbs:
    """The specification of `linear_log_probs`, in plain PyTorch."""
    log_p = _log_softmax(linear(x, weight, bias), temperature, softcap)
    # an ignored target may be any number, so the gather reads column 0 in its place
    kept = target != ignore_index
    picked = log_p.gather(-1, torch.where(kept, target, 0).long().unsqueeze(-1)).squeeze(-1)
    results: list[Tensor | None] = [torch.where(kept, picked, 0.0), None, None]
    if entropy:
        results[1] = torch.where(kept, -weighted(log_p.exp(), log_p).sum(-1), 0.0)
    if teacher is not None:
        with torch.no_grad():
            log_q = _log_softmax(linear(teacher.x, teacher.weight, teacher.bias), temperature, teacher.softcap)
        results[2] = torch.where(kept, _divergence_ref(log_p, log_q.to(log_p.dtype), teacher.beta), 0.0)
    return LogProbs(*results, *(log_p.detach().topk(top_k) if top_k else ()))  # type: ignore[arg-type]


def _log_softmax(logits: Tensor, temperature: float, softcap: float | None) -> Tensor:
    z = logits.to(acc_dtype(logits.dtype))
    z = softcap * torch.tanh(z / softcap) if softcap else z
    return torch.log_softmax(z / temperature, dim=-1)


def _divergence_ref(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    p, q = log_p.exp(), log_q.exp()
    if beta == 0.0:
        return weighted(q, log_q - log_p).sum(-1)
    if beta == 1.0:
        return weighted(p, log_p - log_q).sum(-1)
    # by ratios: a log of the mixture would be rounded at the size of log p, not of the difference. Not by one and its
    # inverse: the slope of that is the inverse's square, which overflows
    gap = (log_p - log_q).clamp(-80.0, 80.0)
    from_q, from_p = -(beta + (1 - beta) * gap.exp()).log(), -((1 - beta) + beta * (-gap).exp()).log()
    return (beta * weighted(q, from_q) + (1 - beta) * weighted(p, from_p)).sum(-1)


def weighted(p: Tensor, values: Tensor) -> Tensor:
    """p * values; 0 where p is 0, as that of a logit of -inf, whose log p is -inf too."""
    return p * values.masked_fill(p == 0, 0.0)


def _outputs(
    x: Tensor, weight: Tensor, bias: Any, target: Tensor, teacher_x: Tensor | None, *rest: Any
) -> tuple[Tensor | None, ...]:
    *_, entropy, top_k, _, keep_logits = rest
    kept = new_scratch(x, target.shape[0], weight.shape[0]) if keep_logits else empty(x)
    return *new_results(x, target.shape[0], teacher_x is not None, entropy, top_k), kept


def new_results(x: Tensor, T: int, divergence: bool, entropy: bool, top_k: int) -> tuple[Tensor | None, ...]:
    """Uninitialized (log_probs, entropy, divergence, top, top_indices, stats); None where not requested."""
    values = x.new_empty((), dtype=acc_dtype(x.dtype))
    return (
        values.new_empty(T),
        values.new_empty(T) if entropy else None,
        values.new_empty(T) if divergence else None,
        values.new_empty((T, top_k)) if top_k else None,
        values.new_empty((T, top_k), dtype=torch.int64) if top_k else None,
        new_stats(values, T),
    )


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    teacher_x: Tensor | None,
    teacher_weight: Tensor | None,
    teacher_bias: Tensor | None,
    main_grad: Tensor | None,
    ignore_index: int,
    temperature: float,
    softcap: float,
    teacher_softcap: float,
    beta: float,
    entropy: bool,
    top_k: int,
    batch_invariant: bool,
    keep_logits: bool,
) -> tuple[Tensor | None, ...]:
    options = Options(ignore_index, temperature, softcap, teacher_softcap, beta)
    outputs = _outputs(x, weight, bias, target, teacher_x, entropy, top_k, batch_invariant, keep_logits)
    log_probs, _, divergence, top, top_indices, stats, kept = outputs
    assert log_probs is not None and stats is not None and kept is not None
    linear = row_invariant_linear_ if batch_invariant else logits_into
    V = weight.shape[0]
    num_logits = 1 if teacher_x is None else 2
    blocks = blocks_within_scratch(x.shape[0], num_logits * V, x.element_size())
    height = max((b.stop - b.start for b in blocks), default=0)
    scratch, teacher_scratch = (new_scratch(x, n, V) for n in (0 if keep_logits else height, height * (num_logits - 1)))
    for rows in blocks:
        count = rows.stop - rows.start
        logits = linear(x[rows], weight, bias, kept[rows] if keep_logits else scratch[:count])
        own = stats[:, rows]
        launch_stats(
            logits, target[rows], options, own[:2], log_probs[rows], own[2] if entropy else None, 0, V, is_whole=True,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        if top is not None and top_indices is not None:
            values, top_indices[rows] = logits.topk(top_k)
            top[rows] = z_of(values, options)
        if teacher_x is not None and teacher_weight is not None and divergence is not None:
            teacher_logits = linear(teacher_x[rows], teacher_weight, teacher_bias, teacher_scratch[:count])
            teacher_options = options._replace(softcap=teacher_softcap)
            launch_stats(
                teacher_logits, target[rows], teacher_options, own[3:5], None, None, 0, V,
                batch_invariant=batch_invariant,
            )  # fmt: skip
            launch_divergence(
                logits, teacher_logits, own[:2], own[3:5], options, divergence[rows], own[5], batch_invariant
            )
    finish(outputs[:6], target, ignore_index)
    return outputs


def z_of(logits: Tensor, options: Options) -> Tensor:
    z = logits.to(acc_dtype(logits.dtype))
    return (options.softcap * torch.tanh(z / options.softcap) if options.softcap else z) / options.temperature


def finish(outputs: tuple[Tensor | None, ...], target: Tensor, ignore_index: int) -> None:
    """Statistics of the whole vocabulary to the results other than log_probs; 0 for ignored tokens. top holds z until
    here."""
    _, entropy, divergence, top, _, stats = outputs
    assert stats is not None
    if entropy is not None:
        entropy.copy_(stats[2]).masked_fill_(target == ignore_index, 0.0)
    if divergence is not None:
        divergence.masked_fill_(target == ignore_index, 0.0)
    if top is not None:
        # maximum first: their sum would be rounded at the size of the larger one
        top.sub_(stats[0][:, None]).sub_(stats[1][:, None])


def _bwd_outputs(
    dlog_probs: Any,
    dentropy: Any,
    ddivergence: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    stats: Tensor,
    kept: Any,
    teacher_x: Any,
    teacher_weight: Any,
    teacher_bias: Any,
    main_grad: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    need_dx, need_dw, need_db = rest[-3:]
    dx = x.new_empty(x.shape) if need_dx else empty(x)
    dw = weight.new_empty(weight.shape) if need_dw and main_grad is None else empty(x)
    return dx, dw, bias.new_empty(bias.shape) if need_db and bias is not None else empty(x)


def _bwd(
    dlog_probs: Tensor | None,
    dentropy: Tensor | None,
    ddivergence: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    stats: Tensor,
    kept: Tensor | None,
    teacher_x: Tensor | None,
    teacher_weight: Tensor | None,
    teacher_bias: Tensor | None,
    main_grad: Tensor | None,
    ignore_index: int,
    temperature: float,
    softcap: float,
    teacher_softcap: float,
    beta: float,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    options = Options(ignore_index, temperature, softcap, teacher_softcap, beta)
    needs = (need_dx, need_dw, need_db)
    grads = _bwd_outputs(
        dlog_probs, dentropy, ddivergence, x, weight, bias, target, stats, None, None, None, None, main_grad, *needs
    )
    teacher_rows = teacher_x if ddivergence is not None else None

    def make_dlogits(logits: Tensor, cols: slice) -> None:
        teacher = None
        if teacher_rows is not None and teacher_weight is not None:
            part = None if teacher_bias is None else teacher_bias[cols]
            teacher = logits_into(teacher_rows, teacher_weight[cols], part, new_scratch(x, *logits.shape))
        launch_grads(
            logits, teacher, target, stats, (dlog_probs, dentropy, ddivergence), options, cols.start, weight.shape[0]
        )

    others = int(teacher_rows is not None)
    grads_by_vocab_blocks(make_dlogits, x, weight, bias, grads, main_grad, needs, other_logits=others, kept=kept)
    return grads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, *teacher, ctx.main_grad = inputs[:8]
    ctx.options = inputs[8:13]
    kept = output[6] if inputs[16] else None
    ctx.save_for_backward(x, weight, bias, target, output[5], kept, *teacher)
    ctx.mark_non_differentiable(*(t for t in output[3:] if t is not None))
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dlog_probs: Tensor | None, dentropy: Tensor | None, ddivergence: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    grads = [dlog_probs, dentropy, ddivergence]
    if not any(g is not None for g in grads):
        return (None,) * 17
    op = _bwd_op if ctx.main_grad is None else _bwd_into_op
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    results = op(*grads, *ctx.saved_tensors, ctx.main_grad, *ctx.options, need_dx, need_dw, need_db)
    dx, dw, db = results if ctx.main_grad is None else (results[0], None, results[1])
    dw = None if ctx.main_grad is not None else wanted(dw, need_dw)
    return (wanted(dx, need_dx), dw, wanted(db, need_db), *(None,) * 14)


def _fwd_flops(x: Shape, weight: Shape, teacher_weight: Shape | None, **_: Any) -> int:
    return 2 * x[0] * (prod(weight) + (0 if teacher_weight is None else prod(teacher_weight)))


def _bwd_flops(
    x: Shape, weight: Shape, kept: Shape | None, teacher_weight: Shape | None, need_dx: bool, need_dw: bool, **_: Any
) -> int:
    products = (kept is None) + need_dx + need_dw
    return 2 * x[0] * (prod(weight) * products + (0 if teacher_weight is None else prod(teacher_weight)))


_TEACHER = "Tensor? teacher_x, Tensor? teacher_weight, Tensor? teacher_bias"
_OPTIONS = "int ignore_index, float temperature, float softcap, float teacher_softcap, float beta"
_fwd_op = Op(
    f"linear_log_probs_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor target, {_TEACHER}, Tensor? main_grad, "
    f"{_OPTIONS}, bool entropy, int top_k, bool batch_invariant, bool keep_logits) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _outputs,
    backward=_backward,
    setup_context=_setup_context,
    flops=_fwd_flops,
)
_BWD = (
    "Tensor? dlog_probs, Tensor? dentropy, Tensor? ddivergence, Tensor x, Tensor weight, Tensor? bias, Tensor target, "
    f"Tensor stats, Tensor? kept, {_TEACHER}"
)
_NEEDS = "bool need_dx, bool need_dw, bool need_db"
_bwd_op = Op(
    f"linear_log_probs_bwd({_BWD}, Tensor? main_grad, {_OPTIONS}, {_NEEDS}) -> (Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_outputs,
    flops=_bwd_flops,
)
_bwd_into_op = Op(
    f"linear_log_probs_bwd_into({_BWD}, Tensor(a!) main_grad, {_OPTIONS}, {_NEEDS}) -> (Tensor, Tensor)",
    lambda *args: _bwd(*args)[::2],
    lambda *args: _bwd_outputs(*args)[::2],
    flops=_bwd_flops,
)


@falls_back("linear_log_probs")
def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    entropy: bool = False,
    top_k: int = 0,
    teacher: Teacher | None = None,
    main_grad: Tensor | None = None,
    batch_invariant: bool = False,
    keep_logits: bool = False,
) -> LogProbs:
    """Log-probability of each target under softmax(x @ weight.T + bias), without storing the logits.

    Shapes: D hidden size, V vocabulary size, any leading dims, T tokens in all.
        x          [..., D]  float32, float16 or bfloat16 (float64 on the CPU)
        weight     [V, D]    same dtype as x; under autocast both are cast to its dtype, this being a matmul
        target     [...]     int64 or int32 in [0, V), or `ignore_index` to leave a token out
        bias       [V]       same dtype as x, or None
        softcap              logits become softcap * tanh(logits / softcap); None or 0: unchanged
        temperature          divides the logits, after softcap
        entropy              also return the entropy of each token's distribution
        top_k                also return the top_k largest log-probabilities of each token, with their indices
        teacher              a `Teacher`: also return each token's divergence from it, at the same temperature
        main_grad  [V, D]    float32, contiguous, or None: backward adds the weight's gradient here
        batch_invariant      on a GPU a token's results have the same bits whatever the number and values of the
                             other tokens; the logits are then computed by our kernel with one fixed tile, not by
                             cuBLAS, which takes longer. So it is inside `powertrain.batch_invariant()`
        keep_logits          save the logits for backward, [T, V] in x's dtype, which then takes two products instead of
                             three
    Returns `LogProbs`, in nats, float32 (float64 for float64). log_probs, entropy and divergence are differentiable,
        and 0 for tokens left out; top_log_probs are not. A target out of range gives nan from the kernels and an error
        from plain PyTorch (CPU).
    Numerics: logits and their gradients are rounded to x's dtype, as in plain PyTorch; everything else is float32.
        Deterministic. No host synchronisation. batch_invariant holds for results, not for gradients: dweight is a sum
        over the tokens.
    Memory: about 300 MiB of logits at a time; saves the inputs and 24 bytes a token, with keep_logits all logits.
    Raises ValueError naming argument, expected and given value. Double backward and vmap are not implemented and say
        so.
    Source: Agarwal et al., arXiv:2306.13649 for the divergence between 0 and 1.
    """
    if (dtype := autocast_dtype(x)) is not None:
        x, weight, bias = cast_by_autocast(x, weight, bias)
        if teacher is not None:
            teacher_bias = None if teacher.bias is None else teacher.bias.to(dtype)
            teacher = teacher._replace(x=teacher.x.to(dtype), weight=teacher.weight.to(dtype), bias=teacher_bias)
    batch_invariant = batch_invariant or is_batch_invariant()
    check_arguments("linear_log_probs", x, weight, target, bias, temperature, softcap, top_k, teacher, main_grad)
    if not use_kernel("linear_log_probs", x):
        return _plain(
            x, weight, target, main_grad, batch_invariant, bias=bias, temperature=temperature, softcap=softcap,
            ignore_index=ignore_index, entropy=entropy, top_k=top_k, teacher=teacher,
        )  # fmt: skip
    leaves = (x, weight) if bias is None else (x, weight, bias)
    keep_logits = keep_logits and torch.is_grad_enabled() and any(t.requires_grad for t in leaves)
    teacher_tensors: list[Tensor | None] = [None, None, None]
    shape = (0.0, 0.0)
    if teacher is not None:
        teacher_tensors = [None if t is None else t.detach() for t in (as_rows(teacher.x), *teacher[1:3])]
        shape = (float(teacher.softcap or 0.0), float(teacher.beta))
    results = _fwd_op(
        as_rows(x), weight, bias, as_flat(target), *teacher_tensors, main_grad,
        int(ignore_index), float(temperature), float(softcap or 0.0), *shape, entropy, top_k, batch_invariant,
        keep_logits,
    )[:5]  # fmt: skip
    absent = (False, not entropy, teacher is None, not top_k, not top_k)
    shaped = (None if no else t.view((*target.shape, *t.shape[1:])) for t, no in zip(results, absent, strict=True))
    return LogProbs(*shaped)  # type: ignore[arg-type]


def check_arguments(
    op: str,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    top_k: int,
    teacher: Teacher | None,
    main_grad: Tensor | None,
    vocab_size: int | None = None,
) -> None:
    """vocab_size: of all ranks, where weight is a part."""
    checks.require(x.dim() > 0, op, "x", "have at least one dim", "a scalar")
    checks.require(weight.dim() == 2, op, "weight", "have shape [V, last dim of x]", list(weight.shape))
    if teacher is not None:
        checks.tensor(op, "teacher.x", teacher.x)
        checks.tensor(op, "teacher.weight", teacher.weight)
    teacher_tensors = {} if teacher is None else dict(zip(_TEACHER_NAMES, teacher[:3], strict=True))
    checks.floating(op, x=x, weight=weight, bias=bias, **teacher_tensors)
    others = dict(weight=weight, bias=bias, target=target, main_grad=main_grad, **teacher_tensors)
    checks.same_device(op, "x", x, **others)
    checks.integers(op, "target", target)
    checks.shape(op, "weight", weight, (*weight.shape[:1], x.shape[-1]), "[V, last dim of x]")
    checks.shape(op, "target", target, x.shape[:-1], "x without the last dim")
    checks.shape(op, "bias", bias, weight.shape[:1], "first dim of weight")
    checks.shape(op, "main_grad", main_grad, weight.shape, "shape of weight")
    checks.same_dtype(op, "x", x, weight=weight, bias=bias, **teacher_tensors)
    checks.require(temperature > 0, op, "temperature", "be above 0", temperature)
    checks.require(softcap is None or softcap >= 0, op, "softcap", "be at least 0 (0: none), or None", softcap)
    V = weight.shape[0] if vocab_size is None else vocab_size
    if not 0 <= top_k <= V:
        checks.fail(op, "top_k", f"be from 0 to V = {V}", top_k)
    if main_grad is not None:
        good = main_grad.dtype is torch.float32 and main_grad.is_contiguous()
        got = f"{checks.name(main_grad.dtype)}, strides {main_grad.stride()}"
        checks.require(good, op, "main_grad", "be float32 and contiguous", got)
    if teacher is not None:
        checks.shape(op, "teacher.x", teacher.x, (*target.shape, *teacher.x.shape[-1:]), "[shape of target, E]")
        E = teacher.x.shape[-1]
        checks.shape(op, "teacher.weight", teacher.weight, (*weight.shape[:1], E), "[V, last dim of teacher.x]")
        checks.shape(op, "teacher.bias", teacher.bias, weight.shape[:1], "first dim of weight")
        checks.require(0.0 <= teacher.beta <= 1.0, op, "teacher.beta", "be in [0, 1]", teacher.beta)
        cap = teacher.softcap
        checks.require(cap is None or cap >= 0, op, "teacher.softcap", "be at least 0 (0: none), or None", cap)


_TEACHER_NAMES = ("teacher.x", "teacher.weight", "teacher.bias")


def _plain(
    x: Tensor, weight: Tensor, target: Tensor, main_grad: Tensor | None, batch_invariant: bool, **options: Any
) -> LogProbs:
    with without_autocast(x.device):
        weight = weight if main_grad is None else IntoMainGrad.apply(weight, main_grad)
        linear = _row_invariant_linear if batch_invariant else F.linear
        try:
            return linear_log_probs_ref(x, weight, target, linear=linear, **options)
        except RuntimeError:
            # PyTorch's error names no argument
            if x.is_cpu:
                refuse_targets_outside("linear_log_probs", target, weight.shape[0], options["ignore_index"])
            raise


def _row_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits: Tensor = RowInvariantLinear.apply(as_rows(x), weight, bias)
    return logits.view(*x.shape[:-1], weight.shape[0])
