"""Names of other libraries: lists of them, made from their sources, and docs/names.md, made from the lists.

    python scripts/peer_names.py                        write docs/names.md
    python scripts/peer_names.py collect NAME FOLDER    write tests/compat/names/NAME.txt from a folder of sources

FOLDER is an unpacked wheel or source tree with the top-level package in it. A list has a line with the version, then a
public name a line: functions and classes defined in the modules of SCOPE, and what their packages export.
"""

import ast
import fnmatch
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from powertrain.compat.missing import why_not

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests" / "compat" / "names"
PAGE = ROOT / "docs" / "names.md"
# library -> (version, patterns of modules whose names are public)
SCOPE = {
    "flash_attn": ("2.8.3", ("flash_attn", "flash_attn.[a-z]*")),
    "flash_attn_interface": ("3.0.0", ("flash_attn_interface",)),
    "xformers": ("0.0.35", ("xformers", "xformers.[cio]*", "xformers.sparse*", "xformers.profiler")),
    "apex": ("0.1", ("apex", "apex.[a-z]*")),
    "liger_kernel": (
        "0.8.5",
        ("liger_kernel.transformers", "liger_kernel.transformers.[a-z]*", "liger_kernel.chunked_loss"),
    ),
    "transformer_engine": (
        "2.20.2",
        (
            "transformer_engine.pytorch", "transformer_engine.common.recipe", "transformer_engine.pytorch.attention",
            *(f"transformer_engine.pytorch.{module}" for module in (
                "optimizers", "ops", "ops.basic", "permutation", "router", "cross_entropy", "distributed", "module",
                "attention.rope", "attention.inference", "graph", "cpu_offload",
            )),
        ),
    ),
    "megatron": ("0.16.1", ("megatron.core.fusions.*",)),
}  # fmt: skip
_PRIVATE = (
    "._", ".test", ".benchmark", ".cute", "_triton_amd", "liger_kernel.transformers.model",
    "liger_kernel.transformers.experimental",
)  # fmt: skip


def collect(library: str, folder: Path) -> list[str]:
    """The library's public names, sorted."""
    names: set[str] = set()
    for file in sorted(folder.rglob("*.py")):
        module = ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        wanted = any(fnmatch.fnmatchcase(module, pattern) for pattern in SCOPE[library][1])
        if wanted and not any(part in module for part in _PRIVATE):
            tree = ast.parse(file.read_text())
            names |= {f"{module}.{name}" for name in _defined(tree, library, file.name == "__init__.py")}
    return sorted(names)


def _defined(tree: ast.Module, library: str, package: bool) -> Iterator[str]:
    for node in tree.body:
        found: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not _internal(node):
            found = [node.name]
        elif package and isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith(library)):
            found = [alias.asname or alias.name for alias in node.names]
        yield from (name for name in found if name[0].isalpha())


def _internal(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Kernels, and autograd functions behind the functions that are public."""
    above = node.bases if isinstance(node, ast.ClassDef) else node.decorator_list
    texts = [ast.unparse(part) for part in above]
    return any(text.endswith("autograd.Function") or text.startswith(("triton.", "cute.")) for text in texts)


def read(library: str) -> tuple[str, list[str]]:
    """(version, names) of a list."""
    version, *names = (LISTS / f"{library}.txt").read_text().split()
    return version, names


def ours(name: str) -> str | None:
    """Where we have a name of theirs, as `powertrain.compat....`; None if we have not."""
    path = f"powertrain.compat.{name}"
    module, _, attribute = path.rpartition(".")
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    return path if hasattr(found, attribute) else None


def page() -> str:
    """docs/names.md."""
    lines = [
        "# Names of other libraries", "",
        "Made by scripts/peer_names.py from tests/compat/names: every public name of a version, and ours or why not.",
        "Ours is the same path under `powertrain.compat`; by `powertrain shim` and `powertrain.shim.install`",
        "([migrating](migrating.md)) unchanged code finds it under their own name.",
    ]  # fmt: skip
    for library in SCOPE:
        version, names = read(library)
        rows = [(name, ours(name)) for name in names]
        here = sum(path is not None for _, path in rows)
        lines += [
            "",
            f"## {library} {version}",
            "",
            f"{here} of {len(rows)} names.",
            "",
            "| name | in powertrain.compat |",
            "|---|---|",
        ]
        lines += [f"| {name} | {'yes' if path else why_not(name)} |" for name, path in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["collect"]:
        _, _, library, folder = sys.argv
        LISTS.mkdir(exist_ok=True)
        (LISTS / f"{library}.txt").write_text("\n".join([SCOPE[library][0], *collect(library, Path(folder))]) + "\n")
    else:
        PAGE.write_text(page())
