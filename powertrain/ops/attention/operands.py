"""Heads, sizes and strides of a call, for the kernels of the Triton, Hopper and cuDNN backends.

Each op makes one `Operands` from its tensors and passes it on; code below does not look at the layout again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention.problem import AttentionCall, Layout
from powertrain.ops.shapes import cdiv, empty, empty_like
from powertrain.runtime.target import Target

# bmghk is missing because it has two dims of heads
_HEAD_DIM: dict[Layout, int] = {"bshd": 2, "bhsd": 1, "sbhd": 2, "thd": 1}
_BATCH_AND_SEQUENCE: dict[Layout, tuple[int, int]] = {"bshd": (0, 1), "bhsd": (0, 2), "sbhd": (1, 0), "bmghk": (0, 1)}

# save_for_backward takes tensors only; the split of the tuple follows from this number
NUM_TENSORS = 11  # so many fields of OpArguments are tensors: the first ones


class OpArguments(NamedTuple):
    """Arguments of the ops other than query, key and value, in the order of SCHEMA."""

    bias: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None
    prefix: Tensor | None
    query_documents: Tensor | None
    key_documents: Tensor | None
    query_starts: Tensor | None
    key_starts: Tensor | None
    query_used: Tensor | None
    key_used: Tensor | None
    seed: Tensor | None
    layout: Layout
    scale: float
    softcap: float
    dropout_p: float
    left: int
    right: int
    chunk: int
    bottom_right: bool
    deterministic: bool = False  # the same gradients every time
    unordered: bool = False  # keys of sequences lie in any order and may be shared

    @classmethod
    def of(cls, call: AttentionCall) -> "OpArguments":
        mask, tensors, varlen = call.mask, call.tensors, call.varlen
        return cls(
            tensors.bias, tensors.alibi_slopes, tensors.sinks, tensors.prefix, tensors.query_documents,
            tensors.key_documents, varlen.query_starts, varlen.key_starts, varlen.query_used, varlen.key_used,
            call.dropout_seed, call.layout, call.scale, mask.softcap, call.dropout_p, mask.left, mask.right, mask.chunk,
            # torch.library infers nothing from a NamedTuple, so the call is flattened once here
            mask.bottom_right, call.deterministic, varlen.unordered,
        )  # fmt: skip

    @property
    def slopes_stride(self) -> int:
        """Stride of the ALiBi slopes [batch, heads] by batch; 0 for slopes [heads]."""
        return self.slopes.shape[1] if self.slopes is not None and self.slopes.dim() == 2 else 0


SCHEMA = (
    # torch.library reads a schema as text, so the fields of OpArguments are listed here once more, in the same order
    "Tensor? bias, Tensor? slopes, Tensor? sinks, Tensor? prefix, Tensor? query_documents, Tensor? key_documents, "
    "Tensor? query_starts, Tensor? key_starts, Tensor? query_used, Tensor? key_used, Tensor? seed, str layout, "
    "float scale, float softcap, float dropout_p, int left, int right, int chunk, bool bottom_right, "
    "bool deterministic, bool unordered"
)


class Heads(NamedTuple):
    """The number of KV heads, and of query heads per KV head."""

    kv: int
    # kernels loop over the query heads of one KV head, and so need both counts
    q_per_kv: int
    kv_step: int  # the caller's index of a head is kv * kv_step + q * q_step
    q_step: int
    shared: bool  # the query heads of a group share a key and value head


class Operand(NamedTuple):
    """A tensor with its strides by batch, sequence, KV head and query head of a KV head."""

    tensor: Tensor
    b: int
    s: int
    h: int
    r: int


def heads_of(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Heads:
    """The heads of a call. Keys and values that the caller expanded along heads or groups (stride 0) count as one
    head."""
    if layout == "bmghk":
        groups, heads = query.shape[2:4]
        # groups expanded, heads not: the caller's group is our query head, the caller's head our KV head
        if groups > 1 and heads > 0 and key.stride(2) == value.stride(2) == 0 != key.stride(3):
            return Heads(heads, groups, 1, heads, True)
        return Heads(groups, heads, heads, 1, heads > 1 and key.stride(3) == value.stride(3) == 0)
    dim = _HEAD_DIM[layout]
    heads, kv = query.shape[dim], key.shape[dim]
    # stride 0 along the heads: expand() made MQA out of one head, whose rows are read once
    if kv > 1 and key.stride(dim) == value.stride(dim) == 0:
        return Heads(1, heads, heads, 1, True)
    return Heads(kv, heads // kv, heads // kv, 1, heads != kv)


class Operands(NamedTuple):
    """Tensors, heads and sizes of one call."""

    args: OpArguments
    target: Target
    heads: Heads
    is_packed: bool
    batch: int  # sequences
    storage: int  # batch entries in memory: 1 if sequences are packed
    queries: int  # of a sequence; tokens of all if packed
    keys: int
    d_qk: int
    d_v: int
    q: Operand
    k: Operand
    v: Operand

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, args: OpArguments) -> "Operands":
        heads, starts = heads_of(query, key, value, args.layout), args.query_starts
        # one object per call: layout, strides and heads are computed once and handed to plan, checks and launch
        if starts is None:
            b, s = _BATCH_AND_SEQUENCE[args.layout]
            batch = storage = query.shape[b]
        else:
            # packed rows lie in one storage without a batch dim
            batch, storage, s = starts.shape[0] - 1, 1, 0
        return cls(
            args, Target.of(query.device), heads, starts is not None, batch, storage, query.shape[s], key.shape[s],
            query.shape[-1], value.shape[-1], _operand(query, args.layout, heads),
            _operand(key, args.layout, heads, True), _operand(value, args.layout, heads, True),
        )  # fmt: skip

    @property
    def lengths_are_known(self) -> bool:
        """Whether the lengths of all sequences are known: they are not packed, or one is alone."""
        return not self.is_packed or self.batch == 1

    @property
    def num_heads(self) -> int:
        # grids are made of it: packed sequences share one storage, so `batch` would count them twice
        """Query heads of all batch entries in memory."""
        return self.storage * self.heads.kv * self.heads.q_per_kv

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Uninitialized (out, lse)."""
        return forward_outputs(self.q.tensor, self.v.tensor, self.args.layout)

    def like_query(self, x: Tensor) -> Operand:
        """A tensor with the query's dims: results and their gradients."""
        return _operand(x, self.args.layout, self.heads)

    def like_key(self, x: Tensor) -> Operand:
        """A tensor with the key's dims: its gradient."""
        return _operand(x, self.args.layout, self.heads, True)

    def query_blocks(self, block: int) -> int:
        """Blocks of queries of one head."""
        return self._blocks(self.queries, block)

    def key_blocks(self, block: int) -> int:
        return self._blocks(self.keys, block)

    def likely_key_blocks(self, block: int) -> int:
        """An estimate of how many of them hold keys: half of the packed sequences begin one more block than they
        fill."""
        return cdiv(self.keys, block) + (self.batch // 2 if self.is_packed else 0)

    def _blocks(self, tokens: int, block: int) -> int:
        # packed: each sequence may end in a partial block, and rows may lie before the first and behind the last
        return cdiv(tokens, block) + (self.batch + 1 if self.is_packed else 0)


def _operand(x: Tensor, layout: Layout, heads: Heads, is_key: bool = False) -> Operand:
    strides = x.stride()
    if layout == "bmghk":
        group, head = strides[2:4]
        # in expanded groups the caller's two dims of heads change places
        h, r = (head, group) if heads.kv_step == 1 and heads.q_per_kv > 1 else (group, head)
    else:
        head = strides[_HEAD_DIM[layout]]
        # keys have one head per group of query heads
        h, r = (head, 0) if is_key else (head * heads.q_per_kv, head)
    r = 0 if is_key and heads.shared else r
    # a packed tensor has no stride by batch: starts give the first row
    if layout == "thd":
        return Operand(x, 0, strides[0], h, r)
    b, s = _BATCH_AND_SEQUENCE[layout]
    return Operand(x, strides[b], strides[s], h, r)


def one_head(x: Tensor, layout: Layout, heads: Heads) -> Tensor:
    """A view of key or value without the expanded copies."""
    dim = expanded_dim(x, layout, heads)
    # gradients of expanded keys are computed for the one head in memory
    return x if dim is None else x.narrow(dim, 0, 1)


def expanded_dim(x: Tensor, layout: Layout, heads: Heads) -> int | None:
    """The dim of key or value along which the caller expanded one head or group."""
    if not heads.shared:
        return None
    if layout == "bmghk":
        return 2 if heads.kv_step == 1 else 3
    dim = _HEAD_DIM[layout]
    return dim if x.shape[dim] != heads.kv else None


def is_expanded(x: Tensor) -> bool:
    # a dim of size 1 may report stride 0 without being expanded
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))


