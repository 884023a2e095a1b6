"""What tests launch of the FP8 kernels on meta tensors: those that the sizes of the cases leave to PyTorch."""

import torch

from powertrain.ops.fp8.current import fp8_quantize_current, new_states
from powertrain.ops.fp8.dequantize import fp8_dequantize
from powertrain.ops.fp8.gated import fp8_gated_activation
from powertrain.ops.fp8.gemm import fp8_gemm
from powertrain.ops.fp8.grouped import fp8_grouped_gemm
from powertrain.ops.fp8.quantize import fp8_quantize
from powertrain.ops.fp8.transpose import fp8_transpose

META = torch.device("meta")


def launch_fp8_kernels(dtype: torch.dtype) -> None:
    """Every kind of launch: granularities, both formats, a given scale, amax, a folded one, all pairs of a product."""
    x = torch.empty(512, 20000, dtype=dtype, device=META)  # rows too long for one block
    fold = torch.empty(20000, device=META)
    fp8_quantize(x, "row", fold=fold, measure=True)
    for format in ("e4m3", "e5m2"):
        for by in ("tensor", "row", "group", "block"):
            fp8_quantize(x, by, format, power_of_two=False)
    fp8_quantize(x, "tensor", scale=torch.empty(1, device=META), measure=True)
    x = x[:, :4096]
    for rows, columns in ((True, True), (True, False)):
        fp8_quantize_current(x, new_states(1, META)[0], "e4m3", rows=rows, columns=columns)
    fp8_quantize_current(x[:, :100].contiguous(), new_states(1, META)[0], "e5m2")  # rows of no whole 16 elements
    gate, up = (torch.empty(512, 4096, dtype=dtype, device=META, requires_grad=True) for _ in range(2))
    fp8_gated_activation(gate, up).backward(torch.empty_like(gate))
    fp8_transpose(fp8_quantize(x, "row", columns=False).data, 4096)
    operands = {by: fp8_quantize(x, by).rows for by in ("tensor", "row", "group", "block")}
    grads = {by: fp8_quantize(x, by, "e5m2").rows for by in ("tensor", "group")}
    for q in operands.values():
        fp8_dequantize(q, 4096, dtype)
    total = torch.empty(512, 512, device=META)
    for a, b in (("tensor", "tensor"), ("row", "row"), ("group", "block"), ("group", "group")):
        fp8_gemm(operands[a], operands[b], out_dtype=dtype, backend="triton")
    for by in ("tensor", "group"):
        fp8_gemm(grads[by], operands[by], out=total, accumulate=True, backend="triton")
    fp8_gemm(operands["group"], operands["block"], out_dtype=dtype, bias=x.new_empty(512), backend="triton")
    # by row every product of groups is ours where rows are not whole 16 bytes
    offsets = torch.empty(4, dtype=torch.int32, device=META)
    for by, width in (("row", 500), ("block", 512)):
        rows = torch.empty(512, width, dtype=dtype, device=META, requires_grad=True)
        weights = torch.empty(4, 256, width, dtype=dtype, device=META, requires_grad=True)
        y = fp8_grouped_gemm(rows, weights, offsets, by=by)
        y.backward(torch.empty_like(y))
