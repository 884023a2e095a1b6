"""Formulas of FP8 quantization, in plain PyTorch: the specification of the kernels, to the bit, and the CPU path.

    amax  = the largest |x| of the elements that share a scale, compared as integers: NaN is above inf, inf above all
    scale = max / amax              max: 448 (e4m3), 57344 (e5m2); division rounded to nearest
            FLT_MAX where that is inf; 1 where amax is 0, inf or NaN
            power of two: the mantissa bits of scale are cleared (rounded down)
    data  = e(clamp(x * scale, -max, max))      e rounds to nearest even; NaN stays NaN (0x7f)
    x     ≈ data * scale_inv,  scale_inv = 1 / scale

Elements that share a scale, by `by`:  tensor: all; row: one row; group: 128 in a row (1x128); block: 128x128. The last
group and block may be partial. All in float32.

Sources: TransformerEngine's Float8CurrentScaling and Float8BlockScaling for the cases of amax 0, inf, NaN and a scale
that overflows; DeepSeek-V3, arXiv:2412.19437, for groups and blocks.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.shapes import cdiv

GROUP = 128  # elements along a row that share a scale, and rows of a block
ALIGN = 16  # rows of quantized data are padded with zeros to whole 16 bytes, as TMA and cuBLAS read them
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MAX = {"e4m3": 448.0, "e5m2": 57344.0}
BY = ("tensor", "row", "group", "block")
FLT_MAX = torch.finfo(torch.float32).max


class Quantized(NamedTuple):
    """One operand of an FP8 product: the values are `data * scale_inv`.

    data       [R, C padded to 16] float8_e4m3fn or float8_e5m2, zeros beyond C
    scale_inv  float32: [1], [R], [R, C / 128] or [R / 128, C / 128], rounded up
    """

    data: Tensor
    scale_inv: Tensor


class Copies(NamedTuple):
    """Results of one quantization: an empty tensor for each part that was not requested.

    data, data_t              [R, C padded] and its transpose [C, R padded]
    scale                     of "tensor" and "row": what x was multiplied by, [1] or [R]
    scale_inv, scale_inv_t    see `Quantized`; by "tensor" and "row" there is one for both copies, scale_inv
    amax                      [1]
    """

    data: Tensor
    data_t: Tensor
    scale: Tensor
    scale_inv: Tensor
    scale_inv_t: Tensor
    amax: Tensor

    @property
    def rows(self) -> Quantized:
        return Quantized(self.data, self.scale_inv)

    @property
    def columns(self) -> Quantized:
        return Quantized(self.data_t, self.scale_inv_t if self.scale_inv_t.numel() else self.scale_inv)


def granularity(q: Quantized) -> str:
    """Which elements share a scale: "tensor", "row", "group" or "block"."""
    if q.scale_inv.dim() == 1:
        return "tensor" if q.scale_inv.shape[0] == 1 else "row"
    return "group" if q.scale_inv.shape[0] == q.data.shape[0] else "block"


def scale_strides(q: Quantized) -> tuple[int, int]:
    """Strides of the scales in elements: between rows (or blocks of rows) and between groups; 0 for a shared scale."""
    if q.scale_inv.dim() == 2:
        return q.scale_inv.stride(0), q.scale_inv.stride(1)
    return (0 if q.scale_inv.shape[0] == 1 else 1), 0


def padded(size: int) -> int:
    """A row's length in quantized data."""
    return cdiv(size, ALIGN) * ALIGN


def magnitude_bits(x: Tensor) -> Tensor:
    """|x| of float32 values as int32, whose order is that of the magnitudes, with NaN on top."""
    return x.contiguous().view(torch.int32) & 0x7FFFFFFF


def scale_of(amax: Tensor, format: str, power_of_two: bool) -> Tensor:
    """The scale for a largest magnitude, float32."""
    # a number over a tensor would be its reciprocal times the number, rounded twice
    scale = torch.full_like(amax, MAX[format]).div(amax).clamp(max=FLT_MAX)
    scale = torch.where((amax > 0) & amax.isfinite(), scale, 1.0)
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32) if power_of_two else scale


