"""Cache of keys and values of earlier tokens, for generation."""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, dense, and how many rows of each sequence are filled.

    Shapes: B sequences of up to L rows, K kv heads, D and E head dims.
        keys[layer]    [B, L, K, D];  values[layer] [B, L, K, E], or None where values are channels of the keys (MLA)
        lengths        [B] int32 on the device; the host never reads it
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        def rows(dim: int) -> Tensor:
            return torch.zeros(batch, max_length, num_kv_heads, dim, device=device, dtype=dtype)

        self.keys = [rows(head_dim) for _ in range(num_layers)]
        self.values = [None if head_dim_v is None else rows(head_dim_v) for _ in range(num_layers)]
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.max_length = max_length
        # before the first forward there is nothing to attend to, and the new tokens attend to each other alone
        self.is_empty = True

    def fill(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        """Write a prompt's keys and values [B, S, K, D] into the first S rows."""
        self.keys[layer][:, : key.shape[1]] = key
        if value is not None:
            self.values[layer][:, : value.shape[1]] = value  # type: ignore[index]

    def advance(self, lengths: Tensor | int) -> None:
        """After all layers: so many rows more of each sequence are filled."""
        self.lengths += lengths
        self.is_empty = False
