"""`powertrain doctor` and `powertrain diagnose` as commands."""

import bz2
import codecs
import gzip
import json
import lzma
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from powertrain.cli import app, diagnose, doctor
from powertrain.doctor import checks
from powertrain.doctor.finding import Check, Finding
from powertrain.runtime.machine import Ran
from tests.doctor.machines import machine, told


def _run(*args: str, input: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": "200"}, input=input)
    return result.exit_code, result.output


@pytest.mark.parametrize("pack, program", [(gzip.compress, "gzip"), (bz2.compress, "bzip2"), (lzma.compress, "xz")])
def test_a_compressed_log_is_named(pack: Callable[[bytes], bytes], program: str, tmp_path: Path) -> None:
    """As logrotate leaves it; it was a log in which no line reads as an error."""
    (tmp_path / "log").write_bytes(pack(b"RuntimeError: CUDA error: out of memory"))
    code, said = _run("diagnose", f"{tmp_path}/log")
    told = " ".join(said.replace("│", "").split())
    assert code == 2 and f"got data of {program}: {program} -dc {tmp_path}/log | powertrain diagnose -" in told


def test_a_compressed_log_from_a_pipe_is_named() -> None:
    packed = gzip.compress(b"RuntimeError: CUDA error: out of memory")
    result = CliRunner().invoke(app, ["diagnose"], env={"COLUMNS": "200"}, input=packed)
    assert result.exit_code == 2 and "got data of gzip: gzip -dc | powertrain diagnose -" in result.output


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []

    def apply() -> str:
        done.append("renamed")
        return "/x/lock: renamed to lock.stale"

    made = (
        Check("good", "?", lambda machine: [Finding("ok", "all fine")]),
        Check("odd", "?", lambda machine: [Finding("warning", "it is slow", ("4 of 5 [bold]",), "go faster")]),
        Check("bad", "?", lambda machine: [Finding("problem", "it is broken", ("see here",), "mv a b", apply)]),
    )
    monkeypatch.setattr(checks, "CHECKS", made)
    monkeypatch.setattr(doctor, "_contributed", list)
    return done


def test_every_finding_is_shown(faked: list[str]) -> None:
    code, said = _run("doctor")
    assert code == 1 and not faked
    for words in ("all fine", "it is slow", "4 of 5 [bold]", "fix: go faster", "see here", "fix: mv a b"):
        assert words in said
    assert "1 problem, 1 warning" in said and "doctor --fix applies the safe fixes" in said


def test_fix_applies_what_is_safe(faked: list[str]) -> None:
    code, said = _run("doctor", "--fix")
    assert code == 1 and faked == ["renamed"] and "done: /x/lock: renamed to lock.stale" in said


def test_exit_codes(faked: list[str]) -> None:
    assert _run("doctor", "--only", "good")[0] == 0
    code, said = _run("doctor", "--skip", "bad")
    assert code == 0 and "1 warning" in said
    code, said = _run("doctor", "--skip", "bad", "--json")
    assert code == 0 and json.loads(said)["worst"] == "warning"
    assert _run("doctor")[0] == 1


def test_json(faked: list[str]) -> None:
    code, said = _run("doctor", "--json", "--fix")
    found = json.loads(said)
    assert code == 1 and found["worst"] == "problem"
    assert [finding["level"] for finding in found["findings"]] == ["ok", "warning", "problem"]
    assert found["findings"][2]["fixable"] and found["fixed"] == [
        {"check": "bad", "did": "/x/lock: renamed to lock.stale"}
    ]


@pytest.mark.parametrize(
    "args, words",
    [
        (("doctor", "--only", "gpu"), "unknown check 'gpu'; known: gpus, driver"),
        (("doctor", "--hostfile", "/no/such/file"), "no such file"),
        (("doctor", "--hostfile", "/dev/null", "--overlap"), "choose one of"),
        (("doctor", "--kernels", "--json"), "--kernels takes no other option"),
    ],
)
def test_mistakes_are_named(args: tuple[str, ...], words: str) -> None:
    code, said = _run(*args)
    assert code == 2 and words in " ".join(said.replace("│", " ").split())


@pytest.mark.parametrize(
    "ran, level, words",
    [
        (Ran(0, "└──┘every backend that takes this errs no more than allowed, on the CPU\n"), "ok", "on the CPU"),
        (Ran(1, "│ cpu │ reference │ WRONG │\n│ cpu │ cpu │ PASS │\n1 backends err\n"), "problem", "reference │ WRONG"),
        (Ran(1, "ImportError: libtorch.so\n"), "problem", "ImportError: libtorch.so"),
        (Ran(124, ""), "problem", "ended after 300 s"),
    ],
)
def test_the_attention_check(tmp_path: Path, ran: Ran, level: str, words: str) -> None:
    (check,) = doctor._contributed()
    (finding,) = check.run(machine(tmp_path, answers={"doctor --kernels": ran}))
    assert finding.level == level and words in told([finding]) and "└" not in finding.message


def test_every_check_has_a_name_of_its_own() -> None:
    names = [check.name for check in checks.CHECKS]
    assert len(set(names)) == len(names) and all(check.question.endswith("?") for check in checks.CHECKS)


def test_the_page_lists_every_check() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "doctor.md").read_text()
    assert not [check.name for check in [*checks.CHECKS, *doctor._contributed()] if f"`{check.name}`" not in page]


def test_overlap_tries_ranks_of_this_machine() -> None:
    """Two over gloo where there is no GPU: right products, and why it is not symmetric memory."""
    code, said = _run("doctor", "--overlap", "--only", "overlap-powertrain")
    assert code == 0, said
    assert "products are right over" in said and "symmetric" in said


OUT_OF_MEMORY = "\x1b[31mtorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB\x1b[0m\r\n"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_logs_as_windows_writes_them(encoding: str, tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    file.write_bytes(mark + OUT_OF_MEMORY.encode(encoding))
    code, said = _run("diagnose", str(file))
    assert code == 0 and "line 1: torch.OutOfMemoryError: CUDA out of memory" in said, said


def test_a_pipe_with_a_name_and_no_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`powertrain diagnose <(command)`; and a process whose stdin was closed."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(OUT_OF_MEMORY,))
    writer.start()
    assert "cuda-out-of-memory" in _run("diagnose", str(pipe))[1]
    writer.join()
    monkeypatch.setattr(diagnose, "sys", SimpleNamespace(stdin=None))
    code, said = _run("diagnose")
    assert code == 2 and "must be a file where stdin is closed" in said


def test_a_terminal_of_no_width(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["target"], env={"COLUMNS": "0"})
    assert result.exit_code == 0 and "RTX 2060" in result.output
