"""Names of other libraries that are not here: why, and what there is instead.

docs/names.md is made from this table and from the modules themselves (scripts/peer_names.py); tests/compat/test_names.py
walks the libraries' public names and fails on one that is neither in a module nor here.
"""

import difflib
import dis
import importlib
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NoReturn

_PACKAGE = "powertrain.compat."
_FROM_IMPORT = dis.opmap["IMPORT_FROM"]

# pattern of their name -> why not, or what to take; the longest pattern that matches counts
WHY_NOT: dict[str, str] = {}


def why_not(name: str) -> str:
    """The reason that a name is not here; `name` may begin with ours or theirs."""
    name = name.removeprefix(_PACKAGE)
    matching = [pattern for pattern in WHY_NOT if fnmatchcase(name, pattern)]
    return WHY_NOT[max(matching, key=len)] if matching else "not yet"


def unknown(module: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a compat module: says why a name is not here, and which are.

    `from module import name` raises ImportError with that text (Python would replace an AttributeError's), everything
    else AttributeError, so that hasattr works.
    """

    def __getattr__(name: str) -> NoReturn:
        theirs = module.removeprefix(_PACKAGE)
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        there = public(module)
        shown = difflib.get_close_matches(name, there, 3, 0.6) or there
        what = f"{theirs}.{name} is not in Powertrain ({why_not(f'{theirs}.{name}')}); there is {', '.join(shown[:40])}"
        caller = sys._getframe(1)
        if caller.f_lasti >= 0 and caller.f_code.co_code[caller.f_lasti] == _FROM_IMPORT:
            raise ImportError(what, name=module)
        raise AttributeError(what)

    return __getattr__


def public(module: str) -> list[str]:
    """The names of a compat module: its `__all__`."""
    return sorted(importlib.import_module(module).__all__)
