"""Tensor subclass of a weight that FSDP2 has all-gathered as FP8 bytes and scales (powertrain/quant/wire.py)."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from powertrain.ops.fp8.formulas import Copies, Quantized, dequantized

_aten = torch.ops.aten
# FSDP and nn.Parameter make views of the whole weight; they are the same bytes
_VIEWS = {_aten.detach.default, _aten.alias.default, _aten.as_strided.default}


class GatheredWeight(Tensor):
    """[N, K] of the model's dtype, stored as FP8 data and scales; FP8 GEMMs read these, other ops the rounded values.

    The memory of its data is FSDP's: it is freed when the weight is resharded. `FrozenWeight` (frozen.py) has its own.
    """

    quantized: Quantized  # data [N, K padded], scale_inv
    largest: Tensor | None  # magnitude of the whole weight, [1], by tensor
    is_frozen = False
    undoing = "change the sharded parameter, or undo it"  # for those who would change it

    @staticmethod
    def __new__(
        cls, quantized: Quantized, largest: Tensor | None, size: tuple[int, ...] | torch.Size, dtype: torch.dtype
    ) -> "GatheredWeight":
        weight: GatheredWeight = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=quantized.data.device)
        weight.quantized, weight.largest = quantized, largest
        return weight

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _VIEWS and (func is not _aten.as_strided.default or _is_whole(*args)):
            return type(args[0])(args[0].quantized, args[0].largest, args[0].shape, args[0].dtype)
        kwargs = kwargs or {}
        if func._schema.is_mutable and _is_written(func, args, kwargs):
            raise NotImplementedError(f"{func}: a weight held in FP8 cannot be changed; {cls.undoing}")
        read = tree_map_only(GatheredWeight, GatheredWeight.rounded, (args, kwargs))
        return func(*read[0], **read[1])

    def rounded(self) -> Tensor:
        """The values that the FP8 data stand for, in this weight's dtype."""
        return dequantized(self.quantized, self.shape[1]).to(self.dtype)

    def copies(self) -> Copies:
        """As `quantized_weight` gives them, without the transposed copy, which backward makes."""
        data, scale_inv = self.quantized
        none, none_t = scale_inv.new_empty(0), data.new_empty(0)
        return Copies(data, none_t, none, scale_inv, none, none if self.largest is None else self.largest)

    def stand_in(self) -> Tensor:
        """A plain tensor of its shape and dtype, all NaN in the memory of one element, whose gradient is this one's.

        For `fp8_linear`, which reads no value of a weight whose copies it has.
        """
        gathered: Tensor = _StandIn.apply(self)
        return gathered

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GatheredWeight({list(self.shape)}, {self.dtype}, {self.quantized.data.dtype})"


def _is_whole(weight: GatheredWeight, size: Any, stride: Any, offset: int | None = None) -> bool:
    return tuple(size) == weight.shape and tuple(stride) == weight.stride() and not offset


def _is_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the function writes to such a weight, and not only reads it."""
    given = [*zip(func._schema.arguments, args, strict=False)]
    given += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    written = [value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write]
    return any(isinstance(leaf, GatheredWeight) for leaf in tree_leaves(written))


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: GatheredWeight) -> Tensor:
        nan = torch.full((1, 1), torch.nan, dtype=weight.dtype, device=weight.device)
        return nan.expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
