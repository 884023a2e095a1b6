"""liger_kernel.transformers.swiglu on `powertrain.linear_activation`."""

from typing import Any

from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.ops.activations import swiglu
from powertrain.ops.gemm.linear_activation import linear_activation
from powertrain.runtime import checks

__all__ = [
    "LigerBlockSparseTop2MLP",
    "LigerHunyuanV1SwiGLUMLP",
    "LigerPhi3SwiGLUMLP",
    "LigerQwen3MoeSwiGLUMLP",
    "LigerSwiGLUMLP",
]


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
        checks.one_of("LigerSwiGLUMLP", "config.hidden_act", config.hidden_act, ("silu", "swish"))

    def forward(self, x: Tensor) -> Tensor:
        hidden = linear_activation(x, self.gate_proj.weight, "swiglu", up_weight=self.up_proj.weight)
        return self.down_proj(hidden)


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP`."""


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP`; is_shared_mlp changes nothing, as there."""

    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerBlockSparseTop2MLP(nn.Module):
    """w2(silu(w1(x)) * w3(x)), an expert of Mixtral."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        checks.one_of("LigerBlockSparseTop2MLP", "config.hidden_act", config.hidden_act, ("silu", "swish"))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(linear_activation(x, self.w1.weight, "swiglu", up_weight=self.w3.weight))


class LigerPhi3SwiGLUMLP(nn.Module):
    """The same with gate and up in one weight, gate_up_proj, as Phi-3 has it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.hidden_size, self.intermediate_size = config, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        checks.one_of("LigerPhi3SwiGLUMLP", "config.hidden_act", config.hidden_act, ("silu", "swish"))

    def forward(self, x: Tensor) -> Tensor:
        # one weight for both halves: the product is nn.Linear's, the activation fused behind it
        return self.down_proj(swiglu(self.gate_up_proj(x)))


__getattr__ = unknown(__name__)
