"""liger_kernel.transformers.functional on our ops.

in_place and accum_dtype are hints on memory there; they are taken and change nothing here.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.compat.liger_kernel.local_attention import (
    liger_fused_neighborhood_attention,
    liger_multi_token_attention,
)
from powertrain.compat.liger_kernel.residual_streams import (
    liger_attn_res,
    liger_mhc_apply,
    liger_mhc_coeffs,
    liger_mhc_forward,
    liger_mhc_post_res,
    liger_mhc_pre,
)
from powertrain.compat.liger_kernel.row_blocks import linear_kl_div
from powertrain.compat.liger_kernel.sharded_vocabulary import liger_fused_linear_scaled_cross_entropy_tp
from powertrain.compat.liger_kernel.simplex import liger_sparsemax
from powertrain.compat.missing import unknown
from powertrain.ops import activations, norm
from powertrain.ops.conversion import cat, unsupported
from powertrain.ops.cross_entropy import cross_entropy
from powertrain.ops.linear_cross_entropy import linear_cross_entropy
from powertrain.ops.linear_log_probs import Teacher, linear_log_probs
from powertrain.ops.rope import rope
from powertrain.ops.rope_table import RopeTable
from powertrain.ops.shapes import acc_dtype
from powertrain.ops.softmax import scaled_softmax
from powertrain.runtime import checks

__all__ = [
    "CrossEntropyOutput",
    "liger_attn_res",
    "liger_cross_entropy",
    "liger_dyt",
    "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy",
    "liger_fused_linear_jsd",
    "liger_fused_linear_kl_div",
    "liger_fused_linear_scaled_cross_entropy_tp",
    "liger_fused_neighborhood_attention",
    "liger_geglu",
    "liger_group_norm",
    "liger_jsd",
    "liger_kl_div",
    "liger_layer_norm",
    "liger_mhc_apply",
    "liger_mhc_coeffs",
    "liger_mhc_forward",
    "liger_mhc_post_res",
    "liger_mhc_pre",
    "liger_modulated_rms_norm",
    "liger_multi_token_attention",
    "liger_poly_norm",
    "liger_qwen2vl_mrope",
    "liger_relu_squared",
    "liger_rms_norm",
    "liger_rope",
    "liger_softmax",
    "liger_sparsemax",
    "liger_swiglu",
    "liger_tvd",
]


class CrossEntropyOutput(NamedTuple):
    """The loss, and the other results that were requested."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of input [n, vocabulary] against target [n]; with a return_ flag a CrossEntropyOutput."""
    op = "liger_cross_entropy"
    if weight is not None:
        # weights per class would need another kernel and have no use in language models
        unsupported(op, "weight", list(weight.shape), "torch.nn.functional.cross_entropy")
    for name, old in (("size_average", size_average), ("reduce", reduce)):
        if old is not None:
            unsupported(op, name, old, "reduction")
    checks.one_of(op, "reduction", reduction, ("mean", "sum", "none"))
    loss = cross_entropy(
        input, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,  # type: ignore[arg-type]
        z_loss=lse_square_scale, softcap=softcap,
    )  # fmt: skip
    if not (return_z_loss or return_token_accuracy or return_predicted_tokens):
        return loss
    with torch.no_grad():
        kept = target != ignore_index
        # the z-loss is that of the capped logits, which the loss has seen
        wide = input.to(loss.dtype)
        capped = softcap * torch.tanh(wide / softcap) if softcap else wide
        # tanh is monotonous: the largest capped logit is the largest logit
        predicted = input.argmax(-1)
        z_loss = lse_square_scale * torch.logsumexp(capped, -1).square().masked_fill(~kept, 0.0)
        right = (predicted == target) & kept
        return CrossEntropyOutput(
            loss,
            _reduced(z_loss, kept, reduction) if return_z_loss else None,
            _reduced(right.float(), kept, reduction) if return_token_accuracy else None,
            # -1 for ignored rows, as in Liger
            predicted.masked_fill(~kept, -1) if return_predicted_tokens else None,
        )


