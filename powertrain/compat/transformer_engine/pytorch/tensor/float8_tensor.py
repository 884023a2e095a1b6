"""TransformerEngine's quantizers with one scale a tensor, on `fp8_quantize`.

data = e(clamp(x * scale)),  x ≈ data * scale_inv      ops/fp8/formulas.py has both to the bit
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.constants import TE_DType_To_Torch, fp8_format
from powertrain.compat.transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage, Quantizer
from powertrain.ops.fp8.dequantize import fp8_dequantize
from powertrain.ops.fp8.formulas import Quantized, magnitude_bits, scale_of
from powertrain.ops.fp8.quantize import fp8_quantize
from powertrain.runtime import checks

__all__ = ["Float8CurrentScalingQuantizer", "Float8Quantizer", "Float8TensorStorage"]

_ONE_BYTE = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


def as_matrix(x: Tensor) -> Tensor:
    """x [..., C] as [R, C]; of a number [1, 1]."""
    return x.reshape(1, 1) if x.dim() == 0 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def as_bytes(data: Tensor, columns: int, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Quantized rows without their padding, as bytes in this shape."""
    return data.view(torch.uint8)[:, :columns].contiguous().view(shape)


def transposed_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """The last dim first."""
    return (*shape[-1:], *shape[:-1])


def last_dim_back(x: Tensor) -> Tensor:
    """A tensor whose last dim came first, in the order of its values' shape."""
    return x.movedim(0, -1).contiguous() if x.dim() > 1 else x


class Float8TensorStorage(QuantizedTensorStorage):
    """FP8 data with one scale.

    _data       uint8 bytes in the tensor's shape, or None; _transpose: of its transpose, the last dim first, or None
    _scale_inv  [1] float32; _fp8_dtype: a DType; fake_dtype: of the tensor that was quantized, float32 unless given
    """

    parts = ("_data", "_transpose", "_scale_inv")

    def __init__(
        self,
        *,
        data: Tensor | None,
        fp8_scale_inv: Tensor,
        fp8_dtype: Any,
        fake_dtype: torch.dtype | None = None,
        data_transpose: Tensor | None = None,
        quantizer: Quantizer | None = None,
    ) -> None:
        self._data, self._transpose, self._scale_inv = data, data_transpose, fp8_scale_inv
        self._fp8_dtype, _ = fp8_format("Float8TensorStorage", fp8_dtype)
        self._dtype, self._quantizer = fake_dtype or torch.float32, quantizer

    def __repr__(self) -> str:
        kind = f"fp8_dtype={self._fp8_dtype.name}, scale_inv={self._scale_inv.item()}"
        return f"Float8TensorStorage({kind}, data={self.dequantize()})"

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values, in `dtype`, or in the dtype of the tensor that was quantized. No gradient."""
        data = self._transpose if self._data is None else self._data
        checks.require(data is not None, "Float8TensorStorage", "data", "be there", None)
        assert data is not None
        # the storage has bytes, as there; their format is a name beside them
        rows = as_matrix(data).view(TE_DType_To_Torch[self._fp8_dtype])
        values = fp8_dequantize(Quantized(rows, self._scale_inv.view(1)), rows.shape[1], dtype or self._dtype)
        values = values.view(data.shape)
        return values if self._data is not None else last_dim_back(values)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Make, keep (None) or drop the data and that of the transpose; data cannot be made of the transpose."""
        if rowwise_usage and self._data is None:
            checks.fail("Float8TensorStorage", "rowwise_usage", "be False: there is only the transpose", True)
        # before the data may be dropped below: the transpose is made of it
        if columnwise_usage and self._transpose is None:
            assert self._data is not None
            self._transpose = as_matrix(self._data).T.contiguous().view(transposed_shape(self._data.shape))
        self._data = None if rowwise_usage is False else self._data
        self._transpose = None if columnwise_usage is False else self._transpose


