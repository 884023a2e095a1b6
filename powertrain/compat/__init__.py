"""Other libraries' functions under their own names, on ours. docs/migrating.md says what differs."""

import importlib

_MODULES = (
    "flash_attn",
    "huggingface",
    "megatron",
    "sdpa",
    "transformer_engine",
    "userbuffers",
    "xformers",
)

__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"powertrain.compat.{name}")
    raise AttributeError(f"module 'powertrain.compat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
