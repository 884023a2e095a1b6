"""decode_attention over MLA caches, one kv head of 576 columns whose first 512 are the values, beside FlashAttention-3,
which takes the two parts of queries and keys by themselves, at its default splits (FLASH_3_LIBRARY)."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks import peers
from benchmarks.ops.decode import normal, scattered_pages, spread
from powertrain.ops.attention.decode import decode_attention
from powertrain.testing.bench import measure, table

DIM, DIM_V = 576, 512


class Case(NamedTuple):
    label: str
    sizes: list[tuple[int, int]]  # queries and keys of each sequence
    heads: int
    page_size: int
    packed: bool = False  # else all have as many queries

    @property
    def heading(self) -> str:
        return f"MLA {self.label}, pages of {self.page_size}, H{self.heads} bf16"


TOKENS = [(1, keys) for keys in spread(32)]
DRAFTS = [(n % 4 + 1, keys) for n, keys in enumerate(spread(32))]
CASES = [
    Case("64 of 8192", [(1, 8192)] * 64, 128, 64),
    Case("64 of 8192, 2 queries", [(2, 8192)] * 64, 128, 64),
    Case("64 of 8192", [(1, 8192)] * 64, 128, 1),
    Case("64 of 8192", [(1, 8192)] * 64, 16, 64),
    Case("64 of 8192, 4 queries", [(4, 8192)] * 64, 16, 64),
    Case("200 of 1000", [(1, 1000)] * 200, 128, 64),
    Case("32 of 500 to 32k", TOKENS, 128, 64),
    Case("32 of 500 to 32k", TOKENS, 64, 64),
    Case("32 of 500 to 32k", TOKENS, 32, 16),
    Case("32 of 500 to 32k", TOKENS, 16, 64),
    Case("32 of 500 to 32k", TOKENS, 128, 1),
    Case("1 of 65536 and 31 of 1000", [(1, 65536)] + [(1, 1000)] * 31, 128, 64),
    Case("1 of 131072", [(1, 131072)], 128, 64),
    *(Case(f"{n} of 4096", [(1, 4096)] * n, 128, 64) for n in (1, 2, 4, 8)),
    Case("8 of 500", [(1, 500)] * 8, 16, 64),
    Case("a chunk of 256 beside 31 tokens", [(256, 4096), *TOKENS[1:]], 128, 64, packed=True),
    Case("a chunk of 256 beside 31 tokens", [(256, 4096), *TOKENS[1:]], 16, 64, packed=True),
    Case("32 drafts of 1 to 4", DRAFTS, 128, 64, packed=True),
    Case("32 drafts of 1 to 4", DRAFTS, 16, 1, packed=True),
    Case("a chunk of 2048", [(2048, 2048)], 128, 64, packed=True),
]  # fmt: skip


def _variants(case: Case, device: str = "cuda") -> dict[str, Callable[[], Any]]:
    queries, lengths = (torch.tensor(x, dtype=torch.int32) for x in zip(*case.sizes, strict=True))
    pages = [-(-keys // case.page_size) for _, keys in case.sizes]
    cache = normal(sum(pages), case.page_size, 1, DIM, device=device)
    of_sequences, used = scattered_pages(pages, device), lengths.to(device)
    most, longest = int(queries.max()), int(lengths.max())
    starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int().to(device)
    shape = (int(queries.sum()),) if case.packed else (len(case.sizes), most)
    q = normal(*shape, case.heads, DIM, device=device)
    packed = {"cu_seqlens_q": starts, "max_seqlen_q": most} if case.packed else {}
    ours: dict[str, Any] = {"page_table": of_sequences, "head_dim_v": DIM_V, **packed}
    variants: dict[str, Callable[[], Any]] = {"powertrain": lambda: decode_attention(q, cache, None, used, **ours)}
    flash = peers.flash_3()
    if flash is not None and device == "cuda":
        options = {
            "q_v": q[..., :DIM_V], "seqused_k": used, "page_table": of_sequences, "softmax_scale": DIM**-0.5,
            "is_causal": most > 1, "num_splits": 0, "max_seqlen_k": longest, **packed,
        }  # fmt: skip
        parts = q[..., DIM_V:], cache[..., DIM_V:], cache[..., :DIM_V]
        variants["flash-attn-3"] = lambda: flash.fwd(*parts, **options)[0]
    return variants


@torch.no_grad()
def launch() -> None:
    """Ours on meta tensors: for `ahead.build`."""
    for case in CASES:
        _variants(case, "meta")["powertrain"]()


@torch.no_grad()
def run() -> Iterator[str]:
    for case in CASES:
        variants = _variants(case)
        expected = variants["powertrain"]()
        for call in variants.values():
            torch.testing.assert_close(call().view_as(expected), expected, rtol=2e-2, atol=2e-2)
        scores = sum(keys - i for n, keys in case.sizes for i in range(n))
        flops = 2 * case.heads * (DIM + DIM_V) * scores
        num_bytes = 2 * DIM * sum(keys for _, keys in case.sizes)
        yield table(case.heading, measure(variants), num_bytes=num_bytes, flops=flops)
        del variants, expected
        torch.cuda.empty_cache()
