"""The counter in memory from which the CTAs of a persistent launch take their tiles."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_counters: dict[tuple[int, int], Tensor] = {}  # by device and stream


def counter_of(x: Tensor) -> Tensor:
    """An int32 that is 0, which the launch leaves 0: one for each stream, whose launches follow one another."""
    # the graph's own: its replays may run on any stream
    if x.is_meta or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=x.device)
    where = x.get_device(), torch._C._cuda_getCurrentRawStream(x.get_device())
    counter = _counters.get(where)
    if counter is None:
        counter = _counters[where] = _zero_to_keep(x.device)
    return counter


def _zero_to_keep(device: torch.device) -> Tensor:
    """By another thread, on its stream: memory that this thread allocates while torch.compile warms up for CUDA graphs
    belongs to the graphs and must not be kept."""
    with ThreadPoolExecutor(1) as thread:
        zero = thread.submit(lambda: torch.zeros(1, dtype=torch.int32, device=device)).result()
    torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
    return zero
