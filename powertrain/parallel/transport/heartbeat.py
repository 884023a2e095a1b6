"""Liveness and progress of ranks, exchanged through the group's store.

Every rank publishes a heartbeat each second. A peer on the same host is alive while its process exists, because a
process that compiles or saves may be too busy for its heartbeat; a peer on another host is lost after 15 seconds
without one.
"""

import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import psutil
import torch.distributed as dist

from powertrain.runtime import tracing

_BEAT = 1.0  # seconds between a rank's beats
# seconds a wait on the host may take before a line says for whom
_QUIET = 5.0
# seconds that a process may take to disappear after its connections did
_END_TIMEOUT = 5.0
# seconds without a beat after which a peer on another host is gone
_SILENCE = 15.0


class PeerTimeout(RuntimeError):
    """A rank is gone or timed out; the message names it, its host, and the call that waited."""


class CollectiveMismatch(RuntimeError):
    """Ranks made different calls, or the same with other shapes; the message has both."""


def compare_calls(mine: str, group: dist.ProcessGroup) -> None:
    """Raise CollectiveMismatch on every rank unless all ranks describe their call in the same words."""
    # by pickled text: calls of any kind can be compared
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    other = next((rank for rank, text in enumerate(everyone) if text != everyone[0]), None)
    if other is not None:
        raise CollectiveMismatch(
            f"ranks must make the same calls: rank 0 makes {everyone[0]}; rank {other} makes {everyone[other]}"
        )


