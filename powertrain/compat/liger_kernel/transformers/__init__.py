"""liger_kernel.transformers: modules and losses on our ops, `apply_liger_kernel_to_*` on `powertrain.patch`."""

from importlib.util import find_spec

from powertrain.compat.liger_kernel.transformers.auto_model import AutoLigerKernelForCausalLM
from powertrain.compat.liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss
from powertrain.compat.liger_kernel.transformers.dyt import LigerDyT
from powertrain.compat.liger_kernel.transformers.fused_add_rms_norm import LigerFusedAddRMSNorm
from powertrain.compat.liger_kernel.transformers.fused_ce_tvd import LigerFusedCETVDLoss
from powertrain.compat.liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
from powertrain.compat.liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD
from powertrain.compat.liger_kernel.transformers.fused_linear_kl_div import LigerFusedLinearKLDivLoss
from powertrain.compat.liger_kernel.transformers.geglu import LigerGEGLUMLP
from powertrain.compat.liger_kernel.transformers.group_norm import LigerGroupNorm
from powertrain.compat.liger_kernel.transformers.jsd import LigerJSD
from powertrain.compat.liger_kernel.transformers.kl_div import LigerKLDIVLoss
from powertrain.compat.liger_kernel.transformers.layer_norm import LigerLayerNorm
from powertrain.compat.liger_kernel.transformers.llama4_rope import (
    liger_llama4_text_rotary_pos_emb,
    liger_llama4_vision_rotary_pos_emb,
)
from powertrain.compat.liger_kernel.transformers.mhc import LigerMHC
from powertrain.compat.liger_kernel.transformers.mlp import LigerFalconH1MLP, LigerMLP
from powertrain.compat.liger_kernel.transformers.modulated_rms_norm import LigerModulatedRMSNorm
from powertrain.compat.liger_kernel.transformers.monkey_patch import (
    _apply_liger_kernel,
    _apply_liger_kernel_to_instance,
    apply_liger_kernel_to_deepseek_v2,
    apply_liger_kernel_to_deepseek_v3,
    apply_liger_kernel_to_deepseek_v4,
    apply_liger_kernel_to_exaone4,
    apply_liger_kernel_to_falcon_h1,
    apply_liger_kernel_to_gemma,
    apply_liger_kernel_to_gemma2,
    apply_liger_kernel_to_gemma3,
    apply_liger_kernel_to_gemma3_text,
    apply_liger_kernel_to_gemma4,
    apply_liger_kernel_to_gemma4_text,
    apply_liger_kernel_to_glm4,
    apply_liger_kernel_to_glm4v,
    apply_liger_kernel_to_glm4v_moe,
    apply_liger_kernel_to_gpt_oss,
    apply_liger_kernel_to_granite,
    apply_liger_kernel_to_hunyuan_v1_dense,
    apply_liger_kernel_to_hunyuan_v1_moe,
    apply_liger_kernel_to_instance,
    apply_liger_kernel_to_internvl,
    apply_liger_kernel_to_llama,
    apply_liger_kernel_to_llama4,
    apply_liger_kernel_to_llava,
    apply_liger_kernel_to_ministral,
    apply_liger_kernel_to_mistral,
    apply_liger_kernel_to_mixtral,
    apply_liger_kernel_to_mllama,
    apply_liger_kernel_to_muse_glimmer,
    apply_liger_kernel_to_nemotron,
    apply_liger_kernel_to_olmo2,
    apply_liger_kernel_to_olmo3,
    apply_liger_kernel_to_paligemma,
    apply_liger_kernel_to_phi3,
    apply_liger_kernel_to_pixtral,
    apply_liger_kernel_to_qwen2,
    apply_liger_kernel_to_qwen2_5_vl,
    apply_liger_kernel_to_qwen2_vl,
    apply_liger_kernel_to_qwen3,
    apply_liger_kernel_to_qwen3_5,
    apply_liger_kernel_to_qwen3_5_moe,
    apply_liger_kernel_to_qwen3_moe,
    apply_liger_kernel_to_qwen3_next,
    apply_liger_kernel_to_qwen3_vl,
    apply_liger_kernel_to_qwen3_vl_moe,
    apply_liger_kernel_to_smollm3,
    apply_liger_kernel_to_smolvlm,
)
from powertrain.compat.liger_kernel.transformers.multi_token_attention import LigerMultiTokenAttention
from powertrain.compat.liger_kernel.transformers.poly_norm import LigerPolyNorm
from powertrain.compat.liger_kernel.transformers.relu_squared import LigerReLUSquared
from powertrain.compat.liger_kernel.transformers.rms_norm import (
    LigerRMSNorm,
    LigerRMSNormForMuseGlimmer,
    LigerRMSNormForMuseGlimmerTextCentered,
)
from powertrain.compat.liger_kernel.transformers.rope import liger_rotary_pos_emb
from powertrain.compat.liger_kernel.transformers.softmax import LigerSoftmax
from powertrain.compat.liger_kernel.transformers.sparsemax import LigerSparsemax
from powertrain.compat.liger_kernel.transformers.swiglu import (
    LigerBlockSparseTop2MLP,
    LigerExperts,
    LigerFalconH1SwiGLUMLP,
    LigerPhi3SwiGLUMLP,
    LigerQwen3MoeSwiGLUMLP,
    LigerSwiGLUMLP,
    LigerSwiGLUMLPForMuseGlimmer,
)
from powertrain.compat.liger_kernel.transformers.tiled_mlp import LigerTiledGEGLUMLP, LigerTiledSwiGLUMLP
from powertrain.compat.liger_kernel.transformers.tvd import LigerTVDLoss
from powertrain.compat.liger_kernel.transformers.vocab_parallel_cross_entropy import LigerVocabParallelCrossEntropy
from powertrain.compat.missing import unknown

