"""Writes powertrain/doctor/api_history.json: which releases of other libraries have which names and parameters.

    python scripts/api_history.py trl=~/src/trl peft=~/src/peft transformers=~/wheels

Each argument is a package and a git clone with its tags, or a folder of its wheels. Sources are parsed, not imported;
of each minor version the first release is read. Kept are only names that some release has and another has not.
Packages that are not given stay in the file as they are.
"""

import ast
import json
import re
import subprocess
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeGuard

from packaging.version import InvalidVersion, Version

FILE = Path(__file__).resolve().parent.parent / "powertrain" / "doctor" / "api_history.json"
# where a package lies in its repository, and where its name is not the tag's
FOLDERS = {
    "trl": "trl/", "peft": "src/peft/", "accelerate": "src/accelerate/", "diffusers": "src/diffusers/",
    "huggingface_hub": "src/huggingface_hub/", "datasets": "src/datasets/", "transformers": "transformers/",
    "deepspeed": "deepspeed/", "flash_attn": "flash_attn/", "xformers": "xformers/",
    "bitsandbytes": "bitsandbytes/", "transformer_engine": "transformer_engine/", "torchao": "torchao/",
    "megatron.core": "megatron/core/",
}  # fmt: skip
OLDEST = {"transformers": "4.25", "diffusers": "0.10", "datasets": "2.0", "huggingface_hub": "0.8", "deepspeed": "0.7"}
# how the tags of releases begin, in repositories that have tags of other things or times beside them
TAGS = {"megatron.core": "core_", "xformers": "v0.0."}
# every release counts where the versions have no minor number that moves
EVERY_RELEASE = {"xformers"}
SKIPPED = re.compile(
    r"(?:^|/)(?:tests?|testing|scripts|examples|benchmarks?|cutlass|csrc|templates|legacy)/|_test\.py$"
)
# methods that others call or override, whose parameters are kept
METHODS = {
    "__call__", "compute_loss", "create_optimizer", "evaluate", "evaluation_loop", "forward", "from_pretrained",
    "generate",
    "load_checkpoint", "log", "map", "prediction_step", "prepare", "push_to_hub", "save_checkpoint", "save_model",
    "save_pretrained", "train", "training_step", "_save_checkpoint", "_maybe_log_save_evaluate",
}  # fmt: skip
MANY = 200
# of a model's file only the names of its classes are kept: there are too many to keep what is inside them
MODELS = re.compile(r"^transformers/models/(?!auto/)|^diffusers/(?:pipelines|models|schedulers)/")

Facts = frozenset[str]
# (path in the package, a key that is the same for the same text, the text)
Files = Iterator[tuple[str, str, Callable[[], bytes]]]


def main(arguments: list[str]) -> None:
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    for argument in arguments:
        package, _, place = argument.partition("=")
        known[package] = _history(package, Path(place).expanduser())
        print(package, len(known[package]["versions"]), "releases,", len(known[package]["names"]), "names")
    lines = [f"{json.dumps(package)}: {_packed(known[package])}" for package in sorted(known)]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _packed(history: dict[str, object]) -> str:
    return json.dumps(history, separators=(",", ":"), sort_keys=True)


def _history(package: str, place: Path) -> dict[str, object]:
    """{"versions": [...], "names": {name: [first index, last index]}}: indices into versions, oldest first."""
    read: dict[str, Facts] = {}
    releases = _of_wheels(package, place) if any(place.glob("*.whl")) else _of_tags(package, place)
    seen = [(version, _facts(package, files, read)) for version, files in releases]
    last = len(seen) - 1
    names: dict[str, list[int]] = {}
    for index, (_, facts) in enumerate(seen):
        for name in facts:
            names.setdefault(name, [index, index])[1] = index
    gone = Counter(ends[1] for name, ends in names.items() if name.startswith("export "))
    # a release in which hundreds of exports end lists them in another way
    relisted = {name for name, ends in names.items() if name.startswith("export ") and gone[ends[1]] > MANY}
    defined = {name for name in names if name.startswith("export ") and names.get(name[7:], [0, last]) != [0, last]}
    changed = {
        name: ends
        for name, ends in names.items()
        if ends != [0, last] and ends != names.get(_owner(name)) and not _private(name)
    }
    changed = {name: ends for name, ends in changed.items() if name not in relisted | defined}
    return {"versions": [str(version) for version, _ in seen], "names": dict(sorted(changed.items()))}


def _private(name: str) -> bool:
    """An underscore's attribute or parameter: only those of trainers are used from outside."""
    owner, *rest = re.split(r"[.(]", name)
    return (
        bool(rest)
        and not name.startswith(("module ", "export "))
        and rest[-1].startswith("_")
        and not owner.endswith(("Trainer", "Accelerator"))
    )


