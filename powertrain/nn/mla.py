"""Multi-head latent attention: keys and values of all heads from one small latent per token, which is all it caches."""

from typing import Any

import torch
from torch import Tensor, nn

from powertrain.nn.attention import Context, Rotary, attend_documents, check_cached, check_states
from powertrain.nn.cache import KVCache
from powertrain.nn.lora import LoRALinear
from powertrain.nn.norm import RMSNorm
from powertrain.nn.tensor_parallel.linear import columns, of_all_tokens
from powertrain.ops.attention.decode import decode_attention
from powertrain.ops.attention.step_schedule import DecodeSchedule
from powertrain.ops.rope import rope
from powertrain.runtime import checks
from powertrain.runtime.positional import hinted

_EPS = 1e-6  # of the latents' norms: DeepSeek's, whatever the model's


class LatentAttention(nn.Module):
    """x [B, S, hidden_size] -> [B, S, hidden_size], causal; with Context.shape [t, hidden_size] -> the same.

        c, r = kv_down(x)                        latent [kv_lora_rank], rotary key [qk_rope_head_dim], one for all heads
        k_h, v_h = kv_up(norm(c))                a head's key without position, its value
        q_h = q(x), or q_up(norm(q_down(x)))     a head's query, its rotary channels first
        out(softmax(scale * q_h [rope(r), k_h]ᵀ) v_h)

    Rotary channels come first in queries and keys (DeepSeek's checkpoints have them last), so that `rope` rotates a
    query in place. During generation a token's row of the cache is [norm(c), rope(r)]: kv_up's key half is multiplied
    into the query and its value half into the result, and all heads read the same rows (DeepSeek-V2, section 2.1.2).
    """

    @hinted
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        q_lora_rank: int | None = None,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        rotary: Rotary,
        rotary_interleaved: bool = True,
        scale: float | None = None,
        bias: bool = False,
        layer: int = 0,
    ) -> None:
        super().__init__()
        op = "LatentAttention"
        sizes = {
            "hidden_size": hidden_size, "num_heads": num_heads, "kv_lora_rank": kv_lora_rank,
            "q_lora_rank": q_lora_rank, "qk_rope_head_dim": qk_rope_head_dim, "v_head_dim": v_head_dim,
        }  # fmt: skip
        for name, size in sizes.items():
            checks.require(size is None or size >= 1, op, name, "be at least 1", size)
        checks.sizes(op, qk_nope_head_dim=qk_nope_head_dim)
        # a smaller one would leave some of the channels without positions
        must = f"turn the qk_rope_head_dim {qk_rope_head_dim} channels"
        checks.require(rotary.dim == qk_rope_head_dim, op, "rotary", must, rotary.dim)
        head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.kv_lora_rank, self.v_head_dim = kv_lora_rank, v_head_dim
        self.nope, self.rope_dim, self.head_dim = qk_nope_head_dim, qk_rope_head_dim, head_dim
        self.rotary, self.interleaved, self.layer = rotary, rotary_interleaved, layer
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = (-1, -1)
        self.q: nn.Module | None = None
        self.q_down: nn.Module | None = None
        self.q_norm: nn.Module | None = None
        self.q_up: nn.Module | None = None
        if q_lora_rank is None:
            self.q = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        else:
            self.q_down = nn.Linear(hidden_size, q_lora_rank, bias=bias)
            self.q_norm = RMSNorm(q_lora_rank, eps=_EPS)
            self.q_up = nn.Linear(q_lora_rank, num_heads * head_dim, bias=False)
        self.kv_down = nn.Linear(hidden_size, kv_lora_rank + qk_rope_head_dim, bias=bias)
        self.kv_norm = RMSNorm(kv_lora_rank, eps=_EPS)
        self.kv_up = nn.Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.out = nn.Linear(num_heads * v_head_dim, hidden_size, bias=bias)

    @property
    def head_dims(self) -> tuple[int, int]:
        """Channels of a query or key, and of a value."""
        return self.head_dim, self.v_head_dim

    @property
    def cache_shape(self) -> tuple[int, int, int | None]:
        """kv heads, head dim of keys and of values (None: the keys' first channels): the row layout of a KVCache."""
        return 1, self.kv_lora_rank + self.rope_dim, None

    def forward(self, x: Tensor, context: Context = Context()) -> Tensor:  # noqa: B008
        check_states("LatentAttention", x, self.hidden_size, context)
        cache = context.cache
        if cache is not None:
            check_cached("LatentAttention", context, *x.shape[:2])
        q = self._rotated(self._query(x, context), context)
        latent, r = self.kv_down(x).split((self.kv_lora_rank, self.rope_dim), -1)
        # all heads share r, and under tensor parallelism each rank has heads of all tokens
        r = of_all_tokens(r, self.kv_up, context.shape)
        latent, r = self.kv_norm(latent), self._rotated(r.unsqueeze(-2), context)
        if cache is None:
            attended = self._attend(q, latent, r, context)
        elif cache.is_empty:
            # values are the keys' first channels, so the cache has one tensor
            cache.fill(self.layer, torch.cat((latent.unsqueeze(-2), r), -1), None)
            attended = self._attend(q, latent, r, Context())
        else:
            attended = self._decode(q, latent, r, cache, context.schedule)
        return self.out(attended.flatten(-2))

    def _rotated(self, x: Tensor, context: Context) -> Tensor:
        """x with the first channels of every head rotated by the tokens' positions."""
        cache = context.cache
        # new tokens stand behind those that the cache has
        offset = 0 if cache is None or cache.is_empty else cache.lengths
        rotated = rope(
            x, table=self.rotary.table(x.device), interleaved=self.interleaved, position_ids=context.position_ids,
            offset=offset,
        )  # fmt: skip
        assert isinstance(rotated, Tensor)
        return rotated

    def _query(self, x: Tensor, context: Context) -> Tensor:
        if self.q is not None:
            (q,) = columns(x, self.q, shape=context.shape)
        else:
            assert self.q_down is not None and self.q_norm is not None and self.q_up is not None
            (q,) = columns(self.q_norm(self.q_down(x)), self.q_up, shape=context.shape)
        return q.unflatten(-1, (-1, self.head_dim))

    def _attend(self, q: Tensor, latent: Tensor, r: Tensor, context: Context) -> Tensor:
        (kv,) = columns(latent, self.kv_up, shape=context.shape)
        k, v = kv.unflatten(-1, (-1, self.nope + self.v_head_dim)).split((self.nope, self.v_head_dim), -1)
        # rotated channels first, in queries too: `rope` turns the first ones
        k = torch.cat((r.expand(*k.shape[:-1], -1), k), -1)
        return attend_documents(q, k, v, context, is_causal=True, scale=self.scale)

    def _decode(self, q: Tensor, latent: Tensor, r: Tensor, cache: KVCache, schedule: DecodeSchedule | None) -> Tensor:
        # kv_up is applied to queries and results, not to the cache: rows stay latents, one for all heads
        up = self._up_weight(latent).unflatten(0, (-1, self.nope + self.v_head_dim))  # [H, nope + v, latent]
        k_up, v_up = up.split((self.nope, self.v_head_dim), 1)
        q_rotated, q = q.split((self.rope_dim, self.nope), -1)
        out = decode_attention(
            torch.cat((torch.einsum("bshn,hnl->bshl", q, k_up), q_rotated), -1),
            cache.keys[self.layer], None, cache.lengths,
            key_new=torch.cat((latent.unsqueeze(-2), r), -1), scale=self.scale, head_dim_v=self.kv_lora_rank,
            schedule=schedule,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return torch.einsum("bshl,hvl->bshv", out, v_up)

    def _up_weight(self, latent: Tensor) -> Tensor:
        """[N, latent]: the weight of kv_up, its adapter included."""
        up: Any = self.kv_up
        if isinstance(up, LoRALinear) and up.enabled:
            return up.merged_weight()
        if isinstance(up, nn.Linear):
            return up.weight
        # another library's layer around it, whose `weight` may be the inner one's: its products with unit vectors
        units = torch.eye(self.kv_lora_rank, dtype=latent.dtype, device=latent.device)
        found: Tensor = up(units).T
        return found
