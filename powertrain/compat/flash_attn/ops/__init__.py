"""flash_attn.ops"""
