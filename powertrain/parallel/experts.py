"""Expert parallelism: rows are sent to the ranks of their experts and back while products run.

    rank r of W keeps the experts r E/W to (r+1) E/W - 1                                E experts in all
    rows = x, once for each of its experts, sorted by expert        `moe_permute`: so each rank's are together
    y[i] = down[e] swiglu(gate_up[e] rows[i])                        on the rank that keeps e, i's expert
    out[t] = sum over j of w[t, j] y[row of (t, j)]                  float32, j ascending: `moe_unpermute`

Overlapped, a rank starts with its own rows for half of its experts; then it multiplies the other ranks' rows, one rank
after the other, and sends each result back while the next rank's rows are multiplied; last come its own rows for the
other half. Backward is the mirror: dy is sent, dx returned, and the weights' gradients, one grouped product over all
ranks' rows each, hide the remaining transfers. The sequential form takes one all-to-all, the same products over all
rows at once, and one all-to-all back; `dispatch` and `combine` are its halves.

The number of rows per rank is known on the GPUs only. Exact: the counts are gathered, E integers a rank, and read by
the host once a call; no row is dropped. With a `capacity`, every rank sends each rank that many rows, padded with
copies: nothing is read on the host, so CUDA graphs can capture it; rows beyond the capacity are dropped.

Sources: Lepikhin et al., GShard, arXiv:2006.16668 (all-to-all, capacity); Gale et al., MegaBlocks, arXiv:2211.15841
(dropless, grouped products).
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.activations import gated_activation
from powertrain.ops.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad
from powertrain.ops.moe import moe_permute, moe_unpermute
from powertrain.parallel.overlap import Overlap, find
from powertrain.parallel.transport.base import RowCounts, SplitSizes
from powertrain.parallel.transport.protocol import COMBINE, DISPATCH
from powertrain.runtime import checks
from powertrain.runtime.positional import hinted

Way = Literal["auto", "overlapped", "sequential"]
_WAYS: tuple[Way, ...] = ("auto", "overlapped", "sequential")
# mean rows of an expert from one rank below which products of one rank's rows are mostly padding of the 128-row tile
_MIN_ROWS_PER_EXPERT = 128
# bytes sent by a rank below which backward's sorting and many launches cost more than they hide. With backward on
# four H200: 940 MB 31.8 ms, in sequence 36.4; 268 MB 10.9 ms, in sequence 9.3 (forward alone 3.4 and 4.1)
_MIN_BYTES_WITH_GRADIENTS = 512 << 20


class ExpertRows(NamedTuple):
    """Rows of one source that are multiplied at once: those for some of this rank's experts.

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
        """The rows as they are sent."""
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
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _unpad_rows(grad, *ctx.saved_tensors), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source_rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(source_rows)
        return _unpad_rows(rows, slots)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _pad_rows(grad, *ctx.saved_tensors), None, None


def _pad_rows(rows: Tensor, source_rows: Tensor) -> Tensor:
    return rows.index_select(0, source_rows) if rows.shape[0] else rows.new_zeros((source_rows.shape[0], rows.shape[1]))


def _unpad_rows(rows: Tensor, slots: Tensor) -> Tensor:
    # a dropped row is zero, forward and backward
    return rows.index_select(0, slots.clamp(min=0)).masked_fill_((slots < 0)[:, None], 0)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, splits: SplitSizes, overlap: Overlap) -> Tensor:
        ctx.saved_splits = splits.back, overlap
        return find(overlap.key).transport.all_to_all(rows, splits)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        back, overlap = ctx.saved_splits
        return find(overlap.key).transport.all_to_all(grad, back), None, None


class Dispatched(NamedTuple):
    """rows [n, H]: all ranks' for this rank's experts, sorted by expert, then by source; offsets [E/W] int32, each
    expert's end, as `grouped_gemm` takes it: rows behind the last belong to none. The rest is for `combine`."""

    rows: Tensor
    offsets: Tensor
    positions: Tensor
    expert_positions: Tensor
    route: Route


