"""The limits of benchmarks/parallel/predict.py's formulas."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.parallel.predict import GPUS, Machine, Model, Run, layer, memory, model_flops, report, step
from powertrain.models import llama
from powertrain.models.flops import flops_per_token


def _efficiencies(run: Run, machine: Machine) -> list[float]:
    found = step(Model(), run, machine)
    return [found.efficiency(seconds) for seconds in found[1:]]


def _linked(bytes_per_second: float) -> Machine:
    return Machine(rates=replace(Machine().rates, link=bytes_per_second))


def test_one_gpu_waits_for_nobody() -> None:
    assert _efficiencies(Run(1, tensor=1), Machine()) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("gpus", GPUS[1:])
def test_nothing_is_done_without_a_network_or_without_links(gpus: int) -> None:
    for machine in (Machine(network=1.0), _linked(1.0)):
        assert max(_efficiencies(Run(gpus), machine)) < 1e-3


@pytest.mark.parametrize("gpus", GPUS)
def test_endless_rates_leave_latencies(gpus: int) -> None:
    machine = _linked(1e18)._replace(network=1e18, hop=0.0)
    nothing_hidden, *hidden = _efficiencies(Run(gpus), machine)
    assert 0.9 < nothing_hidden < 1 and min(hidden) >= nothing_hidden


@pytest.mark.parametrize("regather", [True, False])
@pytest.mark.parametrize("gpus", GPUS)
def test_what_hides_more_is_never_slower(gpus: int, regather: bool) -> None:
    found = _efficiencies(Run(gpus, regather=regather), Machine())
    assert 0 < found[0] <= found[1] <= found[2] < 1


@pytest.mark.parametrize("gpus", GPUS[1:])
def test_faster_is_never_less_efficient(gpus: int) -> None:
    by_network = [_efficiencies(Run(gpus), Machine(network=2.0**i * 1e9)) for i in range(10)]
    assert all(a < b for slow, fast in pairwise(by_network) for a, b in zip(slow, fast, strict=True))
    by_link = [_efficiencies(Run(gpus), _linked(2.0**i * 1e9)) for i in range(5, 12)]
    assert all(slow[0] < fast[0] for slow, fast in pairwise(by_link))
    # the planner leaves a product in sequence unless 2% are won
    assert all(slow[2] < fast[2] * 1.02 for slow, fast in pairwise(by_link))


def test_more_tokens_a_step_hide_the_sums_of_gradients() -> None:
    found = [_efficiencies(Run(8192, tokens=2**i), Machine())[2] for i in range(23, 28)]
    assert found == sorted(found) and found[0] < found[-1]


def test_the_model_is_llama_70b() -> None:
    """Its FLOPs are those that the trainer counts; a step computes no faster than the device does."""
    with torch.device("meta"):
        whole = llama.Model(llama.Config(**llama.PRESETS["llama-70b"]))
    model, run, machine = Model(), Run(64), Machine()
    assert run.micro_batches * run.ways * run.sequence == run.tokens
    assert model_flops(model, run) == pytest.approx(flops_per_token(whole, run.sequence) * run.tokens)
    assert step(model, run, machine).compute > model_flops(model, run) / run.gpus / machine.rates.flops
    forward, backward = layer(model, run, machine)
    assert 1.9 < backward.alone / forward.alone < 2.2


def test_memory_is_shared_among_hosts() -> None:
    found = [memory(Model(), Run(8 * hosts)) for hosts in (1, 2, 4, 8, 16)]
    assert found[0] > Machine().memory_bytes > found[3]
    assert found == sorted(found, reverse=True) and found[3] == found[4]  # replicas beyond most_shards


def test_the_page_has_what_the_formulas_say() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    missing = [line for line in report(Model(), Machine()).splitlines() if line not in page]
    assert not missing, "python -m benchmarks.parallel.predict prints the tables of docs/scaling.md:\n" + "\n".join(
        missing
    )
