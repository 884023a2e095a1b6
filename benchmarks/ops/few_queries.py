"""Few queries beside many keys: the forward by the plan that is chosen, and with other numbers of splits and consumers,
beside FlashAttention-3 at its default splits. Random problems.

Each call is timed behind other kernels, as in a model: behind calls of itself its instructions are in the SMs' caches,
and a call whose keys are split takes 3 to 7 us less on an H200.

`python -m benchmarks.ops.few_queries --seed 1 --count 90 --raw FILE` keeps the times of all variants, one line of JSON
for each problem: the constants of ops/attention/hopper/splits.py are fitted to such files.
"""

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks import ahead, peers
from benchmarks.ops.attention_choice import PEER, Problem, behind, beside, call_of
from powertrain.ops.attention.hopper import plans
from powertrain.ops.attention.hopper.splits import Work, num_splits_for
from powertrain.runtime.recording import record
from powertrain.runtime.target import Target
from powertrain.testing.bench import timed_once

HEAD_DIMS = (64, 64, 128, 128, 128, 80, 96, 112, 192, 256)
HEADS = ((32, 8), (8, 8), (28, 4), (64, 8), (16, 16), (12, 12), (32, 32), (8, 1), (40, 8), (12, 2))
BATCHES = (1, 1, 1, 2, 4, 8)
MOST_BYTES, MOST_PRODUCTS = 2e9, 6e11
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)
ROUNDS_OF_TILES = 6  # the most on an SM
HEAD_START, SAMPLES = 1_200_000, 5
Call = Callable[[], Any]


class Variant(NamedTuple):
    splits: int | None = None  # None: those that are chosen
    plan: int | None = None  # of `plans_of_few`
    tile: str = ""

    @property
    def name(self) -> str:
        return "powertrain" if self.splits is None else f"{self.splits} splits, {self.tile}"


def draw(source: random.Random) -> Problem:
    while True:
        dim, heads, batch = source.choice(HEAD_DIMS), source.choice(HEADS), source.choice(BATCHES)
        keys = int(2 ** source.uniform(10, 16.2))
        queries = max(1, int(2 ** source.uniform(0, min(11.5, math.log2(keys / 4)))))
        fits = batch * keys * heads[1] * dim * 4 <= MOST_BYTES
        if fits and batch * keys * queries * heads[0] * dim * 4 <= MOST_PRODUCTS:
            return Problem((queries,) * batch, keys, *heads, dim, source.random() < 0.7, None, False)


@contextmanager
def _planned(variant: Variant, seen: list[Work]) -> Iterator[None]:
    """Calls within have this plan; `seen` gets the work whose number of splits was asked for."""
    plans_of_few = plans.plans_of_few

    def splits_for(work: Work) -> int:
        seen.append(work)
        return num_splits_for(work) if variant.splits is None else variant.splits

    def plans_for(plan: plans.Plan, rows: int | None = None) -> tuple[plans.Plan, ...]:
        found = plans_of_few(plan, rows)
        return found if variant.plan is None else found[variant.plan : variant.plan + 1]

    with patch.object(plans, "num_splits_for", splits_for), patch.object(plans, "plans_of_few", plans_for):
        yield


def _launch(problem: Problem, variant: Variant, seen: list[Work]) -> None:
    leaves, _, call, options = call_of(problem, "meta")
    with _planned(variant, seen):
        call(*[x.detach() for x in leaves], backend="hopper", **options)


def variants_of(problem: Problem, target: Target) -> list[Variant]:
    found = [Variant()]
    plan = plans.plan_for(problem.head_dim, problem.head_dim, 1)
    for number, each in enumerate(plans.plans_of_few(plan)):
        seen: list[Work] = []
        with record(target):
            _launch(problem, Variant(1, number), seen)
        work, tile = seen[0], f"{each.consumers} x {each.warps} warps"
        most = min(max(1, work.blocks // 2), ROUNDS_OF_TILES * work.sms // work.tiles)
        found += [Variant(splits, number, tile) for splits in SPLITS if splits <= most]
    return found


def _other_kernels() -> Call:
    """A function that is called before each timed call. It runs a matrix product, a softmax, FlashAttention-3's
    backward and two of our kernels."""
    ours: list[Call] = []
    for problem in (
        Problem((256,), 1024, 8, 8, 256, True, None, False),
        Problem((512,) * 2, None, 16, 16, 128, True, None, False),
    ):
        leaves, _, call, options = call_of(problem)
        ours.append(partial(call, *[x.detach() for x in leaves], backend="hopper", **options))
    leaves, dout, _, _ = call_of(Problem((512,), None, 16, 4, 128, True, None, False))
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)

    def call_all() -> None:
        for call in ours:
            call()
        out = peers.Flash3.apply(*leaves, 128**-0.5, True, -1)
        torch.autograd.grad(out, leaves, dout)
        torch.softmax((x @ x).float(), -1)

    return call_all


def _calls(problem: Problem, variants: list[Variant], number: int) -> dict[str, Call]:
    leaves, _, call, options = call_of(problem)
    plain = [x.detach() for x in leaves]
    calls: dict[str, Call] = {PEER: partial(peers.Flash3.apply, *plain, problem.head_dim**-0.5, problem.causal, -1)}
    for n, variant in enumerate(variants):
        # a call that was seen before is replayed with its plan: each variant has a scale of its own
        run = partial(call, *plain, backend="hopper", scale=0.1 + 1e-6 * (number * 100 + n), **options)
        with _planned(variant, []):
            for _ in range(3):
                run()
        calls[variant.name] = run
    return calls


def _times(calls: dict[str, Call], others: Call) -> dict[str, float]:
    """Median ms of each."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    orders, names = random.Random(0), list(calls)
    for _ in range(SAMPLES):
        orders.shuffle(names)
        for name in names:
            others()
            samples[name].append(timed_once(calls[name], HEAD_START))
    return {name: median(taken) for name, taken in samples.items()}


def run(count: int = 60, seed: int = 0, raw: Path | None = None) -> Iterator[str]:
    """A line for each problem, then those that are slower than FlashAttention-3, and how far the choice is from the
    best number of splits."""
    if peers.flash_3() is None:
        raise SystemExit(
            "FLASH_3_LIBRARY must name FlashAttention-3's library: its backward is among the other kernels"
        )
    source, target = random.Random(seed), Target.of(torch.device("cuda"))
    problems = [draw(source) for _ in range(count)]
    variants = [variants_of(problem, target) for problem in problems]
    launches = [
        partial(_launch, p, variant, []) for p, of_each in zip(problems, variants, strict=True) for variant in of_each
    ]
    yield ahead.build(launches)
    others, rows, late = _other_kernels(), [], []
    for number, (problem, of_each) in enumerate(zip(problems, variants, strict=True)):
        ms = _times(_calls(problem, of_each, number), others)
        if raw is not None:
            with raw.open("a") as file:
                file.write(json.dumps({**problem._asdict(), "ms": ms}) + "\n")
        ours = ms["powertrain"]
        late.append(ours / min(value for name, value in ms.items() if name != PEER))
        rows.append(beside(f"{problem.label} forward", ours, {PEER: ms[PEER]}))
        yield rows[-1][1]
        torch.cuda.empty_cache()
    yield behind(rows)
    yield f"the choice takes {sum(late) / len(late):.3f} of the best plan's time on average, {max(late):.2f} at most"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--raw", type=Path)
    for text in run(**vars(parser.parse_args())):
        print(text, flush=True)
