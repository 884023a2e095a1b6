"""TransformerEngine's InferenceParams: caches of keys and values for generation, dense or in pages.

    params = InferenceParams(4, 256, num_heads_kv=8, head_dim_k=128, dtype=torch.bfloat16)
    for ids, lengths in batches:                      # ids of sequences, and how many tokens each brings
        params.pre_step(OrderedDict(zip(ids, lengths)))
        for layer in layers:
            x = layer(x, self_attn_mask_type="padding_causal", inference_params=params)

Sequences are the rows of the batch in the order of the step's dictionary; one that is not in it is finished, and its
place is free again. `pre_step` moves keys and values where rows change, so `step` copies new tokens only and reads
lengths on the device: a captured CUDA graph holds for later steps of the same shapes.
Source: the documentation of transformer_engine.pytorch.InferenceParams, and its bookkeeping of sequences and pages.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.attention.kv_cache import (
    KVCacheManager,
    NonPagedKVCacheManager,
    Page,
    PagedKVCacheManager,
    device_of_caches,
)
from powertrain.runtime import checks

__all__ = ["InferenceParams", "KVCacheManager", "NonPagedKVCacheManager", "Page", "PagedKVCacheManager"]

_OP = "InferenceParams"
_FORMATS = ("bshd", "sbhd", "thd")


class InferenceParams:
    """Caches of keys and values of all layers, and the sequences of each step; the module's docstring has an example.

    max_batch_size, max_sequence_length   most sequences of a step, most tokens of one
    num_heads_kv, head_dim_k, head_dim_v, dtype   of keys and values, of this rank; head_dim_v None: head_dim_k
    is_paged, page_size, total_num_pages   pages of page_size tokens, which divides max_sequence_length; their number
                          is max_batch_size * max_sequence_length / page_size, as there
    max_ctx_len           most new tokens of a sequence in one step; needed for qkv_format "thd"
    custom_cache_manager  a class derived from KVCacheManager, called with the keywords of the one it replaces

    On the current GPU (the CPU without one): cu_seqlens_q, cu_seqlens_kv int32 [max_batch_size + 1], of new tokens and
    of all; the entries behind the batch repeat the last one.
    Memory: 2 caches a layer, of max_batch_size * max_sequence_length rows, made when the layer first computes.
    Raises ValueError naming the argument; a step that raises changes nothing.
    A sequence may bring any number of tokens in any step; there, one token after its first step.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: Any = None,
    ) -> None:
        for name, value in (("max_batch_size", max_batch_size), ("max_sequence_length", max_sequence_length)):
            checks.require(value >= 1, _OP, name, "be at least 1", value)
        for name, given in (("num_heads_kv", num_heads_kv), ("head_dim_k", head_dim_k), ("dtype", dtype)):
            checks.require(given is not None, _OP, name, "be given", None)
        checks.one_of(_OP, "qkv_format", qkv_format, _FORMATS)
        fits = max_ctx_len is None or 1 <= max_ctx_len <= max_sequence_length
        checks.require(fits, _OP, "max_ctx_len", f"be 1 to max_sequence_length {max_sequence_length}", max_ctx_len)
        checks.require(
            max_ctx_len is not None or qkv_format != "thd", _OP, "max_ctx_len", "be given for qkv_format 'thd'", None
        )
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.head_dim_k, self.dtype = num_heads_kv, head_dim_k, dtype
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.is_paged, self.page_size, self.total_num_pages = is_paged, page_size, total_num_pages
        self.max_ctx_len, self.cache_qkv_format = max_ctx_len, "bshd"
        self._formats(qkv_format)
        sizes: dict[str, Any] = {
            "max_batch_size": max_batch_size, "max_seqlen": max_sequence_length, "num_heads": num_heads_kv,
            "head_dim_k": head_dim_k, "dtype": dtype, "head_dim_v": self.head_dim_v,
        }  # fmt: skip
        if is_paged:
            sizes |= {"total_num_pages": total_num_pages, "page_size": self._check_pages()}
        # called with keywords, so that a custom manager need not know their order
        made = custom_cache_manager or (PagedKVCacheManager if is_paged else NonPagedKVCacheManager)
        self.cache_manager: Any = made(**sizes)
        self.sequences: OrderedDict[int, int] = OrderedDict()
        self.sequences_pre_step: OrderedDict[int, int] = OrderedDict()
        self.batch_size = 0
        # most new tokens of a sequence in this step, and whether all bring as many
        self.longest, self.is_even = 0, True
        device, size = device_of_caches(), max_batch_size + 1
        self.cu_seqlens_q, self.cu_seqlens_kv = (torch.zeros(size, dtype=torch.int32, device=device) for _ in range(2))
        self.pre_step_seqlens = torch.zeros(max_batch_size, dtype=torch.int32, device=device)

    def _check_pages(self) -> int:
        page, length = self.page_size, self.max_sequence_length
        if page is None or page < 1 or length % page:
            checks.fail(_OP, "page_size", f"divide max_sequence_length {length}", page)
        pages = self.max_batch_size * (length // page)
        must = f"be {pages}, max_batch_size times the pages of a sequence"
        checks.require(self.total_num_pages == pages, _OP, "total_num_pages", must, self.total_num_pages)
        return page

    def _formats(self, qkv_format: str) -> None:
        self.input_qkv_format = qkv_format
        same = qkv_format == self.cache_qkv_format
        self.output_qkv_format = qkv_format if same else f"{qkv_format}_2{self.cache_qkv_format}"

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        self.sequences, self.sequences_pre_step, self.batch_size = OrderedDict(), OrderedDict(), 0
        self.cache_manager.reset()

    def __repr__(self) -> str:
        names = ["total_num_pages", "page_size"] if self.is_paged else ["max_batch_size", "max_sequence_length"]
        names = ["dtype", "is_paged", *names, "num_heads_kv", "head_dim_k", "head_dim_v"]
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def allocate_memory(self, layer_number: int) -> None:
        """Make the cache of a layer; modules do it when they first compute."""
        self.cache_manager.allocate_memory(layer_number)

    def pre_step(self, step_dict: "OrderedDict[int, int]") -> None:
        """Begin a step: step_dict has the batch's sequences in order, id to number of new tokens."""
        checks.require(len(step_dict) > 0, _OP, "step_dict", "have a sequence", step_dict)
        self.sequences = self.cache_manager.pre_step(step_dict)
        # a custom manager may return others, and rows would be read as another sequence's
        if list(self.sequences) != list(step_dict):
            got = list(self.sequences)
            checks.fail(_OP, "cache_manager.pre_step", f"return step_dict's sequences {list(step_dict)}, in order", got)
        self.batch_size = len(step_dict)
        new = list(step_dict.values())
        before = [length - fresh for length, fresh in zip(self.sequences.values(), new, strict=True)]
        self.sequences_pre_step = OrderedDict(zip(step_dict, before, strict=True))
        self.longest, self.is_even = max(new), min(new) == max(new)
        # in place: a captured graph reads them
        self.pre_step_seqlens[: len(before)].copy_(torch.tensor(before, dtype=torch.int32, device="cpu"))
        for cumulative, lengths in ((self.cu_seqlens_q, new), (self.cu_seqlens_kv, self.sequences.values())):
            # on the host, so that each tensor is one copy to the device
            counts = torch.zeros(self.max_batch_size + 1, dtype=torch.int32, device="cpu")
            counts[1 : len(new) + 1] = torch.tensor(list(lengths), device="cpu")
            cumulative.copy_(counts.cumsum(0))

    def get_seqlens_pre_step(self) -> Tensor:
        """Lengths of the sequences before this step, int32 [max_batch_size]."""
        return self.pre_step_seqlens

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values out of their pages: [batch, max_sequence_length, heads, head dim] each, copied."""
        checks.require(self.is_paged, _OP, "is_paged", "be True to convert", False)
        table = self.cache_manager.page_table[: self.batch_size].long()
        keys, values = (cache[table].flatten(1, 2) for cache in self.cache_manager.cache[layer_number])
        return keys, values

    def step(
        self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int, str]:
        """Copy a layer's new keys and values into its cache.

        Returns keys and values of the whole cache ([b, s, h, d], or pages), cu_seqlens_q, cu_seqlens_kv,
        max_sequence_length, and the formats of query and cache, such as "thd_2bshd".
        """
        checks.one_of(_OP, "qkv_format", qkv_format, _FORMATS)
        self._check_step(new_k, qkv_format)
        self._formats(qkv_format)
        cumulative = (self.cu_seqlens_q, self.cu_seqlens_kv)
        keys, values = self.cache_manager.step(layer_number, new_k, new_v, *cumulative, qkv_format)
        return keys, values, *cumulative, self.max_sequence_length, self.output_qkv_format

    def _check_step(self, new_k: Tensor, qkv_format: str) -> None:
        """The tensors of a step against its sequences."""
        checks.require(self.batch_size > 0, _OP, "pre_step", "be called before the model", "no sequences")
        if qkv_format == "thd":
            # more are allowed: padding may follow the packed tokens
            tokens = sum(self.sequences.values()) - sum(self.sequences_pre_step.values())
            must = f"have the step's {tokens} tokens"
            checks.require(new_k.shape[0] >= tokens, _OP, "new_k", must, list(new_k.shape))
            return
        # a batch may be padded up to max_batch_size, as captured graphs need
        batch, length = (new_k.shape[qkv_format.index(dim)] for dim in "bs")
        fits = self.batch_size <= batch <= self.max_batch_size and length >= self.longest
        must = f"have {self.batch_size} sequences of at least {self.longest} tokens, {qkv_format!r}, as the step"
        checks.require(fits, _OP, "new_k", must, list(new_k.shape))


__getattr__ = unknown(__name__)
