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

With a `wire` rows go to their experts in FP8 (powertrain/parallel/fp8_rows.py), about half the bytes. Each rank rounds
its rows before they are sent; the experts compute with the rounded rows, the bits of sending first and rounding there:

    rows = rounded(x, once for each of its experts)        drows = the gradient of the rounded rows, in their dtype

Results, and everything in backward, are sent in the rows' dtype.

Sources: Lepikhin et al., GShard, arXiv:2006.16668 (all-to-all, capacity); Gale et al., MegaBlocks, arXiv:2211.15841
(dropless, grouped products).
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.activations import gated_activation
from powertrain.ops.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad
from powertrain.ops.moe import moe_permute, moe_unpermute
from powertrain.parallel.expert_routes import ExpertRows, Route
from powertrain.parallel.fp8_rows import FP8Rows, check_wire
from powertrain.parallel.overlap import Overlap, find
from powertrain.parallel.transport.base import SplitSizes
from powertrain.parallel.transport.protocol import COMBINE, DISPATCH
from powertrain.quant.recipe import Block, Row
from powertrain.runtime import checks
from powertrain.runtime.dispatch import cast_by_autocast
from powertrain.runtime.nodes import ON_ONE_RANK, once_differentiable, refuse_graph
from powertrain.runtime.positional import hinted

Way = Literal["auto", "overlapped", "sequential"]
_WAYS: tuple[Way, ...] = ("auto", "overlapped", "sequential")
# mean rows of an expert from one rank below which products of one rank's rows are mostly padding of the 128-row tile
_MIN_ROWS_PER_EXPERT = 128
# bytes sent by a rank below which backward's sorting and many launches cost more than they hide. With backward on
# four H200: 940 MB 31.8 ms, in sequence 36.4; 268 MB 10.9 ms, in sequence 9.3 (forward alone 3.4 and 4.1)
_MIN_BYTES_WITH_GRADIENTS = 512 << 20


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, splits: SplitSizes, overlap: Overlap, format: FP8Rows | None) -> Tensor:
        ctx.saved_splits = splits.back, overlap
        transport = find(overlap.key).transport
        if format is None:
            return transport.all_to_all(rows, splits)
        return format.unpack(transport.all_to_all(format.pack(rows), splits))

    @staticmethod
    @once_differentiable("expert parallelism", ON_ONE_RANK)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back, overlap = ctx.saved_splits
        return find(overlap.key).transport.all_to_all(grad, back), None, None, None


class _Rounded(torch.autograd.Function):
    """Rounds rows to FP8 and back, as sending them in FP8 would; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, format: FP8Rows) -> Tensor:
        return format.unpack(format.pack(rows))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _format(wire: Row | Block | None, rows: Tensor) -> FP8Rows | None:
    return None if wire is None else FP8Rows(wire, rows.shape[1], rows.dtype)


class Dispatched(NamedTuple):
    """rows [n, H]: all ranks' for this rank's experts, sorted by expert, then by source; offsets [E/W] int32, each
    expert's end, as `grouped_gemm` takes it: rows behind the last belong to none. The rest is for `combine`."""

    rows: Tensor
    offsets: Tensor
    positions: Tensor
    expert_positions: Tensor
    route: Route


def _dispatch_rows(
    rows: Tensor, positions: Tensor, route: Route, overlap: Overlap, wire: Row | Block | None
) -> Dispatched:
    received = _AllToAll.apply(route.pad(rows), route.splits, overlap, _format(wire, rows))
    expert_positions, offsets = route.by_expert(overlap.rank)
    return Dispatched(moe_unpermute(received, _inverse(expert_positions)), offsets, positions, expert_positions, route)


def _combine_rows(rows: Tensor, dispatched: Dispatched, overlap: Overlap) -> Tensor:
    route = dispatched.route
    sent = moe_unpermute(rows, dispatched.expert_positions)
    return route.unpad(_AllToAll.apply(sent, route.splits.back, overlap, None))