def _reduced(values: Tensor, kept: Tensor, reduction: str) -> Tensor:
    return values if reduction == "none" else values.sum() / (kept.sum() if reduction == "mean" else 1)


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    # a constant of Liger's memory heuristic; our blocks are planned by the op
    chunk_mem_const: int = 1,
) -> Tensor:
    """Cross entropy of input [n, h] @ weight [vocabulary, h].T + bias against target [n], without the logits."""
    op = "liger_fused_linear_cross_entropy"
    if ce_weight is not None:
        unsupported(op, "ce_weight", list(ce_weight.shape), "torch.nn.functional.cross_entropy of the logits")
    flags = {
        "return_z_loss": return_z_loss, "use_token_scaling": use_token_scaling,
        "return_token_accuracy": return_token_accuracy, "return_predicted_tokens": return_predicted_tokens,
    }  # fmt: skip
    for name, given in flags.items():
        if given:
            unsupported(op, name, given, 'reduction="none", or liger_cross_entropy of the logits')
    checks.one_of(op, "reduction", reduction, ("mean", "sum", "none"))
    return linear_cross_entropy(
        input, weight, target, bias=bias, ignore_index=ignore_index, reduction=reduction,  # type: ignore[arg-type]
        label_smoothing=label_smoothing, z_loss=lse_square_scale, softcap=softcap,
    )  # fmt: skip


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """gelu(a) * b, of the tanh form."""
    # Liger's GEGLU is the tanh form
    return activations.geglu(a, b, approximate="tanh")


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b."""
    return activations.swiglu(a, b)


def liger_relu_squared(x: Tensor) -> Tensor:
    """relu(x)^2."""
    return activations.relu_squared(x)


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    """X / rms(X) * (W + offset) over the last dim; casting_mode "llama", "gemma" or "none" (as "gemma")."""
    # a tuple, for the offset is folded into the weight in one case and into the kernel in another
    y = norm.rms_norm(X, *_weight("liger_rms_norm", W, offset, casting_mode), eps=eps, **_options(offset, casting_mode))
    assert isinstance(y, Tensor)
    return y


def liger_fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> tuple[Tensor, Tensor]:
    """(norm of X + R, X + R)."""
    weight = _weight("liger_fused_add_rms_norm", W, offset, casting_mode)
    y, total = norm.rms_norm(X, *weight, residual=R, eps=eps, **_options(offset, casting_mode))
    return y, total


def liger_modulated_rms_norm(
    X: Tensor,
    W: Tensor | None,
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> Tensor:
    """(1 + scale) * `liger_rms_norm` + shift, the modulation by PyTorch.

    X [..., H]; scale and shift [M, H] of one shape, or [H]: M divides the rows of X, each of them for as many rows in
    order, so [B, H] goes with X [B, T, H]. Raises ValueError naming the argument.
    """
    op, H = "liger_modulated_rms_norm", X.shape[-1]
    rows = X.numel() // max(H, 1)
    fits = scale.shape[-1:] == X.shape[-1:] and scale.numel() > 0 and rows % (scale.numel() // H) == 0
    checks.require(fits, op, "scale", f"have shape [M, {H}] with M a divisor of {rows}", list(scale.shape))
    checks.shape(op, "shift", shift, scale.shape, "shape of scale")
    y = liger_rms_norm(X, W, eps, offset, casting_mode)
    parts = y.reshape(scale.numel() // H, -1, H) * (1 + scale.reshape(-1, 1, H))
    return (parts if shift is None else parts + shift.reshape(-1, 1, H)).reshape(X.shape).to(X.dtype)


def liger_poly_norm(X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True) -> Tensor:
    """W0 norm(X³) + W1 norm(X²) + W2 norm(X) + B, norm(u) = u / rms(u) over the last dim; PyTorch in float32.

    Source: Zhuo et al., arXiv:2411.03884.
    """
    checks.shape("liger_poly_norm", "W", W, (3,), "[3]")
    x = X.to(acc_dtype(X.dtype))
    powers = [u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps) for u in (x * x * x, x * x, x)]
    return (sum(w * u for w, u in zip(W, powers, strict=True)) + B).to(X.dtype)


def _weight(op: str, weight: Tensor | None, offset: float, casting: str) -> tuple[Tensor | None]:
    checks.one_of(op, "casting_mode", casting, ("llama", "gemma", "none"))
    # offsets other than 0 and 1 have no kernel: one vector addition does
    return (weight + offset if weight is not None and offset not in (0.0, 1.0) else weight,)


def _options(offset: float, casting: str) -> dict[str, Any]:
    # "none" there computes in the input's dtype; float32 as in "gemma" is at least as exact
    return {"zero_centered": offset == 1.0, "casting": "llama" if casting == "llama" else "gemma"}


def liger_layer_norm(X: Tensor, W: Tensor, B: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dim."""
    y = norm.layer_norm(X, W, B, eps=eps)
    assert isinstance(y, Tensor)
    return y


