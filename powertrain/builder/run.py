"""Runs one build: shows its progress, schedules its compilers by memory, explains stalls, ends every process."""

import contextlib
import os
import resource
import selectors
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import psutil

from powertrain.builder import stall, watchdog
from powertrain.builder.build_files import BuildFiles
from powertrain.builder.ending import LONGEST_LINE, first_error, lines_of
from powertrain.builder.history import UnitRecord
from powertrain.builder.launcher_connection import LauncherConnection
from powertrain.builder.memory_scheduler import Act, CompileJob, decide, reserve
from powertrain.builder.plan import Plan
from powertrain.builder.processes import (
    NOBODY,
    Pace,
    Process,
    adopt_orphans,
    below,
    called_by_compiler,
    cpu_since,
    oom_kills,
    own_memory,
    reap,
    send_signal,
    tree,
    unmanaged_compilers,
)
from powertrain.builder.progress import Progress, is_pip, verbose
from powertrain.builder.shims import make_shims, shimmed
from powertrain.builder.status import Outcome, Status, View, size_text
from powertrain.builder.terminal import Terminal
from powertrain.builder.watchdog_process import WatchdogProcess
from powertrain.runtime.jobs import available_memory
from powertrain.runtime.settings import BUILD_MARK

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
_LEAST = 32 * 2**20  # lower bound of a compiler's expected bytes


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
        self.files = BuildFiles(folder, view.say)
        self.shims = make_shims(self.files.folder / "shims", self.files.sockets, environment, plan.host.nvcc)
        self.mark = f"{BUILD_MARK}={uuid.uuid4().hex}"
        self.terminal = None if keyboard is None else Terminal(keyboard)
        defaults = {"PYTHONUNBUFFERED": "1"}
        if not is_pip(plan.command):
            defaults["PIP_VERBOSE"] = "1"  # for one that the command calls in turn
        if not self.terminal:
            defaults["GIT_TERMINAL_PROMPT"] = "0"
        self.environment = {**defaults, **environment, **plan.environment, BUILD_MARK: self.mark.partition("=")[2]}
        self.environment |= shimmed(self.environment, self.shims, plan.host.nvcc)
        self.selector = selectors.DefaultSelector()
        self.progress, self.pace = Progress(), Pace()
        self.launchers: list[LauncherConnection] = []
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
        self.asked_to_end = self.stall_reported = 0.0
        self.text = b""
        self.ended_output = self.selector_is_quiet = False
        self.other_users: set[int] = set()  # processes of other users that were reported

    def run(self) -> Outcome:
        """Run the command to its end. SIGINT and SIGTERM end it and everything it started."""
        self.started, self.cpu_before = time.time(), time.process_time()
        before = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
        handlers = {number: signal.signal(number, self._on_signal) for number in _ENDING}
        try:
            self.files.open_log()
            self._start()
            self.stillness = stall.Stillness(time.time())
            while not self._over():
                self._step()
        finally:
            self._finish()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self._outcome(cpu_since(resource.RUSAGE_CHILDREN, before[0]), cpu_since(resource.RUSAGE_SELF, before[1]))

    def _start(self) -> None:
        adopt_orphans()
        # sockets of builders that were killed
        for left in self.files.sockets.iterdir():
            if left.name.isdecimal() and not psutil.pid_exists(int(left.name)):
                left.unlink(missing_ok=True)
        self.address = self.files.sockets / str(os.getpid())
        self.address.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.address))
        self.listener.listen(256)
        self.selector.register(self.listener, selectors.EVENT_READ)
        # before there is a process that could be left
        self.watchdog = WatchdogProcess(self.mark)
        self.build = subprocess.Popen(
            verbose(self.plan.command),
            env=self.environment,
            stdin=self.terminal.theirs if self.terminal else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=self.terminal.take if self.terminal else None,
        )
        self.watchdog.tell(f"session {self.build.pid}")
        assert self.build.stdout
        os.set_blocking(self.build.stdout.fileno(), False)
        self.selector.register(self.build.stdout, selectors.EVENT_READ)
        if self.terminal:
            self.selector.register(self.terminal.ours, selectors.EVENT_READ)
            self.selector.register(self.terminal.keyboard, selectors.EVENT_READ)
        self.sampled = 0.0
        self._sample()

    def _over(self) -> bool:
        return self.build.poll() is not None and (self.ended_output or self.selector_is_quiet)

    def _step(self) -> None:
        pause = self._pause()
        looked = max(self.sampled, self.memory_sampled)
        events = self.selector.select(max(0.0, min(pause, looked + pause - time.time())))
        self.selector_is_quiet = not events
        for key, _ in events:
            if key.fileobj is self.listener:
                connection, _ = self.listener.accept()
                launcher = LauncherConnection(connection)
                self.launchers.append(launcher)
                self.selector.register(connection, selectors.EVENT_READ, launcher)
            elif isinstance(key.data, LauncherConnection):
                self._receive(key.data)
            elif self.terminal and key.fileobj == self.terminal.ours:
                self.files.write(self.terminal.hear())
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

    def _receive(self, launcher: LauncherConnection) -> None:
        requests = launcher.receive()
        if requests is None:
            self._on_disconnect(launcher)
            return
        for word, *rest in requests:
            if word == "want":
                self._on_want(launcher, int(rest[0]), rest[1], rest[2] == "gcc")
            elif word == "started" and launcher.unit:
                launcher.unit.pid = int(rest[0])
                launcher.kills = oom_kills()
            elif word == "ended":
                self._on_ended(launcher, int(rest[0]), int(rest[1]))

    def _on_want(self, launcher: LauncherConnection, pid: int, name: str, has_low_memory_mode: bool) -> None:
        running = [each.unit.pid for each in self.launchers if each.unit and each.unit.pid]
        # its caller waits for it, so it must not wait for its caller's memory
        if called_by_compiler(pid, running):
            launcher.send("pass")
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

    def _on_ended(self, launcher: LauncherConnection, status: int, most: int) -> None:
        unit = launcher.unit
        assert unit
        # samples miss short peaks
        unit.peak = max(unit.peak, most)
        starved = status and (status in (-signal.SIGKILL, 128 + signal.SIGKILL) or oom_kills() > launcher.kills)
        if unit.state == "killed" or (starved and unit.tries < _RETRIES and not self.signals):
            if unit.state != "killed":
                # alone, the next time
                unit.expected, unit.seen = self.plan.host.memory, True
                self.view.say(f"{unit.name} was killed at {size_text(unit.peak)}: it runs again, alone")
            unit.state, unit.pid, unit.pids = "waiting", 0, []
            self.rerun += 1
            launcher.send("again")
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
        launcher.send("done")

    def _on_disconnect(self, launcher: LauncherConnection) -> None:
        """A launcher closed its connection; if it was killed, its compiler goes too, which may be paused."""
        self.selector.unregister(launcher.connection)
        launcher.connection.close()
        self.launchers.remove(launcher)
        if launcher.unit and launcher.unit.pid:
            send_signal([*launcher.unit.pids, -launcher.unit.pid], signal.SIGKILL)

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

    def _act(self, act: Act, unit: CompileJob, launcher: LauncherConnection | None) -> None:
        if act in ("go", "go low_memory") and launcher:
            unit.state, unit.since, unit.memory, unit.peak = "running", time.time(), 0, 0
            unit.low_memory = act == "go low_memory"
            unit.tries += 1
            launcher.send(act)
            if unit.low_memory:
                self.view.say(
                    f"{unit.name} may not fit: gcc collects its garbage early, which is slower and takes less memory"
                )
        elif act == "resume":
            unit.state = "running"
            send_signal(unit.pids, signal.SIGCONT)
            self.view.say(f"resumed {unit.name}")
        elif act == "pause" and unit.pids:
            unit.state = "paused"
            unit.expected = max(unit.expected, unit.memory * 3 // 2)
            send_signal(unit.pids, signal.SIGSTOP)
            self.paused += 1
            self.view.say(f"paused {unit.name} at {size_text(unit.memory)}: {size_text(self.available)} left")
        elif act == "kill" and launcher:
            unit.state, unit.seen = "killed", True
            unit.expected = max(unit.expected, unit.memory * 3 // 2)
            launcher.send("kill")
            self.view.say(f"killed {unit.name} at {size_text(unit.memory)} to free memory: it will run again")
        elif act == "alone":
            unit.reported_alone = True
            self.view.say(
                f"even one job does not fit: {unit.name} has {size_text(unit.memory)} of "
                f"{size_text(self.plan.host.memory)} ({self.plan.host.memory_why}) and wants more. Fix: more memory or "
                "swap, or fewer archs"
            )

    # sampling

    def _units(self) -> list[CompileJob]:
        return [*self.unmanaged.values(), *(each.unit for each in self.launchers if each.unit)]

    def _sample(self) -> None:
        self.processes = tree(os.getpid(), [self.watchdog.pid])
        self.watchdog.report(self.processes)
        self.sampled, self.fresh = time.time(), True
        self.used = sum(process.memory for process in self.processes.values())
        self.peak = max(self.peak, self.used)
        self.available_without_build = available_memory()[0] + self.used
        self.available = min(self.available_without_build, self.plan.host.memory) - self.used
        launched = [each.unit.pid for each in self.launchers if each.unit and each.unit.pid]
        self.unmanaged = {
            each.pid: self.unmanaged.get(each.pid)
            or CompileJob(f"{each.name} {each.pid}", 0, each.pid, "running", time.time(), launched=False)
            for each in unmanaged_compilers(self.processes, launched)
        }
        for unit in self._units():
            of = below(unit.pid, self.processes)
            unit.pids = [process.pid for process in of]
            unit.memory = sum(process.memory for process in of)
            unit.peak = max(unit.peak, unit.memory)
            unit.cpu = sum(process.cpu for process in of)
            unit.doing = max((p for p in of if p.compiles), key=lambda p: p.memory, default=NOBODY).name
        if self.sampled - self.reaped > _REAP:
            self.reaped = self.sampled
            reap(self.build.pid, self.watchdog.pid)

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
            self.build.stdout.close()
            self.ended_output = True
            return
        self.files.write(part)
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
                reap(self.build.pid, self.watchdog.pid)
                if time.time() > deadline + watchdog.GIVE_UP:
                    self.view.say(f"these do not end: processes {' '.join(str(each.pid) for each in left)}")
                    break
                time.sleep(0.05)
            self._wait_for_build()
            reap(self.build.pid, self.watchdog.pid)
        if hasattr(self, "watchdog"):
            self.watchdog.end()
        self.selector.close()
        if self.terminal:
            self.terminal.close()
        for launcher in self.launchers:
            launcher.connection.close()
        if hasattr(self, "listener"):
            self.listener.close()
            self.address.unlink(missing_ok=True)
        self.files.close()

    def _wait_for_build(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.build.wait(watchdog.GIVE_UP)
            return
        # another user's, or it waits for a disk: named above
        self.build.returncode = -signal.SIGKILL

    def _outcome(self, cpu: float, overhead: float) -> Outcome:
        code = self.build.returncode
        if self.signals:
            code = -self.signals[0]
        failure = None
        if code and self.files.log.is_file():
            with self.files.log.open("rb") as log:
                failure = first_error(lines_of(log))
        seconds = time.time() - self.started
        return Outcome(
            *(128 - code if code < 0 else code, seconds, cpu, overhead, self.peak, self.files.log),
            *(self.finished, self.progress.wheels, failure, self.paused, self.rerun),
        )


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
