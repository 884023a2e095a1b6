"""Records the kernels that a computation would launch, without running them; emulates another GPU."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from powertrain.runtime import checks, invalidation
from powertrain.runtime.target import Target, pretended

if TYPE_CHECKING:
    from powertrain.runtime.compile.service import Spec


class Recording:
    """The specializations that launches inside `record()` would need, each once, in launch order."""

    def __init__(self, target: Target | None) -> None:
        self.target = target
        self._specs: dict[str, Spec] = {}

    def add(self, spec: "Spec") -> None:
        self._specs.setdefault(spec.key, spec)

    @property
    def specs(self) -> "list[Spec]":
        return list(self._specs.values())

    def __len__(self) -> int:
        return len(self._specs)


class _State:
    """Global to the process, not thread-local, because backward launches from autograd's own threads."""

    recording: Recording | None = None
    everything = False  # launches on real tensors are recorded too, and do not run
    redirected = False  # launches on real tensors are recorded or go to another target
    active = False  # launches on real tensors take the slow path: they are redirected or observed
    _observers = 0
    _counting = threading.Lock()

    def redirect(self, on: bool) -> None:
        with self._counting:
            self.redirected = on
            self.active = on or self._observers > 0
        # another thread's call that is being observed loses launches, or launches another target's kernels
        if on:
            invalidation.changed()

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Inside, launches run and take the slow path, which shows them to runtime/replay.py."""
        self._observe(1)
        try:
            yield
        finally:
            self._observe(-1)

    def _observe(self, more: int) -> None:
        with self._counting:
            self._observers += more
            self.active = self.redirected or self._observers > 0


state = _State()
_one_at_a_time = threading.RLock()


def _after_fork() -> None:
    """End another thread's recording in a forked child, which does not have that thread."""
    global _one_at_a_time
    if not _one_at_a_time._is_owned():  # type: ignore[attr-defined]
        _one_at_a_time = threading.RLock()
        state.recording = pretended.recorded = pretended.emulated = None
        state.everything = state.redirected = state.active = False
        state._observers, state._counting = 0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def record(target: Target | str | None = None) -> Iterator[Recording]:
    """Inside, launches on meta tensors do not run; the specializations they need are recorded.

    `with record("sm_80") as recording:` run a step on meta tensors; `recording.specs` lists its launches on sm_80.
    Launches on real tensors run as usual. Without a target, launches on this machine's GPUs are recorded and do not
    run. Not re-entrant; a second thread waits. Raises ValueError for a target that is none.
    """
    if target is not None and not isinstance(target, Target | str):
        checks.fail("record", "target", "be a Target, the name of a GPU or None", checks.described(target))
    with _one_at_a_time:
        if state.recording is not None:
            raise RuntimeError("record: already recording; record() cannot be nested")
        state.recording = Recording(Target.parse(target) if isinstance(target, str) else target)
        state.everything = target is None
        emulated = state.redirected
        state.redirect(emulated or target is None)
        pretended.recorded = state.recording.target
        try:
            yield state.recording
        finally:
            state.recording = pretended.recorded = None
            state.everything = False
            state.redirect(emulated)


@contextmanager
def emulate(target: Target | str) -> Iterator[None]:
    """Inside, kernels are planned and compiled for `target`, and its PTX is compiled by this GPU's driver and run.

    Code for sm_80, 86 and 89 runs on every later GPU this way: how older archs' kernels are tested on a newer one.
    """
    with _one_at_a_time:
        if state.redirected:
            raise RuntimeError("emulate: already recording or emulating; they cannot be nested")
        pretended.emulated = Target.parse(target) if isinstance(target, str) else target
        state.redirect(True)
        try:
            yield
        finally:
            pretended.emulated = None
            state.redirect(False)
