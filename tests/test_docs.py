"""Documentation: code blocks run; commands, keys, links and paths exist; tables and API pages are complete."""

import ast
import importlib
import json
import pkgutil
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from typer.main import get_command

import powertrain
import powertrain.parallel
from powertrain.cli import app
from powertrain.doctor.checks import CHECKS
from powertrain.ops.attention import backend_measurements
from powertrain.train.config.reader import run_of
from powertrain.train.config.schema import RunConfig
from powertrain.train.config.yaml_source import ConfigError

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "README.md",
    *(ROOT / "docs").rglob("*.md"),
]
FOLDERS = [folder.name for parent in (ROOT, ROOT / "powertrain") for folder in parent.iterdir() if folder.is_dir()]
DOCUMENTED_PACKAGES = ("nn", "models", "train", "compat", "testing")
LIBRARIES = [folder.name for folder in (ROOT / "powertrain" / "compat").iterdir() if folder.is_dir()]
OPS = [name for name, module in powertrain._PUBLIC.items() if module.startswith("powertrain.ops.")]
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
# the required keys of a config; a page's keys are added
BASE: dict[str, Any] = {
    "model": {"preset": "pythia-70m", "vocab_size": 512},
    "data": {"train": "quickstart"},
    "train": {"steps": 10, "seq_length": 64},
}


