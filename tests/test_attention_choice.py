"""The benchmark of attention's choices: its problems, and what counts as a miss."""

import math
import os
import random
import time

import pytest

from benchmarks.ops.attention_choice import (
    HEAD_DIMS,
    MOST_FLOPS,
    MOST_TOKENS,
    Problem,
    behind,
    beside,
    compiled,
    draw,
    miss,
)
from powertrain.testing.bench import recorded


def test_problems_cover_what_users_have() -> None:
    source = random.Random(0)
    problems = [draw(source) for _ in range(300)]
    assert problems[:5] == [draw(again) for again in [random.Random(0)] for _ in range(5)]
    assert {p.head_dim for p in problems} == set(HEAD_DIMS)
    assert all(sum(p.lengths) <= MOST_TOKENS and p.flops <= MOST_FLOPS for p in problems)
    assert any(p.packed for p in problems) and any(p.window for p in problems) and any(p.keys for p in problems)
    assert max(max(p.lengths) for p in problems) > 8192 and any(p.heads != p.kv_heads for p in problems)
    assert all(p.keys is None or p.keys >= p.lengths[0] for p in problems)


def test_a_miss_is_over_3_percent_and_over_a_microsecond() -> None:
    assert miss({"hopper": 1.04, "triton": 1.05, "cudnn": 1.0}, "hopper") == ("cudnn", 1.04)
    assert miss({"hopper": 1.02, "cudnn": 1.0}, "hopper") is None
    assert miss({"hopper": 0.0054, "cudnn": 0.005}, "hopper") is None
    assert miss({"hopper": 1.0}, "hopper") is None and miss({"hopper": 1.0}, "chunked") is None


def _one_dies(problem: Problem) -> None:
    if problem.head_dim == 64:
        os._exit(1)


def _one_fails(problem: Problem) -> None:
    if problem.head_dim == 64:
        raise ValueError("no such kernel")


def _last(problem: Problem) -> None:
    time.sleep(problem.head_dim == 64 and 3)


def _problems(*head_dims: int) -> list[Problem]:
    return [Problem((8,), None, 1, 1, head_dim, True, None, False) for head_dim in head_dims]


# a process that imports PyTorch takes five seconds; with more than one the same is awaited
def test_rows_beside_opponents() -> None:
    with recorded() as noted:
        rows = [beside("slow", 2.0, {"flash": 1.0, "cudnn": 3.0}), beside("even", 1.0, {"flash": 0.98})]
        rows.append(beside("alone", 1.0, {}))
    assert [(row["label"], row["variant"], row["ms"]) for row in noted][:3] == [
        ("slow", "powertrain", 2.0), ("slow", "flash", 1.0), ("slow", "cudnn", 3.0),
    ]  # fmt: skip
    assert rows[-1][1] == "nan alone: 1.0000 ms, no opponent"
    assert behind(rows).splitlines() == ["1 of 3 over 3 % slower than the best opponent", rows[0][1]]


@pytest.mark.parametrize("seconds", [pytest.param(60, marks=pytest.mark.slow), math.inf])
def test_a_problem_whose_compilation_fails_is_named(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.ops.attention_choice.usable_cores", lambda: (1, "of this test"))
    ready, said = compiled(_problems(40, 64, 80), seconds, _one_fails)
    assert [p.head_dim for p in ready] == [40, 80]
    assert len(said) == 1 and "D64" in said[0] and "no such kernel" in said[0]


@pytest.mark.slow
def test_what_a_dead_worker_leaves_is_named() -> None:
    problems = _problems(64, *[128] * 40)
    ready, said = compiled(problems, 60, _one_dies)
    assert len(ready) + len(said) == len(problems) and "D64" in said[0] and "BrokenProcessPool" in said[0]


@pytest.mark.slow
def test_problems_that_are_late_are_left_out() -> None:
    assert compiled(_problems(*[64] * 40), 0.5, _last)[0] != _problems(*[64] * 40)
