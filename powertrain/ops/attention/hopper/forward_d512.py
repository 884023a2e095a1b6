"""The Hopper forward for head dims of 264 to 512: 64 queries a tile, the columns of the result in two warpgroups.

    o = softmax(scale q kᵀ, masked) v,  lse = log of the softmax's denominator, natural

Results of 64 queries and 512 columns are 128 KiB of the SM's 256 KiB of registers, so two *consumers* hold 256 columns
each, where those of forward.py hold 64 queries each. Blocks of 64 keys belong to them in turn: the owner computes the
block's scores and weights p, keeps p in registers for its own columns, and puts it into shared memory, with the running
maximum, for the other's. The tensor cores multiply for one while the other is at its exponentials.

Each consumer has a *loader* warp and a ring of chunks, [64 keys, 128 columns]: those of the keys of its own blocks, and
those of the values' columns that are its own, of all blocks. Nothing in a ring is shared, so neither consumer waits for
the other's reads. Chunks are announced by mbarriers and given back at numbered barriers; tiles are taken from a counter
in memory, blocks are visited masked ones first, as in forward.py.

What bounds it, a block of 64 keys (8.4 MFLOP): the tensor cores need 2048 clocks, shared memory 2750 (q and k are both
read from it, 128 bytes a clock for 64 x 64 products), and the L2 sends 128 KiB, one byte for 64 FLOP.
"""

from torch import Tensor

from powertrain.ops.attention.hopper.forward_d512_consumer import consume
from powertrain.ops.attention.hopper.forward_d512_producer import produce
from powertrain.ops.attention.hopper.forward_d512_tiles import Buffers, Sync
from powertrain.ops.attention.hopper.forward_tiles import (
    TILE_FIELDS,
    ConsumerSizes,
    ForwardConfig,
    ProducerSizes,
    Results,
    ResultStrides,
)
from powertrain.ops.attention.hopper.maps import keys_of, queries_of, results_maps, rows_maps
from powertrain.ops.attention.hopper.plans import Plan, group_of
from powertrain.ops.attention.hopper.primitives import (
    Lengths,
    Window,
    alloc_mbarriers,
    alloc_pipeline_stages,
    int32,
)
from powertrain.ops.attention.hopper.tile_counter import counter_of
from powertrain.ops.attention.operands import Operands
from powertrain.ops.attention.triton.launch_arguments import alibi_kind
from powertrain.ops.attention.triton.sequences import SMALL
from powertrain.ops.early_start import starts_early
from powertrain.runtime.gluon_compat import gl, hopper
from powertrain.runtime.launch import gluon_kernel

_ROWS = gl.constexpr(64)  # queries of a tile
_COLS = gl.constexpr(128)  # of a chunk
_O_COLS = gl.constexpr(64)  # of results at a time