def _inverse(positions: Tensor) -> Tensor:
    """The inverse permutation of [n, 1] positions: `moe_unpermute` by it sorts rows, by `positions` restores them."""
    rows = torch.arange(len(positions), device=positions.device)[:, None]
    return torch.empty_like(positions).scatter_(0, positions, rows)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def dispatch(
    x: Tensor,
    experts: Tensor,
    num_experts: int,
    overlap: Overlap,
    *,
    capacity: int | None = None,
    wire: Row | Block | None = None,
) -> Dispatched:
    """Each token's row to the ranks of its experts. Differentiable; every rank calls it.

    Shapes: T tokens here, H hidden size, k experts a token, E = num_experts, which the W ranks divide.
        x         [T, H]  as `moe_permute` takes it; T may differ between ranks, and be 0
        experts   [T, k]  int32 or int64 in [0, E), from `moe_route`
        capacity  rows from this rank to each rank, the same on all; None: as many as there are. See the module
        wire      a recipe of powertrain.quant by whose scales rows are rounded and sent: Row() or Block(); None: as
                  they are
    Returns the rows for this rank's experts; apply those to `rows` with `offsets`, then `combine`.
    Memory: this rank's T*k rows and those received, twice. Saved: indices.
    Raises ValueError naming the argument, the expected value and the given one; PeerTimeout if a rank is gone.
    """
    _check_experts("dispatch", num_experts, overlap, capacity)
    check_wire("dispatch", wire)
    rows, ends, positions = moe_permute(x, experts, num_experts)
    return _dispatch_rows(rows, positions, Route.plan(ends, rows.shape[0], overlap, capacity), overlap, wire)


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
    """Autograd function: rows in sending order -> the results of their experts."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, gate_up: Tensor, down: Tensor, route: Route, overlap: Overlap, format: FP8Rows | None
    ) -> Tensor:
        zs: list[Tensor] = []

        def product(piece: ExpertRows, x: Tensor) -> Tensor:
            x = x if format is None else format.unpack(x)
            # z is kept, the activation is recomputed from it in backward
            zs.append(grouped_gemm(x, gate_up[piece.experts], piece.ends))
            return grouped_gemm(gated_activation(zs[-1], "swiglu"), down[piece.experts], piece.ends)

        sent = rows if format is None else format.pack(rows)
        y, received, _ = _exchange_experts(sent, rows, route, overlap, product)
        # received in FP8, rows are kept in FP8
        ctx.saved_route = route, overlap, format
        ctx.save_for_backward(received, gate_up, down, *zs)
        return y

    @staticmethod
    @once_differentiable("expert parallelism", ON_ONE_RANK)
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # received rows are saved, and no graph leads to the rows that were sent
        refuse_graph(ctx, "expert parallelism", ON_ONE_RANK)
        route, overlap, format = ctx.saved_route
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
                rows = x if format is None else format.unpack(x)
                dgate_up = grouped_gemm_wgrad(dz, moe_unpermute(rows, order), offsets)
            return dgate_up, ddown

        dy = dy.contiguous()
        dx, _, grads = _exchange_experts(dy, dy, route, overlap, product, weight_grads)
        return dx, *grads, None, None, None


def _in_order(tensors: list[Tensor], pieces: list[ExpertRows]) -> Tensor:
    """Each piece's tensor, concatenated in the order of the rows received."""
    # by source, then by rows: the order in which they lie in `received`
    order = sorted(range(len(pieces)), key=lambda i: (pieces[i].source, pieces[i].rows.start))
    return torch.cat([tensors[i] for i in order])


