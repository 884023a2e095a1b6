"""Cross entropy of logits, with label smoothing, z-loss and softcap.

    z     = logits                                         (softcap * tanh(logits / softcap) with a softcap)
    lse   = log sum exp z
    loss  = lse - (1 - ε) z[target] - ε mean(z) + z_loss * lse²          (ε = label_smoothing); 0 where ignored
    dz    = (softmax(z) (1 + 2 z_loss lse) - (1 - ε) onehot(target) - ε / V) * dloss;   dlogits = dz (1 - (z/softcap)²)

"mean" divides by the number of kept tokens, which stays on the device: nothing here waits for the GPU.

Saved: the logits and lse [T] float32; with grad_in_forward dlogits instead. Computed in float32. T rows of V elements
of e bytes: forward reads T*V*e bytes and backward moves 2*T*V*e; made in forward, the gradient of rows up to 128 KiB
costs less, because the second look at a row finds part of it in the L2 cache. About 6 operations and one exponential an
element and pass.

The pieces work on a shard of the vocabulary, [vocab_start, vocab_start + V) of vocab_size: `launch_row_stats` gives
each row's lse, target logit and sum over the shard, `launch_losses` turns those of the whole vocabulary into the loss,
and `launch_dlogits` makes the shard's gradient. Between the first two a vocabulary-parallel loss puts its all-reduces.

A row of odd length does not start at a 16-byte boundary. The kernels then take the whole 16-byte vectors inside the row
as they lie in memory, and the few elements at both ends apart. Few long rows are shared by several programs each, whose
results a second launch joins; the gradient made in forward is then a launch of its own.

Sources: Szegedy et al., arXiv:1512.00567 (smoothing); Chowdhery et al., arXiv:2204.02311 (z-loss); online softmax after
Milakov and Gimelshein, arXiv:1805.02867.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.cross_entropy_kernels import (
    Terms,
    launch_dlogits,
    launch_losses,
    launch_mean_scale,
    launch_row_stats,
    scale_rows_,
)
from powertrain.ops.cross_entropy_short_rows import LONGEST_ROW, launch_short_dlogits, launch_short_rows
from powertrain.ops.shapes import acc_dtype, as_flat, as_rows, empty
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, apart_from_autocast, falls_back, is_batched, use_kernel
from powertrain.runtime.nodes import refuse_graph
from powertrain.runtime.plain_calls import plain
from powertrain.runtime.sharding import placements

Reduction = Literal["mean", "sum", "none"]


def cross_entropy_ref(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The specification of `cross_entropy`, in plain PyTorch."""
    z = logits.to(acc_dtype(logits.dtype))
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    lse = torch.logsumexp(z, dim=-1)
    kept = target != ignore_index
    picked = z.gather(-1, torch.where(kept, target, 0).long().unsqueeze(-1)).squeeze(-1)
    loss = lse - (1 - label_smoothing) * picked - label_smoothing * z.mean(-1) + z_loss * lse.square()
    loss = torch.where(kept, loss, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / kept.sum()


def cross_entropy_bwd_ref(
    dloss: Tensor,  # of each row; with reduction "mean" the gradient divided by the number of kept rows
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The specification of the backward of `cross_entropy` with reduction "none": dlogits."""
    z = logits.to(acc_dtype(logits.dtype))
    t = torch.tanh(z / softcap) if softcap else torch.zeros_like(z)
    z = softcap * t if softcap else z
    lse = torch.logsumexp(z, dim=-1, keepdim=True)
    kept = (target != ignore_index).unsqueeze(-1)
    one_hot = torch.zeros_like(z).scatter(-1, torch.where(kept, target.unsqueeze(-1), 0).long(), 1.0)
    dz = torch.exp(z - lse) * (1 + 2 * z_loss * lse) - (1 - label_smoothing) * one_hot - label_smoothing / z.shape[-1]
    return torch.where(kept, dz * (1 - t * t) * dloss.unsqueeze(-1), 0.0)


def _cross_entropy_fwd_outputs(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    T = target.shape[0]
    loss = logits.new_empty((T,) if reduction == "none" else (), dtype=torch.float32)
    lse = logits.new_empty(T, dtype=torch.float32)
    scale = logits.new_empty((), dtype=torch.float32) if reduction == "mean" else lse.new_empty(0)
    return loss, lse, scale, logits.new_empty(logits.shape) if with_grad else empty(logits)


def _cross_entropy_fwd(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    terms = Terms(ignore_index, label_smoothing, z_loss, softcap)
    outputs = _cross_entropy_fwd_outputs(
        logits, target, ignore_index, reduction, label_smoothing, z_loss, softcap, with_grad
    )
    loss, lse, scale, dlogits = outputs
    into = dict(losses=loss) if reduction == "none" else dict(loss=loss)
    if reduction == "mean":
        into["scale"] = scale
    grad_scale = early_scale(logits.dtype, into.get("scale"))
    if logits.shape[1] <= LONGEST_ROW:
        launch_short_rows(logits, target, terms, lse, **into)
        # one kernel for both took as long as two: its registers left few programs on an SM
        if with_grad:
            launch_short_dlogits(logits, target, lse, None, terms, dlogits, scale=grad_scale)
        return outputs
    target_logit = lse.new_empty(lse.shape)
    logit_sum = lse.new_empty(lse.shape) if label_smoothing else None
    if with_grad and grad_scale is not None:
        launch_mean_scale(target, terms, grad_scale)
    made = dlogits if with_grad else None
    launch_row_stats(logits, target, terms, lse, target_logit, logit_sum, scale=grad_scale, dlogits=made)
    launch_losses(lse, target_logit, logit_sum, target, terms, logits.shape[1], **into)
    return outputs


def early_scale(dtype: torch.dtype, scale: Tensor | None) -> Tensor | None:
    """The part of `scale` that a gradient made in forward already contains: none of it in float16, whose loss scale
    comes only with dloss, and where 1e-4 times a probability would be 0 before that."""
    return None if dtype is torch.float16 else scale


def late_scale(dtype: torch.dtype, scale: Tensor | None) -> Tensor | None:
    """The part of `scale` that is left for backward. Of no kept token it is 0: the gradients are zeros, times 1 / 0
    they were NaN."""
    return scale.nan_to_num(posinf=0.0) if scale is not None and dtype is torch.float16 else None


def _cross_entropy_bwd_outputs(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    scale: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> Tensor:
    return logits.new_empty(logits.shape)


def _cross_entropy_bwd(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    scale: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> Tensor:
    dlogits = logits.new_empty(logits.shape)
    terms = Terms(ignore_index, label_smoothing, z_loss, softcap)
    launch = launch_short_dlogits if logits.shape[1] <= LONGEST_ROW else launch_dlogits
    launch(logits, target, lse, dloss, terms, dlogits, scale=scale)
    return dlogits


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, ignore_index, ctx.reduction, *options, ctx.with_grad = inputs
    _, lse, scale, dlogits = output
    ctx.options = (ignore_index, *options)
    ctx.used = False
    ctx.save_for_backward(*((dlogits, scale) if ctx.with_grad else (logits, target, lse, scale)))
    ctx.mark_non_differentiable(lse, scale, dlogits)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * 8
    if not ctx.with_grad:
        logits, target, lse, scale = ctx.saved_tensors
        scale = scale if ctx.reduction == "mean" else None
        return (_cross_entropy_bwd_op(dloss, logits, target, lse, scale, *ctx.options), *(None,) * 7)
    refuse_second_backward(ctx, "cross_entropy", "grad_in_forward=False")
    dlogits, scale = ctx.saved_tensors
    scale_op(dlogits, dloss, late_scale(dlogits.dtype, scale if ctx.reduction == "mean" else None))
    return (dlogits, *(None,) * 7)


def refuse_second_backward(ctx: Any, op: str, instead: str) -> None:
    """The gradient made in forward was handed out by the first backward."""
    refuse_graph(ctx, op)
    if ctx.used:
        raise RuntimeError(
            f"{op}: a second backward is not possible, the gradient made in forward was given away by the first; "
            f"use {instead}"
        )
    ctx.used = True


def _fwd_sharding(reduction: str, with_grad: bool, **_: Any) -> Any:
    R, P, S = placements()
    yield [R] * 4, {}
    # a mean's divisor counts all tokens
    if reduction != "mean":
        loss = S(0) if reduction == "none" else P
        yield [loss, S(0), R, S(0) if with_grad else R], {"logits": S(0), "target": S(0)}


def _bwd_sharding(dloss: Any, scale: Any, **_: Any) -> Any:
    R, _P, S = placements()
    for at in (R, S(0)) if scale is None else (R,):
        yield [at], {"dloss": at if dloss.ndim else R, "logits": at, "target": at, "lse": at}


_TERMS = "float label_smoothing, float z_loss, float softcap"
_cross_entropy_op = Op(
    f"cross_entropy_fwd(Tensor logits, Tensor target, int ignore_index, str reduction, {_TERMS}, bool with_grad) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _cross_entropy_fwd,
    _cross_entropy_fwd_outputs,
    backward=_backward,
    setup_context=_setup_context,
    sharding=_fwd_sharding,
)
_cross_entropy_bwd_op = Op(
    "cross_entropy_bwd(Tensor dloss, Tensor logits, Tensor target, Tensor lse, Tensor? scale, int ignore_index, "
    f"{_TERMS}) -> Tensor",
    _cross_entropy_bwd,
    _cross_entropy_bwd_outputs,
    sharding=_bwd_sharding,
)
scale_op = Op("scale_(Tensor(a!) x, Tensor dloss, Tensor? scale) -> ()", scale_rows_, lambda x, dloss, scale: None)


@falls_back("cross_entropy")
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    grad_in_forward: bool = False,
) -> Tensor:
    """Cross entropy of `logits` against `target`, over the last dim.

    Shapes: V vocabulary size, any leading dims.
        logits  [..., V]  float32, float16 or bfloat16 (float64 on the CPU); any strides
        target  [...]     int64 or int32 in [0, V), or `ignore_index` to leave a token out
        label_smoothing   in [0, 1]: that much of the weight goes to all classes alike
        z_loss            adds z_loss * lse² to a token's loss
        softcap           logits become softcap * tanh(logits / softcap); None or 0: they do not
        grad_in_forward   make dlogits in forward and let go of the logits; some 10% less time for rows of 1025
                          logits to 128 KiB. Backward then scales it (unless by 1) and hands it out, so a second
                          backward raises
    Returns the loss in nats, float32 (float64 for float64): [] for "mean" and "sum", [...] for "none".
        "mean" divides by the number of kept tokens; none kept gives nan, as in PyTorch.
        A target out of range gives nan, and a nan gradient of its row, because asking would make the host wait for the
        GPU (plain PyTorch on the CPU raises).
    Numerics: float32 throughout. Deterministic.
    Memory: saves logits (or dlogits) and 4 bytes a token; nothing when no gradient is wanted.
    Raises ValueError naming the argument, the expected value and the given one. Double backward and vmap are not
        implemented and say so.
    Source: torch.nn.functional.cross_entropy; z-loss from Chowdhery et al., arXiv:2204.02311.
    """
    check_loss_arguments("cross_entropy", target, reduction, label_smoothing, z_loss, softcap)
    checks.require(logits.dim() > 0, "cross_entropy", "logits", "have at least one dim", "a scalar")
    checks.floating("cross_entropy", logits=logits)
    checks.same_device("cross_entropy", "logits", logits, target=target)
    checks.shape("cross_entropy", "target", target, logits.shape[:-1], "logits without the last dim")
    if not use_kernel("cross_entropy", logits):
        options = ignore_index, reduction, label_smoothing, z_loss, softcap
        loss_of = apart_from_autocast(
            lambda x, target: cross_entropy_torch("cross_entropy", x, target, *options), logits.device
        )
        return plain(loss_of, logits, target)
    with_grad = grad_in_forward and torch.is_grad_enabled() and logits.requires_grad
    loss, _, _, _ = _cross_entropy_op(
        as_rows(logits), as_flat(target), int(ignore_index), reduction, float(label_smoothing), float(z_loss),
        float(softcap or 0.0), with_grad,
    )  # fmt: skip
    return loss.view(target.shape) if reduction == "none" else loss


def check_loss_arguments(
    op: str, target: Tensor, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None
) -> None:
    checks.one_of(op, "reduction", reduction, ("mean", "sum", "none"))
    checks.require(0.0 <= label_smoothing <= 1.0, op, "label_smoothing", "be in [0, 1]", label_smoothing)
    checks.require(abs(z_loss) < math.inf, op, "z_loss", "be finite", z_loss)
    checks.require(softcap is None or softcap >= 0, op, "softcap", "be at least 0 (0: none), or None", softcap)
    is_index = target.dtype in (torch.int64, torch.int32)
    checks.require(is_index, op, "target", "be int64 or int32", checks.name(target.dtype))


def refuse_targets_outside(op: str, target: Tensor, count: int, ignore_index: int) -> None:
    """Raise IndexError if there is no such class; of targets that vmap batches, nothing can be said."""
    if is_batched(target):
        return
    wrong = target[(target != ignore_index) & ((target < 0) | (target >= count))]
    if wrong.numel():
        raise IndexError(f"{op}: target must be in [0, {count}), or ignore_index {ignore_index}, got {int(wrong[0])}")


def cross_entropy_torch(
    op: str,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    z = logits.to(acc_dtype(logits.dtype))
    z = z.flatten(0, -2) if z.dim() > 1 else z[None]
    flat = target.reshape(-1).long()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    try:
        loss = F.cross_entropy(z, flat, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
    except IndexError:
        # PyTorch's error names no argument; a check ahead of the loss would read all targets once more
        refuse_targets_outside(op, flat, z.shape[-1], ignore_index)
        raise
    if z_loss:
        kept = flat != ignore_index
        extra = torch.where(kept, z_loss * torch.logsumexp(z, dim=-1).square(), 0.0)
        if reduction != "none":
            extra = extra.sum() if reduction == "sum" else extra.sum() / kept.sum()
        loss = loss + extra
    return loss.view(target.shape) if reduction == "none" else loss
