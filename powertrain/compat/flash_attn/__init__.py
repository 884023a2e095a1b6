"""flash-attn 2 under its own names: its functions, bert_padding, layers.rotary, losses and ops.

from powertrain.compat.flash_attn import flash_attn_func
from powertrain.compat.flash_attn.layers.rotary import RotaryEmbedding
"""

from powertrain.compat.flash_attn.bert_padding import index_first_axis, index_put_first_axis, pad_input, unpad_input
from powertrain.compat.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from powertrain.compat.missing import unknown

# packages choose arguments by it
__version__ = "2.8.3"  # whose names and arguments these are

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
]

__getattr__ = unknown(__name__)
