"""transformer_engine.pytorch.ops.sequential: operations in a row, some of which take or give further tensors."""

from typing import Any

from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.ops.conversion import unsupported
from powertrain.runtime import checks

__all__ = ["Sequential"]


class Sequential(nn.Sequential):
    """torch.nn.Sequential, with the further inputs and outputs of its operations.

    forward(input, *extra_inputs): each operation takes as many of extra_inputs as its num_extra_inputs says; the
    result is the last one's output, or a tuple of it and the operations' extra outputs. Nothing is fused across
    operations; each is one of our ops. op_kwargs is refused. Raises ValueError for another number of extra_inputs.
    """

    def forward(self, input: Tensor, *extra_inputs: Tensor, op_kwargs: dict[Any, Any] | None = None) -> Any:
        if op_kwargs:
            unsupported("Sequential", "op_kwargs", list(op_kwargs), "None")
        wanted = [getattr(module, "num_extra_inputs", 0) for module in self]
        given = len(extra_inputs)
        checks.require(given == sum(wanted), "Sequential", "extra_inputs", f"be {sum(wanted)} tensors", given)
        x, outputs = input, []
        for module, count in zip(self, wanted, strict=True):
            result = module(x, *extra_inputs[:count])
            extra_inputs = extra_inputs[count:]
            if getattr(module, "num_extra_outputs", 0):
                x, *more = result
                outputs += more
            else:
                x = result
        return (x, *outputs) if outputs else x


__getattr__ = unknown(__name__)
