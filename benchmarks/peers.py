"""The peers that are installed here: each is a function or None. See benchmarks/README.md for how to get them."""

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch


def peer(module: str, name: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


def flash_3() -> Any:
    """FlashAttention-3's operators, from the shared library that FLASH_3_LIBRARY names, or None."""
    library = os.environ.get("FLASH_3_LIBRARY")
    if library is None:
        return None
    torch.ops.load_library(library)
    return torch.ops.flash_attn_3
