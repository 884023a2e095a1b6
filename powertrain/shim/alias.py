"""One module under two names: `flash_attn.ops` is `powertrain.compat.flash_attn.ops`, not a copy of it."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pkgutil import iter_modules
from types import CodeType, ModuleType


def alias(name: str, ours: str) -> None:
    """From now on `import name` gives our module, and `import name.x` our `ours.x`."""
    # once per name, however often install is called
    if not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, ours))
    # the import statement returns this entry, in place of the stub that is just running
    sys.modules[name] = importlib.import_module(ours)


class _Finder(MetaPathFinder):
    def __init__(self, name: str, ours: str) -> None:
        self.name, self.ours = name, ours

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # "flash_attn_interface" begins with "flash_attn" and is another library
        if fullname != self.name and not fullname.startswith(f"{self.name}."):
            return None
        ours = self.ours + fullname.removeprefix(self.name)
        # found under our name first: the spec must be the alias's, the module ours
        spec = importlib.util.find_spec(ours)
        if spec is not None:
            return ModuleSpec(fullname, _Loader(ours), is_package=spec.submodule_search_locations is not None)
        # an import statement gets an error that lists the modules; importlib.util.find_spec gets None
        # the frame that asks tells an import statement from importlib.util.find_spec, which transformers and others
        # call to look whether a library is there
        if sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            raise ModuleNotFoundError(_what_there_is(fullname, ours), name=fullname)
        return None


class _Loader(Loader):
    def __init__(self, ours: str) -> None:
        self.ours = ours

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # import under our own name, so that both names share one module object and isinstance holds
        module = importlib.import_module(self.ours)
        self.spec = module.__spec__
        return module

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`."""
        spec = importlib.util.find_spec(self.ours)
        assert spec is not None and isinstance(spec.loader, InspectLoader)
        return spec.loader.get_code(self.ours)

    def exec_module(self, module: ModuleType) -> None:
        # importlib has replaced it by the alias's
        module.__spec__ = self.spec


def _what_there_is(fullname: str, ours: str) -> str:
    from powertrain.compat.missing import why_not

    theirs = fullname.rpartition(".")[0]
    package = importlib.import_module(ours.rpartition(".")[0])
    there = sorted(m.name for m in iter_modules(getattr(package, "__path__", [])) if not m.name.startswith("_"))
    names = f"{theirs} has the modules {', '.join(there)}" if there else f"{theirs} has no modules"
    return f"No module named {fullname!r} in Powertrain ({why_not(ours)}); {names}"
