"""Weight initialization: values depend on the seed and the parameter's name only, not on sharding, ranks or order."""

import hashlib
import math
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from powertrain.models.config import ModelConfig
from powertrain.ops.activations import Gated

# layers that write into the residual stream
_OUTPUTS = (".attention.out.weight", ".down.weight", ".mlp.experts.down")
# a gMLP layer's gate is 1 at first; its tiny attention begins as nn.Linear does, as in GPT-NeoX
_CONSTANT = {".spatial.weight": 0.0, ".spatial.bias": 1.0}


def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Matrices by the config's init methods, norms' weights 1, biases 0. In place; DTensors get their shard.

    On a GPU the values are drawn on the GPU: other ones than a CPU draws.
    """
    # norms are recognized by their class: weights of 1
    norms = {f"{name}.weight" for name, module in model.named_modules() if "norm" in type(module).__name__.lower()}
    with torch.no_grad():
        # named_parameters: DTensors under their plain names
        for name, p in model.named_parameters():
            if name.endswith(".lora_A"):
                _draw_uniform(p, name, seed, p.shape[1])
            elif name.endswith(".lora_B"):
                # the layer computes what it does without
                p.zero_()
            elif name.endswith(tuple(_CONSTANT)):
                p.fill_(next(value for end, value in _CONSTANT.items() if name.endswith(end)))
            elif ".tiny_attention." in name:
                layer: Any = model.get_submodule(name.rpartition(".")[0])
                _draw_uniform(p, name, seed, layer.in_features)
            elif p.dim() == 1:
                p.fill_(1.0 if name in norms else 0.0)
            else:
                _draw(p, name, config, seed)


def _draw_uniform(p: Tensor, name: str, seed: int, fan_in: int) -> None:
    """As nn.Linear draws its weight and bias, and `LoRALinear.reset_adapter` lora_A."""
    generator = torch.Generator(p.device).manual_seed(_seed_of(seed, name))
    full = torch.empty(p.shape, dtype=torch.float32, device=p.device)
    full.uniform_(-(fan_in**-0.5), fan_in**-0.5, generator=generator)
    _store(p, full)


def _draw(p: Tensor, name: str, config: ModelConfig, seed: int) -> None:
    method = config.output_init_method if name.endswith(_OUTPUTS) else config.init_method
    # the two halves of one matrix must have the values that GPT-NeoX gives that matrix
    if half := _half_of_gpt_neox(name, config, method):
        name = name.replace(*half)
    generator = torch.Generator(p.device).manual_seed(_seed_of(seed, name))
    # the whole tensor on every rank, then its shard: values must not depend on the sharding
    shape = (2 * p.shape[0], p.shape[1]) if half else p.shape
    full = torch.empty(shape, dtype=torch.float32, device=p.device)
    # a stack of experts' weights is as many matrices; in GPT-NeoX one, [experts * inside, hidden]
    if full.dim() > 2 and config.architecture == "gpt_neox":
        is_down = name.endswith(".down")
        matrix = full.new_empty(full.shape[0] * full.shape[2 if is_down else 1], full.shape[1 if is_down else 2])
        _METHODS[method](matrix, config, generator)
        rows = matrix.unflatten(0, (full.shape[0], -1))
        full = rows.transpose(1, 2).contiguous() if is_down else rows
        return _store(p, full)
    for matrix in full.flatten(0, -3) if full.dim() > 2 else (full,):
        _METHODS[method](matrix, config, generator)
    if half:
        full = full.chunk(2)[half == _GATE]
    _store(p, full)


def _store(p: Tensor, full: Tensor) -> None:
    if isinstance(p, DTensor):
        # each rank draws the whole tensor, so src_data_rank=None: nothing is broadcast
        full = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
    p.copy_(full)


_UP, _GATE = ("mlp.up.", "mlp.up_and_gate."), ("mlp.gate.", "mlp.up_and_gate.")


def _half_of_gpt_neox(name: str, config: ModelConfig, method: str) -> tuple[str, str] | None:
    """(our module, theirs) of a gated MLP's first layer, one matrix in GPT-NeoX: up's rows, then gate's.

    Where the spread of values depends on the matrix's shape; elsewhere it makes no difference.
    """
    if config.architecture != "gpt_neox" or method not in ("xavier_normal", "xavier_uniform", "orthogonal"):
        return None
    if getattr(config, "activation", None) not in get_args(Gated):
        return None
    return next((half for half in (_UP, _GATE) if half[0] in name), None)


def _seed_of(seed: int, name: str) -> int:
    # 7 bytes: torch's seeds fit a signed 64-bit integer
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")


def _normal(std: Callable[[ModelConfig], float]) -> Callable[[Tensor, ModelConfig, torch.Generator], Tensor]:
    return lambda t, config, generator: t.normal_(0.0, std(config), generator=generator)


# GPT-NeoX's names; small_init is Nguyen and Salazar, arXiv:1910.05895; wang_init is Ben Wang's of Mesh Transformer JAX
_METHODS: dict[str, Callable[[Tensor, ModelConfig, torch.Generator], Tensor]] = {
    "normal": _normal(lambda c: c.init_std),
    "scaled_normal": _normal(lambda c: c.init_std / math.sqrt(2.0 * c.num_layers)),
    "single_residual_scaled_normal": _normal(lambda c: c.init_std / math.sqrt(c.num_layers)),
    "small_init": _normal(lambda c: math.sqrt(2.0 / (5.0 * c.hidden_size))),
    "wang_init": _normal(lambda c: 2.0 / (c.num_layers * math.sqrt(c.hidden_size))),
    "xavier_normal": lambda t, c, g: nn.init.xavier_normal_(t, generator=g),
    "xavier_uniform": lambda t, c, g: nn.init.xavier_uniform_(t, generator=g),
    "orthogonal": lambda t, c, g: nn.init.orthogonal_(t, generator=g),
}
