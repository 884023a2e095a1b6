"""Tiles of the universal decoding kernel, and how many splits the keys have where lengths do not decide."""

import functools
from typing import NamedTuple

from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable


class Plan(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int  # programs that run on one SM at a time
    registers: int = 0  # of a thread at most, for 4 warps, where ptxas would take more than let `per_sm` programs run

    @property
    def tile(self) -> tuple[int, int, int]:
        """Rows, keys of a block, programs on an SM: what lists of tiles and splits depend on."""
        return self.block_m, self.block_n, self.per_sm


@tunable("NVIDIA H200, 2026-11-24")
def plan_for(
    rows: int,
    width_qk: int,
    width_v: int,
    shares: bool,
    itemsize: int,
    page_size: int,
    is_short: bool,
    aligned: bool,
    fma: bool,
    target: Target,
) -> Plan:
    """`rows` of queries a KV head has; widths: of the head dims in pieces; `is_short`: splits of the fewest keys do not
    fill the GPU, however full the cache is; `aligned`: 16-byte loads."""
    # batch 64, 32/8 heads, 8192 keys, bf16, D128 unless said, ms; copying as many bytes takes 0.505 (D64 half, ...):
    #   dense            128 keys 4 warps 3 stages 0.471; 64 keys 0.474 to 0.549; 8 warps the same
    #                    64 keys 4 stages 0.494 (128: 0.491), 16 sequences 0.142 (0.149), 1 long among 31 0.070 (0.079)
    #     4 of 3000      128 keys 3 stages 0.0194; 64 keys 3 stages 0.023: few blocks a split, so many keys at once
    #     D64, D256      256 keys 3 stages 0.244 (128 keys 0.278);  64 keys 3 stages 0.929 of 1.010
    #   pages of 64      64 keys 2 stages 0.498, 3 stages 0.509, 4 stages 0.495; 31 of 500, one of 32768 0.068, 0.067,
    #                    0.070; 32 of 500 to 32k, 28/4 heads 0.181, 0.177, 0.197;   D64 3 stages 0.329, 6 stages 0.340
    #   of 1, 16         32 of 500 to 32k: 64 keys 3 stages 0.350, 0.344; 2 stages 0.364, 0.369; 32 keys 0.355, 0.348;
    #                    D64 64 keys 3 stages 0.334, 4 stages 0.338, 128 keys 0.347
    #   8 or 16 queries  64 keys 4 warps 3 stages 0.473, 0.480; 128 keys 0.500, 0.508; 8 warps 0.53 to 0.66
    #     32 of 500 to 32k, 32 rows, pages of 64   64 keys 4 stages 0.371, 3 stages 0.377; as 64 rows 0.378
    #                       64 rows, pages of 16   32 keys 3 stages, 3 an SM 0.423; 64 keys 0.447; dense 0.381, 0.383
    #   MLA, 128 heads   64 x 64 8 warps 2 stages 0.565, 64 x 32 3 stages 0.658, 32 x 32 0.80 (2 * 73 GFLOP)
    #     16 heads         32 keys 3 stages 0.185, 64 keys 0.187, 8 warps 0.184; 32 of 500 to 32k, pages of 64 and 1:
    #                      0.131, 0.140; 64 keys 0.176, 0.175, 8 warps 0.139, 0.155
    #   float32, 4096 keys   4 rows 64 keys 3 stages 0.93 of 0.505; 16 rows 32 keys 1.65
    key_bytes = (width_qk + (0 if shares else width_v)) * itemsize
    rows = next_power_of_2(rows)
    if fma:
        # float32 products on the CUDA cores: every row counts
        narrow = key_bytes <= 256 * itemsize
        block_m = min(16 if narrow else 4, rows)
        block_n = 16 if not narrow else 64 if block_m <= 4 and target.shared_per_block > 128 << 10 else 32
        stages = max(1, min(3, 1 + (target.shared_per_block - (16 << 10)) // (block_n * key_bytes)))
        return Plan(block_m, block_n, 4, stages if target.has_async_copy else 1, 2)

    is_wide = width_v > 256
    # 64 rows take wgmma on Hopper, which errs there where values come in by single elements (Triton 3.6, dv of 7 or 16)
    most = 64 if aligned and not (is_wide and not (shares and target.has_wgmma)) else 32
    block_m = max(16, min(most, rows))
    # blocks of keys lie in a page each
    in_pages = page_size > 0 and page_size % 64 == 0
    by_wgmma = block_m == 64 and target.has_wgmma
    # two or three programs on an SM: one begins while the others read
    roomy = target.shared_per_sm > 128 << 10
    if page_size == 0 or is_wide:
        block_n = max(16, min(256 if key_bytes >= 256 else 128, 1 << ((72 << 10) // key_bytes).bit_length() - 1))
        block_n = block_n if block_m == 16 or is_wide else min(block_n, 64)
        stages = 3 if block_m == 16 or not is_wide else 2
        if is_wide and block_m == 16:
            block_n = min(block_n, 32)
        elif key_bytes == 512 and itemsize == 2 and (block_m == 32 or (block_m == 16 and not is_short)):
            block_n, stages = 64, 4
    elif block_m == 16:
        # 64 keys of head dim 256 spill 120 bytes
        fits = key_bytes < 1024 if in_pages else key_bytes < 512 or (key_bytes == 512 and roomy)
        block_n = 64 if fits else 32
        stages = 2 if in_pages and block_n == 64 and key_bytes >= 512 else 3
    else:
        block_n = 32 if by_wgmma and not in_pages and key_bytes >= 512 else 64
        stages = 4 if block_m == 32 and key_bytes <= 512 and roomy else 3

    def shared() -> int:
        # wgmma reads a tile while the next one arrives; other products pass weights from warp to warp
        tiles = max(1, stages - 1 + by_wgmma)
        return block_m * width_qk * itemsize + tiles * block_n * key_bytes + (1024 if by_wgmma else 4096)

    while shared() > target.shared_per_block and stages > 2:
        stages -= 1
    while shared() > target.shared_per_block and block_n > 16:
        block_n //= 2
    num_warps = 8 if block_m * width_v * itemsize >= 1 << 15 else 4
    per_sm = max(1, min(3 if page_size else 2, target.shared_per_sm // shared()))
    # an SM has 65536: pages of 64, one query, 128: 0.482 ms, 184: 0.545; 8 queries, 32 rows, 168: 0.390, 128: 0.406
    registers = 0
    if per_sm >= 3:
        # head dims of several pieces would spill 56 to 270 bytes at 128
        registers = 128 if block_m == 16 and key_bytes in (256, 512) and (in_pages or key_bytes == 256) else 168
    return Plan(block_m, block_n, num_warps, stages, per_sm, registers)


@functools.lru_cache(maxsize=1024)
def choose_splits(programs: int, keys: int, per_sm: int, target: Target) -> int:
    """The fewest splits, of 256 keys or more, that fill the last wave of programs nearly as well as any would."""
    slots = target.num_sms * per_sm
    if programs == 0 or (per_sm > 1 and programs >= slots):
        # programs that share an SM hide the last wave
        return 1
    choices = range(1, max(1, min(cdiv(keys, 256), cdiv(2 * slots, programs), 128)) + 1)
    filled = [programs * splits / (cdiv(programs * splits, slots) * slots) for splits in choices]
    return next(splits for splits, share in zip(choices, filled, strict=True) if share >= 0.95 * max(filled))