def _owner(name: str) -> str:
    """The class or function that a parameter or attribute belongs to: what comes and goes with it says nothing more."""
    owner = re.split(r"[.(]", name)[0]
    return owner if owner != name and not name.startswith(("module ", "export ")) else ""


def _of_wheels(package: str, place: Path) -> Iterator[tuple[Version, Files]]:
    """Each release, oldest first, with its files."""
    for wheel in sorted(place.glob("*.whl"), key=lambda file: Version(file.name.split("-")[1])):
        with zipfile.ZipFile(wheel) as archive:
            yield Version(wheel.name.split("-")[1]), _of_wheel(archive, FOLDERS[package])


def _of_wheel(archive: zipfile.ZipFile, folder: str) -> Files:
    for info in archive.infolist():
        if info.filename.startswith(folder) and info.filename.endswith(".py"):
            yield info.filename.removeprefix(folder), f"{info.filename}{info.CRC}", partial(archive.read, info)


def _of_tags(package: str, place: Path) -> Iterator[tuple[Version, Files]]:
    """The first release of each minor version, oldest first, with its files."""
    chosen: dict[tuple[int, ...], tuple[Version, str]] = {}
    for tag in _git(place, "tag").decode().split():
        version = _version(tag) if tag.startswith(TAGS.get(package, "")) else None
        if version is None or version.is_prerelease or version < Version(OLDEST.get(package, "0")):
            continue
        key = version.release if package in EVERY_RELEASE else version.release[:2]
        if key not in chosen or version < chosen[key][0]:
            chosen[key] = (version, tag)
    for version, tag in sorted(chosen.values()):
        yield version, _of_tag(place, tag, FOLDERS[package])


def _version(tag: str) -> Version | None:
    try:
        return Version(tag.removeprefix("core_"))
    except InvalidVersion:
        return None


def _of_tag(place: Path, tag: str, folder: str) -> Files:
    for line in _git(place, "ls-tree", "-r", tag, folder).decode().splitlines():
        meta, _, path = line.partition("\t")
        _, kind, blob = meta.split()
        if path.endswith(".py") and kind == "blob":
            yield path.removeprefix(folder), path + blob, partial(_git, place, "cat-file", "blob", blob)


def _git(place: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", str(place), *words], check=True, capture_output=True).stdout


def _facts(package: str, files: Files, read: dict[str, Facts]) -> set[str]:
    facts: set[str] = set()
    for path, key, load in files:
        if SKIPPED.search("/" + path):
            continue
        if key not in read:
            read[key] = frozenset(_of_file(package, path, load()))
        facts |= read[key]
    return facts


def _of_file(package: str, path: str, text: bytes) -> Iterator[str]:
    """Names as "module x.y", "name" (at a module's top level), "export name", "Class.attribute", "Class(parameter)"."""
    module = ".".join(
        [package, *path.removesuffix(".py").removesuffix("/__init__").removesuffix("__init__").split("/")]
    )
    yield "module " + module.rstrip(".")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    if path == "__init__.py":
        yield from (f"export {name}" for name in _exported(tree))
    shallow = bool(MODELS.search(f"{package}/{path}"))
    for node in _statements(tree.body):
        yield from _defined(node)
        if isinstance(node, ast.ClassDef) and not shallow:
            yield from _of_class(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not shallow:
            yield from _parameters(node.name, node)


def _exported(tree: ast.Module) -> Iterator[str]:
    """Names that the package itself has: imported there, or listed for a lazy import.

    Lists of models are left out: newer releases make them from the files.
    """
    for node in _statements(tree.body):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and not str(key.value).startswith("models"):
                    yield from (one.value for one in ast.walk(value) if _is_name(one))


def _is_name(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a block, and of the branches of its conditions."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            handlers = [one for handler in getattr(node, "handlers", []) for one in handler.body]
            yield from _statements([*node.body, *node.orelse, *handlers])


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    return []


def _of_class(node: ast.ClassDef) -> Iterator[str]:
    data = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    for inner in node.body:
        for name in _defined(inner):
            yield f"{node.name}.{name}"
            if data and isinstance(inner, ast.AnnAssign):
                yield f"{node.name}({name})"
        if isinstance(inner, ast.FunctionDef) and (inner.name == "__init__" or inner.name in METHODS):
            yield from _parameters(node.name if inner.name == "__init__" else f"{node.name}.{inner.name}", inner)


def _parameters(name: str, node: "ast.FunctionDef | ast.AsyncFunctionDef") -> Iterator[str]:
    if name.rpartition(".")[2].startswith("_"):
        return
    for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
        if argument.arg not in ("self", "cls"):
            yield f"{name}({argument.arg})"


if __name__ == "__main__":
    main(sys.argv[1:])
