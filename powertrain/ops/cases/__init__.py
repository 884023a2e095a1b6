"""Representative calls of every op, used by `powertrain check`, `tune`, `prebuild`, and by the generic tests.

A module per op file defines CASES. `run` is ours, `reference` the specification, `plain` the obvious code in
PyTorch; all take the tensors by name. `inputs(shape, dtype, device)` makes them, those that want a gradient set.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = Callable[[tuple[int, ...], torch.dtype, torch.device], dict[str, Tensor | None]]


@dataclass(frozen=True)
class Case:
    op: str  # the name in powertrain and in disable()
    label: str  # the distinguishing feature of this call, "" for the plain one
    run: Callable[..., Any]
    reference: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: Inputs
    tiny: tuple[int, ...]  # a shape for the interpreter: few programs, odd tails
    full: tuple[int, ...]  # a shape for a GPU: that of the benchmark
    slack: int = 0  # of the judge: see testing/numerics.py

    @property
    def id(self) -> str:
        return f"{self.op}-{self.label}" if self.label else self.op

    def step(self, tensors: dict[str, Tensor | None]) -> None:
        """One forward and backward."""
        result = self.run(**tensors)
        outputs = [out for out in (result if isinstance(result, tuple) else (result,)) if out.requires_grad]
        torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])


def cases(op: str | None = None) -> list[Case]:
    """All cases, or those of one op."""
    every: list[Case] = []
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        every += importlib.import_module(f"{__name__}.{module}").CASES
    return [case for case in every if op in (None, case.op)]


def randn(*shape: int, dtype: torch.dtype, device: torch.device, grad: bool = True) -> Tensor:
    """Standard normal values (nothing random on meta tensors)."""
    return torch.randn(*shape, dtype=torch.float32, device=device).to(dtype).requires_grad_(grad)
