"""Every attention backend by name, and the backwards that differentiate a forward of another backend."""

import importlib
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from powertrain.ops.attention.backends import flash_attn, sdpa
from powertrain.ops.attention.backends.reference import run_reference
from powertrain.ops.attention.problem import AttentionCall, AttentionProblem, Reason, use
from powertrain.runtime import dispatch
from powertrain.runtime.dispatch import Op
from powertrain.runtime.gc_disabled import gc_disabled
from powertrain.runtime.settings import settings


class Backend(Protocol):
    """One way to compute attention."""

    name: str
    uses_philox_seed: bool  # dropout is that of `attention_keep`, from the call's seed

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        """Every unmet requirement of the forward (and of its own backward, unless that is in `BACKWARDS`)."""

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """(out, lse), differentiable; lse may be None unless the call wants it."""


class _Lazy:
    # importing Triton and Gluon takes long, and most CPU processes never need them
    """A backend of ours whose module has `why_not(problem)` and `run(call)`; the module is imported on first use."""

    def __init__(self, name: str, module: str, uses_philox_seed: bool = True) -> None:
        self.name, self._module, self.uses_philox_seed = name, module, uses_philox_seed
        self._loaded: Any = None  # Dynamo cannot trace an import, so `run` does not make it

    def _load(self) -> Any:
        if self._loaded is None:
            with gc_disabled():
                self._loaded = importlib.import_module(self._module)
        return self._loaded

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        # powertrain.disable names ops: both of our GPU backends compute the same op
        if self.name in ("hopper", "triton"):
            name = "varlen_attention" if problem.layout == "thd" else "attention"
            if dispatch.is_disabled("attention") or dispatch.is_disabled(name):
                yield Reason(f'switched off by powertrain.disable("{name}") or POWERTRAIN_DISABLE', "leave that out")
            # the interpreter runs kernels on CPU tensors
            if problem.target is None and not settings().interpret:
                yield Reason("it runs on a GPU only, got the CPU", use("chunked", "cpu"), "move the tensors to a GPU")
                # no need to import Triton for that
                return
        yield from self._load().why_not(problem)

    def run(self, call: AttentionCall, **options: Any) -> tuple[Tensor, Tensor | None]:
        # `why_not` was asked first, which loads the module
        result: tuple[Tensor, Tensor | None] = self._loaded.run(call, **options)
        return result


class Reference:
    """The specification itself: it supports every call, and holds the whole score matrix in memory."""

    name = "reference"
    uses_philox_seed = True

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        return iter(())

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return run_reference(call)


# the order here is only that of the documentation; backend_order.py has the order of trial
_ALL: tuple[Backend, ...] = (
    _Lazy("triton", "powertrain.ops.attention.triton.backend"),
    _Lazy("hopper", "powertrain.ops.attention.hopper.backend", uses_philox_seed=False),
    sdpa.Cudnn(),
    sdpa.Flash(),
    sdpa.Efficient(),
    flash_attn.FlashAttention4(),
    flash_attn.FlashAttention3(),
    flash_attn.FlashAttention2(),
    sdpa.Cpu(),
    _Lazy("chunked", "powertrain.ops.attention.backends.chunked"),
    Reference(),
)
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in _ALL}

# backwards that need only out and LSE of any forward; modules with `backward_why_not(problem)` and `backward_op`
BACKWARDS = {
    "hopper": "powertrain.ops.attention.hopper.backend",
    "cudnn": "powertrain.ops.attention.backends.cudnn_backward",
    "triton": "powertrain.ops.attention.triton.backend",
}
# forwards whose saved tensors these backwards read, `run(call, backward=name)`; all others differentiate themselves
SEPARABLE = ("hopper",)


def backward_why_not(name: str, problem: AttentionProblem) -> Iterator[Reason]:
    """Every unmet requirement of a backward of `BACKWARDS` that is known without tensors."""
    # imported at the question, as the backends are
    reasons: Iterator[Reason] = importlib.import_module(BACKWARDS[name]).backward_why_not(problem)
    return reasons


loaded_backwards: dict[str, Op] = {}  # by name, those that `backward_op` was asked for: Dynamo traces no import


def backward_op(name: str) -> Op:
    """The op that differentiates from out and LSE."""
    # Dynamo cannot trace an import: an eager call or the decision at trace time loads it
    if name not in loaded_backwards:
        loaded_backwards[name] = importlib.import_module(BACKWARDS[name]).backward_op
    return loaded_backwards[name]
