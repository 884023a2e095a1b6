"""Causal attention to some blocks of earlier positions: windows of blocks, and blocks that all later ones see."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from powertrain.ops.shapes import cdiv
from powertrain.runtime import kinds
from powertrain.runtime.kept_tensors import Description, kept


# hashable: masks are kept by it
@dataclass(frozen=True)
class BlockSparsity(Description):
    """Query i sees key j <= i if i's block r = i // block sees j's block c = j // block by one of these rules.

        block            positions of a block
        before           c >= r - before: so many blocks before its own, and its own; None: no such rule
        windows          r and c are in one of consecutive windows of so many blocks; the last size repeats
        last_of_window   c is among so many last blocks of its window (all windows being as large as the first)
        global_blocks    c is in one of these half-open ranges of blocks
        global_rows      r is in one of these ranges
    One of before and windows must be given, so that every position sees itself.
    Raises ValueError naming the field.
    """

    block: int = 16
    before: int | None = None
    windows: tuple[int, ...] = ()
    last_of_window: int = 0
    global_blocks: tuple[tuple[int, int], ...] = ()
    global_rows: bool = False

    def __post_init__(self) -> None:
        wrong = None
        for field in fields(self):
            value = getattr(self, field.name)
            if not kinds.fits(field.type, value):
                # the comparisons below take numbers
                raise ValueError(f"model.sparsity.{field.name} must be {kinds.words(field.type)}, got {value!r}")
        if self.block < 1:
            wrong = f"block must be at least 1, got {self.block}"
        elif (self.before is None) == (not self.windows):
            wrong = f"before or windows must be given, not both, got {self.before} and {self.windows}"
        elif self.before is not None and self.before < 0:
            wrong = f"before must be at least 0, got {self.before}"
        elif any(size < 1 for size in self.windows):
            wrong = f"windows must have sizes of at least 1, got {self.windows}"
        elif self.last_of_window and (len(self.windows) != 1 or not 0 < self.last_of_window <= self.windows[0]):
            wrong = f"last_of_window must be 0, or at most the one size of windows {self.windows}"
            wrong += f", got {self.last_of_window}"
        elif any(not 0 <= first < end for first, end in self.global_blocks):
            wrong = f"global_blocks must be ranges (first, end) with first < end, got {self.global_blocks}"
        if wrong:
            raise ValueError(f"model.sparsity.{wrong}")
        super().__post_init__()

    @property
    def left(self) -> int:
        """How many keys before its own position a query may see at most; -1: all."""
        if self.last_of_window or self.global_blocks:
            return -1
        blocks = max(self.windows) - 1 if self.before is None else self.before
        return (blocks + 1) * self.block - 1

    def sees_blocks(self, count: int) -> Tensor:
        """[count, count] bool on the CPU: whether block r sees block c, no later one."""
        blocks = torch.arange(count, device="cpu")
        r, c = blocks[:, None], blocks[None, :]
        if self.before is not None:
            visible = c >= r - self.before
        else:
            window = self._window_of_blocks(count)
            visible = window[:, None] == window[None, :]
        if self.last_of_window:
            size = self.windows[0]
            visible = visible | (c % size >= size - self.last_of_window)
        for first, end in self.global_blocks:
            visible = visible | ((c >= first) & (c < end))
            if self.global_rows:
                visible = visible | ((r >= first) & (r < end))
        return visible & (c <= r)

    def _window_of_blocks(self, count: int) -> Tensor:
        numbers: list[int] = []
        for number in range(count):
            size = self.windows[min(number, len(self.windows) - 1)]
            numbers += [number] * size
            if len(numbers) >= count:
                break
        return torch.tensor(numbers[:count], dtype=torch.int64, device="cpu")

    def keys_seen(self, length: int) -> float:
        """Average number of keys that a query of a sequence sees; half of its own block counts. 0 of no tokens."""
        count = cdiv(length, self.block)
        # a run's summary asks for it, to tell attention's work from the rest
        if not count:
            return 0.0
        # the last block may be a partial one: of so long a sequence as its blocks have positions
        return (self.sees_blocks(count).sum().item() / count - 0.5) * self.block

    def mask(self, length: int, device: torch.device) -> Tensor:
        """[1, 1, length, length] bool: True where a position sees another. The masks of four lengths are kept, each
        length^2 bytes."""
        return _mask(self, length, device)

    def mask_at(self, positions: Tensor, num_keys: int) -> Tensor:
        """[B, 1, S, num_keys] bool: what queries at positions [B, S] see of the first num_keys; a copy, not kept."""
        table = _table(self, cdiv(num_keys, self.block), positions.device)
        j = torch.arange(num_keys, device=positions.device)
        # behind the last block there is nothing to see either; such rows are padding
        rows = table[(positions // self.block).clamp(max=len(table) - 1)]
        return (rows[..., j // self.block] & (j <= positions[..., None]))[:, None]


@kept(64)
def _table(sparsity: BlockSparsity, count: int, device: torch.device) -> Tensor:
    return sparsity.sees_blocks(count).to(device)


@kept(4)
def _mask(sparsity: BlockSparsity, length: int, device: torch.device) -> Tensor:
    return sparsity.mask_at(torch.arange(length, device=device)[None], length)
