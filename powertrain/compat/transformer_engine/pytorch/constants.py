"""transformer_engine.pytorch.constants: its names of dtypes."""

from enum import IntEnum
from typing import Any

import torch

from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["DType", "TE_DType", "TE_DType_To_Torch"]


class DType(IntEnum):
    """TransformerEngine's dtypes, with its numbers."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, dtype: Any) -> "DType":
        """The member that dtype is, or has the number of."""
        return cls(int(dtype))


TE_DType: dict[torch.dtype, DType] = {
    torch.uint8: DType.kByte,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}
TE_DType_To_Torch: dict[DType, torch.dtype] = {theirs: torchs for torchs, theirs in TE_DType.items()}
_FORMATS = {DType.kFloat8E4M3: "e4m3", DType.kFloat8E5M2: "e5m2"}


def fp8_format(op: str, dtype: Any) -> tuple[DType, str]:
    """The DType of an argument fp8_dtype, and our word for it."""
    try:
        cast = DType.cast(dtype)
    except (TypeError, ValueError):
        cast = DType.kByte
    if cast not in _FORMATS:
        checks.fail(op, "fp8_dtype", "be DType.kFloat8E4M3 or DType.kFloat8E5M2", dtype)
    return cast, _FORMATS[cast]


__getattr__ = unknown(__name__)
