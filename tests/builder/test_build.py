"""Whole builds with compilers made up here: what they eat, how they hang, and what is left of them."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from powertrain.builder.history import History, Record, UnitRecord
from powertrain.builder.launcher_connection import LauncherConnection
from powertrain.builder.memory_scheduler import CompileJob
from powertrain.builder.plan import make_plan
from powertrain.builder.recipes import GENERIC
from powertrain.builder.run import Builder
from powertrain.builder.view import PlainView
from tests.builder.test_plan import MACHINE

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 60  # seconds for anything here that should take two

# gcc -c NAME.c: NAME says what to do
COMPILER = f"""#!{sys.executable} -IS
import os, signal, sys, time
name = sys.argv[-1]
words = name.removesuffix(".c").split("_")
if words[0] == "thrift":  # eats a fifth of that if it is told to collect its garbage early
    words = ["eat", int(words[1]) // 5 if "--param" in sys.argv else words[1], words[2]]
if words[0] == "eat":  # eat_MIB_SECONDS: grow to that size in that time, then stay a moment
    held, mib, seconds = [], int(words[1]), float(words[2])
    for _ in range(20):
        held.append(b"x" * (mib * 2**20 // 20))
        time.sleep(seconds / 20)
    time.sleep(0.3)
elif words[0] == "hang":
    time.sleep(1000)
elif words[0] == "killed" and not os.path.exists("once"):  # as the kernel does when memory is out
    open("once", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
elif words[0] == "calls":  # as nvcc calls gcc: by its name, and waits for it
    os.spawnvp(os.P_WAIT, "gcc", ["gcc", "-c", "called.c"])
elif words[0] == "missing":
    print(name + ":1:10: fatal error: cudnn.h: No such file or directory")
    sys.exit(3)
open(name + ".o", "w").close()
"""


@dataclass
class Box:
    """A folder with a compiler, and the builds run in it."""

    folder: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def history(self) -> History:
        return History(self.folder / "data/powertrain/builds/history.sqlite")

    def start(self, script: str, *options: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "XDG_DATA_HOME": str(self.folder / "data"),
            "COLUMNS": "200",
        }
        command = [sys.executable, "-m", "powertrain", "build", *options, "--", "sh", "-c", script]
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.running.append(process)
        return process

    def run(self, script: str, *options: str) -> tuple[int, str]:
        process = self.start(script, *options)
        output, _ = process.communicate(timeout=DEADLINE)
        return process.returncode, output

    def made(self) -> set[str]:
        return {file.name.removesuffix(".c.o") for file in self.folder.glob("*.o")}

    def processes(self) -> list[psutil.Process]:
        """Those that work in this folder, whoever started them; not the builders."""
        builders = {process.pid for process in self.running}
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid not in builders and process.status() != psutil.STATUS_ZOMBIE:
                    found += [process] if process.cwd() == str(self.folder) else []
            except psutil.Error:
                continue
        return found


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    compiler = tmp_path / "bin/gcc"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    box = Box(tmp_path)
    yield box
    for process in box.running:
        if process.poll() is None:
            process.kill()
        process.communicate()
    until(lambda: not box.processes(), "nothing works in the folder")


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"not reached: {what}"
        time.sleep(0.05)


def together(*names: str) -> str:
    return f"{' & '.join(f'gcc -c {name}.c' for name in names)} & wait"


def remember(box: Box, script: str, **peaks: int) -> None:
    """Let the builder believe that these units took so many MiB before."""
    command = f"sh -c '{script}' (in {box.folder})"
    record = Record(time.time(), GENERIC.name, command, "", 2, 2.0, 2.0, 2**20, 0, "")
    box.history.add(record, [UnitRecord(f"{name}.c", 1.0, mib * 2**20) for name, mib in peaks.items()])


def test_compilers_wait_for_room(box: Box) -> None:
    names = ["eat_120_0.2", "eat_121_0.2", "eat_122_0.2"]
    code, output = box.run(together(*names), "--memory", "300M")
    assert (code, box.made()) == (0, set(names)), output
    assert "paused" not in output  # 2 GiB were expected of each, so each ran alone
    (record,) = box.history.last()
    assert record.code == 0 and 100 << 20 < record.peak < 300 << 20
    assert {f"{name}.c" for name in names} == set(box.history.units(record.recipe, record.command))


def test_one_that_outgrew_all_memory_runs_again_in_less(box: Box) -> None:
    code, output = box.run("gcc -c thrift_250_1.c", "--memory", "200M")
    assert (code, box.made()) == (0, {"thrift_250_1"}), output
    assert "killed thrift_250_1.c" in output and "collects its garbage early" in output and "1 run again" in output
    assert "even one job" not in output


def test_what_was_seen_not_to_fit_begins_in_less(box: Box) -> None:
    script = "gcc -c thrift_250_1.c"
    remember(box, script, thrift_250_1=250)
    code, output = box.run(script, "--memory", "200M")
    assert code == 0 and "collects its garbage early" in output and "killed" not in output and "again" not in output


def test_what_waits_is_expected_to_take_what_the_others_took(tmp_path: Path) -> None:
    plan = make_plan(["true"], {}, MACHINE)
    builder = Builder(plan, {}, folder=tmp_path, view=PlainView(Console(quiet=True)), known={})

    def wanting(name: str) -> LauncherConnection:
        launcher = LauncherConnection(ours, unit=CompileJob(name, builder._expected(name)))
        builder.launchers.append(launcher)
        return launcher

    ours, theirs = socket.socketpair()
    with ours, theirs, builder.selector:
        done, waiting = [wanting(f"{name}.cpp") for name in "abc"], wanting("d.cpp")
        other = wanting("e.cu")
        for launcher in done:
            assert waiting.unit and waiting.unit.expected == GENERIC.bytes
            launcher.unit.state = "running"  # type: ignore[union-attr]
            builder._on_ended(launcher, 0, 100 << 20)
        assert waiting.unit and waiting.unit.expected == int(1.2 * (100 << 20))
        assert other.unit and other.unit.expected == GENERIC.bytes  # another language


def test_the_less_memory_is_left_the_oftener_it_is_looked_at(tmp_path: Path) -> None:
    builder = Builder(make_plan(["true"], {}, MACHINE), {}, folder=tmp_path, view=PlainView(Console()), known={})
    builder.pace.pause = 2.0
    assert builder._pause() == 2.0  # nothing grows
    builder.unmanaged = {number: CompileJob("x", 0, number, "running") for number in range(4)}
    kept = 1 << 30  # the reserve of 64 GiB
    pauses = []
    for left in (8 << 30, 1 << 30, -1):
        builder.available = kept + left
        pauses.append(builder._pause())
    builder.selector.close()
    assert pauses == [2.0, 1.0, 0.1]  # four may grow by 1 GiB a second together


def test_a_pip_inside_another_command_talks_too(box: Box) -> None:
    box.run('echo "[$PIP_VERBOSE]" > told')
    assert (box.folder / "told").read_text() == "[1]\n"


def test_too_many_at_once_are_paused_then_killed_and_run_again(box: Box) -> None:
    names = ["eat_180_1.5", "eat_181_1.5"]
    script = together(*names)
    remember(box, script, **dict.fromkeys(names, 1))
    code, output = box.run(script, "--memory", "300M")
    assert (code, box.made()) == (0, set(names)), output
    assert "paused eat_18" in output and "killed eat_18" in output and "1 run again" in output


def test_one_that_does_not_fit_is_named(box: Box) -> None:
    code, output = box.run("gcc -c eat_150_1.c", "--memory", "120M")
    assert code == 0
    assert "even one job does not fit: eat_150_1.c has" in output and "--memory" in output


def test_one_killed_for_memory_runs_again(box: Box) -> None:
    code, output = box.run("gcc -c killed.c")
    assert (code, box.made()) == (0, {"killed"}), output
    assert "killed.c was killed" in output and "runs again" in output


def test_a_compiler_that_a_compiler_calls_does_not_wait_for_it(box: Box) -> None:
    nvcc = box.folder / "toolkit/nvcc"  # called by its path: no launcher knows it
    nvcc.parent.mkdir()
    shutil.copy(box.folder / "bin/gcc", nvcc)
    code, output = box.run("gcc -c calls.c && rm called.c.o && toolkit/nvcc -c calls.c", "--memory", "300M")
    assert (code, box.made()) == (0, {"calls", "called"}), output


def test_the_exit_code_stays_and_the_first_error_is_explained(box: Box) -> None:
    code, output = box.run("gcc -c missing.c || exit 3")
    assert code == 3
    assert "a header is missing: missing.c:1:10: fatal error: cudnn.h" in output
    assert box.history.last()[0].code == 3


def test_a_lock_that_nobody_owns_is_named_and_renamed(box: Box) -> None:
    lock = box.folder / "build/lock"
    lock.parent.mkdir()
    lock.touch()
    loop = "import os, time\nwhile os.path.exists('build/lock'): time.sleep(0.1)"  # as torch's FileBaton waits
    code, output = box.run(f'{sys.executable} -IS -c "{loop}"', "--stall", "1", "--fix")
    assert code == 0 and not lock.exists()
    (aside,) = lock.parent.iterdir()
    assert f"waits for {lock}" in output and "no process owns" in output
    assert f"renamed {lock} to {aside}" in output


def test_a_stopped_process_is_named(box: Box) -> None:
    build = box.start("echo $$ > pid; kill -STOP $$; exit 7", "--stall", "1")
    assert build.stdout
    said = next(line for line in build.stdout if "stopped by a signal" in line)
    pid = int((box.folder / "pid").read_text())
    assert f"kill -CONT {pid}" in said
    os.kill(pid, signal.SIGCONT)
    assert build.wait(DEADLINE) == 7


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []  # it ended meanwhile


def hanging(box: Box) -> subprocess.Popen[str]:
    """A build whose two compilers hang, one of them paused."""
    script = together("hang_1", "hang_2")
    remember(box, script, hang_1=1, hang_2=1)
    build = box.start(script)

    def compilers() -> list[psutil.Process]:
        lines = {process: words(process) for process in box.processes()}
        ends = [f"{box.folder}/bin/gcc", "-c"]
        return [process for process, line in lines.items() if line[-3:-1] == ends and "-IS" in line[:2]]

    # two launchers and, below them, two compilers
    until(lambda: len(compilers()) >= 4, "both compile")
    newest = max(compilers(), key=lambda process: process.create_time())
    newest.send_signal(signal.SIGSTOP)
    return build


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_build_that_is_ended_leaves_nothing(box: Box, number: int, code: int) -> None:
    build = hanging(box)
    build.send_signal(number)
    build.communicate(timeout=DEADLINE)
    assert build.returncode == code
    assert not box.processes()


@pytest.mark.parametrize("watchdog_too", [False, True])
def test_a_killed_builder_leaves_nothing_paused(box: Box, watchdog_too: bool) -> None:
    build = hanging(box)
    if watchdog_too:  # the launchers see it for themselves
        (watchdog,) = (each for each in psutil.Process(build.pid).children() if "watchdog.py" in each.cmdline()[-1])
        watchdog.kill()
    build.kill()
    build.wait(DEADLINE)
    until(lambda: not box.processes(), "everything that the build started has ended")


def test_what_cannot_work_is_not_begun_unless_forced(box: Box) -> None:
    script = "touch begun; : flash-attn"
    code, output = box.run(script, "--arch", "7.5")
    assert code == 2 and "flash-attn has no code for sm_75" in output and "releases" in output
    assert not (box.folder / "begun").exists() and box.history.last() == []
    code, output = box.run(script, "--arch", "7.5", "--force")
    assert code == 0 and (box.folder / "begun").exists()


def test_a_plan_begins_nothing(box: Box) -> None:
    code, output = box.run("touch begun", "--plan", "--explain", "--arch", "9.0", "--arch", "8.0")
    assert code == 0 and not (box.folder / "begun").exists()
    assert "8.0 9.0" in output and "+PTX" in output


@pytest.mark.parametrize(
    "words, says",
    [
        (["--memory", "lots", "--", "true"], "24G"),
        (["--arch", "1.0", "--", "true"], "--arch"),
        (["--", "/no/such/program"], "/no/such/program"),
    ],
)
def test_what_cannot_start(words: list[str], says: str, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "powertrain", "build", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_earlier_builds_are_listed(box: Box) -> None:
    box.run("true")
    environment = {**os.environ, "XDG_DATA_HOME": str(box.folder / "data"), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "powertrain", "build", "history"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0 and "sh -c true" in done.stdout


def test_no_pipe_stays_open(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "powertrain", "build", "--offline", "--force", "--", "true"]
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
