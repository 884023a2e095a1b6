"""Damaged and monstrous configs: read, or refused in an answer that fits on a screen, soon and without much memory."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.models import build
from powertrain.train.config.reader import read_config
from powertrain.train.config.yaml_source import ConfigError
from tests.distributed.launch import ROOT, clean_environment
from tests.faults.damage import answered, damaged
from tests.train.tiny_run import write_config

FILES = sorted(
    [
        ROOT / "configs/llama-1b.yml",
        *(ROOT / "configs/neox").glob("*.yml"),
        *(ROOT / "tests/train/fixtures").glob("*.yml"),
    ]
)
WORDS = [b"hidden_size", b"steps", b"vocab_size", b"num_layers", b"seq_length", b"micro_batch_size"]
MANY = pytest.param(1500, marks=pytest.mark.slow)


def read_and_build(file: Path) -> None:
    config = read_config([file]).config
    if config.model.vocab_size:
        build(config.model)


@pytest.mark.parametrize("count", [60, MANY])
def test_damaged_bytes(tmp_path: Path, count: int) -> None:
    chance, file = random.Random(11), tmp_path / "run.yml"
    for n in range(count):
        file.write_bytes(damaged(FILES[n % len(FILES)].read_bytes(), chance))
        answered(lambda: read_and_build(file), ConfigError)


VALUES: list[Any] = [
    0, -1, 2**31, 2**62, 2**64, 10**400, 1e308, -1e-308, True, None, "", "x" * 5000, "\0", "\ud800", [], [[]], {},
    {"a": {}}, [1] * 500, "1e5", "0x10", "12:30:45", ".inf", ".nan", "~", "!!python/object:os.system", "2001-01-01",
]  # fmt: skip


@pytest.mark.parametrize("count", [80, MANY])
def test_values_of_any_kind_and_size(tmp_path: Path, count: int) -> None:
    """One or two keys of a good config get a value that is not theirs."""
    chance, file = random.Random(12), tmp_path / "run.yml"
    ours = yaml.safe_load((ROOT / "tests/train/fixtures/ours.yml").read_text())
    for _ in range(count):
        config = yaml.safe_load(yaml.safe_dump(ours))
        for _ in range(chance.randint(1, 2)):
            section = chance.choice([s for s in config.values() if isinstance(s, dict)])
            key = chance.choice([*section, "num_layers", "steps", "seq_length", "new"])
            section[key] = chance.choice(VALUES)
        file.write_text(yaml.dump(config), errors="surrogatepass", encoding="utf-8")
        answered(lambda: read_and_build(file), ConfigError)


MONSTERS = {
    "deep": "[" * 50_000,
    "deep mapping": "{a: " * 20_000,
    "deep block": "\n".join(" " * n + f"k{n}:" for n in range(900)),
    "aliases": "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)),
    "a long number": "train: {steps: " + "9" * 500_000 + "}",
    "a long time": "train: {steps: " + "1:" + "59:" * 300_000 + "1}",
    "a long word": "train: {steps: " + "x" * 900_000 + "}",
    "many keys": "model: llama-1b\ntrain:\n" + "".join(f"  key{n}: {n}\n" for n in range(20_000)),
    "many wrong items": "model: llama-1b\ndata: {train: [" + "1, " * 20_000 + "]}\ntrain: {steps: 1, seq_length: 8}",
    "too large": "# " + "x" * (2 << 20),
    "a long line of quotes": '"' + "\\x41" * 200_000,
    "nul": "model: \0",
}


@pytest.mark.parametrize("name", MONSTERS)
def test_monsters(tmp_path: Path, name: str) -> None:
    file = tmp_path / "run.yml"
    file.write_text(MONSTERS[name])
    assert answered(lambda: read_config([file]), ConfigError, seconds=60) is not None


_BOUNDED = """
import resource, sys
from powertrain.cli import app
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
app(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "word, message",
    [
        ("model.num_layers=1000000000", "model.num_layers must be at most 4096"),
        ("model.hidden_size=4611686018427387904", "model.hidden_size must be at most"),
        ("model.max_position_embeddings=2000000000", "model.max_position_embeddings must be at most 16777216"),
        ("train.loss_scale.initial_power=200", "train.loss_scale.initial_power must be less than or equal to 127"),
        ("train.micro_batch_size=1000000000000", "train.micro_batch_size * seq_length must be at most 67108864 tokens"),
        ("train.loss_scale.static=1e39", "train.loss_scale.static must be less than or equal to"),
        ("train.loss_scale.minimum=1e9", "train.loss_scale.minimum must be at most 2 ** initial_power (65536)"),
    ],
)
def test_an_impossible_size_is_refused(tmp_path: Path, word: str, message: str) -> None:
    result = CliRunner().invoke(app, ["train", str(write_config(tmp_path)), word])
    assert result.exit_code == 2 and message in result.output.replace("\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "word, message",
    [
        ("train.steps=1000000000000", "train.steps: the order of"),
        ("train.gradient_accumulation_steps=1000000000000", "train.steps: the order of"),
        ("evaluation.steps=1000000000000", "train.steps: the order of"),
    ],
)
def test_a_training_of_impossible_size_is_refused_at_once(tmp_path: Path, word: str, message: str) -> None:
    command = [sys.executable, "-c", _BOUNDED, "train", str(write_config(tmp_path)), word, "logging.report=false"]
    result = subprocess.run(command, env=clean_environment(), cwd=ROOT, capture_output=True, text=True, timeout=120)
    output = result.stdout + result.stderr
    assert result.returncode in ((2,) if message else (0, 2)) and message in output.replace("\n", ""), output[-3000:]
    assert "Traceback" not in output


@pytest.mark.parametrize("count", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_lint_answers_in_a_screen(tmp_path: Path, count: int) -> None:
    """The command: 0, 1 or 2, and no traceback."""
    chance, file = random.Random(13), tmp_path / "run.yml"
    good = (ROOT / "configs/quickstart.yml").read_bytes()
    for _ in range(count):
        bad = damaged(good, chance)
        for word in WORDS:
            if chance.random() < 0.2:
                bad = bad.replace(word + b": ", word + b": " + chance.choice([b"9", b"-", b"1e", b"[", b"0x"]))
        file.write_bytes(bad)
        result = CliRunner().invoke(app, ["lint", str(file), "--arch", "A100"])
        assert result.exit_code in (0, 1, 2) and isinstance(result.exception, (SystemExit, type(None))), bad
        assert result.exit_code != 2 or len(result.output.splitlines()) < 40, result.output
