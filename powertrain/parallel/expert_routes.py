"""Routes of rows to the ranks of their experts: row counts per rank, rows multiplied together, and a capacity limit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.parallel.overlap import Overlap, find
from powertrain.parallel.transport.base import RowCounts, SplitSizes
from powertrain.runtime import checks
from powertrain.runtime.nodes import ON_ONE_RANK, once_differentiable


class ExpertRows(NamedTuple):
    """Rows from one source rank that one grouped GEMM multiplies: those for some of this rank's experts.

    rows, experts   which of the source's rows, and of the experts;  ends [experts] int32: each one's end in those rows
    """

    source: int
    rows: slice
    experts: slice
    ends: Tensor


class Route(NamedTuple):
    """Routes of the rows of one call.

    splits       number of rows between ranks, known to the host
    ends         [W, E/W] int32: end of each source's rows of each local expert; rows behind the last belong to none
    source_rows  [rows sent]: index of the local row sent in each slot, padding included; None: all, in their order
    slots        [rows]: slot of each local row among those sent, -1 for a dropped row
    first        number of this rank's rows for the first half of its own experts; None: not known to the host
    """

    splits: SplitSizes
    ends: Tensor
    source_rows: Tensor | None = None
    slots: Tensor | None = None
    first: int | None = None

    @staticmethod
    def plan(ends: Tensor, num_rows: int, overlap: Overlap, capacity: int | None) -> "Route":
        """ends [E]: where each expert's rows end among this rank's num_rows."""
        size, rank = overlap.size, overlap.rank
        counts = ends.diff(prepend=ends.new_zeros(1))
        # one exchange of W * E counts, from which every rank knows all splits
        # counts and not rows: E integers a rank
        everyone = find(overlap.key).transport.all_gather(counts[None], RowCounts((1,) * size)).view(size, size, -1)
        theirs = everyone[:, rank].cumsum(1, dtype=torch.int32)
        if capacity is None:
            first = everyone[rank, rank, : everyone.shape[2] // 2].sum()
            # the call's only synchronization: the host needs the counts to size buffers and copies
            *matrix, first_rows = torch.cat([everyone.sum(2).flatten(), first[None]]).tolist()
            splits = SplitSizes(tuple(tuple(matrix[i : i + size]) for i in range(0, size * size, size)))
            sent = sum(splits.sent(rank))
            checks.require(sent == num_rows, "spread_experts", "offsets", f"end at rows' {num_rows} rows", sent)
            return Route(splits, theirs, first=first_rows)
        # equal splits need no counts on the host
        splits = SplitSizes(((capacity,) * size,) * size)
        return Route(splits, theirs.clamp(max=capacity), *_with_capacity(ends, num_rows, size, capacity))

    def pad(self, rows: Tensor) -> Tensor:
        """The rows in the order and with the padding in which they are sent."""
        return rows if self.source_rows is None else _Pad.apply(rows, self.source_rows, self.slots)

    def unpad(self, rows: Tensor) -> Tensor:
        """The inverse of `pad`; zeros for dropped rows."""
        return rows if self.source_rows is None else _Unpad.apply(rows, self.source_rows, self.slots)

    def pieces(self, order: Sequence[int]) -> list[ExpertRows]:
        """Row ranges that a rank multiplies, in sequence; order: the sources, itself first."""
        sizes, count = self.splits.received(order[0]), self.ends.shape[1]
        whole = [ExpertRows(s, slice(0, sizes[s]), slice(0, count), self.ends[s]) for s in order]
        if self.first is None or count == 1:
            return whole
        (own, rows, _, ends), *others = whole
        # this rank's own rows in two products: the first results of others arrive behind the first one
        half = count // 2
        before = ExpertRows(own, slice(0, self.first), slice(0, half), ends[:half])
        after = ExpertRows(own, slice(self.first, rows.stop), slice(half, count), ends[half:] - self.first)
        return [before, *others, after]

    def by_expert(self, rank: int) -> tuple[Tensor, Tensor]:
        """[rows received, 1]: position of each row sorted by expert, then source; and each expert's end."""
        sizes = self.splits.received(rank)
        lengths = self.ends[:, -1:] if self.source_rows is None else torch.full_like(self.ends[:, -1:], sizes[0])
        ends = torch.cat([self.ends, lengths], 1)  # [W, E/W + 1]: rows of no expert come last
        counts = ends.diff(dim=1, prepend=torch.zeros_like(lengths))
        totals = counts.sum(0, dtype=torch.int32)
        # of each source's rows of each expert
        first = totals.cumsum(0) - totals + counts.cumsum(0) - counts
        # added to a row's index in its source's block, it gives the row's place among its expert's
        shift = first - (ends - counts)
        positions = []
        for source, size in enumerate(sizes):
            row = torch.arange(size, device=ends.device, dtype=ends.dtype)
            expert = torch.searchsorted(self.ends[source].contiguous(), row, right=True)
            positions.append(row + shift[source][expert])
        return torch.cat(positions)[:, None], totals[:-1].cumsum(0, dtype=torch.int32)


def _with_capacity(ends: Tensor, num_rows: int, size: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Route.source_rows and Route.slots where each rank gets `capacity` rows."""
    # of each rank's rows
    stops = ends.view(size, -1)[:, -1].long().contiguous()
    starts = torch.cat([stops.new_zeros(1), stops[:-1]])
    source_rows = starts[:, None] + torch.arange(capacity, device=ends.device)
    source_rows = torch.where(source_rows < stops[:, None], source_rows, 0).flatten()
    row = torch.arange(num_rows, device=ends.device)
    # clamp: rows behind the last belong to no rank and get slot -1
    rank = torch.searchsorted(stops, row, right=True).clamp(max=size - 1)
    offset = row - starts[rank]
    slots = torch.where((offset < capacity) & (row < stops[-1]), rank * capacity + offset, -1)
    return source_rows, slots


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source_rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return _pad_rows(rows, source_rows)

    @staticmethod
    @once_differentiable("expert parallelism", ON_ONE_RANK)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _unpad_rows(grad, *ctx.saved_tensors), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source_rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(source_rows)
        return _unpad_rows(rows, slots)

    @staticmethod
    @once_differentiable("expert parallelism", ON_ONE_RANK)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _pad_rows(grad, *ctx.saved_tensors), None, None


def _pad_rows(rows: Tensor, source_rows: Tensor) -> Tensor:
    return rows.index_select(0, source_rows) if rows.shape[0] else rows.new_zeros((source_rows.shape[0], rows.shape[1]))


def _unpad_rows(rows: Tensor, slots: Tensor) -> Tensor:
    # a dropped row is zero, forward and backward
    return rows.index_select(0, slots.clamp(min=0)).masked_fill_((slots < 0)[:, None], 0)
