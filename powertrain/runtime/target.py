"""Target: the facts of one GPU that a kernel's plan needs, of a real device or of a named one without it."""

import functools
import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    name: str
    arch: int  # 90 for sm_90
    num_sms: int
    shared_per_block: int  # bytes one block may have, opt-in limit
    shared_per_sm: int  # bytes
    registers_per_sm: int
    l2_bytes: int
    bandwidth: float  # bytes per second, datasheet

    @staticmethod
    def parse(name: str) -> "Target":
        digits = int(re.sub(r"\D", "", name))
        return Target(f"sm_{digits}", digits, 132, 232448, 233472, 65536, 50 << 20, 4.8e12)

    @staticmethod
    def of(device: torch.device) -> "Target":
        return _of(device.type, device.index or 0)


@functools.cache
def _of(kind: str, index: int) -> Target:
    if kind != "cuda":
        return Target("interpreter", 90, 2, 232448, 233472, 65536, 50 << 20, 1e11)
    p = torch.cuda.get_device_properties(index)
    return Target(
        p.name, p.major * 10 + p.minor, p.multi_processor_count, 232448, 233472, 65536, p.L2_cache_size, 4.8e12
    )
