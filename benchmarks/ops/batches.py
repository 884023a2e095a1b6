"""Random batches over paged caches, as servers have them: single tokens, drafts, chunks of prompts and mixes of these,
packed, and where all sequences have as many queries also as [B, S, H, D], beside FlashAttention-3's packed queries.

`python -m benchmarks.ops.batches --seed 3 --count 40 --raw FILE` keeps sizes and times, one line of JSON for each
batch. With --varied head dims and windows are drawn too, pages of other sizes and dense caches.
"""

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import ahead
from benchmarks.ops.decode import D, normal, packed_variants, scattered_pages
from powertrain.ops.attention.decode import decode_attention
from powertrain.testing.bench import measure

HEADS = ((32, 8), (28, 4), (64, 8), (16, 16), (8, 1), (40, 8), (32, 4), (12, 2))
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100)
PAGES = (16, 64, 128)
# with --varied
HEAD_DIMS, VARIED_PAGES, WINDOWS = (64, 80, 96, 128, 128, 256), (0, 1, 8, 16, 64, 128), (-1, 127, 511, 1023, 4095)
CHUNKS = (16, 32, 128, 256, 512, 1024, 2048)
MOST_KEYS, MOST_PRODUCTS = 4e6, 3e9  # times kv heads; queries times keys times heads
PEER = "flash-attn-3"


class Batch(NamedTuple):
    kind: str
    sizes: list[tuple[int, int]]  # queries and keys of each sequence
    heads: int
    kv_heads: int
    page_size: int  # 0: a dense cache
    head_dim: int = D
    window: int = -1  # keys before a query's own; -1: all

    @property
    def label(self) -> str:
        queries, keys = zip(*self.sizes, strict=True)
        many = f"{min(queries)} to {max(queries)} queries, {min(keys)} to {max(keys)} keys"
        where = f"pages of {self.page_size}" if self.page_size else "dense"
        text = f"{self.kind}: {len(queries)} of {many}, {where}, H{self.heads}/{self.kv_heads} D{self.head_dim}"
        return text + (f", window {self.window}" if self.window >= 0 else "")


def draw(source: random.Random, is_varied: bool = False) -> Batch:
    while True:
        count, kind = source.choice(COUNTS), source.choice(("tokens", "drafts", "a chunk", "mixed", "chunks"))
        least, most = sorted(source.uniform(7, 15) for _ in range(2))
        chunks = {"a chunk": 1, "mixed": source.randint(0, count // 2), "chunks": count}.get(kind, 0)
        chunk, draft = source.choice(CHUNKS), source.choice((2, 4, 8)) if kind == "drafts" else 1
        queries = [chunk if n < chunks else draft for n in range(count)]
        sizes = [(n, max(n, int(2 ** source.uniform(least, most)))) for n in queries]
        source.shuffle(sizes)
        batch = Batch(kind, sizes, *source.choice(HEADS), source.choice(VARIED_PAGES if is_varied else PAGES))
        if is_varied:
            batch = batch._replace(head_dim=source.choice(HEAD_DIMS), window=source.choice(WINDOWS))
        products = sum(n * keys for n, keys in sizes) * batch.heads
        if sum(keys for _, keys in sizes) * batch.kv_heads <= MOST_KEYS and products <= MOST_PRODUCTS:
            return batch


def _variants(batch: Batch, device: str) -> dict[str, Callable[[], Any]]:
    variants = packed_variants(
        *batch[1:5], device=device, head_dim=batch.head_dim, window=batch.window
    )  # fmt: skip
    variants.pop("a copy of the pages")
    if len({queries for queries, _ in batch.sizes}) == 1:
        variants["powertrain, [B, S, H, D]"] = _of_equal_queries(batch, device)
    return variants


def _of_equal_queries(batch: Batch, device: str) -> Callable[[], Any]:
    queries, lengths, page_size = batch.sizes[0][0], [keys for _, keys in batch.sizes], batch.page_size
    pages = [-(-keys // page_size) for keys in lengths] if page_size else []
    shape = (sum(pages), page_size) if page_size else (len(lengths), max(lengths))
    caches = [normal(*shape, batch.kv_heads, batch.head_dim, device=device) for _ in range(2)]
    q = normal(len(lengths), queries, batch.heads, batch.head_dim, device=device)
    used, table = torch.tensor(lengths, dtype=torch.int32, device=device), None
    if page_size:
        table = scattered_pages(pages, device)
    return lambda: decode_attention(q, *caches, used, page_table=table, window_size=(batch.window, 0))


@torch.no_grad()
def run(count: int = 60, seed: int = 0, raw: Path | None = None, varied: bool = False) -> Iterator[str]:
    source = random.Random(seed)
    batches = [draw(source, varied) for _ in range(count)]

    def launch() -> None:
        for batch in batches:
            for name, call in _variants(batch, "meta").items():
                if name != PEER:
                    call()

    yield ahead.build([launch])
    ratios: dict[str, list[float]] = {}
    for batch in batches:
        variants = _variants(batch, "cuda")
        if PEER in variants:
            torch.testing.assert_close(variants["powertrain"](), variants[PEER](), rtol=2e-2, atol=2e-2)
        times = {name: timing.ms for name, timing in measure(variants, seconds=0.1).items()}
        del variants
        torch.cuda.empty_cache()
        if raw is not None:
            with raw.open("a") as file:
                file.write(json.dumps({**batch._asdict(), "ms": times}) + "\n")
        yield " | ".join([batch.label, *(f"{name} {ms * 1e3:.1f} us" for name, ms in times.items())])
        for name, ms in times.items():
            if PEER in times and name != PEER:
                ratios.setdefault(name, []).append(times[PEER] / ms)
    for name, each in ratios.items():
        mean = math.exp(sum(map(math.log, each)) / len(each))
        slower = sum(ratio < 0.97 for ratio in each)
        yield f"{name}: {PEER}'s time by ours {mean:.3f} (geometric mean), over 3 % slower in {slower} of {len(each)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--raw", type=Path)
    parser.add_argument("--varied", action="store_true")
    for text in run(**vars(parser.parse_args())):
        print(text, flush=True)
