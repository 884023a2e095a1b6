"""TransformerEngine's cache managers: the memory of an `InferenceParams`, dense or in pages, and whose rows are where.

Slots of a step's tokens are computed on the device from the lengths there, so a captured CUDA graph holds for later
steps of the same shapes.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention.cache_append import append_op
from powertrain.ops.shapes import cdiv
from powertrain.runtime import checks
from powertrain.runtime.dispatch import use_kernel

_OP = "InferenceParams"


class Tokens(NamedTuple):
    """Of each new token, in the memory order of its format: all [tokens] on the device.

    sequence  its row of the batch
    offset    its number among the sequence's new tokens
    counts    False for padding
    """

    sequence: Tensor
    offset: Tensor
    counts: Tensor


def new_tokens(x: Tensor, qkv_format: str, cu_seqlens: Tensor, batch: int) -> Tokens:
    """The tokens of x [b, s, h, d], [s, b, h, d] or [t, h, d]; cu_seqlens: of the new tokens, int32 [b + 1 or more]."""
    cu_seqlens = cu_seqlens[: batch + 1]
    if qkv_format == "thd":
        token = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
        # clamped: tokens behind the last sequence are padding, which does not count below
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True).clamp(max=batch - 1)
        return Tokens(sequence, token - cu_seqlens[sequence], token < cu_seqlens[-1])
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape[:2])
    rows, columns = rows[:, None].expand(x.shape[:2]), columns.expand(x.shape[:2])
    sequence, index = (rows, columns) if qkv_format == "bshd" else (columns, rows)
    counts = index < cu_seqlens.diff()[sequence]
    return Tokens(sequence.flatten(), index.flatten(), counts.flatten())


def is_capturing(x: Tensor) -> bool:
    """Whether a CUDA graph records the work on x: then nothing that the host knows of this step may be used."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def batch_of(x: Tensor, qkv_format: str, when_packed: int) -> int:
    """Rows of the batch of x; of packed tokens `when_packed`."""
    return when_packed if qkv_format == "thd" else x.shape[qkv_format.index("b")]


