"""The planner's choices beside what was measured, its limits, and what it says."""

import pytest
import torch

from powertrain.parallel.collective_matmul import all_gather_gemm
from powertrain.parallel.cost_model import Planner, Product, predict
from powertrain.parallel.transport.base import Choice, Rates
from powertrain.parallel.transport.simulated import World

H200 = Rates(132, 132 * 5.8e12, 350e9)
# (kind, rows, width, depth) of one rank of four: milliseconds in sequence and in chunks, measured
# (benchmarks/results/2026-11-21_h200_overlap.md)
MEASURED = {
    ("gather", 8192, 2560, 8192): (0.775, 0.484), ("gather", 8192, 14336, 8192): (2.774, 2.487),
    ("gather", 8192, 1536, 4096): (0.325, 0.223), ("gather", 8192, 8192, 8192): (1.767, 1.434),
    ("gather", 8192, 4096, 4096): (0.539, 0.394), ("gather", 512, 2560, 8192): (0.078, 0.120),
    ("gather", 512, 1536, 4096): (0.056, 0.171), ("gather", 2048, 1536, 4096): (0.103, 0.139),
    ("gather", 32768, 2560, 8192): (2.981, 1.802), ("gather", 32768, 1536, 4096): (1.182, 0.706),
    ("scatter", 8192, 8192, 2048): (0.718, 0.485), ("scatter", 8192, 8192, 7168): (1.595, 1.327),
    ("scatter", 8192, 4096, 1024): (0.291, 0.250), ("scatter", 8192, 8192, 8192): (1.770, 1.497),
    ("scatter", 8192, 4096, 4096): (0.543, 0.421), ("scatter", 512, 8192, 7168): (0.126, 0.172),
    ("scatter", 512, 4096, 1024): (0.046, 0.270), ("scatter", 2048, 8192, 7168): (0.406, 0.360),
    ("scatter", 2048, 4096, 1024): (0.090, 0.263), ("scatter", 32768, 8192, 7168): (6.169, 5.257),
    ("scatter", 32768, 4096, 1024): (1.054, 0.806),
}  # fmt: skip


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_takes_what_was_measured_to_be_faster(case: tuple[str, int, int, int]) -> None:
    kind, rows, width, depth = case
    choice = predict(Product(kind, rows, width, depth, torch.bfloat16), 4, H200)  # type: ignore[arg-type]
    sequential, chunked = MEASURED[case]
    assert (choice.way != "sequential") == (chunked < sequential)
    assert (choice.way == "fused") == (case == ("gather", 32768, 1536, 4096))
    if choice.way != "sequential" and rows >= 8192:
        assert choice.product + choice.collective == pytest.approx(sequential / 1e3, rel=0.15)


def test_a_link_that_is_faster_never_makes_it_slower() -> None:
    product = Product("gather", 8192, 2560, 8192, torch.bfloat16)
    taken = [predict(product, 4, Rates(132, 766e12, link * 1e9)).overlapped for link in (50, 100, 200, 400)]
    assert taken == sorted(taken, reverse=True)
    assert predict(product, 4, H200).exposed < 1


def test_small_things_go_in_one_piece_over_links_that_were_not_measured() -> None:
    transport = World(2).overlaps[0].transport
    few, many = (Product("gather", rows, 4096, 4096, torch.bfloat16) for rows in (256, 8192))
    assert [Planner(transport).choose(product).way for product in (few, many)] == ["chunked", "chunked"]
    transport.on_gpus = True
    assert [Planner(transport).choose(product).way for product in (few, many)] == ["sequential", "chunked"]


def test_what_is_chosen_is_said() -> None:
    world = World(2)
    planner = Planner(world.overlaps[0].transport, H200)
    long, short = (Product("gather", rows, 2560, 8192, torch.bfloat16) for rows in (8192, 64))
    assert planner.choose(long).way == "chunked" and planner.choose(short).way == "sequential"
    assert planner.choose(Product("scatter", 1, 8, 8, torch.bfloat16)).why == "fewer rows than ranks"
    said = planner.explain()
    assert "all-gather, then 8192x8192 by 8192x2560, bfloat16: chunked" in said
    assert "exposed" in said and "at best" in said and "sequential (overlapped it would take" in said


def test_calls_are_planned_once() -> None:
    world = World(2)
    x, w = torch.ones(4, 8), torch.ones(6, 8)
    for _ in range(2):
        world.run(lambda overlap: all_gather_gemm(x, w, overlap))
    for overlap in world.overlaps:
        assert list(overlap.planner.choices.values()) == [
            Choice("chunked", "simulated: nothing is known of this device's speed")
        ]
        assert overlap.explain().count("\n") == 0
