"""Whether the backend that `attention` chooses is the fastest of those that take the problem: random problems, misses
listed.

Head dims 40 to 512, lengths 1 to 32768, grouped heads, windows, packed sequences; forward, and forward with backward.
A choice is a miss if it takes over 3 % and over 1 us longer than another backend, measured twice.
No timing of a backend whose values differ from the first one's.

`python -m benchmarks.ops.attention_choice --seed 1 --raw FILE` keeps the times of all backends, a line of JSON a
problem, from which scripts/attention_times.py makes the table that the choice reads.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.peers import Flash3, flash_3
from powertrain.ops.attention import attention, select, varlen_attention
from powertrain.ops.attention.backend_registry import BACKENDS
from powertrain.ops.attention.explain import ask
from powertrain.ops.attention.problem import Layout
from powertrain.ops.attention.select import NoBackendError
from powertrain.runtime.errors import PowertrainError
from powertrain.runtime.jobs import usable_cores
from powertrain.testing.bench import Timing, note, timed_once

HEAD_DIMS = (40, 48, 64, 72, 80, 88, 96, 112, 120, 128, 136, 160, 184, 192, 224, 256, 320, 384, 512)
HEADS = ((8, 8), (16, 16), (32, 32), (32, 8), (28, 4), (64, 8), (12, 1))
MIXED = 0.03  # share of problems whose head dims are 192 and 128, as DeepSeek's
MOST_TOKENS, MOST_FLOPS = 32768, 4e12
SLOW = ("chunked", "reference")  # plain PyTorch, which nobody would call faster
# called by itself where FLASH_3_LIBRARY names its library, for the table; no choice is compared with it
PEER = "flash-attn-3"
HOPELESS = 3  # times the shortest: timed once only
# cycles that the GPU waits while Python launches, about 1 and 2 ms. Of 0.4 and 1.1 a quarter of the times of PyTorch's
# own kernels, which are not replayed, were the host's
WAYS = {"forward": 2_000_000, "training": 4_000_000}
Variants = dict[str, Callable[[], list[Tensor]]]


class Problem(NamedTuple):
    lengths: tuple[int, ...]  # of the queries of each sequence; equal ones are a batch
    keys: int | None  # of every sequence; None: as many as queries
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: int | None
    packed: bool
    head_dim_v: int = 0  # 0: as head_dim

    @property
    def label(self) -> str:
        least, most = min(self.lengths), max(self.lengths)
        length = f"S{most}" if not self.packed else f"{most} packed" if least == most else f"{least} to {most} packed"
        mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        keys = "" if self.keys is None else f" keys {self.keys}"
        dims = f"{self.head_dim}/{self.head_dim_v}" if self.head_dim_v else f"{self.head_dim}"
        return f"B{len(self.lengths)} {length}{keys} H{self.heads}/{self.kv_heads} D{dims} {mask}"

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
        dims = (192, 128) if source.random() < MIXED else (source.choice(HEAD_DIMS), 0)
        problem = Problem(tuple(lengths), keys, *source.choice(HEADS), dims[0], causal, window, packed, dims[1])
        if sum(lengths) <= MOST_TOKENS and problem.flops <= MOST_FLOPS:
            return problem


def call_of(problem: Problem, device: str = "cuda") -> tuple[list[Tensor], Tensor, Callable[..., Any], dict[str, Any]]:
    """Query, key and value; the result's gradient; the function and its arguments."""
    total, batch = sum(problem.lengths), len(problem.lengths)
    rows = (total,) if problem.packed else (batch, problem.lengths[0])
    key_rows = rows if problem.keys is None else (batch, problem.keys)
    d_qk, d_v = problem.head_dim, problem.head_dim_v or problem.head_dim
    shapes = [(*rows, problem.heads, d_qk), (*key_rows, problem.kv_heads, d_qk), (*key_rows, problem.kv_heads, d_v)]
    leaves = [torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    dout = torch.ones(*rows, problem.heads, d_v, device=device, dtype=torch.bfloat16)
    options: dict[str, Any] = {"is_causal": problem.causal}
    if problem.window is not None:
        options["window_size"] = (problem.window - 1, 0)
    if not problem.packed:
        return leaves, dout, attention, options
    starts = torch.tensor([0, *problem.lengths], device="cpu").cumsum(0).int().to(device)
    options |= {"cu_seqlens_q": starts, "max_seqlen_q": max(problem.lengths)}
    return leaves, dout, varlen_attention, options


def compile_kernels(problem: Problem) -> None:
    """Those of our backends and of their self-tests, by running each once: in a process of its own, since lowering a
    kernel keeps Python busy for a second."""
    leaves, dout, call, options = call_of(problem)
    for name in ("triton", "hopper"):
        # a backend that does not take it, or is wrong, is found by the measurement too
        with suppress(PowertrainError, RuntimeError):
            torch.autograd.grad(call(*leaves, backend=name, **options), leaves, dout)
            call(*(x.detach() for x in leaves), backend=name, **options)
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


def _forward(call: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    return [call(*tensors)]


def training(call: Callable[..., Any], leaves: list[Tensor], dout: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(call(*leaves), leaves, dout))


def _flash_3(problem: Problem, starts: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    left = -1 if problem.window is None else problem.window - 1
    longest = None if starts is None else max(problem.lengths)
    out: Tensor = Flash3.apply(q, k, v, problem.head_dim**-0.5, problem.causal, left, starts, longest)
    return out


def variants_of(problem: Problem) -> tuple[dict[str, Variants], dict[str, str], list[str]]:
    """By way: each backend's call, and who is chosen. A line for each backend that failed."""
    leaves, dout, call, options = call_of(problem)
    plain = [x.detach() for x in leaves]
    variants: dict[str, Variants] = {way: {} for way in WAYS}
    expected: dict[str, list[Tensor]] = {}
    said = []
    calls = {name: partial(call, backend=name, **options) for name in BACKENDS if name not in SLOW}
    # its metadata of over 992 sequences does not fit
    if flash_3() is not None and len(problem.lengths) <= 512:
        calls[PEER] = partial(_flash_3, problem, options.get("cu_seqlens_q"))
    for name, function in calls.items():
        runs: Variants = {
            "forward": partial(_forward, function, plain),
            "training": partial(training, function, leaves, dout),
        }
        for way, run in runs.items():
            try:
                found = run()
                torch.cuda.synchronize()
            except NoBackendError:
                continue
            except torch.AcceleratorError as error:
                # no call works after it
                raise SystemExit(f"{problem.label} | {name} {way}: {str(error).splitlines()[0]}") from None
            except (PowertrainError, RuntimeError) as error:
                said.append(f"{problem.label} | {name}: {str(error).splitlines()[0]}")
                continue
            if any(differs(a, b) for a, b in zip(found, expected.setdefault(way, found), strict=True)):
                said.append(f"{problem.label} | {name}: WRONG, not timed")
            else:
                variants[way][name] = run
    layout: Layout = "thd" if problem.packed else "bshd"
    chosen = {}
    for way, (query, key, value) in (("forward", plain), ("training", leaves)):
        decision = select.decide(*ask(query, key, value, layout, options))
        assert decision is not None, problem.label
        chosen[way] = decision.name
    return variants, chosen, said


def differs(a: Tensor, b: Tensor) -> bool:
    # bfloat16 results of sums in other orders; nan differs
    return not bool((a.float() - b.float()).norm() <= 0.03 * b.float().norm() + 1e-3)


def times(variants: Variants, head_start: int, rounds: int = 7) -> dict[str, float]:
    """Median ms of each, in turns; those of no hope are timed twice only."""
    for run in variants.values():
        # our first calls are not replayed and may take the host longer than the head start: so they would have no hope
        for _ in range(3):
            run()
    once = {name: min(timed_once(run, head_start) for _ in range(2)) for name, run in variants.items()}
    near = [name for name in once if once[name] <= HOPELESS * min(once.values())]
    # long ones vary little
    rounds = max(3, min(rounds, int(4 * rounds / max(1e-3, *(once[name] for name in near))))) if near else 0
    samples: dict[str, list[float]] = {name: [] for name in near}
    orders = random.Random(0)
    for _ in range(rounds):
        # what ran before a call changes its time by 2 to 3 %
        orders.shuffle(near)
        for name in near:
            samples[name].append(timed_once(variants[name], head_start))
    return once | {name: statistics.median(taken) for name, taken in samples.items()}


def beside(label: str, ours: float, others: Mapping[str, float]) -> tuple[float, str]:
    """(time of the fastest other by ours, a line); both are rows of the regression table."""
    for name, value in {"powertrain": ours, **others}.items():
        note(label, name, Timing(value, 0.0, 0.0))
    ratio = min(others.values(), default=math.nan) / ours
    cells = ", ".join(f"{name} {value:.4f}" for name, value in others.items())
    return ratio, f"{ratio:.2f} {label}: {ours:.4f} ms, {cells or 'no opponent'}"


def behind(rows: list[tuple[float, str]]) -> str:
    """Those of `beside` that are slower than the best opponent."""
    slower = sorted(line for ratio, line in rows if ratio < 0.97)
    return "\n".join([f"{len(slower)} of {len(rows)} over 3 % slower than the best opponent", *slower])


def miss(ms: Mapping[str, float], chosen: str) -> tuple[str, float] | None:
    """The fastest backend and how many times as long the choice takes, where that is too long."""
    ms = {name: value for name, value in ms.items() if name != PEER}
    if chosen not in ms:
        return None
    best = min(ms, key=lambda name: ms[name])
    late = ms[chosen] > 1.03 * ms[best] and ms[chosen] > ms[best] + 1e-3
    return (best, ms[chosen] / ms[best]) if late else None


def _measured(variants: Variants, chosen: str, head_start: int, again: bool) -> dict[str, float]:
    found = times(variants, head_start)
    wrong = miss(found, chosen)
    if wrong is None or not again:
        return found
    # a second look at the two, for noise is no miss
    return found | times({name: variants[name] for name in (chosen, wrong[0])}, head_start, 30)


def _line(problem: Problem, way: str, ms: Mapping[str, float], chosen: str, missed: tuple[str, float]) -> str:
    cells = ", ".join(f"{name} {ms[name]:.4f}" for name in ms if ms[name] < 10 * ms[missed[0]])
    return f"| {problem.label} {way} | {chosen} {ms[chosen]:.4f} | {missed[1]:.2f} of {missed[0]} | {cells} |"


def run(
    count: int = 300, seconds: float = math.inf, seed: int = 0, first: int = 0, raw: Path | None = None,
    again: bool = True,
) -> Iterator[str]:  # fmt: skip
    """`count` problems without the `first` of them, or as many as `seconds` allow."""
    end = time.monotonic() + seconds
    source = random.Random(seed)
    problems = [draw(source) for _ in range(count)][first:]
    measured, kinds, ratios = 0, Counter[str](), list[float]()
    ready, said = compiled(problems, (end - time.monotonic()) / 2)
    yield from said
    yield f"{len(ready)} of {len(problems)} problems have their kernels, {end - time.monotonic():.0f} s left"
    for problem in ready:
        if time.monotonic() > end:
            break
        variants, chosen, said = variants_of(problem)
        yield from said
        found = {way: _measured(variants[way], chosen[way], head_start, again) for way, head_start in WAYS.items()}
        if raw is not None:
            with raw.open("a") as file:
                file.write(json.dumps({**problem._asdict(), "chosen": chosen, "ms": found}) + "\n")
        measured += 1
        for way, ms in found.items():
            missed = miss(ms, chosen[way])
            if missed is not None:
                kinds[f"{way}: {missed[0]} faster than {chosen[way]}"] += 1
                ratios.append(missed[1])
                yield _line(problem, way, ms, chosen[way], missed)
    over = sum(ratio > 1.1 for ratio in ratios)
    yield (
        f"{measured} of {len(problems)} problems, forward and training: {len(ratios)} of {2 * measured} choices over "
        f"3 % too slow, {over} over 10 %, the worst {max(ratios, default=1):.2f}"
    )
    yield from (f"  {number:4} x {kind}" for kind, number in kinds.most_common())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="leave out those before: after a device error, say")
    parser.add_argument("--raw", type=Path)
    parser.add_argument("--once", dest="again", action="store_false", help="no second look at misses")
    for text in run(**vars(parser.parse_args())):
        print(text, flush=True)
