"""xformers.ops.rope_padded on `powertrain.rope`: rotation of a mixed batch, and its place in a padded KV cache."""

import torch
from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.compat.xformers.ops.fmha.attn_bias import BlockDiagonalCausalWithOffsetPaddedKeysMask
from powertrain.ops.conversion import unsupported
from powertrain.ops.rope import rope
from powertrain.ops.rope_table import RopeTable
from powertrain.runtime import checks

__all__ = ["rope_padded"]


@torch.no_grad()
def rope_padded(
    xq: Tensor,
    xk: Tensor,
    xv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    attn_bias: BlockDiagonalCausalWithOffsetPaddedKeysMask,
    *,
    theta: float = 10000.0,
    linear_scale: float = 1.0,
    use_dynamic_scaling: bool = False,
    dynamic_old_context_len: float = 8192.0,
    dynamic_scale_factor: float = 16.0,
    dynamic_low_freq_factor: float = 1.0,
    dynamic_high_freq_factor: float = 32.0,
    out_q: Tensor | None = None,
    first_seqpos: Tensor | None = None,
    seqpos: Tensor | None = None,
    adjacents: bool = True,
    internal_dtype: str = "",
) -> Tensor:
    """xq and xk turned by their positions; xk and xv written to their places in the caches; returns the turned xq.

    Shapes: xq [1, t, h, d], xk and xv [1, t, hk, d], caches [1, room of all sequences, hk, d] (or five dims, [1, t, g,
    h, d]).
    A sequence's tokens are its last ones: position = length of its keys - tokens that follow - 1, plus first_seqpos
    [b]; seqpos
    [t] gives the positions themselves. adjacents: pairs are (2c, 2c + 1), else (c, c + d / 2). float32 throughout.
    No gradient.
    """
    op = "rope_padded"
    if use_dynamic_scaling:
        unsupported(op, "use_dynamic_scaling", True, "powertrain.rope with rope_table(scheme=Llama3(...))")
    checks.require(xq.dim() in (4, 5), op, "xq", "have 4 or 5 dims", list(xq.shape))
    checks.require(xq.shape[:2] == (1, xk.shape[1]), op, "xq", f"be [1, {xk.shape[1]}, ...]", list(xq.shape))
    starts, key_starts = attn_bias.q_seqinfo.seqstart.to(xq.device), attn_bias.k_seqinfo.seqstart.to(xq.device)
    lengths = attn_bias.k_seqinfo.seqlen.to(xq.device)
    rows = torch.arange(xq.shape[1], device=xq.device)
    # the sequence of each row, by the first end behind it
    block = torch.searchsorted(starts[1:].long(), rows, right=True)
    # new tokens are the last of the sequence's keys
    place = lengths.long()[block] - (starts.long()[block + 1] - rows)
    if seqpos is None:
        seqpos = place if first_seqpos is None else place + first_seqpos.to(xq.device).long()[block]
    channel = torch.arange(0, xq.shape[-1], 2, device=xq.device, dtype=torch.float32)
    angles = torch.outer(seqpos.float() / linear_scale, theta ** (-channel / xq.shape[-1]))
    table = RopeTable(angles.cos(), angles.sin())
    # two leading dims are one row of tokens: flatten groups and heads
    q, k = (rope(x.flatten(2, -2), table=table, interleaved=adjacents) for x in (xq, xk))
    assert isinstance(q, Tensor) and isinstance(k, Tensor)
    at = key_starts.long()[block] + place
    # the cache may be of another dtype
    cache_k[0, at] = k.view(xk.shape)[0].to(cache_k.dtype)
    cache_v[0, at] = xv[0].to(cache_v.dtype)
    q = q.view(xq.shape)
    return q if out_q is None else out_q.copy_(q)


__getattr__ = unknown(__name__)
