"""Weights that Hugging Face folders store in FP8: their values, or data and scales.

config.json's quantization_config says how. Read are

    quant_method "fp8" (DeepSeek-V3, Qwen3-FP8)    X.weight float8_e4m3fn [N, K], X.weight_scale_inv float32:
                                                   [N / 128, K / 128] rounded up with weight_block_size [128, 128], or
                                                   of other blocks, or one number
    "compressed-tensors" (float-quantized)         X.weight and X.weight_scale: one number, [N], [N, 1], or blocks

and the value of an element is its data times its scale: `weight_scale_inv` is the inverse of quantization's factor.
Tensors of other dtypes (modules_to_not_convert, ignore) are taken as they are; scales of activations are left out.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.shapes import cdiv

FP8_DTYPE = torch.float8_e4m3fn
# suffixes of a weight's name, of its scales
_SCALES = ("_scale_inv", "_scale")
# scales of tensors that a forward quantizes: our recipe computes those
_LEFT_OUT = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")


class Stored(NamedTuple):
    """How a folder's FP8 weights are stored. block: rows and columns that share a scale; None: scales' shapes say."""

    block: tuple[int, int] | None = None


def stored_as(values: Mapping[str, Any]) -> Stored | None:
    """The FP8 format that a config.json states, or None. Raises ValueError naming the key for unsupported formats."""
    given = values.get("quantization_config")
    if given is None:
        return None
    where = "config.json: quantization_config"
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} must be an object, got {type(given).__name__}")
    method = given.get("quant_method")
    if method == "fp8":
        return Stored(_block(f"{where}.weight_block_size", given.get("weight_block_size")))
    if method == "compressed-tensors":
        return _compressed(where, given)
    raise ValueError(
        f"{where}.quant_method must be fp8 or compressed-tensors (weights in 8-bit floats), got {method!r}"
    )


def _block(key: str, given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    good = isinstance(given, list | tuple) and len(given) == 2 and all(isinstance(n, int) and n > 0 for n in given)
    if not good:
        raise ValueError(f"{key} must be two sizes above 0, got {given!r}")
    return given[0], given[1]


def _compressed(where: str, given: Mapping[str, Any]) -> Stored:
    blocks: set[tuple[int, int] | None] = set()
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"{where}.config_groups must have a group, got {groups!r}")
    for name, group in groups.items():
        weights, key = (group or {}).get("weights") or {}, f"{where}.config_groups.{name}.weights"
        for field, must in (("num_bits", 8), ("type", "float"), ("symmetric", True)):
            if weights.get(field, True if field == "symmetric" else None) != must:
                raise ValueError(f"{key}.{field} must be {must!r}, got {weights.get(field)!r}")
        strategy = weights.get("strategy")
        if strategy not in ("tensor", "channel", "block"):
            raise ValueError(f"{key}.strategy must be tensor, channel or block, got {strategy!r}")
        blocks.add(_block(f"{key}.block_structure", weights.get("block_structure")) if strategy == "block" else None)
    if len(blocks) > 1:
        raise ValueError(f"{where}.config_groups must share one block_structure, got {sorted(map(str, blocks))}")
    return Stored(blocks.pop())


class Scales(NamedTuple):
    """values [rows, columns] float32; block: rows and columns of the weight that each is for."""

    values: Tensor
    block: tuple[int, int]

    def of_rows(self, N: int) -> Tensor:
        """[N, columns]."""
        return self.values.repeat_interleave(self.block[0], 0)[:N]

    def spread(self, N: int, K: int) -> Tensor:
        """[N, K]."""
        return self.of_rows(N).repeat_interleave(self.block[1], 1)[:, :K]


class FP8Tensors(Mapping[str, Tensor]):
    """The tensors of a folder under the names of its weights; those in FP8 as float32 values, or as they are stored.

    Raises ValueError naming a tensor whose scale is missing, or has another shape than its weight needs.
    """

    def __init__(self, tensors: Mapping[str, Tensor], stored: Stored) -> None:
        self._tensors, self._stored = tensors, stored
        self._names = [name for name in tensors if not self._is_scale(name)]

    def _is_scale(self, name: str) -> bool:
        return name.endswith(_LEFT_OUT) or any(
            name.endswith(suffix) and name.removesuffix(suffix) in self._tensors for suffix in _SCALES
        )

    def __getitem__(self, name: str) -> Tensor:
        stored = self.stored(name)
        if isinstance(stored, Tensor):
            return stored
        data, scales = stored
        return data.float() * scales.spread(data.shape[0], data.shape[1])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def stored(self, name: str) -> "Tensor | tuple[Tensor, Scales]":
        """A tensor as it is, or FP8 data [N, K] and its scales."""
        data = self._tensors[name]
        names = [name + suffix for suffix in _SCALES if name + suffix in self._tensors]
        if data.dtype is not FP8_DTYPE:
            if names or data.element_size() == 1:
                beside = f" beside {names[0]}" if names else ""
                raise ValueError(f"checkpoint: {name} must be float8_e4m3fn{beside}, got {data.dtype}")
            return data
        if data.dim() != 2:
            raise ValueError(f"checkpoint: {name} must be [N, K] in FP8, got {list(data.shape)}")
        if len(names) != 1:
            must = " or ".join(name + suffix for suffix in _SCALES)
            raise ValueError(f"checkpoint: {name} is FP8 and must have {must}, got {' and '.join(names) or 'neither'}")
        return data, self._scales(names[0], data.shape[0], data.shape[1])

    def _scales(self, name: str, N: int, K: int) -> Scales:
        values, block = self._tensors[name].float(), self._stored.block
        if values.numel() == 1 and block is None:
            return Scales(values.reshape(1, 1), (N, K))
        if block is not None:
            must, shapes = "", [[cdiv(N, block[0]), cdiv(K, block[1])]]
        else:
            must, shapes = "one number, ", [[N], [N, 1]]
        if list(values.shape) not in shapes:
            must += " or ".join(map(str, shapes))
            raise ValueError(f"checkpoint: {name} must have {must} scales (of [{N}, {K}]), got {list(values.shape)}")
        return Scales(values, block) if block is not None else Scales(values.reshape(N, 1), (1, K))
