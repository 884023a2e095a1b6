"""The tables of docs/configuration.md and docs/coming-from-gpt-neox.md are the code's, and their examples are read."""

import dataclasses
import re
import runpy
from pathlib import Path

import pytest
import yaml

from powertrain.models.registry import configure
from powertrain.train.reporting.metrics import StepRecord

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.mark.parametrize("page", ["configuration.md", "coming-from-gpt-neox.md"])
def test_tables_are_current(page: str) -> None:
    text = (DOCS / page).read_text()
    with_tables = runpy.run_path(str(ROOT / "scripts/config_tables.py"))["with_tables"]
    assert with_tables(page, text) == text, "run python scripts/config_tables.py"


def test_examples_of_models_are_read() -> None:
    lines = re.findall(r"^model: .*$", (DOCS / "configuration.md").read_text(), flags=re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        model = yaml.safe_load(line)["model"]
        configure(**({"preset": model} if isinstance(model, str) else model))


def test_the_python_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "configuration.md").read_text(), flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "configuration.md", "exec"), names)
    assert names["run"].config.train.steps == 100  # type: ignore[attr-defined]


def test_the_page_of_training_lists_what_a_step_records() -> None:
    table = (DOCS / "training.md").read_text().split("A step's line has these keys:")[1].split("\n\n")[1]
    listed = [key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert listed == [field.name for field in dataclasses.fields(StepRecord)]
