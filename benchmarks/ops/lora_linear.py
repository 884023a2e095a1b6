"""A linear layer with an adapter, both ways, beside the frozen layer, PEFT's formula and torch.compile; FP8 bases."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.nn.lora import LoRALinear
from powertrain.ops.cases.lora_linear import plain
from powertrain.ops.lora_linear import lora_linear
from powertrain.quant import Block, Row
from powertrain.quant import Tensor as TensorRecipe
from powertrain.quant.recipe import Recipe
from powertrain.testing.bench import measure, table

T = 8192
SHAPES = ((4096, 6144), (4096, 14336), (14336, 4096))  # K, N of Llama 3 8B: qkv, gate or up, down
RANKS = (16, 64)
RECIPES: dict[str, Callable[[], Recipe]] = {"tensor": TensorRecipe, "row": Row, "block": Block}


def _frozen(x: Tensor, weight: Tensor, A: Tensor, B: Tensor) -> Tensor:
    return F.linear(x, weight)


def _both(function: Callable[..., Tensor], dy: Tensor, x: Tensor, weight: Tensor, A: Tensor, B: Tensor) -> object:
    return torch.autograd.grad(function(x, weight, A, B), (x, A, B), dy, allow_unused=True)


def _by_layer(recipe: Recipe, weight: Tensor, A: Tensor, B: Tensor) -> Callable[..., Tensor]:
    """The layer with its frozen product in FP8, which quantizes the weight in the first call."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    layer = LoRALinear(linear, A.shape[0], 1.0)
    del layer.lora_A, layer.lora_B
    layer.lora_A, layer.lora_B = A, B
    layer.set_fp8(recipe)
    return lambda x, *_: layer(x)


def run() -> Iterator[str]:
    for K, N in SHAPES:
        for rank in RANKS:
            x, dy = (torch.randn(T, n, device="cuda", dtype=torch.bfloat16) for n in (K, N))
            weight = torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * K**-0.5
            A, B = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) * 0.1 for s in ((rank, K), (N, rank)))
            inputs = (x.requires_grad_(), weight, A.requires_grad_(), B.requires_grad_())
            found = {
                "powertrain": lora_linear,
                "frozen": _frozen,  # the layer alone: forward and dx
                "peft": plain,
                "torch.compile": torch.compile(plain, dynamic=False),
                **{f"fp8 {name}": _by_layer(recipe(), weight, A, B) for name, recipe in RECIPES.items()},
            }
            variants = {name: partial(_both, function, dy, *inputs) for name, function in found.items()}
            flops = 4 * T * K * N + 6 * T * rank * (K + N)
            yield table(f"lora_linear both {T}x{K}x{N} rank {rank} bf16", measure(variants, seconds=0.5), flops=flops)
