"""flash_attn.ops.triton"""