def _blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if _blocks(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_code_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one namespace a page; a block that needs a GPU or several ranks is marked ```python no-run."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in _blocks(page):
        exec(compile(block, page.name, "exec"), namespace)
    if page.name == "README.md":
        assert "torch.Size([4, 128, 256])" in capsys.readouterr().out


def test_fences_are_known() -> None:
    """A misspelt info string would take a block out of the test above."""
    known = {"", "python", "python no-run", "bash", "yaml"}
    for page in PAGES:
        for info in re.findall(r"^```(.*)$", page.read_text(), flags=re.MULTILINE):
            assert info in known, f"{page.name}: ```{info}"


def _public_modules() -> Iterator[str]:
    """Modules of the documented packages that define a public class or function."""
    for name in DOCUMENTED_PACKAGES:
        package = importlib.import_module(f"powertrain.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"powertrain.{name}."):
            source = Path(powertrain.__file__).parent.parent / module.name.replace(".", "/")
            file = source / "__init__.py" if module.ispkg else source.with_suffix(".py")
            if re.search(r"^(?:class|def) [a-zA-Z]", file.read_text(), flags=re.MULTILINE):
                yield module.name


def test_every_public_name_is_in_an_api_page() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    entries = re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)
    assert len(entries) == len(set(entries)), "an entry stands twice"
    listed = [pkgutil.resolve_name(entry) for entry in entries]  # raises where an entry names nothing
    public = [getattr(powertrain, name) for name in powertrain._PUBLIC]
    public += [getattr(powertrain.parallel, name) for name in powertrain.parallel._PUBLIC]
    missing = {value.__qualname__ for value in public if value not in listed} | (set(_public_modules()) - set(entries))
    assert not missing, f"not in docs/api: {', '.join(missing)}"


def test_every_page_is_in_the_navigation() -> None:
    def pages(node: object) -> Iterator[str]:
        children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        if isinstance(node, str):
            yield node
        for child in children:
            yield from pages(child)

    listed = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(listed) == len(set(listed))
    assert {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")} <= set(listed)
    for page in listed:
        assert (ROOT / page).exists(), page


@pytest.mark.parametrize("page", ["README.md", "docs/autocast.md"])
def test_every_op_is_listed(page: str) -> None:
    text = (ROOT / page).read_text()
    missing = [name for name in OPS if not re.search(rf"`[^`]*\b{name}\b[^`]*`", text)]
    assert not missing, f"{page} does not mention {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_commands_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([\w./-]*\w)\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    code = "\n".join(map("".join, re.findall(r"```\n(.*?)```|`([^`\n]+)`", text, flags=re.DOTALL)))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"\bpowertrain (\w+)", code)) <= set(COMMANDS)
    assert set(re.findall(r"\bmake ([\w-]+)", code)) <= targets
    for path in re.findall(
        r"\b(?:tests|docs|scripts|configs|benchmarks|runtime|ops|parallel|nn|models|train|compat|testing|builder|doctor|cli)/[\w/]+\.(?:py|md)\b",
        text,
    ):
        stands_for_any = path.endswith(("/x.py", "/test_x.py"))
        assert stands_for_any or any((root / path).exists() for root in (ROOT, ROOT / "powertrain")), path


def _shell_lines(page: Path) -> Iterator[str]:
    for block in re.findall(r"^ *```(?:bash)?\n(.*?)^ *```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        yield from (line.strip() for line in block.splitlines())


def _parsed(command: str) -> list[str]:
    """The words of `powertrain ...`, which the command line must take; nothing is run."""
    _, name, *words = shlex.split(command, comments=True)
    words = words[: next((n for n, word in enumerate(words) if word in ("<", ">", "|")), len(words))]
    try:
        COMMANDS[name].make_context(name, list(words))
    except click.exceptions.ClickException as error:
        pytest.fail(f"{command}: {error.format_message()}")
    return words


def _check_key(override: str) -> None:
    try:
        run_of(BASE, [override])
    except ConfigError as error:
        assert "unknown key" not in str(error), error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_pages_parse(page: Path) -> None:
    for line in _shell_lines(page):
        started = re.match(r"(?:(?:torchrun|srun|mpiexec) .*-m )?(powertrain [a-z].*)", line)
        for word in _parsed(started[1]) if started else ():
            # without a dot it is GPT-NeoX's
            if re.match(rf"(?:{'|'.join(RunConfig.model_fields)})\.[a-z_.]+=", word):
                _check_key(word)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_help_parse(name: str) -> None:
    text = (COMMANDS[name].help or "").replace("\\\n", " ")
    examples = re.findall(r"^ *(?:torchrun .*-m )?(powertrain [a-z].*?)(?: {3,}.*)?$", text, flags=re.MULTILINE)
    assert examples or name in ("demo", "env", "tour")
    for example in examples:
        _parsed(example)


def test_keys_named_in_pages_are_known() -> None:
    """`train.steps`, `train.steps=100`, `train.steps: 100`. optimizer.params and optimizer.type are GPT-NeoX's."""
    others = ("optimizer.params", "optimizer.type", "checkpoint.json", "train.log")
    sections = "|".join(RunConfig.model_fields)
    for page in PAGES:
        for key in re.findall(rf"`((?:{sections})(?:\.[a-z_]+)+)(?:(?:=|: )[^`\n]*)?`", page.read_text()):
            if not key.startswith(others):
                _check_key(f"{key}=1")


def test_configs_of_pages_are_valid() -> None:
    def laid(over: Any, under: Any) -> Any:
        if not isinstance(over, dict) or not isinstance(under, dict) or {"preset", "architecture"} & set(over):
            return over
        return under | {key: laid(value, under.get(key)) for key, value in over.items()}

    blocks = [block for page in PAGES for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.S | re.M)]
    assert blocks
    for block in blocks:
        run_of(laid(yaml.safe_load(block), BASE))


def test_commands_in_messages_exist() -> None:
    """Of every text in the package that says `powertrain COMMAND --option`."""
    checks = {check.name for check in CHECKS}
    for file in (ROOT / "powertrain").rglob("*.py"):
        source = file.read_text()
        nodes = ast.walk(ast.parse(source)) if "powertrain " in source else ()
        texts = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
        for text in texts:
            for name, rest in re.findall(r"(?<![\w./'])powertrain ([a-z][\w-]*)([^;,()`\n（）；，。]*)", text):
                if (name, rest[:9]) == ("or", " gpt_neox"):  # kinds of configs
                    continue
                assert name in COMMANDS, f"{file}: powertrain {name}"
                options = {option for parameter in COMMANDS[name].params for option in parameter.opts} | {"--help"}
                assert set(re.findall(r"(?<= )--[a-z][\w-]*", rest.split(" -- ")[0])) <= options, (
                    f"{file}: {name}{rest}"
                )
            for listed in re.findall(r"powertrain doctor((?: --only [\w-]+)+,? ?[\w-]*)", text):
                names = re.findall(r"--only ([\w-]+)", listed)
                assert set(names) <= checks and listed.split(", ")[-1] not in checks, f"{file}: doctor{listed}"


# a file per command, error, op or module of another library: the folder says enough
LISTED_AS_FOLDERS = ("cli", "doctor/causes", "ops/cases", *(f"compat/{library}" for library in LIBRARIES))


def test_architecture_tables_list_every_file() -> None:
    """A table whose head is `file in FOLDER` lists files of that folder."""
    folder, listed = "", set()
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        head = re.match(r"\| file in (\S+) \|", line)
        folder = head[1] if head else folder if line.startswith("|") else ""
        cell = line.split("|")[1].replace("\\", "") if folder else ""
        listed |= {ROOT / folder / file for file in re.findall(r"[\w/]+\.py", cell)}
    files = {file for file in (ROOT / "powertrain").rglob("*.py") if file.name != "__init__.py"}
    in_folders = {file for file in files for part in LISTED_AS_FOLDERS if (ROOT / "powertrain" / part) in file.parents}
    assert sorted(map(str, listed - files)) == [], "no such file"
    assert sorted(map(str, files - listed - in_folders)) == [], "in no table of docs/architecture.md"


def test_the_tables_of_attention_are_what_the_code_says() -> None:
    page = (ROOT / "docs" / "attention.md").read_text()
    updated = runpy.run_path(str(ROOT / "scripts" / "attention_tables.py"))["updated"]
    assert updated(page) == page, "python scripts/attention_tables.py"


def test_the_page_of_attention_counts_the_measured_problems() -> None:
    measured = json.loads((ROOT / "powertrain/ops/attention/measured/sm_90.json").read_text())
    drawn = [row["source"] for row in measured["rows"] if re.match("random|seed|few-tokens", row["source"])]
    h100, own = sum(source.endswith("h100") for source in drawn), backend_measurements._OWN
    page = " ".join((ROOT / "docs" / "attention.md").read_text().split())
    rows = len(measured["rows"])
    says = f"{rows} measured problems, {len(drawn) - h100} of them random ones on one H200 and {h100} on one H100."
    assert says in page
    assert f"each of which weighs as much as {own:.0f} shipped ones" in page


def test_the_support_matrix_is_current() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "support_matrix.py"))["page"]
    assert (ROOT / "docs" / "support.md").read_text() == page(), "python scripts/support_matrix.py"


def test_the_tables_of_speed_are_those_of_the_newest_run() -> None:
    page = (ROOT / "docs" / "speed.md").read_text()
    updated = runpy.run_path(str(ROOT / "scripts" / "speed_tables.py"))["updated"]
    assert updated(page) == page, "python scripts/speed_tables.py"


def test_the_page_of_speed_knows_the_benchmarks_opponents() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "speed_tables.py"))
    benchmarks = runpy.run_path(str(ROOT / "benchmarks" / "all.py"))
    assert made["PEERS"] == benchmarks["PEERS"]
    assert set(made["TITLES"]) == set(benchmarks["SECTIONS"])
