"""Transfers of context-parallel ranks: chunks in a ring or from their owners, tokens exchanged for heads.

Point to point only, in one order on all ranks, one peer at a time, so that ranks may have different numbers of tokens.
NCCL's sends run on a stream of its own: they are issued before the attention that hides them, and waited for after it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powertrain.parallel.context.sharding import Sharding
from powertrain.parallel.transport.heartbeat import CollectiveMismatch, Heartbeat, compare_calls
from powertrain.runtime.nodes import ON_ONE_RANK, once_differentiable


class Transfer:
    """Messages in flight; keeps their tensors alive."""

    def __init__(self, works: list[dist.Work], *tensors: Tensor | None, peers: "ContextGroup | None" = None) -> None:
        self._works, self._tensors, self._peers = works, tensors, peers

    def wait(self) -> None:
        """On a GPU: the current stream waits, not the host."""
        with nullcontext() if self._peers is None else self._peers.waiting():
            for work in self._works:
                work.wait()
        # the buffers may be reused from here on
        self._works, self._tensors = [], ()


class ContextGroup:
    """A process group whose ranks are addressed by their index in the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._connected: set[torch.device] = set()
        # on a CPU, from the first call on
        self._heartbeat: Heartbeat | None = None
        self._call = ""

    def begin(self, call: str, words: str | None = None) -> None:
        """Register the start of a collective call that waits on the host, as gloo's transfers of CPU tensors do.

        words   compared over the ranks, because gloo ends the process if sizes differ; raises CollectiveMismatch
        """
        # collective, as the call itself is
        self._heartbeat = self._heartbeat or Heartbeat(self.group)
        self._heartbeat.calls += 1
        self._call = call
        if words is not None:
            with self.waiting():
                compare_calls(words, self.group)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of a wait in a call that has begun: late ranks are logged, lost ones named."""
        if self._heartbeat is None:
            yield
            return
        with self._heartbeat.waiting(self._call):
            try:
                yield
            except CollectiveMismatch:
                raise
            except (RuntimeError, dist.DistError) as error:
                raise self._heartbeat.lost(self._call, error) from error

    def connect(self, device: torch.device) -> None:
        """Connect all ranks: NCCL wants each of them there at the first message, even those that send none."""
        # point-to-point NCCL connects lazily, and a rank that never sends would be missing
        if device not in self._connected and device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)
        self._connected.add(device)

    def exchange(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> Transfer:
        """Send one tensor, receive another, both contiguous; None or empty: nothing."""
        operations = []
        if sent is not None and sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=to))
        if received is not None and received.numel():
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=source))
        # batched: NCCL runs both directions at once and cannot deadlock
        with self.waiting():
            works = dist.batch_isend_irecv(operations) if operations else []
        return Transfer(works, sent, received, peers=self)


class Chunk:
    """Keys and values of one rank in one buffer, so that they are one message."""

    def __init__(self, flat: Tensor, key: Tensor, value: Tensor) -> None:
        self.flat, self.key, self.value = flat, key, value

    @staticmethod
    def of(key: Tensor, value: Tensor) -> "Chunk":
        # one message per rank: two small ones would start twice
        flat = torch.cat([key.reshape(-1), value.reshape(-1)])
        return Chunk._over(flat, key.shape, value.shape)

    def of_rows(self, dim: int, rows: int, dtype: torch.dtype | None = None) -> "Chunk":
        """An empty chunk with another number of rows."""
        shapes = [torch.Size((*x.shape[:dim], rows, *x.shape[dim + 1 :])) for x in (self.key, self.value)]
        flat = self.flat.new_empty(sum(shape.numel() for shape in shapes), dtype=dtype)
        return Chunk._over(flat, *shapes)

    def like(self, dtype: torch.dtype | None = None) -> "Chunk":
        """An empty chunk with the same rows."""
        return Chunk._over(torch.empty_like(self.flat, dtype=dtype), self.key.shape, self.value.shape)

    @staticmethod
    def _over(flat: Tensor, key: torch.Size, value: torch.Size) -> "Chunk":
        size = key.numel()
        return Chunk(flat, flat[:size].view(key), flat[size:].view(value))


def ring_chunks(peers: ContextGroup, own: Chunk, sharding: Sharding, dim: int) -> Iterator[tuple[int, Chunk]]:
    """(its rank, chunk) of all ranks, this one first, then the preceding ones; sent on while the caller works."""
    rank, world_size = peers.rank, peers.world_size
    held = own
    for step in range(world_size):
        source = (rank - step) % world_size
        if step == world_size - 1:
            yield source, held
            return
        # the buffer of the next step is allocated before its rows are sent
        incoming = own.of_rows(dim, sharding.length((source - 1) % world_size))
        transfer = peers.exchange(held.flat, (rank + 1) % world_size, incoming.flat, (rank - 1) % world_size)
        yield source, held
        transfer.wait()
        held = incoming


def gathered_chunks(
    peers: ContextGroup, own: Chunk, sharding: Sharding, dim: int, needs: Callable[[int, int], bool]
) -> Iterator[tuple[int, Chunk]]:
    """(its rank, chunk) of all ranks that this one needs, its own first; all transfers start before the first yield.

    needs   (rank, source): whether a rank attends to keys of a source; the same on both
    """
    rank, world_size = peers.rank, peers.world_size
    incoming: list[tuple[int, Chunk | None, Transfer]] = []
    # step by step in one order on all ranks, so sends meet receives
    for step in range(1, world_size):
        to, source = (rank + step) % world_size, (rank - step) % world_size
        chunk = own.of_rows(dim, sharding.length(source)) if needs(rank, source) else None
        # the receiver asks the same question, so neither waits for a message that the other does not send
        sent = own.flat if needs(to, rank) else None
        transfer = peers.exchange(sent, to, None if chunk is None else chunk.flat, source)
        incoming.append((source, chunk, transfer))
    yield rank, own
    for source, chunk, transfer in incoming:
        transfer.wait()
        # a source that the mask hides was not sent
        if chunk is not None:
            yield source, chunk


def all_gather_rows(peers: ContextGroup, rows: Tensor, sharding: Sharding) -> Tensor:
    """All ranks' rows, concatenated in the order of ranks; `rows` is contiguous."""
    peers.connect(rows.device)
    counts = [sharding.length(r) for r in range(peers.world_size)]
    whole = rows.new_empty((sum(counts), *rows.shape[1:]))
    parts = list(whole.split(counts))
    parts[peers.rank].copy_(rows)
    transfers = []
    for step in range(1, peers.world_size):
        to, source = (peers.rank + step) % peers.world_size, (peers.rank - step) % peers.world_size
        transfers.append(peers.exchange(rows, to, parts[source], source))
    for transfer in transfers:
        transfer.wait()
    return whole


