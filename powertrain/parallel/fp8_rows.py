"""Rows that travel in FP8: their data, then their scales, as the bytes of one row.

    row       data of C elements, padded to whole 16; then one float32 (`Row()`), or one for each 128 elements
              (`Block()`); padded to whole 16 bytes

A row's scales are its own, so rows are rounded alike before and after a transfer, whatever rows are beside them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.fp8.dequantize import fp8_dequantize
from powertrain.ops.fp8.formulas import ALIGN, DTYPES, GROUP, Quantized, padded
from powertrain.ops.fp8.quantize import fp8_quantize
from powertrain.ops.shapes import cdiv
from powertrain.quant.recipe import Block, Recipe, Row
from powertrain.runtime import checks

FP8_DTYPE = DTYPES["e4m3"]


def check_wire(op: str, wire: Recipe | None) -> None:
    """Raise ValueError unless the scales of `wire` are a row's own."""
    good = wire is None or isinstance(wire, Row | Block)
    checks.require(good, op, "wire", "be None, Row() or Block(), whose scales are a row's own", wire)


@dataclass(frozen=True)
class FP8Rows:
    """How rows [n, columns] of a dtype travel: rounded to e4m3 by the scales of `wire`."""

    wire: Row | Block
    columns: int
    dtype: torch.dtype

    @property
    def num_scales(self) -> int:
        return 1 if isinstance(self.wire, Row) else cdiv(self.columns, GROUP)

    @property
    def row_bytes(self) -> int:
        return cdiv(padded(self.columns) + 4 * self.num_scales, ALIGN) * ALIGN

    def pack(self, rows: Tensor) -> Tensor:
        """rows [n, columns], rounded, as uint8 [n, row_bytes]."""
        by = "row" if isinstance(self.wire, Row) else "group"
        copies = fp8_quantize(rows, by, power_of_two=self.wire.power_of_two, columns=False)
        scales = copies.scale_inv.reshape(len(rows), self.num_scales).contiguous()
        packed = torch.cat([copies.data.view(torch.uint8), scales.view(torch.uint8)], 1)
        return F.pad(packed, (0, self.row_bytes - packed.shape[1]))

    def quantized(self, packed: Tensor) -> Quantized:
        """The data and scales of uint8 [n, row_bytes]: views."""
        width = padded(self.columns)
        scales = packed[:, width : width + 4 * self.num_scales].view(torch.float32)
        return Quantized(packed[:, :width].view(FP8_DTYPE), scales[:, 0] if isinstance(self.wire, Row) else scales)

    def unpack(self, packed: Tensor) -> Tensor:
        """The rounded rows [n, columns] in dtype, of uint8 [n, row_bytes]."""
        return fp8_dequantize(self.quantized(packed), self.columns, self.dtype)
