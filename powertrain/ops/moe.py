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
then each block's ranks. No atomics, so the same bits every time; nothing is read on the host. Everything is computed
in float32. T tokens, k experts each, H elements of e bytes: permute moves (1 + k)*T*H*e bytes, unpermute as many, and
their backwards (1 + k) and (1 + 2k).

Sources: Shazeer et al., arXiv:1701.06538; DeepSeek-V3, arXiv:2412.19437 (groups, correction bias); loss-free balancing,
Wang et al., arXiv:2408.15664; balancing loss, Fedus et al., arXiv:2101.03961.
"""

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.shapes import acc_dtype, as_rows, cdiv, next_power_of_2
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, falls_back, is_traced, use_kernel, without_autocast
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable

Score = Literal["softmax", "sigmoid"]
_TINY = 1e-20  # DeepSeek's, so that sigmoids that are all 0 do not divide by 0


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
    if num_groups > 1:
        groups = choice.unflatten(-1, (num_groups, -1))
        best = groups.topk(2, -1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices[..., :top_groups]
        kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
        choice = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    weights = s.gather(-1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return weights * scaling_factor, experts.to(torch.int32)


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


@kernel()
def _moe_route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    T,
    G,
    S,
    top_k,
    top_groups,
    stride_lt,
    scaling_factor,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # places: group g's expert i stands at g * BLOCK_S + i, so that places ascend as experts do
    BLOCK_P: tl.constexpr = BLOCK_G * BLOCK_S
    tokens = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    places = tl.arange(0, BLOCK_P)
    group, member = places // BLOCK_S, places % BLOCK_S
    experts = group * S + member
    exists = (group < G) & (member < S)
    mask = (tokens < T)[:, None] & exists[None, :]
    # [BLOCK_T, BLOCK_P]
    z = tl.load(logits_ptr + tokens[:, None] * stride_lt + experts[None, :], mask=mask, other=0.0).to(tl.float32)
    choice, top, total = _scores(z, exists, SIGMOID)
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + experts, mask=exists, other=0.0).to(tl.float32)[None, :]  # bias: [BLOCK_P]
    # a NaN loses against every number, and a padding column against a NaN: the result always names an expert
    lowest = -3.0e38
    choice = tl.where(exists[None, :], tl.where(choice == choice, choice, lowest), float("-inf"))
    if BLOCK_G > 1:
        grouped = tl.reshape(choice, [BLOCK_T, BLOCK_G, BLOCK_S])
        best, where = tl.max(grouped, 2, return_indices=True)
        is_best = tl.arange(0, BLOCK_S)[None, None, :] == where[:, :, None]
        two = best + tl.max(tl.where(is_best, float("-inf"), grouped), 2)
        ids = tl.arange(0, BLOCK_G)
        two = tl.where((ids < G)[None, :], two, float("-inf"))
        ahead = (two[:, None, :] > two[:, :, None]) | (
            (two[:, None, :] == two[:, :, None]) & (ids[None, None, :] < ids[None, :, None])
        )
        kept = tl.sum(ahead.to(tl.int32), 2) < top_groups
        grouped = tl.where(kept[:, :, None], grouped, float("-inf"))
        choice = tl.reshape(grouped, [BLOCK_T, BLOCK_P])

    slots = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    for j in range(top_k):
        place = tl.argmax(choice, 1)[:, None]
        chosen = tl.where(slots == j, place // BLOCK_S * S + place % BLOCK_S, chosen)
        choice = tl.where(places[None, :] == place, float("-inf"), choice)
    # their scores once more, from the logits: to carry them through the loop costs another reduction a round
    picked = (tokens < T)[:, None] & (slots < top_k)
    # [BLOCK_T, BLOCK_K]
    weights = tl.load(logits_ptr + tokens[:, None] * stride_lt + chosen, mask=picked, other=0.0).to(tl.float32)
    if SIGMOID:
        weights = 1.0 / (1.0 + tl.exp(-weights))
    else:
        weights = tl.exp(weights - top) / total
    weights = tl.where(slots < top_k, weights, 0.0)
    if NORMALIZE:
        weights /= tl.sum(weights, 1)[:, None] + 1e-20
    out = tokens[:, None] * top_k + slots
    tl.store(weights_ptr + out, weights * scaling_factor, mask=picked)  # [BLOCK_T, BLOCK_K]
    tl.store(experts_ptr + out, chosen, mask=picked)  # [BLOCK_T, BLOCK_K]


@triton.jit
def _scores(z, exists, SIGMOID: tl.constexpr):
    """The scores, and softmax's largest logit and divisor."""
    z = tl.where(exists[None, :], z, float("-inf"))
    top = tl.max(z, 1)[:, None]
    e = tl.exp(z - top)
    total = tl.sum(e, 1)[:, None]
    s = 1.0 / (1.0 + tl.exp(-z)) if SIGMOID else e / total
    return s, top, total


