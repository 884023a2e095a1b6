"""The peers that are installed here: each is a function or None. See benchmarks/README.md for how to get them."""

import importlib
from collections.abc import Callable
from typing import Any


def peer(module: str, name: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None