__all__ = [
    "AutoLigerKernelForCausalLM",
    "LigerBlockSparseTop2MLP",
    "LigerCrossEntropyLoss",
    "LigerDyT",
    "LigerExperts",
    "LigerFalconH1MLP",
    "LigerFalconH1SwiGLUMLP",
    "LigerFusedAddRMSNorm",
    "LigerFusedCETVDLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearJSD",
    "LigerFusedLinearKLDivLoss",
    "LigerGEGLUMLP",
    "LigerGroupNorm",
    "LigerJSD",
    "LigerKLDIVLoss",
    "LigerLayerNorm",
    "LigerMHC",
    "LigerMLP",
    "LigerModulatedRMSNorm",
    "LigerMultiTokenAttention",
    "LigerPhi3SwiGLUMLP",
    "LigerPolyNorm",
    "LigerQwen3MoeSwiGLUMLP",
    "LigerRMSNorm",
    "LigerRMSNormForMuseGlimmer",
    "LigerRMSNormForMuseGlimmerTextCentered",
    "LigerReLUSquared",
    "LigerSoftmax",
    "LigerSparsemax",
    "LigerSwiGLUMLP",
    "LigerSwiGLUMLPForMuseGlimmer",
    "LigerTVDLoss",
    "LigerTiledGEGLUMLP",
    "LigerTiledSwiGLUMLP",
    "LigerVocabParallelCrossEntropy",
    "_apply_liger_kernel",
    "_apply_liger_kernel_to_instance",
    "apply_liger_kernel_to_deepseek_v2",
    "apply_liger_kernel_to_deepseek_v3",
    "apply_liger_kernel_to_deepseek_v4",
    "apply_liger_kernel_to_exaone4",
    "apply_liger_kernel_to_falcon_h1",
    "apply_liger_kernel_to_gemma",
    "apply_liger_kernel_to_gemma2",
    "apply_liger_kernel_to_gemma3",
    "apply_liger_kernel_to_gemma3_text",
    "apply_liger_kernel_to_gemma4",
    "apply_liger_kernel_to_gemma4_text",
    "apply_liger_kernel_to_glm4",
    "apply_liger_kernel_to_glm4v",
    "apply_liger_kernel_to_glm4v_moe",
    "apply_liger_kernel_to_gpt_oss",
    "apply_liger_kernel_to_granite",
    "apply_liger_kernel_to_hunyuan_v1_dense",
    "apply_liger_kernel_to_hunyuan_v1_moe",
    "apply_liger_kernel_to_instance",
    "apply_liger_kernel_to_internvl",
    "apply_liger_kernel_to_llama",
    "apply_liger_kernel_to_llama4",
    "apply_liger_kernel_to_llava",
    "apply_liger_kernel_to_ministral",
    "apply_liger_kernel_to_mistral",
    "apply_liger_kernel_to_mixtral",
    "apply_liger_kernel_to_mllama",
    "apply_liger_kernel_to_muse_glimmer",
    "apply_liger_kernel_to_nemotron",
    "apply_liger_kernel_to_olmo2",
    "apply_liger_kernel_to_olmo3",
    "apply_liger_kernel_to_paligemma",
    "apply_liger_kernel_to_phi3",
    "apply_liger_kernel_to_pixtral",
    "apply_liger_kernel_to_qwen2",
    "apply_liger_kernel_to_qwen2_5_vl",
    "apply_liger_kernel_to_qwen2_vl",
    "apply_liger_kernel_to_qwen3",
    "apply_liger_kernel_to_qwen3_5",
    "apply_liger_kernel_to_qwen3_5_moe",
    "apply_liger_kernel_to_qwen3_moe",
    "apply_liger_kernel_to_qwen3_next",
    "apply_liger_kernel_to_qwen3_vl",
    "apply_liger_kernel_to_qwen3_vl_moe",
    "apply_liger_kernel_to_smollm3",
    "apply_liger_kernel_to_smolvlm",
    "is_transformers_available",
    "liger_llama4_text_rotary_pos_emb",
    "liger_llama4_vision_rotary_pos_emb",
    "liger_rotary_pos_emb",
]


def is_transformers_available() -> bool:
    """Whether the package transformers can be imported."""
    return find_spec("transformers") is not None


__getattr__ = unknown(__name__)
