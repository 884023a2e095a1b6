"""Public names of a package, imported on first use, so that importing the package stays cheap."""

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType

from powertrain.runtime.deferred_signals import deferred_signals
from powertrain.runtime.uncollected import uncollected

_interrupted = ""  # the module whose import was


def _imported(name: str) -> ModuleType:
    """The module. Raises ImportError for one that cannot be imported after an import that was interrupted."""
    global _interrupted
    try:
        return importlib.import_module(name)
    except Exception as error:
        if not _interrupted:
            raise
        raise ImportError(
            f"{name} cannot be imported, since the import of {_interrupted} was interrupted before: start a new "
            f"process (in a notebook: restart the kernel) [{type(error).__name__}: {error}]"
        ) from error
    except BaseException:  # a second Ctrl-C, or sys.exit in a handler
        _interrupted = name
        raise


def resolve(package: str, name: str, public: Mapping[str, str]) -> object:
    """The value of a package's public name. A package's `__getattr__` calls this once for each name.

    public  name -> module that defines it; a name that maps to `package.name` itself is that module
    Raises AttributeError for other names, as a module does.
    """
    if name not in public:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    with deferred_signals(), uncollected():
        module = _imported(public[name])
    value = module if public[name] == f"{package}.{name}" else getattr(module, name)
    setattr(sys.modules[package], name, value)
    return value
