"""How rows travel between the ranks of a group: one interface, several ways.

A *gathering* brings the other ranks' rows here while products run on those that are here already. A *scattering* takes
products to the ranks that own them while the next are made, and sums what the others sent. Whichever way they travel,
the sum is the same: partial results are rounded once to the tensors' dtype, then added in float32 in the order of the
ranks, so it does not depend on who was early. A *trading* takes other rows to each rank and brings theirs for this one.

    symmetric    NVLink, copy engines, flags in each other's memory (powertrain/parallel/transport/symmetric.py)
    pipelined    sends and receives, one peer at a time (NCCL or gloo): this file
    sequential   a collective, then the product (NCCL or gloo): this file; the baseline of the others
    simulated    ranks that are threads of one process (powertrain/parallel/transport/simulated.py)
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from powertrain.parallel.cost_model import Choice, Rates
from powertrain.parallel.transport.heartbeat import CollectiveMismatch, Peers
from powertrain.parallel.transport.protocol import DISPATCH
from powertrain.parallel.transport.sum_parts import sum_parts

# named so from torch 2.13 on
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Rows(NamedTuple):
    """Which rows of a gathered tensor are whose: rank r has `counts[r]` of them, after those of the ranks before it."""

    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def even(self) -> bool:
        return min(self.counts) == max(self.counts)

    def of(self, rank: int) -> slice:
        start = sum(self.counts[:rank])
        return slice(start, start + self.counts[rank])

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        """Every rank's rows of a tensor that has all of them."""
        return whole.split(self.counts)


class Gathering(ABC):
    """All ranks' rows, on their way.

    order    the ranks as their rows come, this one first
    whole    [rows.total, K]: complete, this rank's own rows included, once `wait` was called for every rank and if
             the gathering was asked to keep it
    """

    order: Sequence[int]
    whole: Tensor

    @abstractmethod
    def wait(self, rank: int) -> Tensor:
        """That rank's rows [rows.counts[rank], K]; the current stream waits until they are here."""

    def finish(self, outputs: Sequence[Tensor]) -> None:  # noqa: B027
        """After the last product, whose results are given: what this holds may be used again."""


class Scattering(ABC):
    """Partial results [rows.total, N], on their way to the ranks that own the rows.

    order    the ranks to make parts for, this one last
    """

    order: Sequence[int]

    @abstractmethod
    def part(self, rank: int) -> Tensor:
        """Where to write the product for that rank, [rows.counts[rank], N]."""

    @abstractmethod
    def send(self, rank: int) -> None:
        """The part for that rank is written on the current stream: take it there."""

    @abstractmethod
    def reduce(self, bias: Tensor | None = None) -> Tensor:
        """The sum of all ranks' parts for this one, [rows.counts[own], N], with bias [N] added."""


class Traffic(NamedTuple):
    """How many rows go from whom to whom: rows[source][target], the same on every rank."""

    rows: tuple[tuple[int, ...], ...]

    def sent(self, rank: int) -> tuple[int, ...]:
        return self.rows[rank]

    def received(self, rank: int) -> tuple[int, ...]:
        return tuple(row[rank] for row in self.rows)

    @property
    def back(self) -> "Traffic":
        """The same rows on their way back."""
        return Traffic(tuple(zip(*self.rows, strict=True)))


class Trading(ABC):
    """Rows for each rank and each rank's for this one, on their way.

    order    the ranks as their rows come, this one first
    whole    [rows received, width], in the order of the ranks: complete once `wait` was called for each
    """

    order: Sequence[int]
    whole: Tensor

    @abstractmethod
    def send(self, rank: int, rows: Tensor) -> None:
        """Take rows, contiguous and written on the current stream, there. Every rank in turn: all take the same
        step, in `outwards` or in `order`, once for each; this rank's own rows whenever one likes."""

    @abstractmethod
    def wait(self, rank: int) -> Tensor:
        """That rank's rows, a part of `whole`; the current stream waits until they are here."""

    def finish(self, outputs: Sequence[Tensor]) -> None:  # noqa: B027
        """All was sent and waited for, and outputs are made of it: what this holds may be used again."""


