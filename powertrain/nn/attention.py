"""Self-attention with one packed projection: rotary, ALiBi or neither, grouped queries, windows, blocks, qk-norm, KV
cache."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.nn.block_sparsity import BlockSparsity
from powertrain.nn.cache import KVCache, write_behind
from powertrain.nn.norm import RMSNorm
from powertrain.nn.tensor_parallel.linear import columns
from powertrain.ops.attention import attention, varlen_attention
from powertrain.ops.attention.decode import decode_attention, decode_projected
from powertrain.ops.attention.step_schedule import DecodeSchedule
from powertrain.ops.rope import rope, rope_qkv
from powertrain.ops.rope_table import RopeTable, Scheme, rope_table
from powertrain.runtime import checks
from powertrain.runtime.kept_tensors import Description, kept
from powertrain.runtime.positional import hinted


class Context(NamedTuple):
    """What layers need to know about the tokens besides their hidden states.

    position_ids   [B, S] int64: where tokens stand, if not at 0, 1, 2 ...
    document_ids   [B, S] int32: tokens see those with their own id only
    document_starts  [n + 1] int32: the same of documents that lie one behind the other: where each begins among all B S
                   tokens, and the end, which may be repeated; a row's first token begins one. The host need not read
                   it, and kernels for packed sequences, which are faster than those for ids, take it
    cache          keys and values of earlier tokens, while generating
    shape          (B, S) where x is this rank's share of the tokens, [t, hidden_size]; None: x is [B, S, hidden_size]
    across         attention of these tokens to those of other ranks too (query, key, value and options); None: to these
    schedule       lists of work that the layers share where they attend to the cache; None: each makes its own
    routed         a list to which a mixture of experts appends its balance loss and assignments; None: it stores them
    """

    position_ids: Tensor | None = None
    document_ids: Tensor | None = None
    cache: KVCache | None = None
    shape: tuple[int, int] | None = None
    across: Callable[..., Tensor] | None = None
    document_starts: Tensor | None = None
    routed: list[Tensor] | None = None
    schedule: DecodeSchedule | None = None


def check_states(op: str, x: Tensor, hidden_size: int, context: Context) -> None:
    """Raise ValueError unless x is [B, S, hidden_size], or a rank's share of such tokens."""
    checks.last_dim(op, "x", x, hidden_size)
    if context.shape is None and x.dim() != 3:
        checks.fail(op, "x", f"be [B, S, {hidden_size}]", list(x.shape))


def check_cached(op: str, context: Context, batch: int, new: int) -> None:
    """Raise an error unless context.cache has rows left for `new` tokens of each of `batch` sequences."""
    for name in ("position_ids", "document_ids", "document_starts"):
        if getattr(context, name) is not None:
            # layers count positions from the cache's lengths, and keep no documents apart
            raise NotImplementedError(f"{op}: {name} must be None with a KV cache, got a tensor")
    assert context.cache is not None
    context.cache.check(batch, new)


# of one more packed sequence on a CPU, where each is a call of its own: 1.2 ms, forward and backward; a score of a row
# and its mask takes 55 ns
_SCORES_OF_A_CALL = 1 << 14


def attend_documents(q: Tensor, k: Tensor, v: Tensor, context: Context, **options: Any) -> Tensor:
    """`attention` of q [B, S, H, D], k and v [B, S, K, D] where each token sees only its own document."""
    if context.document_starts is None or _short_on_cpu(q, context):
        out: Tensor = attention(q, k, v, document_ids=context.document_ids, **options)
        return out
    query, key, value = (x.flatten(0, 1) for x in (q, k, v))
    # no document is longer than a row
    packed: Tensor = varlen_attention(query, key, value, context.document_starts, max_seqlen_q=q.shape[1], **options)
    return packed.unflatten(0, q.shape[:2])


def _short_on_cpu(q: Tensor, context: Context) -> bool:
    """Whether document ids are given and masking by them is faster on a CPU than that many packed sequences."""
    if context.document_starts is None or context.document_ids is None or q.device.type != "cpu":
        return False
    B, S, H, _ = q.shape
    return B * S * S * H < _SCORES_OF_A_CALL * context.document_starts.shape[0]


def _ids(context: Context, q: Tensor) -> Tensor | None:
    """document_ids [B, S], if need be from document_starts: packed sequences take no attn_bias."""
    if context.document_ids is not None or context.document_starts is None:
        return context.document_ids
    tokens = torch.arange(q.shape[0] * q.shape[1], dtype=torch.int32, device=q.device)
    return torch.searchsorted(context.document_starts, tokens, right=True, out_int32=True).view(q.shape[:2])


