"""The dense models once more, in plain PyTorch and any dtype, from our state dict: what tests judge them by."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.models.gpt_neox import Config as NeoXConfig

_ACTIVATIONS: dict[str, Any] = {
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "silu": F.silu,
    "relu_squared": lambda x: F.relu(x).square(), "swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu,
}  # fmt: skip


def plain_logits(config: Any, p: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """[B, S] tokens -> [B, S, V] in the dtype of the weights."""
    is_neox = isinstance(config, NeoXConfig)
    x = p["embed.weight"][tokens]
    if "positions.weight" in p:
        x = x + p["positions.weight"][: tokens.shape[1]]
    for layer in range(config.num_layers):
        mine = {
            name.removeprefix(f"layers.{layer}."): t for name, t in p.items() if name.startswith(f"layers.{layer}.")
        }
        if is_neox and config.layer_type(layer) in ("gmlp", "amlp"):
            x = _gmlp(config, mine, x)
            continue
        y = _norm(config, mine, "attention_norm", x)
        attended = _attention(config, mine, y, layer)
        if not (is_neox and config.parallel_residual):
            x = x + attended
            x = x + _mlp(config, mine, _norm(config, mine, "mlp_norm", x))
        else:
            y = y if config.shared_norm else _norm(config, mine, "mlp_norm", x)
            x = x + attended + _mlp(config, mine, y)
    head = p["embed.weight"] if config.tie_embeddings else p["head.weight"]
    return F.linear(_norm(config, p, "norm", x), head)


def plain_loss(config: Any, p: Mapping[str, Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
    logits = plain_logits(config, p, tokens)
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), labels.flatten())


def _norm(config: Any, p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight, bias = p[f"{name}.weight"], p.get(f"{name}.bias")
    if getattr(config, "norm", "rms_norm") == "layer_norm":
        return F.layer_norm(x, weight.shape, weight, bias, config.norm_eps)
    return F.rms_norm(x, weight.shape, weight, config.norm_eps)


def _linear(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def _mlp(config: Any, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    if "mlp.router.weight" in p:
        return _experts(config, p, x)
    act, up = _ACTIVATIONS[config.activation], _linear(p, "mlp.up", x)
    inside = act(_linear(p, "mlp.gate", x)) * up if "mlp.gate.weight" in p else act(up)
    return _linear(p, "mlp.down", inside)


def _experts(config: Any, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """GPT-NeoX's dropless experts in evaluation, or with topk: the best k scores, each expert on every token."""
    act, k = _ACTIVATIONS[config.expert_activation or config.activation], config.experts_per_token
    logits = x @ p["mlp.router.weight"].T
    scores = logits.sigmoid() if config.router == "sinkhorn" and k == 1 else logits.softmax(-1)
    weights, experts = scores.topk(k, -1)
    every = torch.stack([act(x @ up.T) @ down.T for up, down in zip(p["mlp.experts.up"], p["mlp.experts.down"],
                                                                    strict=True)], -2)  # fmt: skip
    chosen = every.gather(-2, experts[..., None].expand(*experts.shape, x.shape[-1]))
    y = (weights[..., None] * chosen).sum(-2)
    return y + p["mlp.bias"] if "mlp.bias" in p else y


def _gmlp(config: Any, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """GPT-NeoX's GMLPBlock, loop by loop: no residual; position i's gate is a sum over positions up to i."""
    u = _ACTIVATIONS[config.activation](_linear(p, "up", _norm(config, p, "norm", x)))
    value, gate = u.chunk(2, -1)
    gate = _norm(config, p, "gate_norm", gate)
    weight, bias = p["spatial.weight"], p["spatial.bias"]
    rows = [(weight[i, : i + 1, None] * gate[:, : i + 1]).sum(1) + bias[i] for i in range(x.shape[1])]
    mixed = torch.stack(rows, 1)
    if "tiny_attention.qkv.weight" in p:
        q, k, v = _linear(p, "tiny_attention.qkv", u).chunk(3, -1)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        mixed = mixed + _linear(p, "tiny_attention.out", scores.masked_fill(later, -torch.inf).softmax(-1) @ v)
    return _linear(p, "down", mixed * value)


def _attention(config: Any, p: Mapping[str, Tensor], x: Tensor, layer: int) -> Tensor:
    kv_heads = config.num_kv_heads or config.num_heads
    group = config.num_heads // kv_heads
    packed = _linear(p, "attention.qkv", x).unflatten(-1, (kv_heads, group + 2, -1))
    q, k, v = packed.split((group, 1, 1), -2)
    q, k, v = (t.flatten(-3, -2) for t in (q, k, v))  # [B, S, heads, D]
    if "attention.q_norm.weight" in p:
        q, k = (_norm(config, p, f"attention.{n}_norm", t) for n, t in (("q", q), ("k", k)))
    kind = getattr(config, "position_embedding", "rotary")
    if kind == "rotary":
        dim = int(q.shape[-1] * getattr(config, "rotary_pct", 1.0)) // 2 * 2
        q, k = (_turned(t, dim, config.rope_theta) for t in (q, k))
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    if isinstance(config, NeoXConfig) and config.layer_type(layer) == "sparse":
        bias = _blocks_bias(config.sparsity, x.shape[1]).to(q.dtype)
    else:
        bias = _bias(config, x.shape[1], kind).to(q.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return _linear(p, "attention.out", out.transpose(1, 2).flatten(-2))


def _turned(x: Tensor, dim: int, theta: float) -> Tensor:
    # angles are in float32 in every trainer
    angles = torch.outer(torch.arange(x.shape[1]).float(), 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim))
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
    front, rest = x[..., :dim], x[..., dim:]
    a, b = front.chunk(2, -1)
    return torch.cat([front * cos + torch.cat([-b, a], -1) * sin, rest], -1)


def _blocks_bias(rules: Any, length: int) -> Tensor:
    """-inf where a position's block does not see another's: windows before, or in a row with their last blocks."""
    r, c = torch.arange(length)[:, None] // rules.block, torch.arange(length) // rules.block
    if rules.before is not None:
        seen = r - c <= rules.before
    else:
        (size,) = rules.windows
        seen = (r // size == c // size) | (c % size >= size - rules.last_of_window)
    seen = seen & (torch.arange(length) <= torch.arange(length)[:, None])
    return torch.where(seen, 0.0, -torch.inf)[None]


def _bias(config: Any, length: int, kind: str) -> Tensor:
    """What is added to scores [H or 1, S, S]: -inf for the future and past the window, ALiBi's slopes."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (config.sliding_window or length))
    slopes = torch.zeros(1)
    if kind == "alibi":
        assert config.num_heads == 4
        slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    return torch.where(hidden, -torch.inf, -slopes[:, None, None] * distance)
