"""Public GPT-NeoX configs, each with keys that the others lack: the numbers that they mean, and three steps.

The fixture has keys and values, and what follows by GPT-NeoX's rules; scripts/neox_configs.py reads any number.
"""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "neox_configs.py"))
LINES = (Path(__file__).parent / "fixtures" / "neox_configs.jsonl").read_text().splitlines()
CONFIGS = [json.loads(line) for line in LINES]
IDS = [f"{number}-{row['name']}" for number, row in enumerate(CONFIGS)]


@pytest.mark.parametrize("row", CONFIGS, ids=IDS)
def test_numbers(row: dict[str, Any], tmp_path: Path) -> None:
    """Global batch, precision, parameters and rates at full size; and the rules give them still."""
    verdict, words = SCRIPT["judge"](row["keys"], row["world"], tmp_path / "run", steps=False)
    assert verdict == "read", words
    again = SCRIPT["expected"](SCRIPT["complete"](row["keys"]), row["world"])
    assert not SCRIPT["differences"](row["expected"], again)


# one of each precision; the others are slow
OFTEN = {{row["expected"]["precision"]: i for i, row in enumerate(CONFIGS)}[p] for p in ("fp16", "bf16")}


@pytest.mark.parametrize(
    "row",
    [row if i in OFTEN else pytest.param(row, marks=pytest.mark.slow) for i, row in enumerate(CONFIGS)],
    ids=IDS,
)
def test_three_steps(row: dict[str, Any], tmp_path: Path) -> None:
    SCRIPT["write_data"](tmp_path)
    verdict, words = SCRIPT["judge"](row["keys"], row["world"], tmp_path / "run", steps=True)
    assert verdict == "read" and (not words or "torchao" in words), words


def test_a_difference_is_seen(tmp_path: Path) -> None:
    """Of each number."""
    row = CONFIGS[0]
    for name, other in (("batch", 1), ("precision", "int8"), ("parameters", 7), ("rates", [1.0] * 6)):
        changed = {**row["expected"], name: other}
        assert [line.split()[0] for line in SCRIPT["differences"](changed, row["expected"])] == [name]
