"""Packages import downwards only and without cycles, lazily or by a string too; one file reads the environment."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from powertrain.runtime.gc_disabled import gc_disabled

ROOT = Path(__file__).resolve().parent.parent / "powertrain"
ORDER = ["runtime", "ops", "losses", "quant", "parallel", "nn", "models", "train", "compat", "cli"]
BELOW = {layer: set(ORDER[: index + 1]) for index, layer in enumerate(ORDER)}
# beside the order: what each of these may import; cli, on top, may import them too
BELOW |= {side: {"runtime", side} for side in ("testing", "builder", "doctor")}
BELOW["patching"] = {"runtime", "ops", "testing", "patching"}  # judges by the rule that tests judge ops by
BELOW["shim"] = {"runtime", "ops", "compat", "shim"}
BELOW["compat"] |= {"patching"}  # names of theirs that patch a model
BELOW["cli"] |= {"testing", "builder", "doctor", "patching", "shim"}
BELOW["__main__"] = {"cli"}
BELOW["__init__"] = set(BELOW)  # the public names; they are resolved on first use

# files that may touch os.environ, and why
ENVIRONMENT = {
    "runtime/settings.py": "reads every variable of ours",
    "runtime/compile/triton_compat.py": "Triton takes its interpreter switch from the environment alone",
    "runtime/compile/service.py": "hands its workers an environment",
    "runtime/compile/worker.py": "gives its compiler a private folder",
    "train/ranks.py": "reads what launchers set: rank and rendezvous address; cuBLAS takes its workspace from there",
    "compat/transformer_engine/common/recipe.py": "reads TransformerEngine's defaults of recipes",
    "compat/transformer_engine/pytorch/attention/dot_product_attention.py": "reads TransformerEngine's own switches",
    "runtime/machine.py": "reads other tools' variables, in the one place that tests replace",
    "cli/shim.py": "hands the command it runs an environment",
    "shim/folders.py": "puts the folders of the stand-ins on PYTHONPATH, for processes started later",
    "cli/build.py": "hands the command it runs an environment",
    "cli/explain.py": "honours other libraries' switches where it speaks for them",
    "cli/tour.py": "hands the processes it starts an environment",
}

FILES = sorted(ROOT.rglob("*.py"))


@functools.cache
def _nodes(source: str) -> tuple[ast.AST, ...]:
    """Of all three tests that read every file, the first parses it."""
    with gc_disabled():  # 3 of 4 s
        return tuple(ast.walk(ast.parse(source)))


def _layer(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def _last_name(function: ast.expr) -> str:
    """c of a.b.c; unparsing every call of the package took 6 s."""
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _imports(source: str, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, dotted name under powertrain) of every import and importlib.import_module of a constant."""
    for node in _nodes(source):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*parts, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _last_name(node.func).endswith(("import_module", "__import__")):
            names = [str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)]
        for name in names:
            if name.split(".")[0] == "powertrain" and name != "powertrain":
                yield node.lineno, name.removeprefix("powertrain.")


def _violations(file: Path, source: str) -> list[str]:
    layer = _layer(file)
    package = ("powertrain", *file.relative_to(ROOT).parts[:-1])
    bad = []
    for line, name in _imports(source, package):
        imported = name.split(".")[0]
        if imported in BELOW and imported not in BELOW[layer]:
            bad.append(f"{file.relative_to(ROOT)}:{line} imports powertrain.{name}; {layer} is below {imported}")
    return bad


def test_layers() -> None:
    for file in FILES:
        assert _layer(file) in BELOW, f"powertrain/{_layer(file)} has no place in the order; see docs/architecture.md"
    assert not [line for file in FILES for line in _violations(file, file.read_text())]


@pytest.mark.parametrize(
    "where, source",
    [
        ("runtime/x.py", "from powertrain.ops.norm import rms_norm"),
        ("runtime/x.py", "def f():\n    import powertrain.ops"),
        ("runtime/x.py", "from powertrain import ops"),
        ("runtime/x.py", "from ..ops import norm"),
        ("runtime/x.py", "import importlib\nimportlib.import_module('powertrain.cli.check')"),
        ("testing/x.py", "from powertrain.ops import norm"),
        ("ops/x.py", "from powertrain.testing import bench"),
        ("ops/attention/x.py", "from ...nn import linear"),
    ],
)
def test_the_test_sees(where: str, source: str) -> None:
    assert _violations(ROOT / where, source)


