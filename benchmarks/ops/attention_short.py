"""attention of few tokens, dense and packed: forward with backward in one go, beside FlashAttention-3 and PyTorch's
kernels; and the forward of few queries beside many keys.

Timed separately, each when the GPU was idle before, forward and backward do not show how long the kernels of one call
make one another wait.
"""

import random
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import torch

from benchmarks.ops.attention_choice import WAYS, Problem, behind, beside, call_of, times, training, variants_of
from powertrain.ops.attention.select import NoBackendError

OURS = ("hopper", "triton")
NAMES = {"efficient": "torch efficient"}  # as the regression table names other libraries


def _dense(batch: int, length: int, *heads: int, causal: bool = True) -> Problem:
    return Problem((length,) * batch, None, *heads, causal, None, False)


def _few(batch: int, length: int, keys: int, *heads: int, causal: bool = True) -> Problem:
    return Problem((length,) * batch, keys, *heads, causal, None, False)


def _packed(*lengths: int, heads: tuple[int, int, int], causal: bool = True) -> Problem:
    return Problem(lengths, None, *heads, causal, None, True)


def _lengths(count: int, longest: int) -> list[int]:
    source = random.Random(count)
    return [source.randint(1, longest) for _ in range(count)]


PROBLEMS = (
    _dense(1, 128, 32, 8, 128), _dense(1, 137, 64, 64, 128, causal=False), _dense(2, 300, 28, 4, 128),
    _dense(1, 1000, 12, 12, 64), _dense(8, 197, 12, 12, 64, causal=False), _dense(2, 400, 16, 16, 192),
    _packed(137, heads=(64, 64, 128), causal=False), _packed(137, heads=(32, 8, 128)),
    _packed(287, heads=(20, 4, 128), causal=False), _packed(600, heads=(32, 8, 128)),
    _packed(2000, heads=(32, 8, 128)), _packed(1000, heads=(12, 12, 64)), _packed(130, heads=(16, 16, 256)),
    _packed(300, 700, heads=(16, 16, 64)), _packed(400, 500, heads=(16, 16, 192)),
    _packed(*_lengths(4, 300), heads=(32, 8, 128)), _packed(*_lengths(8, 90), heads=(32, 8, 128)),
    _packed(*_lengths(8, 90), heads=(12, 12, 64), causal=False), _packed(*_lengths(64, 290), heads=(32, 8, 128)),
    _packed(*_lengths(64, 290), heads=(16, 16, 96)),
    # forward alone
    _few(2, 6, 16384, 12, 1, 112), _few(2, 8, 16384, 28, 4, 128), _few(1, 120, 32768, 8, 8, 128),
    _few(2, 148, 16384, 16, 16, 64), _few(4, 160, 4096, 16, 16, 64, causal=False), _few(1, 180, 32768, 32, 8, 64),
    _few(1, 1100, 8192, 12, 12, 64), _few(1, 2000, 8192, 12, 12, 64),
)  # fmt: skip


def launch() -> None:
    for problem in PROBLEMS:
        leaves, dout, call, options = call_of(problem, "meta")
        for name in OURS:
            with suppress(NoBackendError):
                training(partial(call, backend=name, **options), leaves, dout)


def run() -> Iterator[str]:
    """A line for each problem, ours by the chosen backend; then those that are slower than the best opponent."""
    rows = []
    for problem in PROBLEMS:
        variants, chosen, said = variants_of(problem)
        yield from said
        way, name_of_way = ("training", "both") if problem.keys is None else ("forward", "forward")
        ms = times(variants[way], WAYS[way])
        others = {NAMES.get(name, name): value for name, value in ms.items() if name not in OURS}
        rows.append(beside(f"{problem.label} {name_of_way}", ms[chosen[way]], others))
        yield rows[-1][1]
        torch.cuda.empty_cache()
    yield behind(rows)