def liger_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """q [b, h, s, d] and k [b, hk, s, d] turned by cos and sin [1 or b, s, d] of their positions (Llama's halves).

    position_ids and unsqueeze_dim are not looked at, as there. rotary_dim: the first channels only.
    """
    B, S = q.shape[0], q.shape[2]
    fits = cos.dim() == 3 and cos.shape[0] in (1, B) and cos.shape[1] == S
    checks.require(fits, "liger_rope", "cos", f"have shape [1 or {B}, {S}, rotary dim]", list(cos.shape))
    checks.shape("liger_rope", "sin", sin, cos.shape, "shape of cos")
    size = cos.shape[-1] if rotary_dim is None else rotary_dim
    # half of the table: Llama's cos repeats its angles
    table = RopeTable(*(x[..., : size // 2].to(acc_dtype(q.dtype)).flatten(0, 1) for x in (cos, sin)))
    # rows of the table per batch entry, since cos may differ by batch entry (position ids of their own)
    rows = torch.arange(table.cos.shape[0], device=q.device).view(cos.shape[:2])
    turned = rope(q.transpose(1, 2), k.transpose(1, 2), table=table, position_ids=rows.expand(q.shape[0], -1))
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


def liger_qwen2vl_mrope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`liger_rope` with cos and sin [3, b, s, d] of time, height and width.

    mrope_section: how many of the d / 2 pairs each of the three turns, in this order. unsqueeze_dim is not looked at,
    as there.
    """
    op, pairs = "liger_qwen2vl_mrope", q.shape[-1] // 2
    good = len(mrope_section) == 3 and sum(mrope_section) == pairs
    checks.require(good, op, "mrope_section", f"be three numbers whose sum is {pairs}", list(mrope_section))
    for name, table in (("cos", cos), ("sin", sin)):
        checks.shape(op, name, table, (3, q.shape[0], q.shape[2], q.shape[3]), "[3, b, s, d]")
    own_cos, own_sin = (
        cat([x[axis] for axis, x in enumerate(table[..., :pairs].split(list(mrope_section), -1))], -1)
        for table in (cos, sin)
    )
    return liger_rope(q, k, own_cos, own_sin, rotary_dim=q.shape[-1])


def liger_softmax(x: Tensor) -> Tensor:
    """Softmax over the last dim."""
    return scaled_softmax(x)


def liger_kl_div(
    input: Tensor, target: Tensor, size_average: bool = True, reduce: bool = True, reduction: str = "mean",
    log_target: bool = False, eps: float = 1e-10,
) -> Tensor:  # fmt: skip
    """KL divergence of log-probabilities `input` [N, V] from `target`, by PyTorch; no gradient of target."""
    checks.shape("liger_kl_div", "target", target, input.shape, "shape of input")
    # eps guards a log of 0 in their kernel; PyTorch's function treats target 0 as limit 0
    return F.kl_div(input, target.detach(), reduction=reduction, log_target=log_target)


def liger_jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """Generalized Jensen-Shannon divergence of log-probabilities, the mean over rows; no gradient of target.

        input, target  [N, V]  log-probabilities of student Q and teacher P
        shift_labels   [N]     rows of `ignore_index` are left out
        beta           0: KL(P || Q); 1: KL(Q || P); between: beta KL(P || M) + (1 - beta) KL(Q || M), M their mixture
    Memory: a few times the input. `powertrain.linear_log_probs` with a Teacher does without logits.
    Raises ValueError for a beta outside of [0, 1].
    Source: Agarwal et al., arXiv:2306.13649.
    """
    checks.require(0 <= beta <= 1, "liger_jsd", "beta", "be between 0 and 1", beta)
    _check_rows("liger_jsd", input, target, shift_labels)
    q, p = (_of_kept_rows(x.to(acc_dtype(input.dtype)), shift_labels, ignore_index) for x in (input, target.detach()))
    # the mixture's formula divides by beta or 1 - beta; both ends are plain KL
    if beta == 0:
        by_row = _kl(p, q)
    elif beta == 1:
        by_row = _kl(q, p)
    else:
        # log of the mixture in log space: no exp underflows
        mixture = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
        by_row = beta * _kl(p, mixture) + (1 - beta) * _kl(q, mixture)
    return _mean_of_rows(by_row, shift_labels, ignore_index)


def liger_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """`liger_jsd` from hidden states [N, D] and [N, E] and weights [V, D] and [V, E], by `linear_log_probs`.

    No logits in memory; no gradient of the teacher.
    """
    rows = student_input.shape[0]
    labels, ignored = shift_labels, ignore_index
    if labels is None:
        # any that are not ignored
        labels, ignored = torch.zeros(rows, dtype=torch.long, device=student_input.device), -1
    teacher = Teacher(teacher_input.detach(), teacher_weight.detach(), beta=jsd_beta)
    result = linear_log_probs(
        student_input, student_weight, labels, temperature=temperature, ignore_index=ignored, teacher=teacher
    )
    assert result.divergence is not None
    return _mean_of_rows(result.divergence, shift_labels, ignore_index)


def liger_fused_linear_kl_div(
    student_input: Tensor,
    student_weight: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    temperature: float = 1.0,
    eps: float = 1e-10,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """KL divergence of softmax(student_input @ student_weight.T / temperature) from target, without the logits.

        student_input [N, D], student_weight [V, D], target [N, V] probabilities, without gradient
        shift_labels  [N]: rows of `ignore_index` are left out
        reduction     "batchmean" (over rows), "mean" (over rows and V) or "sum"
    Returns a scalar, float32. eps: the least probability in the logarithm of target.
    Memory: blocks of rows; gradients are computed in the forward, the weight's summed in float32.
    Raises ValueError naming the argument.
    """
    op = "liger_fused_linear_kl_div"
    # "none" has no one gradient to compute ahead
    checks.one_of(op, "reduction", reduction, ("batchmean", "mean", "sum"))
    checks.require(temperature > 0, op, "temperature", "be above 0", temperature)
    checks.require(student_input.dim() == 2, op, "student_input", "have shape [N, D]", list(student_input.shape))
    N, V = student_input.shape[0], student_weight.shape[0]
    checks.shape(op, "student_weight", student_weight, (V, student_input.shape[1]), "[V, last dim of student_input]")
    checks.shape(op, "target", target, (N, V), "[N, V] of student_input and student_weight")
    checks.shape(op, "shift_labels", shift_labels, (N,), "[N] of student_input")
    kept = None if shift_labels is None else shift_labels != ignore_index
    total: Tensor = linear_kl_div(student_input, student_weight, target, kept, temperature, eps)
    if reduction == "sum":
        return total
    # clamp: all rows left out gives 0
    rows = N if kept is None else kept.sum().clamp(min=1)
    return total / (rows if reduction == "batchmean" else rows * V)


def liger_tvd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Total variation distance |p - q| / 2 of probabilities [N, V]; no gradient of target.

    reduction: "batchmean" (sum over V, mean over rows), "mean" (over elements), "sum" or "none" [N, V]. Rows whose
    `shift_labels` are `ignore_index` count as 0 and are not counted.
    """
    checks.one_of("liger_tvd", "reduction", reduction, ("batchmean", "mean", "sum", "none"))
    _check_rows("liger_tvd", input, target, shift_labels)
    kind = acc_dtype(input.dtype)
    difference = _of_kept_rows(input.to(kind) - target.detach().to(kind), shift_labels, ignore_index)
    distance = difference.abs() / 2
    if reduction == "batchmean":
        return _mean_of_rows(distance.sum(-1), shift_labels, ignore_index)
    if reduction == "mean":
        return _mean_of_rows(distance.mean(-1), shift_labels, ignore_index)
    return distance.sum() if reduction == "sum" else distance


def _check_rows(op: str, input: Tensor, target: Tensor, labels: Tensor | None) -> None:
    """Raise ValueError for shapes that PyTorch would broadcast."""
    checks.require(input.dim() > 0, op, "input", "have shape [N, V]", list(input.shape))
    checks.shape(op, "target", target, input.shape, "shape of input")
    checks.shape(op, "shift_labels", labels, input.shape[:-1], "input without its last dim")


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(P || Q) of each row of log-probabilities."""
    return (p.exp() * (p - q)).sum(-1)


def _of_kept_rows(x: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
    """x with zeros in the rows that have no label: those rows get no gradient, even if they hold -inf or NaN."""
    return x if labels is None else x.masked_fill((labels == ignore_index)[..., None], 0.0)


def _mean_of_rows(values: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
    if labels is None:
        return values.mean()
    kept = labels != ignore_index
    # clamp: all rows ignored gives 0
    return torch.where(kept, values, 0.0).sum() / kept.sum().clamp(min=1)


def liger_dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """tanh(alpha x) gamma + beta, in place of a norm. Source: Zhu et al., arXiv:2503.10622."""
    # in the input's dtype, by PyTorch: memory-bound, and torch.compile fuses it
    y = torch.tanh(alpha * x) * gamma
    return y if beta is None else y + beta


def liger_group_norm(
    X: Tensor, affine_scaling_weight: Tensor, affine_shifting_bias: Tensor, num_channels: int, num_groups: int,
    eps: float,
) -> Tensor:  # fmt: skip
    """Group norm of [B, num_channels, ...], by PyTorch."""
    checks.require(X.dim() >= 3 and X.shape[1] == num_channels, "liger_group_norm", "X", f"be [B, {num_channels}, ...]",
                   list(X.shape))  # fmt: skip
    return F.group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps)


__getattr__ = unknown(__name__)
