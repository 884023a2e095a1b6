"""A step captured in a CUDA graph, as PyTorch asks for it: warmed up on a stream of its own before."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def captured(step: Callable[[], Result], warm_ups: int = 1) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The graph, and what `step` returned in it: tensors that each replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
