"""The universal backward kernels: two passes without atomics, hence the same bits every time.

    p     = 2^(s - lse)                       recomputed as in forward
    dv_j  = sum_i keep_ij p_ij do_i / (1 - dropout)
    dp_ij = keep_ij do_i v_j / (1 - dropout)
    ds_ij = p_ij (dp_ij - delta_i) (1 - tanh_ij^2 with a softcap)      delta_i = o_i do_i - dlse_i
    dq_i  = scale sum_j ds_ij k_j;   dk_j = scale sum_i ds_ij q_i
    dbias = ds before the softcap's factor, summed over the dims that were broadcast

`preprocess`: LSE in base 2 and delta per row. `dkdv`: one program per block of keys, which runs over the queries that
see them and over the query heads that share them. `dq`: one program per block of queries, over keys as in forward.
`dbias`: one program per tile of the bias; where a float32 of each score fits in 256 MiB, `dq` stores ds instead, which
is summed over the dims that were broadcast. Rows before and after a sequence get zeros. Where sequences of keys lie in
any order and may share keys, the keys are divided into segments, at every row where a sequence begins or ends; `dkdv`
has a program per block of a segment, which runs over all sequences that contain it.

Source: Dao 2023, arXiv:2307.08691; the tiles were measured here (triton/plans.py). Reference: `attention_bwd_ref`.
"""

import torch
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.operands import BackwardCall, Operand, Operands
from powertrain.ops.attention.triton.backward_dbias import launch_dbias, stored_ds, sum_ds
from powertrain.ops.attention.triton.backward_dkdv import launch_dkdv
from powertrain.ops.attention.triton.backward_dq import launch_dq
from powertrain.ops.attention.triton.launch_arguments import shared_arguments, strides, uses_tma
from powertrain.ops.attention.triton.read_mask import ranges_of_keys, ranges_of_queries, read_mask
from powertrain.ops.attention.triton.tiles import LOG2E, TiledRows, load_tile, pieces, to_int64
from powertrain.ops.early_start import await_kernel_before, starts_early
from powertrain.ops.shapes import acc_dtype, cdiv
from powertrain.runtime.launch import kernel


def attention_bwd_ref(
    dout: Tensor,  # [b, h, sq, dv]
    query: Tensor,  # [b, h, sq, dqk]
    key: Tensor,  # [b, KV heads, sk, dqk]
    value: Tensor,  # [b, KV heads, sk, dv]
    *,
    scale: float,
    visible: Tensor | None = None,  # bool, broadcasts to [b, h, sq, sk]
    bias: Tensor | None = None,  # [b, h, sq, sk]
    softcap: float = 0.0,
    keep: Tensor | None = None,  # bool [b, h, sq, sk]: the weights that dropout keeps
    dropout_p: float = 0.0,
    dlse: Tensor | None = None,  # [b, h, sq]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The specification of the backward in plain PyTorch: (dq, dk, dv, dbias), in float32 or the inputs' float64."""
    q, k, v, do = (x.to(acc_dtype(x.dtype)) for x in (query, key, value, dout))
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
    raw = q @ k.mT * scale  # [b, h, sq, sk]
    t = torch.tanh(raw / softcap) if softcap else torch.zeros_like(raw)
    s = (softcap * t if softcap else raw) + (0.0 if bias is None else bias)
    s = s if visible is None else s.masked_fill(~visible, -torch.inf)
    lse = s.logsumexp(-1, keepdim=True)
    # rows that see nothing have weights 0
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0))
    kept = torch.ones_like(p) if keep is None else keep / (1 - dropout_p)
    dv = (kept * p).mT @ do
    dp = kept * (do @ v.mT)
    # = sum(out * dout, -1)
    delta = (p * dp).sum(-1, keepdim=True)
    ds = p * (dp - delta + (0.0 if dlse is None else dlse[..., None]))
    dbias, ds = ds, ds * (1 - t * t) * scale
    dq, dk = ds @ k, ds.mT @ q
    dk, dv = (x.unflatten(1, (-1, ratio)).sum(2) for x in (dk, dv))
    return dq, dk, dv, dbias


