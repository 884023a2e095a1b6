"""xformers.ops.unbind: `unbind`, and `stack_or_none`, which stacks the slices of one tensor without a copy."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from powertrain.compat.missing import unknown

__all__ = ["get_stack_strides", "stack_or_none", "unbind"]


def get_stack_strides(tensors: Sequence[Tensor], dim: int) -> tuple[int, ...] | None:
    """The strides of the tensor that these are the slices of, along `dim`; None if they are not."""
    first = tensors[0]
    if len(tensors) <= 1 or not 0 <= dim <= first.dim():
        return None
    # slices of one tensor are equally far apart in its storage
    step = tensors[1].storage_offset() - first.storage_offset()
    for place, tensor in enumerate(tensors):
        alike = tensor.shape == first.shape and tensor.stride() == first.stride() and tensor.dtype is first.dtype
        one_storage = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (alike and one_storage and tensor.storage_offset() == first.storage_offset() + place * step):
            return None
    # a step of 0 is an expanded tensor, and a negative one a reversed list
    if step <= 0:
        return None
    strides: tuple[Any, ...] = first.stride()
    return (*strides[:dim], int(step), *strides[dim:])


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """torch.unbind, whose gradient is one stack."""
    return x.unbind(dim)


def stack_or_none(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """The tensor that these are the slices of, without a copy; None if they are not."""
    if get_stack_strides(tensors, dim) is None:
        return None
    stacked: Tensor = _Stack.apply(dim, *tensors)
    return stacked


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, *tensors: Tensor) -> Tensor:
        ctx.dim, shape, strides = dim, list(tensors[0].shape), get_stack_strides(tensors, dim)
        assert strides is not None
        # as_strided: the result is a view of the first tensor's storage
        return tensors[0].as_strided([*shape[:dim], len(tensors), *shape[dim:]], strides)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # one unbind for all: the gradient of a view that was never copied
        return (None, *grads[0].unbind(ctx.dim))


__getattr__ = unknown(__name__)
