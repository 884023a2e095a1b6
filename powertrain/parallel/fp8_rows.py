"""The format of rows that are sent in FP8: each row's data, then its scales, as bytes.

    row       data of C elements, padded to whole 16; then one float32 (`Row()`), or one for each 128 elements
              (`Block()`); padded to whole 16 bytes

A row's scales are its own, so rows are rounded alike before and after a transfer, whatever rows are beside them.
"""

from dataclasses import dataclass

import torch
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
    """Packs rows [n, columns] of a dtype for sending: rounded to e4m3 with the scales of `wire`."""

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
        width, num_scales = padded(self.columns), self.num_scales
        packed = rows.new_empty((len(rows), self.row_bytes), dtype=torch.uint8)
        # by 8 and 4 bytes: concatenating rows of bytes took six times as long as copying them
        packed.view(torch.int64)[:, : width // 8] = copies.data.view(torch.int64)
        packed.view(torch.float32)[:, width // 4 : width // 4 + num_scales] = copies.scale_inv.reshape(-1, num_scales)
        packed[:, width + 4 * num_scales :] = 0
        return packed

    def quantized(self, packed: Tensor) -> Quantized:
        """The data and scales of uint8 [n, row_bytes]: views."""
        width = padded(self.columns)
        scales = packed[:, width : width + 4 * self.num_scales].view(torch.float32)
        return Quantized(packed[:, :width].view(FP8_DTYPE), scales[:, 0] if isinstance(self.wire, Row) else scales)

    def unpack(self, packed: Tensor) -> Tensor:
        """The rounded rows [n, columns] in dtype, of uint8 [n, row_bytes]."""
        return fp8_dequantize(self.quantized(packed), self.columns, self.dtype)
