"""Calls that stand for fp8_gated_mlp."""

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.cases import Case, randn
from powertrain.ops.cases.fp8_linear import RoundedLinear
from powertrain.ops.fp8.gated_mlp import fp8_gated_mlp, fp8_gated_mlp_ref


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    """Values that bfloat16 has: autocast rounds none of them to another FP8 value."""
    M, K, N, D = shape
    sizes = {"x": (M, K), "gate": (N, K), "up": (N, K), "down": (D, N)}
    tensors: dict[str, Tensor | None] = {}
    for name, size in sizes.items():
        values = randn(*size, dtype=torch.bfloat16, device=device, grad=False)
        values = values if name == "x" else values * 2.0 ** -(size[1].bit_length() // 2)
        tensors[name] = values.to(dtype).requires_grad_()
    return tensors


def _plain(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    act = F.silu(RoundedLinear.apply(x, gate, "tensor")) * RoundedLinear.apply(x, up, "tensor")
    y: Tensor = RoundedLinear.apply(act, down, "tensor")
    return y


# tiny: a partial tile each way, no size of whole 16 elements; full: the MLP of Llama 8B
CASES = [
    Case("fp8_gated_mlp", "", fp8_gated_mlp, fp8_gated_mlp_ref, _plain, _inputs, (9, 35, 24, 19),
         (16384, 4096, 14336, 4096))
]  # fmt: skip
