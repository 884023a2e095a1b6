"""The compile service: kernels are compiled in worker processes that this process owns, watches and can end.

The caller's thread lowers a kernel to TTIR; a worker turns it into an entry. Every wait has a deadline and, after two
seconds, a line that says what is waited for. Workers are started by one thread that lives as long as the process
(the kernel kills a child with the *thread* that started it), each in a process group of its own, so that ending one
ends its ptxas too. A forked child starts with no workers of its parent's.
"""

import atexit
import hashlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from powertrain.runtime import tracing
from powertrain.runtime.compile import kernel_store, worker
from powertrain.runtime.compile.triton_compat import VERSION_TEXT, is_gluon, lower, ptxas_version
from powertrain.runtime.errors import CompileError, CompileTimeout
from powertrain.runtime.jobs import jobs
from powertrain.runtime.settings import settings

PER_JOB_BYTES = 768 << 20  # a worker without torch peaks at 150 to 230 MiB, ptxas at 43 to 363 MiB
_SPEAK_AFTER = 2.0
# the CUDA version whose driver can load what a Triton's bundled ptxas makes (minor versions are compatible)
_MIN_DRIVER = 12000


@dataclass(frozen=True)
class Spec:
    """One specialization of a kernel: all that decides its machine code."""

    kernel: Any  # launch.Kernel
    signature: Mapping[str, str]  # argument name -> "*bf16", "i32", "fp32" or "constexpr"
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]  # arguments known to be multiples of 16
    options: Mapping[str, Any]
    arch: int

    @cached_property
    def key(self) -> str:
        parts = {
            "schema": kernel_store.SCHEMA,
            "source": self.kernel.source_hash,
            "signature": list(self.signature.items()),
            "constants": sorted((name, repr(value)) for name, value in self.constants.items()),
            "aligned": list(self.aligned),
            "options": sorted(self.options.items()),
            "arch": self.arch,
            "triton": VERSION_TEXT,
            "ptxas": ptxas_version(self.arch),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def describe(self) -> str:
        return f"{self.kernel.name} for sm_{self.arch}"

    def about(self) -> dict[str, Any]:
        """What the entry's manifest says of it, for people and for `powertrain kernels`."""
        return {
            "kernel": self.kernel.name,
            "module": self.kernel.module,
            "arch": self.arch,
            "signature": dict(self.signature),
            "constants": {name: repr(value) for name, value in self.constants.items()},
            "options": dict(self.options),
            "triton": VERSION_TEXT,
            "ptxas": ptxas_version(self.arch),
            "min_driver": _MIN_DRIVER,
        }


class _Worker:
    """A running worker process, seen from its owner."""

    def __init__(self) -> None:
        self.log = tempfile.TemporaryFile()  # nameless: nothing is left of it whatever happens
        start = "import sys; sys.path[:] = sys.argv[2:]; from powertrain.runtime.compile.worker import main; main()"
        paths = [str(Path(__file__).parents[3]), *(path for path in sys.path if path)]
        environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "POWERTRAIN_INTERPRET")}
        environment["TRITON_DISABLE_LINE_INFO"] = "1"
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", start, str(os.getpid()), *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            bufsize=0,
            start_new_session=True,
        )

    def ask(self, request: dict[str, Any], deadline: float, waiting_for: str) -> tuple[dict[str, Any], bytes]:
        """One request, one reply. EOFError if the worker died, TimeoutError past the deadline."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            worker.write_frame(self.process.stdin, request)
        except BrokenPipeError:
            raise EOFError from None
        self._wait(deadline, waiting_for)
        reply = worker.read_frame(self.process.stdout)
        return reply, worker.read_exactly(self.process.stdout, reply["entry"])

    def _wait(self, deadline: float, waiting_for: str) -> None:
        assert self.process.stdout is not None
        started = spoken = time.monotonic()
        while not select.select([self.process.stdout], [], [], 0.25)[0]:
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError
            if now - spoken > _SPEAK_AFTER:
                spoken = now
                tracing.progress(
                    f"compiling {waiting_for}: {now - started:.0f} s (deadline {deadline - started:.0f} s)"
                )

    def end(self) -> int:
        """Kill the worker and all it started; its exit status."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()
        return self.process.wait()

    def last_words(self) -> str:
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-8:])


