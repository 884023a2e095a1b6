"""transformer_engine.pytorch."""

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch import constants, ops, optimizers
from powertrain.compat.transformer_engine.pytorch.attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
)
from powertrain.compat.transformer_engine.pytorch.constants import DType
from powertrain.compat.transformer_engine.pytorch.cpu_offload import (
    ManualOffloadSynchronizer,
    get_cpu_offload_context,
    mark_not_offload,
)
from powertrain.compat.transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
from powertrain.compat.transformer_engine.pytorch.distributed import CudaRNGStatesTracker, checkpoint
from powertrain.compat.transformer_engine.pytorch.glu import deinterleave_glu_tensor, interleave_glu_tensor
from powertrain.compat.transformer_engine.pytorch.graph import make_graphed_callables
from powertrain.compat.transformer_engine.pytorch.module import (
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
)
from powertrain.compat.transformer_engine.pytorch.permutation import (
    moe_permute,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from powertrain.compat.transformer_engine.pytorch.quantization import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from powertrain.compat.transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensorStorage,
    Quantizer,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from powertrain.compat.transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensorStorage,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8TensorStorage,
)
from powertrain.compat.transformer_engine.pytorch.transformer import TransformerLayer
from powertrain.compat.transformer_engine.pytorch.versions import (
    get_cudnn_version,
    get_device_compute_capability,
    torch_version,
)
from powertrain.compat.userbuffers import destroy_ub, initialize_ub

__all__ = [
    "CudaRNGStatesTracker",
    "DType",
    "DotProductAttention",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8TensorStorage",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "ManualOffloadSynchronizer",
    "MultiheadAttention",
    "QuantizedTensorStorage",
    "Quantizer",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "autocast",
    "checkpoint",
    "constants",
    "deinterleave_glu_tensor",
    "destroy_ub",
    "fp8_autocast",
    "fp8_model_init",
    "get_cpu_offload_context",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "initialize_ub",
    "interleave_glu_tensor",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "mark_not_offload",
    "moe_permute",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "ops",
    "optimizers",
    "parallel_cross_entropy",
    "prepare_for_saving",
    "quantized_model_init",
    "restore_from_func_ctx",
    "restore_from_saved",
    "torch_version",
]


__getattr__ = unknown(__name__)
