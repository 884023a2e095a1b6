"""Reading of torch.save files of other programs without executing any code in them."""

import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from powertrain.runtime.reading import one_line, reading

_MOST_VALUES = 10_000_000
# globals of a random generator's state in NumPy arrays; GPT-NeoX saves one beside its weights
_ARRAYS: list[Any] = [
    np.ndarray,
    np.dtype,
    # a stand-in with the name that the pickle asks for
    type(np.dtype(np.uint32)),
    (np.zeros(0).__reduce__()[0], "numpy.core.multiarray._reconstruct"),
    (np.zeros(0).__reduce__()[0], "numpy._core.multiarray._reconstruct"),
]


class Plain:
    """Stands for an object of DeepSpeed that holds plain values: its attributes, and none of its code."""

    def __init__(self, *values: Any) -> None:
        self.values = values


# what its optimizers keep beside tensors: the loss scale, addresses of fragments, the stage of ZeRO
_DEEPSPEED: list[Any] = [
    (type(name.rpartition(".")[2], (Plain,), {}), f"deepspeed.{name}")
    for name in (
        "runtime.fp16.loss_scaler.DynamicLossScaler", "runtime.fp16.loss_scaler.LossScaler",
        "runtime.fp16.loss_scaler.LossScaleProfile", "runtime.zero.config.ZeroStageEnum",
        "utils.tensor_fragment.fragment_address", "runtime.bf16_optimizer.fragment_address",
    )
]  # fmt: skip


def load_pickle(file: Path) -> Any:
    """The result of torch.load(weights_only=True); tensors are mapped, not read, where the format allows.

    Raises ValueError naming the file and the global that it would have to execute, or its defect.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    with reading(file, "be a file of torch.save"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # only the zip format of torch 1.6 and later can be mapped
        is_zip = zipfile.is_zipfile(file)
        try:
            with torch.serialization.safe_globals(_ARRAYS + _DEEPSPEED):
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
        except pickle.UnpicklingError as error:
            unsafe = _unsafe(file) if is_zip else []
            needs = ", ".join(unsafe[:5]) or one_line(error, 200)
            raise ValueError(f"{file} must hold tensors and plain values only; it would execute {needs}") from None
        except OSError as error:  # of a damaged archive too
            raise ValueError(f"{file} must be a file of torch.save, got {one_line(error)}") from None
        _check_tensors(file, content)
        return content


def _check_tensors(file: Path, content: Any) -> None:
    """A tensor of more elements than its memory has (strides of 0) would fill ours when it is copied."""
    waiting, seen = [content], 0
    while waiting:
        value = waiting.pop()
        seen += 1
        if seen > _MOST_VALUES:
            raise ValueError(f"{file} must hold at most {_MOST_VALUES} values")
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, torch.Tensor) and value.nbytes > value.untyped_storage().nbytes():
            got = f"{list(value.shape)} over {value.untyped_storage().nbytes()} bytes"
            raise ValueError(f"{file} must hold tensors with memory of their own for every element, got {got}")


def _unsafe(file: Path) -> list[str]:
    with torch.serialization.safe_globals(_ARRAYS + _DEEPSPEED):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
