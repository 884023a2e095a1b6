"""The `powertrain` command."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from typer.testing import CliRunner

from powertrain.cli import app, check, facts
from powertrain.ops.cases import Case, cases
from powertrain.runtime import settings as settings_module
from powertrain.runtime.settings import VARIABLES
from powertrain.train.data.indexed import IndexedWriter

ROOT = Path(__file__).resolve().parent.parent


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_help_teaches_and_groups() -> None:
    code, output = _run("--help")
    assert code == 0 and "Start here" in output and "This machine" in output
    assert 'powertrain target "RTX 3090 Ti"' in output
    for command in ("check", "target", "env"):
        assert _run(command, "--help")[0] == 0


def test_help_ends_lines_where_the_screen_does() -> None:
    """typer prints the line ends of a docstring, which stand in the middle of a screen of another width."""
    said = _run("train", "--help")[1]
    assert "SIGTERM and Ctrl-C end it after the current step, with a checkpoint." in said
    # examples keep theirs
    assert "powertrain train quickstart" in [line.strip() for line in said.splitlines()]


def test_help_keeps_what_stands_in_brackets() -> None:
    """rich would take `[pytorch]` for markup, and print a command that installs something else."""
    assert "pip install transformer-engine[pytorch]" in _run("build", "--help")[1]
    assert "pip install 'powertrain[evaluate]'" in _run("evaluate", "--help")[1]


def test_lines_of_files_are_no_emoji(tmp_path: Path) -> None:
    """rich's own console makes one of `:100:`."""
    config = tmp_path / "run.yml"
    config.write_text("#\n" * 99 + "nonsense: 3\n")
    code, output = _run("lint", str(config))
    assert code == 2 and f"{config}:100: nonsense" in output


def test_every_command_has_our_console() -> None:
    """`powertrain.runtime.console`; the builder's views are given one."""
    files = [*(ROOT / "powertrain/cli").glob("*.py"), *(ROOT / "powertrain/train").rglob("*.py")]
    own = {str(file.relative_to(ROOT)) for file in files if "from rich.console import Console" in file.read_text()}
    assert own == {f"powertrain/train/{name}.py" for name in ("config/table", "reporting/progress", "reporting/sinks")}


def test_help_imports_no_torch_and_is_fast() -> None:
    code = (
        "import sys\nfrom powertrain.cli import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
    )
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)
    assert time.monotonic() - start < 3


def test_python_m_powertrain() -> None:
    result = subprocess.run([sys.executable, "-m", "powertrain"], capture_output=True, text=True, cwd=ROOT)
    assert "Usage: powertrain" in result.stdout + result.stderr