@dataclass(frozen=True)
class Rotary(Description):
    """Settings of a rotary embedding; `table` builds the table of cos and sin, once per device."""

    dim: int
    max_seqlen: int
    base: float = 10000.0
    scheme: Scheme | None = None

    def table(self, device: torch.device) -> RopeTable:
        return _table(self, device)


@kept(64)
def _table(rotary: Rotary, device: torch.device) -> RopeTable:
    return rope_table(rotary.dim, rotary.max_seqlen, base=rotary.base, scheme=rotary.scheme, device=device)


@kept(64)
def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """[H] float32: 2^(-8 h / H) for a power of two; else those of the next lower one, then every second of the next.

    Source: Press et al., arXiv:2108.12409.
    """
    lower = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / lower) for h in range(lower)]
    slopes += [2.0 ** (-4.0 * (h + 1) / lower) for h in range(0, 2 * (num_heads - lower), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


class SelfAttention(nn.Module):
    """x [B, S, hidden_size] -> [B, S, hidden_size], causal; with Context.shape [t, hidden_size] -> the same.

    The projection is packed by kv head, "grouped" as GPT-NeoX and Megatron do: for each its query heads, its key, its
    value. So it can be sharded by kv head. For one query head each that is GPT-NeoX's own layout.
    sparsity: positions see some blocks of earlier ones only, by a mask of S * S bytes that all heads share; as in
    GPT-NeoX, whose sparse attention is DeepSpeed's, dropout is then applied to the result.
    """

    @hinted
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary: Rotary | None = None,
        alibi: bool = False,
        sliding_window: int | None = None,
        sparsity: BlockSparsity | None = None,
        qk_norm_eps: float | None = None,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        out_bias: bool = False,
        layer: int = 0,
    ) -> None:
        super().__init__()
        op = "SelfAttention"
        given = {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, count in {**given, "sliding_window": sliding_window}.items():
            checks.require(count is None or count >= 1, op, name, "be at least 1", count)
        # attention itself looks in training alone
        checks.require(0 <= dropout < 1, op, "dropout", "be in [0, 1)", dropout)
        if sparsity is not None:
            # decoding with a sparsity pattern applies neither
            checks.require(not alibi, op, "alibi", "be False with sparsity", alibi)
            checks.require(sliding_window is None, op, "sliding_window", "be None with sparsity", sliding_window)
        if head_dim is None and hidden_size % num_heads:
            must = f"be a multiple of num_heads {num_heads} where no head_dim is given"
            raise ValueError(f"SelfAttention: hidden_size must {must}, got {hidden_size}")
        self.hidden_size, self.head_dim = hidden_size, head_dim or hidden_size // num_heads
        if rotary is not None and rotary.dim > self.head_dim:
            checks.fail(op, "rotary", f"turn at most the {self.head_dim} channels of a head", rotary.dim)
        num_kv_heads = num_kv_heads or num_heads
        if num_heads % num_kv_heads:
            raise ValueError(
                f"SelfAttention: num_heads must be a multiple of num_kv_heads {num_kv_heads}, got {num_heads}"
            )
        self.group_size = num_heads // num_kv_heads
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.rotary, self.alibi, self.dropout, self.layer = rotary, alibi, dropout, layer
        # under tensor parallelism: the first of this rank's heads
        self.first_head = 0
        # the window counts the query's own position (Mistral, flash-attn): so many keys in all
        self.window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.sparsity = sparsity
        if sparsity is not None and sparsity.left >= 0:
            # keys outside of every block that is seen: a kernel need not visit them
            self.window = (sparsity.left, 0)
        self.qkv = nn.Linear(hidden_size, (num_heads + 2 * num_kv_heads) * self.head_dim, bias=qkv_bias)
        self.out = nn.Linear(num_heads * self.head_dim, hidden_size, bias=out_bias)
        self.q_norm, self.k_norm = (
            None if qk_norm_eps is None else RMSNorm(self.head_dim, eps=qk_norm_eps) for _ in range(2)
        )

    @property
    def cache_shape(self) -> tuple[int, int, int | None]:
        """kv heads, head dim of keys and of values: the row layout of a KVCache."""
        return self.num_kv_heads, self.head_dim, self.head_dim

    @property
    def head_dims(self) -> tuple[int, int]:
        """Channels of a query and key, and of a value."""
        return self.head_dim, self.head_dim

    def forward(self, x: Tensor, context: Context = Context()) -> Tensor:  # noqa: B008
        check_states("SelfAttention", x, self.hidden_size, context)
        # the head count follows from the projection's output: under tensor parallelism it is this rank's share of them
        (qkv,) = columns(x, self.qkv, shape=context.shape)
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        cache = context.cache
        if cache is not None:
            check_cached("SelfAttention", context, *qkv.shape[:2])
        if cache is None:
            q, k, v = self._rotated(qkv, context.position_ids)
            attended = self._attend(q, k, v, context)
        elif cache.is_empty:
            q, k, v = self._rotated(qkv)
            cache.fill(self.layer, k, v)
            attended = self._attend(q, k, v, Context())
        elif self.sparsity is None:
            attended = self._decode(qkv, cache, context.schedule)
        else:
            attended = self._decode_blocks(qkv, cache, self.sparsity)
        return self.out(attended.flatten(-2))

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views q [B, S, H, D], k and v [B, S, K, D] of the packed heads, q and k normalized."""
        groups = qkv.unflatten(-2, (-1, self.group_size + 2))
        q, k, v = groups.split((self.group_size, 1, 1), -2)
        q, k, v = q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _rotated(
        self, qkv: Tensor, position_ids: Tensor | None = None, offset: int | Tensor = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v; q and k rotated by position_ids [B, S], or by positions that begin at `offset`, an int or [B]."""
        if self.rotary is None:
            return self._split(qkv)
        table = self.rotary.table(qkv.device)
        # the fused kernel rotates the packed projection; norms of queries and keys come between the two
        if self.q_norm is not None:
            q, k, v = self._split(qkv)
            q, k = rope(q, k, table=table, position_ids=position_ids, offset=offset)
            return q, k, v
        kv_heads = qkv.shape[-2] // (self.group_size + 2)
        return rope_qkv(
            qkv, table=table, num_heads=kv_heads * self.group_size, num_kv_heads=kv_heads, packing="grouped",
            position_ids=position_ids, offset=offset,
        )  # fmt: skip

    def _slopes(self, q: Tensor) -> Tensor | None:
        if not self.alibi:
            return None
        # of all heads, then this rank's: the slopes depend on the total number of heads
        return alibi_slopes(self.num_heads, q.device)[self.first_head : self.first_head + q.shape[2]]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        options: dict[str, Any] = dict(
            is_causal=True, window_size=self.window, alibi_slopes=self._slopes(q),
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        if context.across is not None:
            return context.across(q, k, v, **options)
        if self.sparsity is None:
            return attend_documents(q, k, v, context, **options)
        options |= {"attn_bias": self.sparsity.mask(q.shape[1], q.device), "dropout_p": 0.0}
        out: Tensor = attention(q, k, v, document_ids=_ids(context, q), **options)
        return F.dropout(out, self.dropout, self.training)

    def _decode(self, qkv: Tensor, cache: KVCache, schedule: DecodeSchedule | None) -> Tensor:
        keys, values = cache.keys[self.layer], cache.values[self.layer]
        assert values is not None
        options: dict[str, Any] = {"window_size": self.window, "schedule": schedule}
        if self.rotary is not None and self.q_norm is None and not self.alibi:
            # reads q where the packed projection has it: decode_attention's own rotation needs a copy
            table = self.rotary.table(qkv.device)
            kv_heads = qkv.shape[-2] // (self.group_size + 2)
            return decode_projected(qkv, keys, values, cache.lengths, table=table, num_kv_heads=kv_heads, **options)
        q, k, v = self._rotated(qkv, offset=cache.lengths)
        out = decode_attention(
            q, keys, values, cache.lengths, key_new=k, value_new=v, alibi_slopes=self._slopes(q), **options
        )
        assert isinstance(out, Tensor)
        return out

    def _decode_blocks(self, qkv: Tensor, cache: KVCache, sparsity: BlockSparsity) -> Tensor:
        """Attention of new tokens to the cache with block sparsity: each position sees its own set of blocks."""
        keys, values = cache.keys[self.layer], cache.values[self.layer]
        assert values is not None
        new, capacity = qkv.shape[1], keys.shape[1]
        positions = cache.lengths[:, None].long() + torch.arange(new, device=qkv.device)
        q, k, v = self._rotated(qkv, positions.clamp(max=capacity - 1))
        for rows, added in ((keys, k), (values, v)):
            write_behind(rows, added, cache.lengths)
        out: Tensor = attention(q, keys, values, attn_bias=sparsity.mask_at(positions, capacity))
        return out
