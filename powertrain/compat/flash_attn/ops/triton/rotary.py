"""flash_attn.ops.triton.rotary on `powertrain.rope`."""

from torch import Tensor

from powertrain.compat.flash_attn.layers.rotary import apply_rotary_emb
from powertrain.compat.missing import unknown

__all__ = ["apply_rotary"]


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """`apply_rotary_emb`, backwards for conjugate."""
    # the inverse rotation is the rotation by the negative angle
    sin = -sin if conjugate else sin
    return apply_rotary_emb(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)


__getattr__ = unknown(__name__)
