"""Folders on sys.path and PYTHONPATH that hold a library's name and metadata, and nothing else of it."""

import importlib
import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_cache_path

import powertrain
from powertrain.runtime.atomic_file import write_whole
from powertrain.shim.libraries import LIBRARIES, Library

# the stub runs once, replaces itself in sys.modules and is not seen again
_STUB = '''"""{name}, by Powertrain {version}: see `powertrain shim --help`."""

from powertrain.shim.alias import alias

alias(__name__, "{ours}")
'''
# a distribution's metadata: libraries test versions with importlib.metadata before they import
_METADATA = """Metadata-Version: 2.1
Name: {name}
Version: {version}
Summary: {name}'s interface, computed by Powertrain {ours}
"""


class Shim(NamedTuple):
    name: str
    folder: Path


class Installed(NamedTuple):
    """A library that is here itself, and is not shadowed."""

    name: str
    version: str


def install(*names: str, force: bool = False) -> list[Installed]:
    """`import name` gives our functions from now on, here and in processes that this one starts.

        names  of LIBRARIES: "flash_attn", "flash_attn_interface", "xformers", "transformer_engine", "apex",
               "liger_kernel"
        force  put ours before a library that is installed
    Returns the libraries that are installed themselves and were left as they are.
    Raises ValueError for another name, RuntimeError where the library has been imported already, OSError where the
    cache folder cannot be written.
    """
    shims, installed = plan(names, force=force)
    for shim in shims:
        for module in LIBRARIES[shim.name].modules:
            # a module that others hold already cannot be exchanged
            if module in sys.modules and sys.modules[module] is not _ours(shim.name, module):
                raise RuntimeError(f"install: {module} has been imported already; call powertrain.shim.install before")
    for shim in shims:
        if str(shim.folder) not in sys.path:
            sys.path.insert(0, str(shim.folder))
    # the environment is how child processes (torchrun, DataLoader workers) inherit it
    os.environ["PYTHONPATH"] = python_path(shims, os.environ.get("PYTHONPATH"))
    # a path entry that was just written may be missing from importlib's directory cache
    importlib.invalidate_caches()
    return installed


def plan(names: tuple[str, ...] | list[str], *, force: bool = False) -> tuple[list[Shim], list[Installed]]:
    """The folders of these libraries, written where they are missing; and those that are installed themselves."""
    shims: list[Shim] = []
    installed: list[Installed] = []
    if isinstance(names, str):
        # its letters would be the names
        raise ValueError(f"plan: names must be a list or tuple of names, got {names!r}")
    for name in names:
        if name not in LIBRARIES:
            raise ValueError(f"install: names must be of {', '.join(map(repr, LIBRARIES))}, got {name!r}")
        # a real installation wins: a user who has it may compare
        real = None if force else _installed(name)
        if real is None:
            shims.append(Shim(name, _folder(name)))
        else:
            installed.append(real)
    return shims, installed


def python_path(shims: list[Shim], before: str | None) -> str:
    """PYTHONPATH with the folders in front, each once."""
    # an empty entry would mean the current folder
    given = [entry for entry in (before or "").split(os.pathsep) if entry]
    folders = [str(shim.folder) for shim in shims]
    return os.pathsep.join([*folders, *(entry for entry in given if entry not in folders)])


def _ours(name: str, module: str) -> object:
    return sys.modules.get(LIBRARIES[name].modules[module])


def _installed(name: str) -> Installed | None:
    """The library itself, wherever it is on sys.path but in a folder of ours."""
    library, root = LIBRARIES[name], _root()
    for found in metadata.distributions(name=library.distribution):
        # found by location: our own folder has metadata of the same name
        if root not in Path(str(found.locate_file(""))).parents:
            return Installed(name, found.version)
    for module in library.modules:
        # find_spec looks without importing: an installed library may be broken for this GPU
        spec = None if module in sys.modules else importlib.util.find_spec(module)
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
        # a namespace package has no file
        real = [Path(place) for place in places if place and place != "namespace"]
        if real and not any(root in place.parents for place in real):
            return Installed(name, "of unknown version")
    return None


def _root() -> Path:
    return user_cache_path("powertrain") / "shims"


def _folder(name: str) -> Path:
    """The library's folder: each file is written anew if its text is another, so an update of ours needs no thought."""
    library = LIBRARIES[name]
    folder = _root() / f"{name}-{library.version}"
    for file, text in _files(library).items():
        path = folder / file
        # compared by text: a version of ours with another stub needs no clean-up
        if not path.is_file() or path.read_text() != text:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                # two processes may write at once
                write_whole(path, text.encode())
            except OSError as error:
                # without an errno, whose form of the text would quote it
                why = f"{error.strerror or error}; set XDG_CACHE_HOME to a folder that can be written"
                raise OSError(f"install: {path} cannot be written: {why}") from error
    return folder


def _files(library: Library) -> dict[str, str]:
    info = f"{library.distribution.replace('-', '_')}-{library.version}.dist-info"
    files = {
        f"{module}/__init__.py": _STUB.format(name=module, version=powertrain.__version__, ours=ours)
        for module, ours in library.modules.items()
    }
    about = _METADATA.format(name=library.distribution, version=library.version, ours=powertrain.__version__)
    files[f"{info}/METADATA"] = about
    files[f"{info}/top_level.txt"] = "".join(f"{module}\n" for module in library.modules)
    files[f"{info}/INSTALLER"] = "powertrain shim\n"
    # RECORD, so that pip and importlib.metadata take it for a complete distribution
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    return files
