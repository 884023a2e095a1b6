"""Watchdog of a GPU's collective calls: reports the current call and the rank it waits for, and handles a lost rank.

A stream that waits for a flag in memory waits for ever and cannot raise. So a thread of each process reads the number
of the call that its stream is in. After five seconds in one call it names the late ranks. When one of them is gone, or
has been late for the process group's time-out, the thread sets the error flag, then sets every flag to 1 until the
stream is idle. Results computed meanwhile are invalid: the last kernel of each call fills its result with NaN where
the error flag is set. The next call raises PeerTimeout.

The thread launches no kernel: loading one for the first time waits for blocked streams, which hung an earlier version.
It copies and writes flags only.
"""

import threading
import time
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from powertrain.parallel.transport.collective import in_layer
from powertrain.parallel.transport.heartbeat import Heartbeat, PeerTimeout, in_background, listed
from powertrain.runtime import checks, tracing
from powertrain.runtime.driver import MemoryOps, write_word

_QUIET = 5.0  # seconds in one call before a line says whom it waits for
_POLL = 0.25
_REMEMBERED = 4096  # calls whose names are kept


class Call(NamedTuple):
    """A call on a stream: "all-gather" of [rows, features], in a layer of that name."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layer: str = ""

    def __str__(self) -> str:
        return f"{self.op} of {list(self.shape)} {checks.name(self.dtype)}{in_layer(self.layer)}"


class Watch:
    """error [1] and flags (all of them, contiguous): int32 on the device. number: of flags, evenly spaced in that."""

    def __init__(
        self,
        peers: Heartbeat,
        group: dist.ProcessGroup,
        device: torch.device,
        error: Tensor,
        flags: Tensor,
        number: int,
    ) -> None:
        self.device, self.error, self.flags = device, error, flags
        self.failure: PeerTimeout | None = None
        self.deadline = group._get_backend(device).options._timeout.total_seconds()
        self.peers = peers
        # pinned memory: the stream writes the number of its call (0: none), the thread reads it without a kernel
        self.running = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self._address = self.running.data_ptr()
        self._names: OrderedDict[int, Call] = OrderedDict()
        self._inside: list[tuple[Call, int]] = []
        self._stream = torch.cuda.Stream(device)
        self._seen = torch.zeros(flags.shape, dtype=torch.int32, device="cpu", pin_memory=True)
        step = flags.numel() // number
        first = flags.data_ptr()
        self._free_all = MemoryOps(write=[(first + 4 * step * i, 1) for i in range(number)])
        self.close = in_background(self, _look)

    def begin(self, call: Call, count: int, stream: int) -> None:
        """The count-th call of this group starts on a stream."""
        # 31 bits: the word in pinned memory is an int32
        number = count & 0x7FFFFFFF
        self._names[number] = call
        if len(self._names) > _REMEMBERED:
            self._names.popitem(last=False)
        self._inside.append((call, number))
        self._mark(stream)

    def end(self, call: Call, stream: int) -> None:
        """End a call; nested calls may end in any order."""
        index = next(i for i, (inside, _) in enumerate(self._inside) if inside is call)
        del self._inside[index]
        self._mark(stream)

    def inside(self) -> Call | None:
        """The innermost call that has not ended."""
        return self._inside[-1][0] if self._inside else None

    def _mark(self, stream: int) -> None:
        number = self._inside[-1][1] if self._inside else 0
        write_word(self._address, number, stream)

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise PeerTimeout(str(self.failure))

    def state(self) -> tuple[int, bytes]:
        """The call that the stream is in, and all flags: unchanged for seconds, it waits."""
        # a stream of its own: the others may be the ones that wait for ever
        with torch.cuda.stream(self._stream):
            self._seen.copy_(self.flags, non_blocking=True)
        self._stream.synchronize()
        return int(self.running), self._seen.numpy().tobytes()

    def fail(self, why: str, closed: threading.Event) -> None:
        """Release the streams, with the error flag set first; the next call raises."""
        self.failure = PeerTimeout(why)
        tracing.progress(why)
        stream = self._stream.cuda_stream
        with torch.cuda.device(self.device):
            # before any flag: a released stream must see the error, or it would hand on stale rows
            write_word(self.error.data_ptr(), 1, stream)
            self._stream.synchronize()
            # three idle polls: the stream may start another queued call between two of them
            quiet = 0
            while quiet < 3 and not closed.wait(0.05):
                # every flag: which ones the streams wait for is not known here
                self._free_all.enqueue(stream)
                self._stream.synchronize()
                quiet = quiet + 1 if int(self.running) == 0 else 0
        # last, because a store may be slow to answer. Other ranks need it: the flags set here let their streams run
        # on, so that their waits look alive and their own time-outs start again
        self.peers.broadcast_failure(why)


def _look(watch: Any, closed: threading.Event) -> None:
    """The thread: looks whether the stream still moves. It keeps no Watch alive."""
    since, before, reported = time.monotonic(), None, False
    while not closed.wait(_POLL):
        here: Watch | None = watch()
        if here is None or here.failure is not None:
            return
        now = time.monotonic()
        if int(here.running) == 0:
            since, before, reported = now, None, False
            continue
        state = here.state()
        if state != before:
            since, before, reported = now, state, False
        elif now - since > _QUIET:
            reported = _report(here, state[0], now - since, reported, closed)
        # between polls only a weak reference: the thread must not keep the transport alive
        del here


def _report(watch: Watch, number: int, seconds: float, reported: bool, closed: threading.Event) -> bool:
    call = watch._names.get(number, "a call in a captured graph")
    where = f"rank {watch.peers.here.global_rank}: {call} (call {number})"
    gone = watch.peers.gone()
    if gone:
        are, chunk = ("are", "their chunks") if len(gone) > 1 else ("is", "its chunk")
        watch.fail(f"{where} cannot end: {listed(gone)} {are} gone, so {chunk} cannot arrive; results are NaN", closed)
    elif (reason := watch.peers.reported_failure()) is not None:
        watch.fail(f"{where} cannot end: {reason}", closed)
    elif seconds > watch.deadline:
        watch.fail(f"{where} waited {seconds:.0f} s, the process group's time-out, for {_late(watch, number)}", closed)
    elif not reported:
        tracing.progress(f"{where} has waited {seconds:.0f} s for {_late(watch, number)}")
    return True


def _late(watch: Watch, number: int) -> str:
    late = watch.peers.behind(number)
    if not late:
        return "ranks that have come this far, too: they are in this call"
    return f"{listed(late)}, alive but not yet in this call: building kernels, saving or evaluating"
