"""The compile service: kernels are compiled in worker processes that this process owns, watches and can end.

The caller's thread lowers a kernel to TTIR; a worker compiles it to an entry. Every wait has a deadline, and after two
seconds a log line names the kernel. Workers are started by one thread that lives as long as the process (Linux kills a
child with the *thread* that started it), each in a process group of its own, so that ending one ends its ptxas too. A
forked child does not use or end its parent's workers and starts its own when it compiles.
"""

import atexit
import hashlib
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from powertrain.runtime import tracing
from powertrain.runtime.compile import kernel_store, worker
from powertrain.runtime.compile.backward_ahead import backward_ahead
from powertrain.runtime.compile.triton_compat import VERSION_TEXT, is_gluon, lower, ptxas_version
from powertrain.runtime.errors import CompileError, CompileTimeout
from powertrain.runtime.jobs import jobs
from powertrain.runtime.settings import settings

# a worker without torch peaks at 150 to 230 MiB, ptxas at 43 to 363 MiB
PER_JOB_BYTES = 768 << 20
_LOG_AFTER = 2.0
_POLL = 0.25  # seconds between looks at the clock
# seconds that a worker may take to end after it closed its pipes
_END_TIMEOUT = 1.0
# the CUDA version whose driver can load the output of Triton's bundled ptxas (minor versions are compatible)
_MIN_DRIVER = 12000


