"""Merging partial attention results over disjoint sets of keys, forward and backward.

    lse = log sum_n exp(lse_n)        w_n = exp(lse_n - lse)        o = sum_n w_n o_n

    do_n = w_n do;        dlse_n = w_n (dlse + do . (o_n - o))

Everything is computed in float32; several results are added one by one to a float32 result, which is rounded once at
the end. A row that saw no key in any result (lse -inf in all) gives 0, -inf and zero gradients. A row that saw no key
in one result is not added, whatever it holds. R rows of D channels of e bytes: merging a pair moves 3*R*D*e bytes
forward and 5*R*D*e backward.

Uses: keys split over GPUs (ring attention, context parallelism), a prefix that all requests share, chunks of a cache.

Source: Milakov and Gimelshein, arXiv:1805.02867 (online softmax); section 2.2 of merging states in FlashInfer's docs.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.layouts import from_bhsd, from_lse_order, to_bhsd
from powertrain.ops.shapes import acc_dtype, cdiv, empty_like, next_power_of_2
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, falls_back, use_kernel, without_autocast
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable

Layout = Literal["bshd", "bhsd", "sbhd", "thd"]
_LAYOUTS: tuple[Layout, ...] = ("bshd", "bhsd", "sbhd", "thd")


def merge_attentions_ref(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, layout: Layout = "bshd", upcast: bool = True
) -> tuple[Tensor, Tensor]:
    """The specification of `merge_attentions`, in plain PyTorch."""
    acc = acc_dtype(outs[0].dtype) if upcast else outs[0].dtype
    stacked = torch.stack([lse.to(acc) for lse in lses])
    # the maximum cancels out of the result, so no gradient goes through it
    top = stacked.detach().amax(0)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(stacked - top)
    total = weights.sum(0)
    seen = total != 0
    weights = weights / total.masked_fill(~seen, 1.0)
    out = sum(
        # 0 * NaN is NaN: a part without keys may hold anything
        w[..., None] * to_bhsd(o, layout).to(acc).masked_fill((w == 0)[..., None], 0.0)
        for w, o in zip(weights if layout != "thd" else weights[:, None], outs, strict=True)
    )
    lse = torch.where(seen, top + torch.log(total.masked_fill(~seen, 1.0)), -torch.inf)
    # as a kernel, whatever dtype LSEs came in
    return from_bhsd(out, layout).to(outs[0].dtype), lse if upcast else lse.to(lses[0].dtype)


@triton.jit
def _place(heads, tokens, BLOCK_M: tl.constexpr):
    """(batch, head, tokens) of this program, int64."""
    blocks = tl.cdiv(tokens, BLOCK_M)
    # batch and head in one grid dim: a grid's second dim ends at 65535
    row = tl.program_id(0) // blocks
    rows = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    # int64 ahead of the strides, whose products may exceed 2^31
    return (row // heads).to(tl.int64), (row % heads).to(tl.int64), rows.to(tl.int64)


@triton.jit
def _load(x_ptr, rows, mask, dims, head_dim):
    x = tl.load(x_ptr + rows[:, None] + dims, mask=mask[:, None] & (dims < head_dim), other=0.0)  # [rows, head dim]
    return x.to(tl.float32)


@triton.jit
def _store(x_ptr, x, rows, mask, dims, head_dim):
    tl.store(x_ptr + rows[:, None] + dims, x.to(x_ptr.dtype.element_ty), mask=mask[:, None] & (dims < head_dim))


@triton.jit
def _weights(a_ptr, b_ptr, a_rows, b_rows, mask):
    """(exp(lse_a - lse), exp(lse_b - lse), lse); zeros and -inf where both are -inf."""
    a = tl.load(a_ptr + a_rows, mask=mask, other=float("-inf")).to(tl.float32)  # [rows]
    b = tl.load(b_ptr + b_rows, mask=mask, other=float("-inf")).to(tl.float32)  # [rows]
    top = tl.maximum(a, b)
    safe = tl.where(top == float("-inf"), 0.0, top)
    # the larger weight is 1 here: neither overflows, and their sum is at least 1
    wa = tl.exp(a - safe)
    wb = tl.exp(b - safe)
    total = wa + wb
    seen = total != 0.0
    total = tl.where(seen, total, 1.0)
    return wa / total, wb / total, tl.where(seen, safe + tl.log(total), float("-inf"))


@kernel(aligned=("head_dim",), unaligned=("la_ptr", "lb_ptr"))
def _merge_fwd_kernel(
    oa_ptr,
    ob_ptr,
    la_ptr,
    lb_ptr,
    out_ptr,
    lse_ptr,
    heads,
    tokens,
    head_dim,
    stride_oab,
    stride_oah,
    stride_oas,
    stride_obb,
    stride_obh,
    stride_obs,
    lab,
    lah,
    las,
    lbb,
    lbh,
    lbs,
    stride_outb,
    stride_outh,
    stride_outs,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program merges some tokens of one head. lab ... lbs are the strides of la and lb."""
    b, h, rows = _place(heads, tokens, BLOCK_M)
    mask = rows < tokens
    wa, wb, lse = _weights(la_ptr, lb_ptr, b * lab + h * lah + rows * las, b * lbb + h * lbh + rows * lbs, mask)
    tl.store(lse_ptr + (b * heads + h) * tokens + rows, lse, mask=mask)  # [rows]
    dims = tl.arange(0, BLOCK_D)[None, :]
    a_rows = b * stride_oab + h * stride_oah + rows * stride_oas
    b_rows = b * stride_obb + h * stride_obh + rows * stride_obs
    # a part of weight 0 is not read: it may hold NaN, and NaN * 0 is NaN
    out = wa[:, None] * _load(oa_ptr, a_rows, mask & (wa > 0.0), dims, head_dim)
    out += wb[:, None] * _load(ob_ptr, b_rows, mask & (wb > 0.0), dims, head_dim)
    _store(out_ptr, out, b * stride_outb + h * stride_outh + rows * stride_outs, mask, dims, head_dim)


