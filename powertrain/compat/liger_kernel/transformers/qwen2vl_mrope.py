"""liger_kernel.transformers.qwen2vl_mrope."""

from powertrain.compat.liger_kernel.transformers.functional import liger_qwen2vl_mrope
from powertrain.compat.missing import unknown

__all__ = ["liger_multimodal_rotary_pos_emb"]

# Liger's name in modeling code
liger_multimodal_rotary_pos_emb = liger_qwen2vl_mrope


__getattr__ = unknown(__name__)
