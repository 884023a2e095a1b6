"""Kernels of routing, sorting and moving tokens, their plans and launches; moe.py has the formulas."""

from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.early_start import starts_early_if_small, wait_then_let_next_start
from powertrain.ops.shapes import as_rows, cdiv, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable

TINY = 1e-20  # DeepSeek's, so that sigmoids that are all 0 do not divide by 0
# chosen in the place of a NaN: below every score, above the -inf of experts that are not there or chosen already
LOWEST = tl.constexpr(-3.0e38)


@kernel(unaligned=("bias_ptr",))
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
        # bias: [BLOCK_P]
        choice += tl.load(bias_ptr + experts, mask=exists, other=0.0).to(tl.float32)[None, :]
    # with a number in place of NaN, and of -inf, the result always names an expert, and none twice
    choice = tl.where(exists[None, :], tl.where(choice > LOWEST, choice, LOWEST), float("-inf"))
    if BLOCK_G > 1:
        grouped = tl.reshape(choice, [BLOCK_T, BLOCK_G, BLOCK_S])
        best, where = tl.max(grouped, 2, return_indices=True)
        is_best = tl.arange(0, BLOCK_S)[None, None, :] == where[:, :, None]
        two = best + tl.max(tl.where(is_best, float("-inf"), grouped), 2)
        # of groups with equal sums the one with the lower index is ahead, so the choice is unique
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
        # the first of equal scores: a round a slot, since Triton has no top-k with indices for any k
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


@kernel(unaligned=("dweights_ptr", "experts_ptr"))
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
        # a count, not a flag: an expert could be named twice by a caller's own indices
        chosen += here.to(tl.int32)
    if NORMALIZE:
        # the scores are computed again from the logits: saving them would cost a tensor [T, E]
        total = tl.sum(tl.where(chosen > 0, s, 0.0), 1)[:, None] + 1e-20
        # a sum over the chosen alone: the score of another may be NaN
        mean = tl.sum(tl.where(chosen > 0, ds * s, 0.0), 1)[:, None] / total
        ds = tl.where(chosen > 0, (ds - mean) / total, 0.0)
    ds *= scaling_factor
    if SIGMOID:
        dz = ds * s * (1.0 - s)
    else:
        # softmax's Jacobian over all experts: those not chosen have ds 0, but not dz
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
        # assignments of one expert keep the order of tokens, so the sort is stable and its result unique
        free += tl.sum(one_hot, 0)
    tl.store(offsets_ptr + ids, free, mask=(ids < E) & (program == programs - 1))  # [BLOCK_E]


