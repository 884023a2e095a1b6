"""Losses over a vocabulary in blocks of rows: what a block needs in float32 is never in memory for all rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from powertrain.ops.shapes import acc_dtype
from powertrain.runtime.nodes import refuse_graph

# elements of a block: 64 MiB of float32 for each tensor that is made of it; not tuned
_BLOCK = 1 << 24


def by_rows(function: Callable[..., Tensor], vocabulary: int, *tensors: Tensor) -> Tensor:
    """function(*tensors), rows [N, ...] to rows, block by block; the backward computes each block again.

    Saved are the tensors alone.
    """
    rows = max(1, _BLOCK // max(1, vocabulary))
    # split, whose backward is one concatenation; a slice's would be a tensor of all rows
    blocks = zip(*(t.split(rows) for t in tensors), strict=True)
    return torch.cat([checkpoint(function, *block, use_reentrant=False, preserve_rng_state=False) for block in blocks])


def token_log_probs(logits: Tensor, ids: Tensor, kept: Tensor, temperature: float) -> Tensor:
    """Log-probabilities [N] of ids [N] under softmax(logits [N, V] / temperature), float32; 0 for rows not kept."""

    def block(logits: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
        # zeros instead of the rows left out: their gradient is 0 even if they are not finite
        scaled = logits.to(acc_dtype(logits.dtype)).masked_fill(~kept[:, None], 0.0) / temperature
        picked = scaled.gather(-1, ids.masked_fill(~kept, 0)[:, None])[:, 0]
        return (picked - scaled.logsumexp(-1)).masked_fill(~kept, 0.0)

    return by_rows(block, logits.shape[-1], logits, ids, kept)


def total_variation(student: Tensor, teacher: Tensor, kept: Tensor) -> Tensor:
    """Sum over V of |p - q| / 2 [N] of the softmaxes of logits [N, V], float32; 0 for rows that are not kept."""

    def block(student: Tensor, teacher: Tensor, kept: Tensor) -> Tensor:
        # zeros as above
        p, q = (x.to(acc_dtype(x.dtype)).masked_fill(~kept[:, None], 0.0).softmax(-1) for x in (student, teacher))
        return ((p - q).abs().sum(-1) / 2).masked_fill(~kept, 0.0)

    return by_rows(block, student.shape[-1], student, teacher.detach(), kept)


class _LinearKLDiv(torch.autograd.Function):
    """(x, weight, target, kept, temperature, eps) -> the sum over rows; gradients of the sum in the forward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, target: Tensor, kept: Tensor | None, temperature: float, eps: float
    ) -> Tensor:
        acc = acc_dtype(x.dtype)
        need_x, need_weight = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if need_x else None
        dweight = torch.zeros_like(weight, dtype=acc) if need_weight else None
        total = x.new_zeros((), dtype=acc)
        rows = max(1, _BLOCK // max(1, weight.shape[0]))
        for start in range(0, x.shape[0], rows):
            at = slice(start, start + rows)
            logits = x[at] @ weight.T
            log_p = torch.log_softmax(logits.to(acc) / temperature, -1)
            t = target[at].to(acc)
            if kept is not None:
                # a row without target adds nothing, to the sum nor to a gradient
                t = t.masked_fill(~kept[at, None], 0.0)
                log_p = log_p.masked_fill(~kept[at, None], 0.0)
            total += (t * (t.clamp(min=eps).log() - log_p)).sum()
            if not (need_x or need_weight):
                continue
            dlogits = ((log_p.exp() * t.sum(-1, keepdim=True) - t) / temperature).to(logits.dtype)
            if dx is not None:
                dx[at] = dlogits @ weight
            if dweight is not None:
                dweight += dlogits.T @ x[at]
        ctx.save_for_backward(dx, None if dweight is None else dweight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph(ctx, "liger_fused_linear_kl_div", "a product and F.kl_div can be differentiated twice")
        grads = (None if grad is None else (grad * dloss).to(grad.dtype) for grad in ctx.saved_tensors)
        return (*grads, None, None, None, None)


linear_kl_div = _LinearKLDiv.apply
