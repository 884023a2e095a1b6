"""decode_attention over dense and paged caches, beside torch's flash SDPA (which wants one length and no pages)."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from powertrain.ops.attention.decode import decode_attention
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


def _randn(*shape: int) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()


def _ours(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, page_size: int) -> Callable[[], Any]:
    if page_size == 0:
        return lambda: decode_attention(q, keys, values, lengths)
    b, n = keys.shape[:2]
    pages = torch.randperm(b * n // page_size, device="cuda").view(b, -1).int()
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


@torch.no_grad()
def run() -> Iterator[str]:
    for b, n, page_sizes in CASES:
        q, keys, values = _randn(b, 1, H, D), _randn(b, n, K, D), _randn(b, n, K, D)
        lengths = torch.full((b,), n, dtype=torch.int32, device="cuda")
        variants = {f"page {p}" if p else "dense": _ours(q, keys, values, lengths, p) for p in page_sizes}
        num_bytes = 2 * keys.numel() * keys.element_size()
        timings = measure({**variants, "torch flash": _sdpa(q, keys, values)})
        yield table(f"decode B{b} keys {n} H{H}/{K} D{D} bf16", timings, num_bytes=num_bytes)
        del q, keys, values, variants
        torch.cuda.empty_cache()

    b, n = 64, 8192
    q, latent = _randn(b, 1, 128, 576), _randn(b, n, 1, 576)
    lengths = torch.full((b,), n, dtype=torch.int32, device="cuda")
    mla = {"dense": lambda: decode_attention(q, latent, None, lengths, head_dim_v=512)}
    flops = 2 * b * 128 * n * (576 + 512)
    yield table(
        f"decode MLA B{b} keys {n} H128/1 576/512 bf16", measure(mla), num_bytes=2 * latent.numel(), flops=flops
    )