def forward_outputs(query: Tensor, value: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Uninitialized (out, lse)."""
    shape = (*query.shape[:-1], value.shape[-1])
    # keep the order of the dims in memory
    if layout == "bhsd" and query.stride(1) < query.stride(2):
        out = query.new_empty((shape[0], shape[2], shape[1], shape[3])).transpose(1, 2)
    else:
        out = query.new_empty(shape)
    return out, torch.empty(_lse_shape(query, layout), dtype=torch.float32, device=query.device)


def _lse_shape(query: Tensor, layout: Layout) -> tuple[int, ...]:
    shape = query.shape
    # heads first: rows of one head are contiguous, as flash-attn's varlen LSE [h, t]
    if layout == "thd":
        return shape[1], shape[0]
    if layout == "bmghk":
        return shape[0], shape[2], shape[3], shape[1]
    b, s = _BATCH_AND_SEQUENCE[layout]
    return shape[b], shape[_HEAD_DIM[layout]], shape[s]


class BackwardCall(NamedTuple):
    """Arguments of a backward op, which needs out and LSE of any forward."""

    dout: Tensor
    dlse: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    need: list[bool]  # which gradients: query, key, value, bias
    args: OpArguments

    @classmethod
    def of(cls, *flat: Any) -> "BackwardCall":
        """From the op's arguments, in the order of its schema."""
        dout, dlse, query, key, value, out, lse, need, *rest = flat
        # `need` lies between the tensors and the options in the schema
        return cls(dout, dlse, query, key, value, out, lse, need, OpArguments(*rest))

    def flat(self) -> tuple[Any, ...]:
        return (*self[:8], *self.args)

    def operands(self) -> Operands:
        return Operands.of(self.query, self.key, self.value, self.args)

    def outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Uninitialized (dq, dk, dv, dbias); those that are not needed are empty. Expanded keys have one head."""
        query, args, need = self.query, self.args, self.need
        heads = heads_of(query, self.key, self.value, args.layout)
        # torch.library requires every declared result, so gradients that nobody wants are empty tensors
        dq = empty_like(query) if need[0] else empty(query)
        dk = empty_like(one_head(self.key, args.layout, heads)) if need[1] else empty(query)
        dv = empty_like(one_head(self.value, args.layout, heads)) if need[2] else empty(query)
        dbias = empty(query)
        if need[3] and args.bias is not None:
            # kernels write the bias's gradient by computed strides, which an expanded or permuted bias does not have
            dbias = torch.empty_like(args.bias, memory_format=torch.contiguous_format)
        return dq, dk, dv, dbias