def test_a_locale_without_utf_8(tmp_path: Path) -> None:
    """Names that stdout cannot encode are escaped in every command."""
    result = CliRunner(charset="ascii").invoke(app, ["verify", str(tmp_path / "文")], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and r"\u6587 must be a run" in result.stderr, result.exception


def test_target() -> None:
    code, output = _run("target", "RTX 3090 Ti")
    assert code == 0
    for fact in ("sm_86", "84", "101376 bytes", "1008 GB/s", "bf16"):
        assert fact in output


def test_target_lists_all() -> None:
    code, output = _run("target")
    assert code == 0 and "RTX 2060" in output and "GB300" in output


def test_target_unknown() -> None:
    code, output = _run("target", "RTX 3090 Super")
    assert code == 2 and "Did you mean RTX 3090" in output


def test_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERTRAIN_DISABLE", "rope,rms_norm")
    settings_module.reload()
    try:
        code, output = _run("env")
    finally:
        monkeypatch.undo()
        settings_module.reload()
    assert code == 0 and "rope, rms_norm" in output
    assert all(variable.name in output for variable in VARIABLES.values())


def test_env_names_variables_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERTRAIN_DISABLED", "all")
    monkeypatch.setenv("POWERTRAIN_ZZZ", "1")
    code, output = _run("env")
    words = " ".join(output.split())
    assert code == 0 and "POWERTRAIN_DISABLED is set, and nothing reads it; did you mean POWERTRAIN_DISABLE?" in words
    assert "POWERTRAIN_ZZZ is set, and nothing reads it" in words


def test_a_tilde_that_no_shell_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("POWERTRAIN_STORE", "~/kernels")
    monkeypatch.setenv("POWERTRAIN_PACKS", "~/a.ptp:/b.ptp")
    monkeypatch.setattr(settings_module, "_current", None)
    now = settings_module.settings()
    monkeypatch.undo()
    assert (now.store, now.packs) == ("/home/me/kernels", ("/home/me/a.ptp", "/b.ptp"))


def test_env_with_a_bad_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERTRAIN_JOBS", "many")
    monkeypatch.setattr(settings_module, "_current", None)
    code, output = _run("env")
    monkeypatch.undo()
    assert code == 2 and "POWERTRAIN_JOBS" in output


@pytest.mark.parametrize(
    ("variable", "value", "must"),
    [
        ("JOBS", "abc", "an integer of at least 1"),
        ("JOBS", "0", "an integer of at least 1"),
        ("COMPILE_TIMEOUT", "abc", "a number of seconds above 0 and at most 1000000"),
        ("LOCK_TIMEOUT", "inf", "a number of seconds above 0 and at most 1000000"),
        ("LOG", "loud", "one of info, debug"),
        ("INTERPRET", "maybe", "0 or 1"),
        ("ON_COMPILE_FAILURE", "foo", "one of raise, reference"),
    ],
)
def test_a_bad_value_ends_any_command_with_one_line(
    variable: str, value: str, must: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"POWERTRAIN_{variable}", value)
    monkeypatch.setattr(settings_module, "_current", None)
    result = CliRunner().invoke(app, ["check", "rms_norm", "--device", "cpu"])
    expected = f"environment variable POWERTRAIN_{variable} must be {must}, got {value!r}\n"
    assert (result.exit_code, result.stderr) == (2, expected)


@pytest.mark.parametrize(
    "words, said",
    [
        ("preprocess none.jsonl --output o --tokenizer bytes", "none.jsonl: no such file or folder"),
        ("preprocess junk --output o --tokenizer none.json", "tokenizer: no such file none.json"),
        ("preprocess junk.jsonl --output o --tokenizer bytes", "junk.jsonl:1: must be a line of JSON"),
        ("kernels --pack none.ptp", "none.ptp: no such file or folder"),
        ("kernels verify --pack junk", "kernel pack junk: not a pack"),
        ("verify none", "none must be a run of Powertrain"),
        ("tune rms_norm", "tune needs a CUDA GPU"),
        ("check rms_form --device cpu", "no op rms_form"),
        ("train quickstart logging.folder=r checkpoint.load=none", "checkpoint.load must name a checkpoint"),
    ],
)
def test_errors_of_the_input_are_on_stderr(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some were on stdout with exit code 1, which is a verdict's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("junk", "junk.jsonl"):
        Path(name).write_text("junk\n")
    result = CliRunner().invoke(app, words.split(), env={"COLUMNS": "200"})
    assert result.exit_code == 2 and said in result.stderr and said not in result.stdout, result.output


def test_a_damaged_checkpoint_counts_more_than_a_path_without_one(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "data", "uint16") as writer:
        writer.add([1, 2, 3])
    assert _run("verify", str(tmp_path / "data"), str(tmp_path / "none"))[0] == 2
    (tmp_path / "data.bin").write_bytes(b"\0" * 6)
    assert _run("verify", str(tmp_path / "data"), str(tmp_path / "none"))[0] == 1


def test_no_folder_for_temporary_files_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks for one while it is imported."""
    words = "No usable temporary directory found in ['/tmp']"
    monkeypatch.setattr("powertrain.cli.facts.environment_page", Mock(side_effect=FileNotFoundError(2, words)))
    result = CliRunner().invoke(app, ["env", "--markdown"])
    assert (result.exit_code, result.stderr) == (2, f"{words}: one must have room; TMPDIR names another\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["--help"], ["env", "--markdown"], ["target"], ["env"]], ids=" ".join)
def test_a_full_disk_below_stdout_is_one_line(words: list[str]) -> None:
    """`env --markdown` leaves its text to the flush at the end."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "powertrain", *words], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
    assert (done.returncode, done.stderr) == (2, "output cannot be written: No space left on device\n")


@pytest.mark.parametrize("flags", [[], ["-u"]], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", [["diagnose", "pyproject.toml"], ["--help"], ["env", "--markdown"]], ids=" ".join)
def test_a_reader_that_went_away_is_no_verdict(words: list[str], flags: list[str]) -> None:
    """1 would be diagnose's word for a log without a known cause."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, *flags, "-m", "powertrain", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_environment_page_is_in_step() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    assert page == facts.environment_page(), "run: powertrain env --markdown > docs/environment.md"


def test_check() -> None:
    code, output = _run("check", "rms_norm", "--dtype", "fp32", "--device", "cpu")
    assert code == 0, output
    assert "kernel store" in output and "rms_norm residual" in output and "layer_norm" not in output


def test_check_of_an_unknown_op() -> None:
    code, output = _run("check", "rms_form", "--device", "cpu")
    assert code == 2 and "no op rms_form" in output and "rms_norm" in output


@pytest.mark.parametrize("device", ["foo", "meta", "cuda:99", "cpu:1", "cpu:x", "cpu:", "cpu:00"])
def test_check_of_an_unknown_device(device: str) -> None:
    code, output = _run("check", "rms_norm", "--device", device)
    assert code == 2 and "--device must be cpu or one of the" in output and f"got {device}" in output


@pytest.mark.parametrize("words, said", [
    (("--shape", "axb"), "--shape must be sizes such as 16384x4096, got 'axb'"),
    (("--shape", "8x8x8"), "--shape must have 2 sizes for rms_norm, got 8x8x8"),
    (("--seconds", "nan"), "--seconds must be a number above 0"),
])  # fmt: skip
def test_tune_refuses_options_that_cannot_be(words: tuple[str, ...], said: str) -> None:
    code, output = _run("tune", "rms_norm", *words)
    assert code == 2 and said in output, output


@pytest.mark.parametrize("option, value", [
    ("stall", "nan"), ("stall", "-5"), ("stall", "0"), ("stall", "inf"),
    ("memory", "0"), ("memory", "0.1K"), ("memory", "nan"), ("memory", "9" * 400 + "T"),
])  # fmt: skip
def test_build_refuses_limits_that_cannot_be(option: str, value: str) -> None:
    code, output = _run("build", "--plan", f"--{option}", value, "--", "make")
    assert code == 2 and f"--{option} must be a " in output, output


@pytest.mark.parametrize("how", ["wrong", "nan", "raises"])
def test_check_fails_when_an_op_does(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = cases("layer_norm")[0]

    def run(**tensors: torch.Tensor) -> torch.Tensor:
        if how == "raises":
            raise RuntimeError("no kernel today")
        return real.run(**tensors) * (1.1 if how == "wrong" else float("nan"))

    broken = Case("layer_norm", "", run, real.reference, real.plain, real.inputs, real.tiny, real.full)
    monkeypatch.setattr("powertrain.ops.cases.cases", lambda: [broken])
    code, output = _run("check", "--device", "cpu")
    assert code == 1 and "1 of 1 calls" in output
    assert how != "raises" or "no kernel today" in output


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_check_shapes_suit_every_op(case: Case) -> None:
    shape = check.shape_for(case, torch.device("cpu"))
    assert len(shape) == len(case.full) and all(shape)
    case.run(**case.inputs(shape, torch.bfloat16, torch.device("cpu")))


def test_ctrl_c_during_an_import_ends_the_process(tmp_path: Path) -> None:
    """Modules that are imported catch KeyboardInterrupt, and the command would go on."""
    (tmp_path / "catches.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    code = "import signal, powertrain.__main__ as m; signal.signal(signal.SIGINT, m.interrupt)\n"
    for rest, expected in (
        ("import catches; print('went on')", -signal.SIGINT),
        ("try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    raise SystemExit(7)", 7),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code + rest], capture_output=True, text=True, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (expected, "", "")
    half = tmp_path / ".result.partial"
    (half / "folder").mkdir(parents=True)
    rest = f"from powertrain.runtime import atomic_file; atomic_file.unfinished.add({str(half)!r})\nimport catches"
    subprocess.run([sys.executable, "-c", code + rest], cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{ROOT}:."})
    assert not half.exists()


@pytest.mark.parametrize(
    "words, says",
    [
        ("generate run --top-k -1", "'--top-k': must be greater than or equal to 0, got '-1'"),
        ("convert a b --to hf --vocab-size many", "'--vocab-size': must be a valid integer, unable to parse"),
        ("convert a b --to hf --vocab-size many", ", got 'many'"),
        ("convert a b --to nothing", "'--to': 'nothing' is not one of 'powertrain', 'hf', 'neox', 'peft'"),
    ],
)
def test_a_wrong_option_is_said_with_its_value(words: str, says: str) -> None:
    code, output = _run(*words.split())
    assert code == 2 and says in output and "Value error" not in output


def test_names_that_no_file_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole text where a file is wanted, a link in a circle, a link to nothing: one line, no traceback."""
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("gone").symlink_to("nowhere.yml")
    long = "ncclInternalError: " * 300
    for words in (["diagnose", long], ["lint", long], ["report", long], ["init", f"{long}.yml"], ["verify", long]):
        said = CliRunner().invoke(app, words)
        assert (said.exit_code, len(said.stderr.splitlines())) == (2, 1) and "File name too long" in said.stderr
        assert len(said.stderr) < 200
    for words in (["lint", "gone"], ["report", "gone"]):
        said = CliRunner().invoke(app, words)
        assert (said.exit_code, said.stderr) == (2, "gone: a link to nowhere.yml, which is not there\n")
    assert CliRunner().invoke(app, ["report", "loop"]).stderr == "loop: a link to loop, which is not there\n"
    for output in (".", "", "/"):
        said = CliRunner().invoke(app, ["preprocess", "gone", "--output", output, "--tokenizer", "bytes"])
        assert said.exit_code == 2 and "must be a prefix of names, such as data/corpus" in said.stderr


@pytest.mark.parametrize(
    "words", [["preprocess", "", "--output", "x"], ["convert", "a", "", "--to", "hf"], ["train", ""]]
)
def test_an_empty_argument_is_no_folder(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`preprocess "$DATA"` read the whole working folder where DATA was not set."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("words")
    code, output = _run(*words)
    assert code == 2 and "must not be empty" in output and "variable of the shell" in output
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_empty_words_of_options_and_of_other_programs_are_kept() -> None:
    assert "must not be empty" not in _run("generate", "no-such-run", "--prompt", "")[1]
    assert "must not be empty" not in _run("shim", "no-such-library", "--", "python", "")[1]


@pytest.mark.parametrize("words, usage", [
    (("build", "make", "-j4"), "build -- COMMAND"), (("shim", "apex", "python", "-c", "pass"), "shim NAMES -- COMMAND"),
])  # fmt: skip
def test_forgotten_dashes_are_named(words: tuple[str, ...], usage: str) -> None:
    code, output = _run(*words)
    assert code == 2 and "No such option: -" in output and f"powertrain {usage}" in output


@pytest.mark.parametrize("words, usage", [
    (("build", "pip", "install", "--force", "x"), "build -- COMMAND"),
    (("build", "pip", "install", "--offline", "x", "--", "y"), "build -- COMMAND"),
    (("shim", "--force", "apex", "no-such-program", "--force"), "shim NAMES -- COMMAND"),
])  # fmt: skip
def test_an_option_of_either_command_without_dashes_is_refused(words: tuple[str, ...], usage: str) -> None:
    """It was taken as ours, and the other program ran without it."""
    code, output = _run(*words)
    assert code == 2 and "may be meant for either" in output and f"powertrain {usage}" in output


def test_our_options_stand_before_the_other_command() -> None:
    for words in (("shim", "--force", "apex", "no-such-program"), ("shim", "apex", "--force", "no-such-program")):
        assert "command must begin with a program" in _run(*words)[1]
    assert "command must begin with a program" in _run("shim", "apex", "--", "no-such-program", "--force")[1]


def test_a_folder_that_was_removed_below_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch ends a process there: `Intel oneMKL FATAL ERROR`."""
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    code, output = _run("target", "H100")
    assert code == 2 and "the current folder must be there, got one that was removed" in output


def test_outputs_that_have_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("words")
    for output in (".", ".."):
        code, said = _run("preprocess", "text.txt", "--tokenizer", "bytes", "--output", output)
        assert code == 2 and "must be a prefix of names" in said
    code, said = _run("init", ".")
    assert code == 2 and "must end in .yml or .yaml" in said
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
