"""A name that an installed library lacks: whether the library is too old or too new for its caller.

An error like "cannot import name X" proves that the installed release lacks X. Where the releases that have X are known
(api_history.json, written by scripts/api_history.py, and known_names.py), the installed one is before or after them.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from powertrain.doctor.known_names import ROWS

Side = Literal["older", "newer"]

# names of modules whose package on the index is called otherwise
_PACKAGES = {
    "PIL": "pillow", "sklearn": "scikit-learn", "cv2": "opencv-python", "google": "protobuf",
    "pytorch_lightning": "lightning", "yaml": "pyyaml", "skimage": "scikit-image", "skbuild": "scikit-build",
    "cutlass": "nvidia-cutlass-dsl", "cuda": "cuda-python", "pynvml": "nvidia-ml-py", "modelopt": "nvidia-modelopt",
    "flashinfer": "flashinfer-python", "fla": "flash-linear-attention", "quack": "quack-kernels",
    "sgl_kernel": "sgl-kernel", "hydra": "hydra-core", "awq": "autoawq",
    "faiss": "faiss-cpu", "cpuinfo": "py-cpuinfo", "git": "GitPython", "dotenv": "python-dotenv", "attr": "attrs",
    "absl": "absl-py", "bs4": "beautifulsoup4", "OpenSSL": "pyOpenSSL", "Crypto": "pycryptodome",
    "dateutil": "python-dateutil", "jwt": "PyJWT", "docx": "python-docx", "fitz": "PyMuPDF", "magic": "python-magic",
    "lm_eval": "lm-eval", "liger_kernel": "liger-kernel",
}  # fmt: skip
# folders that several packages share: a part that is missing is a package that is missing
NAMESPACES = {"google", "cuda", "nvidia"}


@dataclass(frozen=True)
class Change:
    """The installed release of `package` lacks `name`, and so is older or newer than those that have it.

    when: the releases, in words; spec: what pip is to install instead; instead: another name for the same, or "".
    """

    package: str
    name: str
    side: Side
    when: str
    when_zh: str
    spec: str
    instead: str = ""


def package_of(module: str) -> str:
    """The package on the index that a dotted module name belongs to."""
    root = module.split(".")[0]
    return _PACKAGES.get(root, root)


def renamed_package(module: str) -> str | None:
    """The package of a module that is called otherwise; None: it has the module's name, or none is known."""
    root = module.split(".")[0]
    return None if root == "google" and not module.startswith("google.protobuf") else _PACKAGES.get(root)


def lacking_name(module: str, name: str) -> Change | None:
    """`module` has no `name`, as in "cannot import name" and "module has no attribute"."""
    if found := _known(f"{module}.{name}"):
        return found
    package = _with_history(module)
    if package is None:
        return None
    if module == package and (found := _in_history(package, f"export {name}", name)):
        return found
    if name.startswith("_") and module.count(".") > package.count(".") + 1:
        # the table knows the package's internal names, not which of its modules import them
        return None
    return _in_history(package, name, name) or _in_history(package, f"module {module}.{name}", f"{module}.{name}")


def lacking_module(module: str) -> Change | None:
    """There is no `module`, though there may be the package that it would be in."""
    package = _with_history(module)
    return _known(module) or (_in_history(package, f"module {module}", module) if package else None)


def lacking_attribute(owner: str, name: str) -> Change | None:
    """Objects of the class `owner` have no `name`."""
    return _known(f"{owner}.{name}") or _anywhere(f"{owner}.{name}", "")


def lacking_parameter(function: str, name: str, text: str) -> Change | None:
    """`function` ("Class.__init__", "Class.method", "function") takes no argument `name`; text: the traceback, which
    tells packages with the same name of a class apart."""
    owner = function.removesuffix(".__init__")
    asked = f"{owner}({name})"
    short = asked.split(".")[-1] if owner.count(".") > 1 else asked
    return _known(asked) or _anywhere(asked, text) or (_anywhere(short, text) if short != asked else None)


def package_of_class(name: str) -> str | None:
    """The one package whose history has a class or function of that name."""
    owners = re.compile(rf"{re.escape(name)}(?:[.(]|$)")
    candidates = [package for package, known in history().items() if any(map(owners.match, known["names"]))]
    return candidates[0] if len(candidates) == 1 else None


def _known(name: str) -> Change | None:
    row = _rows().get(name) or next((row for row in ROWS if row[1].endswith(".") and name.startswith(row[1])), None)
    if row is None:
        return None
    package, _, sign, release, instead = row
    bare = re.match(r"[\d.]*", release)
    number = bare[0].rstrip(".") if bare else ""
    short = name.removeprefix(f"{package}.")
    if sign == "+":
        spec = f"{package}>={number}" if number else package
        return Change(package, short, "older", f"came with {release}", f"自 {release} 起才有", spec, instead)
    spec = f"{package}<{number}" if number else package
    return Change(package, short, "newer", f"is gone since {release}", f"自 {release} 起已删除", spec, instead)


@cache
def _rows() -> dict[str, tuple[str, str, str, str, str]]:
    return {row[1]: row for row in ROWS}


@cache
def history() -> dict[str, dict[str, Any]]:
    return json.loads((Path(__file__).parent / "api_history.json").read_text())


def _with_history(module: str) -> str | None:
    fitting = (package for package in history() if module == package or module.startswith(package + "."))
    return max(fitting, key=len, default=None)


def _anywhere(name: str, text: str) -> Change | None:
    """The change of a name in the one package that has it, or in the one of them that the text names."""
    changes = list(_changes(name))
    if len(changes) > 1:
        changes = [one for one in changes if f"/{one.package}/" in text or f"\\{one.package}\\" in text] or changes
    return changes[0] if len(changes) == 1 else None


def _changes(name: str) -> Iterator[Change]:
    for package in history():
        if found := _in_history(package, name, name):
            yield found


def _in_history(package: str, key: str, name: str) -> Change | None:
    """None: all releases or none have it, or those that have it are neither the first nor the last."""
    versions, names = history()[package]["versions"], history()[package]["names"]
    if key not in names:
        return None
    first, last = names[key]
    # a parameter that came with its class says nothing of what was before the class
    begin, end = (
        names.get(re.split(r"[.(]", key)[0], [0, len(versions) - 1]) if key[-1] == ")" else (0, len(versions) - 1)
    )
    first, last = 0 if first == begin else first, len(versions) - 1 if last == end else last
    index = package.split(".")[0] if package.startswith("megatron") else package
    index = "megatron-core" if index == "megatron" else index
    short = [_short(version) for version in versions]
    if first == 0 and last < len(versions) - 1:
        when = f"is in {short[last]}, and not in {short[last + 1]}"
        return Change(
            index, name, "newer", when, f"{short[last]} 有，{short[last + 1]} 没有", f"{index}<{short[last + 1]}"
        )
    spec = f"{index}>={short[first]}"
    if first == 0:
        return None
    if last == len(versions) - 1:
        when = f"is in {short[first]}, and not in {short[first - 1]}"
        return Change(index, name, "older", when, f"{short[first]} 有，{short[first - 1]} 没有", spec)
    when = f"is only in {short[first]} to {short[last]}"
    return Change(index, name, "newer", when, f"只有 {short[first]} 至 {short[last]} 有", f"{spec},<{short[last + 1]}")


def _short(version: str) -> str:
    """4.46.0 as 4.46; a patch release keeps its number."""
    return version.removesuffix(".0") if version.count(".") > 1 else version