@gluon_kernel(archs=(90,), unaligned=SMALL)
def _hopper_attention_fwd_d512_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, lse_ptr, slopes_ptr, sinks_ptr,
    q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, counter_ptr,
    batch, queries, keys, kv_heads, num_q_per_kv, blocks, swizzle, tiles,
    stride_ob, stride_os, stride_oh,
    slopes_step, scale, softcap, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, CAP: gl.constexpr, ALIBI: gl.constexpr,
    D: gl.constexpr, P_QK: gl.constexpr, P_V_LEFT: gl.constexpr, P_V_RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, STARTS_EARLY: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    PACKED: gl.constexpr = q_starts_ptr is not None
    RAGGED: gl.constexpr = q_starts_ptr is not None or k_used_ptr is not None or q_used_ptr is not None
    CONFIG: gl.constexpr = ForwardConfig(
        LEFT, RIGHT, BOTTOM_RIGHT, CAP, ALIBI, "any", PACKED, RAGGED, D[0], D[1], False, 2, 2, False, 1, 0,
        STARTS_EARLY, PACKED, False,
    )  # fmt: skip
    ROWS: gl.constexpr = _ROWS
    COLS: gl.constexpr = _COLS
    q_smem = alloc_pipeline_stages(dtype, len(P_QK), ROWS, COLS)
    ring = alloc_pipeline_stages(dtype, 2 * STAGES, BLOCK_N, COLS)
    p_smem = alloc_pipeline_stages(dtype, 2, ROWS, BLOCK_N)
    O_COLS: gl.constexpr = _O_COLS
    o_smem = alloc_pipeline_stages(dtype, 2, ROWS, O_COLS)
    rows_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    m_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS], rows_layout)
    # of two tiles in turn: one consumer may end the next tile while the other still reads this one's
    l_smem = gl.allocate_shared_memory(gl.float32, [4, ROWS], rows_layout)
    tile_smem = gl.allocate_shared_memory(gl.int32, [2 * TILE_FIELDS, 1], rows_layout)
    q_full = alloc_mbarriers(1, 1)
    q_empty = alloc_mbarriers(1, 2)
    full = alloc_mbarriers(2 * STAGES, 1)
    tile_full = alloc_mbarriers(2, 1)
    # both consumers and the second loader say when they have read a descriptor
    tile_empty = alloc_mbarriers(2, 3)
    hopper.fence_async_shared()
    buffers = Buffers(q_smem, ring, p_smem, o_smem, m_smem, l_smem)
    sync = Sync(tile_smem, q_full, q_empty, full, tile_full, tile_empty)

    batch, queries, keys, kv_heads = int32(batch), int32(queries), int32(keys), int32(kv_heads)
    num_q_per_kv, blocks, swizzle, tiles = int32(num_q_per_kv), int32(blocks), int32(swizzle), int32(tiles)
    left, right = int32(left), int32(right)
    heads = kv_heads * num_q_per_kv
    results = Results(o_ptr, lse_ptr, slopes_ptr, sinks_ptr, None)
    sizes = ConsumerSizes(batch, queries, heads, None, None)
    strides = ResultStrides(stride_ob, stride_os, stride_oh, slopes_step)
    window = Window(left, right)
    descs = (q_desc, k_desc, v_desc)
    lengths = Lengths(q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr)
    all_sizes = ProducerSizes(batch, queries, keys, kv_heads, num_q_per_kv, blocks, swizzle, tiles, None, None)
    # registers of a thread; of the 65536 of an SM, 240 * 256 + 24 * 128 are used
    gl.warp_specialize([
        (consume, (o_desc, results, buffers, sync, sizes, strides, window, scale, softcap, CONFIG, P_QK, P_V_LEFT, 0)),
        (consume, (o_desc, results, buffers, sync, sizes, strides, window, scale, softcap, CONFIG, P_QK, P_V_RIGHT, 1)),
        (produce, (
            descs, counter_ptr, lengths, buffers, sync, all_sizes, window, CONFIG,
            len(P_QK), len(P_V_LEFT), 0,
        )),
        (produce, (
            descs, counter_ptr, lengths, buffers, sync, all_sizes, window, CONFIG,
            len(P_QK), len(P_V_RIGHT), 1,
        )),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip


def launch_forward_d512(operands: Operands, plan: Plan) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    args, heads = operands.args, operands.heads
    q, k, v = operands.q, operands.k, operands.v
    out, lse = operands.outputs()
    o = operands.like_query(out)
    blocks = operands.query_blocks(plan.queries)
    tiles = blocks * heads.kv * heads.q_per_kv * operands.storage
    chunk = (_COLS.value,)
    q_map, _ = rows_maps(queries_of(operands, q, operands.d_qk), _ROWS.value, chunk)
    k_map, _ = rows_maps(keys_of(operands, k, operands.d_qk), plan.block_n, chunk)
    v_map, _ = rows_maps(keys_of(operands, v, operands.d_v), plan.block_n, chunk)
    o_map, _ = results_maps(operands, o, _ROWS.value, (_O_COLS.value,))
    # one CTA an SM, for its shared memory is full; it runs until no tile is left
    _hopper_attention_fwd_d512_kernel[(min(operands.target.num_sms, tiles),)](
        q_map, k_map, v_map, o_map, out, lse, args.slopes, args.sinks,
        args.query_starts, args.key_starts, args.query_used, args.key_used, counter_of(q.tensor),
        operands.batch, operands.queries, operands.keys, heads.kv, heads.q_per_kv, blocks,
        group_of(operands, plan), tiles,
        o.b, o.s, o.r, args.slopes_stride,
        args.scale, args.softcap, args.left, args.right,
        LEFT=args.left >= 0, RIGHT=args.right >= 0, BOTTOM_RIGHT=args.bottom_right, CAP=args.softcap > 0,
        ALIBI=alibi_kind(args), D=(operands.d_qk, operands.d_v), P_QK=plan.p_qk,
        P_V_LEFT=plan.p_v[:2], P_V_RIGHT=plan.p_v[2:], BLOCK_N=plan.block_n, STAGES=plan.stages,
        STARTS_EARLY=starts_early(operands.target), num_warps=4,
    )  # fmt: skip
    return out, lse
