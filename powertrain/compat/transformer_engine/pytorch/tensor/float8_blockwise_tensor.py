"""TransformerEngine's quantizer with a scale for 1x128 or 128x128 elements, on `fp8_quantize`."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.constants import TE_DType_To_Torch, fp8_format
from powertrain.compat.transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage, Quantizer
from powertrain.compat.transformer_engine.pytorch.tensor.float8_tensor import (
    as_bytes,
    as_matrix,
    last_dim_back,
    transposed_shape,
)
from powertrain.ops.conversion import unsupported
from powertrain.ops.fp8.dequantize import fp8_dequantize
from powertrain.ops.fp8.formulas import GROUP, Quantized
from powertrain.ops.fp8.quantize import fp8_quantize
from powertrain.ops.shapes import cdiv
from powertrain.runtime import checks

__all__ = ["Float8BlockQuantizer", "Float8BlockwiseQTensorStorage"]


class Float8BlockwiseQTensorStorage(QuantizedTensorStorage):
    """FP8 data with a scale for 128x128 elements (is_2D_scaled) or 1x128.

    _rowwise_data          uint8 bytes in the tensor's shape [..., C], R rows, or None
    _rowwise_scale_inv     float32: 2D [R / 128, C / 128 rounded up to 4]; 1D, transposed, [C / 128, R rounded up to 4]
    _columnwise_data, _columnwise_scale_inv   the same of the transpose [C, ...], whose groups run along R, or None
    """

    parts = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")

    def __init__(
        self,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        fp8_dtype: Any,
        quantizer: Quantizer | None,
        is_2D_scaled: bool,
        fake_dtype: torch.dtype | None = None,
    ) -> None:
        self._rowwise_data, self._rowwise_scale_inv = rowwise_data, rowwise_scale_inv
        self._columnwise_data, self._columnwise_scale_inv = columnwise_data, columnwise_scale_inv
        self._fp8_dtype, _ = fp8_format("Float8BlockwiseQTensorStorage", fp8_dtype)
        self._is_2D_scaled, self._dtype, self._quantizer = is_2D_scaled, fake_dtype or torch.float32, quantizer

    def __repr__(self) -> str:
        kind = f"fp8_dtype={self._fp8_dtype.name}, is_2D_scaled={self._is_2D_scaled}"
        return f"Float8BlockwiseQTensorStorage({kind}, data={self.dequantize()})"

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values, in `dtype`, or in the dtype of the tensor that was quantized. No gradient."""
        by_rows = self._rowwise_data is not None
        data = self._rowwise_data if by_rows else self._columnwise_data
        scale = self._rowwise_scale_inv if by_rows else self._columnwise_scale_inv
        if data is None or scale is None:
            checks.fail("Float8BlockwiseQTensorStorage", "data", "be there", None)
        # a transpose's rows are the last dim of the values, which is its first
        rows = as_matrix(data) if by_rows else data.reshape(data.shape[0], data.shape[1:].numel())
        rows = rows.view(TE_DType_To_Torch[self._fp8_dtype])
        groups = cdiv(rows.shape[1], GROUP)
        # without the padding up to 4
        scale = scale[:, :groups] if self._is_2D_scaled else scale[:, : rows.shape[0]].T
        values = fp8_dequantize(Quantized(rows, scale), rows.shape[1], dtype or self._dtype).view(data.shape)
        return values if by_rows else last_dim_back(values)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Make, keep (None) or drop the data and that of the transpose; only 2D scales are the transpose's too."""
        op = "Float8BlockwiseQTensorStorage"
        if rowwise_usage and self._rowwise_data is None:
            checks.fail(op, "rowwise_usage", "be False: there is only the transpose", True)
        if columnwise_usage and self._columnwise_data is None:
            if not self._is_2D_scaled:
                checks.fail(
                    op, "columnwise_usage", "be asked of the quantizer: 1x128 scales are not the transpose's", True
                )
            assert self._rowwise_data is not None and self._rowwise_scale_inv is not None
            rows = as_matrix(self._rowwise_data)
            self._columnwise_data = rows.T.contiguous().view(transposed_shape(self._rowwise_data.shape))
            # the padding is of columns, which become rows
            scale = self._rowwise_scale_inv[:, : cdiv(rows.shape[1], GROUP)]
            self._columnwise_scale_inv = _filled(scale.T.contiguous())
        if rowwise_usage is False:
            # last: the transpose above is made of them
            self._rowwise_data = self._rowwise_scale_inv = None
        if columnwise_usage is False:
            self._columnwise_data = self._columnwise_scale_inv = None


