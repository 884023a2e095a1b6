"""Attention of a rank's queries to another rank's keys, cut into as few calls as a mask allows; forward and backward.

A dense rank holds two runs of consecutive tokens, and so does the other. A mask by position is a band, so each of the
four pairs of runs is empty, full, or a band whose edges are moved by the distance of the runs. Full ones that lie side
by side become one call. Under a causal mask a rank thus makes one call per other rank, without any mask: all its
queries to the first half of an earlier rank's keys, or the second half of its queries to all keys of a later one.

ALiBi between runs that do not overlap is a bias per key and one per query,

    -slope |p - j| = -slope |p - c| - slope |c - j|        c between them

and the latter moves the LSE only. Packed documents of one rank make one call with packed sequences.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention import attention, attention_backward, varlen_attention
from powertrain.ops.attention.merge import merge_pair
from powertrain.ops.attention.problem import Layout
from powertrain.ops.shapes import acc_dtype
from powertrain.parallel.context.sharding import Sharding, TokenSpan


class Mask(NamedTuple):
    """Mask options of a block's attention."""

    left: int  # -1: all
    right: int  # -1: all, 0: causal
    softcap: float
    scale: float
    slopes: Tensor | None  # [H] or [B, H] float32

    @property
    def is_positional(self) -> bool:
        # slopes need positions even where no bound does
        """Whether the mask depends on positions in another way than full or causal."""
        return self.left >= 0 or self.right > 0 or self.slopes is not None


class Block(NamedTuple):
    """Some rows of a rank's queries and some rows of another's keys, with a band aligned top left."""

    q: tuple[int, int]
    k: tuple[int, int]
    left: int = -1
    right: int = -1
    q_start: int = 0  # the first query's position, and the first key's
    k_start: int = 0


def dense_blocks(sharding: Sharding, source: int, mask: Mask, rank: int | None = None) -> list[Block]:
    """The calls of a rank's queries (None: this one's) with the keys of `source`; empty if the mask hides all."""
    rank = sharding.rank if rank is None else rank
    queries, keys = sharding.pieces(rank)[0], sharding.pieces(source)[0]
    # a rank's two pieces are in ascending order, so causal attention of a rank to itself is one causal call
    # its own two pieces are consecutive in causal order: one call instead of three
    if source == rank and mask.right == 0 and not mask.is_positional:
        everything = (0, sharding.length(rank))
        return [Block(everything, everything, -1, 0)] if everything[1] else []
    blocks: list[Block] = []
    for piece in queries:
        row = [block for other in keys if (block := _band(piece, other, mask)) is not None]
        # joined blocks have one bias; ALiBi differs by run
        blocks += row if mask.slopes is not None else _joined(row)
    return blocks if mask.slopes is not None else _stacked(blocks)


def _band(queries: TokenSpan, keys: TokenSpan, mask: Mask) -> Block | None:
    """One piece to another, cut to the rows and columns that intersect the band."""
    # rows and columns that the band does not touch are cut off before the call
    first, last, start, stop = queries.start, queries.stop, keys.start, keys.stop
    if not (queries.length and keys.length):
        return None
    if mask.right >= 0:
        first = max(first, start - mask.right)
    if mask.left >= 0:
        last = min(last, stop + mask.left)
    if first >= last:
        return None
    if mask.left >= 0:
        start = max(start, first - mask.left)
    if mask.right >= 0:
        stop = min(stop, last + mask.right)
    # blocks know positions from their own first row and column only: the band moves by the difference
    distance = first - start
    # a bound beyond the block is no bound: a full block needs no mask
    left = -1 if mask.left < 0 or mask.left - distance >= last - first - 1 else mask.left - distance
    right = -1 if mask.right < 0 or mask.right + distance >= stop - start - 1 else mask.right + distance
    q, k = first - queries.start + queries.row, start - keys.start + keys.row
    return Block((q, q + last - first), (k, k + stop - start), left, right, first, start)


def _is_full(block: Block) -> bool:
    return block.left < 0 and block.right < 0


def _joined(row: list[Block]) -> list[Block]:
    """Full blocks of the same queries, their keys side by side, as one."""
    # one call where two would do: fewer launches, and a merge less
    if len(row) == 2 and all(map(_is_full, row)) and row[0].q == row[1].q and row[0].k[1] == row[1].k[0]:
        return [row[0]._replace(k=(row[0].k[0], row[1].k[1]))]
    return row


def _stacked(blocks: list[Block]) -> list[Block]:
    """Full blocks to the same keys, their queries side by side, as one."""
    if len(blocks) == 2 and all(map(_is_full, blocks)) and blocks[0].k == blocks[1].k:
        if blocks[0].q[1] == blocks[1].q[0]:
            return [blocks[0]._replace(q=(blocks[0].q[0], blocks[1].q[1]))]
    return blocks


