"""flash_attn.utils: the state of inference of `flash_attn.modules`."""
