"""Liveness and progress of ranks, exchanged through the group's store.

Every rank publishes a heartbeat each second. A peer on the same host is alive while its process exists, because a
process that compiles or saves may be too busy for its heartbeat; a peer on another host is lost after 15 seconds
without one.
"""

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
_FAREWELL = 5.0
# seconds without a beat after which a peer on another host is gone
_SILENCE = 15.0


class PeerTimeout(RuntimeError):
    """A rank is gone or timed out; the message names it, its host, and the call that waited."""


class CollectiveMismatch(RuntimeError):
    """Ranks made different calls, or the same with other shapes; the message has both."""


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
        machine = boot.read_text().strip() if boot.is_file() else socket.gethostname()
        machine += os.readlink(namespace) if namespace.exists() else ""
        process = psutil.Process()
        return Peer(rank, dist.get_rank(), socket.gethostname(), machine, process.pid, process.create_time())

    def __str__(self) -> str:
        return f"rank {self.global_rank} (host {self.host}, process {self.pid})"

    def runs(self) -> bool:
        """Whether its process is there; for peers on this machine."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 1.0
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
    """Liveness of a group's ranks. `calls`: number of calls this rank has begun, counted by the owner."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self.calls = group.rank(), group.size(), 0
        store = dist.distributed_c10d._get_default_store()
        # a connection of its own, where the store supports it: a long `get` elsewhere must not delay heartbeats
        store = store.clone() if hasattr(store, "clone") else store
        self.here = Peer.here(self.rank)
        everyone: list[Any] = [None] * self.size
        # by a collective, not through the store: torchrun's may still hold entries from before a restart
        dist.all_gather_object(everyone, (self.here, uuid4().hex), group=group)
        self.all: list[Peer] = [peer for peer, _ in everyone]
        # keys of this object only: earlier entries may belong to a transport that was closed since
        life = f"{group.group_name} {everyone[0][1]}"
        self._store: Any = dist.PrefixStore(f"powertrain/peers/{life}", store)  # type: ignore[attr-defined]
        self._beats: dict[int, tuple[int, float]] = {}
        self._beat = 0
        self._waits: _Wait | None = None
        self._reported: _Wait | None = None
        self.close = in_background(self, _beat)

    def beat(self) -> None:
        """Publish a heartbeat. A lost store is ignored: liveness on the same host uses the pid."""
        self._beat += 1
        try:
            self._store.set(f"beat {self.rank}", f"{self._beat} {self.calls}")
        except dist.DistError:
            pass

    def broadcast_failure(self, why: str) -> None:
        """Publish that this rank's calls end in an error from now on."""
        try:
            self._store.set(f"gave up {self.rank}", why)
        except dist.DistError:
            pass

    def reported_failure(self) -> str | None:
        """The rank that reported a failure, and its reason; None if there is none."""
        for peer in self.all:
            key = f"gave up {peer.rank}"
            try:
                if peer.rank != self.rank and self._store.check([key]):
                    return f"{peer} gave up: {self._store.get(key).decode()}"
            except dist.DistError:
                return None
        return None

    def _published(self, rank: int) -> _Beat | None:
        """A rank's last published counters."""
        try:
            key = f"beat {rank}"
            if not self._store.check([key]):
                return None
            beat, calls = self._store.get(key).split()
        except dist.DistError:
            return None
        return _Beat(int(beat), int(calls))

    def gone(self) -> list[Peer]:
        """Ranks that are certainly lost."""
        now, lost = time.monotonic(), []
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
        whom = listed(late) if late else "ranks that are in this call, too"
        tracing.progress(f"rank {self.here.global_rank}: {waits.call} has waited {_QUIET:.0f} s for {whom}")

    def lost(self, call: str, error: Exception) -> PeerTimeout:
        """The error for a failed library call: it names the lost ranks, or reports a timeout."""
        # a connection closes before its process leaves the process table
        deadline = time.monotonic() + _FAREWELL
        while not (gone := self.gone()) and time.monotonic() < deadline:
            time.sleep(0.1)
        where = f"rank {self.here.global_rank}: {call} cannot end"
        if gone:
            return PeerTimeout(f"{where}: {listed(gone)} {'are' if len(gone) > 1 else 'is'} gone")
        return PeerTimeout(f"{where}, though every rank's process is there: {error}")


def listed(peers: list[Peer]) -> str:
    return ", ".join(map(str, peers))


def in_background(owner: Any, run: Callable[[Any, threading.Event], None]) -> Callable[[], Any]:
    """A thread of run(weak reference to the owner, event that ends it); the call that ends it.

    It ends with its owner, too, and before the interpreter does: a thread that is inside torch then aborts the process.
    """
    closed = threading.Event()
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
        del here
        if closed.wait(_BEAT):
            return
