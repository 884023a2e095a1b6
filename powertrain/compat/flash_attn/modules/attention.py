"""Attention with a mask of padded keys, on `powertrain.attention`: flash_attn.modules.mha's SelfAttention and kin."""

from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.ops.attention import attention
from powertrain.runtime import checks

__all__ = ["CrossAttention", "SelfAttention"]


class _Attention(nn.Module):
    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.causal, self.softmax_scale, self.drop = causal, softmax_scale, nn.Dropout(attention_dropout)

    def _attend(self, q: Tensor, kv: Tensor, causal: bool | None, mask: Tensor | None) -> Tensor:
        causal = self.causal if causal is None else causal
        options: dict[str, Any] = {"is_causal": causal, "causal_align": "bottom_right"} if causal else {}
        if mask is not None:
            checks.shape(type(self).__name__, "key_padding_mask", mask, (kv.shape[0], kv.shape[1]), "[B, Sk]")
            seen = mask.bool()[:, None, None]
            if causal:
                # the last query sees the last key that is kept: the diagonal is each sequence's own
                at = torch.arange(max(q.shape[1], kv.shape[1]), device=q.device)
                last = at[: q.shape[1], None] + (mask.sum(-1)[:, None, None] - q.shape[1])
                seen = seen & (at[: kv.shape[1]] <= last)[:, None]
            options = {"attn_bias": seen}
        p = self.drop.p if self.training else 0.0
        k, v = kv.unbind(2)
        return attention(q, k, v, scale=self.softmax_scale, dropout_p=p, **options)


class SelfAttention(_Attention):
    """Of qkv [B, S, 3, H, D]; key_padding_mask [B, S] bool, True for a key that counts. A row of none gives 0."""

    def forward(self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        causal = self.causal if causal is None else causal
        checks.require(qkv.dim() == 5, "SelfAttention", "qkv", "have shape [B, S, 3, H, D]", list(qkv.shape))
        if not causal or key_padding_mask is None:
            return self._attend(qkv[:, :, 0], qkv[:, :, 1:], causal, key_padding_mask)
        # there the diagonal is that of the positions, padded ones included
        S = qkv.shape[1]
        seen = key_padding_mask.bool()[:, None, None] & torch.ones(S, S, dtype=torch.bool, device=qkv.device).tril()
        q, k, v = qkv.unbind(2)
        p = self.drop.p if self.training else 0.0
        return attention(q, k, v, attn_bias=seen, scale=self.softmax_scale, dropout_p=p)


class CrossAttention(_Attention):
    """Of q [B, Sq, H, D] and kv [B, Sk, 2, Hk, D]; causal: the last query sees the last key that counts."""

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        return self._attend(q, kv, causal, key_padding_mask)


__getattr__ = unknown(__name__)
