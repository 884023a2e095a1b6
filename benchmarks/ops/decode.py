"""decode_attention over dense and paged caches, beside torch's flash SDPA (which wants one length and no pages); over
sequences of different lengths, beside FlashAttention-3 at its default splits (FLASH_3_LIBRARY)."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import peers
from powertrain.ops.attention import varlen_attention
from powertrain.ops.attention.decode import decode_attention
from powertrain.ops.conversion import gather_pages
from powertrain.testing.bench import measure, table

H, K, D = 32, 8, 128
# batch, keys, page sizes (0: dense). 64 x 65536 keys are 17 GB
CASES = [
    (64, 8192, (0, 1, 16, 64, 256)),
    (64, 65536, (0, 1, 16, 64, 256)),
    (1, 131072, (0, 1, 16, 64, 256)),
    (16, 8192, (0, 16)),
    (4, 8192, (0, 16)),
]


def spread(batch: int) -> list[int]:
    """Lengths of 500 to 32768, evenly by their logarithm."""
    draws = random.Random(0)
    return [int(math.exp(draws.uniform(math.log(500), math.log(32768)))) for _ in range(batch)]


# label, lengths, query and kv heads, head dim, page size (0: dense), queries
LENGTHS = [
    ("32 of 500 to 32k", spread(32), 32, 8, 128, 0, 1),
    ("32 of 500 to 32k, pages of 16", spread(32), 32, 8, 128, 16, 1),
    ("32 of 500 to 32k, pages of 64", spread(32), 28, 4, 128, 64, 1),
    ("32 of 500 to 32k, pages of 1", spread(32), 64, 8, 128, 1, 1),
    ("64 of 500 to 32k", spread(64), 32, 8, 128, 0, 1),
    ("64 of 8192", [8192] * 64, 32, 8, 128, 0, 1),
    ("64 of 8192, pages of 64", [8192] * 64, 32, 8, 128, 64, 1),
    ("16 of 8192", [8192] * 16, 32, 8, 128, 0, 1),
    ("4 of 3000", [3000] * 4, 28, 4, 128, 0, 1),
    ("1 of 2205, pages of 64", [2205], 28, 4, 128, 64, 1),
    ("1 of 3118, 2 queries", [3118], 28, 4, 128, 0, 2),
    ("256 of 1024", [1024] * 256, 32, 8, 128, 0, 1),
    ("2 of 131072, pages of 64", [131072] * 2, 32, 8, 128, 64, 1),
    ("1 of 32768 and 31 of 500", [32768] + [500] * 31, 32, 8, 128, 0, 1),
    ("31 of 500 and 1 of 32768, pages of 64", [500] * 31 + [32768], 32, 8, 128, 64, 1),
    ("1 of 131072 and 63 of 1000, pages of 16", [131072] + [1000] * 63, 32, 8, 128, 16, 1),
    ("32 of 500 to 32k, head dim 64", spread(32), 16, 16, 64, 0, 1),
    ("32 of 500 to 32k, 8 queries, pages of 64", spread(32), 32, 8, 128, 64, 8),
]


def _mixed(chunks: dict[int, int]) -> list[tuple[int, int]]:
    """(queries, keys): single tokens of 32 sequences, but of some a chunk of a prompt."""
    return [(chunks.get(n, 1), max(keys, chunks.get(n, 1))) for n, keys in enumerate(spread(32))]


def _chunks(batch: int, most: int) -> list[tuple[int, int]]:
    """Chunks of 20 to 600 queries behind up to `most` keys."""
    draws = random.Random(batch)
    return [(n, n + draws.randint(0, most)) for n in (draws.randint(20, 600) for _ in range(batch))]


class Mixed(NamedTuple):
    """Packed queries of head dim 128."""

    label: str
    sizes: list[tuple[int, int]]  # queries and keys of each sequence
    heads: int
    kv_heads: int
    page_size: int
    window: int = -1  # keys before a query's own; -1: all

    @property
    def heading(self) -> str:
        text = f"{self.label}, pages of {self.page_size}, H{self.heads}/{self.kv_heads} D{D} bf16"
        return text if self.window < 0 else text + f", window {self.window}"

    @property
    def keys_read(self) -> int:
        return sum(min(keys, n + self.window) if self.window >= 0 else keys for n, keys in self.sizes)

    @property
    def scores(self) -> int:
        most = self.window + 1 if self.window >= 0 else 1 << 40
        return sum(min(keys - i, most) for n, keys in self.sizes for i in range(n))


MIXED = [
    Mixed("a chunk of 512 beside 31 tokens", _mixed({7: 512}), 32, 8, 64),
    Mixed("a chunk of 512 beside 31 tokens", _mixed({7: 512}), 28, 4, 16),
    Mixed("4 chunks of 512 beside 28 tokens", _mixed({3: 512, 9: 512, 20: 512, 30: 512}), 32, 8, 64),
    Mixed("a chunk of 2048 beside 31 tokens", _mixed({7: 2048}), 32, 8, 64),
    Mixed("32 chunks of 1 to 16", [(n % 16 + 1, keys) for n, keys in enumerate(spread(32))], 32, 8, 64),
    Mixed("32 chunks of 256", [(256, max(256, keys)) for keys in spread(32)], 32, 8, 64),
    Mixed("32 single tokens", [(1, keys) for keys in spread(32)], 32, 8, 64),
    Mixed("1 chunk of 1024 beside 32768 keys", [(1024, 32768)], 32, 8, 64),
    Mixed("40 chunks of 20 to 600, to 16000 keys", _chunks(40, 16000), 32, 8, 128),
    Mixed("100 chunks of 20 to 600, to 2600 keys", _chunks(100, 2000), 28, 4, 128),
    # no tile is cut; more tiles than a small list has
    Mixed("2 chunks of 2048", [(2048, 2048)] * 2, 32, 4, 64),
    Mixed("60 chunks of 512 beside 1500 keys", [(512, 1500)] * 60, 8, 1, 64),
    # windows; pages of less than 8 keys
    Mixed("a chunk of 512 beside 31 tokens", _mixed({7: 512}), 32, 8, 64, 1023),
    Mixed("32 chunks of 256", [(256, max(256, keys)) for keys in spread(32)], 28, 4, 16, 4095),
    Mixed("32 single tokens", [(1, keys) for keys in spread(32)], 64, 8, 16, 127),
    Mixed("a chunk of 512 beside 31 tokens", _mixed({7: 512}), 28, 4, 1),
    Mixed("32 chunks of 256", [(256, max(256, keys)) for keys in spread(32)], 32, 8, 1),
    Mixed("32 single tokens", [(1, keys) for keys in spread(32)], 32, 8, 4),
    # few sequences, whose calls take little longer than their kernels' code takes to be read
    Mixed("1 chunk of 16 beside 3856 keys", [(16, 3856)], 32, 8, 16),
    Mixed("3 chunks of 8 beside 230 to 8259 keys", [(8, 584), (8, 230), (8, 8259)], 40, 8, 16),
    Mixed("4, a draft of 8, 735 to 1007 keys", [(1, 989), (8, 930), (1, 735), (1, 1007)], 12, 2, 128),
    Mixed("6 tokens, 190 to 9624 keys", [(1, n) for n in (190, 9624, 234, 1176, 1115, 811)], 8, 1, 128),
    Mixed(
        "8 tokens, 1725 to 20328 keys", [(1, n) for n in (3998, 1725, 3639, 2792, 20328, 4593, 9270, 1780)], 28, 4, 64
    ),
    Mixed("16 tokens of 8000 keys", [(1, 8000)] * 16, 32, 8, 64),
]


def normal(*shape: int, device: str) -> Tensor:
    return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_()


def _ours(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, page_size: int) -> Callable[[], Any]:
    if page_size == 0:
        return lambda: decode_attention(q, keys, values, lengths)
    b, n = keys.shape[:2]
    pages = torch.randperm(b * n // page_size, device=q.device).view(b, -1).int()
    keys, values = (cache.view(-1, page_size, K, D) for cache in (keys, values))
    return lambda: decode_attention(q, keys, values, lengths, page_table=pages)


def _sdpa(q: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Any]:
    """The heads that share a kv head stand as its queries: flash-attention's own split-KV then reads a cache once."""
    b = q.shape[0]
    packed = q.view(b, K, H // K, D)

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(packed, keys.transpose(1, 2), values.transpose(1, 2))

    return run


def _of_lengths() -> Iterator[str]:
    for label, lengths, heads, kv_heads, head_dim, page_size, queries in LENGTHS:
        variants = _variants_of_lengths(lengths, heads, kv_heads, head_dim, page_size, queries)
        expected = variants["powertrain"]()
        for run in variants.values():
            torch.testing.assert_close(run(), expected, rtol=2e-2, atol=2e-2)
        num_bytes = 2 * 2 * sum(lengths) * kv_heads * head_dim
        heading = f"decode {label}, H{heads}/{kv_heads} D{head_dim} bf16"
        yield table(heading, measure(variants), num_bytes=num_bytes)


def _variants_of_lengths(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, page_size: int, queries: int, device: str = "cuda"
) -> dict[str, Callable[[], Any]]:
    q = normal(len(lengths), queries, heads, head_dim, device=device)
    pages = [-(-n // page_size) for n in lengths] if page_size else []
    shape = (sum(pages), page_size) if page_size else (len(lengths), max(lengths))
    keys, values = (normal(*shape, kv_heads, head_dim, device=device) for _ in range(2))
    of_sequences = scattered_pages(pages, device) if page_size else None
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    variants: dict[str, Callable[[], Any]] = {
        "powertrain": lambda: decode_attention(q, keys, values, used, page_table=of_sequences)
    }
    flash = peers.flash_3()
    if flash is not None:
        options = {"page_table": of_sequences, "is_causal": True, "num_splits": 0}
        variants["flash-attn-3"] = lambda: flash.fwd(q, keys, values, seqused_k=used, **options)[0]
    return variants


def scattered_pages(pages: list[int], device: str) -> Tensor:
    """Pages in no order, so many of each sequence."""
    order = torch.randperm(sum(pages), device=device).int().split(pages)
    return torch.nn.utils.rnn.pad_sequence(order, batch_first=True)


def _of_packed_queries() -> Iterator[str]:
    """Chunks of prompts beside single tokens in one call, over pages."""
    for case in MIXED:
        variants = _variants_of_packed(case)
        expected = variants["powertrain"]()
        for run in variants.values():
            torch.testing.assert_close(run(), expected, rtol=2e-2, atol=2e-2)
        num_bytes = 2 * 2 * case.keys_read * case.kv_heads * D
        flops = 4 * case.heads * D * case.scores
        yield table(case.heading, measure(variants), num_bytes=num_bytes, flops=flops)
        del variants, expected
        torch.cuda.empty_cache()


def _variants_of_packed(case: Mixed, device: str = "cuda") -> dict[str, Callable[[], Any]]:
    return packed_variants(*case[1:5], device=device, window=case.window)


def packed_variants(
    sizes: list[tuple[int, int]], heads: int, kv_heads: int, page_size: int, device: str = "cuda", head_dim: int = D,
    window: int = -1,
) -> dict[str, Callable[[], Any]]:  # fmt: skip
    """page_size 0: a dense cache. window: keys seen before a query's own; -1: all."""
    queries, lengths = (torch.tensor(x, dtype=torch.int32) for x in zip(*sizes, strict=True))
    pages = [-(-keys // page_size) for _, keys in sizes] if page_size else []
    shape = (sum(pages), page_size) if page_size else (len(sizes), int(lengths.max()))
    caches = [normal(*shape, kv_heads, head_dim, device=device) for _ in range(2)]
    of_sequences = scattered_pages(pages, device) if page_size else None
    starts, ends = (torch.nn.functional.pad(x.cumsum(0), (1, 0)).int().to(device) for x in (queries, lengths))
    used, most, longest = lengths.to(device), int(queries.max()), int(lengths.max())
    room = torch.arange(len(sizes) + 1, dtype=torch.int32, device=device) * longest
    q = normal(int(queries.sum()), heads, head_dim, device=device)

    def copied() -> Any:
        assert of_sequences is not None
        k, v = (gather_pages(x, of_sequences, longest).flatten(0, 1) for x in caches)
        return varlen_attention(
            q, k, v, starts, ends, most, longest, cu_seqlens_k_padded=room, is_causal=True, window_size=(window, 0)
        )  # fmt: skip

    variants: dict[str, Callable[[], Any]] = {
        "powertrain": lambda: decode_attention(
            q,
            *caches,
            used,
            page_table=of_sequences,
            cu_seqlens_q=starts,
            max_seqlen_q=most,
            window_size=(window, 0),
        ),
        "a copy of the pages": copied,
    }
    flash = peers.flash_3()
    if flash is not None:
        options = {
            "cu_seqlens_q": starts, "max_seqlen_q": most, "max_seqlen_k": longest, "page_table": of_sequences,
            "is_causal": window < 0, "window_size_left": window, "window_size_right": 0,
        }  # fmt: skip
        variants["flash-attn-3"] = lambda: flash.fwd(q, *caches, seqused_k=used, num_splits=0, **options)[0]
    return variants


def _variants_of_equal_lengths(
    b: int, n: int, page_sizes: tuple[int, ...], device: str
) -> dict[str, Callable[[], Any]]:
    q, keys, values = (normal(b, *shape, device=device) for shape in ((1, H, D), (n, K, D), (n, K, D)))
    lengths = torch.full((b,), n, dtype=torch.int32, device=device)
    variants = {f"page {p}" if p else "dense": _ours(q, keys, values, lengths, p) for p in page_sizes}
    return {**variants, "torch flash": _sdpa(q, keys, values)}


@torch.no_grad()
def launch() -> None:
    """Ours on meta tensors: for `ahead.build`."""
    every = [_variants_of_lengths(*case[1:], device="meta") for case in LENGTHS]
    every += [_variants_of_packed(case, "meta") for case in MIXED]
    every += [_variants_of_equal_lengths(*case, device="meta") for case in CASES]
    for variants in every:
        for name, call in variants.items():
            if not name.startswith(("flash", "torch")):
                call()


@torch.no_grad()
def run() -> Iterator[str]:
    yield from _of_packed_queries()
    yield from _of_lengths()
    for b, n, page_sizes in CASES:
        timings = measure(_variants_of_equal_lengths(b, n, page_sizes, "cuda"))
        yield table(f"decode B{b} keys {n} H{H}/{K} D{D} bf16", timings, num_bytes=2 * 2 * b * n * K * D)
        torch.cuda.empty_cache()
