"""Interface of transports: transfers of rows between the ranks of a group.

`gather` brings the other ranks' rows here while products run on local rows. `scatter` sends products to the ranks
that own their rows while the next products run, and sums the received parts. The sum is the same on every transport:
partial results are rounded once to the tensors' dtype, then added in float32 in rank order, independent of arrival
order. `all_to_all_async` sends different rows to each rank.

    symmetric    NVLink, copy engines, flags in each other's memory (powertrain/parallel/transport/symmetric.py)
    pipelined    sends and receives, one peer at a time (NCCL or gloo): powertrain/parallel/transport/collective.py
    sequential   a collective, then the product (NCCL or gloo): the same file; the baseline of the others
    simulated    ranks that are threads of one process (powertrain/parallel/transport/simulated.py)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Way = Literal["sequential", "chunked", "fused"]


@dataclass(frozen=True)
class Choice:
    """A way to compute a GEMM with its collective, and its predicted seconds (0 if there is no prediction).

    way    "sequential": the collective, then the product; "chunked": a product for each rank's rows, by cuBLAS;
           "fused": one kernel that waits for the rows, or sends them, itself
    """

    way: Way
    why: str
    product: float = 0.0
    collective: float = 0.0
    overlapped: float = 0.0

    @property
    def exposed(self) -> float:
        """The share of the collective's own time that is not hidden."""
        taken = self.product + self.collective if self.way == "sequential" else self.overlapped
        return (taken - self.product) / self.collective if self.collective else 0.0


@dataclass(frozen=True)
class Rates:
    """Rates of a device and its links. flops: dense, of the tensors' dtype; link: bytes/s from one peer."""

    sms: int
    flops: float
    link: float


class RowCounts(NamedTuple):
    """Ownership of a gathered tensor's rows: rank r has `counts[r]` of them, after those of the ranks before it."""

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


class AllGatherHandle(ABC):
    """An all-gather in progress.

    order    the ranks as their rows come, this one first
    whole    [rows.total, K]: complete, this rank's own rows included, once `wait` was called for every rank and if
             `gather` was called with keep
    """

    order: Sequence[int]
    whole: Tensor

    @abstractmethod
    def wait(self, rank: int) -> Tensor:
        """That rank's rows [rows.counts[rank], K]; the current stream waits until they are here."""

    def finish(self, outputs: Sequence[Tensor]) -> None:  # noqa: B027
        """Release the buffers; called after the last GEMM, with its results."""


class ReduceScatterHandle(ABC):
    """A reduce-scatter in progress: partial results [rows.total, N] are sent to the ranks that own the rows.

    order    the ranks to make parts for, this one last
    """

    order: Sequence[int]

    @abstractmethod
    def part(self, rank: int) -> Tensor:
        """Buffer for the product of that rank, [rows.counts[rank], N]."""

    @abstractmethod
    def send(self, rank: int) -> None:
        """Send the part for that rank, which was written on the current stream."""

    @abstractmethod
    def reduce(self, bias: Tensor | None = None) -> Tensor:
        """The sum of all ranks' parts for this one, [rows.counts[own], N], with bias [N] added."""


class SplitSizes(NamedTuple):
    """Number of rows between ranks: rows[source][target], the same on every rank."""

    rows: tuple[tuple[int, ...], ...]

    def sent(self, rank: int) -> tuple[int, ...]:
        return self.rows[rank]

    def received(self, rank: int) -> tuple[int, ...]:
        return tuple(row[rank] for row in self.rows)

    @property
    def back(self) -> "SplitSizes":
        """The sizes of the reverse exchange."""
        return SplitSizes(tuple(zip(*self.rows, strict=True)))


class AllToAllHandle(ABC):
    """An all-to-all in progress.

    order    the ranks as their rows come, this one first
    whole    [rows received, width], in the order of the ranks: complete once `wait` was called for each
    """

    order: Sequence[int]
    whole: Tensor

    @abstractmethod
    def send(self, rank: int, rows: Tensor) -> None:
        """Send rows, contiguous and written on the current stream. Called once per rank; all ranks use the same
        order, `send_order` or `order`. This rank's own rows may be sent at any time."""

    @abstractmethod
    def wait(self, rank: int) -> Tensor:
        """That rank's rows, a part of `whole`; the current stream waits until they are here."""

    def finish(self, outputs: Sequence[Tensor]) -> None:  # noqa: B027
        """All transfers are complete and their outputs computed: the buffers may be reused."""


class Transport(ABC):
    """Communication of one group. Calls come in the same order on every rank."""

    name: str
    rank: int
    size: int
    on_gpus: bool = False
    layer: str = ""  # whose call it is, for messages

    @abstractmethod
    def gather(self, shard: Tensor, rows: RowCounts, *, keep: bool) -> AllGatherHandle:
        """Start to bring every rank's shard [rows.counts[rank], K] here."""

    @abstractmethod
    def scatter(self, like: Tensor, rows: RowCounts, width: int) -> ReduceScatterHandle:
        """Get ready to send parts [rows.counts[rank], width] of like's dtype and device."""

    @abstractmethod
    def all_gather(self, shard: Tensor, rows: RowCounts) -> Tensor:
        """Every rank's rows, [rows.total, K], by one collective."""

    @abstractmethod
    def reduce_scatter(self, parts: Tensor, rows: RowCounts) -> Tensor:
        """parts [rows.total, N] -> this rank's rows of their sum, by one collective."""

    @abstractmethod
    def all_to_all_async(self, use: int, like: Tensor, splits: SplitSizes, width: int) -> AllToAllHandle:
        """Get ready to send and receive rows [.., width] of like's dtype and device; use: DISPATCH or COMBINE."""

    @abstractmethod
    def all_to_all(self, rows: Tensor, splits: SplitSizes) -> Tensor:
        """rows [rows sent, width], in the order of their targets -> those received, in that of their sources, by one
        collective."""

    def send_order(self) -> list[int]:
        """The other ranks, the next one first: no two ranks send to the same one at once."""
        # one peer at a time: on four H200 three peers at once got 276 GB/s, one after the other 310 to 370
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def receive_order(self) -> list[int]:
        """Source ranks in arrival order (rank-1, rank-2, ...) when all ranks use `send_order`."""
        return [(self.rank - step) % self.size for step in range(1, self.size)]

    def rates(self) -> Rates | None:
        """Rates of this device and its links, where known."""
        return None

    def fused(self, choice: Choice, x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> Any:
        """The kernels of symmetric_fused.py, if they were chosen and take these operands; else None."""
        return None

    def compare(  # noqa: B027
        self, op: str, counts: Sequence[int], operands: Sequence[Tensor | None]
    ) -> None:
        """In debug mode: raise CollectiveMismatch unless every rank makes this very call now."""

    def waiting(self, op: str, x: Tensor) -> AbstractContextManager[None]:
        """Context of a call whose host waits for other ranks."""
        return nullcontext()

    def mark_broken(self, error: Exception) -> None:  # noqa: B027
        """Record that a call failed on this rank; it may not have started."""

    def detach(self) -> None:  # noqa: B027
        """At interpreter exit: end threads, release process groups, do not wait."""

    def close(self) -> None:  # noqa: B027
        """Release memory and threads."""


def on_gpus(group: dist.ProcessGroup) -> bool:
    """Whether a group can communicate CUDA tensors on this machine."""
    return torch.cuda.is_available() and torch.device("cuda") in group._device_types
