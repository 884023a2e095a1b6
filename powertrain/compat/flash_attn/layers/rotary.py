"""flash_attn.layers.rotary on `powertrain.rope`.

Tables are taken in float32 whatever their dtype. "In place" writes into the tensor given where no gradient is wanted;
else the result is a new tensor, which these functions return too.
"""

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.ops.conversion import cat, stack
from powertrain.ops.rope import rope
from powertrain.ops.rope_table import RopeTable
from powertrain.runtime import checks

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """(-b, a) of the pairs (a, b) of the last dim."""
    # GPT-J's pairs are (2i, 2i + 1), GPT-NeoX's (i, i + r/2)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """`apply_rotary_emb` in plain PyTorch and x's dtype; cos and sin [s, r / 2] or [b, s, r / 2]."""
    size = 2 * cos.shape[-1]
    checks.require(size <= x.shape[-1], "apply_rotary_emb_torch", "cos", f"have at most {x.shape[-1]} / 2 pairs", size)
    # each angle once per channel of its pair
    cos, sin = ((t.repeat_interleave(2, -1) if interleaved else t.repeat(*[1] * (t.dim() - 1), 2)) for t in (cos, sin))
    turning, rest = x[..., :size], x[..., size:]
    turned = turning * cos.unsqueeze(-2) + rotate_half(turning, interleaved) * sin.unsqueeze(-2)
    return torch.cat((turned, rest), -1)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """x turned by its positions.

    Shapes: x [b, s, h, d], or with cu_seqlens [b + 1] int32 [total, h, d]; cos, sin [positions, r / 2], r <= d;
        seqlen_offsets an int or [b], added to the positions. max_seqlen is a hint, not needed here.
    Returns x's shape and dtype.
    """
    # autograd refuses an in-place change of a tensor whose old value backward needs
    in_x = inplace and not _wants_gradient(x)
    return _turn(x, cos, sin, interleaved, seqlen_offsets, cu_seqlens, in_x)


# the second name that flash_attn/layers/rotary.py has for it
apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """q and k of qkv turned, k by cos_k and sin_k if given.

    Shapes: qkv [b, s, 3, h, d], or [b, s, num_heads_q + 2 * heads of k, d] with num_heads_q.
    """
    op = "apply_rotary_emb_qkv_"
    if qkv.dim() == 5:
        checks.require(qkv.shape[2] == 3, op, "qkv", "be [b, s, 3, h, d]", list(qkv.shape))
        q, k, v = qkv.unbind(2)
    else:
        checks.require(qkv.dim() == 4, op, "qkv", "have 4 or 5 dims", list(qkv.shape))
        if num_heads_q is None:
            checks.fail(op, "num_heads_q", "be given for qkv of 4 dims", None)
        k_heads, rest = divmod(qkv.shape[2] - num_heads_q, 2)
        fits = k_heads > 0 and rest == 0
        # the heads of k and v are equal, so what is left is even
        checks.require(fits, op, "num_heads_q", f"leave twice k's heads of {qkv.shape[2]}", num_heads_q)
        q, k, v = qkv.split((num_heads_q, k_heads, k_heads), 2)
    recorded = _wants_gradient(qkv)
    # XPos has tables of its own for k
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    new_q = _turn(q, cos, sin, interleaved, seqlen_offsets, inplace=not recorded)
    new_k = _turn(k, cos_k, sin_k, interleaved, seqlen_offsets, inplace=not recorded)
    if recorded:
        # a new tensor only where gradients need it
        return stack((new_q, new_k, v), 2) if qkv.dim() == 5 else cat((new_q, new_k, v), 2)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """k of kv [b, s, 2, h, d] turned."""
    ok = kv.dim() == 5 and kv.shape[2] == 2
    checks.require(ok, "apply_rotary_emb_kv_", "kv", "be [b, s, 2, h, d]", list(kv.shape))
    k, v = kv.unbind(2)
    # kv's other half must stay as it is
    turned = _turn(k, cos, sin, interleaved, seqlen_offsets)
    if _wants_gradient(kv):
        return stack((turned, v), 2)
    k.copy_(turned)
    return kv


class RotaryEmbedding(nn.Module):
    """Rotary embedding of packed qkv, or of q and packed kv, with flash-attn's arguments.

    dim is the number of channels that turn, base RoPE's theta; scale_base is XPos's (512 recommended there): q is then
    multiplied, and k divided, by a scale that decays with the position.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        inv_freq, scale = self._of_channels(device)
        # buffers that are not persistent: flash-attn's checkpoints have none
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        # tables are not buffers: they grow with the longest sequence so far
        self._tables: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """qkv [b, s, 3, h, d] (or 4 dims with num_heads_q), or q [b, s, h, d] with kv [b, s, 2, h, d].

        seqlen_offset is an int or [b]; a tensor needs max_seqlen, the number of positions of the table.
        Returns qkv, or (q, kv).
        """
        length = qkv.shape[1]
        # the table's length must be known without reading the GPU
        if max_seqlen is None and isinstance(seqlen_offset, Tensor):
            checks.fail("RotaryEmbedding", "max_seqlen", "be given with a tensor for seqlen_offset", None)
        positions = max_seqlen if max_seqlen is not None else length + int(seqlen_offset)
        cos, sin, cos_k, sin_k = self._table(positions, qkv.device)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )  # fmt: skip
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, inplace=True, seqlen_offsets=seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)

    def _of_channels(self, device: torch.device | str | None) -> tuple[Tensor, Tensor | None]:
        """inv_freq, and XPos's base of decay (Sun et al., arXiv:2212.10554) as flash-attn computes it."""
        channel = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        scale = None if self.scale_base is None else (channel + 0.4 * self.dim) / (1.4 * self.dim)
        return 1.0 / self.base ** (channel / self.dim), scale

    def _table(self, positions: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """cos and sin for q, then for k, float32."""
        # rebuilt for a longer sequence or another device only
        if self._tables is None or self._tables[0].shape[0] < positions or self._tables[0].device != device:
            # out of inference mode, since a later backward may save them
            with torch.inference_mode(False):
                self._tables = self._made(positions, device)
        return self._tables

    def _made(self, positions: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inv_freq, scale = self.inv_freq, self.scale
        if inv_freq.dtype is not torch.float32:
            # a converted module's buffers are rounded: to bfloat16, the angle of position 500 is off by 0.2 radian
            inv_freq, scale = self._of_channels(device)
        # in float32 whatever the module's dtype: bfloat16 positions above 256 are not exact
        at = torch.arange(positions, device=device, dtype=torch.float32)
        angles = torch.outer(at, inv_freq.to(device))
        cos, sin = angles.cos(), angles.sin()
        if scale is None:
            return cos, sin, cos, sin
        assert self.scale_base is not None
        # counted from the middle of the table, as flash-attn does
        power = (at - positions // 2) / self.scale_base
        decay = scale.to(device) ** power[:, None]
        return cos * decay, sin * decay, cos / decay, sin / decay


def _turn(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    offset: int | Tensor,
    cu_seqlens: Tensor | None = None,
    inplace: bool = False,
) -> Tensor:
    turned = rope(
        x, table=RopeTable(cos.float(), sin.float()), layout="bshd" if cu_seqlens is None else "thd",
        interleaved=interleaved, offset=offset, cu_seqlens=cu_seqlens, inplace=inplace,
    )  # fmt: skip
    assert isinstance(turned, Tensor)
    return turned


def _wants_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


__getattr__ = unknown(__name__)
