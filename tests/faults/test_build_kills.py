"""Builds that are killed, paused, left and starved: nothing outlives them, nothing of ours keeps them from running."""

import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from powertrain.builder import build_files, processes, stall, watchdog
from powertrain.builder.ending import LONGEST_LINE
from powertrain.builder.history import History
from powertrain.builder.plan import make_plan
from powertrain.builder.progress import Progress
from powertrain.builder.recipes import GENERIC
from powertrain.builder.run import Builder
from powertrain.builder.view import PlainView
from tests.builder.test_build import DEADLINE, ROOT, Box, box, together, until  # noqa: F401
from tests.builder.test_plan import MACHINE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux processes")

# children that leave: their session, their environment, their parent; and one that is paused
_LEAVERS = {
    "setsid": "setsid sleep 600",
    "setsid, no environment": "env -i setsid sleep 600",
    "daemon": "env -i setsid sh -c 'env -i setsid sleep 600 & exit'",
    "paused": "sleep 600 & kill -STOP $!",
    "paused, setsid": "setsid sh -c 'kill -STOP $$; sleep 600'",
    "ignores signals": "trap '' TERM INT HUP; sleep 600",
}
_ENDS = ("end", "failure", "SIGTERM", "SIGINT", "SIGKILL")
_ALL = [(who, how) for who in _LEAVERS for how in _ENDS]
_SOME = [
    *random.Random(10).sample(_ALL, 3),
    ("setsid, no environment", "SIGKILL"),
    ("paused, setsid", "SIGKILL"),
    ("ignores signals", "end"),
]


@pytest.mark.parametrize(
    "who, how", [(*case, *()) if case in _SOME else pytest.param(*case, marks=pytest.mark.slow) for case in _ALL]
)
def test_no_child_outlives_a_build(who: str, how: str, box: Box) -> None:  # noqa: F811
    after = {"end": "touch began; sleep 0.6", "failure": "touch began; sleep 0.6; exit 3"}.get(
        how, "touch began; sleep 600"
    )
    build = box.start(f"({_LEAVERS[who]}) & sleep 0.2; {after}")
    until((box.folder / "began").exists, "the child runs")
    if how.startswith("SIG"):
        time.sleep(1.0)  # a sample of the builder's, which tells the watchdog
        build.send_signal(getattr(signal, how))
    output, _ = build.communicate(timeout=DEADLINE)
    until(lambda: not box.processes(), f"everything has ended: {box.processes()}")
    assert "Traceback" not in output, output
    assert build.returncode == {"end": 0, "failure": 3, "SIGTERM": 143, "SIGINT": 130, "SIGKILL": -9}[how]


def test_processes_of_other_users_are_left_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "600"])
    signalled, kill = [], os.kill

    def refuse(pid: int, number: int) -> None:
        signalled.append(pid)
        raise PermissionError

    monkeypatch.setattr(watchdog.os, "kill", refuse)
    found = watchdog.with_descendants([child.pid], watchdog.running())
    assert [each.pid for each in found] == [child.pid]
    assert watchdog.signal_all(found) == [] and signalled == [child.pid]
    processes.send_signal([child.pid], signal.SIGTERM)
    kill(child.pid, signal.SIGKILL)
    child.wait()


@pytest.fixture
def setuid() -> Iterator[list[str]]:
    """A command that runs another as root whoever calls it, as sudo does."""
    setpriv = shutil.which("setpriv")
    if os.getuid() != 0 or setpriv is None:
        pytest.skip("needs root and setpriv, to make a program that is setuid root")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        program = shutil.copy(setpriv, folder)
        os.chmod(program, 0o4755)
        yield [program, "--reuid=0", "--regid=0", "--clear-groups"]


def _signal_setuid_child(setuid: list[str]) -> str:
    """As nobody: root's child, an own child, those seen below, those that could be signalled."""
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    root, own = subprocess.Popen([*setuid, "sleep", "600"]), subprocess.Popen(["sleep", "600"])
    while "sleep" not in Path(f"/proc/{root.pid}/cmdline").read_text().split("\0")[0]:
        time.sleep(0.01)
    below = [each for each in watchdog.with_descendants([os.getpid()], watchdog.running()) if each.pid != os.getpid()]
    reached = [each.pid for each in watchdog.signal_all(below)]
    processes.send_signal([root.pid], signal.SIGKILL)
    own.wait()
    return f"{root.pid} {own.pid} {[each.pid for each in below]} {reached}"


