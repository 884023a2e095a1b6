"""Diagnosis of a bad loss or gradient: the batch is repeated with hooks, to name the first bad module."""

import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_WINDOW, _FEWEST = 100, 20
# their losses are means over many tokens; those of pairs and completions come near 0 or below, where some are several
# times the median by chance
_WATCHED = ("pretrain", "sft", "distill")


class SpikeWatch:
    """Detects a loss of more than `factor` times the median of the last 100; none with factor 0, or an objective whose
    losses vary more."""

    def __init__(self, factor: float, objective: str = "pretrain") -> None:
        self.factor = factor if objective in _WATCHED else 0.0
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    def median_if_spike(self, loss: float) -> float | None:
        """The median of the last losses if this loss is a spike, else None; the first 20 losses are never spikes."""
        median = statistics.median(self._losses) if len(self._losses) >= _FEWEST else None
        if self.factor and median is not None and loss > self.factor * median:
            return median
        self._losses.append(loss)
        return None


def diagnose(
    model: nn.Module, loss_of_batch: Callable[[], Tensor], backward: Callable[[Tensor], Any] = Tensor.backward
) -> str:
    """One forward and backward under hooks; a sentence with the first module whose output or gradient is not finite.

    Slow: it waits for the device at every module. Parameters are not changed; their gradients are dropped. Always one
    forward and one backward, even if the forward gives the answer: on other ranks it may not, and their collectives
    wait for this rank in both.
    backward   called with the loss; pipeline stages repeat the batch as a step
    """
    outputs: list[tuple[str, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: outputs.append((name, _worst(output))))
        for name, module in model.named_modules()
        if name
    ]
    try:
        loss = loss_of_batch()
    finally:
        for hook in hooks:
            hook.remove()
    gradients = _bad_gradients(model, loss, backward)
    for name, p in model.named_parameters():
        if not _local(p).isfinite().all():
            return f"the weight {name} is not finite"
    for name, worst in outputs:
        if not worst.isfinite():
            return f"the first module whose output is not finite is {name}"
    module, largest = max(outputs, key=lambda output: float(output[1]))
    summary = f"every output is finite, the largest is {float(largest):.3g}, of {module}"
    if not loss.isfinite():
        return f"{summary}; the loss itself is not finite"
    return f"{summary}; {gradients}"


def _bad_gradients(model: nn.Module, loss: Tensor, backward: Callable[[Tensor], Any]) -> str:
    # another step's may be there
    model.zero_grad()
    backward(loss)
    # backward goes from the last parameter to the first
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not _local(p.grad).isfinite().all()]
    model.zero_grad()
    return f"the first gradient that is not finite is that of {bad[-1]}" if bad else "every gradient is finite"


def _worst(output: Any) -> Tensor:
    """The largest magnitude in a module's output, nan and inf included."""
    tensors = [t for t in (output if isinstance(output, tuple) else (output,)) if isinstance(t, Tensor)]
    values = [_local(t).detach().abs().max().float() for t in tensors if t.is_floating_point() and t.numel()]
    # max() of values with a nan among them is nan in torch
    return torch.stack(values).max() if values else torch.zeros(())


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t
