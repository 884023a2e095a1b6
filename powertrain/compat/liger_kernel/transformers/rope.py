"""liger_kernel.transformers.rope."""

from powertrain.compat.liger_kernel.transformers.functional import liger_rope
from powertrain.compat.missing import unknown

__all__ = ["liger_rotary_pos_emb"]

# Liger's name in modeling code
liger_rotary_pos_emb = liger_rope


__getattr__ = unknown(__name__)