def test_a_setuid_child_is_left_and_not_waited_for(setuid: list[str]) -> None:
    """The kernel's own refusal, to a process that has given its rights away. A whole build as another user needs a
    Python which that user may start; this part of it needs none."""
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(theirs, _signal_setuid_child(setuid).encode())
        finally:
            os._exit(0)  # never back into pytest
    os.close(theirs)
    with open(ours) as told:
        said = told.read()
    os.waitpid(child, 0)
    assert said
    root, own = map(int, said.split()[:2])
    try:
        assert psutil.Process(root).uids().real == 0 and psutil.Process(root).status() != psutil.STATUS_ZOMBIE
        assert sorted(map(int, re.findall(r"\d+", said.split("[")[1]))) == sorted([root, own])
        assert said.endswith(f"[{own}]")
    finally:
        os.kill(root, signal.SIGKILL)


def test_a_process_of_the_same_number_is_not_taken_for_the_builds() -> None:
    child = subprocess.Popen(["sleep", "600"], env={})
    try:
        (seen,) = watchdog.with_descendants([child.pid], watchdog.running())
        assert [each.pid for each in watchdog.of_build(0, "", {child.pid: seen.start})] == [child.pid]
        assert watchdog.of_build(0, "POWERTRAIN_BUILD=x", {child.pid: seen.start + 1}) == []
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments(count: int, box: Box) -> None:  # noqa: F811
    moment = random.Random(31)
    for _ in range(count):
        build = box.start(f"{together('hang_1', 'hang_2')} & env -i setsid sleep 600 & wait")
        time.sleep(moment.uniform(0, 2.0))
        build.kill()
        build.communicate(timeout=DEADLINE)
        until(lambda: not box.processes(), "everything has ended")
    assert box.run("gcc -c fine.c")[0] == 0


# the history


