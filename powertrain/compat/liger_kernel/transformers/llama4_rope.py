"""liger_kernel.transformers.llama4_rope: complex frequencies, on `powertrain.rope`."""

from types import ModuleType

import torch
from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.ops.rope import rope
from powertrain.ops.rope_table import RopeTable
from powertrain.runtime import checks

__all__ = ["apply_liger_llama4_rope_full", "liger_llama4_text_rotary_pos_emb", "liger_llama4_vision_rotary_pos_emb"]


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of channels (2c, 2c + 1) as complex numbers, times freqs_cis, in float32, rounded once.

        xq, xk     [B, S, H, D] and [B, S, K, D]
        freqs_cis  complex, [S, D / 2], or [B, S, D / 2] with rows of each sequence; positions from S on are left out
    Raises ValueError naming the argument.
    """
    return _turned("liger_llama4_text_rotary_pos_emb", xq, xk, freqs_cis)


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    """The same with freqs_ci [S, D / 2], [S, 1, D / 2] or [1, S, 1, D / 2].

    A real freqs_ci, as a cast of the model leaves it, scales both channels of a pair, as the model does.
    """
    op = "liger_llama4_vision_rotary_pos_emb"
    checks.require(query.dim() == 4, op, "query", "have shape [B, S, H, D]", list(query.shape))
    S, D = query.shape[1], query.shape[3]
    good = freqs_ci.numel() == S * (D // 2)
    checks.require(good, op, "freqs_ci", f"have {S} * {D // 2} elements", list(freqs_ci.shape))
    table = freqs_ci.reshape(S, D // 2)
    if not table.is_complex():
        wide = table.float().repeat_interleave(2, -1)[:, None]
        return (query.float() * wide).to(query.dtype), (key.float() * wide).to(key.dtype)
    return _turned(op, query, key, table)


def _turned(op: str, q: Tensor, k: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    checks.require(q.dim() == 4, op, "xq", "have shape [B, S, H, D]", list(q.shape))
    checks.require(freqs.is_complex(), op, "freqs_cis", "be complex", checks.name(freqs.dtype))
    B, S, _, D = q.shape
    leads = freqs.dim() == 2 or (freqs.dim() == 3 and freqs.shape[0] in (1, B))
    good = leads and freqs.shape[-2] >= S and freqs.shape[-1] == D // 2
    checks.require(good, op, "freqs_cis", f"have shape [{S}, {D // 2}] or [{B}, {S}, {D // 2}]", list(freqs.shape))
    rows = freqs[..., :S, :].reshape(-1, D // 2)
    # a sequence's own rows follow those of the one before
    ids = torch.arange(rows.shape[0], device=q.device).view(-1, S).expand(B, S)
    turned = rope(q, k, table=RopeTable(rows.real.float(), rows.imag.float()), position_ids=ids, interleaved=True)
    return turned[0], turned[1]


def apply_liger_llama4_rope_full(modeling_module: ModuleType) -> None:
    """Put both functions in the place of those of transformers' modeling_llama4."""
    modeling_module.apply_rotary_emb = liger_llama4_text_rotary_pos_emb  # type: ignore[attr-defined]
    modeling_module.vision_apply_rotary_emb = liger_llama4_vision_rotary_pos_emb  # type: ignore[attr-defined]


__getattr__ = unknown(__name__)
