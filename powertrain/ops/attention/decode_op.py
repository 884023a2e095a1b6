"""The op behind `decode_attention`: which kernel serves a call over a KV cache, and its launch; decode.py has the
algorithm."""

from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention.combine import PartTable, combine
from powertrain.ops.attention.decode_kernels import _decode_kernel
from powertrain.ops.attention.decode_plans import Plan, choose_splits, plan_for
from powertrain.ops.attention.decode_schedule import LEAST_KEYS, KeysSeen, schedule
from powertrain.ops.attention.decode_tiles import TileList
from powertrain.ops.attention.hopper.decode_mla import MlaCall, launch_mla, list_mla, why_not_mla
from powertrain.ops.attention.hopper.forward_pages import PagedCall, launch_pages, list_pages, why_not_cache
from powertrain.ops.attention.triton.tiles import pieces
from powertrain.ops.early_start import starts_early
from powertrain.ops.shapes import cdiv
from powertrain.runtime.dispatch import Op
from powertrain.runtime.target import Target

# queries times heads from which the Hopper kernel for MLA serves. us, one H200, 16 heads, this kernel and the universal
# one: 32 of 500 to 32k keys 127, 131; 64 of 8192 171, 186; fewer were not measured
MLA_LEAST_ROWS = 16


def _why_not_mla(call: MlaCall, target: Target) -> str | None:
    """Why the universal kernel serves a call of decode_attention and not the Hopper kernel for MLA, or None."""
    rows, batch = call.query.shape[:-1].numel(), call.batch
    if rows < MLA_LEAST_ROWS * batch:
        return f"it needs at least {MLA_LEAST_ROWS} query rows per sequence, got {rows} in {batch} sequences"
    return why_not_mla(call, target)


# Rows (queries times heads of a KV head) of a sequence, on average, from which the Hopper forward serves; below, the
# universal kernel does. MANY_LEAST_ROWS: of equal queries of more than 32768 sequences. us, universal and Hopper, one
# H200, nothing in the L2: 2 tokens beside 2028 to 2675 keys H16/16 32, 25; 8 H8/1 365 to 1061 24, 16; 64 H32/8 2952 to
# 15159 490, 477; 32 of 500 to 32k 347, 322; one sequence of 1232 keys, 2 queries H32/8 14.9, 12.5; of 25848, 1 query
# H12/2 24.4, 20.0; of 115649, 32 queries H32/8 131.5, 142.4; geometric mean of 24 random calls of one sequence 0.88
LEAST_ROWS, MANY_LEAST_ROWS = 1, 16


def why_not_many(call: PagedCall, target: Target, cache_batch_idx: Tensor | None = None) -> str | None:
    """Why the universal kernel serves and not the Hopper forward, or None."""
    kv_heads, batch = max(1, call.key_cache.shape[2]), call.seqlens.shape[0]
    rows = call.query.shape[:-1].numel() // kv_heads
    least = MANY_LEAST_ROWS if call.query_starts is None and batch > 1 << 15 else LEAST_ROWS
    if rows < least * batch:
        return f"it needs at least {least} query rows per sequence and KV head, got {rows} in {batch} sequences"
    return why_not_cache(call, cache_batch_idx, target)


def _decode_outputs(
    query: Tensor, key_cache: Tensor, value_cache: Tensor | None, head_dim_v: int, *_: Any
) -> tuple[Tensor, Tensor]:
    b, sq, h = query.shape[:3]
    return query.new_empty(b, sq, h, head_dim_v), query.new_empty((b, h, sq), dtype=torch.float32)


