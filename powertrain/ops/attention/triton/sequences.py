"""Packed sequences in kernels: which sequence a block belongs to, where it lies, which block a program computes."""

import triton
import triton.language as tl

# kernels read these number by number. Callers take them out of larger tensors, at any address: seq_lens[prefills:],
# block_table[prefills:], cu_seqlens[1:], the slopes of a shard of the heads
SMALL = frozenset({
    "starts_ptr", "q_starts_ptr", "k_starts_ptr", "used_ptr", "q_used_ptr", "k_used_ptr", "seqlens_ptr", "leftpad_ptr",
    "page_table_ptr", "batch_idx_ptr", "prefix_ptr", "qdoc_ptr", "kdoc_ptr", "slopes_ptr", "sinks_ptr", "seed_ptr",
})  # fmt: skip


@triton.jit
def find_sequence(starts_ptr, batch, slot, BLOCK: tl.constexpr):
    """(sequence, block in it) of a slot. Sequence n owns the slots from cdiv(starts[n], BLOCK) + n on, which are enough
    for its blocks whatever the lengths are. Sequence `batch` is the rows after the last one, batch + 1 the rows before
    the first."""
    low = slot * 0 - 1
    high = slot * 0 + batch
    # bisection: a loop over all sequences would cost a load each in every program
    while low < high:
        middle = (low + high + 1) // 2
        is_before = tl.cdiv(tl.load(starts_ptr + middle), BLOCK) + middle <= slot
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    first = tl.cdiv(tl.load(starts_ptr + low, mask=low >= 0, other=0), BLOCK) + tl.maximum(low, 0)
    return tl.where(low < 0, batch + 1, low), slot - first


@triton.jit
def slots_with_rows(starts_ptr, batch, size, slots):
    """`slots` without the last one, or the last two of a single sequence, which hold nothing if every row of the tensor
    is a sequence's."""
    covered = (tl.load(starts_ptr) <= 0) & (tl.load(starts_ptr + batch) >= size)
    return slots - tl.where(covered, tl.where(batch == 1, 2, 1), 0)


@triton.jit
def longest_first(starts_ptr, batch, slot, BLOCK: tl.constexpr):
    """The place of a slot where the longest sequence's blocks come first, then those of the next longest, in their
    order; of equal ones the first. Slots without rows of a sequence come last."""
    WIDTH: tl.constexpr = 128
    b, block = find_sequence(starts_ptr, batch, slot, BLOCK)
    is_sequence = b < batch
    begin = tl.load(starts_ptr + b, mask=is_sequence, other=0)
    length = tl.load(starts_ptr + b + 1, mask=is_sequence, other=0) - begin
    # blocks of all sequences, of those up to this one, and of those that come ahead of it
    total, lower, ahead = slot * 0, slot * 0, slot * 0
    for at in range(0, batch, WIDTH):
        n = at + tl.arange(0, WIDTH)
        start = tl.load(starts_ptr + n, mask=n < batch, other=0)  # [WIDTH]
        other = tl.load(starts_ptr + n + 1, mask=n < batch, other=0) - start  # [WIDTH]
        blocks = tl.cdiv(other, BLOCK)
        total += tl.sum(blocks, 0)
        lower += tl.sum(tl.where(n <= b, blocks, 0), 0)
        ahead += tl.sum(tl.where((other > length) | ((other == length) & (n < b)), blocks, 0), 0)
    # the rows before the first sequence have the number batch + 1
    lower = tl.where(b > batch, 0, lower)
    is_block = is_sequence & (block < tl.cdiv(length, BLOCK))
    return tl.where(is_block, ahead + block, total + slot - lower)


@triton.jit
def sequence_span(starts_ptr, used_ptr, b, batch, size):
    """(first row, length, capacity) of sequence b: its capacity is the rows between its start and the next one's, its
    length those in use. The tensor has `size` rows."""
    start = b * 0
    capacity = start + size
    length = capacity
    if starts_ptr is not None:
        start = tl.load(starts_ptr + b, mask=b <= batch, other=0)
        capacity = tl.load(starts_ptr + tl.where(b <= batch, b + 1, 0), mask=b != batch, other=size) - start
        # the rows before the first and after the last sequence have capacity, which is filled with zeros, but no length
        length = tl.where(b < batch, capacity, 0)
    if used_ptr is not None:
        length = tl.minimum(size - start, tl.load(used_ptr + b, mask=b < batch, other=0))
    return start, length, capacity


@triton.jit
def next_sequence_with(starts_ptr, used_ptr, row, b, batch, size):
    """The first sequence from b on that contains row `row`, or `batch`."""
    # many starts a step: sequences that overlap are in no order that could be bisected
    WIDTH: tl.constexpr = 128
    sequence = b * 0 + batch
    at = b
    while at < sequence:
        n = at + tl.arange(0, WIDTH)
        start = tl.load(starts_ptr + n, mask=n < batch, other=size)  # [WIDTH]
        end = start + tl.load(used_ptr + n, mask=n < batch, other=0)  # [WIDTH]
        sequence = tl.min(tl.where((start <= row) & (row < end), n, sequence), 0)
        at += WIDTH
    return sequence


@triton.jit
def tile_coords(pid, blocks, heads, swizzle):
    """(block, head) of a program. `swizzle` heads at a time run together, because their keys and values fit in the L2;
    within them the last blocks, which see the most keys under a causal mask, run first."""
    first = pid // (swizzle * blocks) * swizzle
    size = tl.minimum(heads - first, swizzle)
    within = pid - first * blocks
    return blocks - 1 - within // size, first + within % size


@triton.jit
def query_tile(starts_ptr, batch, blocks, heads, swizzle, BLOCK: tl.constexpr):
    """(batch entry or packed sequence, head, block of its queries) of this program."""
    if starts_ptr is not None:
        slot, head = tile_coords(tl.program_id(0), blocks, heads, swizzle)
        b, block = find_sequence(starts_ptr, batch, slot, BLOCK)
    else:
        block, head = tile_coords(tl.program_id(0), blocks, batch * heads, swizzle)
        b = head // heads
        head = head % heads
    return b, head, block


@triton.jit
def key_tile_coords(tile, blocks, late_blocks, heads, swizzle):
    """(block, head) of a tile of keys. `swizzle` heads at a time share the L2; of each the first keys, which most
    queries see under a causal mask, come first. The last `late_blocks` blocks of all heads, whose tiles are short, come
    behind all others: they fill the SMs that the long tiles leave."""
    early = blocks - late_blocks
    first = tile // (swizzle * early) * swizzle
    size = tl.maximum(tl.minimum(heads - first, swizzle), 1)  # of a late tile there are none
    within = tile - first * early
    late = tile - heads * early
    block = tl.where(late < 0, within // size, early + late // heads)
    return block, tl.where(late < 0, first + within % size, late % heads)
