"""APIs of other libraries, implemented by Powertrain's functions. docs/migrating.md lists the differences."""

from powertrain.runtime.lazy_exports import resolve

_MODULES = (
    "apex",
    "flash_attn",
    "flash_attn_interface",
    "huggingface",
    "liger_kernel",
    "megatron",
    "sdpa",
    "transformer_engine",
    "userbuffers",
    "xformers",
)

__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    # on first use: importing one library's modules must not import all others' requirements
    return resolve(__name__, name, {module: f"{__name__}.{module}" for module in _MODULES})


def __dir__() -> list[str]:
    return sorted(__all__)
