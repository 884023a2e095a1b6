"""`powertrain init`: its file is read as it is, for any answers; and commands that start without torch."""

import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.cli import init as init_module
from powertrain.train.config.reader import read_config

ROOT = Path(__file__).resolve().parent.parent


def _init(*words: str, answers: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["init", *words], input=answers)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_closed_standard_input_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert init_module._asked(None, "Steps", "200") == "200"


def test_every_file_it_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random.seed(0)
    Path("tok: #.json").write_text("{}")
    for name in ("a.txt", "with space.jsonl", "quote'\"#: {x}.txt", "2024", "null", "-.txt", "ü.txt"):
        Path(name).write_text("text")
        steps, precision = random.randrange(1, 10_000), random.choice(["fp32", "bf16", "fp16"])
        words = ["--data", name, "--steps", str(steps), "--precision", precision, "--force"]
        model = random.choice(["tiny", "llama-1b", "pythia-160m"])
        tokenizer = random.choice(["bytes", "train:300", "tok: #.json"])
        code, output = _init("my run.yml", *words, "--model", model, "--tokenizer", tokenizer)
        assert code == 0, output
        config = read_config(["my run.yml"]).config
        assert config.data.train[0].path == name and config.train.steps == steps
        assert config.train.precision == precision and config.data.tokenizer == tokenizer
        assert str(config.folder()) == "runs/my run"


def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    (file := tmp_path / "old.yml").write_text("old")
    (link := tmp_path / "link.yml").symlink_to(file)
    words = ["--data", "quickstart", "--steps", "5", "--force"]
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, unlimited[1]))
    try:
        ends = [_init(str(path), *words) for path in (file, link, tmp_path / "new.yml")]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert all(code == 2 and "cannot be written: File too large" in said for code, said in ends)
    assert file.read_text() == "old" and sorted(tmp_path.glob("[!.]*")) == [link, file]
    assert _init(str(link), *words)[0] == 0 and link.is_symlink() and "quickstart" in file.read_text()


def test_asks_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init_module, "_asked", lambda given, question, default: given or answers.pop(0))
    answers = ["quickstart", "tiny", "train:512", "77"]
    assert _init("--precision", "fp32")[0] == 0 and not answers
    config = read_config(["run.yml"]).config
    assert config.train.steps == 77 and config.data.tokenizer == "train:512"


@pytest.mark.parametrize("answer", ["many", "0", "-3", "1.5"])
def test_steps_that_cannot_be_are_said(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init_module, "_asked", lambda given, question, default: given or answers.pop(0))
    answers = ["quickstart", "tiny", "bytes", answer]
    code, output = _init("--precision", "fp32")
    assert code == 2 and f"must be a number of at least 1, got {answer!r}" in output and not Path("run.yml").exists()


@pytest.mark.parametrize(
    "words, said",
    [
        (["--data", "nothing.txt"], "nothing.txt: no such file or folder"),
        (["--model", "gpt-9"], "must be tiny"),
        (["--tokenizer", "train:10"], "must be train:SIZE with a number of ids, at least 257, got 'train:10'"),
        (["--tokenizer", "nope.json"], "nope.json: no such file or folder"),
        (["--tokenizer", "gpt2:there.yml:merges.txt"], "merges.txt: no such file or folder"),
        (["--tokenizer", "train:many"], "must be train:SIZE with a number of ids, at least 257, got 'train:many'"),
        (["--precision", "int4"], "must be fp32, bf16 or fp16, got 'int4'"),
        (["--steps", "0"], "--steps"),
        (["--data", ""], "must be a file, a folder, hf:ORG/NAME or quickstart, got ''"),
        (["run.txt"], "must end in .yml"),
        (["there.yml"], "exists already; --force replaces it"),
        (["there.yml/run.yml"], "cannot be written"),
    ],
)
def test_what_it_refuses(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.yml").write_text("precious")
    code, output = _init(*words)
    assert code == 2 and said in " ".join(output.replace("│", " ").split()), output
    assert Path("there.yml").read_text() == "precious"


WITHOUT_TORCH = [
    "--version", "--help", "train --help", "init new.yml", "target", "target H100", "env", "build --help",
    "diagnose --help", "train run.ylm", "train run.ylm train.steps=1", "lint run.ylm", "report nothing",
    "train quikstart", "generate nothing --prompt x", "convert nothing out --to hf", "kernels --pack nothing",
    "verify nothing",
    "preprocess nothing --output o --tokenizer bytes",
]  # fmt: skip


# a process for each command, forked where the command line has been imported: half of its time
_FORKED = """
import os, sys, time
from powertrain.cli import app
before = time.process_time()
for number, line in enumerate(sys.argv[1:]):
    if child := os.fork():
        with open(f"{number}.code", "w") as file:
            file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        continue
    for name, stream in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
    try: app(line.split())
    except SystemExit as end: code = end.code
    heavy = {"torch", "triton", "transformers"} & set(sys.modules)
    assert not heavy, heavy
    assert before + time.process_time() < 2
    sys.exit(code)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """By command: its exit code, stdout and stderr."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "run.yml").write_text("")
    command = [sys.executable, "-c", _FORKED, *WITHOUT_TORCH]
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(folder)}
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120)
    assert run.returncode == 0, run.stderr
    return {
        line: (int((folder / f"{n}.code").read_text()), *((folder / f"{n}.{x}").read_text() for x in ("out", "err")))
        for n, line in enumerate(WITHOUT_TORCH)
    }


@pytest.mark.parametrize("line", WITHOUT_TORCH)
def test_starts_without_torch(line: str, ended: dict[str, tuple[int, str, str]]) -> None:
    """torch alone takes seconds. Without it the slowest of these takes a quarter of a second of a quiet core."""
    code, stdout, stderr = ended[line]
    assert "Traceback" not in stderr and "AssertionError" not in stderr, stderr
    if "nothing" in line or "ylm" in line or "quik" in line:
        assert code in (1, 2)
        assert len((stdout + stderr).splitlines()) == 1
    else:
        assert code == 0, stderr
    if "ylm" in line:
        assert "did you mean run.yml?" in stderr
    if "quik" in line:
        assert "did you mean quickstart?" in stderr


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.output.startswith("powertrain 0.")
