"""liger_kernel.transformers.fused_neighborhood_attention."""

from typing import Any

from torch import Tensor, nn

from powertrain.compat.liger_kernel.local_attention import liger_fused_neighborhood_attention
from powertrain.compat.missing import unknown
from powertrain.ops.conversion import unsupported
from powertrain.runtime import checks

__all__ = [
    "LigerFusedNeighborhoodAttention",
    "LigerFusedNeighborhoodAttentionConfig",
    "LigerFusedNeighborhoodAttentionLayer",
]


class LigerFusedNeighborhoodAttention(nn.Module):
    """`liger_fused_neighborhood_attention` between linear layers: [B, S, hidden_size] -> the same.

    attention_mask is refused, as there. Raises ValueError naming the argument.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        op = "LigerFusedNeighborhoodAttention"
        checks.require(hidden_size % num_heads == 0, op, "hidden_size", f"be a multiple of {num_heads}", hidden_size)
        checks.require(kernel_size > 0 and kernel_size % 2 == 1, op, "kernel_size", "be odd and positive", kernel_size)
        checks.require(dilation >= 1, op, "dilation", "be 1 or more", dilation)
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, hidden_size // num_heads
        self.kernel_size, self.dilation, self.dropout_p = kernel_size, dilation, dropout
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.dropout = nn.Dropout(dropout) if dropout > 0.0 else None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is not None:
            unsupported("LigerFusedNeighborhoodAttention", "attention_mask", list(attention_mask.shape), "no mask")
        q, k, v = (
            part(hidden_states).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = liger_fused_neighborhood_attention(q, k, v, self.kernel_size, self.dilation, self.scale)
        out = out.transpose(1, 2).flatten(-2)
        return self.out_proj(out if self.dropout is None else self.dropout(out))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, kernel_size={self.kernel_size}, dilation={self.dilation}"


class LigerFusedNeighborhoodAttentionLayer(nn.Module):
    """x + dropout(`LigerFusedNeighborhoodAttention`(layer_norm(x)))."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.attention = LigerFusedNeighborhoodAttention(
            hidden_size, num_heads, kernel_size, dilation, bias, dropout, scale
        )
        self.layer_norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.dropout = nn.Dropout(dropout) if dropout > 0.0 else None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        out = self.attention(self.layer_norm(hidden_states), attention_mask)
        return hidden_states + (out if self.dropout is None else self.dropout(out))


class LigerFusedNeighborhoodAttentionConfig:
    """The layer's arguments, as attributes and as `to_dict()`."""

    def __init__(
        self,
        hidden_size: int = 768,
        num_heads: int = 12,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        scale: float | None = None,
    ) -> None:
        self.hidden_size, self.num_heads, self.kernel_size, self.dilation = (
            hidden_size,
            num_heads,
            kernel_size,
            dilation,
        )
        self.bias, self.dropout, self.layer_norm_eps, self.scale = bias, dropout, layer_norm_eps, scale

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


__getattr__ = unknown(__name__)
