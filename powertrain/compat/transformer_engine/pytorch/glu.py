"""Gate and up in alternating blocks along a dim, or as two halves."""

from torch import Tensor

from powertrain.runtime import checks


def deinterleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """A copy with all gates first, then all ups, of alternating gate and up blocks of `interleave_size` along dim 0.

    Raises ValueError if dim 0 is not a multiple of 2 * interleave_size.
    """
    blocks = _blocks("deinterleave_glu_tensor", tensor, interleave_size)
    return tensor.reshape(blocks, 2, interleave_size, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def interleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """The inverse of `deinterleave_glu_tensor`."""
    blocks = _blocks("interleave_glu_tensor", tensor, interleave_size)
    return tensor.reshape(2, blocks, interleave_size, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def halves_of_blocks(op: str, x: Tensor, interleave_size: int | None) -> Tensor:
    """The last dim of x as all gates, then all ups; x itself without a size."""
    if interleave_size is None:
        return x
    blocks = _blocks(op, x.movedim(-1, 0), interleave_size)
    return x.reshape(*x.shape[:-1], blocks, 2, interleave_size).transpose(-3, -2).reshape(x.shape)


def _blocks(op: str, tensor: Tensor, size: int) -> int:
    checks.require(size > 0, op, "interleave_size", "be positive", size)
    fits = tensor.shape[0] % (2 * size) == 0
    checks.require(fits, op, "tensor", f"have a multiple of {2 * size} gates and ups", tensor.shape[0])
    return tensor.shape[0] // (2 * size)