@kernel()
def _moe_route_bwd_kernel(
    dweights_ptr,
    logits_ptr,
    experts_ptr,
    dlogits_ptr,
    T,
    E,
    top_k,
    stride_lt,
    scaling_factor,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    tokens = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    mask = (tokens < T)[:, None] & (experts < E)[None, :]
    # [BLOCK_T, BLOCK_E]
    z = tl.load(logits_ptr + tokens[:, None] * stride_lt + experts[None, :], mask=mask, other=0.0).to(tl.float32)
    s, _, _ = _scores(z, experts < E, SIGMOID)
    ds = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    chosen = tl.zeros([BLOCK_T, BLOCK_E], tl.int32)
    for j in range(top_k):
        expert = tl.load(experts_ptr + tokens * top_k + j, mask=tokens < T, other=-1)  # [BLOCK_T]
        dw = tl.load(dweights_ptr + tokens * top_k + j, mask=tokens < T, other=0.0).to(tl.float32)  # [BLOCK_T]
        here = experts[None, :] == expert[:, None]
        ds = tl.where(here, dw[:, None], ds)
        chosen += here.to(tl.int32)
    if NORMALIZE:
        total = tl.sum(tl.where(chosen > 0, s, 0.0), 1)[:, None] + 1e-20
        ds = tl.where(chosen > 0, (ds - tl.sum(ds * s, 1)[:, None] / total) / total, 0.0)
    ds *= scaling_factor
    if SIGMOID:
        dz = ds * s * (1.0 - s)
    else:
        dz = s * (ds - tl.sum(ds * s, 1)[:, None])
    out = dlogits_ptr + tokens[:, None] * E + experts[None, :]
    tl.store(out, dz.to(dlogits_ptr.dtype.element_ty), mask=mask)  # [BLOCK_T, BLOCK_E]


@kernel()
def _moe_count_kernel(
    experts_ptr, counts_ptr, A, E, programs, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr
):
    """counts [E, programs]: how many of each CHUNK of the A assignments are whose."""
    ids = tl.arange(0, BLOCK_E)
    count = tl.zeros([BLOCK_E], tl.int32)
    first = tl.program_id(0) * CHUNK
    for start in range(first, tl.minimum(first + CHUNK, A), BLOCK):
        count += tl.sum(_one_hot(experts_ptr, start, ids, A, E, BLOCK), 0)
    tl.store(counts_ptr + ids * programs + tl.program_id(0), count, mask=ids < E)  # [BLOCK_E]


@triton.jit
def _one_hot(experts_ptr, start, ids, A, E, BLOCK: tl.constexpr):
    """[BLOCK, BLOCK_E] int32; an expert out of range is taken as the nearest one, so that nothing is written outside"""
    places = start + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + places, mask=places < A, other=0).to(tl.int32)  # [BLOCK]
    expert = tl.where(places < A, tl.minimum(tl.maximum(expert, 0), E - 1), -1)
    return (expert[:, None] == ids[None, :]).to(tl.int32)