def _damaged(data: bytes, chance: random.Random) -> bytes:
    way = chance.choice(["cut", "bits", "zeros", "text", "version", "empty", "page"])
    out = bytearray(data)
    if way == "cut":
        return bytes(out[: chance.randrange(len(out))])
    if way == "bits":
        for _ in range(chance.randint(1, 60)):
            out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
    elif way == "zeros":
        at = chance.randrange(len(out))
        out[at : at + 512] = bytes(512)
    elif way == "page":
        at = chance.randrange(len(out) // 4096) * 4096
        out[at : at + 4096] = chance.randbytes(4096)
    elif way == "version":
        out[60:64] = chance.randbytes(4)
    return b"" if way == "empty" else b"no database\n" * 50 if way == "text" else bytes(out)


def _filled(file: Path) -> History:
    from powertrain.builder.history import Record, UnitRecord

    history = History(file)
    for number in range(12):
        record = Record(1e9 + number, "generic", f"make {number}", "80;90", 2, 3.0, 4.0, 1 << 30, 0, "log")
        history.add(record, [UnitRecord(f"unit{number}_{each}.cu", 2.0, 1 << 28) for each in range(20)])
    return history


@pytest.mark.parametrize("count", [80, pytest.param(1500, marks=pytest.mark.slow)])
def test_a_damaged_history_costs_nothing_but_itself(
    count: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chance, file = random.Random(11), tmp_path / "history.sqlite"
    history = _filled(file)
    whole, record = file.read_bytes(), history.last(1)[0]
    for _ in range(count):
        file.write_bytes(_damaged(whole, chance))
        history.last()
        history.estimate(GENERIC, "make 3", "80;90")
        history.add(record, [])
        after = history.last()
        assert all(isinstance(each.seconds, float | int) and time.localtime(each.started) for each in after)
        for aside in tmp_path.glob("history.sqlite*"):
            aside.unlink()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("what", ["folder", "fifo", "loop", "text"])
def test_a_plan_beside_a_history_that_is_none(what: str, tmp_path: Path) -> None:
    file = tmp_path / "powertrain/builds/history.sqlite"
    file.parent.mkdir(parents=True)
    {
        "folder": file.mkdir,
        "fifo": lambda: os.mkfifo(file),
        "loop": lambda: file.symlink_to(file),
        "text": lambda: file.write_text("x" * 5000),
    }[what]()
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "powertrain", "build", "--plan", "--", "true"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0 and "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert "build history" in done.stderr and str(file) in done.stderr


def test_a_history_that_another_build_writes_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powertrain.builder.history._WAIT", 0.05)
    history = _filled(tmp_path / "history.sqlite")
    other = sqlite3.connect(history.file)
    other.execute("begin exclusive")
    assert history.last() == []
    other.close()
    assert len(history.last()) == 12 and len(list(tmp_path.iterdir())) == 1


# what it says and where


def _builder(folder: Path, said: list[str] | None = None) -> Builder:
    view = PlainView(Console(quiet=True))
    if said is not None:
        view.say = said.append  # type: ignore[method-assign]
    return Builder(make_plan(["true"], {}, MACHINE), {}, folder=folder, view=view, known={})


def test_a_line_without_end_is_read_in_time_that_grows_as_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: bytes that are held and looked at, however long the line is."""
    builder = _builder(tmp_path)
    fed: list[int] = []
    monkeypatch.setattr(Progress, "feed", lambda self, line: fed.append(len(line)))
    read, write = os.pipe()

    class Build:
        stdout = os.fdopen(read, "rb", buffering=0)

    builder.build, builder.stillness = Build(), stall.Stillness(0.0)  # type: ignore[assignment]
    for _ in range(400):
        os.write(write, b"A" * 4096)
        builder._read_output()
        assert len(builder.text) <= LONGEST_LINE
    os.write(write, b"\nnext\n")
    builder._read_output()
    assert fed == [LONGEST_LINE, 4]
    os.close(write)
    Build.stdout.close()
    builder.selector.close()


@pytest.mark.parametrize(
    "line", ["filename=" + "a" * 2000, "[" * 2048, "[1" * 1000, "1" * 2048, " " * 2048, "/" * 2048]
)
def test_no_line_keeps_the_progress_busy(line: str) -> None:
    start = time.process_time()
    for _ in range(20):
        Progress().feed(line)
    assert time.process_time() - start < 1.0


def test_a_line_of_a_megabyte_and_a_full_disk(box: Box) -> None:  # noqa: F811
    """`ulimit -f`: files of more than 64 KiB cannot be written, as on a full disk."""
    environment = {**os.environ, "XDG_DATA_HOME": str(box.folder / "data"), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    script = f'{sys.executable} -c "print(chr(65) * (1 << 20), end=str())"; gcc -c missing.c; exit 3'
    inner = [sys.executable, "-m", "powertrain", "build", "--", "sh", "-c", script]
    environment["PATH"] = f"{box.folder}/bin:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 64; exec "$@"', "bash", *inner],
        cwd=box.folder, env=environment, capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    assert done.returncode == 3 and "Traceback" not in done.stderr + done.stdout, done.stderr
    assert "goes on without its log" in done.stdout


@pytest.mark.parametrize("taken", ["foreign", "file", "link", "open"])
def test_a_sockets_folder_that_is_not_ours(taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = 987_654 + os.getpid()
    usual = Path(f"/tmp/powertrain-build-{number}")
    said: list[str] = []
    try:
        if taken == "file":
            usual.touch()
        elif taken == "link":
            usual.symlink_to(tmp_path)
        else:
            usual.mkdir()
            usual.chmod(0o777 if taken == "open" else 0o700)
        monkeypatch.setattr(build_files.os, "getuid", lambda: number if taken != "open" else usual.lstat().st_uid)
        if taken == "open":
            monkeypatch.setattr(build_files, "Path", lambda *parts: usual if parts[0] == "/tmp" else Path(*parts))
        builder = _builder(tmp_path / "data", said)
        builder.selector.close()
        assert builder.files.sockets != usual and builder.files.sockets.lstat().st_mode & 0o777 == 0o700
        assert len(said) == 1 and str(usual) in said[0]
        shutil.rmtree(builder.files.sockets)
    finally:
        usual.unlink() if usual.is_symlink() or usual.is_file() else shutil.rmtree(usual)


def test_an_unwritable_home(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").touch()
    builder = _builder(tmp_path / "file" / "builds", said)
    builder.selector.close()
    assert len(said) == 1 and "cannot be written" in said[0] and builder.shims.bin.is_dir()
    shutil.rmtree(builder.files.folder)


@pytest.mark.parametrize(
    "name", [b"b\xffad.c", b"new\nline.c", b"two  words.c", "é€😀.c".encode(), b"x" * 240 + b".c", b"-\x01 want.c"]
)
def test_odd_names_of_sources(name: bytes, box: Box) -> None:  # noqa: F811
    script = box.folder / "build.sh"
    script.write_bytes(b"exec gcc -c './" + name + b"'\n")
    code, output = box.run(f"sh {script}")
    assert code == 0 and "Traceback" not in output, output
    assert os.path.exists(os.path.join(os.fsencode(box.folder), name + b".o"))
    assert len(box.history.units("generic", None) or box.history.last()) == 1


def test_odd_names_of_folders(box: Box) -> None:  # noqa: F811
    folder = os.path.join(os.fsencode(box.folder), b"a \xff\n b")
    os.mkdir(folder)
    environment = {**os.environ, "XDG_DATA_HOME": str(box.folder / "data"), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "powertrain", "build", "--", "sh", "-c", b": \xff"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=DEADLINE)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    (record,) = box.history.last()
    assert "?" in record.command and psutil.pid_exists(os.getpid())