@kernel(aligned=("head_dim",), unaligned=("dlse_ptr", "la_ptr", "lb_ptr"))
def _merge_bwd_kernel(
    do_ptr,
    dlse_ptr,
    oa_ptr,
    ob_ptr,
    la_ptr,
    lb_ptr,
    doa_ptr,
    dob_ptr,
    dla_ptr,
    dlb_ptr,
    heads,
    tokens,
    head_dim,
    stride_dob,
    stride_doh,
    stride_dos,
    dlb,
    dlh,
    dls,
    stride_oab,
    stride_oah,
    stride_oas,
    stride_obb,
    stride_obh,
    stride_obs,
    lab,
    lah,
    las,
    lbb,
    lbh,
    lbs,
    stride_doab,
    stride_doah,
    stride_doas,
    stride_dobb,
    stride_dobh,
    stride_dobs,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """As forward. dla and dlb are contiguous; dlb, dlh, dls are the strides of dlse."""
    b, h, rows = _place(heads, tokens, BLOCK_M)
    mask = rows < tokens
    wa, wb, _ = _weights(la_ptr, lb_ptr, b * lab + h * lah + rows * las, b * lbb + h * lbh + rows * lbs, mask)
    dims = tl.arange(0, BLOCK_D)[None, :]
    dlse = tl.zeros([BLOCK_M], tl.float32)
    if dlse_ptr is not None:
        dlse = tl.load(dlse_ptr + b * dlb + h * dlh + rows * dls, mask=mask, other=0.0).to(tl.float32)  # [rows]
    difference = tl.zeros([BLOCK_M], tl.float32)
    if do_ptr is not None:
        a_rows = b * stride_oab + h * stride_oah + rows * stride_oas
        b_rows = b * stride_obb + h * stride_obh + rows * stride_obs
        do = _load(do_ptr, b * stride_dob + h * stride_doh + rows * stride_dos, mask, dims, head_dim)
        apart = _load(oa_ptr, a_rows, mask & (wa > 0.0), dims, head_dim)
        # a part that saw nothing may hold anything, NaN too: it is not read
        apart -= _load(ob_ptr, b_rows, mask & (wb > 0.0), dims, head_dim)
        # o_a - o = w_b (o_a - o_b), and the other way round
        difference = tl.sum(do * apart, axis=1)
        if doa_ptr is not None:
            a_rows = b * stride_doab + h * stride_doah + rows * stride_doas
            _store(doa_ptr, wa[:, None] * do, a_rows, mask, dims, head_dim)
        if dob_ptr is not None:
            b_rows = b * stride_dobb + h * stride_dobh + rows * stride_dobs
            _store(dob_ptr, wb[:, None] * do, b_rows, mask, dims, head_dim)
    lse_rows = (b * heads + h) * tokens + rows
    if dla_ptr is not None:
        tl.store(dla_ptr + lse_rows, (wa * (dlse + wb * difference)).to(dla_ptr.dtype.element_ty), mask=mask)  # [rows]
    if dlb_ptr is not None:
        tl.store(dlb_ptr + lse_rows, (wb * (dlse - wa * difference)).to(dlb_ptr.dtype.element_ty), mask=mask)  # [rows]


class _Plan(NamedTuple):
    block_m: int
    num_warps: int


@tunable("not measured", ("block_m", "num_warps"))
def _plan(tokens: int, head_dim: int, target: Target) -> _Plan:
    # rows found by dividing a flat index, as 64-bit vectors, took 7 to 10 times as long as the bytes need
    # 2048 elements a tile are two 16-byte vectors a thread in bf16; fewer lost 4 to 18 % in elementwise kernels
    # (docs/log/measured_facts.md)
    return _Plan(max(1, min(32, 2048 // next_power_of_2(head_dim), next_power_of_2(tokens))), 4)


def _unit(x: Tensor) -> Tensor:
    """x, or a copy if its last dim is not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _strides(*tensors: Tensor | None) -> list[int]:
    return [stride for x in tensors for stride in ((0, 0, 0) if x is None else x.stride()[:3])]


def _merge_fwd_outputs(oa: Tensor, ob: Tensor, la: Tensor, lb: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # the order of dims of the first part, so a chain of merges never transposes
    return empty_like(oa, dtype), la.new_empty(la.shape, dtype=torch.float32)


def _merge_fwd(oa: Tensor, ob: Tensor, la: Tensor, lb: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out, lse = _merge_fwd_outputs(oa, ob, la, lb, dtype)
    oa, ob = _unit(oa), _unit(ob)
    b, h, s, d = oa.shape
    plan = _plan(s, d, Target.of(oa.device))
    _merge_fwd_kernel[(b * h * cdiv(s, plan.block_m),)](
        oa, ob, la, lb, out, lse, h, s, d, *_strides(oa, ob, la, lb, out),
        BLOCK_M=plan.block_m, BLOCK_D=next_power_of_2(d), num_warps=plan.num_warps,
    )  # fmt: skip
    return out, lse


def _merge_bwd_outputs(
    do: Tensor | None, dlse: Tensor | None, oa: Tensor, ob: Tensor, la: Tensor, lb: Tensor, need: list[bool]
) -> tuple[Tensor | None, ...]:
    made = [empty_like(oa), empty_like(ob), la.new_empty(la.shape), lb.new_empty(lb.shape)]
    return tuple(x if needed else None for x, needed in zip(made, need, strict=True))


def _merge_bwd(
    do: Tensor | None, dlse: Tensor | None, oa: Tensor, ob: Tensor, la: Tensor, lb: Tensor, need: list[bool]
) -> tuple[Tensor | None, ...]:
    doa, dob, dla, dlb = _merge_bwd_outputs(do, dlse, oa, ob, la, lb, need)
    oa, ob, do = _unit(oa), _unit(ob), None if do is None else _unit(do)
    b, h, s, d = oa.shape
    plan = _plan(s, d, Target.of(oa.device))
    _merge_bwd_kernel[(b * h * cdiv(s, plan.block_m),)](
        do, dlse, oa, ob, la, lb, doa, dob, dla, dlb, h, s, d, *_strides(do, dlse, oa, ob, la, lb, doa, dob),
        BLOCK_M=plan.block_m, BLOCK_D=next_power_of_2(d), num_warps=plan.num_warps,
    )  # fmt: skip
    return doa, dob, dla, dlb


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if do is None and dlse is None:
        return (None,) * 5
    # without a gradient of out only the LSEs (n >= 2) get one
    need = [needed and (do is not None or n >= 2) for n, needed in enumerate(ctx.needs_input_grad[:4])]
    grads = _merge_bwd_op(do, dlse, *ctx.saved_tensors, need)
    return (*(grad if needed else None for grad, needed in zip(grads, need, strict=True)), None)


# out and lse of two parts, both [b, h, s, ...] in any strides; `dtype` is the result's
_merge_op = Op(
    "merge_fwd(Tensor oa, Tensor ob, Tensor la, Tensor lb, ScalarType dtype) -> (Tensor, Tensor)",
    _merge_fwd,
    _merge_fwd_outputs,
    backward=_backward,
    setup_context=_setup_context,
)
_merge_bwd_op = Op(
    "merge_bwd(Tensor? do, Tensor? dlse, Tensor oa, Tensor ob, Tensor la, Tensor lb, bool[] need) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _merge_bwd,
    _merge_bwd_outputs,
)


@falls_back("merge_attentions")
def merge_attentions(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, layout: Layout = "bshd"
) -> tuple[Tensor, Tensor]:
    """Attention over all keys from results over disjoint parts of them.

    Shapes: B batch, S queries, H heads, D head dim of the values, T tokens of all sequences.
        outs    one or more [B, S, H, D] "bshd", [B, H, S, D] "bhsd", [S, B, H, D] "sbhd" or [T, H, D] "thd"; float32,
                float16 or bfloat16 (float64 on the CPU), all of one dtype; any strides; a part may be expanded
        lses    as many log-sum-exps in nats, float32 (or float64) [B, H, S], for "thd" [H, T], as `attention` returns
                them
    Returns (out, lse), out in the dtype of outs, lse float32 (float64 for float64); rows that no part saw give 0 and
        -inf.
    Numerics: float32, rounded once however many parts. Differentiable in outs and lses. Deterministic.
    Memory: n parts take n - 1 launches and, from 3 on, a float32 result between them; outs and lses are saved.
    Raises ValueError with the argument's name, requirement and value. Double backward and vmap are not
        implemented and say so.
    Source: online softmax, Milakov and Gimelshein, arXiv:1805.02867.

    A prefix that all requests share is attended to once, as one long batch entry, and merged with each one's own keys:

        shared = attention(q.flatten(0, 1)[None], k_prefix[None], v_prefix[None], return_lse=True)     # [1, B * S, ...]
        out, lse = shared[0].view_as(q), shared[1].unflatten(2, q.shape[:2])[0].transpose(0, 1)
        own = decode_attention(q, k_cache, v_cache, cache_seqlens, return_lse=True)
        o, _ = merge_attentions([out, own[0]], [lse, own[1]])
    """
    op = "merge_attentions"
    checks.one_of(op, "layout", layout, _LAYOUTS)
    outs, lses = list(outs), list(lses)
    checks.require(len(outs) > 0, op, "outs", "have at least one part", 0)
    checks.require(len(lses) == len(outs), op, "lses", f"be as many as outs, {len(outs)}", len(lses))
    first = outs[0]
    dims = 3 if layout == "thd" else 4
    for n, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        checks.tensor(op, f"outs[{n}]", out)
        checks.tensor(op, f"lses[{n}]", lse)
        checks.floating(op, **{f"outs[{n}]": out, f"lses[{n}]": lse})
        checks.same_device(op, "outs[0]", first, **{f"outs[{n}]": out, f"lses[{n}]": lse})
        checks.require(out.dim() == dims, op, f"outs[{n}]", f"have {dims} dims ({layout})", list(out.shape))
        checks.shape(op, f"outs[{n}]", out, first.shape, "that of outs[0]")
        if out.dtype is not first.dtype:
            checks.fail(
                op, f"outs[{n}]", f"have the dtype of outs[0], {checks.name(first.dtype)}", checks.name(out.dtype)
            )
        rows = to_bhsd(out, layout).shape[:3]
        checks.shape(op, f"lses[{n}]", lse, rows[1:] if layout == "thd" else rows, "batch, heads, queries")
    if len(outs) == 1:
        seen = from_lse_order(lses[0] > -torch.inf, layout)[..., None]
        # one part alone still promises zeros for rows that saw nothing
        return first.masked_fill(~seen, 0.0), lses[0].to(acc_dtype(first.dtype), copy=True)
    if not use_kernel(op, first):
        with without_autocast(first.device):
            return merge_attentions_ref(outs, lses, layout=layout)
    out, lse = to_bhsd(first, layout), lses[0] if layout != "thd" else lses[0][None]
    for n, (other, its_lse) in enumerate(zip(outs[1:], lses[1:], strict=True)):
        # intermediate results stay float32, so that many parts are rounded once
        last = n == len(outs) - 2
        out, lse = _merge_op(
            out, to_bhsd(other, layout), lse, its_lse if layout != "thd" else its_lse[None],
            first.dtype if last else torch.float32,
        )  # fmt: skip
    return from_bhsd(out, layout), lse[0] if layout == "thd" else lse


@torch.no_grad()
def merge_pair(
    out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, *, layout: Layout = "bshd"
) -> tuple[Tensor, Tensor]:
    """`merge_attentions` of two results, not rounded: (out, lse) in float32 (float64 for float64), without gradients.

    Shapes: those of `merge_attentions`; `out` and `other` may differ in dtype, as a sum and its next term do.
    """
    packed = layout == "thd"
    # the sum of a ring stays float32 from step to step, which `merge_attentions` would round
    if use_kernel("merge_attentions", out):
        parts = (to_bhsd(out, layout), to_bhsd(other, layout), *((x[None] if packed else x) for x in (lse, other_lse)))
        merged, merged_lse = _merge_op(*parts, torch.float32)
        return from_bhsd(merged, layout), merged_lse[0] if packed else merged_lse
    dtype = acc_dtype(out.dtype)
    with without_autocast(out.device):
        return merge_attentions_ref([out.to(dtype), other.to(dtype)], [lse, other_lse], layout=layout)
