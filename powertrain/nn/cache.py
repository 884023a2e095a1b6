"""Cache of keys and values of earlier tokens, for generation."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from powertrain.runtime import checks
from powertrain.runtime.positional import hinted


class CacheRow(NamedTuple):
    """What a layer caches per token: kv heads, channels of a key and of a value, and channels of a gMLP's gate.

    num_kv_heads   0: the layer has no attention
    head_dim_v     None: values are channels of the keys (MLA)
    """

    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None
    gate: int = 0


class KVCache:
    """Keys and values of every layer, dense, and how many rows of each sequence are filled.

    Shapes: B sequences of up to L rows, K kv heads, D and E head dims, C channels of a gate: those of `rows`, by layer.
        keys[layer]    [B, L, K, D];  values[layer] [B, L, K, E], or None where values are channels of the keys (MLA)
        gates[layer]   [B, L, C], C 0 in layers that are no gMLP
        lengths        [B] int32 on the device; the host never reads it
    """

    @hinted
    def __init__(
        self, rows: Sequence[CacheRow], batch: int, max_length: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        for name, size in (("batch", batch), ("max_length", max_length)):
            checks.require(size >= 0, "KVCache", name, "be at least 0", size)
        checks.require(dtype.is_floating_point, "KVCache", "dtype", "be a floating dtype", checks.name(dtype))
        self.rows = [CacheRow(*row) for row in rows]
        for row in self.rows:
            good = all(isinstance(size, int) and size >= 0 for size in row if size is not None)
            checks.require(good, "KVCache", "rows", "hold sizes of at least 0", row)

        def made(*shape: int) -> Tensor:
            return torch.zeros(batch, max_length, *shape, device=device, dtype=dtype)

        # in inference mode too of tensors that count writes: others could not be written to outside of it, and lengths
        # are looked at by a DecodeSchedule
        with torch.inference_mode(False):
            self.keys = [made(row.num_kv_heads, row.head_dim) for row in self.rows]
            self.values = [
                None if row.head_dim_v is None else made(row.num_kv_heads, row.head_dim_v) for row in self.rows
            ]
            self.gates = [made(row.gate) for row in self.rows]
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.max_length = max_length
        # before the first forward there is nothing to attend to, and the new tokens attend to each other alone
        self.is_empty = True

    def check(self, batch: int, new: int) -> None:
        """Raise ValueError unless this cache is for `batch` sequences and has rows for `new` tokens of each.

        The host does not know how many rows are filled: of later tokens, writes behind the last row are dropped."""
        if batch != len(self.lengths):
            raise ValueError(f"cache must be made for the {batch} sequences of tokens, got one for {len(self.lengths)}")
        if self.is_empty and new > self.max_length:
            raise ValueError(f"cache must have rows for the {new} tokens of each sequence, got {self.max_length}")

    def fill(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        """Write a prompt's keys and values [B, S, K, D] into the first S rows."""
        self.keys[layer][:, : key.shape[1]] = key
        if value is not None:
            self.values[layer][:, : value.shape[1]] = value  # type: ignore[index]

    def advance(self, lengths: Tensor | int) -> None:
        """Count `new` more filled rows of each sequence; called after all layers have written."""
        self.lengths += lengths
        self.is_empty = False


def write_behind(rows: Tensor, new: Tensor, lengths: Tensor) -> None:
    """Write `new` [B, S, ...] behind the first lengths [B] of rows [B, L, ...], in place; what does not fit is lost."""
    if not new.shape[1]:
        return
    # which new one each row takes, if any: the host reads nothing, and nothing is written behind the end
    number = torch.arange(rows.shape[1], device=rows.device) - lengths[:, None]
    apart = (...,) + (None,) * (rows.dim() - 2)
    takes = ((number >= 0) & (number < new.shape[1]))[apart]
    index = number.clamp(0, new.shape[1] - 1)[apart].expand(rows.shape)
    rows.copy_(torch.where(takes, new.gather(1, index), rows))
