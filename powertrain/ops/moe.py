"""Mixture of experts: the router, rows sorted by expert and back, and load balancing of experts.

    s = softmax(logits) or sigmoid(logits);   c = s + correction_bias          (the bias chooses and does not weigh)
    with groups: a group's score is the sum of its two best c; experts outside the best groups are left out
    e_1..e_k = the k best of c, best first, the lower index among equals
    w_j = scaling_factor * s[e_j] / (sum over j of s[e_j] + 1e-20)             (without the division unless normalized)
    ds[e_j] = scaling_factor / S * (dw_j - sum over i of dw_i s[e_i] / S),  S the divisor;  through s to dlogits

    rows[positions[t, j]] = x[t]                                     dx[t] = sum over j of drows[positions[t, j]]
    y[t] = sum over j of w[t, j] rows[positions[t, j]]               drows[positions[t, j]] = w[t, j] dy[t]
                                                                     dw[t, j] = dot(rows[positions[t, j]], dy[t])

positions are a stable counting sort by expert: counts per block of assignments, one running sum over (expert, block),
then each block's ranks; of few assignments each is compared with all others. No atomics, so the same bits every time;
nothing is read on the host. Everything is computed in float32. T tokens, k experts each, H elements of e bytes: permute
moves (1 + k)*T*H*e bytes, unpermute as many, and their backwards (1 + k) and (1 + 2k).

Sources: Shazeer et al., arXiv:1701.06538; DeepSeek-V3, arXiv:2412.19437 (groups, correction bias); loss-free balancing,
Wang et al., arXiv:2408.15664; balancing loss, Fedus et al., arXiv:2101.03961.
"""

import functools
import math
from typing import Any, Literal

import torch
from torch import Tensor

from powertrain.ops.moe_kernels import (
    gather,
    gather_outputs,
    route_bwd,
    route_bwd_outputs,
    route_fwd,
    route_fwd_outputs,
    scatter,
    scatter_outputs,
    sort_by_expert,
    sort_outputs,
)
from powertrain.ops.shapes import acc_dtype
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, apart_from_autocast, falls_back, use_kernel, without_autocast
from powertrain.runtime.plain_calls import plain
from powertrain.runtime.positional import hinted

Score = Literal["softmax", "sigmoid"]


