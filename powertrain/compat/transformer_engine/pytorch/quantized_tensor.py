"""transformer_engine.pytorch.quantized_tensor: the classes that its quantizers and their results derive from.

A result is a `QuantizedTensorStorage`, plain tensors with `dequantize`, as there of a quantizer whose `internal` is
True: it is no torch.Tensor, and autograd does not see it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["QuantizedTensorStorage", "Quantizer", "prepare_for_saving", "restore_from_func_ctx", "restore_from_saved"]


class QuantizedTensorStorage:
    """Quantized data of one tensor: row by row, of its transpose ("columnwise": last dim first), or both."""

    # attributes that hold its tensors: data, data of the transpose, then scales
    parts: ClassVar[tuple[str, ...]] = ()
    _dtype: torch.dtype
    _quantizer: "Quantizer | None"

    def _data_pair(self) -> tuple[Tensor | None, Tensor | None]:
        return getattr(self, self.parts[0]), getattr(self, self.parts[1])

    @property
    def shape(self) -> torch.Size:
        """That of the values."""
        data, transposed = self._data_pair()
        if data is not None:
            return data.shape
        checks.require(transposed is not None, type(self).__name__, "data", "be there", None)
        assert transposed is not None
        # the transpose has the values' last dim first
        return torch.Size((*transposed.shape[1:], *transposed.shape[:1]))

    def size(self, dim: int | None = None) -> Any:
        """shape, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensor that was quantized, and of `dequantize`'s result."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the data is."""
        return next(x.device for x in self._data_pair() if x is not None)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values, in `dtype`, or in the dtype of the tensor that was quantized. No gradient."""
        raise NotImplementedError(f"{type(self).__name__} has no dequantize")

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Make, keep (None) or drop the data and that of the transpose."""
        raise NotImplementedError(f"{type(self).__name__} has no update_usage")

    def get_usages(self) -> dict[str, bool]:
        """Which data there is."""
        data, transposed = self._data_pair()
        return {"rowwise": data is not None, "columnwise": transposed is not None}

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The data, that of the transpose, or both as a pair."""
        checks.require(rowwise_data or columnwise_data, type(self).__name__, "rowwise_data", "be True", False)
        data, transposed = self._data_pair()
        return (data, transposed) if rowwise_data and columnwise_data else data if rowwise_data else transposed

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> "QuantizedTensorStorage":
        """Quantize another tensor into this memory; where noop_flag is not 0, nothing changes."""
        if self._quantizer is None:
            checks.fail(type(self).__name__, "quantizer", "be given to quantize again", None)
        return self._quantizer.update_quantized(tensor, self, noop_flag=noop_flag)

    def prepare_for_saving(self) -> tuple[list[Tensor | None], "QuantizedTensorStorage"]:
        """Its tensors, for save_for_backward, and itself without them."""
        # autograd keeps them from here on; kept here too, they would outlive the graph
        tensors = [getattr(self, name) for name in self.parts]
        for name in self.parts:
            setattr(self, name, None)
        return tensors, self

    def restore_from_saved(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Take its tensors from the front of a list; returns the rest."""
        # the list goes on with the parts of other tensors
        for name, tensor in zip(self.parts, tensors, strict=False):
            setattr(self, name, tensor)
        return list(tensors[len(self.parts) :])