class _Part(NamedTuple):
    """The arguments of one attention call, and the offset of its LSE."""

    q: tuple[int, int]
    k: tuple[int, int]
    options: dict[str, Any]
    shift: Tensor | None = None  # [B | 1, H, rows]


def parts(sharding: Sharding, source: int, mask: Mask, query: Tensor) -> Iterator[_Part]:
    """The calls of `query`, this rank's, for the keys of `source`."""
    if sharding.is_packed:
        yield from _packed_part(sharding, source, mask, query.device)
        return
    for block in dense_blocks(sharding, source, mask):
        options: dict[str, Any] = dict(softcap=mask.softcap, scale=mask.scale)
        if not _is_full(block):
            options.update(window_size=(block.left, block.right), causal_align="top_left", is_causal=block.right == 0)
        shift = None
        # runs that begin at one position overlap: the kernel's own ALiBi
        if mask.slopes is not None and block.q_start == block.k_start:
            options.update(alibi_slopes=mask.slopes, causal_align="top_left")
        elif mask.slopes is not None:
            options["attn_bias"], shift = _distance_bias(block, mask.slopes.to(acc_dtype(query.dtype)))
        yield _Part(block.q, block.k, options, shift)


def _distance_bias(block: Block, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """ALiBi of runs that do not overlap: [B | 1, H, 1, keys] to add to the scores, [B | 1, H, queries] to the LSE."""
    slopes = slopes.reshape(-1, slopes.shape[-1])
    positions = torch.arange(block.q[1] - block.q[0], device=slopes.device) + block.q_start
    others = torch.arange(block.k[1] - block.k[0], device=slopes.device) + block.k_start
    # runs that do not overlap: |p - j| is |p - x| + |x - j| for an x between them, so a bias by key and an offset of
    # the LSE are enough
    between = others[-1] if block.q_start > block.k_start else others[0]
    bias = -slopes[:, :, None, None] * (others - between).abs()
    return bias, -slopes[:, :, None] * (positions - between).abs()


def _packed_part(sharding: Sharding, source: int, mask: Mask, device: torch.device) -> Iterator[_Part]:
    rank = sharding.rank
    causal = mask.right == 0
    # of a document each rank has an early and a late piece: of an earlier rank's keys the late one sees all, of a later
    # rank's only ours that are late
    # of packed documents the pieces that a causal mask hides altogether are left out
    queries = sharding.rows(rank, not causal or source <= rank, True, device)
    keys = sharding.rows(source, True, not causal or source >= rank, device)
    options: dict[str, Any] = dict(softcap=mask.softcap, scale=mask.scale, cu_seqlens_q=queries.starts)
    if source == rank:
        options["is_causal"] = causal
    else:
        # padded starts: the pieces of a document are not adjacent on a rank
        options.update(
            cu_seqlens_k=keys.starts, seqused_q=queries.lengths, seqused_k=keys.lengths, cu_seqlens_k_padded=keys.starts
        )
    yield _Part((0, sharding.length(rank)), (0, sharding.length(source)), options)


class Queries:
    """A rank's queries with their partial results, float32 (float64 for float64)."""

    def __init__(self, query: Tensor, sharding: Sharding, mask: Mask) -> None:
        self.query, self.sharding, self.mask = query, sharding, mask
        self.dim = 0 if sharding.is_packed else 1
        pieces = [(0, sharding.length())]
        if not sharding.is_packed:
            pieces = [(p.row, p.row + p.length) for p in sharding.pieces(sharding.rank)[0]]
        # None until the first part: nothing to merge with
        self.seen: list[tuple[tuple[int, int], Tensor | None, Tensor | None]] = [(rows, None, None) for rows in pieces]

    def attend(self, source: int, key: Tensor, value: Tensor) -> None:
        """Attend to the keys of `source`, and merge the result."""
        for part in parts(self.sharding, source, self.mask, self.query):
            q, k, v = _cut(self.query, part.q, self.dim), _cut(key, part.k, self.dim), _cut(value, part.k, self.dim)
            op = varlen_attention if self.sharding.is_packed else attention
            out, lse = op(q, k, v, **part.options, return_lse=True)
            self._add(part.q, out, lse if part.shift is None else lse + part.shift)

    def _add(self, rows: tuple[int, int], out: Tensor, lse: Tensor) -> None:
        for n, (own, sum_out, sum_lse) in enumerate(self.seen):
            first, last = max(rows[0], own[0]), min(rows[1], own[1])
            if first >= last:
                continue
            there = (first - rows[0], last - rows[0])
            part, part_lse = _cut(out, there, self.dim), lse[..., slice(*there)]
            # whole rows of a piece: the part replaces the sum, without a copy
            if (first, last) == own:
                if sum_out is not None and sum_lse is not None:
                    part, part_lse = self._merged(sum_out, sum_lse, part, part_lse)
                self.seen[n] = (own, part, part_lse)
                continue
            if sum_out is None or sum_lse is None:
                size = own[1] - own[0]
                # a part of the rows: the rest of the piece must exist with LSE -inf
                sum_out = out.new_zeros((*out.shape[: self.dim], size, *out.shape[self.dim + 1 :]))
                sum_lse = lse.new_full((*lse.shape[:-1], size), -torch.inf)
            # one rounding at the end, not one a block
            sum_out = sum_out.to(acc_dtype(sum_out.dtype))
            here = (first - own[0], last - own[0])
            target, target_lse = _cut(sum_out, here, self.dim), sum_lse[..., slice(*here)]
            merged, merged_lse = self._merged(target, target_lse, part, part_lse)
            sum_lse = sum_lse.clone()
            target.copy_(merged)
            sum_lse[..., slice(*here)] = merged_lse
            self.seen[n] = (own, sum_out, sum_lse)

    def _merged(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
        return merge_pair(out, lse, other, other_lse, layout="thd" if self.sharding.is_packed else "bshd")

    def result(self, value_dim: int, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out in query's dtype and layout, lse float32), rounded once; the sinks [H] are seen last."""
        query = self.query
        out = query.new_zeros((*query.shape[:-1], value_dim))
        rows = (query.shape[1], query.shape[0]) if self.sharding.is_packed else _bhs(query)
        lse = torch.full(rows, -torch.inf, dtype=acc_dtype(query.dtype), device=query.device)
        for own, part, part_lse in self.seen:
            if part is None or part_lse is None:
                continue
            if sinks is not None:
                # the sink is added once, after all keys
                with_sink = torch.logaddexp(part_lse, sinks.to(part_lse.dtype)[:, None])
                # a sink is one more key without a value: it scales what is there
                weight = torch.exp(part_lse - with_sink)
                part, part_lse = part * weight.transpose(-1, -2)[..., None], with_sink
            _cut(out, own, self.dim).copy_(part)
            lse[..., slice(*own)] = part_lse
        # rows without any key attend to the sink alone
        if sinks is not None:
            unseen = lse == -torch.inf
            lse = torch.where(unseen, sinks.to(lse.dtype)[:, None], lse)
        return out, lse


class Sum:
    """A gradient in float32 that blocks add to, row by row; rows that the first block omits become zero."""

    def __init__(self, total: Tensor, dim: int) -> None:
        self.total, self.dim = total, dim
        self._is_begun = False

    def add(self, rows: tuple[int, int], share: Tensor) -> None:
        # the first share initializes the buffer
        if self._is_begun:
            _cut(self.total, rows, self.dim).add_(share)
            return
        for rest in ((0, rows[0]), (rows[1], self.total.shape[self.dim])):
            # the first share is copied, not added, so only the rows that it omits need zeros
            _cut(self.total, rest, self.dim).zero_()
        _cut(self.total, rows, self.dim).copy_(share)
        self._is_begun = True

    def result(self) -> Tensor:
        return self.total if self._is_begun else self.total.zero_()


def gradients(
    sharding: Sharding, source: int, mask: Mask, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
    lse: Tensor, dq: Sum, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Write this rank's contribution to dk and dv of `source`, float32; add that of its keys to dq."""
    dim = dq.dim
    sums = (dq, Sum(dk, dim), Sum(dv, dim))
    for part in parts(sharding, source, mask, query):
        rows = slice(*part.q)
        # the backward wants the LSE of the shifted scores
        part_lse = lse[..., rows] if part.shift is None else lse[..., rows] - part.shift
        q, k, v, o, do = (
            _cut(x, at, dim)
            for x, at in ((query, part.q), (key, part.k), (value, part.k), (out, part.q), (grad, part.q))
        )
        layout: Layout = "thd" if sharding.is_packed else "bshd"
        shares = attention_backward(do, q, k, v, o, part_lse.contiguous(), **part.options, layout=layout)
        for total, at, share in zip(sums, (part.q, part.k, part.k), shares, strict=True):
            total.add(at, share)
    for total in sums[1:]:
        total.result()


def _cut(x: Tensor, rows: tuple[int, int], dim: int) -> Tensor:
    return x.narrow(dim, rows[0], rows[1] - rows[0])


def _bhs(query: Tensor) -> tuple[int, int, int]:
    return query.shape[0], query.shape[2], query.shape[1]
