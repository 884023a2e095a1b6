"""Attention overlapped with the transfer of other ranks' keys: modes "ring" and "all_gather", with backward.

Forward merges one part per rank by its LSE. Backward needs only the final out and LSE: each rank receives the keys and
values again and sends their owner dk and dv in float32. In a ring, a chunk's dk and dv follow it one step later and
each rank adds its contribution; otherwise each rank sends its contribution to the owner, which adds in rank order.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.shapes import acc_dtype
from powertrain.parallel.context.block_attention import Mask, Queries, Sum, dense_blocks, gradients
from powertrain.parallel.context.point_to_point import Chunk, ContextGroup, Transfer, gathered_chunks, ring_chunks
from powertrain.parallel.context.sharding import Sharding
from powertrain.runtime.nodes import ON_ONE_RANK, once_differentiable


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        peers: ContextGroup,
        sharding: Sharding,
        mask: Mask,
        is_ring: bool,
    ) -> Tensor:
        queries = Queries(query, sharding, mask)
        for source, chunk in _chunks(peers, Chunk.of(key, value), sharding, mask, is_ring):
            queries.attend(source, chunk.key, chunk.value)
        out, lse = queries.result(value.shape[-1], sinks)
        # slopes are a tensor and must be saved as one, so the mask in ctx goes without
        ctx.save_for_backward(query, key, value, out, lse, sinks, mask.slopes)
        ctx.arguments = (peers, sharding, mask._replace(slopes=None), is_ring)
        return out

    @staticmethod
    @once_differentiable("context_parallel", ON_ONE_RANK)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sinks, slopes = ctx.saved_tensors
        peers, sharding, mask, is_ring = ctx.arguments
        mask = mask._replace(slopes=slopes)
        grad = grad.contiguous()
        if not grad.is_cuda:
            peers.begin(f"attention's backward by {'ring' if is_ring else 'all_gather'}")
        own = Chunk.of(key, value)
        dq = Sum(torch.empty_like(query, dtype=acc_dtype(query.dtype)), 0 if sharding.is_packed else 1)
        dkv = (_RingGrads if is_ring else _DirectGrads)(peers, own, sharding, mask)
        for source, chunk in _chunks(peers, own, sharding, mask, is_ring):
            share = chunk.like(dq.total.dtype)
            # written into the chunk's own buffer, which is sent as it is
            gradients(sharding, source, mask, grad, query, chunk.key, chunk.value, out, lse, dq, share.key, share.value)
            dkv.add(source, share)
        total = dkv.total()
        dsinks = None if sinks is None or not ctx.needs_input_grad[3] else _sinks_grad(grad, out, lse, sinks)
        dquery = dq.result().to(query.dtype)
        return dquery, total.key.to(key.dtype), total.value.to(value.dtype), dsinks, None, None, None, None


def _chunks(
    peers: ContextGroup, own: Chunk, sharding: Sharding, mask: Mask, is_ring: bool
) -> Iterator[tuple[int, Chunk]]:
    peers.connect(own.flat.device)
    dim = 0 if sharding.is_packed else 1
    # ring: memory for two chunks, whatever the number of ranks
    if is_ring:
        return ring_chunks(peers, own, sharding, dim)
    return gathered_chunks(peers, own, sharding, dim, lambda rank, source: _sees(sharding, rank, source, mask))


def _sees(sharding: Sharding, rank: int, source: int, mask: Mask) -> bool:
    """Whether any query of `rank` sees a key of `source`."""
    # whether two ranks share a document is not asked: most do
    return sharding.is_packed or bool(dense_blocks(sharding, source, mask, rank))


class _RingGrads:
    """dk and dv of a ring: each rank adds its share to the sum received from its predecessor, and sends it on."""

    def __init__(self, peers: ContextGroup, own: Chunk, sharding: Sharding, mask: Mask) -> None:
        self.peers, self.own, self.sharding = peers, own, sharding
        self.incoming: Chunk | None = None
        self.transfer: Transfer | None = None

    def add(self, source: int, share: Chunk) -> None:
        rank, world_size = self.peers.rank, self.peers.world_size
        if self.incoming is not None and self.transfer is not None:
            self.transfer.wait()
            # the sum is passed on in a fixed direction, so the order of additions does not depend on time
            share.flat.add_(self.incoming.flat)
        dim = 0 if self.sharding.is_packed else 1
        # the next sum has the rows of the rank before the source
        rows = self.sharding.length((source - 1) % world_size)
        self.incoming = self.own.of_rows(dim, rows, share.flat.dtype)
        self.transfer = self.peers.exchange(
            share.flat, (rank + 1) % world_size, self.incoming.flat, (rank - 1) % world_size
        )

    def total(self) -> Chunk:
        assert self.incoming is not None and self.transfer is not None
        self.transfer.wait()
        return self.incoming


class _DirectGrads:
    """dk and dv, each sent directly to the rank that owns the keys."""

    def __init__(self, peers: ContextGroup, own: Chunk, sharding: Sharding, mask: Mask) -> None:
        self.peers, self.own, self.sharding, self.mask = peers, own, sharding, mask
        self.shares: dict[int, Chunk] = {}
        self.transfers: list[Transfer] = []
        self.step = 0

    def add(self, source: int, share: Chunk) -> None:
        rank, world_size = self.peers.rank, self.peers.world_size
        if source == rank:
            self.shares[rank] = share
            return
        # also the steps of sources hidden by the mask: other ranks still exchange contributions in them
        self._exchange((rank - source) % world_size, share)

    def _exchange(self, until: int, share: Chunk | None) -> None:
        rank, world_size = self.peers.rank, self.peers.world_size
        while self.step < until:
            self.step += 1
            to, source = (rank - self.step) % world_size, (rank + self.step) % world_size
            incoming = None
            # both sides decide by the same mask, so a transfer is posted by both or by neither
            if _sees(self.sharding, source, rank, self.mask):
                incoming = self.shares[source] = self.shares[rank].like()
            sent = share.flat if share is not None and self.step == until else None
            received = None if incoming is None else incoming.flat
            self.transfers.append(self.peers.exchange(sent, to, received, source))

    def total(self) -> Chunk:
        self._exchange(self.peers.world_size - 1, None)
        for transfer in self.transfers:
            transfer.wait()
        # in rank order, so that the sum does not depend on arrival
        first, *others = (self.shares[rank] for rank in sorted(self.shares))
        for share in others:
            first.flat.add_(share.flat)
        return first


def _sinks_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """- sum over rows of exp(sink - lse) * (grad . out), per head."""
    delta = (grad.to(lse.dtype) * out).sum(-1).transpose(-1, -2)  # [B, H, n]
    shares = torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta
    return -shares.sum(-1).reshape(-1, sinks.shape[0]).sum(0).to(sinks.dtype)
