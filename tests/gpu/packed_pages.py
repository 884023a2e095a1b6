"""Packed queries over caches in pages, for tests of the Hopper kernels: random problems, and their results beside
float64."""

from typing import Any

import torch
from torch import Tensor

from powertrain.ops.attention.decode import decode_attention, decode_attention_ref

CUDA = torch.device("cuda")


def problem_of(
    sizes: list[tuple[int, int]], page: int, heads: tuple[int, int] = (8, 2), dims: tuple[int, ...] = (128, 128),
    around: tuple[int, int] = (0, 0), dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:  # fmt: skip
    """`sizes`: queries and keys of each sequence; `around`: rows of no sequence. NaN in all rows that hold no keys,
    and in pages of no sequence; unused page ids are wild. `dims`: of keys and values, or of keys that hold both."""
    torch.manual_seed(0)
    queries, lengths = zip(*sizes, strict=True)
    pages = [-(-n // page) for n in lengths]
    total = sum(pages) + 3
    order = torch.randperm(total, device=CUDA).int()
    table = torch.full((len(sizes), max(pages) + 1), 2**30, dtype=torch.int32, device=CUDA)
    caches = [torch.full((total, page, heads[1], dim), torch.nan, device=CUDA, dtype=dtype) for dim in dims]
    at = 0
    for n, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        table[n, :count] = order[at : at + count]
        for cache in caches:
            rows = torch.full((count * page, *cache.shape[2:]), torch.nan, device=CUDA, dtype=dtype)
            rows[:length] = torch.randn(length, *cache.shape[2:], device=CUDA)
            cache[order[at : at + count].long()] = rows.unflatten(0, (count, page))
        at += count
    starts = around[0] + torch.tensor([0, *queries], device=CUDA).cumsum(0)
    return {
        "query": torch.randn(int(starts[-1]) + around[1], heads[0], dims[0], device=CUDA).to(dtype),
        "key_cache": caches[0], "value_cache": caches[1] if len(caches) > 1 else None,
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=CUDA), "page_table": table,
        "cu_seqlens_q": starts.int(),
    }  # fmt: skip


def check(problem: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    most = int(problem["cu_seqlens_q"].diff().max())
    out, lse = decode_attention(**problem, max_seqlen_q=most, return_lse=True, **options)
    wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in problem.items()}
    expected, expected_lse = decode_attention_ref(**wide, **options)
    torch.testing.assert_close(out.double(), expected, rtol=2**-6, atol=2**-7)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-3, atol=1e-3)
    return out, lse
