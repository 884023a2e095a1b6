"""Whether the backend that `attention` chooses is the fastest of those that take the problem: random problems, misses
listed.

Head dims 40 to 512, lengths 1 to 32768, grouped heads, windows, packed sequences; forward, and forward with backward.
A choice is a miss if it takes over 3 % and over 1 us longer than another backend, measured twice: 10 rounds, then 30.
No timing of a backend whose values differ from the first one's.
"""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention import attention, varlen_attention
from powertrain.ops.attention.backend_registry import BACKENDS
from powertrain.ops.attention.select import NoBackendError
from powertrain.runtime.errors import PowertrainError
from powertrain.runtime.jobs import usable_cores
from powertrain.testing.bench import Timing, measure, note

HEAD_DIMS = (40, 48, 64, 72, 80, 88, 96, 112, 120, 128, 136, 160, 184, 192, 224, 256, 320, 384, 512)
HEADS = ((8, 8), (16, 16), (32, 32), (32, 8), (28, 4), (64, 8), (12, 1))
MOST_TOKENS, MOST_FLOPS = 32768, 4e12
SLOW = ("chunked", "reference")  # plain PyTorch, which nobody would call faster


class Problem(NamedTuple):
    lengths: tuple[int, ...]  # of the queries of each sequence; equal ones are a batch
    keys: int | None  # of every sequence; None: as many as queries
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: int | None
    packed: bool

    @property
    def label(self) -> str:
        length = f"S{self.lengths[0]}" if not self.packed else f"{min(self.lengths)} to {max(self.lengths)} packed"
        mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        keys = "" if self.keys is None else f" keys {self.keys}"
        return f"B{len(self.lengths)} {length}{keys} H{self.heads}/{self.kv_heads} D{self.head_dim} {mask}"

    @property
    def flops(self) -> float:
        pairs = sum(n * (self.keys or n) for n in self.lengths)
        return 4 * self.heads * self.head_dim * pairs / (2 if self.causal else 1)


def draw(source: random.Random) -> Problem:
    """One that fits: at most 32768 tokens and 4e12 operations forward."""
    while True:
        length = round(math.exp(source.uniform(0, math.log(MOST_TOKENS))))
        batch = source.choice((1, 1, 2, 3, 4, 8, 16))
        if length <= 512 and source.random() < 0.5:
            # windows of images and sentences come in large batches
            batch = max(batch, round(math.exp(source.uniform(0, math.log(MOST_TOKENS / length)))))
        packed = source.random() < 0.25
        lengths = [source.randint(1, length) for _ in range(batch)] if packed else [length] * batch
        # few queries beside many keys, as when a cache is filled
        keys = MOST_TOKENS // batch if not packed and length <= 256 and source.random() < 0.5 else None
        causal = source.random() < 0.7
        window = source.choice((256, 1024)) if causal and source.random() < 0.2 else None
        problem = Problem(tuple(lengths), keys, *source.choice(HEADS), source.choice(HEAD_DIMS), causal, window, packed)
        if sum(lengths) <= MOST_TOKENS and problem.flops <= MOST_FLOPS:
            return problem


def _tensors(problem: Problem) -> tuple[list[Tensor], Tensor]:
    total, batch = sum(problem.lengths), len(problem.lengths)
    rows = (total,) if problem.packed else (batch, problem.lengths[0])
    key_rows = rows if problem.keys is None else (batch, problem.keys)
    sizes = ((rows, problem.heads), (key_rows, problem.kv_heads), (key_rows, problem.kv_heads))
    leaves = [torch.randn(*r, heads, problem.head_dim, device="cuda", dtype=torch.bfloat16) for r, heads in sizes]
    return [x.requires_grad_() for x in leaves], torch.ones_like(leaves[0])


def _call(problem: Problem) -> Callable[..., Tensor]:
    """(q, k, v, backend) -> out."""
    options: dict[str, Any] = {"is_causal": problem.causal}
    if problem.window is not None:
        options["window_size"] = (problem.window - 1, 0)
    if not problem.packed:
        return lambda q, k, v, backend: attention(q, k, v, backend=backend, **options)
    starts = torch.tensor([0, *problem.lengths], device="cpu").cumsum(0).int().cuda()
    longest = max(problem.lengths)
    return lambda q, k, v, backend: varlen_attention(
        q, k, v, starts, max_seqlen_q=longest, backend=backend, **options
    )  # fmt: skip


