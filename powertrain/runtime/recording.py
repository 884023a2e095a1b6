"""Recording which kernels a computation would need, without running them; and pretending to be another GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from powertrain.runtime.target import Target, pretended

if TYPE_CHECKING:
    from powertrain.runtime.compile import Spec


class Recording:
    """The specializations that launches inside `record()` would have needed, each once, in the order met."""

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
    """Process-wide, because backward launches from autograd's own threads."""

    recording: Recording | None = None
    emulated: Target | None = None
    active = False  # launches take the slow path: something wants to see or to change them

    def update(self) -> None:
        self.active = self.recording is not None or self.emulated is not None
        recorded = self.recording.target if self.recording is not None else None
        pretended.target = recorded or self.emulated


state = _State()


@contextmanager
def record(target: Target | str | None = None) -> Iterator[Recording]:
    """Inside, launches do not run; they note which specializations they need.

    `with record("sm_80") as wanted:` run a step on meta tensors; `wanted.specs` is what it would launch there. Without
    a target the tensors must be on a real GPU. Outputs are not computed. For the whole process; not re-entrant.
    """
    if state.recording is not None:
        raise RuntimeError("record: already recording; record() cannot be nested")
    state.recording = Recording(Target.parse(target) if isinstance(target, str) else target)
    state.update()
    try:
        yield state.recording
    finally:
        state.recording = None
        state.update()


@contextmanager
def emulate(target: Target | str) -> Iterator[None]:
    """Inside, kernels are planned and compiled for `target`, and its PTX is compiled by this GPU's driver and run.

    Code for sm_80, 86 and 89 runs on every later GPU this way: how older archs' kernels are tested on a newer one.
    """
    before, state.emulated = state.emulated, Target.parse(target) if isinstance(target, str) else target
    state.update()
    try:
        yield
    finally:
        state.emulated = before
        state.update()