def test_the_test_allows() -> None:
    assert not _violations(ROOT / "ops/attention/x.py", "from .masks import M\nfrom ..layout import as_rows")
    assert not _violations(ROOT / "cli/x.py", "from powertrain.testing import bench\nimport powertrain")


def _module(file: Path) -> str:
    return ".".join(("powertrain", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def _imported(source: str, package: tuple[str, ...], modules: set[str]) -> set[str]:
    """Our modules that a file imports, also lazily, by importlib or by a name in a string."""
    names = [f"powertrain.{name}" for _, name in _imports(source, package)]
    texts = [str(n.value) for n in _nodes(source) if isinstance(n, ast.Constant)]
    names += [text for text in texts if text.startswith("powertrain.")]
    found = set()
    for name in names:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {"", "powertrain"}


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one import cycle, or none: what is left when modules that import nothing are removed in turn."""
    left = {module: set(imports) & set(graph) - {module} for module, imports in graph.items()}
    while ended := [module for module, imports in left.items() if not imports & set(left)]:
        for module in ended:
            del left[module]
    if not left:
        return []
    path = [next(iter(left))]
    while path[-1] not in path[:-1]:
        path.append(next(name for name in sorted(left[path[-1]]) if name in left))
    return path[path.index(path[-1]) :]


def _with_packages(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph with what importing a module runs before it: the `__init__` of the packages that it is in, unless the
    one who imports it is in them too."""
    whole = {}
    for name, imports in graph.items():
        above = {parent for module in imports for parent in _packages(module) if parent in graph}
        whole[name] = imports | {parent for parent in above if not f"{name}.".startswith(f"{parent}.")}
    return whole


def _packages(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(2, len(parts))]


def test_no_import_cycles() -> None:
    files = {_module(file): file for file in FILES if _module(file) != "powertrain"}
    graph = {
        name: _imported(file.read_text(), ("powertrain", *file.relative_to(ROOT).parts[:-1]), set(files))
        for name, file in files.items()
    }
    assert not (cycle := _cycle(_with_packages(graph))), " -> ".join(cycle)


def test_the_test_sees_cycles() -> None:
    modules = {"powertrain.a", "powertrain.b.c"}
    assert _imported("def f():\n    from powertrain.b import c", ("powertrain",), modules) == {"powertrain.b.c"}
    assert _imported("LAZY = 'powertrain.b.c'", ("powertrain",), modules) == {"powertrain.b.c"}
    assert set(_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}})) == {"b", "c"}
    assert not _cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    # p.b runs p first, which imports a
    graph = {"x.a": {"x.p.b"}, "x.p": {"x.p.c"}, "x.p.b": set(), "x.p.c": {"x.a"}}
    assert not _cycle(graph) and set(_cycle(_with_packages(graph))) == {"x.a", "x.p", "x.p.c"}


def test_environment_is_read_in_one_place() -> None:
    for file in FILES:
        if str(file.relative_to(ROOT)) in ENVIRONMENT:
            continue
        for node in _nodes(file.read_text()):
            touched = {
                getattr(node, "attr", None),
                *(alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)),
            }
            if not touched & {"environ", "environb", "getenv", "putenv"}:
                continue
            pytest.fail(f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: use runtime/settings.py")


def test_no_file_here_is_excused_in_vain() -> None:
    for name in ENVIRONMENT:
        assert "environ" in (ROOT / name).read_text(), f"{name} no longer touches the environment: take it off the list"


def test_hosts_do_not_call_triton_cdiv() -> None:
    """Outside a kernel it takes 4 us; shapes.cdiv 0.1."""
    for file in FILES:
        assert "triton.cdiv(" not in file.read_text(), f"{file.relative_to(ROOT)}: use ops.shapes.cdiv"
