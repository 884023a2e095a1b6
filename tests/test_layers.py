"""A package imports itself and those to its left only, lazy imports included; the environment is read in one place."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "powertrain"
ORDER = ["runtime", "ops", "quant", "parallel", "nn", "models", "train", "compat", "cli"]
BELOW = {layer: set(ORDER[: index + 1]) for index, layer in enumerate(ORDER)}
# beside the order: what each of these may import; cli, on top, may import them too
BELOW |= {side: {"runtime", side} for side in ("testing", "builder", "doctor")}
BELOW["cli"] |= {"testing", "builder", "doctor"}
BELOW["__main__"] = {"cli"}
BELOW["__init__"] = set(BELOW)  # the public names; they are resolved on first use

# files that may touch os.environ, and why
ENVIRONMENT = {
    "runtime/settings.py": "reads every variable of ours",
    "runtime/compile/triton_compat.py": "Triton takes its interpreter switch from the environment alone",
    "runtime/compile/service.py": "hands its workers an environment",
    "runtime/compile/worker.py": "gives its compiler a private folder",
    "train/ranks.py": "reads what launchers say of rank and meeting place; cuBLAS takes its workspace from there",
    "compat/transformer_engine.py": "reads TransformerEngine's own switches, at every call",
    "doctor/machine.py": "reads other tools' variables, in the one place that tests replace",
    "cli/build.py": "hands the command it runs an environment",
    "cli/explain.py": "honours other libraries' switches where it speaks for them",
    "cli/tour.py": "hands the processes it starts an environment",
}

FILES = sorted(ROOT.rglob("*.py"))


def _layer(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def _imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, dotted name under powertrain) of every import and importlib.import_module of a constant."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*parts, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)]
        for name in names:
            if name.split(".")[0] == "powertrain" and name != "powertrain":
                yield node.lineno, name.removeprefix("powertrain.")


def _violations(file: Path, source: str) -> list[str]:
    layer = _layer(file)
    package = ("powertrain", *file.relative_to(ROOT).parts[:-1])
    bad = []
    for line, name in _imports(ast.parse(source), package):
        imported = name.split(".")[0]
        if imported in BELOW and imported not in BELOW[layer]:
            bad.append(f"{file.relative_to(ROOT)}:{line} imports powertrain.{name}; {layer} is below {imported}")
    return bad


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_layers(file: Path) -> None:
    assert _layer(file) in BELOW, f"powertrain/{_layer(file)} has no place in the order; see DESIGN and this test"
    assert not _violations(file, file.read_text())


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


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_environment_is_read_in_one_place(file: Path) -> None:
    if str(file.relative_to(ROOT)) in ENVIRONMENT:
        return
    for node in ast.walk(ast.parse(file.read_text())):
        touched = {
            getattr(node, "attr", None),
            *(alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)),
        }
        where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        assert not touched & {"environ", "environb", "getenv", "putenv"}, f"{where}: use runtime/settings.py"


def test_no_file_here_is_excused_in_vain() -> None:
    for name in ENVIRONMENT:
        assert "environ" in (ROOT / name).read_text(), f"{name} no longer touches the environment: take it off the list"