class Float8BlockQuantizer(Quantizer):
    """FP8 with a scale for 128x128 elements (block_scaling_dim 2: weights) or 1x128 (1: activations, gradients).

    force_pow_2_scales  scales are rounded down to powers of two. amax_epsilon must be 0.
    Results: `Float8BlockwiseQTensorStorage` of any size; the last block may be partial.
    Numerics: ops/fp8/formulas.py, to the bit on every device.
    """

    block_len = GROUP

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        op = "Float8BlockQuantizer"
        checks.one_of(op, "block_scaling_dim", block_scaling_dim, (1, 2))
        # the quantization kernels compute each block's amax and scale at once
        if amax_epsilon:
            unsupported(op, "amax_epsilon", amax_epsilon, "0.0, or that of Float8CurrentScalingQuantizer")
        self.dtype, self._format = fp8_format(op, fp8_dtype)
        self.amax_epsilon, self.force_pow_2_scales = amax_epsilon, force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim

    def _storage(self, parts: dict[str, Tensor | None], dtype: torch.dtype) -> Float8BlockwiseQTensorStorage:
        return Float8BlockwiseQTensorStorage(
            parts.get("_rowwise_data"), parts.get("_rowwise_scale_inv"), parts.get("_columnwise_data"),
            parts.get("_columnwise_scale_inv"), self.dtype, self.copy(), self.block_scaling_dim == 2, dtype,
        )  # fmt: skip

    def _quantized(self, x: Tensor) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
        checks.floating("Float8BlockQuantizer.quantize", tensor=x)
        rows = as_matrix(x)
        made = fp8_quantize(
            rows, "block" if self.block_scaling_dim == 2 else "group", self._format,
            power_of_two=self.force_pow_2_scales, rows=self.rowwise_usage, columns=self.columnwise_usage,
        )  # fmt: skip
        parts: dict[str, Tensor | None] = dict.fromkeys(Float8BlockwiseQTensorStorage.parts)
        if self.rowwise_usage:
            parts["_rowwise_data"] = as_bytes(made.data, rows.shape[1], x.shape)
            parts["_rowwise_scale_inv"] = self._as_theirs(made.scale_inv)
        if self.columnwise_usage:
            parts["_columnwise_data"] = as_bytes(made.data_t, rows.shape[0], transposed_shape(x.shape))
            parts["_columnwise_scale_inv"] = self._as_theirs(made.scale_inv_t)
        return parts, {}

    def _as_theirs(self, scale_inv: Tensor) -> Tensor:
        return _filled((scale_inv.T if self.block_scaling_dim == 1 else scale_inv).contiguous())

    def get_scale_shape(self, shape: Iterable[int], columnwise: bool) -> tuple[int, int]:
        """Shape of the scales of a tensor of this shape, or of its transpose."""
        sizes = tuple(shape)
        rows, columns = torch.Size(sizes[:-1]).numel(), sizes[-1] if sizes else 1
        rows, columns = (columns, rows) if columnwise else (rows, columns)
        blocks = cdiv(rows, GROUP), cdiv(columns, GROUP)
        return (blocks[0], _up(blocks[1])) if self.block_scaling_dim == 2 else (blocks[1], _up(rows))

    def get_columnwise_shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        """The last dim first."""
        return transposed_shape(tuple(shape))

    def is_quantizable(self, inp: Tensor) -> bool:
        """Whether TransformerEngine would quantize it: whole blocks. Here any size can be."""
        return inp.dim() > 1 and inp.shape[-1] % GROUP == 0 and inp.shape[:-1].numel() % GROUP == 0


def _up(size: int) -> int:
    """Rows of scales have whole 16 bytes there, as cuBLAS reads them."""
    return cdiv(size, 4) * 4


def _filled(scale: Tensor) -> Tensor:
    return F.pad(scale, (0, _up(scale.shape[1]) - scale.shape[1]))


__getattr__ = unknown(__name__)
