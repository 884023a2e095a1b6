"""flash_attn.modules."""

from powertrain.compat.missing import unknown

__all__: list[str] = []

__getattr__ = unknown(__name__)
