"""What tests launch of the Hopper GEMM: its operands, and every hook on meta tensors."""

import torch
from torch import Tensor

from powertrain.ops.fp8.formulas import Quantized
from powertrain.ops.fp8.hopper_gemm import Plan, hopper_fp8_gemm
from powertrain.ops.gemm.gemm import gemm
from powertrain.ops.gemm.hopper import Gathered, hopper_gemm
from powertrain.ops.gemm.hopper_activation import Epilogue, hopper_epilogue

META = torch.device("meta")


def operands(layout: str, M: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """a and b of a layout, of values around 1 and products around 1."""
    a = torch.randn((K, M) if layout == "tn" else (M, K), device=device)
    b = torch.randn((N, K) if layout == "nt" else (K, N), device=device) * max(K, 1) ** -0.5
    return a.to(dtype), b.to(dtype)


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def launch_gathered(dtype: torch.dtype = torch.bfloat16, layout: str = "nt") -> None:
    """On meta tensors: four chunks, one of them local."""
    a, b = operands(layout, 512, 512, 512, dtype, META)
    chunks = Gathered(_empty(5), _empty(4), _empty(4), _empty(128, 512, dtype=dtype), (1, 2))
    hopper_gemm(a, b, _empty(512, 512, dtype=dtype), layout=layout, gathered=chunks)


def launch_gemms(dtype: torch.dtype) -> None:
    """Every kind of launch, on meta tensors of a size that the kernel is chosen for (on sm_90, in 16 bits)."""
    for layout in ("nt", "nn", "tn"):
        a, b = operands(layout, 8192, 8192, 2048, dtype, META)
        gemm(a, b, layout=layout)
        gemm(a, b, layout=layout, out=_empty(8192, 8192, dtype=torch.float32), accumulate=True)
    a, b = operands("nt", 8192, 8192, 2048, dtype, META)
    gemm(a, b, bias=_empty(8192, dtype=dtype))
    gemm(a, b, out=_empty(8192, 8192, dtype=torch.float32))


def launch_epilogues(dtype: torch.dtype) -> None:
    """Every kind of epilogue, on meta tensors."""
    x, weight, result = _empty(512, 512, dtype=dtype), _empty(1024, 512, dtype=dtype), _empty(512, 1024, dtype=dtype)
    bias, amax = _empty(1024, dtype=dtype), _empty(1, dtype=torch.float32)
    for epilogue in (
        Epilogue("silu", up=weight, z=result, up_z=result),
        Epilogue("gelu", up=weight, bias=bias, up_bias=bias, residual=result, amax=amax),
        Epilogue("gelu_tanh", bias=bias, z=result),
        Epilogue("", residual=result, amax=amax),
    ):
        hopper_epilogue(x, weight, result, epilogue)


def launch_fp8_gemms() -> None:
    """Every form and tile of the Hopper FP8 GEMM, on meta tensors."""
    fp8 = (torch.float8_e4m3fn, torch.float8_e5m2)
    by = {"ends": _scales(512), "block": _scales(4, 4), "group": _scales(4, 512).T}
    for form, scale in by.items():
        for dtype in fp8:
            a = Quantized(_empty(512, 512, dtype=dtype), by["group"] if form == "block" else scale)
            b = Quantized(_empty(512, 512, dtype=fp8[0]), scale)
            for out_dtype, accumulate in ((torch.bfloat16, False), (torch.float16, False), (torch.float32, True)):
                for plan in (Plan(), Plan(128, 4 if accumulate else 5)):
                    out, bias = _empty(512, 512, dtype=out_dtype), _empty(512, dtype=torch.bfloat16)
                    hopper_fp8_gemm(a, b, out, bias=None if accumulate else bias, accumulate=accumulate, plan=plan)


def _scales(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.float32)