@kernel()
def _moe_sort_few_kernel(
    experts_ptr,
    positions_ptr,
    offsets_ptr,
    A,
    E,
    BLOCK: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """The sort of few assignments in one launch: each place is the number of keys below its own, of a * A + i for
    assignment i to expert a. Of expert a's end: below (a + 1) * A."""
    wait_then_let_next_start(STARTS_EARLY)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # of the assignments, then of the experts
    own = tl.where(places < A, _sort_keys(experts_ptr, places, A, E), (places - A + 1) * A)
    below = tl.zeros([BLOCK, BLOCK_OTHERS], tl.int32)
    lanes = tl.arange(0, BLOCK_OTHERS)
    keys = _sort_keys(experts_ptr, lanes, A, E)
    for start in range(0, A, BLOCK_OTHERS):
        ahead = _sort_keys(experts_ptr, start + BLOCK_OTHERS + lanes, A, E)
        below += (keys[None, :] < own[:, None]).to(tl.int32)
        keys = ahead
    counts = tl.sum(below, 1)
    tl.store(positions_ptr + places, counts, mask=places < A)  # [BLOCK]
    tl.store(offsets_ptr + places - A, counts, mask=(places >= A) & (places < A + E))  # [BLOCK]


@triton.jit
def _sort_keys(experts_ptr, places, A, E):
    """Above all others behind the last assignment."""
    expert = tl.load(experts_ptr + places, mask=places < A, other=0).to(tl.int32)  # the shape of places
    return tl.where(places < A, tl.minimum(tl.maximum(expert, 0), E - 1) * A + places, 0x7FFFFFFF)


@kernel(aligned=("H",), unaligned=("positions_ptr", "weights_ptr"), down_to=2)
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
    STARTS_EARLY: tl.constexpr,
):
    """out[positions[t, j]] = weights[t, j] x[t], and dweights[t, j] = dot(rows[positions[t, j]], x[t]). Programs share
    a token's columns and slots; one has them all where there are dots."""
    wait_then_let_next_start(STARTS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BLOCK_K)
    dots = tl.zeros([BLOCK_K], tl.float32)
    for start in range(tl.program_id(1) * BLOCK_H, H, tl.num_programs(1) * BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        x = tl.load(x_ptr + token * stride_xt + cols, mask=cols < H, other=0.0).to(tl.float32)  # [BLOCK_H]
        for j in range(tl.program_id(2), top_k, tl.num_programs(2)):
            position = tl.load(positions_ptr + token * top_k + j).to(tl.int64)  # scalar
            if dweights_ptr is not None:
                # [BLOCK_H]
                row = tl.load(rows_ptr + position * stride_rt + cols, mask=cols < H, other=0.0).to(tl.float32)
                dots += tl.where(slots == j, tl.sum(x * row, 0), 0.0)
            if out_ptr is not None:
                y = x
                if weights_ptr is not None:
                    # weight: scalar
                    y *= tl.load(weights_ptr + token * top_k + j).to(tl.float32)
                tl.store(out_ptr + position * H + cols, y.to(out_ptr.dtype.element_ty), mask=cols < H)  # [BLOCK_H]
    if dweights_ptr is not None:
        # [BLOCK_K]
        tl.store(dweights_ptr + token * top_k + slots, dots.to(dweights_ptr.dtype.element_ty), mask=slots < top_k)


@kernel(aligned=("H",), unaligned=("positions_ptr", "weights_ptr"), down_to=2)
def _moe_gather_kernel(
    rows_ptr, positions_ptr, weights_ptr, out_ptr, H, top_k, stride_rt, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over j of weights[t, j] rows[positions[t, j]], weights 1 if there are none. BLOCK_K rows are loaded
    at once, and added one after another."""
    wait_then_let_next_start(STARTS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_H], tl.float32)
    for start in range(0, top_k, BLOCK_K):
        for i in tl.static_range(BLOCK_K):
            j = start + i
            position = tl.load(positions_ptr + token * top_k + j, mask=j < top_k, other=0).to(tl.int64)  # scalar
            # [BLOCK_H]
            row = tl.load(rows_ptr + position * stride_rt + cols, mask=(cols < H) & (j < top_k), other=0.0)
            row = row.to(tl.float32)
            if weights_ptr is not None:
                # weight: scalar
                row *= tl.load(weights_ptr + token * top_k + j, mask=j < top_k, other=0.0).to(tl.float32)
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


# for each SM: programs that share the tokens' columns and slots; rows of which several are loaded at once. us, one
# H200, in a graph, scattering (a program a token), then gathering (a row at a time): 1x4160, 8 of 256 1.1 (3.9), 1.7
# (2.5); 32x1408 1.3 (2.5), 1.9 (2.6); 128x4096, 6 of 64 3.5 (3.7), 3.0 (3.0); 512x7168, 2 of 8 6.0 (5.6), 4.4 (4.7),
# 6 of 64 14.7 (13.4) gathering
_FEW_COPIES, _FEW_ROWS = 24, 16


def route_fwd_outputs(logits: Tensor, bias: Tensor | None, top_k: int, *_: Any) -> tuple[Tensor, Tensor]:
    weights = logits.new_empty((logits.shape[0], top_k), dtype=torch.float32)
    return weights, torch.empty_like(weights, dtype=torch.int32)


def route_fwd(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    sigmoid: bool,
    normalize: bool,
    scaling_factor: float,
    num_groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor]:
    weights, experts = route_fwd_outputs(logits, bias, top_k)
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


def route_bwd_outputs(dweights: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def route_bwd(
    dweights: Tensor, logits: Tensor, experts: Tensor, sigmoid: bool, normalize: bool, scaling_factor: float
) -> Tensor:
    dlogits = route_bwd_outputs(dweights, logits)
    logits = as_rows(logits)
    (T, E), top_k = logits.shape, experts.shape[1]
    block_e = next_power_of_2(E)
    plan = _plan_route(block_e, Target.of(logits.device))
    _moe_route_bwd_kernel[(cdiv(T, plan.block),)](
        dweights.contiguous(), logits, experts, dlogits, T, E, top_k, logits.stride(0), scaling_factor,
        SIGMOID=sigmoid, NORMALIZE=normalize, BLOCK_T=plan.block, BLOCK_E=block_e, num_warps=plan.num_warps,
    )  # fmt: skip
    return dlogits


# assignments a program, and at a time. Of 98304 to 64 experts and of 65536 to 256, us: 128 32.2, 36.4; 256 35.3, 39.5;
# 512 50.8, 55.7; 512 by 64 at a time 44.4, 52.2
_CHUNK, _BLOCK = 128, 32
# assignments that are sorted by comparing each with all. us, one H200, in a graph, this, three launches: 8 to 256
# experts 1.8, 7.9; 256 to 256 2.0, 15.4; 768 to 64 2.8, 12.5; 4096 to 256 9.1, 16.9
_FEW = 4096


def sort_outputs(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    positions = experts.new_empty(experts.shape, dtype=torch.int32)
    return positions, experts.new_empty(num_experts, dtype=torch.int32)


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The row of each assignment in the order of experts, and where each expert's rows end."""
    positions, offsets = sort_outputs(experts, num_experts)
    experts, A, target = experts.contiguous(), experts.numel(), Target.of(experts.device)
    if max(A, num_experts) <= _FEW:
        programs = cdiv(A + num_experts, _BLOCK)
        _moe_sort_few_kernel[(programs,)](
            experts, positions, offsets, A, num_experts, BLOCK=_BLOCK, BLOCK_OTHERS=128,
            STARTS_EARLY=starts_early_if_small(target, programs, A), num_warps=4,
        )  # fmt: skip
        return positions, offsets
    programs = max(1, cdiv(A, _CHUNK))
    counts = experts.new_empty((num_experts, programs), dtype=torch.int32)
    blocks = {"CHUNK": _CHUNK, "BLOCK": _BLOCK, "BLOCK_E": next_power_of_2(num_experts)}
    _moe_count_kernel[(programs,)](experts, counts, A, num_experts, programs, **blocks)
    # counts lie expert by expert, so one running sum gives every program the first row of each expert
    sums = counts.view(-1).cumsum(0, dtype=torch.int32)
    _moe_sort_kernel[(programs,)](experts, counts, sums, positions, offsets, A, num_experts, programs, **blocks)
    return positions, offsets


def scatter_outputs(
    x: Tensor, positions: Tensor, weights: Tensor | None, rows: Tensor | None, need_out: bool, need_dweights: bool
) -> tuple[Tensor | None, Tensor | None]:
    out = x.new_empty((positions.numel(), x.shape[1])) if need_out else None
    return out, weights.new_empty(weights.shape) if need_dweights and weights is not None else None


def scatter(
    x: Tensor, positions: Tensor, weights: Tensor | None, rows: Tensor | None, need_out: bool, need_dweights: bool
) -> tuple[Tensor | None, Tensor | None]:
    out, dweights = scatter_outputs(x, positions, weights, rows, need_out, need_dweights)
    x, rows = as_rows(x), None if rows is None or dweights is None else as_rows(rows)
    (T, top_k), H = positions.shape, x.shape[1]
    target = Target.of(x.device)
    plan = _plan_rows(H, target)
    grid = (T, cdiv(H, plan.block), top_k)
    # of few tokens each row and block of columns is a program's: nothing hides that one's stores wait for its loads
    if dweights is not None or prod(grid) > _FEW_COPIES * target.num_sms:
        grid = (T, 1, 1)
    _moe_scatter_kernel[grid](
        x, positions, weights, rows, out, dweights, H, top_k, x.stride(0), 0 if rows is None else rows.stride(0),
        BLOCK_K=next_power_of_2(top_k), BLOCK_H=plan.block,
        STARTS_EARLY=starts_early_if_small(target, prod(grid), positions.numel() * H), num_warps=plan.num_warps,
    )  # fmt: skip
    return out, dweights


def gather_outputs(rows: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty((positions.shape[0], rows.shape[1]))


def gather(rows: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    out = gather_outputs(rows, positions, weights)
    rows = as_rows(rows)
    (T, H), top_k, target = out.shape, positions.shape[1], Target.of(rows.device)
    plan = _plan_rows(H, target)
    grid = (T, cdiv(H, plan.block))
    few = T * top_k <= _FEW_ROWS * target.num_sms
    _moe_gather_kernel[grid](
        rows, positions, weights, out, H, top_k, rows.stride(0),
        BLOCK_K=min(8, next_power_of_2(top_k)) if few else 1, BLOCK_H=plan.block,
        STARTS_EARLY=starts_early_if_small(target, prod(grid), positions.numel() * H), num_warps=plan.num_warps,
    )  # fmt: skip
    return out
