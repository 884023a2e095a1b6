"""Head dims in pieces: a width is a power of 2, or the sum of two (96 = 64 + 32), as Triton's tensors are.

Each piece of k, v, q, do, and of the sums dk and dv, has shared memory, a TMA descriptor and accumulators of its own;
device functions over tuples of them. A product along the head dim adds up its pieces; one that yields it has a part for
each.
"""

from powertrain.ops.attention.hopper.dq_order import wait_for_predecessor
from powertrain.ops.attention.hopper.primitives import (
    add_in_order,
    alloc_pipeline_stages,
    as_tile,
    store_in_order,
)
from powertrain.runtime.gluon_compat import gl, gluon, hopper, mbarrier, tma_load


@gluon.jit
def alloc_pieces(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr):
    """Pipeline stages of each piece of the columns."""
    pieces = ()
    for i in gl.static_range(len(PIECES)):
        pieces += (alloc_pipeline_stages(dtype, COUNT, ROWS, PIECES[i]),)  # type: ignore[assignment]
    return pieces


@gluon.jit
def by_piece(first, tail, PIECES: gl.constexpr):
    """The maps of a tensor, which has one of each piece of its columns; of one piece `tail` is None."""
    maps = (first,)
    if len(PIECES) > 1:
        maps += (tail,)  # type: ignore[assignment]
    return maps


@gluon.jit
def load_pieces(desc, place, bar, smem, stage):
    b, head, end, row = place
    for i in gl.static_range(len(smem)):
        column = i * smem[0].shape[2]
        tma_load(desc[i], [b, head, end, row, column], bar, as_tile(smem[i].index(stage)))  # [rows, PIECE]


@gluon.jit
def add_piece_of_dq(
    sum_ptr, offset, ds, k, ds_empty, order_ptr, turn, FIRST: gl.constexpr, LAST: gl.constexpr, PART: gl.constexpr
):  # fmt: skip
    """Add `ds` [64 queries, keys] times a piece of k's columns to the sums of dq at `offset`, PART columns at a time:
    64 need 72 registers, 32 leave the consumers more. FIRST of a block's pieces: with `order_ptr`, wait for this tile's
    turn (dq_order.py). LAST: give ds back when it has been read."""
    COLS: gl.constexpr = min(PART, k.shape[1])
    PARTS: gl.constexpr = k.shape[1] // COLS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    for n in gl.static_range(PARTS):
        if sum_ptr is not None:
            zeros = gl.zeros([64, COLS], gl.float32, layout)
            dq = hopper.warpgroup_mma(ds, k.slice(n * COLS, COLS, 1), zeros, use_acc=False, is_async=True)
            if order_ptr is not None and FIRST and n == 0:
                tile, last, before, owed, owed_turn = turn
                wait_for_predecessor(order_ptr, tile, last, before, owed, owed_turn)
            dq = hopper.warpgroup_mma_wait(0, deps=[dq])
        if LAST and n == PARTS - 1:
            mbarrier.arrive(ds_empty, count=1)
        if sum_ptr is not None:
            add_in_order(sum_ptr + offset + 64 * COLS * n, dq)


@gluon.jit
def own_keys(smem, CONSUMER: gl.constexpr):
    """Rows of k or v of the keys of a consumer."""
    rows = ()
    for i in gl.static_range(len(smem)):
        rows += (smem[i].index(0).slice(CONSUMER * 64, 64, 0),)  # type: ignore[assignment]
    return rows


@gluon.jit
def _zeros_of(smem):
    COLS: gl.constexpr = smem.shape[2]
    return gl.zeros([64, COLS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16]))


@gluon.jit
def no_sums(smem):
    """Of the keys of a consumer: [64, PIECE] for each piece."""
    sums = ()
    for i in gl.static_range(len(smem)):
        sums += (_zeros_of(smem[i]),)  # type: ignore[assignment]
    return sums


@gluon.jit
def _as_operand(x, sums):
    """`x` as the left operand of a product that is added to `sums`: accumulators lie so, and nothing is copied."""
    sums_layout: gl.constexpr = sums.type.layout
    return gl.convert_layout(x, gl.DotOperandLayout(0, sums_layout, 2))  # [64, BLOCK_M]


@gluon.jit
def as_operands(x, sums):
    operands = ()
    for i in gl.static_range(len(sums)):
        operands += (_as_operand(x, sums[i]),)  # type: ignore[assignment]
    return operands