class Service:
    """The workers of this process."""

    def __init__(self) -> None:
        self.limit = settings().jobs or jobs(PER_JOB_BYTES).count
        self._slots = threading.Semaphore(self.limit)
        self._idle: list[_Worker] = []
        self._orders: queue.SimpleQueue[queue.SimpleQueue[Any]] = queue.SimpleQueue()
        threading.Thread(target=self._start_workers, name="powertrain-compile", daemon=True).start()

    def _start_workers(self) -> None:
        while True:
            answer = self._orders.get()
            try:
                answer.put(_Worker())
            except OSError as error:
                answer.put(error)

    def _hire(self) -> _Worker:
        while self._idle:
            try:
                found = self._idle.pop()
            except IndexError:
                break
            if found.process.poll() is None:
                return found
            found.end()
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._orders.put(answer)
        started = answer.get()
        if isinstance(started, OSError):
            raise CompileError(f"cannot start a compile worker ({sys.executable}): {started}")
        return started

    def compile(self, spec: Spec, ttir: str, *, again: bool = False) -> tuple[kernel_store.Entry, dict[str, Any]]:
        """An entry for `spec` from its TTIR. `again`: replace what the store has."""
        limit = settings().compile_timeout
        home = kernel_store.user_store()
        request = {
            "key": spec.key,
            "ttir": ttir,
            "options": dict(spec.options),
            "arch": spec.arch,
            "gluon": is_gluon(spec.kernel.jit),
            "about": spec.about(),
            "store": None if home.trouble else str(home.root),
            "lock_timeout": min(settings().lock_timeout, limit / 2),
            "again": again,
        }
        with self._slots:
            reply, body = self._ask(spec, request, time.monotonic() + limit, limit)
        if "error" in reply:
            raise CompileError(f"{spec.describe()} does not compile: {reply['error']}")
        if reply.get("trouble"):
            home.give_up(OSError(reply["trouble"]))
        return kernel_store.Entry.from_bytes(spec.key, body), reply

    def _ask(self, spec: Spec, request: dict[str, Any], deadline: float, limit: float) -> tuple[dict[str, Any], bytes]:
        for _ in range(self.limit + 1):
            hired = self._hire()
            try:
                answer = hired.ask(request, deadline, spec.describe())
            except TimeoutError:
                hired.end()
                raise CompileTimeout(
                    f"{spec.describe()} did not compile within {limit:.0f} s; its processes were ended. Raise "
                    "POWERTRAIN_COMPILE_TIMEOUT, or set POWERTRAIN_ON_COMPILE_FAILURE=reference to go on without it"
                ) from None
            except EOFError:
                status = hired.end()
                if status == worker.IDLE_EXIT:
                    continue  # it had gone to rest just as we asked
                raise CompileError(
                    f"the compiler of {spec.describe()} died ({_status(status)}); its last words:\n{hired.last_words()}"
                ) from None
            except BaseException:
                hired.end()  # interrupted: its reply would answer the next question
                raise
            self._idle.append(hired)
            return answer
        raise CompileError(f"no compile worker stayed alive for {spec.describe()}")

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()


def _status(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    hint = ": out of memory? Try POWERTRAIN_JOBS=1" if code == -signal.SIGKILL else ""
    return f"{signal.Signals(-code).name}{hint}"


_service: Service | None = None
_entries: dict[str, kernel_store.Entry] = {}
_running: dict[str, threading.Event] = {}
_lock = threading.Lock()
_lowering = threading.Lock()


def service() -> Service:
    global _service
    with _lock:
        if _service is None:
            _service = Service()
            atexit.register(_service.close)
        return _service


def _after_fork() -> None:
    """A forked child neither uses its parent's workers nor waits for its parent's compiles."""
    global _service, _lock, _lowering
    _service, _lock, _lowering = None, threading.Lock(), threading.Lock()
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)


def entry_for(spec: Spec, *, again: bool = False) -> tuple[kernel_store.Entry, str]:
    """The compiled kernel and where it came from: memory, pack, store, compiled or another process.

    Threads that want one key share one compile. `again` compiles anew: the driver refused what there was.
    """
    while True:
        with _lock:
            if not again and spec.key in _entries:
                return _entries[spec.key], "memory"
            mine = spec.key not in _running
            waiting = _running.setdefault(spec.key, threading.Event())
        if mine:
            break
        while not waiting.wait(_SPEAK_AFTER):  # its owner has the deadline
            tracing.progress(f"waiting for another thread to compile {spec.describe()}")
    try:
        entry, source = _find_or_compile(spec, again)
        _entries[spec.key] = entry
        return entry, source
    finally:
        with _lock:
            done = _running.pop(spec.key, None)
        if done:
            done.set()


def _lower(spec: Spec) -> str:
    # one thread at a time: Triton's code generator keeps state (seen: Triton 3.9 failing at random in two threads)
    with _lowering:
        try:
            return lower(spec.kernel.jit, spec.signature, spec.constants, spec.aligned, spec.options, spec.arch)
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise CompileError(f"{spec.describe()} is not valid Triton: {cause}") from error


def _find_or_compile(spec: Spec, again: bool) -> tuple[kernel_store.Entry, str]:
    started = time.perf_counter()
    found = None if again else kernel_store.find(spec.key)
    if found is None:
        entry, reply = service().compile(spec, _lower(spec), again=again)
        found = entry, reply["source"]
    milliseconds = (time.perf_counter() - started) * 1e3
    constants = {name: value for name, value in spec.constants.items() if value is not None}
    tracing.event(
        "kernel",
        f"{spec.describe()}: {found[1]}, {milliseconds:.0f} ms",
        kernel=spec.kernel.name,
        module=spec.kernel.module,
        arch=spec.arch,
        constants=constants,
        options=dict(spec.options),
        source=found[1],
        milliseconds=round(milliseconds, 1),
        key=spec.key,
    )
    return found
