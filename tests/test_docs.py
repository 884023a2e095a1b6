"""What the documents promise: the README's code runs, its commands and links exist, every op is in the tables."""

import re
import runpy
from pathlib import Path

import pytest
from typer.main import get_command

import powertrain
from powertrain.cli import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *(ROOT / "docs").rglob("*.md"),
]
OPS = [name for name, module in powertrain._PUBLIC.items() if module.startswith("powertrain.ops.")]


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert 8 <= len(code.splitlines()) <= 12
    exec(compile(code, "README.md", "exec"), {})
    assert "torch.Size([4, 128, 256])" in capsys.readouterr().out


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
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"\bpowertrain (\w+)", code)) <= commands
    assert set(re.findall(r"\bmake ([\w-]+)", code)) <= targets
    for path in re.findall(r"\b(?:tests|docs|runtime|ops|benchmarks)/[\w/]+\.(?:py|md)\b", text):
        stands_for_any = path.endswith(("/x.py", "/test_x.py"))
        assert stands_for_any or any((root / path).exists() for root in (ROOT, ROOT / "powertrain")), path


def test_the_tables_of_attention_are_what_the_code_says() -> None:
    page = (ROOT / "docs" / "attention.md").read_text()
    updated = runpy.run_path(str(ROOT / "scripts" / "attention_tables.py"))["updated"]
    assert updated(page) == page, "python scripts/attention_tables.py"