@contextmanager
def first_call(what: str) -> Iterator[None]:
    """Context of a group's first collective call: ranks are not known yet, so errors cannot name a late or lost one."""
    rank = dist.get_rank()
    line = f"rank {rank}: {what} has waited {_QUIET:.0f} s for ranks of its group that have not begun it"
    timer = threading.Timer(_QUIET, tracing.progress, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    except CollectiveMismatch:
        raise
    except (RuntimeError, dist.DistError) as error:
        raise PeerTimeout(
            f"rank {rank}: {what} cannot begin: a rank of its group is gone or did not start it: {error}"
        ) from error
    finally:
        timer.cancel()


@dataclass(frozen=True)
class Peer:
    """Location of a rank. `machine`: identifies a host, and a process namespace of it."""

    rank: int
    global_rank: int
    host: str
    machine: str
    pid: int
    started: float

    @staticmethod
    def here(rank: int) -> "Peer":
        boot = Path("/proc/sys/kernel/random/boot_id")
        namespace = Path("/proc/self/ns/pid")
        # the boot id is one per host, whatever the host is called in a container
        machine = boot.read_text().strip() if boot.is_file() else socket.gethostname()
        machine += os.readlink(namespace) if namespace.exists() else ""
        process = psutil.Process()
        return Peer(rank, dist.get_rank(), socket.gethostname(), machine, process.pid, process.create_time())

    def __str__(self) -> str:
        return f"rank {self.global_rank} (host {self.host}, process {self.pid})"

    def runs(self) -> bool:
        """Whether the peer's process exists; for peers on this machine."""
        try:
            process = psutil.Process(self.pid)
            # the start time tells it from a later process with the same id
            same = abs(process.create_time() - self.started) < 1.0
            # a zombie has ended and waits for its parent only
            return same and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.NoSuchProcess:
            return False


class _Beat(NamedTuple):
    """Counters that a rank publishes: heartbeats, and calls begun."""

    number: int
    calls: int


class _Wait(NamedTuple):
    """A call on which the host waits; number: of the call in this group; since: time.monotonic() of its start."""

    call: str
    number: int
    since: float


class Heartbeat:
    """Liveness of a group's ranks.

    calls    number of calls this rank has begun, counted by the owner
    store_host   the rank of the group whose process hosts the store; None: another process does, or it is not known
    """

    def __init__(self, group: dist.ProcessGroup, store_host: int | None = None) -> None:
        self.rank, self.size, self.calls = group.rank(), group.size(), 0
        store = dist.distributed_c10d._get_default_store()
        # a connection of its own, where the store supports it: a long `get` elsewhere must not delay heartbeats
        store = store.clone() if hasattr(store, "clone") else store
        self.here = Peer.here(self.rank)
        everyone: list[Any] = [None] * self.size
        # by a collective, not through the store: torchrun's may still hold entries from before a restart
        with first_call("the first call of this group"):
            dist.all_gather_object(everyone, (self.here, uuid4().hex), group=group)
        self.all: list[Peer] = [peer for peer, _ in everyone]
        # keys of this object only: earlier entries may belong to a transport that was closed since
        life = f"{group.group_name} {everyone[0][1]}"
        self._store: Any = dist.PrefixStore(f"powertrain/peers/{life}", store)  # type: ignore[attr-defined]
        self._store_host = None if store_host is None else self.all[store_host]
        self._has_store = True
        self._beats: dict[int, tuple[int, float]] = {}
        self._beat = 0
        self._failed, self._learnt = False, 0.0
        self._reason: str | None = None
        self._waits: _Wait | None = None
        self._reported: _Wait | None = None
        self.close = in_background(self, _beat)

    def beat(self) -> None:
        """Publish a heartbeat. A lost store is ignored: liveness on the same host uses the pid."""
        self._beat += 1
        if not self._has_store:
            return
        with self._stored():
            self._store.set(f"beat {self.rank}", f"{self._beat} {self.calls}")

    @contextmanager
    def _stored(self) -> Iterator[None]:
        """Around calls of the store. None is made after one has failed: torch prints a stack at each."""
        try:
            yield
        except dist.DistError:
            self._has_store = False

    def broadcast_failure(self, why: str) -> None:
        """Publish that this rank's calls end in an error from now on."""
        self._failed = True
        if not self._has_store:
            return
        with self._stored():
            self._store.set(f"gave up {self.rank}", why)
            # one key to look at; only if it is there are those of all ranks looked at
            self._store.set("failure", "")

    def reported_failure(self) -> str | None:
        """The rank that reported a failure, and its reason; None if there is none."""
        if self._reason or not self._has_store:
            return self._reason
        with self._stored():
            for peer in self.all if self._store.check(["failure"]) else ():
                key = f"gave up {peer.rank}"
                if peer.rank != self.rank and self._store.check([key]):
                    why = self._store.get(key).decode()
                    # kept: once it is heard, the store may go
                    self._reason = f"{peer} gave up: {why}"
                    self._store.set(f"heard {self.rank}", "")
                    break
        return self._reason

    def wait_until_heard(self) -> None:
        """After a failure, if this process hosts the store: wait until the others have read it, failed or ended."""
        # of another rank's failure too: those that are later would find no store, and name all who have ended
        has_failure = self._failed or self._reason is not None
        if not has_failure or not self._has_store or self._store_host != self.here:
            return
        deadline, left = time.monotonic() + _END_TIMEOUT, [peer for peer in self.all if peer.rank != self.rank]
        with self._stored():
            while left and time.monotonic() < deadline:
                gone = self.gone()
                left = [peer for peer in left if peer not in gone and not self._has_heard(peer.rank)]
                time.sleep(0.05)

    def _has_heard(self, rank: int) -> bool:
        return any(self._store.check([f"{word} {rank}"]) for word in ("heard", "gave up"))

    def _published(self, rank: int) -> _Beat | None:
        """A rank's last published counters."""
        if not self._has_store:
            return None
        with self._stored():
            key = f"beat {rank}"
            if self._store.check([key]):
                beat, calls = self._store.get(key).split()
                return _Beat(int(beat), int(calls))
        return None

    def gone(self) -> list[Peer]:
        """Ranks that are certainly lost."""
        now, lost = time.monotonic(), []
        # the store ends with the process that keeps it
        if (
            self._store_host is not None
            and self._store_host.machine == self.here.machine
            and not self._store_host.runs()
        ):
            self._has_store = False
        for peer in self.all:
            if peer.rank == self.rank:
                continue
            # same host: the process table is immediate and immune to a busy peer
            if peer.machine == self.here.machine:
                if not peer.runs():
                    lost.append(peer)
                continue
            heard = self._published(peer.rank)
            beat = heard.number if heard is not None else -1
            # ages are taken on this host's clock; clocks of two hosts may differ
            last, since = self._beats.get(peer.rank, (beat, now))
            if beat != last:
                since = now
            self._beats[peer.rank] = beat, since
            if now - since > _SILENCE:
                lost.append(peer)
        return lost

    def behind(self, calls: int) -> list[Peer]:
        """Ranks that have begun fewer calls than this one, by their published counts."""
        published = [(peer, self._published(peer.rank)) for peer in self.all if peer.rank != self.rank]
        return [peer for peer, heard in published if heard is None or heard.calls < calls]

    @contextmanager
    def waiting(self, call: str) -> Iterator[None]:
        """Context of a wait on the host: after 5 s the heartbeat thread logs the late ranks."""
        self._waits = _Wait(call, self.calls, time.monotonic())
        try:
            yield
        finally:
            self._waits = None

    def report_late_ranks(self) -> None:
        waits = self._waits
        if waits is None or waits is self._reported or time.monotonic() - waits.since < _QUIET:
            return
        self._reported = waits
        late = self.behind(waits.number)
        # no rank is late: all are in the call, and the link or a collective hangs
        whom = listed(late) if late else "ranks that are in this call, too"
        tracing.progress(f"rank {self.here.global_rank}: {waits.call} has waited {_QUIET:.0f} s for {whom}")

    def report_failure_of_another(self) -> None:
        """After a while: the host may wait for a GPU whose NCCL waits for a rank that failed, and find out late."""
        if self._failed or not (why := self.reported_failure()):
            return
        self._learnt = self._learnt or time.monotonic()
        if time.monotonic() - self._learnt > _QUIET:
            tracing.progress(f"rank {self.here.global_rank}: {why}")
            self._learnt = math.inf

    def lost(self, call: str, error: Exception) -> PeerTimeout:
        """The error for a failed library call: it names the lost ranks, or reports a timeout."""
        # a connection closes before its process leaves the process table
        deadline = time.monotonic() + _END_TIMEOUT
        # a moment later the operating system knows which process ended
        while not (gone := self.gone()) and time.monotonic() < deadline:
            time.sleep(0.1)
        where = f"rank {self.here.global_rank}: {call} cannot end"
        if gone:
            return PeerTimeout(f"{where}: {listed(gone)} {'are' if len(gone) > 1 else 'is'} gone")
        return PeerTimeout(f"{where}, though every rank's process is there: {error}")


def listed(peers: list[Peer]) -> str:
    return ", ".join(map(str, peers))


def in_background(owner: Any, run: Callable[[Any, threading.Event], None]) -> Callable[[], Any]:
    """Start a thread that calls run(weak reference to the owner, stop event); returns the function that stops it.

    It ends with its owner, too, and before the interpreter does: a thread that is inside torch then aborts the process.
    """
    closed = threading.Event()
    # daemon: it must not keep the interpreter alive
    thread = threading.Thread(target=run, args=(weakref.ref(owner), closed), daemon=True)
    thread.start()
    return weakref.finalize(owner, _end, thread, closed)


def _end(thread: threading.Thread, closed: threading.Event) -> None:
    closed.set()
    if thread is not threading.current_thread():
        thread.join(timeout=10)


def _beat(peers: Any, closed: threading.Event) -> None:
    """The thread of one Heartbeat, which it does not keep alive."""
    while (here := peers()) is not None:
        here.beat()
        here.report_late_ranks()
        here.report_failure_of_another()
        # no strong reference while it sleeps, or the owner would never be collected
        del here
        if closed.wait(_BEAT):
            return
