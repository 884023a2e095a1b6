"""Runs one build: shows its progress, schedules its compilers by memory, explains stalls, ends every process."""

import ctypes
import os
import resource
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

import psutil

from powertrain.builder import stall, watchdog
from powertrain.builder.ending import LONGEST_LINE, Failure, first_error, lines_of
from powertrain.builder.history import UnitRecord
from powertrain.builder.memory_scheduler import Act, CompileJob, decide, reserve
from powertrain.builder.plan import Plan
from powertrain.builder.processes import (
    Pace,
    Process,
    below,
    called_by_compiler,
    oom_kills,
    own_memory,
    tree,
    unmanaged_compilers,
)
from powertrain.builder.progress import Progress, is_pip, verbose
from powertrain.builder.shims import make_shims, shimmed
from powertrain.builder.terminal import Terminal
from powertrain.runtime.jobs import available_memory

_PR_SET_CHILD_SUBREAPER = 36
# bytes a second by which a compiler may grow: cicc on flash-attention was seen to grow by half of that
_GROWTH = 256 * 2**20
# seconds between memory samples when memory is nearly exhausted
_HURRY = 0.1
# seconds between full samples then: only they see new processes, and one costs 3.3 ms for 15 processes of 157
_SEEN = 0.5
_GRACE = 5.0  # seconds from SIGTERM to SIGKILL
# finished units of a language after which their sizes replace the recipe's
_LEARN = 3
_MARGIN = 1.2  # over the largest measured unit
_REAP = 10  # seconds between checks for ended orphans
_RETRIES = 3
# the variable by which the watchdog knows a build's processes
_MARK = "POWERTRAIN_BUILD"
_LEAST = 32 * 2**20  # lower bound of a compiler's expected bytes


@dataclass
class Status:
    """State of a build for a view. Sizes in bytes, times in seconds."""

    phase: str
    done: int
    total: int
    elapsed: float
    eta: float | None
    used: int
    memory: int
    units: list[CompileJob]
    now: float


class View(Protocol):
    def say(self, text: str) -> None: ...
    def show(self, status: Status) -> None: ...


@dataclass
class Outcome:
    """Outcome of a build. Sizes in bytes, times in seconds."""

    code: int  # the command's exit code; 128 + the signal that ended it
    seconds: float
    cpu: float  # of the build
    overhead: float  # CPU of the builder itself
    peak: int
    log: Path
    units: list[UnitRecord]
    wheels: list[str]
    failure: Failure | None
    paused: int  # how often a compiler was paused
    rerun: int  # how often one was killed and run again


@dataclass(eq=False)
class _Launcher:
    """A connection from a launcher.py, with the compiler that it runs or wants to run."""

    connection: socket.socket
    text: bytes = b""
    unit: CompileJob | None = None
    kills: int = 0  # out-of-memory kills since boot when the compiler started


