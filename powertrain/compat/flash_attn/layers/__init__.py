"""flash_attn.layers"""