class _Call(NamedTuple):
    """The arguments of `decode_op`, in the order of its schema."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor | None
    head_dim_v: int
    cache_seqlens: Tensor
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    num_new: int
    left: int
    right: int
    softcap: float
    scale: float
    num_splits: int
    allow_tf32: bool
    query_starts: Tensor | None
    max_queries: int
    # `Shared` of an earlier call with these sizes, options and lengths
    entries: Tensor | None = None
    parts_of: Tensor | None = None
    counter: Tensor | None = None

    @property
    def kv_heads(self) -> int:
        return self.key_cache.shape[2]

    @property
    def ratio(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[2] // self.kv_heads if self.kv_heads else 1

    @property
    def page_size(self) -> int:
        """0: no pages."""
        return 0 if self.page_table is None else self.key_cache.shape[1]

    @property
    def capacity(self) -> int:
        """The most keys that a sequence may have."""
        return self.key_cache.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    @property
    def queries(self) -> int:
        """The most queries of a sequence."""
        return self.query.shape[1] if self.query_starts is None else self.max_queries

    @property
    def seen(self) -> int:
        """The most keys of a sequence that are read: queries are its last positions, so of a window those before."""
        return min(self.capacity, self.left + self.queries) if self.left >= 0 else self.capacity

    @property
    def sees_right(self) -> int:
        """The right bound, or -1 where it bounds nothing: one query a sequence stands at the last key. Packed queries
        keep it, since results must not depend on `max_queries`."""
        return self.right if self.query.shape[1] > 1 else -1

    def keys(self) -> KeysSeen:
        return KeysSeen(
            self.cache_seqlens, self.cache_leftpad, self.num_new, self.capacity, self.left, self.sees_right
        )  # fmt: skip

    def of_mla(self) -> MlaCall:
        return MlaCall(
            self.query, self.key_cache, self.value_cache, self.head_dim_v, self.query_starts, self.queries, self.keys(),
            self.seen, self.page_table, self.cache_batch_idx, self.alibi_slopes, self.sinks, self.softcap, self.scale,
            self.num_splits, self.entries, self.counter,
        )  # fmt: skip

    def of_pages(self) -> PagedCall:
        query = self.query if self.query_starts is None else self.query[0]
        return PagedCall(
            query, self.key_cache, self.value_cache, self.query_starts, self.cache_seqlens, self.page_table,
            self.cache_leftpad, self.alibi_slopes, self.sinks, self.left, self.right, self.softcap, self.scale,
            self.num_new, self.entries, self.counter,
        )  # fmt: skip


class _Operands(NamedTuple):
    """Queries, keys and values as the universal kernel reads them."""

    value: Tensor
    fma: bool  # products on the CUDA cores, in float32
    pieces_qk: tuple[int, ...]  # powers of 2 that a head dim is the sum of
    pieces_v: tuple[int, ...]
    shares_keys: bool  # the values are the first pieces of the keys
    strides: list[int]  # of query, keys, values, three each
    unit: int  # of the strides

    @staticmethod
    def of(call: _Call, target: Target) -> "_Operands":
        fma = not target.has_tensor_core_dot or (call.query.dtype is torch.float32 and not call.allow_tf32)
        wide, narrow = (pieces(d, 64 if fma else 512) for d in (call.query.shape[-1], call.head_dim_v))
        shares = call.value_cache is None and narrow == wide[: len(narrow)]
        value = call.key_cache if call.value_cache is None else call.value_cache
        strides = [t.stride(dim) for t in (call.query, call.key_cache, value) for dim in range(3)]
        unit = 8 if all(s % 8 == 0 for s in strides) else 1
        return _Operands(value, fma, wide, narrow, shares, [s // unit for s in strides], unit)


def _plan_of(call: _Call, operands: _Operands, target: Target) -> Plan:
    is_short = call.cache_seqlens.shape[0] * call.kv_heads * cdiv(call.seen, LEAST_KEYS) <= target.num_sms
    return plan_for(
        call.queries * call.ratio, sum(operands.pieces_qk), sum(operands.pieces_v), operands.shares_keys,
        call.query.element_size(), call.page_size, is_short, operands.unit == 8, operands.fma, target,
    )  # fmt: skip


class _Work(NamedTuple):
    """The attention kernel's programs, and memory for results of splits."""

    grid: tuple[int, int]
    sequences: int
    slots: int  # splits in all, or of each sequence
    parts: Tensor | None = None
    table: PartTable | None = None
    listed: TileList | None = None
    partial: Tensor | None = None
    partial_lse: Tensor | None = None


