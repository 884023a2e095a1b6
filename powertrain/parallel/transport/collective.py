"""Transport over torch.distributed, NCCL or gloo: sends one peer at a time, or a collective before the product."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from powertrain.parallel.transport.base import (
    AllGatherHandle,
    AllToAllHandle,
    ReduceScatterHandle,
    RowCounts,
    SplitSizes,
    Transport,
    on_gpus,
)
from powertrain.parallel.transport.heartbeat import CollectiveMismatch, Heartbeat, compare_calls
from powertrain.parallel.transport.kernels import sum_parts
from powertrain.parallel.transport.protocol import DISPATCH

# their names from torch 2.13 on
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class CollectiveTransport(Transport):
    """Over torch.distributed: NCCL for CUDA tensors, gloo for the CPU's."""

    name = "pipelined"

    def __init__(self, group: dist.ProcessGroup, *, sequential: bool = False, debug: bool = False) -> None:
        self.group, self.debug = group, debug
        self.rank, self.size = group.rank(), group.size()
        self.on_gpus = on_gpus(group)
        self.peers = Heartbeat(group)
        if sequential:
            self.name = "sequential"

    def compare(self, op: str, counts: Sequence[int], operands: Sequence[Tensor | None]) -> None:
        if not self.debug:
            return
        shapes = [None if t is None else [*t.shape, str(t.dtype), *_backward_of(t)] for t in operands]
        compare_calls(f"call {self.peers.calls}: {op}, rows {list(counts)}, operands {shapes}", self.group)

    def _agree(self, call: str, x: Tensor, rows: RowCounts) -> None:
        """`_compare_on_cpu` of a call over rows that every rank has a share of."""
        self._compare_on_cpu(f"{call} of {[rows.total, *x.shape[1:]]}", x, f"rows {list(rows.counts)}")

    def _agree_splits(self, call: str, x: Tensor, splits: SplitSizes, width: int) -> None:
        """`_compare_on_cpu` of a call that takes other rows to each rank."""
        self._compare_on_cpu(
            f"{call} of rows of {width}", x, f"rows from each rank to each {list(map(list, splits.rows))}"
        )

    def _compare_on_cpu(self, call: str, x: Tensor, rows: str) -> None:
        """On the CPU, raise CollectiveMismatch where sizes differ: gloo would end the process, not the call."""
        if x.is_cuda or self.size == 1:
            return
        where = f"{call}{in_layer(self.layer)}"
        with self.peers.waiting(where):
            try:
                compare_calls(f"{call} {x.dtype}, {rows}{in_layer(self.layer)}", self.group)
            except CollectiveMismatch:
                raise
            except (RuntimeError, dist.DistError) as error:
                raise self.peers.lost(where, error) from error

    def gather(self, shard: Tensor, rows: RowCounts, *, keep: bool) -> AllGatherHandle:
        self._agree("all-gather", shard, rows)
        # collectives of torch.distributed want equal parts
        if self.name == "sequential" and rows.even:
            return Collected(self, shard, rows)
        return _SentAllGather(self, shard, rows, keep)

    def scatter(self, like: Tensor, rows: RowCounts, width: int) -> ReduceScatterHandle:
        self._agree("reduce-scatter", like[:0, :1].expand(0, width), rows)
        return _SentReduceScatter(self, like, rows, width)

    def all_gather(self, shard: Tensor, rows: RowCounts) -> Tensor:
        if not rows.even:
            return all_gather_by_handle(self, shard, rows)
        self._agree("all-gather", shard, rows)
        whole = shard.new_empty((rows.total, *shard.shape[1:]))
        with self.waiting("all-gather", whole):
            _all_gather(whole, shard.contiguous(), group=self.group)
        return whole

    def reduce_scatter(self, parts: Tensor, rows: RowCounts) -> Tensor:
        if not rows.even:
            return reduce_scatter_by_handle(self, parts, rows)
        self._agree("reduce-scatter", parts, rows)
        local_rows = parts.new_empty((rows.counts[self.rank], *parts.shape[1:]))
        with self.waiting("reduce-scatter", parts):
            _reduce_scatter(local_rows, parts.contiguous(), group=self.group)
        return local_rows

    def all_to_all_async(self, use: int, like: Tensor, splits: SplitSizes, width: int) -> AllToAllHandle:
        self._agree_splits("all-to-all, one rank at a time,", like, splits, width)
        return _SentAllToAll(self, like, splits, width)

    def all_to_all(self, rows: Tensor, splits: SplitSizes) -> Tensor:
        self._agree_splits("all-to-all", rows, splits, rows.shape[1])
        received = splits.received(self.rank)
        whole = rows.new_empty((sum(received), *rows.shape[1:]))
        with self.waiting("all-to-all", whole):
            dist.all_to_all_single(
                whole, rows.contiguous(), list(received), list(splits.sent(self.rank)), group=self.group
            )
        return whole

    def close(self) -> None:
        self.peers.close()

    def detach(self) -> None:
        self.peers.close()
        self.__dict__.pop("group", None)

    @contextmanager
    def waiting(self, op: str, x: Tensor) -> Iterator[None]:
        """Context of a call whose host waits for other ranks: logs late ranks, names lost ones if the call fails.

        For CUDA tensors it does nothing but count: their streams wait, not the host.
        """
        self.peers.calls += 1
        # a timer around each call made small calls on GPUs up to four times slower (docs/log/parallel.md)
        if x.is_cuda:
            yield
            return
        op = f"{op} of {list(x.shape)}{in_layer(self.layer)}"
        with self.peers.waiting(op):
            try:
                yield
            except (RuntimeError, dist.DistError) as error:
                raise self.peers.lost(op, error) from error

    def exchange(self, send: Tensor, to: int, receive: Tensor, source: int) -> list[dist.Work]:
        """Start to send one tensor and to receive another; ranks within the group."""
        ops = []
        # of empty tensors both sides know, and neither posts anything
        if send.numel():
            ops.append(dist.P2POp(dist.isend, send, group=self.group, group_peer=to))
        if receive.numel():
            ops.append(dist.P2POp(dist.irecv, receive, group=self.group, group_peer=source))
        try:
            return dist.batch_isend_irecv(ops) if ops else []
        except (RuntimeError, dist.DistError) as error:  # gloo finds out here that a peer went before
            message = f"{list(send.shape)} to rank {to} of the group{in_layer(self.layer)}"
            raise self.peers.lost(message, error) from error