def _dispatch_rows(rows: Tensor, positions: Tensor, route: Route, overlap: Overlap) -> Dispatched:
    received = _AllToAll.apply(route.pad(rows), route.splits, overlap)
    expert_positions, offsets = route.by_expert(overlap.rank)
    return Dispatched(moe_unpermute(received, _inverse(expert_positions)), offsets, positions, expert_positions, route)


def _combine_rows(rows: Tensor, dispatched: Dispatched, overlap: Overlap) -> Tensor:
    route = dispatched.route
    return route.unpad(_AllToAll.apply(moe_unpermute(rows, dispatched.expert_positions), route.splits.back, overlap))


def _inverse(positions: Tensor) -> Tensor:
    """The inverse permutation of [n, 1] positions: `moe_unpermute` by it sorts rows, by `positions` restores them."""
    rows = torch.arange(len(positions), device=positions.device)[:, None]
    return torch.empty_like(positions).scatter_(0, positions, rows)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def dispatch(
    x: Tensor, experts: Tensor, num_experts: int, overlap: Overlap, *, capacity: int | None = None
) -> Dispatched:
    """Each token's row to the ranks of its experts. Differentiable; every rank calls it.

    Shapes: T tokens here, H hidden size, k experts a token, E = num_experts, which the W ranks divide.
        x         [T, H]  as `moe_permute` takes it; T may differ between ranks, and be 0
        experts   [T, k]  int32 or int64 in [0, E), from `moe_route`
        capacity  rows from this rank to each rank, the same on all; None: as many as there are. See the module
    Returns the rows for this rank's experts; apply those to `rows` with `offsets`, then `combine`.
    Memory: this rank's T*k rows and those received, twice. Saved: indices.
    Raises ValueError naming the argument, the expected value and the given one; PeerTimeout if a rank is gone.
    """
    _check_experts("dispatch", num_experts, overlap, capacity)
    rows, ends, positions = moe_permute(x, experts, num_experts)
    return _dispatch_rows(rows, positions, Route.plan(ends, rows.shape[0], overlap, capacity), overlap)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def combine(rows: Tensor, dispatched: Dispatched, weights: Tensor | None, overlap: Overlap) -> Tensor:
    """The experts' results back to their tokens' ranks, and each token's weighted sum: the inverse of `dispatch`.

        rows     [n, H]  results, in the order of `dispatched.rows`
        weights  [T, k]  as `moe_unpermute` takes them, or None for 1
    Returns [T, H]. Added in float32 in the order of each token's experts. A dropped row adds nothing.
    """
    checks.require(rows.dim() == 2, "combine", "rows", "be [n, H]", list(rows.shape))
    good = rows.shape[0] == dispatched.rows.shape[0]
    checks.require(good, "combine", "rows", f"have {dispatched.rows.shape[0]} rows, those dispatched", rows.shape[0])
    return moe_unpermute(_combine_rows(rows, dispatched, overlap), dispatched.positions, weights)


def _check_experts(op: str, num_experts: int, overlap: Overlap, capacity: int | None) -> None:
    checks.require(isinstance(overlap, Overlap), op, "overlap", "be an Overlap", repr(overlap))
    good = isinstance(num_experts, int) and num_experts >= 1 and num_experts % overlap.size == 0
    checks.require(good, op, "num_experts", f"be a multiple of the {overlap.size} ranks", repr(num_experts))
    good = capacity is None or (isinstance(capacity, int) and capacity >= 1)
    checks.require(good, op, "capacity", "be None or an integer of at least 1", repr(capacity))


def _mlp(rows: Tensor, gate_up: Tensor, down: Tensor, offsets: Tensor) -> Tensor:
    return grouped_gemm(gated_activation(grouped_gemm(rows, gate_up, offsets), "swiglu"), down, offsets)