def _tiles_of(call: _Call, plan: Plan, target: Target) -> TileList:
    return TileList.of(
        call.query_starts, call.keys(), call.query.shape[1], call.ratio, call.kv_heads, call.seen, plan.tile, target,
        entries=call.entries,
    )  # fmt: skip


def _has_schedule(call: _Call) -> bool:
    # splits are the grid's second dim, of 65535 at most; so many sequences fill a GPU whole
    return call.num_splits == 0 and 1 < call.query.shape[0] <= 1 << 15


def _schedule_of(call: _Call, plan: Plan, target: Target) -> tuple[Tensor, PartTable]:
    b, sq = call.query.shape[:2]
    programs = call.kv_heads * cdiv(sq * call.ratio, plan.block_m)
    made = None if call.entries is None or call.parts_of is None else (call.entries, call.parts_of)
    return schedule(call.keys(), b, sq, call.ratio, programs, call.seen, plan.tile, target, made)


def _work_of(call: _Call, out: Tensor, lse: Tensor, plan: Plan, target: Target) -> _Work:
    query, kv_heads = call.query, call.kv_heads
    b, sq = query.shape[:2]
    programs = kv_heads * cdiv(sq * call.ratio, plan.block_m)
    if call.query_starts is not None:
        listed = _tiles_of(call, plan, target)
        partial = query.new_empty((listed.slots, kv_heads, plan.block_m, out.shape[-1]), dtype=torch.float32)
        partial_lse = query.new_empty(partial.shape[:-1], dtype=torch.float32)
        return _Work((kv_heads * listed.most, 1), b, listed.most, None, None, listed, partial, partial_lse)
    parts = table = None
    if _has_schedule(call):
        parts, table = _schedule_of(call, plan, target)
        shape: tuple[int, ...] = (parts.shape[1],)
        grid = programs, parts.shape[1]
    else:
        num_splits = call.num_splits or choose_splits(b * programs, call.seen, plan.per_sm, target)
        grid, shape = (b * programs, num_splits), (num_splits, b)
        if num_splits == 1:
            return _Work(grid, b, 1)
    partial = query.new_empty((*shape, *out.shape[1:]), dtype=torch.float32)
    partial_lse = query.new_empty((*shape, *lse.shape[1:]), dtype=torch.float32)
    return _Work(grid, b, shape[0], parts, table, None, partial, partial_lse)


def _launch_universal(
    call: _Call, operands: _Operands, plan: Plan, work: _Work, out: Tensor, lse: Tensor, target: Target
) -> None:
    table, slopes = call.page_table, call.alibi_slopes
    sq, h, head_dim_qk = call.query.shape[1:]
    _decode_kernel[work.grid](
        call.query, call.key_cache, operands.value, call.cache_seqlens, table, call.cache_batch_idx,
        call.cache_leftpad, slopes, call.sinks, out, lse, work.partial, work.partial_lse, work.parts,
        work.listed and work.listed.entries, work.sequences, sq, call.kv_heads, call.ratio, call.num_new, call.capacity,
        work.slots, call.left, call.right, 0 if table is None else table.stride(0),
        h if slopes is not None and slopes.dim() == 2 else 0, call.scale, call.softcap, *operands.strides,
        HEAD_DIM_QK=head_dim_qk, HEAD_DIM_V=call.head_dim_v, PIECES_QK=operands.pieces_qk,
        PIECES_V=operands.pieces_v, SHARES_KEYS=operands.shares_keys, HAS_LEFT=call.left >= 0,
        HAS_RIGHT=call.sees_right >= 0, HAS_SOFTCAP=call.softcap > 0, PAGE_SIZE=call.page_size, FMA=operands.fma,
        PRECISION="tf32" if call.allow_tf32 else "ieee", UNIT=operands.unit, BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n, STARTS_EARLY=starts_early(target), num_warps=plan.num_warps, num_stages=plan.num_stages,
        maxnreg=plan.registers if plan.registers and plan.num_warps == 4 else None,
    )  # fmt: skip


