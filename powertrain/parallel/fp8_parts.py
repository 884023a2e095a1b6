"""The format in which one rank's part of an FP8 operand is sent: data, then scales, in units of 16 bytes.

    operand    [R, C] with one scale for all ("tensor"), for each row ("row") or for 128 in a row ("group")
    part       uint8 [units, 16]: data [R, C padded to 16]; the scales of rows [R] or groups [C / 128, R], not of a
               tensor, which every rank knows

Each part is contiguous where it arrives, so products read its data and scales in place.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.fp8.formulas import ALIGN, GROUP, Quantized, magnitude_bits, padded, scale_of
from powertrain.ops.shapes import cdiv
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.base import RowCounts


class PartFormat(NamedTuple):
    """by: "tensor", "row" or "group"; dtype: of the data."""

    by: str
    dtype: torch.dtype

    def _scales(self, R: int, C: int) -> int:
        return {"tensor": 0, "row": R, "group": R * cdiv(C, GROUP)}[self.by]

    def units(self, R: int, C: int) -> int:
        """Size of a part [R, C] in units of 16 bytes."""
        return R * padded(C) // ALIGN + cdiv(4 * self._scales(R, C), ALIGN)

    def pack(self, q: Quantized) -> Tensor:
        parts = [q.data.contiguous().view(torch.uint8).flatten()]
        if self.by != "tensor" and q.data.numel():
            scales = q.scale_inv.T if self.by == "group" else q.scale_inv
            parts.append(scales.contiguous().view(torch.uint8).flatten())
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        return F.pad(flat, (0, -flat.numel() % ALIGN)).view(-1, ALIGN)

    def unpack(self, part: Tensor, R: int, C: int, scale_inv: Tensor | None = None) -> Quantized:
        """Views of a part. scale_inv: [1], by tensor."""
        flat, size = part.reshape(-1), R * padded(C)
        data = flat[:size].view(self.dtype).view(R, padded(C))
        if self.by == "tensor":
            assert scale_inv is not None
            return Quantized(data, scale_inv)
        scales = flat[size : size + 4 * self._scales(R, C)].view(torch.float32)
        return Quantized(data, scales if self.by == "row" else scales.view(cdiv(C, GROUP), R).T)


def whole_scales(overlap: Overlap, tensors: list[Tensor], formats: list[str], power_of_two: bool) -> list[Tensor]:
    """The scales by tensor, [1] each, of up to four tensors of which each rank has a part: the same on every rank."""
    amaxes = tensors[0].new_zeros((1, 4), dtype=torch.float32)
    for i, tensor in enumerate(tensors):
        # a rank may have nothing of it
        if tensor.numel():
            amaxes[0, i] = torch.linalg.vector_norm(tensor, torch.inf)
    everyone = overlap.transport.all_gather(amaxes, RowCounts((1,) * overlap.size))
    # as integers NaN is above all
    largest = magnitude_bits(everyone).amax(0).view(torch.float32)
    # 16 bytes apart, as products may want their pointers
    apart = torch.zeros_like(largest[:, None].expand(4, 4))
    for i, format in enumerate(formats):
        apart[i, 0] = scale_of(largest[i], format, power_of_two)
    return [apart[i, :1] for i in range(len(tensors))]
