"""`_extra_state` of TransformerEngine's checkpoints: delayed scaling's tensors, from a pickle that is not executed.

There it is a byte tensor with a pickled dictionary: the recipe, and of delayed scaling scale_fwd [3 G],
amax_history_fwd [steps, 3 G] (input, weight, output of each of G products), scale_bwd [2 G] and amax_history_bwd
[steps, 2 G] (output's and input's gradient). Row 0 of a history is the running step; the newest step is the last row.
A reader that knows only the few names which tensors are made of reads it; the recipe's classes become empty objects.
Source: get_extra_state of transformer_engine.pytorch.module.base.
"""

import io
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2

from powertrain.quant.linear import BUFFERS

# places in `scale_fwd` and `scale_bwd` of a product's input and weight, and of its output's gradient
_FORWARD, _BACKWARD = 3, 2


class Unreadable(ValueError):
    """The pickle has something else than delayed scaling's tensors."""


# a class whose pickled arguments do not matter: a recipe
class _Nothing:
    """Stands for an object whose values are not needed: takes all arguments, keeps none."""

    def __new__(cls, *_: Any, **__: Any) -> "_Nothing":
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def _storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _encoded(text: str, _: str) -> bytes:
    """Bytes of protocols before 3."""
    return text.encode("latin1")


# an allow-list: anything else in the pickle is refused, so nothing of it runs
_KNOWN = {
    ("_codecs", "encode"): _encoded,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): _storage,
    # enum members are pickled as getattr(Enum, name)
    ("builtins", "getattr"): _Nothing,  # members of enums
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("transformer_engine.common.recipe"):
            return _Nothing
        if (module, name) not in _KNOWN:
            raise Unreadable(f"it names {module}.{name}")
        return _KNOWN[module, name]


def delayed_buffers(state: Any, gemms: int) -> list[dict[str, Tensor]]:
    """Of each product the buffers of `FP8State`; an empty list where the state holds no delayed scales.

    Raises Unreadable with the reason: another format, a damaged pickle, or one that names what is not known.
    """
    # recipes without state write an empty tensor
    if state is None or (isinstance(state, Tensor) and state.numel() == 0):
        return []
    if not (isinstance(state, Tensor) and state.dtype is torch.uint8):
        raise Unreadable(f"it is a {type(state).__name__}, not a tensor of bytes")
    try:
        state_dict = _Reader(io.BytesIO(state.cpu().numpy().tobytes())).load()
    except Unreadable:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise Unreadable(f"it cannot be parsed: {error}") from error
    if not isinstance(state_dict, dict) or "scale_fwd" not in state_dict:
        return []
    return [_of_product(state_dict, gemm) for gemm in range(gemms)]


def _of_product(found: dict[str, Any], gemm: int) -> dict[str, Tensor]:
    # in the order that _of_product joins them: scale and history of forward, of backward
    tensors = [found.get(f"{part}_{way}") for way in ("fwd", "bwd") for part in ("scale", "amax_history")]
    forward, backward = _FORWARD * gemm, _BACKWARD * gemm
    columns = [forward, forward + 1]
    try:
        # the output's scale, the third of forward, is not used: outputs stay in high precision
        scale = torch.cat([tensors[0][columns], tensors[2][backward : backward + 1]]).float()  # type: ignore[index]
        steps = torch.cat([tensors[1][:, columns], tensors[3][:, backward : backward + 1]], 1).float()  # type: ignore[index]
    except (TypeError, IndexError, RuntimeError) as error:
        raise Unreadable(f"its scales have unexpected shapes: {error}") from error
    history = steps.new_zeros(3, steps.shape[0])
    # theirs: row 0 is the running step, the newest last; ours: the newest first
    history[:, :-1] = steps[1:].flip(0).T
    return dict(zip(BUFFERS, (steps[0], history, scale), strict=True))