def _why_not_pages(call: _Call, target: Target) -> str | None:
    if call.num_splits:
        return "num_splits is given"
    return why_not_many(call.of_pages(), target, call.cache_batch_idx)


class Choice(NamedTuple):
    """Why each Hopper kernel does not compute a call, or None."""

    hopper: str | None
    hopper_mla: str | None


# of a call that is explained: the choice is left there
asked: ContextVar[list[Choice] | None] = ContextVar("asked", default=None)


def _decode(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(out [B, S, H, E], lse [B, H, S]) of a `_Call`; of packed queries B is 1."""
    call = _Call(*arguments)
    target = Target.of(call.query.device)
    mla = call.of_mla()
    if (explained := asked.get()) is not None:
        explained.append(Choice(_why_not_pages(call, target), _why_not_mla(mla, target)))
    if _why_not_pages(call, target) is None:
        out, lse = launch_pages(call.of_pages(), call.queries, target)
        return (out, lse) if call.query_starts is None else (out[None], lse[None])
    out, lse = _decode_outputs(*call)
    if _why_not_mla(mla, target) is None:
        launch_mla(mla, out, lse, target)
        return out, lse
    operands = _Operands.of(call, target)
    plan = _plan_of(call, operands, target)
    work = _work_of(call, out, lse, plan, target)
    _launch_universal(call, operands, plan, work, out, lse, target)
    if work.partial is not None and work.partial_lse is not None:
        if work.listed is not None:
            work.listed.combine(work.partial, work.partial_lse, call.sinks, out, lse, call.kv_heads, call.queries)
        else:
            combine(work.partial, work.partial_lse, call.sinks, out, lse, out.stride()[:3], work.table)
    return out, lse


class Shared(NamedTuple):
    """What calls of the same sizes and options over the same lengths need not each make for themselves."""

    entries: Tensor | None = None  # of a `TileList`, or the first table of `schedule`; None: the keys are not listed
    parts_of: Tensor | None = None  # the second table of `schedule`
    counter: Tensor | None = None  # an int32 that is 0, from which the programs of one launch after another count


def share(*arguments: Any) -> Shared:
    """`Shared` of a `_Call`, made on the current stream, whose launches follow one another."""
    call = _Call(*arguments)
    target = Target.of(call.query.device)
    is_of_pages, mla = _why_not_pages(call, target) is None, call.of_mla()
    if is_of_pages or _why_not_mla(mla, target) is None:
        entries = list_pages(call.of_pages(), call.queries, target) if is_of_pages else list_mla(mla, target)
        return Shared(entries, None, torch.zeros(1, dtype=torch.int32, device=call.query.device))
    plan = _plan_of(call, _Operands.of(call, target), target)
    if call.query_starts is not None:
        return Shared(_tiles_of(call, plan, target).entries)
    if not _has_schedule(call):
        return Shared()
    parts, table = _schedule_of(call, plan, target)
    return Shared(parts, table.parts)


decode_op = Op(
    "decode_attention(Tensor query, Tensor key_cache, Tensor? value_cache, int head_dim_v, Tensor cache_seqlens, "
    "Tensor? page_table, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? alibi_slopes, Tensor? sinks, "
    "SymInt num_new, SymInt left, SymInt right, float softcap, float scale, int num_splits, bool allow_tf32, "
    "Tensor? query_starts, SymInt max_queries, Tensor? entries=None, Tensor? parts_of=None, Tensor? counter=None) "
    "-> (Tensor, Tensor)",
    _decode,
    _decode_outputs,
)
