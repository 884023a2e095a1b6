"""transformer_engine.pytorch.distributed: checkpoint, and a random generator's states by name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.quantization import active, restored

__all__ = ["CudaRNGStatesTracker", "checkpoint"]


class CudaRNGStatesTracker:
    """States of the GPU's random generator by name (of the CPU's where there is no GPU).

    Fork(name) draws from one of them.
    """

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        """A copy of the states by name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Take these states; graph-safe ones are tensors too."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """A new state from a seed. Raises RuntimeError for a seed or a name that there is already."""
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} already exists")
        if name in self.states_:
            raise RuntimeError(f"cuda rng state {name} already exists")
        # the generator is used for the seed only, and put back
        before = _state()
        torch.manual_seed(seed) if not torch.cuda.is_available() else torch.cuda.manual_seed(seed)
        self.states_[name] = _state()
        self.seeds_.add(seed)
        _set_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """What is drawn inside is drawn from the state `name`, which goes on from there next time."""
        if name not in self.states_:
            raise RuntimeError(f"cuda rng state {name} is not added; there is {', '.join(self.states_) or 'none'}")
        before = _state()
        _set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _state()
            _set_state(before)


def _state() -> Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    torch.cuda.set_rng_state(state) if torch.cuda.is_available() else torch.set_rng_state(state)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], CudaRNGStatesTracker] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """function(*args, **kwargs), made again in backward, with the tracker's states and FP8's autocast as they were.

    distribute_saved_activations is refused. use_reentrant False is what is done either way; tp_group is not needed
    then.
    """
    if distribute_saved_activations:
        raise NotImplementedError(
            "checkpoint: distribute_saved_activations is not supported; nearest: sequence parallel"
        )
    # recomputation happens in backward, outside of the user's autocast
    function = _as_now(function)
    if get_rng_state_tracker is None:
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    tracker = get_rng_state_tracker()
    # states at the time of the call: the recomputation draws from them
    before = tracker.get_states()
    first = True

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        # the first run draws from the tracker as it is, later ones are recomputations
        if first:
            first = False
            return function(*args, **kwargs)
        now = tracker.get_states()
        tracker.set_states(dict(before))
        try:
            return function(*args, **kwargs)
        finally:
            tracker.set_states(now)

    return torch_checkpoint(run, *args, use_reentrant=False, **kwargs)


def _as_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under the `autocast` of this moment whenever it is called."""
    quantizing = active()

    def run(*args: Any, **kwargs: Any) -> Any:
        with restored(quantizing):
            return function(*args, **kwargs)

    return run


__getattr__ = unknown(__name__)
