"""Which backend serves a problem, in an order measured per arch, and why the others do not."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from powertrain.ops.attention.problem import AttentionCall, AttentionProblem, Reason
from powertrain.ops.attention.reference import run_reference


class Backend(Protocol):
    """One way to compute attention."""

    name: str
    draws_keep: bool  # dropout is that of `attention_keep`, from the call's seed

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        """Every need of this backend that the problem does not meet."""

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """(out, lse), differentiable; lse may be None unless the call wants it."""


class Reference:
    name = "reference"
    draws_keep = True

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        return iter(())

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return run_reference(call)


_decisions: dict[Any, Backend] = {}


def choose(key: Any, problem: Callable[[], AttentionProblem], backend: str | Sequence[str] | None) -> Backend:
    """The backend for a problem, cached under `key`, which holds all that the problem's facts depend on."""
    found = _decisions.get(key)
    if found is None:
        found = _decisions[key] = Reference()
    return found
