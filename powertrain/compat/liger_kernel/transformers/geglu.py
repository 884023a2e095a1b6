"""liger_kernel.transformers.geglu on `powertrain.linear_activation`."""

from typing import Any

from torch import Tensor, nn

from powertrain.compat.liger_kernel.gated import gated_mlp
from powertrain.compat.missing import unknown

__all__ = ["LigerGEGLUMLP", "LigerGEGLUMLPForGemma4"]


class LigerGEGLUMLP(nn.Module):
    """down(gelu, tanh form,(gate(x)) * up(x)) of a Hugging Face config, gate and up in one kernel on Hopper."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        self.config, self.hidden_size = config, config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Liger's config has hidden_act, its GEGLU ignores it
        return gated_mlp(x, self.gate_proj, self.up_proj, self.down_proj, "geglu_tanh")


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """`LigerGEGLUMLP`, twice as wide in layers that share keys and values if config.use_double_wide_mlp."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        shared = getattr(config, "num_kv_shared_layers", 0)
        first = getattr(config, "num_hidden_layers", 0) - shared
        is_shared = layer_idx is not None and shared > 0 and layer_idx >= first
        is_wide = is_shared and getattr(config, "use_double_wide_mlp", False)
        super().__init__(config, config.intermediate_size * (2 if is_wide else 1))


__getattr__ = unknown(__name__)