def in_layer(layer: str) -> str:
    return f" in {layer}" if layer else ""


def _backward_of(operand: Tensor) -> list[str]:
    """Which gradients ranks need: a difference would lead to different calls in backward."""
    return ["with gradient"] if torch.is_grad_enabled() and operand.requires_grad else []


def all_gather_by_handle(transport: Transport, shard: Tensor, rows: RowCounts) -> Tensor:
    """All rows by an AllGatherHandle, for uneven rows or transports without a collective.

    Copied out: the next call overwrites the handle's receive buffer.
    """
    gathering, whole = transport.gather(shard, rows, keep=False), shard.new_empty((rows.total, *shard.shape[1:]))
    parts = rows.split(whole)
    for rank in gathering.order:
        parts[rank].copy_(gathering.wait(rank))
    gathering.finish([whole])
    return whole


def reduce_scatter_by_handle(transport: Transport, parts: Tensor, rows: RowCounts) -> Tensor:
    """The sum of all ranks' parts for this one by a ReduceScatterHandle."""
    scattering = transport.scatter(parts, rows, parts.shape[1])
    for rank in scattering.order:
        scattering.part(rank).copy_(parts[rows.of(rank)])
        scattering.send(rank)
    return scattering.reduce()


def all_to_all_by_handle(transport: Transport, rows: Tensor, splits: SplitSizes) -> Tensor:
    """`Transport.all_to_all` by an AllToAllHandle."""
    handle = transport.all_to_all_async(DISPATCH, rows, splits, rows.shape[1])
    parts = rows.split(splits.sent(transport.rank))
    for rank in [transport.rank, *transport.send_order()]:
        handle.send(rank, parts[rank])
    for rank in handle.order:
        handle.wait(rank)
    handle.finish([handle.whole])
    return handle.whole


