"""Kernels of the backward of RMSNorm and LayerNorm, their plan and launches; norm.py has the formulas."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.column_sums import PartialSums, store_sum
from powertrain.ops.early_start import starts_early_if_small, wait_then_let_next_start
from powertrain.ops.row_groups import empty_like_rows, row_groups, row_places
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable


@triton.jit
def _norm_weight(weight_ptr, cols, N, ZERO_CENTERED: tl.constexpr):
    w = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)  # the shape of cols
    if ZERO_CENTERED:
        w += 1.0
    return w


@kernel(aligned=("N",), down_to=2)
def _norm_bwd_kernel(
    dy_ptr,
    dh_ptr,
    h_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dresidual_ptr,
    dw_partial_ptr,
    db_partial_ptr,
    M,
    N,
    inner,
    middle,
    stride_dym,
    stride_dyg,
    stride_dyo,
    stride_dhm,
    stride_dhg,
    stride_dho,
    stride_hm,
    stride_hg,
    stride_ho,
    stride_dxm,
    stride_dxg,
    stride_dxo,
    LEVELS: tl.constexpr,
    IS_LAYER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    SUM_ROWS_LAST: tl.constexpr,
    PIPELINE: tl.constexpr,
    RELOAD: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    wait_then_let_next_start(STARTS_EARLY)
    # a row is BLOCK_N columns, and BLOCK_TAIL after them: 18432 as one power of 2 would leave half of the lanes idle
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_N)[None, :]
    sizes = (inner, middle)
    # summed over a block's rows at the end: each sum crosses warps through shared memory, which short rows do not hide
    SUMS: tl.constexpr = BLOCK_M if SUM_ROWS_LAST else 1
    dw = tl.zeros([SUMS, BLOCK_N], tl.float32)
    db = tl.zeros([SUMS, BLOCK_N], tl.float32)
    if weight_ptr is not None:
        w = _norm_weight(weight_ptr, cols, N, ZERO_CENTERED)
    if BLOCK_TAIL > 0:
        tail_cols = BLOCK_N + tl.arange(0, BLOCK_TAIL)[None, :]
        tail_dw = tl.zeros([SUMS, BLOCK_TAIL], tl.float32)
        tail_db = tl.zeros([SUMS, BLOCK_TAIL], tl.float32)
    # strided rows, pipelined: with num_stages=1 this took 0.125 to 0.134 ms at 16384x4096 on an H200, with 3 0.107
    for block in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=PIPELINE):
        rows = (block * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        dy_rows = dy_ptr + row_places(rows, (stride_dym, stride_dyg, stride_dyo), sizes, LEVELS)
        h_rows = h_ptr + row_places(rows, (stride_hm, stride_hg, stride_ho), sizes, LEVELS)
        rows = rows.to(tl.int64)
        dy, xhat, rstd = _dy_xhat(
            dy_rows, h_rows, mean_ptr, rstd_ptr, rows, cols, M, N, IS_LAYER, False
        )  # fmt: skip
        if dw_partial_ptr is not None:
            # kept over all rows of the program and written once: no atomics, so the same bits every time
            dw += _over_rows(dy * xhat, SUM_ROWS_LAST)
        if db_partial_ptr is not None:
            db += _over_rows(dy, SUM_ROWS_LAST)
        wdy = dy
        if weight_ptr is not None:
            if BLOCK_TAIL > 0 or RELOAD:
                # from the cache once more: kept, it made 18432 columns spill 272 bytes a thread
                w = _norm_weight(weight_ptr, cols, N, ZERO_CENTERED)
            wdy = dy * w
        sum_wdy_xhat = tl.sum(wdy * xhat, axis=1, keep_dims=True)  # [BLOCK_M, 1]
        sum_wdy = tl.zeros([BLOCK_M, 1], tl.float32)
        if IS_LAYER:
            sum_wdy = tl.sum(wdy, axis=1, keep_dims=True)  # [BLOCK_M, 1]
        if BLOCK_TAIL > 0:
            tail_dy, tail_xhat, rstd = _dy_xhat(
                dy_rows, h_rows, mean_ptr, rstd_ptr, rows, tail_cols, M, N, IS_LAYER, False
            )  # fmt: skip
            if dw_partial_ptr is not None:
                tail_dw += _over_rows(tail_dy * tail_xhat, SUM_ROWS_LAST)
            if db_partial_ptr is not None:
                tail_db += _over_rows(tail_dy, SUM_ROWS_LAST)
            tail_wdy = tail_dy
            if weight_ptr is not None:
                tail_wdy = tail_dy * _norm_weight(weight_ptr, tail_cols, N, ZERO_CENTERED)
            sum_wdy_xhat += tl.sum(tail_wdy * tail_xhat, axis=1, keep_dims=True)
            if IS_LAYER:
                sum_wdy += tl.sum(tail_wdy, axis=1, keep_dims=True)
        if dx_ptr is not None:
            # gradients of rows of one stride are dense: N says more than a stride on how they are aligned
            dx_places = rows * N
            if LEVELS > 1:
                dx_places = row_places(rows.to(tl.int32), (stride_dxm, stride_dxg, stride_dxo), sizes, LEVELS)
            dh_rows = None
            if dh_ptr is not None:
                dh_rows = dh_ptr + row_places(rows.to(tl.int32), (stride_dhm, stride_dhg, stride_dho), sizes, LEVELS)
            if RELOAD:
                # from the L2 once more: kept over the sums, dy and x̂ of so wide a row would spill
                wdy, xhat, rstd = _dy_xhat(
                    dy_rows, h_rows, mean_ptr, rstd_ptr, rows, cols, M, N, IS_LAYER, True
                )  # fmt: skip
                if weight_ptr is not None:
                    wdy *= _norm_weight(weight_ptr, cols, N, ZERO_CENTERED)
            dx = (wdy - xhat * (sum_wdy_xhat / N) - sum_wdy / N) * rstd  # [BLOCK_M, BLOCK_N]
            _store_dx(dx, dx_ptr, dresidual_ptr, dh_rows, dx_places, cols, (rows < M) & (cols < N))
            if BLOCK_TAIL > 0:
                if RELOAD:
                    tail_wdy, tail_xhat, rstd = _dy_xhat(
                        dy_rows, h_rows, mean_ptr, rstd_ptr, rows, tail_cols, M, N, IS_LAYER, True
                    )  # fmt: skip
                    if weight_ptr is not None:
                        tail_wdy *= _norm_weight(weight_ptr, tail_cols, N, ZERO_CENTERED)
                dx = (tail_wdy - tail_xhat * (sum_wdy_xhat / N) - sum_wdy / N) * rstd  # [BLOCK_M, BLOCK_TAIL]
                _store_dx(dx, dx_ptr, dresidual_ptr, dh_rows, dx_places, tail_cols, (rows < M) & (tail_cols < N))
    _store_partials(dw, db, dw_partial_ptr, db_partial_ptr, program, cols, N)
    if BLOCK_TAIL > 0:
        _store_partials(tail_dw, tail_db, dw_partial_ptr, db_partial_ptr, program, tail_cols, N)


@triton.jit
def _dy_xhat(
    dy_rows, h_rows, mean_ptr, rstd_ptr, rows, cols, M, N, IS_LAYER: tl.constexpr, AGAIN: tl.constexpr
):  # fmt: skip
    # another policy than the first load's, or the compiler would make one load of the two
    POLICY: tl.constexpr = "evict_first" if AGAIN else ""
    mask = (rows < M) & (cols < N)
    # both [BLOCK_M, BLOCK_N]
    h = tl.load(h_rows + cols, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    dy = tl.load(dy_rows + cols, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)  # [BLOCK_M, 1]
    if IS_LAYER:
        h = tl.where(mask, h - tl.load(mean_ptr + rows, mask=rows < M, other=0.0), 0.0)  # [BLOCK_M, 1]
    return dy, h * rstd, rstd


@triton.jit
def _over_rows(x, LATER: tl.constexpr):
    if LATER:
        return x
    else:
        return tl.sum(x, axis=0, keep_dims=True)


@triton.jit
def _store_dx(dx, dx_ptr, dresidual_ptr, dh_rows, places, cols, mask):
    if dh_rows is not None:
        dx += tl.load(dh_rows + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
    tl.store(dx_ptr + places + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)  # [BLOCK_M, BLOCK_N]
    if dresidual_ptr is not None:
        # [BLOCK_M, BLOCK_N]
        tl.store(dresidual_ptr + places + cols, dx.to(dresidual_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_partials(dw, db, dw_partial_ptr, db_partial_ptr, program, cols, N):
    partial = program.to(tl.int64) * N + cols
    if dw_partial_ptr is not None:
        store_sum(dw_partial_ptr + partial, dw, cols < N)
    if db_partial_ptr is not None:
        store_sum(db_partial_ptr + partial, db, cols < N)


@kernel(aligned=("N",), down_to=2)
def _norm_bwd_looped_kernel(
    dy_ptr,
    dh_ptr,
    h_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dresidual_ptr,
    N,
    inner,
    middle,
    stride_dym,
    stride_dyg,
    stride_dyo,
    stride_dhm,
    stride_dhg,
    stride_dho,
    stride_hm,
    stride_hg,
    stride_ho,
    stride_dxm,
    stride_dxg,
    stride_dxo,
    LEVELS: tl.constexpr,
    IS_LAYER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_N)
    sizes = (inner, middle)
    dy_row = dy_ptr + row_places(tl.program_id(0), (stride_dym, stride_dyg, stride_dyo), sizes, LEVELS)
    h_row = h_ptr + row_places(tl.program_id(0), (stride_hm, stride_hg, stride_ho), sizes, LEVELS)
    dh_place = row_places(tl.program_id(0), (stride_dhm, stride_dhg, stride_dho), sizes, LEVELS)
    dx_place = row * N
    if LEVELS > 1:
        dx_place = row_places(tl.program_id(0), (stride_dxm, stride_dxg, stride_dxo), sizes, LEVELS)
    rstd = tl.load(rstd_ptr + row)  # scalar
    mean = 0.0
    if IS_LAYER:
        mean = tl.load(mean_ptr + row)  # scalar
    sum_wdy = tl.zeros([BLOCK_N], tl.float32)
    sum_wdy_xhat = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + lanes
        wdy, xhat = _wdy_xhat(dy_row, h_row, weight_ptr, mean, rstd, cols, N, ZERO_CENTERED)
        sum_wdy += wdy
        sum_wdy_xhat += wdy * xhat
    mean_wdy_xhat = tl.sum(sum_wdy_xhat, axis=0) / N
    mean_wdy = 0.0
    if IS_LAYER:
        mean_wdy = tl.sum(sum_wdy, axis=0) / N
    for start in range(0, N, BLOCK_N):
        cols = start + lanes
        wdy, xhat = _wdy_xhat(dy_row, h_row, weight_ptr, mean, rstd, cols, N, ZERO_CENTERED)
        dx = (wdy - mean_wdy - xhat * mean_wdy_xhat) * rstd
        if dh_ptr is not None:
            dx += tl.load(dh_ptr + dh_place + cols, mask=cols < N, other=0.0).to(tl.float32)  # [BLOCK_N]
        tl.store(dx_ptr + dx_place + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)  # [BLOCK_N]
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + dx_place + cols, dx.to(dresidual_ptr.dtype.element_ty), mask=cols < N)  # [BLOCK_N]


@triton.jit
def _wdy_xhat(dy_ptr, h_ptr, weight_ptr, mean, rstd, cols, N, ZERO_CENTERED: tl.constexpr):
    mask = cols < N
    h = tl.load(h_ptr + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N]
    wdy = tl.load(dy_ptr + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N]
    if weight_ptr is not None:
        wdy *= _norm_weight(weight_ptr, cols, N, ZERO_CENTERED)
    # columns past the row would hold -mean * rstd
    return wdy, tl.where(mask, (h - mean) * rstd, 0.0)


@kernel(aligned=("N",), down_to=2)
def _norm_dw_looped_kernel(
    dy_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    dw_partial_ptr,
    db_partial_ptr,
    M,
    N,
    inner,
    middle,
    stride_dym,
    stride_dyg,
    stride_dyo,
    stride_hm,
    stride_hg,
    stride_ho,
    LEVELS: tl.constexpr,
    IS_LAYER: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    dw = tl.zeros([BLOCK_N], tl.float32)
    db = tl.zeros([BLOCK_N], tl.float32)
    sizes = (inner, middle)
    for step in range(tl.program_id(1), M, tl.num_programs(1)):
        row = step + tl.zeros([], tl.int32)
        dy_row = dy_ptr + row_places(row, (stride_dym, stride_dyg, stride_dyo), sizes, LEVELS)
        h_row = h_ptr + row_places(row, (stride_hm, stride_hg, stride_ho), sizes, LEVELS)
        dy = tl.load(dy_row + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N]
        h = tl.load(h_row + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N]
        if IS_LAYER:
            h -= tl.load(mean_ptr + row)  # scalar
        # rstd: scalar
        dw += dy * h * tl.load(rstd_ptr + row)
        db += dy
    partial = tl.program_id(1).to(tl.int64) * N + cols
    if dw_partial_ptr is not None:
        tl.store(dw_partial_ptr + partial, dw.to(dw_partial_ptr.dtype.element_ty), mask=mask)  # [BLOCK_N]
    if db_partial_ptr is not None:
        tl.store(db_partial_ptr + partial, db.to(db_partial_ptr.dtype.element_ty), mask=mask)  # [BLOCK_N]


class _Plan(NamedTuple):
    looped: bool  # the row does not fit in one block: three passes
    block_m: int
    block_n: int
    num_warps: int
    programs: int  # that share the rows; as a plan for a width, of an SM
    pipeline: int = 1  # stages in flight
    tail: int = 0  # columns behind block_n, a power of 2
    sum_rows_last: bool = False  # weight gradients are summed over a block's rows after the last block
    reload: bool = False  # a row is read again for dx, from the cache


@tunable("NVIDIA H200, 2026-11-28", ("block_m", "num_warps", "programs", "pipeline"))
def _plan_bwd(
    M: int, N: int, is_layer: bool, has_bias: bool, stage_bytes: int, weight_bytes: int, target: Target
) -> _Plan:
    """stage_bytes: of an element of each tensor that a row is read of; weight_bytes: of an element of the weight."""
    if N > 8192:
        plan = _wide(N, is_layer, has_bias, stage_bytes)
    elif N <= 2048 or (N % 2 and N <= 4096 and stage_bytes < 8):
        plan = _narrow(N, stage_bytes) if N % 8 == 0 else _narrow_odd(N, is_layer, has_bias, stage_bytes)
    else:
        plan = _middle(N, is_layer)
    if plan.looped:
        return plan._replace(programs=min(M, plan.programs))
    if M <= _FEW:
        plan = _few(plan, M, target.num_sms)
    # pipelining keeps all stages but one in shared memory, those of a weight that is read for each row too
    column_bytes = stage_bytes + (weight_bytes if plan.tail or plan.reload else 0)
    row_bytes = plan.block_m * (plan.block_n + plan.tail) * column_bytes
    rows_in_shared_memory = (target.shared_per_block // plan.programs - 4096) // row_bytes
    blocks = cdiv(M, plan.block_m)
    # a program's partial sums cost as much as a row of its own
    programs = min(max(cdiv(blocks, 4), min(blocks, target.num_sms)), plan.programs * target.num_sms)
    return plan._replace(programs=programs, pipeline=min(plan.pipeline, max(1, rows_in_shared_memory + 1)))


_FEW = 512  # rows


def _few(plan: _Plan, M: int, num_sms: int) -> _Plan:
    """The plan for few rows: smaller blocks keep more SMs busy; a program of one block has nothing to load ahead."""
    # us, one H200, in a graph, this, as for many rows; torch.compile: layer 33x96 2.2, 5.1; 3.4. 300x96 3.5, 5.8; 8.0.
    # rms 16x128 2.2, 3.1; 2.9. 64x4096 3.9, 4.7; 4.8. layer 20x12168 8.3, 9.4; 8.2. 128x8192 9.4, 10.3; 8.6
    rows = min(plan.block_m, next_power_of_2(cdiv(M, 64)))
    warps = max(1, plan.num_warps * rows // plan.block_m)
    one_block = plan.block_n > 1024 and cdiv(M, rows) <= num_sms
    return plan._replace(block_m=rows, num_warps=warps, pipeline=1 if one_block else plan.pipeline)


def _narrow(N: int, stage_bytes: int) -> _Plan:
    """Rows of whole vectors, which are ahead in shared memory."""
    # us, one H200, 2^26 elements, this; blocks of 2048 to 8192 elements, as before:
    #   rms bf16 80 123; 142   104 118; 128   160 119; 320   256 118; 221   320 116; 168   768 109; 116   1280 116; 134
    #   layer with a bias 96 126; 173   192 134; 477   224 127; 425   256 127; 379   280 146; 268   384 125; 200
    #     896 113; 126   1152 143; 205   1536 117; 158   2048 110; 127; with a residual 224 159; 446   1152 158; 229
    block_n = next_power_of_2(N)
    if block_n <= 128:
        rows = min(64, 4096 // block_n)
        warps = max(1, rows * block_n // 512)
        return _Plan(False, rows, block_n, warps, 16 // warps, 3, sum_rows_last=True)
    if block_n <= 512:
        # one warp a row: sums across warps are barriers, and narrow rows have nothing to do meanwhile
        rows = 2 if block_n == 256 and stage_bytes <= 4 else 1
        return _Plan(False, rows, block_n, 1, 16 if stage_bytes < 8 else 8, 3, sum_rows_last=block_n == 256)
    return _Plan(False, 2048 // block_n, block_n, 4, 4, 3)


def _narrow_odd(N: int, is_layer: bool, has_bias: bool, stage_bytes: int) -> _Plan:
    """Rows of no whole vectors: single elements are not ahead in shared memory, so many warps keep them in flight."""
    # us as above: rms 443 148; 158   933 150; 155   1594 152; 164   2049 230; 370   3001 180; 285   4095 152; 242; with
    #   a residual 257 250; 483; layer with a bias 713 187; 267   1901 178; 234
    block_n = next_power_of_2(N)
    if block_n <= 256:
        rows, per_sm = _rows_of_a_warp(block_n, is_layer, has_bias, stage_bytes)
        return _Plan(False, rows, block_n, 1, per_sm, sum_rows_last=True)
    return _Plan(False, 1, block_n, max(1, block_n // 1024), min(16, 8192 // block_n))


def _rows_of_a_warp(block_n: int, is_layer: bool, has_bias: bool, stage_bytes: int) -> tuple[int, int]:
    """Rows of a program of one warp, and as many programs of an SM as its registers suffice for."""
    # us, one H200, 2^26 elements bf16 or 2^25 float32, rows and programs 1, 24; 1, 32; 2, 16; 2, 24; 2, 32; 4, 16:
    #   63 rms 250 207 222 174 158 217, with a residual 276 230 244 198 191 227
    #   63 layer with a bias 268 229 231 189 185 222
    #   121 rms 170 153 164 142 148 184
    #   121 layer with a bias 189 172 188 160 206 164, and a residual 260 226 254 319 267 326
    #   201 rms 153 202 181 226 188 273; with a bias 235 201 183 233 198 277, with a residual 206 266 393 492 393 300
    #   201 layer 164 203 223 280 229 211; with a bias 243 210 286 216 239 327, and a residual 227 304 291 228 252 262
    #   float32 77 rms 148 135 140 121 115 140; with a residual 170 156 187 161 194 181
    #   float32 143 layer with a bias 190 166 216 172 188 243, and a residual 259 219 222 176 192 197
    has_residual = stage_bytes not in (4, 8)
    if block_n <= 32:
        return (1, 32) if has_residual or stage_bytes == 8 else (4, 16)
    if block_n == 64:
        return (2, 32) if stage_bytes <= 6 else (1, 32)
    if block_n == 128:
        return (1, 32) if has_residual and (is_layer or stage_bytes > 6) else (2, 24)
    if is_layer and has_bias and (stage_bytes > 6 or not has_residual):
        return (2, 24) if has_residual else (1, 32)
    return (2, 16) if has_bias and not is_layer and stage_bytes == 4 else (1, 24)


def _middle(N: int, is_layer: bool) -> _Plan:
    # 16384 rows, ms, 1 program an SM, strided rows, 3 or 4 loads in flight:
    #   rms    4096: 2 rows 8 warps 3 stages 0.1071 (16 warps 0.1076, 1 row 0.110);   8192: 1 row 8 warps 0.2028
    #   layer  4096: 2 rows 16 warps 4 stages 0.1129 (8 warps 0.1136);                8192: 1 row 16 warps 0.2144
    block_n = next_power_of_2(N)
    if is_layer and N <= 3072:
        # 2560, 32768 rows: 0.1866, 8192 elements and one program 0.2225
        return _Plan(False, 1, block_n, 4, 2, 3)
    if not is_layer and 4096 < N <= 5120:
        # 5120: 0.133 ms (a block of 8192, 8 warps: 4 stages 0.139, 3 stages 0.154; torch.compile 0.169)
        return _Plan(False, 1, 4096, 4, 2, 3, tail=1024)
    if not is_layer and 5120 < N <= 6144:
        # 6144: 0.154 ms (3 stages 0.170; 4096 and 2048 apart 0.159; torch.compile 0.252)
        return _Plan(False, 1, block_n, 8, 1, 4)
    return _Plan(False, 8192 // block_n, block_n, 16 if is_layer else 8, 1, 4 if is_layer else 3)


def _wide(N: int, is_layer: bool, has_bias: bool, stage_bytes: int) -> _Plan:
    # layer 24000 0.222, 8 warps 0.261; 9001 in blocks of 2048 0.318, of 4096 0.515; rms 12543 0.294, 0.430
    # float32 of even widths, 2^25 elements, us, in blocks of 2048, of 4096: 12002 242, 201; 14002 244, 209
    in_vectors = N % 8 == 0 or (stage_bytes >= 8 and N % 2 == 0)
    looped = _Plan(True, 1, 4096, 16, 64) if in_vectors else _Plan(True, 1, 2048, 16, 128)
    if N <= 12288 and N % 8:
        return _wide_odd(N, is_layer, has_bias, stage_bytes)
    if N <= 12288:
        # 8192 rows, ms rms / layer (torch.compile): 9216 0.124 / 0.174 (0.243 / 0.221), 10240 0.133 / 0.146
        # (0.254 / 0.238), 12288 0.160 / 0.177 (0.288 / 0.271). 16 warps 0.162 / 0.222; as one block 0.276 / 3.5, by
        # spills. 9640, 6961 rows, rms with a bias and a residual: 0.169, in one stage with 16 warps 0.243
        return _Plan(False, 1, 8192, 8, 1, 3, max(256, next_power_of_2(N - 8192)))
    tail = next_power_of_2(N - 16384) if N > 16384 else 0
    # wider rows do not fit in registers, nor do sums for a bias in float32 (208 to 1320 bytes of stack; 0 to 304 in 16
    # bits) or of single elements: layer 17598 0.255 ms in three passes, 0.332 in one; 13982 0.284, 0.301; rms without a
    # bias 12543 0.294, 0.287; layer with a residual 13551 x 16533 not timed, 2.2 (torch.compile 1.2)
    spills = has_bias and (stage_bytes >= 12 or (stage_bytes >= 8 and tail > 0) or N % 8 > 0)
    layer_spills = is_layer and tail > 0 and (N % 8 > 0 or (has_bias and tail < 1024))
    if tail == 0 and is_layer and N % 8:
        # us, 2^26 elements, in registers, in three passes: 13333 bf16 312, 301, with a residual 426, 339; float32 597,
        # 258. 14002 bf16 205, 226, with a residual 285, 269; float32 with a residual 224, 246
        layer_spills = N % 2 == 1 or stage_bytes == 6
    if tail > 4096 or spills or layer_spills:
        return looped
    # ms, read once, again, in three passes: rms 16384 with a residual .155 .194 .242, with a bias too at 16392 .872
    #   .199 .244; layer with a bias 14208 .259 .191 .206; float32 16384 layer .230 .189 .234, rms 18432 .128 .148 .237
    # 8192 rows, rms / layer (torch.compile): 14336 0.217 / 0.316 (0.327 / 0.316), 16384 0.235 / 0.334 (0.357 / 0.422);
    #   two stages 0.292 / 0.367. 18432, 16384 rows: 0.602 (2 stages 0.754, 32 warps 0.669; 0.838)
    # rms of vectors of 8 bytes, us, read once, again: bf16 15004 169 145, with a residual 205 200; float32 14002 178,
    #   144
    half_vectors = tail == 0 and N % 8 > 0 and N % (2 if stage_bytes >= 8 else 4) == 0
    reload = has_bias or (half_vectors and not is_layer)
    return _Plan(False, 1, min(next_power_of_2(N), 16384), 16, 1, tail=tail, reload=reload)


def _wide_odd(N: int, is_layer: bool, has_bias: bool, stage_bytes: int) -> _Plan:
    """Rows of 8193 to 12288 columns that are no whole vectors."""
    # us, one H200, 2^26 elements bf16 or 2^25 float32, in registers on 8 warps, on 16; in three passes on 8, on 16:
    #   rms 8198 227 181 231 251, 9218 203 234 225 238, 9001 305 285 359 314, 11999 236 240 350 278
    #   rms with a residual 8196 246 222 248 253, 8198 231 228 253 277, 9218 280 296 251 267, 9996 249 229 262 243,
    #     9001 360 347 399 342
    #   layer 8198 264 213 238 271, 10002 214 256 227 243, 9001 338 358 358 327; with a residual 9218 309 354 254 281,
    #     9001 492 463 398 367, 12004 307 243 261 241
    #   float32 rms with a residual 10001 273 209 288 275, 12002 189 183 275 273
    #   float32 layer with a bias 8294 176 165 236 224, 10001 173 170 264 245, 12002 145 165 259 247
    in_registers = _Plan(False, 1, 8192, 16, 1, tail=max(256, next_power_of_2(N - 8192)))
    in_passes = _Plan(True, 1, 2048, 16, 128)
    if stage_bytes >= 8:
        return in_registers if N % 2 or N <= 10240 else in_registers._replace(num_warps=8)
    has_residual = stage_bytes == 6
    if N % 2:
        return in_passes if is_layer or has_bias or has_residual else in_registers
    if not has_residual:
        return in_registers if N <= 9216 else in_registers._replace(num_warps=8)
    if not is_layer and (N % 4 == 0 or N <= 9216):
        return in_registers if N % 4 == 0 else in_registers._replace(num_warps=8)
    return in_passes if N % 4 == 0 and N > 10240 else in_passes._replace(num_warps=8)


def norm_bwd_outputs(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    is_layer: bool,
    zero_centered: bool,
    x_dtype: torch.dtype,
    *need: bool,  # dx, dw, db
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    need_dx, need_dw, need_db = need
    dx = empty_like_rows(h, x_dtype) if need_dx else None
    dresidual = empty_like_rows(h, h.dtype) if need_dx and h.dtype != x_dtype else None
    dw = weight.new_empty(weight.shape) if need_dw and weight is not None else None
    db = bias.new_empty(bias.shape) if need_db and bias is not None else None
    return dx, dresidual, dw, db


def norm_bwd(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    is_layer: bool,
    zero_centered: bool,
    x_dtype: torch.dtype,
    *need: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    dx, dresidual, dw, db = norm_bwd_outputs(
        dy, dh, h, weight, bias, mean, rstd, is_layer, zero_centered, x_dtype, *need
    )
    mean = mean if is_layer else None
    M, N = h.shape[:-1].numel(), h.shape[-1]
    (dy, dh, h, _), groups = row_groups(dy, dh, h, dx)  # type: ignore[assignment]
    stage_bytes = dy.element_size() + h.element_size() + (0 if dh is None else dh.element_size())
    weight_bytes = 0 if weight is None else weight.element_size()
    target = Target.of(h.device)
    plan = _plan_bwd(M, N, is_layer, bias is not None, stage_bytes, weight_bytes, target)
    sums = PartialSums([dw, db], plan.programs)
    of_dy, of_dh, of_h, of_dx = groups.strides
    if groups.levels == 1:
        # dense, and the stride of the others need not be aligned as N is
        of_dx = (0, 0, 0)
    places = (*groups.sizes, *of_dy, *of_dh, *of_h, *of_dx)
    modes = {"LEVELS": groups.levels, "IS_LAYER": is_layer, "ZERO_CENTERED": zero_centered}
    if not plan.looped:
        _norm_bwd_kernel[(plan.programs,)](
            dy, dh, h, weight, mean, rstd, dx, dresidual, *sums.launches[0], M, N, *places,
            **modes, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_TAIL=plan.tail,
            SUM_ROWS_LAST=plan.sum_rows_last, PIPELINE=plan.pipeline, RELOAD=plan.reload,
            STARTS_EARLY=starts_early_if_small(target, plan.programs, M * N),
            num_warps=plan.num_warps,
        )  # fmt: skip
    elif dx is not None:
        _norm_bwd_looped_kernel[(M,)](
            dy, dh, h, weight, mean, rstd, dx, dresidual, N, *places,
            **modes, BLOCK_N=plan.block_n, num_warps=plan.num_warps,
        )  # fmt: skip
    if plan.looped and (dw is not None or db is not None):
        _norm_dw_looped_kernel[(cdiv(N, plan.block_n), plan.programs)](
            dy, h, mean, rstd, *sums.launches[0], M, N, *groups.sizes, *of_dy, *of_h,
            LEVELS=groups.levels, IS_LAYER=is_layer, BLOCK_N=plan.block_n, num_warps=plan.num_warps,
        )  # fmt: skip
    sums.add_up()
    return dx, dresidual, dw, db
