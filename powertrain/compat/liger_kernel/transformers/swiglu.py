"""liger_kernel.transformers.swiglu on `powertrain.linear_activation`."""

from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.liger_kernel.gated import gated_mlp
from powertrain.compat.missing import unknown
from powertrain.ops.activations import swiglu
from powertrain.ops.grouped_gemm import grouped_gemm
from powertrain.ops.moe import moe_permute, moe_unpermute
from powertrain.runtime import checks

__all__ = [
    "LigerBlockSparseTop2MLP",
    "LigerExperts",
    "LigerFalconH1SwiGLUMLP",
    "LigerHunyuanV1SwiGLUMLP",
    "LigerPhi3SwiGLUMLP",
    "LigerQwen3MoeSwiGLUMLP",
    "LigerSwiGLUMLP",
    "LigerSwiGLUMLPForMuseGlimmer",
]

_SILU = ("silu", "swish")


class LigerSwiGLUMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) of a Hugging Face config, gate and up in one kernel on Hopper."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        self.config, self.hidden_size = config, config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        # Liger raises for other activations too
        checks.one_of(type(self).__name__, "config.hidden_act", self._activation(config), _SILU)

    def _activation(self, config: Any) -> str:
        return config.hidden_act

    def forward(self, x: Tensor) -> Tensor:
        return gated_mlp(x, self.gate_proj, self.up_proj, self.down_proj, "swiglu")


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP`."""


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP`; is_shared_mlp changes nothing, as there."""

    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` of a config that may name its activation hidden_activation."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)

    def _activation(self, config: Any) -> str:
        return getattr(config, "hidden_activation", None) or config.hidden_act


class LigerFalconH1SwiGLUMLP(nn.Module):
    """down(silu(g gate(x)) * up(x) * d) of Falcon-H1, (g, d) = config.mlp_multipliers; config.mlp_bias: with biases.

    The products are rounded to x's dtype before the multipliers, as in the model.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.hidden_size, self.intermediate_size = config, config.hidden_size, config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)
        checks.one_of(type(self).__name__, "config.hidden_act", config.hidden_act, _SILU)
        self.gate_multiplier, self.down_multiplier = map(float, config.mlp_multipliers)

    def forward(self, x: Tensor) -> Tensor:
        # d ahead of the product, where Liger has it, leaves down's bias as it is
        hidden = swiglu(self.gate_proj(x) * self.gate_multiplier, self.up_proj(x)) * self.down_multiplier
        return self.down_proj(hidden)


class LigerBlockSparseTop2MLP(nn.Module):
    """w2(silu(w1(x)) * w3(x)), an expert of Mixtral."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        checks.one_of("LigerBlockSparseTop2MLP", "config.hidden_act", config.hidden_act, _SILU)

    def forward(self, x: Tensor) -> Tensor:
        return gated_mlp(x, self.w1, self.w3, self.w2, "swiglu")


class LigerPhi3SwiGLUMLP(nn.Module):
    """The same with gate and up in one weight, gate_up_proj, as Phi-3 has it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.hidden_size, self.intermediate_size = config, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        checks.one_of("LigerPhi3SwiGLUMLP", "config.hidden_act", config.hidden_act, _SILU)

    def forward(self, x: Tensor) -> Tensor:
        # one weight for both halves: the product is nn.Linear's, the activation fused behind it
        return self.down_proj(swiglu(self.gate_up_proj(x)))


class LigerExperts(nn.Module):
    """The routed experts of a Hugging Face mixture: E gated MLPs, gate and up in one weight, by grouped products.

    Parameters gate_up_proj [E, 2 I, H] and down_proj [E, H, I], uninitialized, as there. E is config.num_experts,
    num_local_experts or n_routed_experts, I is moe_intermediate_size or intermediate_size.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
        self.intermediate_dim = _first(config, "moe_intermediate_size", "intermediate_size")
        self.hidden_dim = config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))
        checks.one_of("LigerExperts", "config.hidden_act", config.hidden_act, _SILU)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts: hidden_states [..., H], the other two [..., k]."""
        experts, weights = (t.reshape(-1, t.shape[-1]) for t in (top_k_index, top_k_weights))
        rows, offsets, positions = moe_permute(hidden_states.reshape(-1, self.hidden_dim), experts, self.num_experts)
        hidden = swiglu(grouped_gemm(rows, self.gate_up_proj, offsets))
        y = moe_unpermute(grouped_gemm(hidden, self.down_proj, offsets), positions, weights)
        return y.view(hidden_states.shape)


def _first(config: Any, *names: str) -> int:
    """The config's value of the first of these names that it has."""
    return next(getattr(config, name) for name in names if hasattr(config, name))


__getattr__ = unknown(__name__)
