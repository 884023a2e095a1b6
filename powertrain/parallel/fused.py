"""One kernel for a whole product whose rows travel meanwhile: the Hopper GEMM of ops/hopper_gemm.py over NVLink.

Gathered: copy engines bring the peers' rows in pieces and make a flag 1 after each; the kernel starts with this rank's
own rows and waits, inside, for each piece before its first tile of it. Scattered: each tile is stored straight into the
inbox of the rank that owns its rows, and the last tile of a rank's rows makes that rank's FULL word 1.

Beside chunked products this fills every wave of tiles but the last, needs no staging memory for what is sent, and lets
rows be used in pieces smaller than a good product. The words and slots are the protocol's, unchanged.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from powertrain.ops.hopper_gemm import Gathered, Scattered, hopper_gemm, why_not
from powertrain.ops.sum_parts import sum_parts
from powertrain.parallel.protocol import Kind, Word
from powertrain.parallel.symmetric import Span, SymmetricGathering, SymmetricScattering, SymmetricTransport
from powertrain.parallel.transport import Rows
from powertrain.runtime.driver import MemoryOps

PIECE = 8 << 20  # bytes: smaller copies do not use the link well
MAX_PIECES = 4  # of one rank's rows


class Fused:
    """What the kernel needs on this device, made once."""

    def __init__(self, transport: SymmetricTransport) -> None:
        self.transport, self.device = transport, transport.device
        self.flags = torch.zeros(transport.size * MAX_PIECES, dtype=torch.int32, device=self.device)
        self.counters = torch.zeros(transport.size, dtype=torch.int32, device=self.device)
        self.own_signal = torch.zeros(1, dtype=torch.int32, device=self.device)
        first = self.flags.data_ptr()
        self.lower_flags = MemoryOps(write=[(first + 4 * i, 0) for i in range(self.flags.numel())])
        self.integers = lru_cache(256)(self._integers)

    def _integers(self, values: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def all_gather_gemm(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], rows: Rows, ys: Sequence[Tensor],
        *, keep: bool,
    ) -> "FusedGathering":  # fmt: skip
        """ys[i] = gather(x) weights[i]ᵀ + biases[i]; the gathering is still to be finished."""
        gathering = FusedGathering(self, x.contiguous(), rows, keep)
        for w, bias, y in zip(weights, biases, ys, strict=True):
            b, layout = _stored(w)
            hopper_gemm(gathering.buffer, b, y, layout=layout, bias=bias, gathered=gathering.hook())
        return gathering

    def gemm_scatter(self, x: Tensor, w: Tensor, rows: Rows) -> "FusedScattering":
        """x wᵀ, each rank's rows on their way to it; the sum is still to be taken."""
        scattering = FusedScattering(self, x, rows, w.shape[0])
        b, layout = _stored(w)
        hopper_gemm(x, b, None, layout=layout, scattered=scattering.hook())
        return scattering


def serves(x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> bool:
    """Whether the kernel takes these operands."""
    return all(why_not(x, _stored(w)[0], y) is None for w, y in zip(weights, outputs, strict=True))


def _stored(w: Tensor) -> tuple[Tensor, str]:
    """w [N, K] as it lies in memory, and the layout of x wᵀ."""
    return (w, "nt") if w.stride(1) == 1 else (w.T, "nn")


class FusedGathering(SymmetricGathering):
    def __init__(self, fused: Fused, shard: Tensor, rows: Rows, keep: bool) -> None:
        self.fused = fused
        row_bytes = shard.shape[1] * shard.element_size()
        self.pieces = max(1, min(MAX_PIECES, max(rows.counts) * row_bytes // PIECE))
        super().__init__(fused.transport, shard, rows, keep)

    def _bounds(self) -> tuple[int, ...]:
        """Where each rank's pieces start in the whole, and its end."""
        starts = [self.rows.of(rank).start for rank in range(len(self.rows.counts))]
        cuts = [
            s + n * i // self.pieces for s, n in zip(starts, self.rows.counts, strict=True) for i in range(self.pieces)
        ]
        return (*cuts, self.rows.total)

    def _pieces(self, source: Span, peer: int) -> list[tuple[Span, Span, int | None]]:
        first = self.rows.of(peer).start
        flags = self.fused.flags.data_ptr()
        found: list[tuple[Span, Span, int | None]] = []
        for i in range(peer * self.pieces, (peer + 1) * self.pieces):
            start, end = list(pairwise(self._bounds()))[i]
            nbytes = (end - start) * self.row_bytes
            place = Span(source.address + (start - first) * self.row_bytes, nbytes)
            target = Span(self.buffer.data_ptr() + start * self.row_bytes, nbytes)
            found.append((place, target, flags + 4 * i))
        return found

    def hook(self) -> Gathered:
        order = tuple(rank * self.pieces + i for rank in self.order for i in range(self.pieces))
        own = self.rank * self.pieces, (self.rank + 1) * self.pieces
        integers = self.fused.integers
        bounds = integers(self._bounds(), torch.int32)
        return Gathered(bounds, integers(order, torch.int32), self.fused.flags[: len(order)], self.shard, own)

    def finish(self, outputs: Sequence[Tensor]) -> None:
        self.transport.pulls.join(self.main)
        self.fused.lower_flags.enqueue(self.main.cuda_stream)
        self.transport.end(self.call, self.main, outputs)


class FusedScattering(SymmetricScattering):
    def __init__(self, fused: Fused, like: Tensor, rows: Rows, width: int) -> None:
        self.fused = fused
        super().__init__(fused.transport, like, rows, width)
        # the kernel writes to all peers: it starts when all of them have room
        self.transport.steps.make_room(self.main.cuda_stream, self.slot)

    def _make_parts(self, like: Tensor) -> None:
        """Tiles go straight into the inboxes."""

    def hook(self) -> Scattered:
        ranks, integers = range(self.transport.size), self.fused.integers
        starts = (*(self.rows.of(rank).start for rank in ranks), self.rows.total)
        full = Word(Kind.FULL, self.slot, self.rank)
        signals = [self.transport.engine.address(rank, full) for rank in ranks]
        signals[self.rank] = self.fused.own_signal.data_ptr()
        return Scattered(
            integers(starts, torch.int32), integers(tuple(self.order), torch.int32),
            integers(tuple(self.inbox_of(rank) for rank in ranks), torch.int64),
            integers(tuple(signals), torch.int64), self.fused.counters, self.width,
        )  # fmt: skip

    def reduce(self, bias: Tensor | None = None) -> Tensor:
        steps, stream = self.transport.steps, self.main.cuda_stream
        steps.collect(stream, self.slot)
        y = sum_parts(self.inbox, bias)
        steps.release(stream, self.slot)
        self.transport.end(self.call, self.main, [y])
        return y
