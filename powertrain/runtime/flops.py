"""Floating-point operations of an op's matrix products, for torch.utils.flop_counter.FlopCounterMode.

Each Op has its formula (`flops=`), a function of the op's arguments by name, tensors as their shapes. It counts as
PyTorch's own formulas do: 2 for a multiply-add, no elementwise work, attention without its mask (packed sequences: as
if all were equally long). A FlopCounterMode sees the formulas of modules imported before it was made, as a model's are
when it is built.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.flop_counter import register_flop_formula

Shape = Sequence[int]
Formula = Callable[..., int]


def register(packet: Any, formula: Formula) -> None:
    """Register an op's formula with PyTorch. `packet` is `torch.ops.powertrain.NAME`."""
    names = [argument.name for argument in packet.default._schema.arguments]

    def by_name(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return formula(**dict(zip(names, args, strict=False)), **kwargs)

    register_flop_formula(packet)(by_name)
