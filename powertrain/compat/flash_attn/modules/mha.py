"""flash_attn.modules.mha: attention of packed projections, padded or as sequences one after the other."""

import math
from typing import Any

from torch import Tensor, nn

from powertrain.compat.flash_attn.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["FlashCrossAttention", "FlashSelfAttention", "get_alibi_slopes"]


class _FlashAttention(nn.Module):
    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.causal, self.softmax_scale, self.window_size = causal, softmax_scale, window_size
        self.drop, self.deterministic = nn.Dropout(attention_dropout), deterministic
        # moves with the module and stays out of the state dict, as theirs
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def _options(self, causal: bool | None) -> dict[str, Any]:
        return {
            "softmax_scale": self.softmax_scale, "causal": self.causal if causal is None else causal,
            "alibi_slopes": self.alibi_slopes, "window_size": self.window_size, "deterministic": self.deterministic,
        }  # fmt: skip


class FlashSelfAttention(_FlashAttention):
    """Of qkv [B, S, 3, H, D], or [total, 3, H, D] with cu_seqlens [B + 1] and max_seqlen."""

    def forward(
        self, qkv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        # the dropout module is a holder of p, as in flash-attn, so that code may change it
        p, options = self.drop.p if self.training else 0.0, self._options(causal)
        if cu_seqlens is None:
            result = flash_attn_qkvpacked_func(qkv, p, **options)
        else:
            _require("FlashSelfAttention", max_seqlen=max_seqlen)
            assert max_seqlen is not None
            result = flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, p, **options)
        assert isinstance(result, Tensor)
        return result


class FlashCrossAttention(_FlashAttention):
    """Of q [B, Sq, H, D] and kv [B, Sk, 2, Hk, D], or sequences one after the other with both cu_seqlens."""

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None, cu_seqlens_k: Tensor | None = None, max_seqlen_k: int | None = None,
    ) -> Tensor:  # fmt: skip
        p, options = self.drop.p if self.training else 0.0, self._options(causal)
        if cu_seqlens is None:
            result = flash_attn_kvpacked_func(q, kv, p, **options)
        else:
            _require("FlashCrossAttention", max_seqlen=max_seqlen, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k)
            assert max_seqlen is not None and cu_seqlens_k is not None and max_seqlen_k is not None
            result = flash_attn_varlen_kvpacked_func(
                q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, p, **options
            )
        assert isinstance(result, Tensor)
        return result


def _require(op: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        checks.require(value is not None, op, name, "be given with cu_seqlens", None)


def get_alibi_slopes(nheads: int) -> list[float]:
    """2^(-8 i / n), i from 1 to n, for a power of two; else those of the next lower one, and every second of twice it.

    Source: Press et al., arXiv:2108.12409.
    """
    # Press et al.: powers of two have an exact geometric series
    lower = 2 ** math.floor(math.log2(nheads))
    slopes = [2 ** (-8 * i / lower) for i in range(1, lower + 1)]
    # the heads beyond take every second slope of the series for twice as many
    between = [2 ** (-4 * i / lower) for i in range(1, 2 * lower + 1, 2)]
    return slopes + between[: nheads - lower]


__getattr__ = unknown(__name__)
