"""apex.multi_tensor_apply.multi_tensor_apply."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from powertrain.compat.missing import unknown

__all__ = ["MultiTensorApply"]

T = TypeVar("T")


class MultiTensorApply:
    """Calls op(chunk_size, noop_flag_buffer, tensor_lists, *args)."""

    # code tests these attributes before it uses the applier
    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Nothing: it is always available."""

    def __call__(
        self, op: Callable[..., T], noop_flag_buffer: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: object
    ) -> T:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


__getattr__ = unknown(__name__)
