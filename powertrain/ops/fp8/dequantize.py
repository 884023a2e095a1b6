"""Dequantization of FP8 data to a floating dtype, for every granularity of scales.

    out[r, c] = data[r, c] * scale_inv of (r, c)      c < columns; float32 product, rounded once to the dtype

For data that arrives quantized and is wanted in 16 bits: rows from other ranks, weights of a checkpoint. With scales
that are powers of two the results are exact in bfloat16, unless they leave its range.
1 byte is read and the dtype's written an element.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.fp8.formulas import DTYPES, GROUP, Quantized, dequantized
from powertrain.ops.fp8.tested import serves
from powertrain.ops.shapes import cdiv
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, use_kernel
from powertrain.runtime.launch import kernel

_BLOCK_R = 32  # of rows of one group: 16 elements a thread of 8 warps, which are one load of 16 bytes


def fp8_dequantize_ref(data: Tensor, scale_inv: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The specification of `fp8_dequantize`."""
    return dequantized(Quantized(data[:, :columns], scale_inv)).to(dtype)


@kernel(aligned=("C",), unaligned=("scale_ptr",))
def _dequantize_kernel(
    data_ptr,
    scale_ptr,
    out_ptr,
    R,
    C,
    stride_dm,
    stride_om,
    step_r,  # of scales; as strides they would be among those that must all be multiples of 16
    step_g,
    ROWS: tl.constexpr,  # rows that share a scale: 1 or 128
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    tiles_c = tl.cdiv(C, BLOCK_C)
    row, group = tl.program_id(0) // tiles_c * BLOCK_R, tl.program_id(0) % tiles_c
    lanes = tl.arange(0, BLOCK_R)
    rows, cols = row + lanes, group * BLOCK_C + tl.arange(0, BLOCK_C)
    scale_ptr += group.to(tl.int64) * step_g + (rows // ROWS).to(tl.int64) * step_r
    scale = tl.load(scale_ptr, mask=rows < R, other=0.0)  # [BLOCK_R]
    mask = (rows < R)[:, None] & (cols < C)[None, :]
    # 64 bits for the tile's place, 32 within it
    data_ptr += row.to(tl.int64) * stride_dm
    out_ptr += row.to(tl.int64) * stride_om
    data = tl.load(data_ptr + lanes[:, None] * stride_dm + cols[None, :], mask=mask, other=0.0)  # [BLOCK_R, BLOCK_C]
    out = data.to(tl.float32) * scale[:, None]
    tl.store(out_ptr + lanes[:, None] * stride_om + cols[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


def _outputs(data: Tensor, scale_inv: Tensor, columns: int, dtype: torch.dtype, kernel: bool) -> Tensor:
    return data.new_empty((data.shape[0], columns), dtype=dtype)


def _launch(data: Tensor, scale_inv: Tensor, out: Tensor) -> None:
    R, C = out.shape
    rows, step_r, step_g = 1, 0, 0
    if scale_inv.dim() == 2:
        # one row of scales may be a group's of one row, or a block's of up to 128
        rows = 1 if scale_inv.shape[0] == R else GROUP
        step_r, step_g = scale_inv.stride()
    elif scale_inv.shape[0] > 1:
        step_r = scale_inv.stride(0)
    _dequantize_kernel[(cdiv(R, _BLOCK_R) * cdiv(C, GROUP),)](
        data, scale_inv, out, R, C, data.stride(0), out.stride(0), step_r, step_g,
        ROWS=rows, BLOCK_R=_BLOCK_R, BLOCK_C=GROUP, num_warps=8,
    )  # fmt: skip


def _dequantize(data: Tensor, scale_inv: Tensor, columns: int, dtype: torch.dtype, kernel: bool) -> Tensor:
    if not kernel or not data.numel() or not columns or not _kernel_serves(data.device, data.dtype):
        return fp8_dequantize_ref(data, scale_inv, columns, dtype)
    out = _outputs(data, scale_inv, columns, dtype, kernel)
    _launch(data, scale_inv, out)
    return out


_tested: dict[torch.dtype, dict[int | None, str | None]] = {dtype: {} for dtype in DTYPES.values()}


def _kernel_serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel's values are right on a device; elsewhere plain PyTorch computes them."""
    return serves(_tested[dtype], device, "fp8_dequantize", partial(_self_test, dtype=dtype))


def _self_test(device: torch.device, dtype: torch.dtype) -> str | None:
    """Every byte with scales of each kind, in more than one tile each way, the last ones partial."""
    data = (
        (torch.arange(150 * 272, dtype=torch.int32, device="cpu") * 37 % 256).to(torch.uint8).view(150, 272).view(dtype)
    )
    for shape in ((1,), (150,), (150, 3), (2, 3)):
        count = torch.Size(shape).numel()
        scale_inv = torch.exp2((torch.arange(count, device="cpu") % 17 - 8).float()).view(shape)
        for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
            found = _outputs(data.to(device), scale_inv, 270, out_dtype, True)
            _launch(data.to(device), scale_inv.to(device), found)
            right = fp8_dequantize_ref(data, scale_inv, 270, out_dtype)
            if not torch.equal(found.cpu().nan_to_num(9.0), right.nan_to_num(9.0)):
                return (
                    f"values of {checks.name(dtype)} in {checks.name(out_dtype)} differ (triton {triton.__version__})"
                )
    return None


dequantize_op = Op(
    "fp8_dequantize(Tensor data, Tensor scale_inv, SymInt columns, ScalarType dtype, bool kernel) -> Tensor",
    _dequantize,
    _outputs,
)


def fp8_dequantize(q: Quantized, columns: int, dtype: torch.dtype) -> Tensor:
    """The values of quantized data.

    Shapes: R rows, C columns.
        q        data [R, C padded] float8_e4m3fn or float8_e5m2, rows contiguous; scale_inv float32 on its device: [1],
                 [R], [R, C / 128] or [R / 128, C / 128] rounded up. [1] and [1, ...] of one row are the same
        columns  C, without the padding
        dtype    float32, float16, bfloat16 or float64
    Returns [R, C] in dtype, contiguous.
    Numerics: the float32 product, rounded once to nearest even; NaN stays NaN. Deterministic, alike on every device.
    Raises ValueError naming the argument, the expected value and the given one. No gradient is defined.
    """
    op, (data, scale_inv) = "fp8_dequantize", q
    checks.require(data.dtype in DTYPES.values(), op, "q.data", "be FP8", checks.name(data.dtype))
    checks.require(data.dim() == 2, op, "q.data", "be [R, C]", list(data.shape))
    checks.require(data.stride(1) == 1 or data.shape[1] < 2, op, "q.data", "have contiguous rows", data.stride())
    if not 0 <= columns <= data.shape[1]:
        checks.fail(op, "columns", f"be at most {data.shape[1]} (of q.data)", columns)
    checks.one_of(op, "dtype", dtype, (*checks.FLOATS, torch.float64))
    good = scale_inv.dtype is torch.float32
    checks.require(good, op, "q.scale_inv", "be float32", checks.name(scale_inv.dtype))
    checks.same_device(op, "q.data", data, **{"q.scale_inv": scale_inv})
    groups, (R, _) = cdiv(columns, GROUP), data.shape
    shapes = [[1], [R], [R, groups], [cdiv(R, GROUP), groups]]
    must = f"have shape {', '.join(map(str, shapes[:-1]))} or {shapes[-1]}"
    checks.require([*scale_inv.shape] in shapes, op, "q.scale_inv", must, list(scale_inv.shape))
    out: Tensor = dequantize_op(data.detach(), scale_inv.detach(), columns, dtype, use_kernel("fp8_linear", data))
    return out
