"""Every kernel of decode_attention and merge_attentions, launched on meta tensors for `record()` to see."""

import torch
from torch import Tensor

from powertrain.ops.attention.decode import decode_attention, decode_projected
from powertrain.ops.attention.hopper.forward_pages import PagedCall, launch_pages
from powertrain.ops.attention.merge import merge_attentions
from powertrain.ops.rope_table import rope_table
from powertrain.runtime.target import Target

META = torch.device("meta")


def _decode(
    dtype: torch.dtype, batch: int, heads: int, kv_heads: int, dqk: int, dv: int, page_size: int = 0,
    left: int = -1, is_padded: bool = False,
) -> None:  # fmt: skip
    """One new token appended to a cache of 8192, and attended to. A value of 512 in a key of 576 shares it."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    rows = (batch * 8192 // page_size, page_size) if page_size else (batch, 8192)
    table = torch.empty(batch, 8192 // page_size, dtype=torch.int32, device=META) if page_size else None
    shares = dqk == 576
    decode_attention(
        empty(batch, 1, heads, dqk),
        empty(*rows, kv_heads, dqk),
        None if shares else empty(*rows, kv_heads, dv),
        torch.empty(batch, dtype=torch.int32, device=META),
        key_new=empty(batch, 1, kv_heads, dqk),
        value_new=None if shares else empty(batch, 1, kv_heads, dv),
        page_table=table,
        cache_leftpad=torch.empty(batch, dtype=torch.int32, device=META) if is_padded else None,
        head_dim_v=dv,
        window_size=(left, 0 if left >= 0 else -1),
    )


def launch_decode_kernels(dtype: torch.dtype) -> None:
    """Dense (one split, and many with their combination), in pages of two sizes, and MLA."""
    _decode(dtype, 64, 32, 8, 128, 128)
    _decode(dtype, 1, 32, 8, 128, 128)
    _decode(dtype, 64, 32, 8, 128, 128, page_size=16)
    _decode(dtype, 64, 32, 8, 128, 128, page_size=64)
    _decode(dtype, 64, 16, 1, 576, 512)
    _project(dtype)
    cache = torch.empty(8192, 64, 8, 128, dtype=dtype, device=META)
    lengths, starts, pages = (torch.empty(shape, dtype=torch.int32, device=META) for shape in ((32,), (33,), (32, 512)))
    # a chunk of a prompt beside 31 new tokens; tokens alone; more tiles than one program lists
    for queries, most in ((543, 512), (32, 1), (131072, 512)):
        query = torch.empty(queries, 32, 128, dtype=dtype, device=META)
        decode_attention(query, cache, cache, lengths, page_table=pages, cu_seqlens_q=starts, max_seqlen_q=most)
    if Target.of(META).arch == 90 and dtype is not torch.float32:
        _launch_over_caches(dtype)
        _decode(dtype, 64, 32, 8, 128, 128, page_size=16, left=1023)
        _decode(dtype, 1, 32, 8, 128, 128, page_size=16, left=1023)
        # by the universal kernel here too
        _decode(dtype, 64, 32, 8, 128, 128, left=1023, is_padded=True)
        _decode(dtype, 1, 32, 8, 128, 128, left=1023, is_padded=True)
        _decode(dtype, 64, 128, 1, 576, 512)
        _decode(dtype, 64, 128, 1, 576, 512, page_size=16)
        _decode(dtype, 64, 128, 1, 576, 512, page_size=64)
        _decode(dtype, 1, 128, 1, 576, 512, page_size=64)
        _launch_over_latent_caches(dtype)


def _project(dtype: torch.dtype) -> None:
    """As the first call of `_decode`, with a kernel of rotary positions that writes to the cache."""
    cache, table = torch.empty(64, 8192, 8, 128, dtype=dtype, device=META), rope_table(128, 8192, device=META)
    qkv, lengths = (
        torch.empty(64, 1, 48, 128, dtype=dtype, device=META),
        torch.empty(64, dtype=torch.int32, device=META),
    )
    decode_projected(qkv, cache, cache, lengths, table=table, num_kv_heads=8)


def _launch_over_latent_caches(dtype: torch.dtype) -> None:
    """Packed queries: chunks of prompts beside new tokens; over pages of one key."""
    lengths, table, starts = (torch.empty(shape, dtype=torch.int32, device=META) for shape in ((32,), (32, 512), (33,)))
    query = torch.empty(300, 128, 576, dtype=dtype, device=META)
    for page in (64, 1):
        cache = torch.empty(8192, page, 1, 576, dtype=dtype, device=META)
        decode_attention(
            query, cache, None, lengths, page_table=table, head_dim_v=512, cu_seqlens_q=starts, max_seqlen_q=200
        )  # fmt: skip


def _launch_over_caches(dtype: torch.dtype) -> None:
    """8 queries of each sequence over pages and over a dense cache, and packed ones over a dense cache; over pages of
    one key, many tiles of two warpgroups and few of one."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    lengths, table, starts = (torch.empty(shape, dtype=torch.int32, device=META) for shape in ((32,), (32, 512), (33,)))
    dense, paged, equal = empty(32, 8192, 8, 128), empty(8192, 64, 8, 128), empty(32, 8, 32, 128)
    for query, cache, its_starts, pages in (
        (equal, paged, None, table), (equal, dense, None, None), (equal.flatten(0, 1), dense, starts, None),
    ):  # fmt: skip
        call = PagedCall(query, cache, cache, its_starts, lengths, pages, None, None, None, -1, 0, 0.0, 0.1)
        launch_pages(call, 8, Target.of(META))
    for queries in (1, 256):
        query = empty(32, queries, 32, 128)
        decode_attention(query, dense.view(-1, 1, 8, 128), dense.view(-1, 1, 8, 128), lengths, page_table=table)


def launch_merge_kernels(dtype: torch.dtype) -> None:
    outs = [torch.empty(2, 64, 8, 128, dtype=dtype, device=META, requires_grad=True) for _ in range(2)]
    lses = [torch.empty(2, 8, 64, device=META, requires_grad=True) for _ in range(2)]
    results = merge_attentions(outs, lses)
    torch.autograd.backward(results, [torch.empty_like(result) for result in results])