@dataclass(frozen=True)
class Spec:
    """One specialization of a kernel: all that decides its machine code."""

    kernel: Any  # launch.Kernel
    signature: Mapping[str, str]  # argument name -> "*bf16", "i32", "fp32" or "constexpr"
    constants: Mapping[str, Any]
    aligned: Mapping[str, int]  # argument -> the power of two, 16 at most, that it is a multiple of
    options: Mapping[str, Any]
    arch: int

    @cached_property
    def key(self) -> str:
        parts = {
            "schema": kernel_store.SCHEMA,
            "source": self.kernel.source_hash,
            "signature": list(self.signature.items()),
            "constants": sorted((name, repr(value)) for name, value in self.constants.items()),
            "aligned": self.alignment,
            "options": sorted(self.options.items()),
            "arch": self.arch,
            "triton": VERSION_TEXT,
            "ptxas": ptxas_version(self.arch),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def alignment(self) -> list[str]:
        """`aligned` as text: "N" for a multiple of 16, "N:8" for one of 8."""
        return [name if step == 16 else f"{name}:{step}" for name, step in self.aligned.items()]

    def describe(self) -> str:
        return f"{self.kernel.name} for sm_{self.arch}"

    def about(self) -> dict[str, Any]:
        """Description of the entry in its manifest, for readers and `powertrain kernels`."""
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


class _Wait:
    """A wait with a deadline, logged every two seconds."""

    def __init__(self, deadline: float, name: str) -> None:
        self.deadline, self.name = deadline, name
        self.started = self._logged = time.monotonic()

    def left(self) -> float:
        """Seconds until the next poll or the deadline; TimeoutError past it."""
        now = time.monotonic()
        if now >= self.deadline:
            raise TimeoutError
        if now - self._logged > _LOG_AFTER:
            self._logged = now
            seconds = f"{now - self.started:.0f} s (deadline {self.deadline - self.started:.0f} s)"
            tracing.progress(f"compiling {self.name}: {seconds}")
        return min(_POLL, self.deadline - now)

    def until(self, descriptor: int, event: int) -> None:
        # not select(), which takes no descriptor above 1023
        poll = select.poll()
        poll.register(descriptor, event)
        while not poll.poll(1000 * self.left()):
            pass


class _Worker:
    """A running worker process, seen from its owner."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.log = tempfile.TemporaryFile(buffering=0)  # nameless: nothing is left of it whatever happens
        # made by the owner: it can be removed whatever happens to the worker
        self.folder = worker.make_folder()
        start = "import sys; sys.path[:] = sys.argv[4:]; from powertrain.runtime.compile.worker import main; main()"
        paths = [str(Path(__file__).parents[3]), *(path for path in sys.path if path)]
        environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "POWERTRAIN_INTERPRET")}
        # line numbers would make entries of equal code differ
        environment["TRITON_DISABLE_LINE_INFO"] = "1"
        arguments = [str(self.owner), str(self.folder), str(worker.IDLE_SECONDS)]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", start, *arguments, *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # a file, not a pipe: it is not read while the worker runs, and a full pipe would block the worker
                stderr=self.log,
                env=environment,
                bufsize=0,
                # a process group of its own, so that ptxas can be killed with it
                start_new_session=True,
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        assert self.process.stdin is not None and self.process.stdout is not None
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        # a blocking write to a worker that hangs would pass the deadline
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    def ask(self, request: dict[str, Any], deadline: float, waiting_for: str) -> tuple[dict[str, Any], bytes]:
        """One request, one reply. EOFError if the worker died, TimeoutError past the deadline."""
        wait = _Wait(deadline, waiting_for)
        try:
            self._write(worker.frame(request), wait)
        except BrokenPipeError:
            # output written before it ended can still be read
            pass
        reply = worker.parse_frame(lambda count: self._read(count, wait))
        return reply, self._read(reply["entry"], wait)

    def _write(self, data: bytes, wait: _Wait) -> None:
        left = memoryview(data)
        while left:
            wait.until(self._in, select.POLLOUT)
            try:
                left = left[os.write(self._in, left) :]
            except BlockingIOError:
                continue

    def _read(self, count: int, wait: _Wait) -> bytes:
        data = bytearray()
        while len(data) < count:
            wait.until(self._out, select.POLLIN)
            try:
                part = os.read(self._out, min(count - len(data), 1 << 20))
            except BlockingIOError:
                continue
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def kill(self) -> int:
        """Kill the worker and all it started, remove its folder; its exit status."""
        if self.owner != os.getpid():
            raise RuntimeError("a forked child must leave its parent's workers alone")
        if self.process.returncode is None and self._is_there():
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        status = self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        return status

    def end(self) -> int:
        """Kill the worker and close its pipes; called by the thread that used it last."""
        status = self.kill()
        self.drop()
        return status

    def _is_there(self) -> bool:
        """Whether the process id is still this worker's: other code may have reaped all children of the process."""
        try:
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def died(self) -> int:
        """The exit status of one that closed its pipes by itself; it is given a moment to end."""
        try:
            self.process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            pass
        return self.end()

    def drop(self) -> None:
        """Close this process's ends of the pipes."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()

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
        self._all: dict[int, _Worker] = {}  # by id(); those that ended are left out
        self._orders: queue.SimpleQueue[Future[_Worker]] = queue.SimpleQueue()
        self._ordered: list[Future[_Worker]] = []  # for a request that is still being lowered
        threading.Thread(target=self._start_workers, name="powertrain-compile", daemon=True).start()

    def _start_workers(self) -> None:
        while True:
            order = self._orders.get()
            try:
                with _starting:
                    active = _Worker()
            # any error goes to the waiting caller: if this thread ended, later callers would wait for ever
            except BaseException as error:
                order.set_exception(error)
            else:
                self._all[id(active)] = active
                order.set_result(active)
            del order

    def order_worker(self) -> None:
        """Start a worker while the caller lowers the kernel, unless one waits already: it takes 0.3 to 0.6 s."""
        # with every slot taken there are as many workers as POWERTRAIN_JOBS allows
        if not self._idle and not self._ordered and self._slots.acquire(blocking=False):
            self._ordered.append(self._order())
            self._slots.release()

    def _order(self) -> "Future[_Worker]":
        # started by one thread that lives as long as the process: PDEATHSIG ends a child with the thread that made it
        order: Future[_Worker] = Future()
        self._orders.put(order)
        return order

    def _take_worker(self, deadline: float, waiting_for: str) -> _Worker:
        """One that is idle or ordered and still alive, else a new one."""
        for kept in (self._idle, self._ordered):
            while kept:
                try:
                    candidate = kept.pop()
                except IndexError:
                    break
                worker = candidate if isinstance(candidate, _Worker) else self._ready(candidate, deadline, waiting_for)
                if worker.process.poll() is None:
                    return worker
                self._end(worker)
        return self._ready(self._order(), deadline, waiting_for)

    def _ready(self, order: "Future[_Worker]", deadline: float, waiting_for: str) -> _Worker:
        try:
            wait = _Wait(deadline, waiting_for)
            while not futures.wait([order], wait.left()).done:
                pass
        except BaseException:
            order.add_done_callback(self._return_to_idle)
            raise
        if (error := order.exception()) is not None:
            reason = f"{type(error).__name__}: {error}"
            raise CompileError(f"cannot start a compile worker ({sys.executable}): {reason}") from error
        return order.result()

    def _return_to_idle(self, order: "Future[_Worker]") -> None:
        """A worker whose caller gave up waiting is kept for the next compile."""
        if order.exception() is None:
            self._idle.append(order.result())

    def _end(self, ended: _Worker, *, by_itself: bool = False) -> int:
        self._all.pop(id(ended), None)
        return ended.died() if by_itself else ended.end()

    def compile(self, spec: Spec, ttir: str, *, again: bool = False) -> tuple[kernel_store.Entry, dict[str, Any]]:
        """An entry for `spec` from its TTIR. `again`: replace the stored entry."""
        limit = settings().compile_timeout
        home = kernel_store.user_store()
        request = {
            "key": spec.key,
            "ttir": ttir,
            "options": dict(spec.options),
            "arch": spec.arch,
            "gluon": is_gluon(spec.kernel.jit),
            "about": spec.about(),
            "store": None if home.trouble else str(home.root.absolute()),
            # half of the deadline is left for a compile of its own, should another process hold the lock
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
        active: _Worker | None = None
        try:
            # a worker that stops after idling may cross a request: at most one round for each, bounded by the deadline
            while True:
                active = None
                active = self._take_worker(deadline, spec.describe())
                reply, body = active.ask(request, deadline, spec.describe())
                if not reply.get("resting"):
                    break
                self._end(active, by_itself=True)
        except TimeoutError:
            if active:
                self._end(active)
            raise CompileTimeout(
                f"{spec.describe()} did not compile within {limit:.0f} s; its processes were ended. Raise "
                "POWERTRAIN_COMPILE_TIMEOUT, or set POWERTRAIN_ON_COMPILE_FAILURE=reference to go on without it"
            ) from None
        except (EOFError, ValueError, KeyError) as error:
            assert active
            status = _status(self._end(active, by_itself=isinstance(error, EOFError)))
            why = "" if isinstance(error, EOFError) else f", after a reply that makes no sense ({error})"
            raise CompileError(
                f"the compiler of {spec.describe()} died ({status}{why}); its last words:\n{active.last_words()}"
            ) from None
        except BaseException:
            if active:
                # interrupted: its reply would answer the next question
                self._end(active)
            raise
        # only behind a whole reply: a worker with half of one in its pipe would answer the next question wrongly
        self._idle.append(active)
        return reply, body

    def close(self) -> None:
        """End the workers; waiting callers get the error that theirs died."""
        while self._idle:
            self._end(self._idle.pop())
        for busy in list(self._all.values()):
            busy.kill()

    def forget(self) -> None:
        """In a forked child: these are its parent's workers, whose pipes it must not hold open."""
        for each in self._all.values():
            each.drop()


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
_starting = threading.Lock()
_held_for_fork = threading.local()


def service() -> Service:
    global _service
    with _lock:
        if _service is None:
            try:
                _service = Service()
            except RuntimeError as error:
                raise CompileError(f"cannot start the thread that starts compile workers: {error}") from error
        return _service


@atexit.register
def _close() -> None:
    if _service is not None:
        _service.close()


def _before_fork() -> None:
    """Wait briefly for operations that a fork must not interrupt: a child that inherits the pipes of a starting worker
    would keep its parent waiting for that worker, and Triton's code generator keeps state."""
    _held_for_fork.locks = [lock for lock in (_starting, _lowering) if lock.acquire(timeout=_END_TIMEOUT)]


def _after_fork_in_parent() -> None:
    for lock in _held_for_fork.locks:
        lock.release()


def _after_fork() -> None:
    """A forked child neither uses its parent's workers nor waits for its parent's compiles."""
    global _service, _lock, _lowering, _starting
    if _service is not None:
        _service.forget()
    _service, _lock, _lowering, _starting = None, threading.Lock(), threading.Lock(), threading.Lock()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)