class _Overlapped(torch.autograd.Function):
    """rows as they are sent -> their experts' results."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gate_up: Tensor, down: Tensor, route: Route, overlap: Overlap) -> Tensor:
        zs: list[Tensor] = []

        def product(piece: ExpertRows, x: Tensor) -> Tensor:
            # z is kept, the activation is recomputed from it in backward
            zs.append(grouped_gemm(x, gate_up[piece.experts], piece.ends))
            return grouped_gemm(gated_activation(zs[-1], "swiglu"), down[piece.experts], piece.ends)

        y, received, _ = _exchange_experts(rows, route, overlap, product)
        ctx.saved_route = route, overlap
        ctx.save_for_backward(received, gate_up, down, *zs)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        route, overlap = ctx.saved_route
        x, gate_up, down, *zs = ctx.saved_tensors
        activations: list[Tensor] = []
        dzs: list[Tensor] = []

        def product(piece: ExpertRows, dy: Tensor) -> Tensor:
            # pieces come in the same order as in forward, so the saved inputs are taken one by one
            z = zs[len(dzs)].detach().requires_grad_()
            with torch.enable_grad():
                a = gated_activation(z, "swiglu")
            (dz,) = torch.autograd.grad(a, z, grouped_gemm_dgrad(dy, down[piece.experts], piece.ends))
            activations.append(a.detach())
            dzs.append(dz)
            return grouped_gemm_dgrad(dz, gate_up[piece.experts], piece.ends)

        need_gate_up, need_down = ctx.needs_input_grad[1:3]

        def weight_grads(dy: Tensor, pieces: list[ExpertRows]) -> tuple[Tensor | None, Tensor | None]:
            if not (need_gate_up or need_down):
                return None, None
            expert_positions, offsets = route.by_expert(overlap.rank)
            order, dgate_up, ddown = _inverse(expert_positions), None, None
            if need_down:
                a = moe_unpermute(_in_order(activations, pieces), order)
                # over all sources at once, in the order of experts: one rounding, whatever the order of arrival
                ddown = grouped_gemm_wgrad(moe_unpermute(dy, order), a, offsets)
            if need_gate_up:
                dz = moe_unpermute(_in_order(dzs, pieces), order)
                dgate_up = grouped_gemm_wgrad(dz, moe_unpermute(x, order), offsets)
            return dgate_up, ddown

        dx, _, grads = _exchange_experts(dy.contiguous(), route, overlap, product, weight_grads)
        return dx, *grads, None, None


def _in_order(tensors: list[Tensor], pieces: list[ExpertRows]) -> Tensor:
    """Each piece's tensor, concatenated in the order of the rows received."""
    # by source, then by rows: the order in which they lie in `received`
    order = sorted(range(len(pieces)), key=lambda i: (pieces[i].source, pieces[i].rows.start))
    return torch.cat([tensors[i] for i in order])


def _exchange_experts(
    rows: Tensor, route: Route, overlap: Overlap, product: Any, meanwhile: Any = lambda received, pieces: None
) -> tuple[Tensor, Tensor, Any]:
    """product(piece, its rows) of all ranks' rows, returned to them; the rows received; the result of `meanwhile`.

    `meanwhile(received, pieces)` is called when the last results are on their way.
    """
    transport, splits = find(overlap.key).transport, route.splits
    dispatched = transport.all_to_all_async(DISPATCH, rows, splits, rows.shape[1])
    # both before anything is sent: a receive buffer that must grow waits for all ranks
    combined = transport.all_to_all_async(COMBINE, rows, splits.back, rows.shape[1])
    parts = rows.split(splits.sent(overlap.rank))
    # all sends first: the copy engines work through them while the products below run
    for rank in [*transport.send_order(), overlap.rank]:
        dispatched.send(rank, parts[rank])
    pieces = route.pieces(dispatched.order)
    for piece in pieces:
        y = product(piece, dispatched.wait(piece.source)[piece.rows])
        if piece.source == overlap.rank:
            combined.wait(overlap.rank)[piece.rows].copy_(y)
        else:
            combined.send(piece.source, y)
    dispatched.finish([dispatched.whole])
    result = meanwhile(dispatched.whole, pieces)
    # the next rank has computed this one's rows first
    for rank in [overlap.rank, *transport.send_order()]:
        combined.wait(rank)
    combined.finish([combined.whole])
    return combined.whole, dispatched.whole, result