class Quantizer:
    """Makes quantized tensors; rowwise, columnwise: which data.

    internal and optimize_for_gemm can be set, as there, and change nothing: results are storages.
    """

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        self.internal = self.optimize_for_gemm = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rowwise_usage={self.rowwise_usage}, columnwise_usage={self.columnwise_usage})"

    def _quantized(self, x: Tensor) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
        """Parts of the storage of x, and new values of the quantizer's own tensors."""
        raise NotImplementedError(f"{type(self).__name__} must implement _quantized")

    def _storage(self, parts: dict[str, Tensor | None], dtype: torch.dtype) -> QuantizedTensorStorage:
        raise NotImplementedError(f"{type(self).__name__} must implement _storage")

    def quantize(
        self, tensor: Tensor, *, out: QuantizedTensorStorage | None = None, dtype: torch.dtype | None = None
    ) -> QuantizedTensorStorage:
        """tensor quantized, into `out` if given; dtype: of `dequantize`'s results, None: the tensor's."""
        if out is not None:
            return self.update_quantized(tensor, out)
        parts, state = self._quantized(tensor)
        for name, value in state.items():
            # in place: copies of a quantizer share its tensors
            getattr(self, name).copy_(value.view_as(getattr(self, name)))
        return self._storage(parts, dtype or tensor.dtype)

    def __call__(self, tensor: Tensor) -> QuantizedTensorStorage:
        return self.quantize(tensor)

    def multi_quantize(self, list_of_tensors: Iterable[Tensor]) -> list[QuantizedTensorStorage]:
        """Each of them quantized."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def update_quantized(
        self, src: Tensor, dst: QuantizedTensorStorage, *, noop_flag: Tensor | None = None
    ) -> QuantizedTensorStorage:
        """Quantize src into dst's memory, whichever data is there; where noop_flag is not 0, nothing changes."""
        op = f"{type(self).__name__}.update_quantized"
        # a storage of nothing tells the class, so no table of classes is needed
        kind = type(self._storage({}, src.dtype))
        checks.require(isinstance(dst, kind), op, "dst", f"be a {kind.__name__}", type(dst).__name__)
        checks.require(dst.shape == src.shape, op, "dst", f"have src's shape {list(src.shape)}", list(dst.shape))
        # a copy: dst may have other data than results of this quantizer
        maker, usages = self.copy(), dst.get_usages()
        maker.set_usage(**usages)
        parts, state = maker._quantized(src.to(dst.device))
        targets = {**{name: getattr(dst, name) for name in parts}, **{name: getattr(self, name) for name in state}}
        for name, value in {**parts, **state}.items():
            target = targets[name]
            if target is None or value is None:
                continue
            value = value.view_as(target)
            # chosen on the device: the host would have to wait for the flag
            target.copy_(value if noop_flag is None else torch.where(noop_flag.to(target.device) != 0, target, value))
        return dst

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensorStorage:
        """Memory for a quantized tensor of this shape, for `update_quantized`; its data is zeros, its scales are 1.

        On the GPU without a device. requires_grad must be False: a storage has no gradient.
        """
        op = f"{type(self).__name__}.make_empty"
        checks.require(not requires_grad, op, "requires_grad", "be False: a storage has no gradient", requires_grad)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        maker = self.copy()
        for name, value in list(vars(maker).items()):
            # a delayed scale's tensors need not be where the result is
            setattr(maker, name, value.to(device) if isinstance(value, Tensor) else value)
        # zeros are quantized because each format has its own parts and padding
        parts, _ = maker._quantized(torch.zeros(*shape, dtype=torch.float32, device=device))
        if pin_memory:
            parts = {name: None if part is None else part.pin_memory() for name, part in parts.items()}
        return self._storage(parts, dtype)

    def copy(self) -> "Quantizer":
        """Another quantizer with the same settings and the same tensors."""
        # without __init__, whose arguments differ by class
        made = type(self).__new__(type(self))
        vars(made).update(vars(self))
        return made

    def calibrate(self, tensor: Tensor) -> None:
        """Take the tensor's magnitude into account, if scales are delayed."""

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Which data results shall have; None: as before."""
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def get_usages(self) -> dict[str, bool]:
        """Which data results have."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def is_quantizable(self, inp: Tensor) -> bool:
        """Whether the tensor can be quantized."""
        return inp.dtype in checks.FLOATS

    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether the transpose cannot be gathered."""
        return False

    def is_requantization_safe(self) -> bool:
        """Whether the same tensor gives the same data again, whatever was quantized between."""
        return True


def prepare_for_saving(
    *tensors: Tensor | QuantizedTensorStorage | None,
) -> tuple[list[Tensor | None], list[QuantizedTensorStorage | None]]:
    """Tensors for save_for_backward, and the objects that `restore_from_saved` needs to put them together again."""
    saved: list[Tensor | None] = []
    objects: list[QuantizedTensorStorage | None] = []
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensorStorage):
            parts, emptied = tensor.prepare_for_saving()
            saved += parts
            objects.append(emptied)
        else:
            saved.append(tensor)
            objects.append(None)
    return saved, objects


def restore_from_saved(
    tensors: Sequence[QuantizedTensorStorage | None],
    saved_tensors: Sequence[Tensor | None],
    return_saved_tensors: bool = False,
) -> Any:
    """The tensors that `prepare_for_saving` took apart; with return_saved_tensors also the rest of the saved."""
    rest, restored = list(saved_tensors), []
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensorStorage):
            rest = tensor.restore_from_saved(rest)
            restored.append(tensor)
        else:
            # a plain tensor, or None, is one entry of the list
            restored.append(rest.pop(0))  # type: ignore[arg-type]
    return (restored, rest) if return_saved_tensors else restored


def restore_from_func_ctx(ctx: Any, return_saved_tensors: bool = False) -> Any:
    """`restore_from_saved` of ctx.tensor_objects and ctx.saved_tensors; ctx lets go of the objects."""
    objects = getattr(ctx, "tensor_objects", None)
    if objects is None:
        raise AttributeError("ctx must have tensor_objects, the second result of prepare_for_saving")
    restored = restore_from_saved(objects, ctx.saved_tensors, return_saved_tensors)
    # a node of a graph that is kept would keep the data too
    ctx.tensor_objects = None
    return restored


__getattr__ = unknown(__name__)
