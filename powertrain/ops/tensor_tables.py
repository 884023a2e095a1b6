"""Device tables of addresses and chunks, through which one kernel processes many tensors."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def tensor_at(table_ptr, row, count, first_ptr, ALIGNED: tl.constexpr):
    """The tensor of a table's entry, which is how many elements after first_ptr it lies."""
    distance = tl.load(table_ptr + row * count)  # scalar
    if ALIGNED:
        # a multiple already; so written, the compiler knows, and takes 16-byte vectors
        distance = distance // (128 // first_ptr.dtype.element_ty.primitive_bitwidth)
        distance *= 128 // first_ptr.dtype.element_ty.primitive_bitwidth
    return first_ptr + distance


@triton.jit
def chunk_of_program(chunks_ptr, CHUNK: tl.constexpr):
    """By `chunk_table`: which tensor this program's chunk is of, and the chunk's first element in it, int64."""
    chunk = tl.program_id(0)
    tensor = tl.load(chunks_ptr + 2 * chunk)  # scalar
    return tensor, tl.load(chunks_ptr + 2 * chunk + 1).to(tl.int64) * CHUNK  # scalar


@functools.lru_cache(maxsize=64)
def chunk_table(numels: tuple[int, ...], chunk: int, device: torch.device) -> Tensor:
    """[chunks, 2] int32: whose chunk, and which of its chunks."""
    # on the host whatever the default device
    counts = torch.tensor([-(-n // chunk) for n in numels], device="cpu")
    owner = torch.repeat_interleave(torch.arange(len(numels), device="cpu"), counts)
    within = torch.arange(owner.numel(), device="cpu") - (counts.cumsum(0) - counts)[owner]
    return torch.stack((owner, within), dim=1).to(torch.int32).to(device)


def upload_stream(device: torch.device) -> Any:
    """The stream for which a table is uploaded: another has not waited for it. An object of its own during a capture,
    whose upload happens at each replay of that graph, and at no other time."""
    if device.type != "cuda":
        return None
    return object() if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(device)


class DeviceTable:
    """Numbers on the device, uploaded (not waiting for it) when they differ from the last ones."""

    def __init__(self) -> None:
        self.values: tuple[Any, ...] = ()
        self.table: Tensor | None = None
        self.captured: list[tuple[Tensor, Tensor]] = []

    def get(self, numbers: list[int], device: torch.device) -> Tensor:
        values = (upload_stream(device), *numbers)
        if self.table is None or values != self.values:
            host = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            if device.type == "cuda":
                host = host.pin_memory()
            self.table, self.values = host.to(device, non_blocking=True), values
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                # every replay copies from one to the other
                self.captured.append((host, self.table))
        return self.table


def distances_of(tensors: Sequence[Tensor]) -> tuple[list[int], bool]:
    """Offset of each tensor from the first, in elements, and whether all are aligned to 16 bytes."""
    addresses = list(map(Tensor.data_ptr, tensors))
    first, size = addresses[0], tensors[0].element_size()
    return [(a - first) // size for a in addresses], not any([a % 16 for a in addresses])


def is_dense(t: Tensor) -> bool:
    return t.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(t))