def _exchange_experts(
    rows: Tensor, like: Tensor, route: Route, overlap: Overlap, product: Any,
    meanwhile: Any = lambda received, pieces: None,
) -> tuple[Tensor, Tensor, Any]:  # fmt: skip
    """product(piece, its rows) of all ranks' rows, returned to them; the rows received; the result of `meanwhile`.

    like: a tensor with the results' dtype and width.
    `meanwhile(received, pieces)` is called when the last results are on their way.
    """
    transport, splits = find(overlap.key).transport, route.splits
    dispatched = transport.all_to_all_async(DISPATCH, rows, splits, rows.shape[1])
    # both before anything is sent: a receive buffer that must grow waits for all ranks
    combined = transport.all_to_all_async(COMBINE, like, splits.back, like.shape[1])
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
    """Whether to overlap transfers with GEMMs; decided from numbers that are equal on every rank."""
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
    wire: Row | Block | None = None,
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
        wire      a recipe of powertrain.quant: rows are rounded to FP8 by its scales, and sent so: Row(), one scale a
                  row, or Block(), one for 128 elements. None: as they are
    Returns [N, H]. Every rank calls it, and its backward, in the same order, and wants the same gradients.
    Numerics: every product accumulates in float32 and is rounded to rows' dtype, the weights' gradients over all ranks'
        rows at once. Deterministic: independent of arrival order. With wire: those of rows rounded by
        `fp8_quantize` (e4m3; beyond powers of two, once more to rows' dtype), whose gradient is taken as that of rows.
    Memory: the rows received, [n, H], and their gate and up, [n, 2I], are saved; backward sorts two more such pairs.
        With wire and overlapped, received rows are saved in one byte an element.
    Synchronization: without capacity the host reads W*W counts and waits for the inputs of `offsets`; backward: none.
    Not traced: torch.compile breaks the graph here. Double backward is not implemented and says so.
    Raises ValueError naming the argument, the expected value and the given one; PeerTimeout if a rank is gone.
    """
    op = "spread_experts"
    rows, gate_up, down = cast_by_autocast(rows, gate_up, down)
    _check(op, rows, offsets, gate_up, down, overlap, capacity, way)
    check_wire(op, wire)
    format = _format(wire, rows)
    # one rank with exact counts sends nothing
    if overlap.size == 1 and capacity is None:
        return _mlp(rows if format is None else _Rounded.apply(rows, format), gate_up, down, offsets)
    about = f"{op}, way {way}" + ("" if wire is None else f", wire {wire}")
    overlap.transport.compare(about, (capacity or 0,), [rows[:0], gate_up, down])
    route = Route.plan(offsets, rows.shape[0], overlap, capacity)
    wants_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (rows, gate_up, down))
    row_bytes = rows.shape[1] * rows.element_size()
    if _overlaps(way, route, overlap, offsets.shape[0], row_bytes, wants_gradients):
        return route.unpad(_Overlapped.apply(route.pad(rows).contiguous(), gate_up, down, route, overlap, format))
    sent = _dispatch_rows(rows, offsets, route, overlap, wire)
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
    local_experts, width, hidden = offsets.shape[0] // overlap.size, gate_up.shape[1], rows.shape[1]
    why = f"experts on each of {overlap.size} ranks, gate and up, last dim of rows"
    checks.shape(op, "gate_up", gate_up, (local_experts, width, hidden), why)
    checks.shape(
        op, "down", down, (local_experts, hidden, width // 2), "experts here, last dim of rows, half of gate_up's"
    )
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
    wire: Row | Block | None = None,
) -> Tensor:
    """The weighted sum of each token's experts, which are sharded over the ranks: `dispatch`, products, `combine`.

        x         [T, H]                T tokens here
        weights   [T, k], experts [T, k]   as `moe_route` returns them
    Returns [T, H], differentiable in x, weights, gate_up and down; the other arguments as in `spread_experts`.
    """
    num_experts = gate_up.shape[0] * overlap.size
    rows, offsets, positions = moe_permute(x, experts, num_experts)
    y = spread_experts(rows, offsets, gate_up, down, overlap, capacity=capacity, way=way, wire=wire)
    return moe_unpermute(y, positions, weights)


@torch.no_grad()
def record_experts(rows: Tensor, gate_up: Tensor, down: Tensor, size: int, wire: Row | Block | None = None) -> None:
    """Launch on meta tensors the kernels of `spread_experts` on each of `size` ranks, to record them.

    rows [N, H]: as many as a rank sends; gate_up [E, 2I, H], down [E, H, I]: all experts'.
    """
    # shapes stand in for the sizes that routing will decide
    each, share = gate_up.shape[0] // size, max(1, rows.shape[0] // size)
    if (format := _format(wire, rows)) is not None:
        format.unpack(format.pack(rows))
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
