"""Sharding of sequences over context-parallel ranks: pieces assigned so that all ranks have equal work and memory.

    W ranks: each document is cut into 2 W pieces, and rank r holds the pieces r and 2 W - 1 - r

Under a causal mask all pairs of pieces have the same cost (zigzag). Pieces of a document differ
by one token at most; ranks that have the fewest tokens, then the fewest (query, key) pairs, get the remainder, so
that ranks differ by one token in all, whatever the lengths. A dense sequence is one document.

Source: Zhu, "zigzag" in zhuzilin/ring-flash-attention; TransformerEngine's per-document pieces, which are padded.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from powertrain.runtime import checks

_SHOWN = 16  # documents whose lengths a message gives


class RowSpans(NamedTuple):
    """A part of each document on one rank, int32: its start among the rank's tokens, and its length.

    The first entry is an empty document at 0: attention writes zeros to rows of no document only behind a document.
    """

    starts: Tensor  # [documents + 2]
    lengths: Tensor  # [documents + 1]


class TokenSpan(NamedTuple):
    """Consecutive tokens of a document on one rank."""

    start: int  # in the document
    stop: int
    row: int  # of the first one, among the rank's tokens

    @property
    def length(self) -> int:
        return self.stop - self.start


class Sharding:
    """Assignment of tokens to ranks: made by `ContextParallel.sharding`, the same on all ranks.

    bounds      for each document the 2 W + 1 tokens where its pieces begin, counted within it
    starts      where the documents begin, and the end
    is_packed   several documents one behind the other, without a batch ("thd")
    """

    def __init__(self, lengths: Sequence[int], world_size: int, rank: int, *, is_packed: bool) -> None:
        self.world_size, self.rank, self.is_packed = world_size, rank, is_packed
        self.bounds = _bounds(lengths, world_size)
        self.starts = [0]
        for length in lengths:
            self.starts.append(self.starts[-1] + length)
        # every layer asks for the same indices: they are made and copied to the device once
        self._kept: dict[tuple[object, ...], Tensor | RowSpans] = {}

    @property
    def num_tokens(self) -> int:
        """Number of tokens on all ranks."""
        return self.starts[-1]

    @property
    def max_length(self) -> int:
        """Length of the longest document."""
        return max((bounds[-1] for bounds in self.bounds), default=0)

    def described(self) -> str:
        """Text of the documents' lengths, equal for equal documents: for many, the first ones and a checksum of all."""
        lengths = [stop - start for start, stop in pairwise(self.starts)]
        if len(lengths) <= _SHOWN:
            # a checksum: messages of a thousand documents must still differ
            return f"documents of {lengths} tokens"
        checksum = crc32(repr(lengths).encode())
        return f"{len(lengths)} documents of {lengths[:_SHOWN]} ... tokens (checksum {checksum:08x})"

    def pieces(self, rank: int) -> list[tuple[TokenSpan, TokenSpan]]:
        """The two pieces of each document, in the order of the rank's tokens."""
        pairs, row = [], 0
        for bounds in self.bounds:
            pair = []
            for n in (rank, 2 * self.world_size - 1 - rank):
                pair.append(TokenSpan(bounds[n], bounds[n + 1], row))
                row += pair[-1].length
            pairs.append((pair[0], pair[1]))
        return pairs

    def length(self, rank: int | None = None) -> int:
        """Tokens of a rank, this one if none is named."""
        rank = self.rank if rank is None else rank
        return sum(one.length + two.length for one, two in self.pieces(rank))

    def pairs(self, rank: int) -> int:
        """(query, key) pairs under a causal mask whose queries a rank holds: the cost of its attention."""
        return sum(_pairs(piece.start, piece.stop) for pair in self.pieces(rank) for piece in pair)

    def indices(self, device: torch.device | str = "cpu", rank: int | None = None) -> Tensor:
        """[length] int64: the tokens of a rank, counted in the whole sequence, in the order it holds them."""
        rank = self.rank if rank is None else rank
        return self._tensor("indices", rank, device, shift=self.starts)

    def position_ids(self, device: torch.device | str = "cpu", rank: int | None = None) -> Tensor:
        """[length] int64: positions of a rank's tokens in their documents, for RoPE and learned embeddings."""
        rank = self.rank if rank is None else rank
        return self._tensor("positions", rank, device, shift=[0] * len(self.starts))

    def order(self, device: torch.device | str = "cpu") -> Tensor:
        """[num_tokens] int64: each token's row in the concatenation of all ranks' tokens."""
        key = ("order", torch.device(device))
        if key not in self._kept:
            # argsort of a permutation is its inverse
            self._kept[key] = torch.cat([self.indices(rank=r) for r in range(self.world_size)]).argsort().to(device)
        kept = self._kept[key]
        assert isinstance(kept, Tensor)
        return kept

    def rows(self, rank: int, first: bool, second: bool, device: torch.device) -> RowSpans:
        """The first, the second or both pieces of each document among a rank's tokens."""
        key = ("rows", rank, first, second, device)
        if key not in self._kept:
            pairs = self.pieces(rank)
            # the first entry is an empty document at row 0, the last the end
            starts = [0, *(one.row if first else two.row for one, two in pairs), self.length(rank)]
            lengths = [0] + [first * one.length + second * two.length for one, two in pairs]
            self._kept[key] = RowSpans(*(torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, lengths)))
        kept = self._kept[key]
        assert isinstance(kept, RowSpans)
        return kept

    def shard(self, *tensors: Tensor, dim: int = 1) -> tuple[Tensor, ...]:
        """This rank's tokens of tensors that have the whole sequence along `dim`. Copies; differentiable."""
        for n, x in enumerate(tensors):
            got = x.shape[dim] if -x.dim() <= dim < x.dim() else "fewer dims"
            checks.require(
                got == self.num_tokens, "shard", f"tensors[{n}]", f"have {self.num_tokens} tokens at dim {dim}", got
            )
        return tuple(x.index_select(dim, self.indices(x.device)) for x in tensors)

    def _tensor(self, name: str, rank: int, device: torch.device | str, shift: list[int]) -> Tensor:
        key = (name, rank, torch.device(device))
        if key not in self._kept:
            spans = [
                torch.arange(piece.start + start, piece.stop + start, device="cpu")
                for pair, start in zip(self.pieces(rank), shift, strict=False)
                for piece in pair
            ]
            self._kept[key] = torch.cat(spans or [torch.arange(0, device="cpu")]).to(device)
        kept = self._kept[key]
        assert isinstance(kept, Tensor)
        return kept


def _pairs(start: int, stop: int) -> int:
    """Causal (query, key) pairs of the queries from start to stop."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


def _bounds(lengths: Sequence[int], world_size: int) -> list[list[int]]:
    num_pieces = 2 * world_size
    tokens, pairs = [0] * world_size, [0] * world_size
    all_bounds = []
    for length in lengths:
        size, rest = divmod(length, num_pieces)
        sizes = [size] * num_pieces
        # the remainder goes to the ranks with the fewest tokens, then pairs, so that documents balance each other
        order = sorted(range(world_size), key=lambda r: (tokens[r], pairs[r]))
        for n in range(rest):
            rank = order[n % world_size]
            sizes[rank if n < world_size else num_pieces - 1 - rank] += 1
        bounds = [0]
        for size in sizes:
            bounds.append(bounds[-1] + size)
        for n in range(num_pieces):
            # pieces n and 2W - 1 - n belong to one rank
            rank = min(n, num_pieces - 1 - n)
            tokens[rank] += sizes[n]
            pairs[rank] += _pairs(bounds[n], bounds[n + 1])
        all_bounds.append(bounds)
    return all_bounds