class Transport(ABC):
    """The ways of one group. Calls come in the same order on every rank."""

    name: str
    rank: int
    size: int
    on_gpus: bool = False
    layer: str = ""  # whose call it is, for messages

    @abstractmethod
    def gather(self, shard: Tensor, rows: Rows, *, keep: bool) -> Gathering:
        """Start to bring every rank's shard [rows.counts[rank], K] here."""

    @abstractmethod
    def scatter(self, like: Tensor, rows: Rows, width: int) -> Scattering:
        """Get ready to send parts [rows.counts[rank], width] of like's dtype and device."""

    @abstractmethod
    def all_gather(self, shard: Tensor, rows: Rows) -> Tensor:
        """Every rank's rows, [rows.total, K], by one collective."""

    @abstractmethod
    def reduce_scatter(self, parts: Tensor, rows: Rows) -> Tensor:
        """parts [rows.total, N] -> this rank's rows of their sum, by one collective."""

    @abstractmethod
    def trade(self, use: int, like: Tensor, traffic: Traffic, width: int) -> Trading:
        """Get ready to send and receive rows [.., width] of like's dtype and device; use: DISPATCH or COMBINE."""

    @abstractmethod
    def all_to_all(self, rows: Tensor, traffic: Traffic) -> Tensor:
        """rows [rows sent, width], in the order of their targets -> those received, in that of their sources, by one
        collective."""

    def outwards(self) -> list[int]:
        """The other ranks, the next one first: no two ranks send to the same one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def inwards(self) -> list[int]:
        """The other ranks as their rows come when all send outwards."""
        return [(self.rank - step) % self.size for step in range(1, self.size)]

    def rates(self) -> Rates | None:
        """How fast this device and its links are, where that is known."""
        return None

    def fused(self, choice: Choice, x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> Any:
        """The kernels of powertrain/parallel/transport/symmetric_fused.py, if they were chosen and take these operands; else None."""
        return None

    def compare(  # noqa: B027
        self, op: str, counts: Sequence[int], operands: Sequence[Tensor | None]
    ) -> None:
        """In debug mode: raise CollectiveMismatch unless every rank makes this very call now."""

    def abandon(self, error: Exception) -> None:  # noqa: B027
        """A call failed on this rank before it ended, if it had begun."""

    def let_go(self) -> None:  # noqa: B027
        """The interpreter ends: end threads, hold no process group, wait for nobody."""

    def close(self) -> None:  # noqa: B027
        """Give back memory and threads."""


def on_gpus(group: dist.ProcessGroup) -> bool:
    """Whether a group's tensors may be CUDA's, here."""
    return torch.cuda.is_available() and torch.device("cuda") in group._device_types


class CollectiveTransport(Transport):
    """Over torch.distributed: NCCL for CUDA tensors, gloo for the CPU's."""

    name = "pipelined"

    def __init__(self, group: dist.ProcessGroup, *, sequential: bool = False, debug: bool = False) -> None:
        self.group, self.debug = group, debug
        self.rank, self.size = group.rank(), group.size()
        self.on_gpus = on_gpus(group)
        self.peers = Peers(group)
        if sequential:
            self.name = "sequential"

    def compare(self, op: str, counts: Sequence[int], operands: Sequence[Tensor | None]) -> None:
        if not self.debug:
            return
        shapes = [None if t is None else [*t.shape, str(t.dtype), *_backward_of(t)] for t in operands]
        mine = f"call {self.peers.calls}: {op}, rows {list(counts)}, operands {shapes}"
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine, group=self.group)
        other = next((rank for rank, text in enumerate(everyone) if text != everyone[0]), None)
        if other is not None:
            raise CollectiveMismatch(
                f"ranks must make the same calls: rank 0 makes {everyone[0]}; rank {other} makes {everyone[other]}"
            )

    def gather(self, shard: Tensor, rows: Rows, *, keep: bool) -> Gathering:
        if self.name == "sequential" and rows.even:
            return Collected(self, shard, rows)
        return _SentGathering(self, shard, rows, keep)

    def scatter(self, like: Tensor, rows: Rows, width: int) -> Scattering:
        return _SentScattering(self, like, rows, width)

    def all_gather(self, shard: Tensor, rows: Rows) -> Tensor:
        if not rows.even:
            return gather_all(self, shard, rows)
        whole = shard.new_empty((rows.total, *shard.shape[1:]))
        with self.waiting("all-gather", whole):
            _all_gather(whole, shard.contiguous(), group=self.group)
        return whole

    def reduce_scatter(self, parts: Tensor, rows: Rows) -> Tensor:
        if not rows.even:
            return scatter_all(self, parts, rows)
        mine = parts.new_empty((rows.counts[self.rank], *parts.shape[1:]))
        with self.waiting("reduce-scatter", parts):
            _reduce_scatter(mine, parts.contiguous(), group=self.group)
        return mine

    def trade(self, use: int, like: Tensor, traffic: Traffic, width: int) -> Trading:
        return _SentTrading(self, like, traffic, width)

    def all_to_all(self, rows: Tensor, traffic: Traffic) -> Tensor:
        received = traffic.received(self.rank)
        whole = rows.new_empty((sum(received), *rows.shape[1:]))
        with self.waiting("all-to-all", whole):
            dist.all_to_all_single(
                whole, rows.contiguous(), list(received), list(traffic.sent(self.rank)), group=self.group
            )
        return whole

    def close(self) -> None:
        self.peers.close()

    def let_go(self) -> None:
        self.peers.close()
        self.__dict__.pop("group", None)

    @contextmanager
    def waiting(self, what: str, x: Tensor) -> Iterator[None]:
        """Around a call that waits for others' x on the host: says for whom after a while, and who is gone if it fails.

        CUDA's streams wait, not the host: nothing is said of them here.
        """
        self.peers.calls += 1
        if x.is_cuda:
            yield
            return
        what = f"{what} of {list(x.shape)}{in_layer(self.layer)}"
        with self.peers.waiting(what):
            try:
                yield
            except (RuntimeError, dist.DistError) as error:
                raise self.peers.lost(what, error) from error

    def exchange(self, send: Tensor, to: int, receive: Tensor, source: int) -> list[dist.Work]:
        """Start to send one tensor and to receive another; ranks within the group."""
        ops = []
        if send.numel():
            ops.append(dist.P2POp(dist.isend, send, group=self.group, group_peer=to))
        if receive.numel():
            ops.append(dist.P2POp(dist.irecv, receive, group=self.group, group_peer=source))
        try:
            return dist.batch_isend_irecv(ops) if ops else []
        except (RuntimeError, dist.DistError) as error:  # gloo finds out here that a peer went before
            what = f"{list(send.shape)} to rank {to} of the group{in_layer(self.layer)}"
            raise self.peers.lost(what, error) from error


