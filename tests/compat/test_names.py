"""Every public name of the other libraries is ours, or has a reason; docs/names.md says which."""

import importlib
import importlib.util
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

from powertrain import compat
from powertrain.compat.missing import WHY_NOT, why_not
from powertrain.shim.libraries import LIBRARIES

ROOT = Path(__file__).resolve().parent.parent.parent


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_names", ROOT / "scripts" / "peer_names.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peer_names = _script()


@pytest.mark.parametrize("library", peer_names.SCOPE)
def test_no_name_without_a_row(library: str) -> None:
    version, names = peer_names.read(library)
    assert version == peer_names.SCOPE[library][0] and len(names) == len(set(names)) > 3
    assert library not in LIBRARIES or version == LIBRARIES[library].version
    bare = [name for name in names if peer_names.ours(name) is None and not _reasons(name)]
    assert not bare, bare


def _reasons(name: str) -> bool:
    import fnmatch

    return any(fnmatch.fnmatchcase(name, pattern) for pattern in WHY_NOT)


def test_no_reason_in_vain() -> None:
    missing = [n for library in peer_names.SCOPE for n in peer_names.read(library)[1] if peer_names.ours(n) is None]
    used = {why_not(name) for name in missing}
    assert not (vain := {pattern for pattern, reason in WHY_NOT.items() if reason not in used}), vain


def test_the_page_is_made_of_the_table() -> None:
    assert (ROOT / "docs" / "names.md").read_text() == peer_names.page(), "run python scripts/peer_names.py"


def _modules() -> list[str]:
    found = pkgutil.walk_packages(compat.__path__, "powertrain.compat.")
    shims = tuple(ours for library in LIBRARIES.values() for ours in library.modules.values())
    return [module.name for module in found if module.name.startswith(shims)]


@pytest.mark.parametrize("name", _modules())
def test_modules_are_whole(name: str) -> None:
    """What a module exports is there, and what it lacks it says."""
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", None)
    if exported is None:
        return
    for public in exported:
        value = getattr(module, public)
        assert getattr(value, "__doc__", None), f"{name}.{public} has no docstring"
    if "__getattr__" in vars(module):
        with pytest.raises(AttributeError, match="is not in Powertrain"):
            _ = module.no_such_name
        with pytest.raises(ImportError, match=r"no_such_name is not in Powertrain \("):
            exec(f"from {name} import no_such_name")
        assert not hasattr(module, "no_such_name") and not hasattr(module, "__no_such_name__")