class _Exchange(torch.autograd.Function):
    """[W, n, B, c], a row of it for each rank, to [S, B, c] of all tokens in order; or the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: ContextGroup, sharding: Sharding, forwards: bool) -> Tensor:
        # the argument of backward is the opposite direction
        ctx.arguments = (peers, sharding, not forwards)
        return _gather_tokens(x, peers, sharding) if forwards else _scatter_tokens(x, peers, sharding)

    @staticmethod
    @once_differentiable("context_parallel", ON_ONE_RANK)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        peers, sharding, forwards = ctx.arguments
        if not grad.is_cuda:
            peers.begin("attention's backward by all_to_all")
        back = _gather_tokens(grad, peers, sharding) if forwards else _scatter_tokens(grad, peers, sharding)
        return back, None, None, None


def _gather_tokens(x: Tensor, peers: ContextGroup, sharding: Sharding) -> Tensor:
    counts = [sharding.length(r) for r in range(peers.world_size)]
    rows = x.new_empty((sharding.num_tokens, *x.shape[2:]))
    _all_to_all(rows, x.flatten(0, 1).contiguous(), counts, [x.shape[1]] * peers.world_size, peers)
    # arrived by ranks, ordered by position
    return rows.index_select(0, sharding.order(x.device))


def _scatter_tokens(x: Tensor, peers: ContextGroup, sharding: Sharding) -> Tensor:
    counts = [sharding.length(r) for r in range(peers.world_size)]
    order = torch.cat([sharding.indices(x.device, r) for r in range(peers.world_size)])
    own = counts[peers.rank]
    parts = x.new_empty((peers.world_size * own, *x.shape[1:]))
    _all_to_all(parts, x.index_select(0, order), [own] * peers.world_size, counts, peers)
    return parts.unflatten(0, (peers.world_size, own))


def _all_to_all(out: Tensor, x: Tensor, received: list[int], sent: list[int], peers: ContextGroup) -> None:
    with peers.waiting():
        dist.all_to_all_single(out, x, received, sent, group=peers.group)


def to_heads(peers: ContextGroup, tensors: tuple[Tensor, ...], sharding: Sharding) -> list[Tensor]:
    """Tensors [n, B, heads, channels] of this rank's tokens to [S, B, heads / W, channels], in one message a rank."""
    # a group of heads for each rank, in front: all_to_all sends blocks of the first dim
    split = [x.unflatten(2, (peers.world_size, -1)).permute(2, 0, 1, 3, 4) for x in tensors]
    widths = [x.shape[3] * x.shape[4] for x in split]
    # q, k and v side by side, with their own widths
    rows = _Exchange.apply(torch.cat([x.flatten(3) for x in split], -1), peers, sharding, True)
    return [x.unflatten(2, s.shape[3:]) for x, s in zip(rows.split(widths, -1), split, strict=True)]


def to_tokens(peers: ContextGroup, x: Tensor, sharding: Sharding) -> Tensor:
    """[S, B, heads / W, channels] of all tokens to [n, B, heads, channels] of this rank's."""
    parts = _Exchange.apply(x.flatten(2), peers, sharding, False)  # [W, n, B, heads / W * channels]
    return parts.unflatten(3, x.shape[2:]).permute(1, 2, 0, 3, 4).flatten(2, 3)