class Collected(AllGatherHandle):
    """The result of one collective, complete at once: the baseline."""

    def __init__(self, transport: Transport, shard: Tensor, rows: RowCounts) -> None:
        self.order, self.whole = range(transport.size), transport.all_gather(shard, rows)
        self.parts = rows.split(self.whole)

    def wait(self, rank: int) -> Tensor:
        return self.parts[rank]


class _SentAllGather(AllGatherHandle):
    """Step i sends to rank - i and receives from rank + i, so that no two ranks send to the same one at once."""

    def __init__(self, transport: CollectiveTransport, shard: Tensor, rows: RowCounts, keep: bool) -> None:
        self.transport, self.shard, self.rows, self.rank = transport, shard.contiguous(), rows, transport.rank
        self.order = [(transport.rank + step) % transport.size for step in range(transport.size)]
        self.whole = shard.new_empty((rows.total, *shard.shape[1:]))
        self.works: dict[int, list[dist.Work]] = {}
        for step, source in enumerate(self.order[1:], start=1):
            to = (transport.rank - step) % transport.size
            # all are posted before the first product, which hides them
            self.works[source] = transport.exchange(self.shard, to, self.whole[rows.of(source)], source)
        if keep:
            self.whole[rows.of(self.rank)] = shard

    def wait(self, rank: int) -> Tensor:
        if rank == self.rank:
            return self.shard
        with self.transport.waiting("all-gather", self.whole):
            for work in self.works[rank]:
                work.wait()
        return self.whole[self.rows.of(rank)]


class _SentReduceScatter(ReduceScatterHandle):
    def __init__(self, transport: CollectiveTransport, like: Tensor, rows: RowCounts, width: int) -> None:
        self.transport, self.rows, self.rank = transport, rows, transport.rank
        self.order = [(transport.rank + step) % transport.size for step in range(1, transport.size + 1)]
        self.recv_buffer = like.new_empty((transport.size, rows.counts[self.rank], width))
        self.parts = {rank: like.new_empty((rows.counts[rank], width)) for rank in self.order[:-1]}
        # its own part is computed where it is summed: no copy
        self.parts[self.rank] = self.recv_buffer[self.rank]
        self.works: list[dist.Work] = []

    def part(self, rank: int) -> Tensor:
        return self.parts[rank]

    def send(self, rank: int) -> None:
        if rank == self.rank:
            return
        # the mirror rank sends here in this step, so each send has its receive
        source = (2 * self.rank - rank) % self.transport.size
        self.works += self.transport.exchange(self.parts[rank], rank, self.recv_buffer[source], source)

    def reduce(self, bias: Tensor | None = None) -> Tensor:
        with self.transport.waiting("reduce-scatter", self.recv_buffer):
            for work in self.works:
                work.wait()
        # in the order of ranks, not of arrival: the same bits every time
        return sum_parts(self.recv_buffer, bias)


class _SentAllToAll(AllToAllHandle):
    """A send to the rank at distance d is paired with a receive from the rank at distance -d, on all ranks."""

    def __init__(self, transport: CollectiveTransport, like: Tensor, splits: SplitSizes, width: int) -> None:
        self.transport, self.rank = transport, transport.rank
        self.order = [self.rank, *transport.receive_order()]
        received = splits.received(self.rank)
        self.whole = like.new_empty((sum(received), width))
        self.parts = self.whole.split(received)
        self.works: dict[int, list[dist.Work]] = {}
        self.sent: list[Tensor] = []

    def send(self, rank: int, rows: Tensor) -> None:
        if rank == self.rank:
            self.parts[rank].copy_(rows)
            return
        source = (2 * self.rank - rank) % self.transport.size
        self.works[source] = self.transport.exchange(rows, rank, self.parts[source], source)
        # keeps the tensor alive until the send completes
        self.sent.append(rows)

    def wait(self, rank: int) -> Tensor:
        if rank == self.rank:
            return self.parts[rank]
        with self.transport.waiting("all-to-all", self.whole):
            for work in self.works[rank]:
                work.wait()
        return self.parts[rank]
