"""SFT, DPO and LoRA follow plain PyTorch step by step: benchmarks/train/fine_tuning_curves.py at a small size."""

import math
from pathlib import Path
from statistics import fmean

import pytest
import torch

from benchmarks.train.curves import distance
from benchmarks.train.fine_tuning_curves import OBJECTIVES, ON_CPU, Curve, compare, make_base, row, write_curves

STEPS = 18
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curves")
    assert make_base(folder, ON_CPU, CPU, 10) < math.log(ON_CPU.vocabulary)
    return folder


# one that has a reference in every run of the tests, the others in the slow ones
@pytest.mark.parametrize(
    "objective", [o if o == "dpo" else pytest.param(o, marks=pytest.mark.slow) for o in OBJECTIVES]
)
def test_curves_follow_plain_pytorch(objective: str, base: Path) -> None:
    """In float32; the first loss of DPO is log 2, and each run gets better."""
    ours, plain = compare(objective, base, ON_CPU, CPU, STEPS)
    assert len(ours.losses) == STEPS and distance(ours.losses, plain.losses)[0] < 1e-4
    assert ours.last(6) < fmean(ours.losses[:6])
    if objective == "dpo":
        assert ours.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert ours.tokens_per_second > 0 and plain.tokens_per_second > 0


def test_the_table_and_the_file(tmp_path: Path) -> None:
    ours, plain = Curve([2.0, 1.0], 300.0, 2**30), Curve([2.0, 1.5], 200.0, 3 * 2**30)
    line = "| sft | 1.5000 | 1.7500 | -0.2500 | 0.5000 | 300 | 200 | 1.50 | 1.0 | 3.0 |"
    assert row("sft", ours, plain) == line
    write_curves(tmp_path / "sft.csv", ours, plain)
    expected = "step,powertrain,plain_pytorch\n1,2.000000,2.000000\n2,1.000000,1.500000\n"
    assert (tmp_path / "sft.csv").read_text() == expected