class _PerTensor(Quantizer):
    """The common part of the two quantizers with one scale."""

    scale: Tensor
    amax: Tensor

    def _set_format(self, fp8_dtype: Any) -> None:
        self.dtype, self._format = fp8_format(type(self).__name__, fp8_dtype)

    def _storage(self, parts: dict[str, Tensor | None], dtype: torch.dtype) -> Float8TensorStorage:
        return Float8TensorStorage(
            data=parts.get("_data"), data_transpose=parts.get("_transpose"), fp8_scale_inv=parts.get("_scale_inv"),  # type: ignore[arg-type]
            fp8_dtype=self.dtype, fake_dtype=dtype, quantizer=self.copy(),
        )  # fmt: skip

    def _made(
        self, x: Tensor, scale: Tensor | None, power_of_two: bool
    ) -> tuple[dict[str, Tensor | None], Tensor, Tensor]:
        """Parts of the result, scale and amax."""
        checks.floating(f"{type(self).__name__}.quantize", tensor=x)
        rows = as_matrix(x)
        made = fp8_quantize(
            rows, "tensor", self._format, power_of_two=power_of_two, scale=scale, rows=self.rowwise_usage,
            columns=self.columnwise_usage, measure=True,
        )  # fmt: skip
        parts: dict[str, Tensor | None] = {"_data": None, "_transpose": None, "_scale_inv": made.scale_inv}
        # the op pads rows, the storage has the tensor's own shape
        if self.rowwise_usage:
            parts["_data"] = as_bytes(made.data, rows.shape[1], x.shape)
        if self.columnwise_usage:
            parts["_transpose"] = as_bytes(made.data_t, rows.shape[0], transposed_shape(x.shape))
        return parts, made.scale, made.amax

    def create_tensor_from_data(
        self, data: Tensor, fake_dtype: torch.dtype = torch.float32, requires_grad: bool = False, internal: bool = False
    ) -> Float8TensorStorage:
        """A storage of data that is FP8 already; scale_inv is 1 / scale."""
        op = f"{type(self).__name__}.create_tensor_from_data"
        checks.require(not requires_grad, op, "requires_grad", "be False: a storage has no gradient", requires_grad)
        checks.one_of(op, "data.dtype", data.dtype, _ONE_BYTE)
        return self._storage({"_data": data.view(torch.uint8), "_scale_inv": 1.0 / self.scale.view(1)}, fake_dtype)

    def supports_only_rowwise_all_gather(self) -> bool:
        """True: the transpose is made of the gathered data."""
        return True


class Float8Quantizer(_PerTensor):
    """FP8 with a given scale, as of delayed scaling.

    scale  [1] float32: tensors are multiplied by it; 0 on the device stands for the tensor's own scale
    amax   [1] float32: raised to the largest magnitude of each tensor; set it to 0 to begin anew
    Results: `Float8TensorStorage`. Numerics: ops/fp8/formulas.py, to the bit on every device.
    """

    def __init__(
        self, scale: Tensor, amax: Tensor, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        for name, x in (("scale", scale), ("amax", amax)):
            fits = x.dtype is torch.float32 and x.numel() == 1
            checks.require(fits, "Float8Quantizer", name, "be float32 of one element", f"{x.dtype}, {list(x.shape)}")
        self.scale, self.amax = scale, amax
        self._set_format(fp8_dtype)

    def _quantized(self, x: Tensor) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
        scale = self.scale.view(1).to(x.device)
        parts, _, amax = self._made(x, scale, False)
        return parts, {"amax": torch.maximum(self.amax.view(1).to(x.device), amax)}

    def calibrate(self, tensor: Tensor) -> None:
        """amax becomes the tensor's largest magnitude."""
        # amax of no elements raises, so 0 is written first
        self.amax.fill_(0.0)
        if tensor.numel():
            self.amax.copy_(tensor.detach().abs().amax().view_as(self.amax))

    def is_requantization_safe(self) -> bool:
        """False: scale may have changed."""
        return False


class Float8CurrentScalingQuantizer(_PerTensor):
    """FP8 with each tensor's own scale.

    device             of `scale` and `amax`, [1] float32, which hold those of the last tensor
    with_amax_reduction  the largest magnitude of all ranks of amax_reduction_group (None: all) is taken
    force_pow_2_scales scales are rounded down to powers of two
    amax_epsilon       magnitudes below count as this
    Results: `Float8TensorStorage`. Numerics: ops/fp8/formulas.py, to the bit on every device.
    """

    def __init__(
        self,
        fp8_dtype: Any,
        device: torch.device | str,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._set_format(fp8_dtype)
        self.scale, self.amax = torch.ones(2, 1, dtype=torch.float32, device=device).unbind()
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group
        self.force_pow_2_scales, self.amax_epsilon = force_pow_2_scales, amax_epsilon

    def _quantized(self, x: Tensor) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
        # the kernels measure and scale in one call where nothing changes the magnitude in between
        if not self.with_amax_reduction and not self.amax_epsilon:
            parts, scale, amax = self._made(x, None, self.force_pow_2_scales)
            return parts, {"scale": scale, "amax": amax}
        amax = x.new_zeros(1, dtype=torch.float32)
        if x.numel():
            # as integers, which put NaN on top as the kernels do
            amax = magnitude_bits(x.detach().float()).amax().reshape(1).view(torch.float32)
        if self.with_amax_reduction:
            # one scale for a tensor whose parts are on several ranks
            dist.all_reduce(amax, dist.ReduceOp.MAX, self.amax_reduction_group)
        # a NaN is not below epsilon
        scale = scale_of(
            torch.where(amax < self.amax_epsilon, self.amax_epsilon, amax), self._format, self.force_pow_2_scales
        )
        parts, _, _ = self._made(x, scale, False)
        return parts, {"scale": scale, "amax": amax}


__getattr__ = unknown(__name__)