def _overlaps(
    way: Way, route: Route, overlap: Overlap, num_experts: int, row_bytes: int, wants_gradients: bool
) -> bool:
    """The same on every rank."""
    if way != "auto":
        return way == "overlapped"
    rows = sum(map(sum, route.splits.rows))
    # from numbers that all ranks have, so all choose alike
    if overlap.transport.name == "sequential" or rows < _MIN_ROWS_PER_EXPERT * overlap.size * num_experts:
        return False
    return not wants_gradients or rows * row_bytes >= _MIN_BYTES_WITH_GRADIENTS * overlap.size


@torch.compiler.disable  # type: ignore[untyped-decorator]
def spread_experts(
    rows: Tensor,
    offsets: Tensor,
    gate_up: Tensor,
    down: Tensor,
    overlap: Overlap,
    *,
    capacity: int | None = None,
    way: Way = "auto",
) -> Tensor:
    """Rows sorted by expert -> the same, each through its expert, a gated MLP that this or another rank keeps.

    Shapes: N rows here, H hidden size, I intermediate size, E experts in all on W ranks.
        rows      [N, H]        float32, float16 or bfloat16 (float64 on the CPU); N may differ between ranks, and be 0
        offsets   [E]           int32, where each expert's rows end: both from `moe_permute`
        gate_up   [E/W, 2I, H]  this rank's experts, gate above up; the same dtype (under autocast all are cast)
        down      [E/W, H, I]
        capacity  rows from this rank to each rank, the same on all; None: as many as there are. See the module. Of a
                  rank's rows those of its last experts are dropped first; a dropped row gives zeros
        way       "overlapped"; "sequential"; "auto": overlapped, unless the transport is sequential, the mean of rows
                  per expert and rank is under 128, or gradients are needed and a rank sends less than 512 MiB on the
                  mean (capacity: as if it were full)
    Returns [N, H]. Every rank calls it, and its backward, in the same order, and wants the same gradients.
    Numerics: every product accumulates in float32 and is rounded to rows' dtype, the weights' gradients over all ranks'
        rows at once. Deterministic: independent of arrival order.
    Memory: the rows received, [n, H], and their gate and up, [n, 2I], are saved; backward sorts two more such pairs.
    Synchronization: without capacity the host reads W*W counts and waits for the inputs of `offsets`; backward: none.
    Not traced: torch.compile breaks the graph here. Double backward is not implemented and says so.
    Raises ValueError naming the argument, the expected value and the given one; PeerTimeout if a rank is gone.
    """
    op = "spread_experts"
    kind = rows.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and rows.dtype is not torch.float64:
        rows, gate_up, down = (t.to(torch.get_autocast_dtype(kind)) for t in (rows, gate_up, down))
    _check(op, rows, offsets, gate_up, down, overlap, capacity, way)
    # one rank with exact counts sends nothing
    if overlap.size == 1 and capacity is None:
        return _mlp(rows, gate_up, down, offsets)
    overlap.transport.compare(f"{op}, way {way}", (capacity or 0,), [rows[:0], gate_up, down])
    route = Route.plan(offsets, rows.shape[0], overlap, capacity)
    wants_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (rows, gate_up, down))
    row_bytes = rows.shape[1] * rows.element_size()
    if _overlaps(way, route, overlap, offsets.shape[0], row_bytes, wants_gradients):
        return route.unpad(_Overlapped.apply(route.pad(rows).contiguous(), gate_up, down, route, overlap))
    sent = _dispatch_rows(rows, offsets, route, overlap)
    return _combine_rows(_mlp(sent.rows, gate_up, down, sent.offsets), sent, overlap)


