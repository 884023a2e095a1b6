"""liger_kernel.transformers.rope."""

from torch import Tensor

from powertrain.compat.liger_kernel.transformers.functional import liger_rope
from powertrain.compat.missing import unknown

__all__ = ["liger_rotary_pos_emb", "liger_rotary_pos_emb_gpt_oss", "liger_rotary_pos_emb_vision"]

# Liger's name in modeling code
liger_rotary_pos_emb = liger_rope


def liger_rotary_pos_emb_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`liger_rope` with GPT-OSS's cos and sin [1 or b, s, d / 2], whose angles are not repeated."""
    return liger_rope(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`liger_rope` of q and k [positions, heads, head_dim], in float32; cos and sin [positions, head_dim]."""
    wide_q, wide_k = (x.float().unsqueeze(0).transpose(1, 2) for x in (q, k))
    turned = liger_rope(wide_q, wide_k, cos.float().unsqueeze(0), sin.float().unsqueeze(0))
    first, second = (x.transpose(1, 2).squeeze(0) for x in turned)
    return first.to(q.dtype), second.to(k.dtype)


__getattr__ = unknown(__name__)
