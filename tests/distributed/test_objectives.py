"""Two ranks under FSDP train an objective as one process does, with a copy of the reference and with LoRA's base."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import run_ranks

CASES = {
    "dpo": ("dpo", ()),
    "dpo-lora": ("dpo", ("train.lora.rank=4",)),
    "dpo-tp": ("dpo", ("parallel.tensor=2",)),
    "reward-tp": ("reward", ("parallel.tensor=2",)),
    "policy-tp": ("policy", ("parallel.tensor=2",)),
    "reward": ("reward", ()),
    "sft-lora": ("sft", ("train.lora.rank=4", "train.activation_checkpointing=full")),
}


@pytest.mark.parametrize(
    "case", ["dpo-lora", *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c != "dpo-lora")]
)
def test_two_ranks_are_one(case: str, tmp_path: Path) -> None:
    objective, options = CASES[case]
    found = []
    common = ("data.packing=unpacked", "evaluation.at_end=false", "evaluation.every=0", "checkpoint.save=false")
    splits_batch = not any(option.startswith("parallel") for option in options)
    for world, micro in ((1, 2), (2, 1 if splits_batch else 2)):
        folder = tmp_path / str(world)
        folder.mkdir()
        # one process has no ranks to share with
        mine = [option for option in options if world > 1 or not option.startswith("parallel")]
        batch = f"train.micro_batch_size={micro}"
        arguments = [str(folder), objective, str(folder / "out.pt"), batch, *common, *mine]
        module = "tests.distributed.objective_worker"
        if world == 1:
            subprocess.run([sys.executable, "-m", module, *arguments], check=True, timeout=120)
        else:
            ranks = run_ranks(2, "-m", module, *arguments)
            assert all(rank.returncode == 0 for rank in ranks), "\n".join(rank.stdout[-3000:] for rank in ranks)
        found.append(torch.load(folder / "out.pt", weights_only=True))
    for (loss, norm, metrics), (loss_2, norm_2, metrics_2) in zip(*found, strict=True):
        assert loss_2 == pytest.approx(loss, rel=1e-4) and norm_2 == pytest.approx(norm, rel=1e-3)
        assert (metrics is None) == (metrics_2 is None)
        # in the first step policy and reference differ by roundings alone, and by their sign a pair counts or not
        for name in set(metrics or ()) - {"accuracy"}:
            assert metrics_2[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("case", ["dpo-lora", *(pytest.param(c, marks=pytest.mark.slow) for c in ("dpo", "dpo-tp"))])
def test_cached_reference_is_the_live_one(case: str, tmp_path: Path) -> None:
    """Two ranks that share the files of the reference's log-probabilities have the bits of two that compute them."""
    objective, options = CASES[case]
    found = []
    for cached in ("false", "true"):
        folder = tmp_path / cached
        folder.mkdir()
        # one epoch: every example is in the micro-batch in which it was computed
        more = ("data.packing=unpacked", "checkpoint.save=false", f"train.reference_cache={cached}", *options)
        ranks = run_ranks(
            2, "-m", "tests.distributed.objective_worker", str(folder), objective, str(folder / "out.pt"), *more
        )
        assert all(rank.returncode == 0 for rank in ranks), "\n".join(rank.stdout[-3000:] for rank in ranks)
        found.append(torch.load(folder / "out.pt", weights_only=True))
    assert found[0] == found[1]
    assert list((tmp_path / "true/run/reference").glob("*/*.bin"))