def in_layer(layer: str) -> str:
    return f" in {layer}" if layer else ""


def _backward_of(operand: Tensor) -> list[str]:
    """What ranks' backward depends on: those that want other gradients make other calls."""
    return ["with gradient"] if torch.is_grad_enabled() and operand.requires_grad else []


def gather_all(transport: Transport, shard: Tensor, rows: Rows) -> Tensor:
    """All rows by a gathering, for groups whose collective does not serve; in memory of their own.

    Where a gathering brings them is used again.
    """
    gathering, whole = transport.gather(shard, rows, keep=False), shard.new_empty((rows.total, *shard.shape[1:]))
    parts = rows.split(whole)
    for rank in gathering.order:
        parts[rank].copy_(gathering.wait(rank))
    gathering.finish([whole])
    return whole


def scatter_all(transport: Transport, parts: Tensor, rows: Rows) -> Tensor:
    """The sum of all ranks' parts for this one by a scattering."""
    scattering = transport.scatter(parts, rows, parts.shape[1])
    for rank in scattering.order:
        scattering.part(rank).copy_(parts[rows.of(rank)])
        scattering.send(rank)
    return scattering.reduce()


def trade_all(transport: Transport, rows: Tensor, traffic: Traffic) -> Tensor:
    """`Transport.all_to_all` by a trading."""
    trading = transport.trade(DISPATCH, rows, traffic, rows.shape[1])
    parts = rows.split(traffic.sent(transport.rank))
    for rank in [transport.rank, *transport.outwards()]:
        trading.send(rank, parts[rank])
    for rank in trading.order:
        trading.wait(rank)
    trading.finish([trading.whole])
    return trading.whole


class Collected(Gathering):
    """What one collective brings, all at once: the baseline."""

    def __init__(self, transport: Transport, shard: Tensor, rows: Rows) -> None:
        self.order, self.whole = range(transport.size), transport.all_gather(shard, rows)
        self.parts = rows.split(self.whole)

    def wait(self, rank: int) -> Tensor:
        return self.parts[rank]


class _SentGathering(Gathering):
    """Step i sends to the rank i before and receives from the rank i behind, so that no two send to one at once."""

    def __init__(self, transport: CollectiveTransport, shard: Tensor, rows: Rows, keep: bool) -> None:
        self.transport, self.shard, self.rows, self.rank = transport, shard.contiguous(), rows, transport.rank
        self.order = [(transport.rank + step) % transport.size for step in range(transport.size)]
        self.whole = shard.new_empty((rows.total, *shard.shape[1:]))
        self.works: dict[int, list[dist.Work]] = {}
        for step, source in enumerate(self.order[1:], start=1):
            to = (transport.rank - step) % transport.size
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


class _SentScattering(Scattering):
    def __init__(self, transport: CollectiveTransport, like: Tensor, rows: Rows, width: int) -> None:
        self.transport, self.rows, self.rank = transport, rows, transport.rank
        self.order = [(transport.rank + step) % transport.size for step in range(1, transport.size + 1)]
        self.inbox = like.new_empty((transport.size, rows.counts[self.rank], width))
        self.parts = {rank: like.new_empty((rows.counts[rank], width)) for rank in self.order[:-1]}
        self.parts[self.rank] = self.inbox[self.rank]
        self.works: list[dist.Work] = []

    def part(self, rank: int) -> Tensor:
        return self.parts[rank]

    def send(self, rank: int) -> None:
        if rank == self.rank:
            return
        source = (2 * self.rank - rank) % self.transport.size
        self.works += self.transport.exchange(self.parts[rank], rank, self.inbox[source], source)

    def reduce(self, bias: Tensor | None = None) -> Tensor:
        with self.transport.waiting("reduce-scatter", self.inbox):
            for work in self.works:
                work.wait()
        return sum_parts(self.inbox, bias)


class _SentTrading(Trading):
    """With rows to a rank those from its mirror image are received: what all send outwards, or all inwards, meets."""

    def __init__(self, transport: CollectiveTransport, like: Tensor, traffic: Traffic, width: int) -> None:
        self.transport, self.rank = transport, transport.rank
        self.order = [self.rank, *transport.inwards()]
        received = traffic.received(self.rank)
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
        self.sent.append(rows)

    def wait(self, rank: int) -> Tensor:
        if rank == self.rank:
            return self.parts[rank]
        with self.transport.waiting("all-to-all", self.whole):
            for work in self.works[rank]:
                work.wait()
        return self.parts[rank]