def compile_kernels(problem: Problem) -> None:
    """Those of our backends and of their self-tests, by running each once: in a process of its own, since lowering a
    kernel keeps Python busy for a second."""
    (leaves, dout), call = _tensors(problem), _call(problem)
    for name in ("triton", "hopper"):
        # a backend that does not take it, or is wrong, is found by the measurement too
        with suppress(PowertrainError, RuntimeError):
            torch.autograd.grad(call(*leaves, name), leaves, dout)
            call(*(x.detach() for x in leaves), name)
    torch.cuda.empty_cache()


def compiled(
    problems: list[Problem], seconds: float, compile: Callable[[Problem], None] = compile_kernels
) -> tuple[list[Problem], list[str]]:
    """Those problems whose kernels are there after so many seconds, and a line for each whose worker failed."""
    with ProcessPoolExecutor(usable_cores()[0], mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(compile, problem) for problem in problems]
        # all compiled before the first is timed: other processes' kernels would slow it down
        wait(futures, timeout=max(0.0, seconds) if math.isfinite(seconds) else None)
        pool.shutdown(cancel_futures=True)
    ended = [(p, future.exception()) for p, future in zip(problems, futures, strict=True) if not future.cancelled()]
    # a worker that the system killed takes those of all that wait with it
    said = [f"{problem.label} | not compiled, not measured: {error!r}" for problem, error in ended if error]
    return [problem for problem, error in ended if error is None], said


def _variants(problem: Problem) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]], list[str]]:
    """Forwards and training steps of the choice ("selector") and each backend, and a line for each that failed."""
    (leaves, dout), call = _tensors(problem), _call(problem)
    plain = [x.detach() for x in leaves]
    forward: dict[str, Callable[[], Any]] = {}
    both: dict[str, Callable[[], Any]] = {}
    said, first = [], None
    for name, backend in {"selector": None, **{n: n for n in BACKENDS if n not in SLOW}}.items():
        step = lambda b=backend: torch.autograd.grad(call(*leaves, b), leaves, dout)  # noqa: E731
        try:
            found = [call(*plain, backend), *step()]
        except NoBackendError:
            continue
        except (PowertrainError, RuntimeError) as error:
            said.append(f"{problem.label} | {name}: {str(error).splitlines()[0]}")
            continue
        first = first or found
        if any(_differs(a, b) for a, b in zip(found, first, strict=True)):
            said.append(f"{problem.label} | {name}: WRONG, not timed")
            continue
        forward[name], both[name] = (lambda b=backend: call(*plain, b)), step
    return forward, both, said


def _differs(a: Tensor, b: Tensor) -> bool:
    # bfloat16 results of sums in other orders; nan differs
    return not bool((a.float() - b.float()).norm() <= 0.03 * b.float().norm() + 1e-3)


def miss(times: dict[str, Timing]) -> tuple[str, float] | None:
    """The fastest backend and how many times as long the choice takes, where that is too long."""
    others = {name: timing.ms for name, timing in times.items() if name != "selector"}
    if not others or "selector" not in times:
        return None
    best = min(others, key=lambda name: others[name])
    chosen = times["selector"].ms
    return (best, chosen / others[best]) if chosen > 1.03 * others[best] and chosen > others[best] + 1e-3 else None


def _misses(way: str, problem: Problem, variants: dict[str, Callable[[], Any]]) -> Iterator[tuple[str, str]]:
    """The kind of a miss and its line, if there is one."""
    times = measure(variants, seconds=0.0)
    if miss(times) is not None:
        times = measure(variants, seconds=1.0, rounds=30)
    for name, timing in times.items():
        note(f"{problem.label} {way}", name, timing)
    again = miss(times)
    if again is not None:
        cells = ", ".join(f"{name} {timing.ms:.4f}" for name, timing in times.items())
        yield f"{way}: {again[0]} faster", f"{problem.label} | {way} | {again[1]:.2f}x of {again[0]} | {cells} ms"


def run(count: int = 300, seconds: float = math.inf, seed: int = 0) -> Iterator[str]:
    """`count` problems, or as many as `seconds` allow."""
    end = time.monotonic() + seconds
    source = random.Random(seed)
    problems = [draw(source) for _ in range(count)]
    measured, kinds = 0, Counter[str]()
    ready, said = compiled(problems, (end - time.monotonic()) / 2)
    yield from said
    for problem in ready:
        if time.monotonic() > end:
            break
        forward, both, said = _variants(problem)
        yield from said
        for way, variants in (("forward", forward), ("training", both)):
            for kind, line in _misses(way, problem, variants):
                kinds[kind] += 1
                yield line
        measured += 1
    missed = sum(kinds.values())
    yield f"{measured} of {count} problems, forward and training: {missed} of {2 * measured} choices over 3 % too slow"
    yield from (f"  {number:4} x {kind}" for kind, number in kinds.most_common())
