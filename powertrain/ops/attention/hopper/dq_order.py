"""Deterministic sums of dq: tiles of keys add to a block of queries in a fixed order, that of their keys.

A head's tiles are fetched from its first keys to its last, and each runs over its blocks of queries from the last to
the first; for each block of rows, over all query heads of a KV head. Before a tile adds to a block, it waits until the
tile of the keys before has added to it, if that one sees the block. So a tile stays one block behind the one before it,
and the short ones, under a causal mask, come last. There is no deadlock: a tile waits only for one that was fetched
before it, which is therefore running, and the first of the running tiles never waits.

Each block of queries has four flags, int32, one for each warp of the warpgroup that adds, as a warp adds to rows of its
own: the *turn* of the tile that added last, 0 at first. A tile's turn is the key behind its last one.
"""

from powertrain.runtime.gluon_compat import gl, gluon


@gluon.jit
def _place(order_ptr, tile):
    """Address of the flag of each thread's warp for a tile of sums."""
    threads = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    return (order_ptr + tile.to(gl.int64) * 4 + threads // 32).to(gl.int64)


@gluon.jit
def last_turn(order_ptr, tile):
    """The turn that added last to tile `tile` of the sums. Loaded early; `wait_for_predecessor` polls the flag if it is
    not yet the predecessor's turn."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];",
        "=r,l",
        [_place(order_ptr, tile)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_for_predecessor(order_ptr, tile, last, before, owed, turn):
    """Set the flag of the tile of sums `owed` to `turn`, then wait until the flag of `tile` is `before`."""
    # one fence for both: release our adds before the flag, acquire the flag before new adds
    signal_successor(order_ptr, owed, turn)
    gl.inline_asm_elementwise(
        """{
        .reg .pred waits;
        .reg .b32 seen;
        mov.b32 seen, $2;
        again:
        setp.ne.s32 waits, seen, $3;
        @!waits bra goes;
        ld.acquire.gpu.global.b32 seen, [$1];
        bra again;
        goes:
        bar.warp.sync 0xffffffff;
        mov.b32 $0, seen;
        }""",
        "=r,l,r,r",
        [_place(order_ptr, tile), last, before],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def signal_successor(order_ptr, owed, turn):
    """Set the flag of the tile of sums `owed` to `turn`, behind our additions to it; nothing if `owed` is negative."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred tells;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.s32 tells, lane, 0;
        setp.ge.and.s32 tells, $2, 0, tells;
        bar.warp.sync 0xffffffff;
        fence.acq_rel.gpu;
        @tells st.relaxed.gpu.global.b32 [$1], $3;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r",
        [_place(order_ptr, owed), owed, turn],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
