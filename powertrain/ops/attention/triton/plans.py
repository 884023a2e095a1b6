"""Tiles of the universal kernels, per arch, dtype, head dims and features, with measurements.

On sm_90 the values are the best of about 120 variants, causal 2 x 8192 tokens, bf16, on one H200 (docs/LOG.md). For
other archs they follow from shared memory and registers and were compiled, never timed.
"""

from typing import Any, NamedTuple

import torch

from powertrain.runtime.float32_products import allows_tf32
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable


class Plan(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    tma: bool = True  # descriptors, where the GPU and the strides allow them
    late: bool = True  # dkdv reads the rows' LSE after its first products, not before

    def launch_options(self) -> dict[str, Any]:
        """The arguments of every kernel that follow from a plan."""
        return dict(
            BLOCK_M=self.block_m, BLOCK_N=self.block_n, num_warps=self.num_warps, num_stages=self.num_stages,
            maxnreg=self.maxnreg,
        )  # fmt: skip


class _Tile(NamedTuple):
    """A row of a table of tiles: the largest head dim it is for, the shared memory that a block must have for it there,
    at 2 bytes an element (as compiled, or more), and the plan."""

    largest: int
    kib: int
    plan: Plan


def _first(tiles: tuple[_Tile, ...], element: int, d_qk: int, d_v: int, target: Target) -> Plan:
    """The first plan for these head dims whose shared memory the GPU has."""
    for largest, kib, plan in tiles:
        # TF32 tiles compiled to up to 2.8 times as much
        share = 1 if element == 2 else 3
        needed = kib * 1024 * share * (d_qk + d_v) // (2 * largest)
        if max(d_qk, d_v) <= largest and needed <= target.shared_per_block - 1024:
            return plan
    return tiles[-1].plan


# Without wgmma or tcgen05. Never measured: the largest tiles of FlashAttention-2's kind that spill nothing with any one
# feature. Triton 3.6 makes no good of descriptors there: sm_120 spilled 500 to 3600 bytes with them.
_FORWARD = (
    _Tile(64, 80, Plan(128, 64, 8, 2, tma=False)),
    # 128 x 32 is the faster for flash-2 where shared memory is small (its flash_fwd_launch_template.h)
    _Tile(128, 120, Plan(128, 64, 8, 2, tma=False)),
    _Tile(128, 80, Plan(128, 32, 8, 2, tma=False)),
    _Tile(256, 112, Plan(64, 64, 8, 2, tma=False)),
    _Tile(256, 76, Plan(64, 32, 8, 2, tma=False)),
    _Tile(512, 102, Plan(32, 32, 8, 2, tma=False)),
    _Tile(512, 70, Plan(32, 32, 8, 1, tma=False)),
    _Tile(512, 40, Plan(16, 16, 4, 1, tma=False)),
)
_DKDV = (
    _Tile(64, 52, Plan(32, 128, 8, 2, tma=False)),
    _Tile(128, 80, Plan(64, 64, 8, 2, tma=False)),
    _Tile(256, 68, Plan(32, 32, 8, 2, tma=False)),
    _Tile(512, 96, Plan(16, 32, 8, 1, tma=False)),
    _Tile(512, 64, Plan(16, 16, 4, 1, tma=False)),
)
_DQ = (
    _Tile(128, 80, Plan(64, 64, 8, 2, tma=False)),
    _Tile(192, 80, Plan(64, 16, 8, 2, tma=False)),
    _Tile(256, 104, Plan(64, 32, 8, 2, tma=False)),
    _Tile(256, 97, Plan(64, 32, 8, 1, tma=False)),
    _Tile(512, 134, Plan(32, 32, 8, 2, tma=False)),
    _Tile(512, 97, Plan(16, 32, 8, 1, tma=False)),
    _Tile(512, 64, Plan(16, 16, 4, 1, tma=False)),
)
# With them, where the sums may be left to the tensor cores: never measured but for sm_90, whose plans go before
_WIDE_FORWARD = (_Tile(256, 208, Plan(128, 64, 8, 2)), _Tile(512, 208, Plan(64, 32, 8, 2)), *_FORWARD)
_WIDE_DKDV = (_Tile(128, 140, Plan(64, 64, 8, 2)), *_DKDV)
_WIDE_DQ = (_Tile(128, 160, Plan(128, 64, 8, 2)), _Tile(256, 160, Plan(64, 32, 8, 2)), *_DQ)


def is_wide(target: Target) -> bool:
    return target.has_wgmma or target.has_tcgen05


_NARROW = Plan(32, 32, 4, 1)


def _is_narrow(d_qk: int, d_v: int, regular: bool) -> bool:
    """One piece of 16 columns without 16-byte strides: with 64 rows, and so wgmma, Triton 3.6 gave wrong results and
    read outside (value head dim 7, odd strides, on an H200)."""
    return not regular and min(d_qk, d_v) <= 16


def _fma_plan(d: int) -> Plan:
    return Plan(32, 32, 8, 1) if d <= 128 else Plan(32, 16, 8, 1)


@tunable("NVIDIA H200, 2026-11-21", ("num_warps",))
def plan_fwd(
    element: int, d_qk: int, d_v: int, feature: str, regular: bool, fma: bool, tiles: int, target: Target
) -> Plan:
    """tiles: of 128 queries, of all heads."""
    if fma:
        return _fma_plan(max(d_qk, d_v))
    if target.has_wgmma and _is_narrow(d_qk, d_v, regular):
        return _NARROW
    if target.has_wgmma and element == 2:
        largest = max(d_qk, d_v)
        if largest <= 64:
            if feature in ("mask", "documents", "padding"):
                return _masked_fwd(feature, tiles, target)
            if feature == "bias" and tiles <= 2 * target.num_sms:
                # ms, this, 128 x 64: 1 x 512 x 8 heads .0165, .0194; 8 x 197 x 12 .021, .022; 16 x 512 x 12 .076, .069
                return Plan(64, 64, 4, 3)
            return Plan(128, 64, 8, 3, 128) if feature in ("bias", "dropout") else Plan(64, 128, 4, 2)
        if largest <= 128:
            # causal, 2 x 8192 x 16 heads, ms: plain 1.11, 1.13 with 8 warps; softcap 1.19 (1.23); bias 1.40 (1.32)
            if feature == "softcap":
                return Plan(64, 64, 4, 3)
            if feature in ("mask", "documents", "padding"):
                return _masked_fwd(feature, tiles, target)
            if feature == "bias" and tiles <= target.num_sms:
                # ms, 1 x 580 x 16 heads 0.039, 128 x 64 0.048; not few, 1 x 1200 x 16 0.076, 0.061
                return Plan(64, 64, 4, 2)
            if feature == "prefix" and tiles <= 2 * target.num_sms:
                # ms, this, 128 x 64: D128, 2 x 494 x 8 heads 0.016, 0.025; 1 x 2048 x 16 0.065, 0.076; not few, 4 x
                # 2048 x 16 0.270, 0.263; D96, 2 x 494 x 8 0.020, 0.027; not few, 4 x 700 x 32/8 0.104, 0.087
                return Plan(64, 64, 4, 3)
            by_warpgroups = feature in ("bias", "dropout", "window")
            return Plan(128, 64, 8, 2, 128) if by_warpgroups else Plan(128, 64, 4, 2)
        if largest <= 192:
            return Plan(128, 64, 8, 3)
        if largest <= 256:
            return Plan(128, 64, 8, 2)
    return _first(_WIDE_FORWARD if is_wide(target) else _FORWARD, element, d_qk, d_v, target)


def _masked_fwd(feature: str, tiles: int, target: Target) -> Plan:
    """Of head dims to 128 on sm_90."""
    # ms, tiles of 64 x 64 with 3 stages, with 2, 64 x 32 with 2 (128 x 64 on 8 warps):
    #   documents of about 700 tokens D64, 2 x 502 x 64/8 heads .053 .043 .037; 2 x 4096 x 16 .133 .113 .108; D80 .174
    #   .143 .143; D96, 1 x 277 x 32/8 .022 .021 .023; D128, 1 x 1300 x 16 .037 .041 .056; 2 x 8192 x 32/8 .55 .54 .49
    #   padding D64, 16 x 128 x 12 .0165 .0161 .0181; 8 x 2048 x 12 .201 .218 .225; D128, 4 x 488 x 8 .0233 .0263 .0312;
    #   5 x 2890 x 16 .492 .556 .588 (.531)
    #   dense masks D64, 8 x 478 x 8 .045 .036 .042; 4 x 2134 x 16 .364 .368 .415; D128, 2 x 300 x 16 .029 .022 .026
    #   (.031); 1 x 700 x 16 .039 .031 .048; 4 x 1412 x 8 .188 .151 .165; 4 x 2048 x 16 .576 .466 .438 (.495)
    if feature == "mask":
        return Plan(64, 64, 4, 2)
    is_short = feature == "padding" or tiles <= 2 * target.num_sms
    return Plan(64, 64, 4, 3) if is_short else Plan(64, 32, 4, 2)


def dkdv_parts(d_qk: int, d_v: int, need_dk: bool, need_dv: bool, target: Target) -> tuple[str, ...]:
    """Launches of the dkdv kernel. Wide heads want one each for dk and dv, whose sums fill the registers: D256 on an
    H200 3.1 ms against 3.4."""
    if need_dk and need_dv:
        return ("dk", "dv") if max(d_qk, d_v) > (192 if target.has_wgmma else 256) else ("both",)
    return ("dk",) if need_dk else ("dv",)


@tunable("NVIDIA H200, 2026-11-21", ("num_warps",))
def plan_dkdv(
    element: int, d_qk: int, d_v: int, feature: str, regular: bool, fma: bool, part: str, target: Target
) -> Plan:
    largest = max(d_qk, d_v)
    if fma:
        return Plan(32, 32, 8, 1) if largest <= 64 else Plan(16, 16, 8, 1)
    if target.has_wgmma and _is_narrow(d_qk, d_v, regular):
        return _NARROW
    if target.has_wgmma and element == 2:
        if largest <= 64:
            # ms of a backward, 32 queries and 3 stages, with 2, 64 and 2: documents 2 x 4096 x 16 heads .300 .293 .316;
            # padding 16 x 128 x 12 .0384 .0378 .0354, 8 x 2048 x 12 .602 .612 .579; dense masks 2 x 660 x 64/8 .289
            # .301 .263, 4 x 2134 x 16 .919 .943 .959; biases 8 x 197 x 12 .048 .047 .057
            if feature == "documents":
                return Plan(32, 64, 4, 2)
            if feature in ("mask", "padding"):
                return Plan(64, 64, 4, 2)
            if feature == "bias":
                return Plan(32, 64, 4, 3)
            return Plan(64, 64, 4, 3) if feature in ("dropout", "alibi") else Plan(128, 64, 4, 2, late=False)
        if largest <= 128:
            if feature == "documents":
                # ms of a backward, this, 64 x 64: D80, 2 x 4096 x 16 heads 0.366, 0.399; D128, 2 x 8192 x 32/8 1.498,
                # 1.562; 1 x 1300 x 16 0.115, 0.117
                return Plan(32, 64, 4, 2)
            return Plan(32, 64, 4, 3) if feature == "dropout" else Plan(64, 64, 4, 2)
        if largest <= 192:
            # 2.48 ms; 2 stages 2.69, late 2.80
            return Plan(32, 64, 4, 3, late=False)
        if largest <= 256:
            return Plan(64, 128, 8, 2) if part == "dv" else Plan(64, 64, 4, 2)
        if regular:
            # sums of 64 keys, in the registers of two warpgroups. Backward of 2 x 4096 x 16/4 heads, causal, ms: 33.98
            # with tiles of 16 x 32 (dk, dv) and 32 x 32 (dq), 12.81 with these; D384 28.85, 9.25; D320 27.16, 7.31
            stages = 2 if largest <= (320 if part == "dv" else 384) else 1
            return Plan(64 if part == "dv" else 32, 64, 8, stages)
    return _first(_WIDE_DKDV if is_wide(target) else _DKDV, element, d_qk, d_v, target)


@tunable("NVIDIA H200, 2026-11-21", ("num_warps",))
def plan_dq(element: int, d_qk: int, d_v: int, feature: str, regular: bool, fma: bool, target: Target) -> Plan:
    largest = max(d_qk, d_v)
    if fma:
        return Plan(32, 32, 8, 1) if largest <= 64 else Plan(16, 16, 8, 1)
    if target.has_wgmma and _is_narrow(d_qk, d_v, regular):
        return _NARROW
    if target.has_wgmma and element == 2:
        if largest <= 64:
            if feature in ("documents", "padding"):
                # ms of a backward, this, 64 x 64 with 3 stages, by TMA with 2: padding 8 x 512 x 16 heads .100 .103
                # .108; documents 2 x 4096 x 16 .276 .286 .309, 2 x 502 x 64/8 .219 .221 .235
                return Plan(64, 32, 4, 3, tma=False)
            return Plan(64, 64, 4, 2) if feature == "mask" else Plan(64, 64, 4, 3, tma=False)
        if largest <= 128:
            # documents, ms: D96, 2 x 4096 x 16 heads, 0.46, by 2 stages 0.51; D128, 2 x 8192 x 32/8, 2.06, 1.61.
            # prefix, a backward, this, 128 x 64: D96, 4 x 2048 x 16 0.729, 0.768; D128, 0.879, 0.784
            if feature in ("documents", "padding", "prefix") and largest <= 96:
                return Plan(64, 64, 4, 3, tma=False)
            by_half = feature in ("window", "documents", "padding", "mask")
            return Plan(64, 64, 4, 2) if by_half else Plan(128, 64, 8, 3, tma=False)
        if largest <= 192:
            return Plan(128, 32, 8, 3, tma=False)
        if largest <= 256:
            return Plan(64, 64, 4, 2)
        if regular:
            return Plan(64, 32, 8, 2 if largest <= 384 else 1)
    return _first(_WIDE_DQ if is_wide(target) else _DQ, element, d_qk, d_v, target)


@tunable("NVIDIA H200, 2026-11-28, and never elsewhere", ("num_warps",))
def plan_dbias(element: int, d_qk: int, d_v: int, regular: bool, fma: bool, target: Target) -> Plan:
    if fma:
        return Plan(32, 32, 8, 1)
    if target.has_wgmma and element == 2 and max(d_qk, d_v) <= 128 and not _is_narrow(d_qk, d_v, regular):
        # one bias for 4 sequences, whole backward, ms, by 64 x 64 on 8 warps, on 4, this: D128, 550 x 32 heads, 0.70,
        # 0.52, 0.53; D96, 1000 x 16, 1.03, 0.68, 0.64; D64, 8 x 1000 x 12, 0.75, 0.75, 0.65
        return Plan(128, 128, 8, 1)
    if target.has_wgmma and element == 2 and max(d_qk, d_v) <= 256 and regular:
        # D192, 4 x 467 x 16 heads, whole backward: 0.38 ms, by 32 x 32 on 8 warps 0.89, by 64 x 64 on 8 0.49
        return Plan(64, 64, 4, 1)
    if max(d_qk, d_v) * element <= 256 and not _is_narrow(d_qk, d_v, regular):
        return Plan(64, 64, 8, 1)
    # as compiled for TF32, 192 KiB at head dim 512
    if element == 4 and 192 * (d_qk + d_v) > target.shared_per_block - 1024:
        return Plan(16, 16, 4, 1)
    return Plan(32, 32, 8, 1)


FMA_PIECE = 32  # without tensor cores a dot holds all of its inner dim in registers


def uses_fma(dtype: torch.dtype, d_qk: int, d_v: int, target: Target) -> bool:
    """Products without tensor cores: float32 at full precision, everything where Triton cannot reach them, and TF32 of
    heads so wide that the smallest tiles, 128 KiB at 512, do not fit in shared memory."""
    if dtype is torch.float32 and target.has_tensor_core_dot:
        too_wide = 128 * (d_qk + d_v) > target.shared_per_block - 1024
        return too_wide or dot_precision(dtype, target) == "ieee"
    return not target.has_tensor_core_dot


def dot_precision(dtype: torch.dtype, target: Target) -> str:
    return "tf32" if dtype is torch.float32 and target.has_tensor_core_dot and allows_tf32() else "ieee"
