"""Data worker processes, which prefetch batches and are replaced when they die.

A worker gets the keys of batches through a pipe and sends the batches back, in order. It gets none of the signals that
ask to end, and ends with its parent: by the end of its pipe, or because it has another parent. One that dies is named,
and a new one reads its pending batches, so samples and their order stay the same. One that is alive and does not
answer, whether it reads or sends, is named after 30 seconds; after 600 WorkerLost ends the run: a new worker would wait
for the same file.
"""

import multiprocessing
import os
import pickle
import signal
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

from powertrain.runtime import tracing
from powertrain.train.signals import children_without_signals

_AHEAD = 2  # batches requested of each worker ahead of use
_QUIET = 30.0  # seconds of waiting for a batch before a log line
# seconds a batch may take before its worker counts as stuck
_PATIENCE = 600.0
_ATTEMPTS = 3  # workers that may die over one batch
_LOOK = 1.0  # seconds between checks that the other side lives


class WorkerLost(RuntimeError):
    """A batch did not arrive; names its key, and the end of each worker."""

    def __init__(self, key: Any, why: str) -> None:
        super().__init__(why)
        self.key = key


def read_ahead(read: Callable[[Any], Any], keys: Sequence[Any], count: int) -> Iterator[Any]:
    """`read(key)` of every key, in order, by `count` processes. Raises WorkerLost; OSError if so many do not start."""
    workers: list[_Worker] = []
    count = min(count, len(keys))
    try:
        for _ in range(count):
            workers.append(_started(read, len(workers), count))
        asked = 0
        for n in range(len(keys)):
            # batch n belongs to worker n % count, so arrival order is reading order without sorting
            while asked < min(len(keys), n + _AHEAD * count):
                workers[asked % count].ask(keys[asked])
                asked += 1
            yield workers[n % count].answer()
    finally:
        for worker in workers:
            worker.end()


def _started(read: Callable[[Any], Any], before: int, count: int) -> "_Worker":
    try:
        return _Worker(read)
    except OSError as error:
        # three files each, and a process
        why = f"{error.strerror}: `ulimit -n` limits open files, `ulimit -u` processes"
        raise OSError(f"num_workers must be at most {before} here, got {count} ({why})") from None


class _Worker:
    """A process that reads, and those that follow it."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read
        self._owed: deque[Any] = deque()
        self._deaths = 0
        # before multiprocessing waits for children at the end of the program
        self.end = Finalize(self, self._kill, exitpriority=10)
        try:
            self._start()
        except OSError:
            self.end.cancel()
            raise

    def _start(self) -> None:
        self._arriving = _Message()
        self._pipe, theirs = multiprocessing.Pipe()
        process = multiprocessing.Process(
            # daemon: multiprocessing then ends it with the program also if `end` was not called
            target=_serve,
            args=(self._read, theirs, self._pipe),
            daemon=True,
            name="powertrain-data",
        )
        try:
            with children_without_signals():
                process.start()
        except OSError:
            self._pipe.close()
            theirs.close()
            raise
        # without this end here, the worker's death is an end of file on our end
        theirs.close()
        self._process = process
        # batches that the dead worker owed, in their order
        for key in self._owed:
            self._send(key)

    def _send(self, key: Any) -> None:
        try:
            self._pipe.send(key)
        except OSError:
            # it died; `answer` finds out
            pass

    def ask(self, key: Any) -> None:
        self._owed.append(key)
        self._send(key)

    def answer(self) -> Any:
        """The batch of the oldest requested key."""
        key, started, reported = self._owed[0], time.monotonic(), False
        while True:
            # the process too: a killed worker whose children hold its pipe gives no end of file
            ready = wait([self._pipe, self._process.sentinel], timeout=_LOOK)
            if self._pipe in ready:
                try:
                    complete = self._arriving.read(self._pipe.fileno())
                except (EOFError, OSError):  # it died while it sent
                    self._replace(key)
                    continue
                if complete:
                    self._owed.popleft()
                    self._deaths = 0
                    return self._arriving.take()
            elif ready:
                self._replace(key)
                continue
            waited = time.monotonic() - started
            if waited > _PATIENCE:
                raise WorkerLost(key, f"data worker {self._process.pid} has not answered for {_PATIENCE:.0f} s")
            if waited > _QUIET and not reported:
                reported = True
                tracing.progress(
                    f"waiting for data: worker {self._process.pid} has not answered for {_QUIET:.0f} s, "
                    f"at most {_PATIENCE:.0f} s"
                )

    def _replace(self, key: Any) -> None:
        """Name the worker that died, and let a new one read its batches; WorkerLost after three over one key."""
        self._process.join(_LOOK)
        death = f"data worker {self._process.pid} {_end_of(self._process.exitcode)}"
        self._deaths += 1
        if self._deaths >= _ATTEMPTS:
            raise WorkerLost(key, f"{death}, as did {self._deaths - 1} before it over the same batch")
        tracing.progress(f"{death}; a new one reads its samples again")
        # no wait after the first death; then a little, in case memory was short
        time.sleep(_LOOK * (self._deaths - 1))
        self._kill()
        try:
            self._start()
        except OSError as error:
            raise WorkerLost(key, f"{death}, and no other one could start ({error.strerror})") from None

    def _kill(self) -> None:
        self._pipe.close()
        # SIGKILL, because the signals that ask to end are blocked in workers
        self._process.kill()
        self._process.join(_LOOK)


class _Message:
    """A message that arrives in parts, so that no read waits for a sender that has stopped: a length, then a pickle."""

    _HEAD = struct.Struct("!Q")

    def __init__(self) -> None:
        self._begin(self._HEAD.size, is_head=True)

    def _begin(self, size: int, *, is_head: bool) -> None:
        self._bytes, self._filled, self._is_head = bytearray(size), 0, is_head

    def read(self, file: int) -> bool:
        """Take what is there, of which there must be something; whether the message is complete."""
        # one read returns the bytes that are available; Connection.recv would wait for the whole message
        read = os.readv(file, [memoryview(self._bytes)[self._filled :]])
        if not read:
            raise EOFError
        self._filled += read
        if self._filled == len(self._bytes) and self._is_head:
            self._begin(self._HEAD.unpack(self._bytes)[0], is_head=False)
            return False
        return self._filled == len(self._bytes)

    def take(self) -> Any:
        """The complete message; the next one begins."""
        sample = pickle.loads(self._bytes)
        self._begin(self._HEAD.size, is_head=True)
        return sample

    @classmethod
    def send(cls, file: int, value: Any) -> None:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        for part in (cls._HEAD.pack(len(data)), data):
            left = memoryview(part)
            while left:
                left = left[os.write(file, left) :]


def _end_of(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code >= 0:
        return f"ended with {code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _serve(read: Callable[[Any], Any], pipe: Connection, parents_end: Connection) -> None:
    """In the worker: read requested batches until the parent is gone."""
    # otherwise this process would hold its own pipe open and never see the parent's end
    parents_end.close()
    parent = os.getppid()
    try:
        while True:
            # other workers may have inherited the parent's end, so the end of file alone is not enough
            while not pipe.poll(_LOOK):
                if os.getppid() != parent:
                    return
            _Message.send(pipe.fileno(), read(pipe.recv()))
    except (EOFError, OSError):
        return
