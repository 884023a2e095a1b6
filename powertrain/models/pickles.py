"""Files of torch.save from elsewhere: read without executing anything they hold."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

# what a random generator's state in NumPy arrays needs; GPT-NeoX saves one beside its weights
_ARRAYS: list[Any] = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    (np.zeros(0).__reduce__()[0], "numpy.core.multiarray._reconstruct"),
    (np.zeros(0).__reduce__()[0], "numpy._core.multiarray._reconstruct"),
]


def load_pickle(file: Path) -> Any:
    """What torch.load(weights_only=True) makes of a file; tensors are mapped, not read, where the format allows.

    Raises ValueError naming the file and the global that it would have to execute, or what is wrong with it.
    """
    is_zip = zipfile.is_zipfile(file)
    try:
        with torch.serialization.safe_globals(_ARRAYS):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        unsafe = _unsafe(file) if is_zip else []
        needs = ", ".join(unsafe) or str(error).splitlines()[0]
        raise ValueError(f"{file} must hold tensors and plain values only; it would execute {needs}") from None
    except (RuntimeError, EOFError, KeyError, OSError) as error:
        raise ValueError(f"{file} must be a file of torch.save: {str(error).splitlines()[0]}") from None


def _unsafe(file: Path) -> list[str]:
    with torch.serialization.safe_globals(_ARRAYS):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