def entry_for(spec: Spec, *, again: bool = False) -> tuple[kernel_store.Entry, str]:
    """The compiled kernel and where it came from: memory, pack, store, compiled or another process.

    Threads that want one key share one compile. `again` compiles anew: the driver rejected the stored entry.
    """
    while True:
        with _lock:
            if not again and spec.key in _entries:
                return _entries[spec.key], "memory"
            is_owner = spec.key not in _running
            waiting = _running.setdefault(spec.key, threading.Event())
        if is_owner:
            break
        # without a deadline: the thread that compiles has one
        while not waiting.wait(_LOG_AFTER):
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


def compile_ahead(specs: Iterable[Spec]) -> None:
    """Compile specs in background threads. A launch that needs one meanwhile waits for it, and raises its error."""

    def compile_quietly(spec: Spec) -> None:
        try:
            entry_for(spec)
        except CompileError as error:
            tracing.event("kernel", f"{spec.describe()}: not compiled ahead: {error}", key=spec.key)

    with _lock:
        # the call itself compiles its forward's
        missing = [spec for spec in specs if spec.key not in _entries and spec.key not in _running]
    for spec in missing:
        # a daemon: a process that ends does not wait for it
        thread = threading.Thread(target=compile_quietly, args=(spec,), name="powertrain-ahead", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # no more threads are allowed, or the process ends
            tracing.event("kernel", f"{spec.describe()}: not compiled ahead: {error}", key=spec.key)


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
    stored = None if again else kernel_store.find(spec.key)
    if stored is None:
        service().order_worker()
        source_text = _lower(spec)
        backward_ahead.begin()
        entry, reply = service().compile(spec, source_text, again=again)
        source = reply["source"]
    else:
        entry, source = stored
    milliseconds = (time.perf_counter() - started) * 1e3
    constants = {name: value for name, value in spec.constants.items() if value is not None}
    tracing.event(
        "kernel",
        f"{spec.describe()}: {source}, {milliseconds:.0f} ms",
        kernel=spec.kernel.name,
        module=spec.kernel.module,
        arch=spec.arch,
        constants=constants,
        options=dict(spec.options),
        source=source,
        milliseconds=round(milliseconds, 1),
        key=spec.key,
    )
    return entry, source