def device_of_caches() -> torch.device:
    # made on the GPU, as there
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class KVCacheManager:
    """The methods that `InferenceParams` calls: the class to derive a custom_cache_manager from.

    cache: layer number to (keys, values); sequences: id to length, the new tokens included, in the batch's order.
    """

    def __init__(self) -> None:
        self.cache: dict[int, tuple[Any, Any]] = {}
        self.sequences: OrderedDict[int, int] = OrderedDict()

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        self.sequences = OrderedDict()

    def allocate_memory(self, layer_number: int) -> None:
        """Make the cache of a layer."""
        self.cache[layer_number] = (None, None)

    def pre_step(self, step_dict: "OrderedDict[int, int]") -> "OrderedDict[int, int]":
        """Take the step's sequences, id to number of new tokens; returns `sequences`."""
        return self.sequences

    def step(
        self, layer_number: int, new_k: Tensor, new_v: Tensor, cu_new_seqlens: Tensor, cu_cached_seqlens: Tensor,
        qkv_format: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Copy a layer's new keys and values into its cache; returns the cache, rows in the batch's order."""
        return self.cache[layer_number]


class _Rows(KVCacheManager):
    """A cache whose memory is rows of tokens: slot n of a layer is row n of its flattened keys and values."""

    def __init__(
        self, shape: tuple[int, int], num_heads: int, head_dims: tuple[int, int], dtype: torch.dtype,
        max_batch_size: int, max_seqlen: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.max_batch_size, self.max_seqlen = max_batch_size, max_seqlen
        self.num_heads, self.dtype = num_heads, dtype
        self.head_dim_k, self.head_dim_v = head_dims
        self._shape, self._device = shape, device_of_caches()
        # the slots of a step's tokens are the same in all layers
        self._slots: dict[tuple[Any, ...], Tensor] = {}

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        super().reset()
        self._slots = {}

    def allocate_memory(self, layer_number: int) -> None:
        """Make the keys and values of a layer, of zeros."""
        keys, values = (
            torch.zeros(*self._shape, self.num_heads, dim, dtype=self.dtype, device=self._device)
            for dim in (self.head_dim_k, self.head_dim_v)
        )
        self.cache[layer_number] = (keys, values)

    def _advanced(self, step_dict: "OrderedDict[int, int]") -> "OrderedDict[int, int]":
        """The sequences after a step, checked; nothing is changed."""
        must = f"have at most max_batch_size {self.max_batch_size} sequences"
        checks.require(len(step_dict) <= self.max_batch_size, _OP, "step_dict", must, len(step_dict))
        # a new one: where a sequence is refused, the old one stays
        after: OrderedDict[int, int] = OrderedDict()
        for name, new in step_dict.items():
            checks.require(new >= 0, _OP, f"step_dict[{name!r}]", "be at least 0", new)
            after[name] = self.sequences.get(name, 0) + new
            must = f"leave at most max_sequence_length {self.max_seqlen} tokens in the sequence"
            checks.require(after[name] <= self.max_seqlen, _OP, f"step_dict[{name!r}]", must, after[name])
        return after

    @torch.no_grad()
    def step(
        self, layer_number: int, new_k: Tensor, new_v: Tensor, cu_new_seqlens: Tensor, cu_cached_seqlens: Tensor,
        qkv_format: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Copy a layer's new keys and values into its cache; returns the cache, rows in the batch's order."""
        caches = self.cache[layer_number]
        for name, new, cache in zip(("new_k", "new_v"), (new_k, new_v), caches, strict=True):
            must = f"be {checks.name(self.dtype)}, InferenceParams' dtype"
            checks.require(new.dtype is cache.dtype, _OP, name, must, checks.name(new.dtype))
            checks.same_device(_OP, "the cache", cache, **{name: new})
            if new.shape[-2:] != cache.shape[-2:]:
                checks.fail(_OP, name, f"end in {list(cache.shape[-2:])}, heads and head dim", list(new.shape))
        # padding of the batch, up to max_batch_size, has no tokens
        batch = batch_of(new_k, qkv_format, self.max_batch_size)
        key = (qkv_format, *new_k.shape[:-2])
        # a graph computes its slots itself: its replays have other lengths
        if is_capturing(new_k) or key not in self._slots:
            slots = self._slots_of(
                new_tokens(new_k, qkv_format, cu_new_seqlens, batch), cu_new_seqlens, cu_cached_seqlens
            )
            self._slots = {} if is_capturing(new_k) else {key: slots}
        else:
            slots = self._slots[key]
        rows = [x.reshape(-1, *x.shape[-2:]) for x in (new_k, new_v)]
        _write(rows, [cache.flatten(0, 1) for cache in caches], slots)
        return self._in_order(caches, batch)

    def _slots_of(self, tokens: Tokens, cu_new: Tensor, cu_cached: Tensor) -> Tensor:
        """The slot of each new token [tokens], -1 for padding."""
        cached, new = cu_cached.diff(), cu_new.diff()
        # cached lengths include the new tokens
        position = (cached - new)[tokens.sequence] + tokens.offset
        fits = tokens.counts & (position < self.max_seqlen)
        return torch.where(fits, self._slot(tokens.sequence, torch.where(fits, position, 0)), -1)

    def _slot(self, sequence: Tensor, position: Tensor) -> Tensor:
        raise NotImplementedError

    def _in_order(self, caches: tuple[Tensor, Tensor], batch: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def _write(rows: Sequence[Tensor], caches: Sequence[Tensor], slots: Tensor) -> None:
    """caches[slots] = rows for both; a slot of -1 is no write."""
    if use_kernel("decode_attention", rows[0]):
        # each token is a sequence of its own in one entry of the cache: positions outside of it are dropped
        entry = torch.zeros_like(slots)
        append_op(rows[0][:, None], rows[1][:, None], caches[0][None], caches[1][None], slots, None, entry)
        return
    # index -1 would write the last row
    kept = slots >= 0
    for new, cache in zip(rows, caches, strict=True):
        cache[slots[kept]] = new[kept]


class NonPagedKVCacheManager(_Rows):
    """Caches [max_batch_size, max_seqlen, heads, head dim] of keys and values: a row of the batch, a row of the cache.

    `pre_step` copies cached tokens where a sequence changes its row, in all layers.
    """

    def __init__(
        self, max_batch_size: int, max_seqlen: int, num_heads: int, head_dim_k: int, dtype: torch.dtype,
        head_dim_v: int | None = None,
    ) -> None:  # fmt: skip
        dims = (head_dim_k, head_dim_k if head_dim_v is None else head_dim_v)
        super().__init__((max_batch_size, max_seqlen), num_heads, dims, dtype, max_batch_size, max_seqlen)

    @torch.no_grad()
    def pre_step(self, step_dict: "OrderedDict[int, int]") -> "OrderedDict[int, int]":
        """Take the step's sequences, id to number of new tokens; returns the lengths after it, in the same order."""
        after = self._advanced(step_dict)
        before = {name: row for row, name in enumerate(self.sequences)}
        moves = [(before[name], row) for row, name in enumerate(after) if before.get(name, row) != row]
        if moves:
            source, target = torch.tensor(moves, device=self._device).unbind(1)
            longest = max(self.sequences.values())
            for caches in self.cache.values():
                for cache in caches:
                    # gathered first: rows may change places with one another
                    cache[target, :longest] = cache[source, :longest]
        self.sequences, self._slots = after, {}
        return self.sequences

    def _slot(self, sequence: Tensor, position: Tensor) -> Tensor:
        return sequence * self.max_seqlen + position

    def _in_order(self, caches: tuple[Tensor, Tensor], batch: int) -> tuple[Tensor, Tensor]:
        return caches[0][:batch], caches[1][:batch]


@dataclass
class Page:
    """A page of a cache: page_size tokens of one sequence, in all layers."""

    page_id: int
    allocated: bool = False

    def allocate_page(self) -> None:
        """Mark it as used."""
        self.allocated = True

    def deallocate_page(self) -> None:
        """Mark it as free."""
        self.allocated = False


class PagedKVCacheManager(_Rows):
    """Caches [total_num_pages, page_size, heads, head dim] of keys and values, and which pages a sequence has.

    page_table [max_batch_size, pages of a sequence] int32, on the device; entries beyond a sequence's pages are 0.
    """

    def __init__(
        self, total_num_pages: int, page_size: int, num_heads: int, head_dim_k: int, dtype: torch.dtype,
        max_batch_size: int, max_seqlen: int, head_dim_v: int | None = None,
    ) -> None:  # fmt: skip
        dims = (head_dim_k, head_dim_k if head_dim_v is None else head_dim_v)
        super().__init__((total_num_pages, page_size), num_heads, dims, dtype, max_batch_size, max_seqlen)
        self.total_num_pages, self.page_size = total_num_pages, page_size
        self.max_pages_per_seq = max_seqlen // page_size
        self.page_table = torch.zeros(
            max_batch_size, self.max_pages_per_seq, dtype=torch.int32, device=self._device
        )  # fmt: skip
        self._free_all()

    def _free_all(self) -> None:
        self.free_pages = [Page(number) for number in range(self.total_num_pages)]
        self.allocated_pages: defaultdict[int, list[Page]] = defaultdict(list)

    def reset(self) -> None:
        """Forget all sequences and free all pages; the memory stays."""
        super().reset()
        self._free_all()
        self.page_table.zero_()

    def pre_step(self, step_dict: "OrderedDict[int, int]") -> "OrderedDict[int, int]":
        """Take the step's sequences, id to number of new tokens; returns the lengths after it, in the same order."""
        after = self._advanced(step_dict)
        needed = sum(cdiv(length, self.page_size) for length in after.values())
        must = f"be at least {needed} for {len(after)} sequences of {sum(after.values())} tokens"
        # before anything changes: a step that raises leaves all as it was
        checks.require(needed <= self.total_num_pages, _OP, "total_num_pages", must, self.total_num_pages)
        # freed first, so that a full cache can exchange its sequences
        for name in [name for name in self.sequences if name not in after]:
            self.deallocate_sequence(name)
        for name, length in after.items():
            for _ in range(cdiv(length, self.page_size) - self.get_page_count(name)):
                self.allocate_page(name)
        self.sequences, self._slots = after, {}
        self.get_page_table(list(after))
        return self.sequences

    def _slot(self, sequence: Tensor, position: Tensor) -> Tensor:
        page = self.page_table[sequence, position // self.page_size]
        return page * self.page_size + position % self.page_size

    def _in_order(self, caches: tuple[Tensor, Tensor], batch: int) -> tuple[Tensor, Tensor]:
        # the page table has the order
        return caches

    def print_cache(self) -> None:
        """Log, for debugging, the pages of every sequence."""
        import logging

        log = logging.getLogger("PagedKVCacheManager").debug
        used = self.total_num_pages - len(self.free_pages)
        log("%s pages (%s used), %s sequences", self.total_num_pages, used, self.get_sequence_count())
        for row, (name, length) in enumerate(self.sequences.items()):
            log("row %s: sequence %s, %s tokens, pages %s", row, name, length, self.get_page_list(name))

    def get_sequence_count(self) -> int:
        """The number of sequences."""
        return len(self.sequences)

    def get_sequence_lengths(self) -> list[int]:
        """The sequences' lengths, in the batch's order."""
        return list(self.sequences.values())

    def has_free_page(self) -> bool:
        """Whether a page is free."""
        return bool(self.free_pages)

    def get_page_count(self, seq: int) -> int:
        """The number of a sequence's pages."""
        return len(self.allocated_pages.get(seq, ()))

    def get_page_list(self, seq: int) -> list[int]:
        """A sequence's pages, first tokens first."""
        return [page.page_id for page in self.allocated_pages.get(seq, ())]

    def get_page_table(self, sequences: Sequence[int]) -> Tensor:
        """page_table, after its first rows were set to the pages of these sequences."""
        # filled on the host: one copy to the device instead of one a sequence
        table = torch.zeros(self.page_table.shape, dtype=torch.int32, device="cpu")
        for row, name in enumerate(sequences):
            pages = self.get_page_list(name)
            table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device="cpu")
        # in place: a captured graph reads it
        self.page_table.copy_(table)
        return self.page_table

    def allocate_page(self, seq: int) -> None:
        """Give one more page to a sequence."""
        checks.require(self.has_free_page(), _OP, "total_num_pages", "leave a free page", self.total_num_pages)
        page = self.free_pages.pop(0)
        page.allocate_page()
        self.allocated_pages[seq].append(page)

    def allocate_sequence(self, seq: int, context_len: int) -> None:
        """Give a new sequence the pages of its first context_len tokens."""
        for _ in range(cdiv(context_len, self.page_size)):
            self.allocate_page(seq)

    def deallocate_sequence(self, seq: int) -> None:
        """Free a sequence's pages."""
        for page in self.allocated_pages.pop(seq, []):
            page.deallocate_page()
            self.free_pages.append(page)
