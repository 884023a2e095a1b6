"""Two ranks under FSDP train an objective as one process does, with a copy of the reference and with LoRA's base."""

from pathlib import Path

import pytest
import torch

from powertrain.train.checkpoint.load import open_weights
from tests.distributed.launch import run_ranks

CASES = {
    "dpo": ("dpo", ()),
    "dpo-lora": ("dpo", ("train.lora.rank=4",)),
    "dpo-tp": ("dpo", ("parallel.tensor=2",)),
    "dpo-lora-tp": ("dpo", ("parallel.tensor=2", "train.lora.rank=4")),
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
        ranks = run_ranks(world, "-m", module, *arguments)
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


def test_adapters_of_tensor_ranks_are_those_of_one(tmp_path: Path) -> None:
    """Losses, and the adapters that checkpoints hold: names, shapes and values."""
    found, adapters = [], []
    common = ("data.packing=unpacked", "evaluation.at_end=false", "evaluation.every=0", "train.lora.rank=4")
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        arguments = (str(folder), "sft", str(folder / "out.pt"), f"parallel.tensor={world}", *common)
        ranks = run_ranks(world, "-m", "tests.distributed.objective_worker", *arguments)
        assert all(rank.returncode == 0 for rank in ranks), "\n".join(rank.stdout[-3000:] for rank in ranks)
        found.append(torch.load(folder / "out.pt", weights_only=True))
        weights = open_weights(folder / "run")
        assert weights.adapters is not None
        adapters.append(weights.adapters())
    for (loss, norm, _), (loss_2, norm_2, _) in zip(*found, strict=True):
        assert loss_2 == pytest.approx(loss, rel=1e-4) and norm_2 == pytest.approx(norm, rel=1e-3)
    assert adapters[0].keys() == adapters[1].keys() and "layers.0.attention.out" in adapters[0]
    for name, one in adapters[0].items():
        two = adapters[1][name]
        assert two.A.shape == one.A.shape and two.B.shape == one.B.shape and two.B.abs().max() > 0
        # Adam divides by the root of a small second moment: roundings grow
        torch.testing.assert_close(two.B, one.B, rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(two.A, one.A, rtol=1e-2, atol=1e-4)
