"""Philox 4x32-7, the counter-based random numbers of every dropout: the same bits on CPU and GPU.

Seven rounds are the fewest that pass BigCrush. Source: Salmon et al. 2011, "Parallel random numbers:
as easy as 1, 2, 3".
"""

import torch
from torch import Tensor

ROUNDS = 7  # the kernels say it again
_LOW = 0xFFFFFFFF


def philox(key: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int = ROUNDS) -> list[Tensor]:
    """Four words in [0, 2^32), as int64, of a 64-bit key and four 32-bit counter words (int64 that broadcast)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _LOW, key >> 32 & _LOW
    for _ in range(rounds):
        # int64 wraps: the 64 bits are right
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32 & _LOW) ^ c1 ^ k0, b & _LOW, (a >> 32 & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    return [c0, c1, c2, c3]


def halves(word: Tensor) -> tuple[Tensor, Tensor]:
    """The low and high 32 bits of an int64."""
    return word & _LOW, word >> 32 & _LOW


def threshold(p: float) -> int:
    """An element is dropped when its word, shifted right by one, is below this."""
    return min(round(p * 2**31), 2**31 - 1)


def dropout_seed(device: torch.device | str) -> Tensor:
    """A seed for dropout, [2] int64, drawn from torch's generator of this device, without host synchronisation."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)
