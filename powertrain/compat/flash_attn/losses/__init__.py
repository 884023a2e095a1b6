"""flash_attn.losses"""
