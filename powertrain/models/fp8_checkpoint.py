"""Loading of frozen FP8 weights from a Hugging Face folder without dequantization, to train adapters on them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.models import huggingface
from powertrain.models.config import ModelConfig
from powertrain.models.fp8_stored import FP8_DTYPE, FP8Tensors, Scales, stored_as
from powertrain.models.registry import architecture
from powertrain.ops.fp8.formulas import GROUP, Quantized, padded
from powertrain.quant.frozen import keep_frozen
from powertrain.quant.model import Part, Report
from powertrain.runtime.reading import read_json


def load_frozen(model: nn.Module, folder: Path) -> Report:
    """Give a model of ours the FP8 weights of a Hugging Face folder as they are stored; they stay frozen. In place.

        model    of the folder's config (`powertrain.models.huggingface.read_config`), with its other weights loaded;
                 adapters (`powertrain.lora`) before
        folder   config.json with a quantization_config, and safetensors
    Returns a Report: layers that keep the stored bytes and scales (`powertrain.quant.frozen.keep_frozen`), and why
    others keep their values. Experts, and weights of which blocks of 128x128 are no blocks of ours, are among these.
    Raises ValueError naming the file, key or tensor.
    """
    stored = stored_as(read_json(folder / "config.json"))
    if stored is None:
        raise ValueError(f"{folder / 'config.json'}: quantization_config must be given, got none")
    config = huggingface.read_config(folder)
    tensors = FP8Tensors(huggingface.open_files(folder), stored)
    # one at a time: a weight is on the host twice at most
    report = Report()
    for name, found in _ours(config, tensors):
        if isinstance(found, str):
            report.left.append(Part(name.rpartition(".")[0], why=found))
            continue
        part = keep_frozen(model, {name: found})
        report.quantized += part.quantized
        report.left += part.left
    return report


def _ours(config: ModelConfig, tensors: FP8Tensors) -> Iterator[tuple[str, Quantized | str]]:
    """Our weights that the folder stores in FP8: bytes and scales, or why they cannot stay in FP8."""
    module = architecture(config.architecture)
    for name, shape in huggingface.shapes(config).items():
        found = [tensors.stored(theirs) for theirs, _ in module.hf_parts(config, name, shape) if theirs in tensors]
        parts = [part for part in found if not isinstance(part, Tensor)]
        if not parts:
            continue
        if len(parts) < len(found):
            yield name, "a part of it is not stored in FP8"
        elif shape.dim() != 2:
            yield name, "it is a stack of experts"
        else:
            yield name, _as_ours(module, config, name, parts)


def _as_ours(module: Any, config: ModelConfig, name: str, parts: list[tuple[Tensor, Scales]]) -> Quantized | str:
    """One weight of their parts' bytes: data and scales go through the same change of layout."""
    K = parts[0][0].shape[1]
    by_row = all(scales.values.shape[1] == 1 for _, scales in parts)
    if not by_row and any(scales.block != (GROUP, GROUP) for _, scales in parts):
        return f"its blocks are {' and '.join(str(list(scales.block)) for _, scales in parts)}, not [{GROUP}, {GROUP}]"
    data = module.from_hf_parts(config, name, [data.view(torch.uint8) for data, _ in parts])
    # a row of scales for each row of the weight
    scale = module.from_hf_parts(config, name, [scales.of_rows(data.shape[0]) for data, scales in parts])
    wide = F.pad(data, (0, padded(K) - K)).view(FP8_DTYPE)
    if by_row:
        return Quantized(wide, scale[:, 0].contiguous())
    blocks = scale[::GROUP]
    if not torch.equal(blocks.repeat_interleave(GROUP, 0)[: len(scale)], scale):
        return f"in our order of rows its blocks of {GROUP} are parts of several"
    return Quantized(wide, blocks)
