"""Public names of a package, imported on first use, so that importing the package stays cheap."""

import importlib
import sys
from collections.abc import Mapping

from powertrain.runtime.uncollected import uncollected


def resolve(package: str, name: str, public: Mapping[str, str]) -> object:
    """The value of a package's public name. A package's `__getattr__` calls this once for each name.

    public  name -> module that defines it; a name that maps to `package.name` itself is that module
    Raises AttributeError for other names, as a module does.
    """
    if name not in public:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    with uncollected():
        module = importlib.import_module(public[name])
    value = module if public[name] == f"{package}.{name}" else getattr(module, name)
    setattr(sys.modules[package], name, value)
    return value
