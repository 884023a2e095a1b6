"""gMLP: a layer that mixes positions by one learned matrix instead of attention, as GPT-NeoX has it.

    y = down((W gate + b [+ attention(u)]) * value),   u = act(up(norm(stream))),   value, gate' = halves of u
    gate = gate_norm(gate')

W [S, S] is causal: position i sees j <= i. There is no residual connection around the layer: y is the new stream.
Source: Liu et al., arXiv:2105.08050 (which adds the stream); megatron/model/gmlp.py of GPT-NeoX (facts, no code), whose
first and last linear layers have biases that are never added.
"""

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn

from powertrain.nn.attention import Context, check_cached
from powertrain.nn.block import Layer
from powertrain.nn.cache import CacheRow, KVCache, write_behind
from powertrain.ops.activations import Activation, activation
from powertrain.ops.attention import attention
from powertrain.ops.attention.decode import decode_attention
from powertrain.ops.batch_invariance import refuse_invariant
from powertrain.runtime import checks
from powertrain.runtime.positional import hinted


class SpatialGating(nn.Module):
    """gate [B, S, C] -> [B, S, C]: out[b, i] = sum over j <= i of weight[i, j] gate[b, j], + bias[i].

    weight [L, L], bias [L] for L = max_length; first weights are 0 and 1 (`reset`), so that the result is 1.
    `channels` is C. Raises ValueError for a sequence longer than L.
    """

    def __init__(self, max_length: int, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.weight = nn.Parameter(torch.zeros(max_length, max_length))
        self.bias = nn.Parameter(torch.ones(max_length))

    def forward(self, gate: Tensor) -> Tensor:
        length, longest = gate.shape[1], len(self.bias)
        if length > longest:
            raise ValueError(f"SpatialGating: a sequence must have at most {longest} tokens, got {length}")
        weight = self.weight[:length, :length].tril()
        return torch.matmul(weight, gate) + self.bias[:length, None]

    def decode(self, gate: Tensor, earlier: Tensor, lengths: Tensor) -> Tensor:
        """`forward` for new tokens, gate [B, S, C], behind lengths [B] earlier ones, whose gates are the first rows of
        `earlier` [B, R, C]. The new ones are written behind them, in place; what does not fit is dropped."""
        places = torch.arange(gate.shape[1], device=gate.device)
        positions = lengths[:, None].long() + places  # [B, S]
        checks.indices("SpatialGating", "positions behind the cache", positions, len(self.bias))
        write_behind(earlier, gate, lengths)
        # a cache may have more rows than there are positions
        earlier = earlier[:, : len(self.bias)]
        seen = torch.arange(earlier.shape[1], device=gate.device) <= positions[..., None]  # [B, S, R]
        weight = torch.where(seen, self.weight[positions, : earlier.shape[1]], 0.0)
        return torch.bmm(weight, earlier) + self.bias[positions, None]


class TinyAttention(nn.Module):
    """x [B, S, hidden_size] -> [B, S, out_size]: causal attention of one head of `dim` channels, no positions."""

    def __init__(self, hidden_size: int, out_size: int, dim: int, layer: int) -> None:
        super().__init__()
        self.num_heads, self.layer = 1, layer
        self.qkv = nn.Linear(hidden_size, 3 * dim)
        self.out = nn.Linear(dim, out_size)

    @property
    def head_dims(self) -> tuple[int, int]:
        """Channels of a query and key, and of a value."""
        return self.out.in_features, self.out.in_features

    def forward(self, x: Tensor, context: Context = Context()) -> Tensor:  # noqa: B008
        cache = context.cache
        q, k, v = (t.unsqueeze(2) for t in self.qkv(x).chunk(3, -1))
        attended: Any
        if cache is None or cache.is_empty:
            attended = attention(q, k, v, is_causal=True)
            if cache is not None:
                cache.fill(self.layer, k, v)
        else:
            keys, values = cache.keys[self.layer], cache.values[self.layer]
            attended = decode_attention(
                q, keys, values, cache.lengths, key_new=k, value_new=v, schedule=context.schedule
            )  # fmt: skip
        return self.out(attended.squeeze(2))


class GMLP(Layer):
    """(x, residual) -> (y, None): the formula above, of the stream x + residual.

    intermediate_size   channels of value and of gate
    make_norm           size -> a norm module
    max_length          positions of the spatial weights; a longer sequence raises ValueError
    attention_dim       channels of the tiny attention that is added to the gate (aMLP); None: there is none
    dropout             of the input x before it is added to the residual, as in `Block`
    layer               its number in the model, for the cache
    Tokens are mixed by their place in the row alone, in one product: positions of their own, documents in one row, a
    rank's part of the tokens and `batch_invariant` raise NotImplementedError.
    """

    @hinted
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        make_norm: Callable[[int], nn.Module],
        *,
        max_length: int,
        kind: Activation = "gelu",
        attention_dim: int | None = None,
        dropout: float = 0.0,
        layer: int = 0,
    ) -> None:
        super().__init__(dropout=dropout)
        op = "GMLP"
        checks.sizes(op, hidden_size=hidden_size, intermediate_size=intermediate_size, max_length=max_length)
        checks.one_of(op, "kind", kind, get_args(Activation))
        checks.require(attention_dim is None or attention_dim >= 1, op, "attention_dim", "be at least 1", attention_dim)
        self.kind, self.layer = kind, layer
        self.norm = make_norm(hidden_size)
        self.up = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.gate_norm = make_norm(intermediate_size)
        self.spatial = SpatialGating(max_length, intermediate_size)
        self.tiny_attention = None
        if attention_dim is not None:
            self.tiny_attention = TinyAttention(2 * intermediate_size, intermediate_size, attention_dim, layer)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)

    def compute(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        for name in ("position_ids", "document_ids", "document_starts", "shape"):
            if getattr(context, name) is not None:
                raise NotImplementedError(f"GMLP: context.{name} must be None, got {type(getattr(context, name))}")
        if context.cache is not None:
            check_cached("GMLP", context, *x.shape[:2])
        refuse_invariant("gMLP layers", "compute this outside of it")
        y, _ = self.normed(self.norm, x, residual)
        u = activation(self.up(y), self.kind)
        value, gate = u.chunk(2, -1)
        gate = self._mixed(self.gate_norm(gate.contiguous()), context.cache)
        if self.tiny_attention is not None:
            gate = gate + self.tiny_attention(u, context)
        return self.down(gate * value), None

    def _mixed(self, gate: Tensor, cache: KVCache | None) -> Tensor:
        if cache is None:
            return self.spatial(gate)
        earlier = cache.gates[self.layer]
        if not cache.is_empty:
            return self.spatial.decode(gate, earlier, cache.lengths)
        earlier[:, : gate.shape[1]] = gate
        return self.spatial(gate)

    @property
    def cache_row(self) -> CacheRow:
        """The normalized gates, and the keys and values of the tiny attention."""
        dim, heads = (0, 0) if self.tiny_attention is None else (self.tiny_attention.head_dims[0], 1)
        return CacheRow(heads, dim, dim, gate=self.spatial.channels)
