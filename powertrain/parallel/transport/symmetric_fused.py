"""All-gather and GEMM in one kernel: the Hopper GEMM of ops/gemm/hopper.py waits for rows that arrive over NVLink.

Peers' copy engines bring their rows in pieces, each with its READY flag; the kernel starts with this rank's own rows
and waits, inside, for each piece before its first tile of it.

Beside chunked products this fills every wave of tiles but the last, and lets rows be used in pieces smaller than an
efficient product. The flags and slots are the protocol's, unchanged.
"""

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from powertrain.ops.gemm.gemm import fails_here
from powertrain.ops.gemm.hopper import Gathered, hopper_gemm, why_not
from powertrain.parallel.transport.base import RowCounts
from powertrain.parallel.transport.protocol import GATHER, PIECES, READY
from powertrain.parallel.transport.symmetric import SymmetricAllGather, SymmetricTransport
from powertrain.runtime.gluon_compat import trouble
from powertrain.runtime.target import Target


class Fused:
    """Resources of the kernel on this device, made once."""

    def __init__(self, transport: SymmetricTransport) -> None:
        self.transport, self.device = transport, transport.device
        self._integers = lru_cache(256)(partial(_integers, self.device))
        self._captured: list[Tensor] = []

    def integers(self, values: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An integer tensor on the device, cached for the values of the last calls."""
        tensor = self._integers(values, dtype)
        if torch.cuda.is_current_stream_capturing():
            # replays read it after the cache may have dropped it
            self._captured.append(tensor)
        return tensor

    def all_gather_gemm(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], rows: RowCounts,
        ys: Sequence[Tensor], *, keep: bool,
    ) -> "FusedAllGather":  # fmt: skip
        """ys[i] = gather(x) weights[i]ᵀ + biases[i]; the caller finishes the handle."""
        gathering = FusedAllGather(self, x.contiguous(), rows, keep)
        hook = gathering.hook()
        for w, bias, y in zip(weights, biases, ys, strict=True):
            b, layout = _stored(w)
            hopper_gemm(gathering.buffer, b, y, layout=layout, bias=bias, gathered=hook)
        gathering.received()
        return gathering

    def serves(self, x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> bool:
        """Whether the kernel runs here, and takes these operands."""
        if Target.of(x.device).arch != 90 or trouble() or fails_here(x.device):
            return False
        return all(why_not(x, _stored(w)[0], y) is None for w, y in zip(weights, outputs, strict=True))


def _integers(device: torch.device, values: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def _stored(w: Tensor) -> tuple[Tensor, str]:
    """w [N, K] as it lies in memory, and the layout of x wᵀ."""
    return (w, "nt") if w.stride(1) == 1 else (w.T, "nn")


class FusedAllGather(SymmetricAllGather):
    pieces = PIECES

    def __init__(self, fused: Fused, shard: Tensor, rows: RowCounts, keep: bool) -> None:
        self.fused = fused
        super().__init__(fused.transport, shard, rows, keep)

    def hook(self) -> Gathered:
        ranks, integers = range(self.transport.size), self.fused.integers
        bounds = (*(cut for rank in ranks for cut in self.piece_bounds(rank)[:-1]), self.rows.total)
        order = tuple(rank * PIECES + piece for rank in self.order for piece in range(PIECES))
        flags = self.transport.engine.values[READY, GATHER, self.slot].view(-1)
        own = self.rank * PIECES, (self.rank + 1) * PIECES
        return Gathered(integers(bounds, torch.int32), integers(order, torch.int32), flags, self.shard, own)

    def received(self) -> None:
        """Consume the flags: the kernel has waited for every piece."""
        steps = self.transport.steps
        steps.receive(self.main.cuda_stream, GATHER, self.slot, steps.senders, PIECES)

    def wait(self, rank: int) -> Tensor:
        return self.parts[rank]
