"""Warning about a 16-bit precision whose matrix products, measured on this CPU, are slower than in fp32."""

import time

import torch

from powertrain.runtime import tracing
from powertrain.train.optim import DTYPES

_SIZE = 192  # of the square matrices: some 0.2 ms in fp32
_SLOWER = 1.5  # below that bf16's smaller memory may be worth it


def warn_if_slow(precision: str, device: torch.device) -> None:
    """A warning where products of `precision` take longer than fp32's on this CPU."""
    if device.type != "cpu" or precision == "fp32":
        return
    ratio = _seconds(DTYPES[precision]) / _seconds(torch.float32)
    if ratio > _SLOWER:
        tracing.warn(
            f"train.precision {precision}: a matrix product takes {ratio:.1f} times as long as in fp32 on this CPU; "
            "train.precision=fp32 is faster here"
        )


def _seconds(dtype: torch.dtype) -> float:
    """The shortest of a few products; the first also loads code."""
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype, device="cpu")
    shortest = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        shortest = min(shortest, time.perf_counter() - start)
    return shortest