def _check(
    op: str, rows: Tensor, offsets: Tensor, gate_up: Tensor, down: Tensor, overlap: Overlap, capacity: int | None,
    way: Way,
) -> None:  # fmt: skip
    checks.floating(op, rows=rows, gate_up=gate_up, down=down)
    checks.same_device(op, "rows", rows, offsets=offsets, gate_up=gate_up, down=down)
    checks.require(rows.dim() == 2, op, "rows", "be [N, H]", list(rows.shape))
    checks.require(offsets.dim() == 1, op, "offsets", "be [E]", list(offsets.shape))
    checks.require(offsets.dtype is torch.int32, op, "offsets", "be int32", checks.name(offsets.dtype))
    _check_experts(op, offsets.shape[0], overlap, capacity)
    good = gate_up.dim() == 3 and gate_up.shape[1] % 2 == 0
    checks.require(good, op, "gate_up", "be [E/W, 2I, H]", list(gate_up.shape))
    mine, width, hidden = offsets.shape[0] // overlap.size, gate_up.shape[1], rows.shape[1]
    why = f"experts on each of {overlap.size} ranks, gate and up, last dim of rows"
    checks.shape(op, "gate_up", gate_up, (mine, width, hidden), why)
    checks.shape(op, "down", down, (mine, hidden, width // 2), "experts here, last dim of rows, half of gate_up's")
    for name, weight in (("gate_up", gate_up), ("down", down)):
        good = weight.dtype is rows.dtype
        checks.require(good, op, name, f"have rows' dtype {checks.name(rows.dtype)}", checks.name(weight.dtype))
    checks.one_of(op, "way", way, _WAYS)


@hinted
def moe_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    overlap: Overlap,
    *,
    capacity: int | None = None,
    way: Way = "auto",
) -> Tensor:
    """The weighted sum of each token's experts, which are sharded over the ranks: `dispatch`, products, `combine`.

        x         [T, H]                T tokens here
        weights   [T, k], experts [T, k]   as `moe_route` returns them
    Returns [T, H], differentiable in x, weights, gate_up and down; the other arguments as in `spread_experts`.
    """
    num_experts = gate_up.shape[0] * overlap.size
    rows, offsets, positions = moe_permute(x, experts, num_experts)
    y = spread_experts(rows, offsets, gate_up, down, overlap, capacity=capacity, way=way)
    return moe_unpermute(y, positions, weights)


@torch.no_grad()
def rehearse_experts(rows: Tensor, gate_up: Tensor, down: Tensor, size: int) -> None:
    """Launch on meta tensors the kernels of `spread_experts` on each of `size` ranks, to record them.

    rows [N, H]: as many as a rank sends; gate_up [E, 2I, H], down [E, H, I]: all experts'.
    """
    # shapes stand in for the sizes that routing will decide
    each, share = gate_up.shape[0] // size, max(1, rows.shape[0] // size)
    for count in sorted({each, each // 2, each - each // 2} - {0}):
        up, out, part = gate_up[:count], down[:count], rows[: max(1, share * count // each)]
        ends = torch.empty(count, dtype=torch.int32, device=rows.device)
        z = grouped_gemm(part, up, ends)
        a = gated_activation(z, "swiglu")
        y = grouped_gemm(a, out, ends)
        grouped_gemm_dgrad(y, out, ends)
        grouped_gemm_dgrad(z, up, ends)
        expert_positions = torch.empty((part.shape[0], 1), dtype=torch.int64, device=rows.device)
        sorted_y, sorted_a, sorted_z, sorted_x = (moe_unpermute(t, expert_positions) for t in (y, a, z, part))
        grouped_gemm_wgrad(sorted_y, sorted_a, ends)
        grouped_gemm_wgrad(sorted_z, sorted_x, ends)
