"""The transposed copy of FP8 data whose scales are the same both ways: by tensor, by row and by block.

    out[c, r] = data[r, c]      c < columns; rows of out are padded with zeros to whole 16 bytes

Quantizing gives both copies of a tensor at once (ops/fp8/quantize.py). A weight that arrives as FP8 bytes has one; its
transpose, which dgrad reads, has the same bytes. R C bytes are read and written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.fp8.formulas import DTYPES, padded
from powertrain.ops.fp8.tested import serves
from powertrain.ops.shapes import cdiv
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, use_kernel
from powertrain.runtime.launch import kernel

_BLOCK = 64


def fp8_transpose_ref(data: Tensor, columns: int) -> Tensor:
    """The specification of `fp8_transpose`, on bytes: the CPU copies no FP8 from a transposed view."""
    out = data.new_zeros((columns, padded(data.shape[0])), dtype=torch.uint8)
    out[:, : data.shape[0]] = data.view(torch.uint8)[:, :columns].T
    return out.view(data.dtype)


@kernel(aligned=("R16",))
def _transpose_kernel(
    data_ptr,
    out_ptr,
    R,
    C,
    R16,
    stride_dm,
    BLOCK: tl.constexpr,
):
    tiles_c = tl.cdiv(C, BLOCK)
    row, col = tl.program_id(0) // tiles_c * BLOCK, tl.program_id(0) % tiles_c * BLOCK
    lanes = tl.arange(0, BLOCK)
    rows, cols = row + lanes, col + lanes
    # 64 bits for the tile's place, 32 within it
    start = data_ptr + row.to(tl.int64) * stride_dm + col
    mask = (rows < R)[:, None] & (cols < C)[None, :]
    data = tl.load(start + lanes[:, None] * stride_dm + lanes[None, :], mask=mask, other=0)  # [BLOCK, BLOCK]
    # a conversion of 8-bit values between layouts gave wrong bytes on sm_90 (docs/log/fp8.md); of 32 bits it is right
    data = data.to(tl.int32).T.to(tl.uint8)
    start = out_ptr + col.to(tl.int64) * R16 + row
    where = lanes[:, None] * R16 + lanes[None, :]
    tl.store(start + where, data, mask=(cols < C)[:, None] & (rows < R16)[None, :])  # [BLOCK, BLOCK]


def _outputs(data: Tensor, columns: int, kernel: bool) -> Tensor:
    return data.new_empty((columns, padded(data.shape[0])))


def _launch(data: Tensor, out: Tensor) -> None:
    (R, _), (C, R16) = data.shape, out.shape
    _transpose_kernel[(cdiv(R16, _BLOCK) * cdiv(C, _BLOCK),)](
        data.view(torch.uint8), out.view(torch.uint8), R, C, R16, data.stride(0), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def _transpose(data: Tensor, columns: int, kernel: bool) -> Tensor:
    if not kernel or not data.numel() or not _kernel_serves(data.device):
        return fp8_transpose_ref(data, columns)
    out = _outputs(data, columns, kernel)
    _launch(data, out)
    return out


_tested: dict[int | None, str | None] = {}


def _kernel_serves(device: torch.device) -> bool:
    """Whether the kernel's bytes are right on a device; elsewhere plain PyTorch copies them."""
    return serves(_tested, device, "fp8_transpose", _self_test)


def _self_test(device: torch.device) -> str | None:
    """Every byte, in more than one tile each way, the last ones partial."""
    bytes_ = (torch.arange(150 * 208, dtype=torch.int32, device="cpu") * 37 % 251).to(torch.uint8).view(150, 208)
    data = bytes_.view(torch.float8_e4m3fn)
    out = _outputs(data.to(device), 200, True)
    _launch(data.to(device), out)
    right = fp8_transpose_ref(data, 200).view(torch.uint8)
    if torch.equal(out.view(torch.uint8).cpu(), right):
        return None
    return f"bytes of the transposed copy differ (triton {triton.__version__})"


transpose_op = Op("fp8_transpose(Tensor data, int columns, bool kernel) -> Tensor", _transpose, _outputs)


def fp8_transpose(data: Tensor, columns: int) -> Tensor:
    """The transpose of quantized data, as products over the rows read it.

    Shapes: R rows, C columns.
        data     [R, C padded to 16]  float8_e4m3fn or float8_e5m2, rows contiguous
        columns                       C, without the padding
    Returns [C, R padded to 16] in data's dtype, zeros beyond R: the bytes of `fp8_quantize`'s data_t by tensor, row and
        block, whose scales are the same for both copies. Deterministic. No gradient is defined.
    Raises ValueError naming the argument, the expected value and the given one.
    """
    op = "fp8_transpose"
    checks.require(data.dtype in DTYPES.values(), op, "data", "be FP8", checks.name(data.dtype))
    checks.require(data.dim() == 2, op, "data", "be [R, C]", list(data.shape))
    checks.require(data.stride(1) == 1 or data.shape[1] < 2, op, "data", "have contiguous rows", data.stride())
    if not 0 <= columns <= data.shape[1]:
        checks.fail(op, "columns", f"be at most {data.shape[1]} (of data)", columns)
    out: Tensor = transpose_op(data.detach(), columns, use_kernel("fp8_linear", data))
    return out