def moe_route_ref(
    logits: Tensor,
    correction_bias: Tensor | None = None,
    *,
    top_k: int,
    score: Score = "softmax",
    normalize: bool = False,
    scaling_factor: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """The specification of `moe_route`, in plain PyTorch."""
    z = logits.to(acc_dtype(logits.dtype))
    s = torch.softmax(z, -1) if score == "softmax" else torch.sigmoid(z)
    choice = s.detach() if correction_bias is None else s.detach() + correction_bias.detach()
    # as the kernel does: sort takes NaN for the largest number, and a bias of -inf would tie with a group not kept
    lowest = torch.finfo(torch.float32).min
    choice = choice.masked_fill(~(choice > lowest), lowest)
    if num_groups > 1:
        groups = choice.unflatten(-1, (num_groups, -1))
        best = groups.topk(2, -1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices[..., :top_groups]
        kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
        choice = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    weights = s.gather(-1, experts)
    if normalize:
        weights = _normalized(weights)
    return weights * scaling_factor, experts.to(torch.int32)


def _normalized(scores: Tensor) -> Tensor:
    # sigmoids of very negative logits may all be 0. The kernels' TINY, but as a literal: with symbolic numbers Dynamo
    # makes a symbol of a global float, and fails where two checkpoints read it
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def moe_permute_ref(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The specification of `moe_permute`, in plain PyTorch."""
    T, k = experts.shape
    order = experts.flatten().argsort(stable=True)
    positions = torch.empty_like(order).scatter(0, order, torch.arange(T * k, device=x.device))
    ends = torch.arange(num_experts, device=x.device, dtype=experts.dtype)
    offsets = torch.searchsorted(experts.flatten()[order], ends, right=True)
    rows = x[:, None].expand(T, k, x.shape[1]).reshape(T * k, x.shape[1])[order]
    return rows, offsets.to(torch.int32), positions.to(torch.int32).view(T, k)


def moe_unpermute_ref(rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    """The specification of `moe_unpermute`, in plain PyTorch."""
    chosen = rows[positions.long()].to(acc_dtype(rows.dtype))
    return (chosen if weights is None else chosen * weights[..., None]).sum(1).to(rows.dtype)


def _route_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, ctx.sigmoid, ctx.normalize, ctx.scaling_factor, _, _ = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _route_backward(ctx: Any, dweights: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if dweights is None or not ctx.needs_input_grad[0]:
        return (None,) * 8
    dlogits = _route_bwd_op(dweights, *ctx.saved_tensors, ctx.sigmoid, ctx.normalize, ctx.scaling_factor)
    return (dlogits, *(None,) * 7)


def _permute_fwd(x: Tensor, positions: Tensor) -> Tensor:
    out, _ = scatter(x, positions, None, None, True, False)
    assert out is not None
    return out


def _permute_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.set_materialize_grads(False)


def _permute_backward(ctx: Any, drows: Tensor | None) -> tuple[Tensor | None, None]:
    return None if drows is None else _gather_op(drows, ctx.saved_tensors[0], None), None


def _gather_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, positions, weights = inputs
    # rows are needed for the weights' gradient alone
    keep = weights is not None and weights.requires_grad
    ctx.save_for_backward(rows if keep else None, positions, weights)
    ctx.set_materialize_grads(False)


def _gather_backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None
    rows, positions, weights = ctx.saved_tensors
    need_rows, _, need_weights = ctx.needs_input_grad[:3]
    drows, dweights = _scatter_op(dy, positions, weights, rows, need_rows, need_weights)
    return drows if need_rows else None, None, dweights if need_weights else None


_route_op = Op(
    "moe_route_fwd(Tensor logits, Tensor? bias, int top_k, bool sigmoid, bool normalize, float scaling_factor, "
    "int num_groups, int top_groups) -> (Tensor, Tensor)",
    route_fwd,
    route_fwd_outputs,
    backward=_route_backward,
    setup_context=_route_setup_context,
)
_route_bwd_op = Op(
    "moe_route_bwd(Tensor dweights, Tensor logits, Tensor experts, bool sigmoid, bool normalize, "
    "float scaling_factor) -> Tensor",
    route_bwd,
    route_bwd_outputs,
)
_sort_op = Op("moe_sort(Tensor experts, int num_experts) -> (Tensor, Tensor)", sort_by_expert, sort_outputs)
_permute_op = Op(
    "moe_permute_fwd(Tensor x, Tensor positions) -> Tensor",
    _permute_fwd,
    lambda x, positions: x.new_empty((positions.numel(), x.shape[1])),
    backward=_permute_backward,
    setup_context=_permute_setup_context,
)
_scatter_op = Op(
    "moe_unpermute_bwd(Tensor dy, Tensor positions, Tensor? weights, Tensor? rows, bool need_rows, "
    "bool need_weights) -> (Tensor, Tensor)",
    scatter,
    scatter_outputs,
)
_gather_op = Op(
    "moe_unpermute_fwd(Tensor rows, Tensor positions, Tensor? weights) -> Tensor",
    gather,
    gather_outputs,
    backward=_gather_backward,
    setup_context=_gather_setup_context,
)


@falls_back("moe_route")
def moe_route(
    logits: Tensor,
    correction_bias: Tensor | None = None,
    *,
    top_k: int,
    score: Score = "softmax",
    normalize: bool = False,
    scaling_factor: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights.

    Shapes: T tokens, E experts, k = top_k.
        logits           [T, E]  float32, float16 or bfloat16 (float64 on the CPU); any strides
        correction_bias  [E]     float32, or None: added to the scores when experts are chosen, not to the weights; it
                                 gets no gradient (DeepSeek-V3; see `moe_update_bias_`)
        score                    "softmax" over all experts, or "sigmoid" of each
        normalize                divide a token's weights by their sum (which makes softmax one over the chosen)
        scaling_factor           multiplies the weights
        num_groups, top_groups   choose from the best top_groups of num_groups groups of E / num_groups consecutive
                                 experts, a group's score being the sum of its two best
    Returns weights [T, k] float32 (float64 for float64) and experts [T, k] int32, best first; of equals the lower
        index.
    Numerics: float32 throughout. Deterministic. A NaN is chosen last. With softmax it makes all weights of its token
        NaN, with sigmoid its own, if it is chosen, and with normalize then all of them.
    Memory: saves logits and experts.
    Raises ValueError naming the argument, the expected value and the given one. Double backward and vmap are not
        implemented and say so.
    Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """
    op = "moe_route"
    checks.floating(op, logits=logits, correction_bias=correction_bias)
    checks.require(logits.dim() == 2, op, "logits", "be [T, E]", list(logits.shape))
    E = logits.shape[1]
    checks.shape(op, "correction_bias", correction_bias, (E,), "last dim of logits")
    checks.same_device(op, "logits", logits, correction_bias=correction_bias)
    checks.require(1 <= E <= 4096, op, "logits", "have 1 to 4096 experts", E)
    check_choice(op, E, top_k, score, scaling_factor, num_groups, top_groups)
    if not use_kernel(op, logits):
        route = functools.partial(
            moe_route_ref, top_k=top_k, score=score, normalize=normalize, scaling_factor=scaling_factor,
            num_groups=num_groups, top_groups=top_groups,
        )  # fmt: skip
        return plain(apart_from_autocast(route, logits.device), logits, correction_bias)
    bias = None if correction_bias is None else correction_bias.detach().contiguous()
    options = (score == "sigmoid", normalize, float(scaling_factor), num_groups, top_groups)
    weights, experts = _route_op(logits, bias, top_k, *options)
    return weights, experts


def check_choice(
    op: str, E: int, top_k: int, score: Score, scaling_factor: float, num_groups: int, top_groups: int
) -> None:
    """Raise ValueError unless these options of `moe_route` can choose among E experts."""
    checks.one_of(op, "score", score, ("softmax", "sigmoid"))
    checks.require(abs(scaling_factor) < math.inf, op, "scaling_factor", "be finite", scaling_factor)
    divides = num_groups >= 1 and E % num_groups == 0 and (num_groups == 1 or E // num_groups >= 2)
    # texts are made where they are needed alone: Dynamo cannot format a number that is dynamic
    if not divides:
        checks.fail(op, "num_groups", f"divide {E} experts into groups of two or more", num_groups)
    if not 1 <= top_groups <= num_groups:
        checks.fail(op, "top_groups", f"be 1 to num_groups={num_groups}", top_groups)
    within = E // num_groups * top_groups
    if not 1 <= top_k <= within:
        checks.fail(op, "top_k", f"be 1 to {within}, the experts of {top_groups} groups", top_k)


@falls_back("moe_permute")
def moe_permute(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's row once for every expert it goes to, in the order of experts, then of tokens.

    Shapes: T tokens, H hidden size, k experts a token, E = num_experts.
        x        [T, H]  float32, float16 or bfloat16 (float64 on the CPU); any strides
        experts  [T, k]  int32 or int64 in [0, E). Checked on the CPU; a GPU takes one out of range as the nearest
    Returns
        rows       [T*k, H]  x's dtype
        offsets    [E]       int32, end of each expert's rows, as `grouped_gemm` takes it
        positions  [T, k]    int32, the row of each (token, expert), as `moe_unpermute` takes it
    Numerics: rows are copies; backward adds in float32 and rounds once. Deterministic. No host synchronisation.
    Memory: saves positions.
    Raises ValueError naming the argument, the expected value and the given one. Double backward and vmap are not
        implemented and say so.
    Source: Gale et al., MegaBlocks, arXiv:2211.15841.
    """
    op = "moe_permute"
    checks.floating(op, x=x)
    checks.same_device(op, "x", x, experts=experts)
    checks.require(x.dim() == 2, op, "x", "be [T, H]", list(x.shape))
    checks.require(experts.dim() == 2, op, "experts", "be [T, k]", list(experts.shape))
    checks.shape(op, "experts", experts, (x.shape[0], experts.shape[1]), "[first dim of x, k]")
    checks.integers(op, "experts", experts)
    checks.require(num_experts >= 1, op, "num_experts", "be 1 or more", num_experts)
    if use_kernel(op, x):
        positions, offsets = _sort_op(experts, num_experts)
        return _permute_op(x, positions), offsets, positions
    checks.indices(op, "experts", experts, num_experts)
    return moe_permute_ref(x, experts, num_experts)


@falls_back("moe_unpermute")
def moe_unpermute(rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    """The weighted sum of each token's rows: `moe_permute` undone.

    Shapes: T tokens, H hidden size, k experts a token.
        rows       [T*k, H]  float32, float16 or bfloat16 (float64 on the CPU); any strides
        positions  [T, k]    int32 or int64, from `moe_permute`: each row once. On the CPU none may be outside of rows
        weights    [T, k]    any of these dtypes, or None for 1
    Returns [T, H] in rows' dtype: sum over j of weights[t, j] * rows[positions[t, j]].
    Numerics: float32 throughout, rounded once, the weights' gradients too. Deterministic.
    Memory: saves positions and weights, and rows if the weights need a gradient.
    Raises ValueError naming the argument, the expected value and the given one. Double backward and vmap are not
        implemented and say so.
    Source: Gale et al., MegaBlocks, arXiv:2211.15841.
    """
    op = "moe_unpermute"
    checks.floating(op, rows=rows, weights=weights)
    checks.same_device(op, "rows", rows, positions=positions, weights=weights)
    checks.require(rows.dim() == 2, op, "rows", "be [T*k, H]", list(rows.shape))
    checks.integers(op, "positions", positions)
    if positions.dim() != 2 or positions.numel() != rows.shape[0]:
        checks.fail(op, "positions", f"be [T, k] with T*k = {rows.shape[0]} (rows)", list(positions.shape))
    checks.shape(op, "weights", weights, positions.shape, "shape of positions")
    if use_kernel(op, rows):
        gathered: Tensor = _gather_op(rows, positions.contiguous(), None if weights is None else weights.contiguous())
        return gathered
    return plain(apart_from_autocast(_unpermute_torch, rows.device), rows, positions, weights)


def _unpermute_torch(rows: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    checks.indices("moe_unpermute", "positions", positions, rows.shape[0])
    return moe_unpermute_ref(rows, positions, weights)


@hinted
def moe_load_balancing_loss(logits: Tensor, experts: Tensor, *, score: Score = "softmax") -> Tensor:
    """Imbalance of the experts' loads: E * sum over experts of (share of assignments) * (mean score); 1 when even.

    Shapes: S tokens to be balanced among themselves, any leading dims, E experts, k a token.
        logits   [..., S, E]  the router's; with [batch, S, E] every sequence is balanced by itself (DeepSeek-V3)
        experts  [..., S, k]  int32 or int64, from `moe_route`
        score                 "softmax", or "sigmoid", whose scores are divided by their sum over experts
    Returns a scalar, float32 (float64 for float64), the mean over leading dims; differentiable in logits; 0 of no
        tokens.
    Numerics: float32. Memory: about 8 bytes an element of logits.
    Raises ValueError naming the argument, the expected value and the given one.
    Source: Fedus et al., arXiv:2101.03961, eq. 4, with k > 1 as in Megatron-LM; DeepSeek-V3, arXiv:2412.19437, eq. 17.
    """
    op = "moe_load_balancing_loss"
    checks.floating(op, logits=logits)
    checks.integers(op, "experts", experts)
    checks.same_device(op, "logits", logits, experts=experts)
    checks.one_of(op, "score", score, ("softmax", "sigmoid"))
    checks.require(logits.dim() >= 2, op, "logits", "be [..., S, E]", list(logits.shape))
    checks.shape(op, "experts", experts, (*logits.shape[:-1], *experts.shape[-1:]), "[..., S of logits, k]")
    checks.require(experts.shape[-1] > 0, op, "experts", "have at least one expert a token", list(experts.shape))
    E = logits.shape[-1]
    checks.indices(op, "experts", experts, E)
    with without_autocast(logits.device):
        z = logits.to(acc_dtype(logits.dtype))
        if not logits.numel():
            # means of nothing are NaN, which would be added to a rank's loss
            return z.sum()
        s = torch.softmax(z, -1) if score == "softmax" else torch.sigmoid(z)
        s = s if score == "softmax" else _normalized(s)
        ids = torch.arange(E, device=logits.device)
        share = sum((e[..., None] == ids).to(s.dtype).mean(-2) for e in experts.unbind(-1)) / experts.shape[-1]
        return E * (share * s.mean(-2)).sum(-1).mean()


@hinted
@torch.no_grad()
def moe_update_bias_(correction_bias: Tensor, tokens_per_expert: Tensor, rate: float = 1e-3) -> Tensor:
    """Move the router's correction bias, in place: up by `rate` for experts below the mean load, down for those above.

        correction_bias    [E]  float32
        tokens_per_expert  [E]  integer or floating: assignments since the last update, summed over data-parallel ranks
    Returns correction_bias.
    Raises ValueError naming the argument, the expected value and the given one.
    Source: Wang et al., arXiv:2408.15664, algorithm 1.
    """
    op = "moe_update_bias_"
    checks.floating(op, correction_bias=correction_bias)
    checks.shape(op, "tokens_per_expert", tokens_per_expert, correction_bias.shape, "correction_bias")
    checks.same_device(op, "correction_bias", correction_bias, tokens_per_expert=tokens_per_expert)
    checks.require(abs(rate) < math.inf, op, "rate", "be finite", rate)
    # a bias that a module's half() has converted: counts beyond 65504 would be infinite, and their mean's distance NaN
    load = tokens_per_expert.to(acc_dtype(correction_bias.dtype))
    return correction_bias.add_(torch.sign(load.mean() - load), alpha=rate)