def cast(x: Tensor, format: str) -> Tensor:
    """float32 to FP8: saturates, rounds to nearest even, keeps NaN as 0x7f."""
    limit = MAX[format]
    return torch.where(x.isnan(), torch.nan, x.clamp(-limit, limit)).to(DTYPES[format])


def _amax(x: Tensor, by: str) -> Tensor:
    """[1], [R, 1], [R, C / 128] or [R / 128, C / 128]."""
    bits = magnitude_bits(x)
    if by == "tensor":
        found = bits.amax().reshape(1)
    elif by == "row":
        found = bits.amax(1, keepdim=True)
    else:
        height = GROUP if by == "block" else 1
        rows, cols = cdiv(x.shape[0], height), cdiv(x.shape[1], GROUP)
        bits = F.pad(bits, (0, cols * GROUP - x.shape[1], 0, rows * height - x.shape[0]))
        found = bits.view(rows, height, cols, GROUP).amax((1, 3))
    return found.view(torch.float32)


def spread(scale: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """The scale of every element of a [R, C] tensor, from scales in any of the four shapes."""
    R, C = shape
    if scale.dim() == 1:
        return scale.expand(R)[:, None].expand(R, C) if scale.shape[0] == 1 else scale[:, None].expand(R, C)
    rows = scale if scale.shape[0] == R else scale.repeat_interleave(GROUP, 0)[:R]
    return rows.repeat_interleave(GROUP, 1)[:, :C]


def _quantized(x: Tensor, scale: Tensor, format: str) -> Tensor:
    data = cast(x * spread(scale, x.shape), format)
    # torch's constant_pad has no FP8 on the CPU; a byte of zeros is zero in both formats
    return F.pad(data.view(torch.uint8), (0, padded(x.shape[1]) - x.shape[1])).view(DTYPES[format])


def quantize_ref(
    x: Tensor,
    by: str,
    format: str,
    *,
    power_of_two: bool = True,
    scale: Tensor | None = None,
    fold: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Copies:
    """The specification of `fp8_quantize`: both copies of x [R, C] (not empty)."""
    x = x.float()
    if offsets is not None:
        groups = (offsets[None, :] <= torch.arange(x.shape[0], device=x.device)[:, None]).sum(1)
        x = torch.where((groups < offsets.shape[0])[:, None], x, 0.0)
        fold = None if fold is None else fold[groups.clamp(max=offsets.shape[0] - 1)]
    x = x if fold is None else x * fold
    amax = _amax(x, "tensor")
    if by in ("group", "block"):
        scales = [scale_of(_amax(part, by), format, power_of_two) for part in (x, x.T)]
        data = [_quantized(part, s, format) for part, s in zip((x, x.T), scales, strict=True)]
        none = x.new_empty(0)
        return Copies(data[0], data[1], none, 1.0 / scales[0], 1.0 / scales[1], amax)
    own = scale_of(_amax(x, by).reshape(-1), format, power_of_two)
    # 0: no scale is known yet, so the tensor's own is used
    scale = own if scale is None else torch.where(scale == 0, own, scale)
    data = [cast(x * spread(scale, x.shape), format).view(torch.uint8)]
    data.append(data[0].T)
    wide = [F.pad(d, (0, padded(d.shape[1]) - d.shape[1])).view(DTYPES[format]) for d in data]
    return Copies(wide[0], wide[1], scale.clone(), 1.0 / scale, x.new_empty(0), amax)


def dequantized(q: Quantized, columns: int | None = None) -> Tensor:
    """The values of one operand, float32 [R, C]; columns: C, without the padding."""
    data = q.data.float()
    return (data * spread(q.scale_inv, data.shape))[:, :columns]


def fp8_gemm_ref(a: Quantized, b: Quantized, bias: Tensor | None = None) -> Tensor:
    """The specification of `fp8_gemm`, in float64."""
    x, y = (q.data.double() * spread(q.scale_inv.double(), q.data.shape) for q in (a, b))
    out = x @ y.T
    return out if bias is None else out + bias.double()
