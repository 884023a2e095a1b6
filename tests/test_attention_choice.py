"""The benchmark of attention's choices: its problems, and what counts as a miss."""

import random

from benchmarks.ops.attention_choice import HEAD_DIMS, MOST_FLOPS, MOST_TOKENS, draw, miss
from powertrain.testing.bench import Timing


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
    def times(**ms: float) -> dict[str, Timing]:
        return {name: Timing(value, 0.0, 0.0) for name, value in ms.items()}

    assert miss(times(selector=1.04, hopper=1.05, cudnn=1.0)) == ("cudnn", 1.04)
    assert miss(times(selector=1.02, cudnn=1.0)) is None
    assert miss(times(selector=0.0054, cudnn=0.005)) is None
    assert miss(times(selector=1.0)) is None
