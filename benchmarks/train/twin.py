"""The same models in plain PyTorch, as someone would write them to be compiled: the baseline, and the judge of curves.

Parameters have our models' names and shapes, so a state dict fits both. Only what the benchmarks train is here: no
caches, no dropout, no packed documents.
"""

from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.models import ModelConfig
from powertrain.ops.activations import Gated

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Norm(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.hidden_size)) if _is_layer_norm(config) else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def _is_layer_norm(config: Any) -> bool:
    return getattr(config, "norm", "rms_norm") == "layer_norm"


class Attention(nn.Module):
    def __init__(self, config: Any, attend: Attend | None) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads or config.num_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_heads
        self.group = self.num_heads // self.num_kv_heads
        self.turned = int(self.head_dim * getattr(config, "rotary_pct", 1.0)) // 2 * 2
        bias = bool(getattr(config, "attention_bias", False))
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = nn.Linear(config.hidden_size, rows, bias=bias)
        self.out = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=bias)
        self.attend = attend

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        groups = self.qkv(x).unflatten(-1, (self.num_kv_heads, self.group + 2, self.head_dim))
        q, k, v = (t.flatten(-3, -2) for t in groups.split((self.group, 1, 1), -2))
        if self.attend is not None:
            # [B, S, H, D] as they are: all heads of a position turn by its angles
            q, k = (_rotated(t, cos[:, None], sin[:, None], self.turned) for t in (q, k))
            return self.out(self.attend(q, k, v).flatten(-2))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        q, k = (_rotated(t, cos, sin, self.turned) for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.group > 1)
        return self.out(out.transpose(1, 2).flatten(-2))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
    rest = x[..., turned:]
    a, b = x[..., :turned].float().chunk(2, -1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size or 4 * config.hidden_size
        bias = bool(getattr(config, "mlp_bias", False))
        self.kind = getattr(config, "activation", "swiglu")
        if self.kind in get_args(Gated):
            self.gate = nn.Linear(hidden, inner, bias=bias)
        self.up = nn.Linear(hidden, inner, bias=bias)
        self.down = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        approximate = {"gelu": "none", "gelu_tanh": "tanh"}[self.kind]
        return self.down(F.gelu(self.up(x), approximate=approximate))


class Block(nn.Module):
    def __init__(self, config: Any, attend: Attend | None) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(config), Attention(config, attend)
        self.mlp_norm, self.mlp = Norm(config), MLP(config)
        self.parallel = getattr(config, "parallel_residual", False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attended = self.attention(self.attention_norm(x), cos, sin)
        if self.parallel:
            return x + attended + self.mlp(self.mlp_norm(x))
        x = x + attended
        return x + self.mlp(self.mlp_norm(x))


class Twin(nn.Module):
    """tokens, labels [B, S] -> mean loss.

    attend   causal attention of q [B, S, H, D] and k, v [B, S, Hkv, D], instead of PyTorch's
    """

    def __init__(self, config: ModelConfig, attend: Attend | None = None) -> None:
        super().__init__()
        fields: Any = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, attend) for _ in range(config.num_layers))
        self.norm = Norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        turned = self.layers[0].attention.turned
        frequencies = fields.rope_theta ** -(torch.arange(0, turned, 2).float() / turned)
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1).float(), labels.flatten())

    def logits(self, tokens: Tensor) -> Tensor:
        """[B, S] -> [B, S, V]."""
        x = self.embed(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))