@kernel()
def _moe_sort_kernel(
    experts_ptr,
    counts_ptr,
    sums_ptr,
    positions_ptr,
    offsets_ptr,
    A,
    E,
    programs,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    program = tl.program_id(0)
    ids = tl.arange(0, BLOCK_E)
    cell = ids * programs + program
    # the next free row of each expert
    # [BLOCK_E]
    free = tl.load(sums_ptr + cell, mask=ids < E, other=0) - tl.load(counts_ptr + cell, mask=ids < E, other=0)
    first = program * CHUNK
    for start in range(first, tl.minimum(first + CHUNK, A), BLOCK):
        one_hot = _one_hot(experts_ptr, start, ids, A, E, BLOCK)
        position = tl.sum(one_hot * (tl.cumsum(one_hot, 0) - 1 + free[None, :]), 1)
        places = start + tl.arange(0, BLOCK)
        tl.store(positions_ptr + places, position, mask=places < A)  # [BLOCK]
        free += tl.sum(one_hot, 0)
    tl.store(offsets_ptr + ids, free, mask=(ids < E) & (program == programs - 1))  # [BLOCK_E]


@kernel(aligned=("H",))
def _moe_scatter_kernel(
    x_ptr,
    positions_ptr,
    weights_ptr,
    rows_ptr,
    out_ptr,
    dweights_ptr,
    H,
    top_k,
    stride_xt,
    stride_rt,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """out[positions[t, j]] = weights[t, j] x[t], and dweights[t, j] = dot(rows[positions[t, j]], x[t])."""
    token = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BLOCK_K)
    dots = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, H, BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        x = tl.load(x_ptr + token * stride_xt + cols, mask=cols < H, other=0.0).to(tl.float32)  # [BLOCK_H]
        for j in range(top_k):
            position = tl.load(positions_ptr + token * top_k + j).to(tl.int64)  # scalar
            if dweights_ptr is not None:
                # [BLOCK_H]
                row = tl.load(rows_ptr + position * stride_rt + cols, mask=cols < H, other=0.0).to(tl.float32)
                dots += tl.where(slots == j, tl.sum(x * row, 0), 0.0)
            if out_ptr is not None:
                y = x
                if weights_ptr is not None:
                    y *= tl.load(weights_ptr + token * top_k + j).to(tl.float32)  # weight: scalar
                tl.store(out_ptr + position * H + cols, y.to(out_ptr.dtype.element_ty), mask=cols < H)  # [BLOCK_H]
    if dweights_ptr is not None:
        # [BLOCK_K]
        tl.store(dweights_ptr + token * top_k + slots, dots.to(dweights_ptr.dtype.element_ty), mask=slots < top_k)


@kernel(aligned=("H",))
def _moe_gather_kernel(
    rows_ptr, positions_ptr, weights_ptr, out_ptr, H, top_k, stride_rt, BLOCK_H: tl.constexpr
):  # fmt: skip
    """out[t] = sum over j of weights[t, j] rows[positions[t, j]], weights 1 if there are none."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_H], tl.float32)
    for j in range(top_k):
        position = tl.load(positions_ptr + token * top_k + j).to(tl.int64)  # scalar
        row = tl.load(rows_ptr + position * stride_rt + cols, mask=cols < H, other=0.0).to(tl.float32)  # [BLOCK_H]
        if weights_ptr is not None:
            row *= tl.load(weights_ptr + token * top_k + j).to(tl.float32)  # weight: scalar
        total += row
    tl.store(out_ptr + token * H + cols, total.to(out_ptr.dtype.element_ty), mask=cols < H)  # [BLOCK_H]


class _Plan(NamedTuple):
    block: int
    num_warps: int


@tunable("NVIDIA H200, 2026-11-21")
def _plan_route(places: int, target: Target) -> _Plan:
    """Tokens a program."""
    # one warp, so that no reduction waits for others; tokens and warps, us. 16384 tokens, 6 of 64: 4 and 1 13.6, 1 and
    # 1 14.8, 4 and 4 24.0, 16 and 4 24.3; 8192, 8 of 256: 1 and 1 16.6, 2 and 1 16.9, 4 and 1 19.6, 4 and 4 32.7
    return _Plan(max(1, 256 // places), 1 if places <= 512 else 4)


@tunable("NVIDIA H200, 2026-11-21")
def _plan_rows(H: int, target: Target) -> _Plan:
    """Elements of a row at a time."""
    # TB/s, a copy 4.2: gathering 4.0 to 4.2 whatever the tile from 512 to 4096; scattering 3.6 to 3.7 likewise, with
    # the weights' gradients 1024 3.9, 2048 3.8, 4096 3.4 to 3.7, 8192 2.2 to 3.0
    block = min(1024, next_power_of_2(H))
    return _Plan(block, max(1, block // 256))


def _route_fwd_outputs(logits: Tensor, bias: Tensor | None, top_k: int, *_: Any) -> tuple[Tensor, Tensor]:
    weights = logits.new_empty((logits.shape[0], top_k), dtype=torch.float32)
    return weights, torch.empty_like(weights, dtype=torch.int32)


def _route_fwd(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    sigmoid: bool,
    normalize: bool,
    scaling_factor: float,
    num_groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor]:
    weights, experts = _route_fwd_outputs(logits, bias, top_k)
    logits = as_rows(logits)
    T, size = logits.shape[0], logits.shape[1] // num_groups
    block_g, block_s = next_power_of_2(num_groups), next_power_of_2(size)
    plan = _plan_route(block_g * block_s, Target.of(logits.device))
    _moe_route_kernel[(cdiv(T, plan.block),)](
        logits, bias, weights, experts, T, num_groups, size, top_k, top_groups, logits.stride(0), scaling_factor,
        SIGMOID=sigmoid, NORMALIZE=normalize,
        BLOCK_T=plan.block, BLOCK_G=block_g, BLOCK_S=block_s, BLOCK_K=next_power_of_2(top_k), num_warps=plan.num_warps,
    )  # fmt: skip
    return weights, experts


def _route_bwd_outputs(dweights: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _route_bwd(
    dweights: Tensor, logits: Tensor, experts: Tensor, sigmoid: bool, normalize: bool, scaling_factor: float
) -> Tensor:
    dlogits = _route_bwd_outputs(dweights, logits)
    logits = as_rows(logits)
    (T, E), top_k = logits.shape, experts.shape[1]
    block_e = next_power_of_2(E)
    plan = _plan_route(block_e, Target.of(logits.device))
    _moe_route_bwd_kernel[(cdiv(T, plan.block),)](
        dweights.contiguous(), logits, experts, dlogits, T, E, top_k, logits.stride(0), scaling_factor,
        SIGMOID=sigmoid, NORMALIZE=normalize, BLOCK_T=plan.block, BLOCK_E=block_e, num_warps=plan.num_warps,
    )  # fmt: skip
    return dlogits


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


# assignments a program, and at a time. Of 98304 to 64 experts and of 65536 to 256, us: 128 32.2, 36.4; 256 35.3, 39.5;
# 512 50.8, 55.7; 512 by 64 at a time 44.4, 52.2
_CHUNK, _BLOCK = 128, 32


def _sort_outputs(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    positions = experts.new_empty(experts.shape, dtype=torch.int32)
    return positions, experts.new_empty(num_experts, dtype=torch.int32)


def _sort(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The row of each assignment in the order of experts, and where each expert's rows end."""
    positions, offsets = _sort_outputs(experts, num_experts)
    experts, A = experts.contiguous(), experts.numel()
    programs = max(1, cdiv(A, _CHUNK))
    counts = experts.new_empty((num_experts, programs), dtype=torch.int32)
    blocks = {"CHUNK": _CHUNK, "BLOCK": _BLOCK, "BLOCK_E": next_power_of_2(num_experts)}
    _moe_count_kernel[(programs,)](experts, counts, A, num_experts, programs, **blocks)
    sums = counts.view(-1).cumsum(0, dtype=torch.int32)
    _moe_sort_kernel[(programs,)](experts, counts, sums, positions, offsets, A, num_experts, programs, **blocks)
    return positions, offsets


def _scatter_outputs(
    x: Tensor, positions: Tensor, weights: Tensor | None, rows: Tensor | None, need_out: bool, need_dweights: bool
) -> tuple[Tensor | None, Tensor | None]:
    out = x.new_empty((positions.numel(), x.shape[1])) if need_out else None
    return out, torch.empty_like(weights) if need_dweights and weights is not None else None


def _scatter(
    x: Tensor, positions: Tensor, weights: Tensor | None, rows: Tensor | None, need_out: bool, need_dweights: bool
) -> tuple[Tensor | None, Tensor | None]:
    out, dweights = _scatter_outputs(x, positions, weights, rows, need_out, need_dweights)
    x, rows = as_rows(x), None if rows is None or dweights is None else as_rows(rows)
    (T, top_k), H = positions.shape, x.shape[1]
    plan = _plan_rows(H, Target.of(x.device))
    _moe_scatter_kernel[(T,)](
        x, positions, weights, rows, out, dweights, H, top_k, x.stride(0), 0 if rows is None else rows.stride(0),
        BLOCK_K=next_power_of_2(top_k), BLOCK_H=plan.block, num_warps=plan.num_warps,
    )  # fmt: skip
    return out, dweights


def _gather_outputs(rows: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty((positions.shape[0], rows.shape[1]))


def _gather(rows: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    out = _gather_outputs(rows, positions, weights)
    rows = as_rows(rows)
    T, H = out.shape
    plan = _plan_rows(H, Target.of(rows.device))
    _moe_gather_kernel[(T, cdiv(H, plan.block))](
        rows, positions, weights, out, H, positions.shape[1], rows.stride(0),
        BLOCK_H=plan.block, num_warps=plan.num_warps,
    )  # fmt: skip
    return out


def _permute_fwd(x: Tensor, positions: Tensor) -> Tensor:
    out, _ = _scatter(x, positions, None, None, True, False)
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
    _route_fwd,
    _route_fwd_outputs,
    backward=_route_backward,
    setup_context=_route_setup_context,
)
_route_bwd_op = Op(
    "moe_route_bwd(Tensor dweights, Tensor logits, Tensor experts, bool sigmoid, bool normalize, "
    "float scaling_factor) -> Tensor",
    _route_bwd,
    _route_bwd_outputs,
)
_sort_op = Op("moe_sort(Tensor experts, int num_experts) -> (Tensor, Tensor)", _sort, _sort_outputs)
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
    _scatter,
    _scatter_outputs,
)
_gather_op = Op(
    "moe_unpermute_fwd(Tensor rows, Tensor positions, Tensor? weights) -> Tensor",
    _gather,
    _gather_outputs,
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
    Returns weights [T, k] float32 and experts [T, k] int32, best first; of equals the lower index.
    Numerics: float32 throughout. Deterministic. A NaN is chosen last and makes the token's weights NaN.
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
    checks.one_of(op, "score", score, ("softmax", "sigmoid"))
    checks.require(1 <= E <= 4096, op, "logits", "have 1 to 4096 experts", E)
    divides = num_groups >= 1 and E % num_groups == 0 and (num_groups == 1 or E // num_groups >= 2)
    checks.require(divides, op, "num_groups", f"divide {E} experts into groups of two or more", num_groups)
    checks.require(1 <= top_groups <= num_groups, op, "top_groups", f"be 1 to num_groups={num_groups}", top_groups)
    within = E // num_groups * top_groups
    checks.require(1 <= top_k <= within, op, "top_k", f"be 1 to {within}, the experts of {top_groups} groups", top_k)
    if not use_kernel(op, logits):
        with without_autocast(logits.device):
            return moe_route_ref(
                logits, correction_bias, top_k=top_k, score=score, normalize=normalize,
                scaling_factor=scaling_factor, num_groups=num_groups, top_groups=top_groups,
            )  # fmt: skip
    bias = None if correction_bias is None else correction_bias.detach().contiguous()
    options = (score == "sigmoid", normalize, float(scaling_factor), num_groups, top_groups)
    weights, experts = _route_op(logits, bias, top_k, *options)
    return weights, experts


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
    if not is_traced(x) and experts.numel():
        for worst in (experts.min().item(), experts.max().item()):
            checks.require(0 <= worst < num_experts, op, "experts", f"be in [0, {num_experts})", worst)
    return moe_permute_ref(x, experts, num_experts)


@falls_back("moe_unpermute")
def moe_unpermute(rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    """The weighted sum of each token's rows: `moe_permute` undone.

    Shapes: T tokens, H hidden size, k experts a token.
        rows       [T*k, H]  float32, float16 or bfloat16 (float64 on the CPU); any strides
        positions  [T, k]    int32 or int64, from `moe_permute`: each row once
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
    whole = positions.dim() == 2 and positions.numel() == rows.shape[0]
    checks.require(whole, op, "positions", f"be [T, k] with T*k = {rows.shape[0]} (rows)", list(positions.shape))
    checks.shape(op, "weights", weights, positions.shape, "shape of positions")
    if use_kernel(op, rows):
        gathered: Tensor = _gather_op(rows, positions.contiguous(), None if weights is None else weights.contiguous())
        return gathered
    with without_autocast(rows.device):
        return moe_unpermute_ref(rows, positions, weights)


def moe_load_balancing_loss(logits: Tensor, experts: Tensor, *, score: Score = "softmax") -> Tensor:
    """Imbalance of the experts' loads: E * sum over experts of (share of assignments) * (mean score); 1 when even.

    Shapes: S tokens to be balanced among themselves, any leading dims, E experts, k a token.
        logits   [..., S, E]  the router's; with [batch, S, E] every sequence is balanced by itself (DeepSeek-V3)
        experts  [..., S, k]  int32 or int64, from `moe_route`
        score                 "softmax", or "sigmoid", whose scores are divided by their sum over experts
    Returns a scalar, float32, the mean over leading dims; differentiable in logits.
    Numerics: float32. Memory: about 8 bytes an element of logits.
    Raises ValueError naming the argument, the expected value and the given one.
    Source: Fedus et al., arXiv:2101.03961, eq. 4, with k > 1 as in Megatron-LM; DeepSeek-V3, arXiv:2412.19437, eq. 17.
    """
    op = "moe_load_balancing_loss"
    checks.one_of(op, "score", score, ("softmax", "sigmoid"))
    checks.shape(op, "experts", experts, (*logits.shape[:-1], *experts.shape[-1:]), "[..., S of logits, k]")
    E = logits.shape[-1]
    with without_autocast(logits.device):
        z = logits.to(acc_dtype(logits.dtype))
        s = torch.softmax(z, -1) if score == "softmax" else torch.sigmoid(z)
        s = s if score == "softmax" else s / (s.sum(-1, keepdim=True) + _TINY)
        ids = torch.arange(E, device=logits.device)
        share = sum((e[..., None] == ids).to(s.dtype).mean(-2) for e in experts.unbind(-1)) / experts.shape[-1]
        return E * (share * s.mean(-2)).sum(-1).mean()


@torch.no_grad()
def moe_update_bias_(correction_bias: Tensor, tokens_per_expert: Tensor, rate: float = 1e-3) -> Tensor:
    """Move the router's correction bias, in place: up by `rate` for experts below the mean load, down for those above.

        correction_bias    [E]  float32
        tokens_per_expert  [E]  integer or floating: assignments since the last update, summed over data-parallel ranks
    Returns correction_bias.
    Raises ValueError naming the argument, the expected value and the given one.
    Source: Wang et al., arXiv:2408.15664, algorithm 1.
    """
    checks.shape("moe_update_bias_", "tokens_per_expert", tokens_per_expert, correction_bias.shape, "correction_bias")
    load = tokens_per_expert.to(correction_bias.dtype)
    return correction_bias.add_(torch.sign(load.mean() - load), alpha=rate)
