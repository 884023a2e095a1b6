"""Tiles of the universal kernels, per arch, dtype, head dims and what is done to scores, with what was measured.

On sm_90 the values are the best of about 120 variants, causal 2 x 8192 tokens, bf16, on one H200 (docs/LOG.md). For
other archs they follow from shared memory and registers and were compiled, never timed.
"""

from typing import NamedTuple

import torch

from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable


class Plan(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    tma: bool = True  # descriptors, where the GPU and the strides allow them


def _fits(candidates: tuple[Plan, ...], resident: int, streamed: int, target: Target) -> Plan:
    """The first plan whose tiles fit in shared memory: bytes per row of those kept (block_m rows) and streamed."""
    for plan in candidates:
        if plan.block_m * resident + plan.num_stages * plan.block_n * streamed <= target.shared_per_block - 2048:
            return plan
    return candidates[-1]


_FORWARD = (
    Plan(128, 64, 8, 2),
    Plan(64, 64, 4, 2),
    Plan(64, 32, 4, 2),
    Plan(64, 32, 8, 2),
    Plan(64, 32, 8, 1),
    Plan(32, 32, 8, 2),
    Plan(32, 32, 8, 1),
    Plan(32, 32, 4, 1),
    Plan(16, 32, 4, 1),
    Plan(16, 16, 4, 1),
)


_NARROW = Plan(32, 32, 4, 1)


def _is_narrow(d_qk: int, d_v: int, regular: bool) -> bool:
    """One piece of 16 columns without 16-byte strides: with 64 rows, and so wgmma, Triton 3.6 gave wrong results and
    read outside (value head dim 7, odd strides, on an H200)."""
    return not regular and min(d_qk, d_v) <= 16


def _fma_plan(d: int) -> Plan:
    return Plan(32, 32, 8, 1) if d <= 128 else Plan(32, 16, 8, 1)


@tunable("NVIDIA H200, 2026-11-21", ("num_warps",))
def plan_fwd(element: int, d_qk: int, d_v: int, feature: str, regular: bool, fma: bool, target: Target) -> Plan:
    if fma:
        return _fma_plan(max(d_qk, d_v))
    if target.has_wgmma and element == 2:
        if _is_narrow(d_qk, d_v, regular):
            return _NARROW
        largest = max(d_qk, d_v)
        if largest <= 64:
            return Plan(128, 64, 8, 3, 128) if feature == "bias" else Plan(64, 128, 4, 2)
        if largest <= 128:
            # causal, 2 x 8192 x 16 heads, ms: plain 1.11, 1.13 with 8 warps; softcap 1.19 (1.23); bias 1.40 (1.32)
            if feature == "softcap":
                return Plan(64, 64, 4, 3)
            return Plan(128, 64, 8, 2, 128) if feature in ("bias", "window") else Plan(128, 64, 4, 2)
        if largest <= 192:
            return Plan(128, 64, 8, 3)
        if largest <= 256:
            return Plan(128, 64, 8, 2)
    candidates = tuple(p for p in _FORWARD if p.block_m * d_v <= p.num_warps * 16 * 256)
    return _fits(candidates, d_qk * element, (d_qk + d_v) * element, target)


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
    if target.has_wgmma and element == 2:
        if _is_narrow(d_qk, d_v, regular):
            return _NARROW
        if largest <= 64:
            return Plan(64, 64, 4, 3) if feature in ("bias", "alibi") else Plan(128, 64, 4, 2)
        if largest <= 128:
            return Plan(32, 64, 4, 3) if feature == "bias" else Plan(64, 64, 4, 2)
        if largest <= 192:
            return Plan(32, 64, 4, 2)
        if largest <= 256:
            return Plan(64, 128, 8, 2) if part == "dv" else Plan(64, 64, 4, 2)
    for plan in _BACKWARD:
        tiles = (plan.block_n + plan.num_stages * plan.block_m) * (d_qk + d_v) * element
        tiles += 4 * plan.block_m * plan.block_n
        if plan.block_n * largest <= 64 * 128 and tiles <= target.shared_per_block - 2048:
            return plan
    return _BACKWARD[-1]


_BACKWARD = (
    Plan(64, 64, 8, 2),
    Plan(32, 64, 4, 2),
    Plan(32, 64, 4, 1),
    Plan(32, 32, 4, 1),
    Plan(16, 32, 4, 1),
    Plan(16, 16, 4, 1),
)


@tunable("NVIDIA H200, 2026-11-21", ("num_warps",))
def plan_dq(element: int, d_qk: int, d_v: int, feature: str, regular: bool, fma: bool, target: Target) -> Plan:
    largest = max(d_qk, d_v)
    if fma:
        return Plan(32, 32, 8, 1) if largest <= 64 else Plan(16, 16, 8, 1)
    if target.has_wgmma and element == 2:
        if _is_narrow(d_qk, d_v, regular):
            return _NARROW
        if largest <= 64:
            return Plan(64, 64, 4, 3, tma=False)
        if largest <= 128:
            return Plan(64, 64, 4, 2) if feature == "window" else Plan(128, 64, 8, 3, tma=False)
        if largest <= 192:
            return Plan(128, 32, 8, 3, tma=False)
        if largest <= 256:
            return Plan(64, 64, 4, 2)
    candidates = tuple(p for p in _FORWARD if p.block_m * d_qk <= p.num_warps * 8 * 256)
    return _fits(candidates, (d_qk + d_v) * element, (d_qk + d_v) * element, target)


@tunable("never measured", ("num_warps",))
def plan_dbias(element: int, d_qk: int, d_v: int, regular: bool, fma: bool, target: Target) -> Plan:
    if fma:
        return Plan(32, 32, 8, 1)
    if max(d_qk, d_v) * element <= 256 and not _is_narrow(d_qk, d_v, regular):
        return Plan(64, 64, 4, 1)
    return Plan(32, 32, 4, 1)


FMA_PIECE = 32  # without tensor cores a dot holds all of its inner dim in registers


def uses_fma(dtype: torch.dtype, target: Target) -> bool:
    """Products without tensor cores: float32 at full precision, and everything where Triton cannot reach them."""
    return not target.has_tensor_core_dot or (dtype is torch.float32 and dot_precision(dtype, target) == "ieee")


def dot_precision(dtype: torch.dtype, target: Target) -> str:
    if dtype is not torch.float32 or not target.has_tensor_core_dot:
        return "ieee"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