@kernel(aligned=("row_stride",), unaligned=("lse_ptr", "dlse_ptr"))
def _attention_bwd_preprocess_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, rows_ptr, batch, queries, kv_heads, num_q_per_kv, head_of_kv, head_of_repeat,
    size, row_stride, stride_ob, stride_os, stride_oh, stride_or, stride_dob, stride_dos, stride_doh, stride_dor,
    D_V: tl.constexpr, P_V: tl.constexpr, BLOCK_M: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """LSE in base 2 and delta of BLOCK_M rows, padded to a multiple of 128 rows.

    Rows that see nothing and rows past the end get inf and 0: their weights are then 2^-inf = 0 in the kernels that
    follow, whatever ALiBi makes of their positions."""
    await_kernel_before(STARTS_EARLY)
    blocks = row_stride // BLOCK_M
    block, index = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    heads = kv_heads * num_q_per_kv
    b, kv, repeat = to_int64(index // heads), to_int64(index % heads // num_q_per_kv), to_int64(index % num_q_per_kv)
    first = block * BLOCK_M
    o_base = o_ptr + b * stride_ob + kv * stride_oh + repeat * stride_or
    do_base = do_ptr + b * stride_dob + kv * stride_doh + repeat * stride_dor
    o_rows = TiledRows((o_base,), queries, stride_os)
    do_rows = TiledRows((do_base,), queries, stride_dos)
    o = load_tile(o_rows, first, D_V, P_V, BLOCK_M, False, True)  # tile of [BLOCK_M, D_V]
    do = load_tile(do_rows, first, D_V, P_V, BLOCK_M, False, True)  # tile of [BLOCK_M, D_V]
    delta = tl.zeros([BLOCK_M], tl.float32)
    for n in tl.static_range(len(P_V)):
        delta += tl.sum(o[n].to(tl.float32) * do[n].to(tl.float32), 1)
    i = first + tl.arange(0, BLOCK_M)
    head = b * heads + kv * head_of_kv + repeat * head_of_repeat
    lse = tl.load(lse_ptr + head * queries + i, mask=i < queries, other=float("-inf"))  # [BLOCK_M]
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + head * queries + i, mask=i < queries, other=0.0)  # [BLOCK_M]
    sees_nothing = lse == float("-inf")
    at = head * row_stride + i
    tl.store(rows_ptr + at, tl.where(sees_nothing, float("inf"), lse * LOG2E))  # [BLOCK_M]
    tl.store(rows_ptr + size + at, tl.where(sees_nothing, 0.0, delta))  # [BLOCK_M]


def attention_backward(call: BackwardCall, operands: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias); the ones not needed are empty."""
    dq, dk, dv, dbias = call.outputs()
    need_dq, need_dk, need_dv, need_dbias = call.need
    dout = call.dout
    dout = dout if dout.stride(-1) == 1 and 0 not in dout.stride() else dout.contiguous()
    do = operands.like_query(dout)
    row_stride = cdiv(operands.queries, 128) * 128
    rows = torch.empty((2, operands.num_heads * row_stride), dtype=torch.float32, device=call.lse.device)
    if rows.numel():
        _launch_preprocess(call, operands, do, rows, row_stride)
    mask = read_mask(operands.args.bias, operands.target)
    shared = shared_arguments(operands, mask) | strides(do=do)
    shared |= dict(rows_ptr=rows, size=rows.shape[1], row_stride=row_stride)
    use_tma = uses_tma(shared["FMA"], operands.target, operands.q, operands.k, operands.v, do)
    if need_dk or need_dv:
        ranges = ranges_of_keys(operands, mask)
        launch_dkdv(operands, shared, ranges, use_tma, dk if need_dk else None, dv if need_dv else None)
    ds = stored_ds(operands, dbias) if need_dq and need_dbias else None
    if need_dq:
        launch_dq(operands, shared, ranges_of_queries(operands, mask), use_tma, dq, ds)
    if ds is not None and ds is not dbias:
        sum_ds(ds, dbias, operands.target)
    elif need_dbias and ds is None:
        launch_dbias(operands, shared, use_tma, dbias)
    return dq, dk, dv, dbias


def _launch_preprocess(call: BackwardCall, operands: Operands, do: Operand, rows: Tensor, row_stride: int) -> None:
    heads = operands.heads
    block = 64 if operands.d_v <= 128 else 16
    _attention_bwd_preprocess_kernel[(rows.shape[1] // block,)](
        **strides(o=operands.like_query(call.out), do=do), lse_ptr=call.lse,
        dlse_ptr=None if call.dlse is None else call.dlse.contiguous(), rows_ptr=rows, size=rows.shape[1],
        row_stride=row_stride, batch=operands.storage, queries=operands.queries, kv_heads=heads.kv,
        num_q_per_kv=heads.q_per_kv, head_of_kv=heads.kv_step, head_of_repeat=heads.q_step,
        D_V=operands.d_v, P_V=pieces(operands.d_v), BLOCK_M=block, STARTS_EARLY=starts_early(operands.target),
        num_warps=8 if block == 64 else 4,
    )  # fmt: skip
