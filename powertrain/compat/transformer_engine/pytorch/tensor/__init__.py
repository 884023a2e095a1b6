"""transformer_engine.pytorch.tensor: quantizers and their results."""

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensorStorage,
    Quantizer,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from powertrain.compat.transformer_engine.pytorch.tensor.float8_blockwise_tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensorStorage,
)
from powertrain.compat.transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8TensorStorage,
)

__all__ = [
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8TensorStorage",
    "QuantizedTensorStorage",
    "Quantizer",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
]

__getattr__ = unknown(__name__)