class Builder:
    """One build under `plan`. Memory is measured over all descendants of this process.

    environment    environment of the command, the plan's variables added
    folder         where shims and logs are kept
    view           receives events
    known          figures of units in earlier builds
    stall_seconds  without progress before the cause is searched
    fix            rename a lock without an owner
    keyboard       where a user answers prompts of the build (builder/terminal.py); None: a question fails at once
    """

    def __init__(
        self,
        plan: Plan,
        environment: Mapping[str, str],
        *,
        folder: Path,
        view: View,
        known: Mapping[str, UnitRecord],
        stall_seconds: float = 180,
        fix: bool = False,
        keyboard: int | None = None,
    ) -> None:
        self.plan, self.view, self.known = plan, view, known
        self.stall_seconds, self.fix = stall_seconds, fix
        self.temporary: list[Path] = []  # folders of this build alone
        self.folder = folder = self._writable(folder)
        self.log = folder / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        self.sockets = self._sockets()
        self.shims = make_shims(folder / "shims", self.sockets, environment, plan.host.nvcc)
        self.mark = f"{_MARK}={uuid.uuid4().hex}"
        self.terminal = None if keyboard is None else Terminal(keyboard)
        defaults = {"PYTHONUNBUFFERED": "1"}
        if not is_pip(plan.command):
            defaults["PIP_VERBOSE"] = "1"  # for one that the command calls in turn
        if not self.terminal:
            defaults["GIT_TERMINAL_PROMPT"] = "0"
        self.environment = {**defaults, **environment, **plan.environment, _MARK: self.mark.partition("=")[2]}
        self.environment |= shimmed(self.environment, self.shims, plan.host.nvcc)
        self.selector = selectors.DefaultSelector()
        self.progress, self.pace = Progress(), Pace()
        self.launchers: list[_Launcher] = []
        self.unmanaged: dict[int, CompileJob] = {}
        self.processes: dict[int, Process] = {}
        self.finished: list[UnitRecord] = []
        self.timed: list[float] = []  # seconds of those that the builder counts
        self.peaks: dict[str, list[int]] = {}  # of finished units, by suffix
        self.used = self.peak = self.paused = self.rerun = 0
        self.available = self.available_without_build = plan.host.memory
        self.reaped = self.memory_sampled = 0.0
        self.fresh = False  # no action was taken since the last sample
        self.signals: list[int] = []
        self.asked_to_end = 0.0
        self.stall_reported = 0.0
        self.text = b""
        self.ended_output = False
        self.file: IO[bytes] | None = None
        self.watched: set[int] = set()  # processes reported to the watchdog
        self.other_users: set[int] = set()  # processes of other users that were reported

    def _writable(self, folder: Path) -> Path:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"x" * 4096)
            return folder
        except OSError as error:
            directory = self._temporary(None)
            self.view.say(f"{folder} cannot be written ({error.strerror}): log and shims are in {directory}")
            return directory

    def _sockets(self) -> Path:
        """Folder of the socket for launchers: constant, so that a build folder which remembers them works; a new one
        where that belongs to another user."""
        usual = Path("/tmp", f"powertrain-build-{os.getuid()}")
        try:
            usual.mkdir(mode=0o700, exist_ok=True)
            facts = usual.lstat()
            if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & stat.S_IWOTH:
                return usual
        except OSError:
            pass
        directory = self._temporary("/tmp" if os.access("/tmp", os.W_OK) else None)
        self.view.say(f"{usual} is not this user's folder: {directory} is used instead")
        return directory

    def _temporary(self, parent: str | None) -> Path:
        directory = Path(tempfile.mkdtemp(prefix="powertrain-build-", dir=parent))
        self.temporary.append(directory)
        return directory

    def run(self) -> Outcome:
        """Run the command to its end. SIGINT and SIGTERM end it and everything it started."""
        self.started, self.cpu_before = time.time(), time.process_time()
        before = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
        handlers = {number: signal.signal(number, self._on_signal) for number in _ENDING}
        try:
            self._open_log()
            self._start()
            self.stillness = stall.Stillness(time.time())
            while not self._over():
                self._step()
        finally:
            self._finish()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self._outcome(_spent(resource.RUSAGE_CHILDREN, before[0]), _spent(resource.RUSAGE_SELF, before[1]))

    def _open_log(self) -> None:
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.log.open("wb", buffering=0)
        except OSError as error:
            self._stop_log(error)

    def _write_log(self, part: bytes) -> None:
        """Write to the log; a full disk ends the log, not the build."""
        if not self.file:
            return
        try:
            while part:
                part = part[self.file.write(part) :]
        except OSError as error:
            self._stop_log(error)

    def _stop_log(self, error: OSError) -> None:
        if self.file:
            self.file.close()
        self.file = None
        self.view.say(f"{self.log} cannot be written ({error.strerror}): the build goes on without its log")

    def _start(self) -> None:
        # orphans become our children, so that the process tree stays complete
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # sockets of builders that were killed
        for left in self.sockets.iterdir():
            if left.name.isdecimal() and not psutil.pid_exists(int(left.name)):
                left.unlink(missing_ok=True)
        self.address = self.sockets / str(os.getpid())
        self.address.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.address))
        self.listener.listen(256)
        self.selector.register(self.listener, selectors.EVENT_READ)
        # a session of its own: Ctrl-C in the terminal must not reach it
        self.watchdog = subprocess.Popen(
            [sys.executable, "-IS", watchdog.__file__], stdin=subprocess.PIPE, start_new_session=True
        )
        # before there is a process that could be left
        self._tell_watchdog(f"mark {self.mark}")
        self.build = subprocess.Popen(
            verbose(self.plan.command),
            env=self.environment,
            stdin=self.terminal.theirs if self.terminal else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=self.terminal.take if self.terminal else None,
        )
        self._tell_watchdog(f"session {self.build.pid}")
        assert self.build.stdout
        os.set_blocking(self.build.stdout.fileno(), False)
        self.selector.register(self.build.stdout, selectors.EVENT_READ)
        if self.terminal:
            self.selector.register(self.terminal.ours, selectors.EVENT_READ)
            self.selector.register(self.terminal.keyboard, selectors.EVENT_READ)
        self.sampled = 0.0
        self._sample()

    def _tell_watchdog(self, line: str) -> None:
        assert self.watchdog.stdin
        try:
            self.watchdog.stdin.write(f"{line}\n".encode())
            self.watchdog.stdin.flush()
        except OSError:
            # another process ended it; we are still here
            pass

    def _over(self) -> bool:
        return self.build.poll() is not None and (self.ended_output or self.selector_is_quiet)

    selector_is_quiet = False

    def _step(self) -> None:
        pause = self._pause()
        looked = max(self.sampled, self.memory_sampled)
        events = self.selector.select(max(0.0, min(pause, looked + pause - time.time())))
        self.selector_is_quiet = not events
        for key, _ in events:
            if key.fileobj is self.listener:
                connection, _ = self.listener.accept()
                launcher = _Launcher(connection)
                self.launchers.append(launcher)
                self.selector.register(connection, selectors.EVENT_READ, launcher)
            elif isinstance(key.data, _Launcher):
                self._receive(key.data)
            elif self.terminal and key.fileobj == self.terminal.ours:
                self._write_log(self.terminal.hear())
                self.stillness.spoke(time.time())
            elif self.terminal and key.fileobj == self.terminal.keyboard:
                self.terminal.type()
            else:
                self._read_output()
        if time.time() - self.sampled >= min(self.pace.pause, max(pause, _SEEN)):
            self._sample()
            self._watch()
            work = sum(process.cpu for process in self.processes.values())
            self.pace.took(time.process_time() - self.cpu_before, work)
        elif time.time() - looked >= pause:
            self._sample_memory()
        self._schedule()
        self._end_if_asked()

    def _pause(self) -> float:
        """Seconds until the next sample: fewer if memory could run out sooner at the greatest growth."""
        running = sum(unit.state == "running" for unit in self._units())
        lasts = (self.available - reserve(self.plan.host.memory)) / (max(1, running) * _GROWTH)
        return max(_HURRY, min(self.pace.pause, lasts)) if running else self.pace.pause

    # requests of compilers

    def _receive(self, launcher: _Launcher) -> None:
        try:
            part = launcher.connection.recv(4096)
        except OSError:
            part = b""
        if not part:
            self._on_disconnect(launcher)
            return
        launcher.text += part
        while b"\n" in launcher.text:
            line, _, launcher.text = launcher.text.partition(b"\n")
            word, *rest = line.decode(errors="replace").split(" ")
            if word == "want":
                self._on_want(launcher, int(rest[0]), rest[1], rest[2] == "gcc")
            elif word == "started" and launcher.unit:
                launcher.unit.pid = int(rest[0])
                launcher.kills = oom_kills()
            elif word == "ended":
                self._on_ended(launcher, int(rest[0]), int(rest[1]))

    def _on_want(self, launcher: _Launcher, pid: int, name: str, has_low_memory_mode: bool) -> None:
        running = [each.unit.pid for each in self.launchers if each.unit and each.unit.pid]
        # its caller waits for it, so it must not wait for its caller's memory
        if called_by_compiler(pid, running):
            self._send(launcher, "pass")
            return
        launcher.unit = CompileJob(
            name, self._expected(name), seen=name in self.known, has_low_memory_mode=has_low_memory_mode
        )

    def _expected(self, name: str) -> int:
        peaks = self.peaks.get(Path(name).suffix, [])
        if name in self.known:
            return max(_LEAST, int(self.known[name].peak * _MARGIN))
        if len(peaks) >= _LEARN:
            return max(_LEAST, int(max(peaks) * _MARGIN))
        return self.plan.estimate.bytes

    def _on_ended(self, launcher: _Launcher, status: int, most: int) -> None:
        unit = launcher.unit
        assert unit
        # samples miss short peaks
        unit.peak = max(unit.peak, most)
        starved = status and (status in (-signal.SIGKILL, 128 + signal.SIGKILL) or oom_kills() > launcher.kills)
        if unit.state == "killed" or (starved and unit.tries < _RETRIES and not self.signals):
            if unit.state != "killed":
                # alone, the next time
                unit.expected, unit.seen = self.plan.host.memory, True
                self.view.say(f"{unit.name} was killed at {_gib(unit.peak)}: it runs again, alone")
            unit.state, unit.pid, unit.pids = "waiting", 0, []
            self.rerun += 1
            self._send(launcher, "again")
            return
        seconds = time.time() - unit.since
        # the next plan must know units that did not fit, too
        if not status or starved:
            self.finished.append(UnitRecord(unit.name, seconds, unit.peak))
        if not status:
            # a configuration's probes are small
            self.timed += [seconds] if self.progress.total else []
            self.peaks.setdefault(Path(unit.name).suffix, []).append(unit.peak)
            for other in self._units():
                if other.state == "waiting" and not other.tries:
                    other.expected = self._expected(other.name)
        launcher.unit = None
        self._send(launcher, "done")

    def _on_disconnect(self, launcher: _Launcher) -> None:
        """A launcher closed its connection; if it was killed, its compiler goes too, which may be paused."""
        self.selector.unregister(launcher.connection)
        launcher.connection.close()
        self.launchers.remove(launcher)
        if launcher.unit and launcher.unit.pid:
            _signal([*launcher.unit.pids, -launcher.unit.pid], signal.SIGKILL)

    def _schedule(self) -> None:
        if not (units := self._units()):
            return
        by_unit = {launcher.unit: launcher for launcher in self.launchers if launcher.unit}
        memory = self.plan.host.memory
        for act, unit in list(decide(units, self.available, memory, max(1, self.plan.jobs))):
            if self.fresh or act in ("go", "go low_memory"):
                self._act(act, unit, by_unit.get(unit))
        # one action against shortage per sample: acting on every event, a pause was followed by a kill before its
        # effect was measured
        self.fresh = False

    def _act(self, act: Act, unit: CompileJob, launcher: _Launcher | None) -> None:
        if act in ("go", "go low_memory") and launcher:
            unit.state, unit.since, unit.memory, unit.peak = "running", time.time(), 0, 0
            unit.low_memory = act == "go low_memory"
            unit.tries += 1
            self._send(launcher, act)
            if unit.low_memory:
                self.view.say(
                    f"{unit.name} may not fit: gcc collects its garbage early, which is slower and takes less memory"
                )
        elif act == "resume":
            unit.state = "running"
            _signal(unit.pids, signal.SIGCONT)
            self.view.say(f"resumed {unit.name}")
        elif act == "pause" and unit.pids:
            unit.state = "paused"
            unit.expected = max(unit.expected, unit.memory * 3 // 2)
            _signal(unit.pids, signal.SIGSTOP)
            self.paused += 1
            self.view.say(f"paused {unit.name} at {_gib(unit.memory)}: {_gib(self.available)} left")
        elif act == "kill" and launcher:
            unit.state, unit.seen = "killed", True
            unit.expected = max(unit.expected, unit.memory * 3 // 2)
            self._send(launcher, "kill")
            self.view.say(f"killed {unit.name} at {_gib(unit.memory)} to free memory: it will run again")
        elif act == "alone":
            unit.reported_alone = True
            self.view.say(
                f"even one job does not fit: {unit.name} has {_gib(unit.memory)} of {_gib(self.plan.host.memory)} "
                f"({self.plan.host.memory_why}) and wants more. Fix: more memory or swap, or fewer archs"
            )

    def _send(self, launcher: _Launcher, word: str) -> None:
        try:
            launcher.connection.sendall(f"{word}\n".encode())
        except OSError:
            # it is gone; its end of file is read next
            pass

    # sampling

    def _units(self) -> list[CompileJob]:
        return [*self.unmanaged.values(), *(each.unit for each in self.launchers if each.unit)]

    def _sample(self) -> None:
        self.processes = tree(os.getpid(), [self.watchdog.pid])
        self._report_processes()
        self.sampled, self.fresh = time.time(), True
        self.used = sum(process.memory for process in self.processes.values())
        self.peak = max(self.peak, self.used)
        self.available_without_build = available_memory()[0] + self.used
        self.available = min(self.available_without_build, self.plan.host.memory) - self.used
        launched = [each.unit.pid for each in self.launchers if each.unit and each.unit.pid]
        foreign = {process.pid: process for process in unmanaged_compilers(self.processes, launched)}
        self.unmanaged = {pid: self.unmanaged.get(pid) or self._unmanaged(process) for pid, process in foreign.items()}
        for unit in self._units():
            of = below(unit.pid, self.processes)
            unit.pids = [process.pid for process in of]
            unit.memory = sum(process.memory for process in of)
            unit.peak = max(unit.peak, unit.memory)
            unit.cpu = sum(process.cpu for process in of)
            unit.doing = max((p for p in of if p.compiles), key=lambda p: p.memory, default=_NOBODY).name
        if self.sampled - self.reaped > _REAP:
            self.reaped = self.sampled
            _reap(self.build.pid, self.watchdog.pid)

    def _report_processes(self) -> None:
        new = [pid for pid in self.processes if pid not in self.watched]
        starts = watchdog.running() if new else {}
        for pid in new:
            if pid in starts:
                self._tell_watchdog(f"seen {pid} {starts[pid].start}")
        self.watched = set(self.processes)

    def _sample_memory(self) -> None:
        """Memory of the processes of the last sample: 8 us each, so that shortage between samples is noticed."""
        self.memory_sampled, self.fresh = time.time(), True
        sizes = {pid: own_memory(pid) for pid in self.processes}
        for unit in self._units():
            unit.memory = sum(sizes.get(pid, 0) for pid in unit.pids)
            unit.peak = max(unit.peak, unit.memory)
        self.used = sum(sizes.values())
        self.peak = max(self.peak, self.used)
        self.available = min(self.available_without_build, self.plan.host.memory) - self.used

    def _unmanaged(self, process: Process) -> CompileJob:
        """A running compiler that no launcher started."""
        name = f"{process.name} {process.pid}"
        return CompileJob(name, 0, process.pid, "running", time.time(), launched=False)

    def _watch(self) -> None:
        now = time.time()
        paused = {pid for unit in self._units() if unit.state == "paused" for pid in unit.pids}
        moving = {pid: process for pid, process in self.processes.items() if pid not in paused}
        still = self.stillness.observe(moving, now)
        if still > self.stall_seconds and self.stall_reported < self.stillness.since:
            self.stall_reported = now
            self._report_stall(moving, still)
        if self._is_asked(moving, now):
            # a redrawn table would overwrite the prompt
            return
        running = [unit for unit in self._units() if unit.state == "running"]
        seconds = [now - unit.since for unit in running]
        estimate = self.plan.estimate
        earlier = None if estimate.rough else estimate.seconds
        eta = self.progress.eta(self.timed, seconds, earlier, now - self.started)
        progress = self.progress
        self.view.show(
            Status(
                "link" if any(p.links for p in self.processes.values()) and not running else progress.phase,
                *(progress.done, progress.total, now - self.started, eta, self.used),
                *(self.plan.host.memory, self._units(), now),
            )
        )

    def _is_asked(self, processes: Mapping[int, Process], now: float) -> bool:
        """Whether the build waits for an answer of the user; each prompt is reported once."""
        if not self.terminal:
            return False
        if question := self.terminal.question(processes.values(), self.text, now):
            self.view.say(question)
        return self.terminal.waits

    def _report_stall(self, processes: Mapping[int, Process], still: float) -> None:
        folders = [Path.cwd(), *stall.extension_folders(self.environment)]
        cause = stall.cause(processes, folders, self.stillness.swap_rate)
        self.view.say(f"nothing has moved for {still:.0f} s (no CPU time, no I/O, no output): {cause}")
        if cause.lock and self.fix:
            self.view.say(f"renamed {cause.lock} to {stall.set_aside(cause.lock)}")

    def _read_output(self) -> None:
        assert self.build.stdout
        part = os.read(self.build.stdout.fileno(), 1 << 16)
        if not part:
            self.selector.unregister(self.build.stdout)
            self.ended_output = True
            return
        self._write_log(part)
        self.stillness.spoke(time.time())
        *lines, rest = part.replace(b"\r", b"\n").split(b"\n")
        if lines:
            lines[0], self.text = self.text + lines[0], b""
        # of one without end, no more
        self.text = (self.text + rest)[:LONGEST_LINE]
        for line in lines:
            text = line[:LONGEST_LINE].decode(errors="replace")
            if self.progress.feed(text):
                self.view.say(f"{self.progress.phase}: {text.strip()[:200]}")

    # end of the build

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.signals.append(number)

    def _end_if_asked(self) -> None:
        if not self.signals or self.build.poll() is not None:
            return
        now = time.time()
        if not self.asked_to_end:
            self.asked_to_end = now
            self.view.say(f"{signal.Signals(self.signals[0]).name}: ending the build")
            self._end_all(signal.SIGINT if self.signals[0] == signal.SIGINT else signal.SIGTERM)
        elif now - self.asked_to_end > _GRACE or len(self.signals) > 1:
            self._end_all(signal.SIGKILL)

    def _end_all(self, number: int) -> list[watchdog.Seen]:
        """Signal all descendants, orphans included (we are their subreaper). Returns the processes reached."""
        processes = watchdog.running()
        below_us = watchdog.with_descendants([os.getpid()], processes)
        ours = [each for each in below_us if each.pid not in (os.getpid(), self.watchdog.pid)]
        reached = watchdog.signal_all(ours, number)
        for each in ours:
            if each not in reached and os.path.exists(f"/proc/{each.pid}") and each.pid not in self.other_users:
                self.other_users.add(each.pid)
                self.view.say(
                    f"process {each.pid} is another user's and cannot be ended from here: sudo kill {each.pid}"
                )
        return reached

    def _finish(self) -> None:
        """End every process of the build, running or paused, and release the builder's resources."""
        if hasattr(self, "build"):
            deadline = time.time() + (_GRACE if self.build.poll() is not None and not self.signals else 0)
            while left := self._end_all(signal.SIGTERM if time.time() < deadline else signal.SIGKILL):
                _reap(self.build.pid, self.watchdog.pid)
                if time.time() > deadline + watchdog.GIVE_UP:
                    self.view.say(f"these do not end: processes {' '.join(str(each.pid) for each in left)}")
                    break
                time.sleep(0.05)
            self._wait_for_build()
            _reap(self.build.pid, self.watchdog.pid)
        if hasattr(self, "watchdog"):
            self._tell_watchdog("over")
            self.watchdog.wait()
        if self.file:
            self.file.close()
        self.selector.close()
        if self.terminal:
            self.terminal.close()
        for launcher in self.launchers:
            launcher.connection.close()
        if hasattr(self, "listener"):
            self.listener.close()
            self.address.unlink(missing_ok=True)
        for directory in self.temporary:
            # where the log is
            if directory != self.folder:
                shutil.rmtree(directory, ignore_errors=True)

    def _wait_for_build(self) -> None:
        try:
            self.build.wait(watchdog.GIVE_UP)
        except subprocess.TimeoutExpired:
            # another user's, or it waits for a disk: named above
            self.build.returncode = -signal.SIGKILL

    def _outcome(self, cpu: float, overhead: float) -> Outcome:
        code = self.build.returncode
        if self.signals:
            code = -self.signals[0]
        failure = None
        if code and self.log.is_file():
            with self.log.open("rb") as log:
                failure = first_error(lines_of(log))
        seconds = time.time() - self.started
        return Outcome(
            *(128 - code if code < 0 else code, seconds, cpu, overhead, self.peak, self.log),
            *(self.finished, self.progress.wheels, failure, self.paused, self.rerun),
        )


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOBODY = Process(0, 0, "", "", 0, 0.0, 0)


def _spent(who: int, before: resource.struct_rusage) -> float:
    now = resource.getrusage(who)
    return now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def _reap(*but: int) -> None:
    """Collect orphans that ended in our care."""
    for child in psutil.Process().children():
        try:
            if child.pid not in but and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.Error, ChildProcessError):
            continue


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