@gluon.jit
def multiply(operands, b_smem, at, sums):
    """sums += operand b, asynchronously: pieces of columns."""
    STAGES: gl.constexpr = b_smem[0].shape[0]
    added = ()
    for i in gl.static_range(len(sums)):
        b = b_smem[i].index(at % STAGES)
        added += (hopper.warpgroup_mma(operands[i], b, sums[i], is_async=True),)  # type: ignore[assignment]
    return added


@gluon.jit
def wait_for_sums(dk, dv, AHEAD: gl.constexpr):
    """dk and dv, when no more than AHEAD later products are pending."""
    waited = hopper.warpgroup_mma_wait(AHEAD, deps=dv + dk)
    values = ()
    for i in gl.static_range(len(dv)):
        values += (waited[i],)  # type: ignore[assignment]
    keys = ()
    for i in gl.static_range(len(dk)):
        keys += (waited[len(dv) + i],)  # type: ignore[assignment]
    return keys, values


@gluon.jit
def _by_key(x, sums):
    """The numbers of a consumer's keys, beside the columns of `sums`, of which `x` is the count: whether key j < x."""
    sums_layout: gl.constexpr = sums.type.layout
    return gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, sums_layout)) < x, 1)


@gluon.jit
def first_keys(sums, count):
    """`sums` with zeros for keys from `count` on: rows behind a sequence, by gradients that are not finite."""
    kept_sums = ()
    for i in gl.static_range(len(sums)):
        kept_sums += (gl.where(_by_key(count, sums[i]), sums[i], 0.0),)  # type: ignore[assignment]
    return kept_sums


@gluon.jit
def scaled(sums, scale):
    scaled_sums = ()
    for i in gl.static_range(len(sums)):
        scaled_sums += (sums[i] * scale,)  # type: ignore[assignment]
    return scaled_sums


@gluon.jit
def half_of(smem, CONSUMER: gl.constexpr):
    """A consumer's half of the columns."""
    COLS: gl.constexpr = smem.shape[1] // 2
    return smem.slice(CONSUMER * COLS, COLS, 1)


@gluon.jit
def _zeros_of_half(smem):
    KEYS: gl.constexpr = smem.shape[1]
    COLS: gl.constexpr = smem.shape[2] // 2
    return gl.zeros([KEYS, COLS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16]))


@gluon.jit
def no_half_sums(smem):
    """Of a consumer's half of each piece of columns."""
    sums = ()
    for i in gl.static_range(len(smem)):
        sums += (_zeros_of_half(smem[i]),)  # type: ignore[assignment]
    return sums


@gluon.jit
def leave_halves(ptr, sums, ADD: gl.constexpr, CONSUMER: gl.constexpr):
    """Add a consumer's half of each piece of columns to the float32 sums of a tile, or store it there."""
    for i in gl.static_range(len(sums)):
        base = ptr + 64 * (2 * i * sums[0].shape[1] + CONSUMER * sums[i].shape[1])
        if ADD:
            add_in_order(base, sums[i])
        else:
            store_in_order(base, sums[i])


@gluon.jit
def store_rows(smem, base, length, capacity, stride, D: gl.constexpr):
    """64 rows in shared memory to memory; zeros from `length` to `capacity`."""
    for i in gl.static_range(len(smem)):
        store_piece(smem[i].index(0), i * smem[0].shape[2], base, length, capacity, stride, D)


@gluon.jit
def store_piece(tile, FIRST: gl.constexpr, base, length, capacity, stride, D: gl.constexpr):
    """Rows of a piece of columns in shared memory to memory, from column FIRST on."""
    W: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [4, 1], [1, 0])
    for part in gl.static_range(tile.shape[0] // 16):
        rows = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
        cols = FIRST + gl.arange(0, W, gl.SliceLayout(0, layout))
        values = tile.slice(part * 16, 16, 0).load(layout)
        values = gl.where(gl.expand_dims(rows < length, 1), values, 0.0)
        ptrs = base + gl.expand_dims(rows.to(gl.int64) * stride, 1) + gl.expand_dims(cols, 0)
        gl.store(ptrs, values, mask=gl.expand_dims(rows < capacity, 1) & gl.expand_dims(cols < D, 0))  # [16, W]
