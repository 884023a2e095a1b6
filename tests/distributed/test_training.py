"""Many ranks train as one does: FSDP, DDP, HSDP, tensor parallel; checkpoints between different numbers of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from powertrain.train.ranks import Ranks
from tests.distributed.launch import run_ranks
from tests.distributed.worker import STEPS, fit

TWO: dict[str, dict[str, Any]] = {
    "fsdp-gpt_neox": {"model": "gpt_neox"},
    "ddp-llama": {"model": "llama", "parallel": {"strategy": "ddp"}},
    "tp-gpt_neox": {"model": "gpt_neox", "parallel": {"tensor": 2}},
    "tp-llama": {"model": "llama", "parallel": {"tensor": 2}},
    "cp-gpt_neox": {"model": "gpt_neox", "parallel": {"context": 2}},
    "cp-llama": {"model": "llama", "parallel": {"context": 2}, "train": {"activation_checkpointing": "full"}},
    "pp-gpt_neox": {"model": "gpt_neox", "parallel": {"pipeline": 2}},
    "tp-experts": {"model": "gpt_neox_experts", "parallel": {"tensor": 2}},
    "pp-interleaved": {
        "model": "llama", "parallel": {"pipeline": 2, "virtual_stages": 2}, "sizes": {"num_layers": 4},
        "train": {"gradient_accumulation_steps": 4, "micro_batch_size": 2},
    },
}  # fmt: skip
TWO_MORE: dict[str, dict[str, Any]] = {
    "fsdp-llama": {"model": "llama", "parallel": {"reshard_after_forward": False}},
    "fsdp-experts": {"model": "gpt_neox_experts"},
    "cp-experts": {"model": "gpt_neox_experts", "parallel": {"context": 2}},
    "pp-experts": {"model": "gpt_neox_experts", "parallel": {"pipeline": 2}},
    "tp-sparse": {"model": "gpt_neox_sparse", "parallel": {"tensor": 2}},
    "fsdp-deepseek": {"model": "deepseek", "train": {"activation_checkpointing": "full"}},
    "fsdp-fp16": {"model": "llama", "train": {"precision": "fp16", "loss_scale": {"initial_power": 10}}},
    "fsdp-fp16-overflow": {
        "model": "llama", "train": {"precision": "fp16", "loss_scale": {"initial_power": 22}, "steps": 10},
    },
    "ddp-gpt_neox": {"model": "gpt_neox_rotary", "parallel": {"strategy": "ddp"}},
    "tp-rotary": {"model": "gpt_neox_rotary", "parallel": {"tensor": 2}, "train": {"activation_checkpointing": "full"}},
    "ep-deepseek": {"model": "deepseek", "parallel": {"expert": 2}, "train": {"activation_checkpointing": "full"}},
    "tp-deepseek": {"model": "deepseek", "parallel": {"tensor": 2}},
    "pp-llama": {"model": "llama", "parallel": {"pipeline": 2}, "train": {"activation_checkpointing": "full"}},
    "pp-selective": {"model": "llama", "parallel": {"pipeline": 2}, "train": {"activation_checkpointing": "selective"}},
    "pp-fp16": {
        "model": "llama", "parallel": {"pipeline": 2},
        "train": {"precision": "fp16", "loss_scale": {"initial_power": 10}},
    },
    "pp-fp16-overflow": {
        "model": "gpt_neox", "parallel": {"pipeline": 2},
        "train": {"precision": "fp16", "loss_scale": {"initial_power": 22}, "steps": 10},
    },
    "tp-selective": {"model": "llama", "parallel": {"tensor": 2}, "train": {"activation_checkpointing": "selective"}},
    # the embedding is tied and frozen
    "pp-lora": {"model": "gpt_neox", "parallel": {"pipeline": 2}, "train": {"lora": {"rank": 4}}},
    # no adapter in the first stage
    "pp-lora-above": {
        "model": "llama", "parallel": {"pipeline": 2, "virtual_stages": 2}, "sizes": {"num_layers": 4},
        "train": {"lora": {"rank": 4, "targets": ["layers.2.attention.qkv", "layers.3.mlp.down"]}},
    },
    "pp-fp8": {"model": "llama", "parallel": {"pipeline": 2}, "fp8": {"recipe": "row", "keep": ["layers.0.*"]}},
    "pp-fp8-lora": {
        "model": "llama", "parallel": {"pipeline": 2}, "fp8": {"recipe": "tensor"}, "train": {"lora": {"rank": 4}},
    },
    "fsdp-fp8-lora": {"model": "llama", "fp8": {"recipe": "row"}, "train": {"lora": {"rank": 4}}},
}  # fmt: skip
FOUR: dict[str, dict[str, Any]] = {
    "hsdp-gpt_neox": {"model": "gpt_neox", "parallel": {"replicate": 2}},
    "hsdp-llama": {"model": "llama", "parallel": {"replicate": 2}},
    "tp-fsdp-gpt_neox": {"model": "gpt_neox", "parallel": {"tensor": 2}},
    "tp-fsdp-llama": {"model": "llama", "parallel": {"tensor": 2}},
    "cp-fsdp-gpt_neox": {"model": "gpt_neox_rotary", "parallel": {"context": 2}},
    "cp-tp-llama": {"model": "llama", "parallel": {"context": 2, "tensor": 2}},
    "cp-ddp-llama": {"model": "llama", "parallel": {"context": 2, "strategy": "ddp"}},
    "ep-fsdp-deepseek": {"model": "deepseek", "parallel": {"expert": 2}},
    "ep-hsdp-deepseek": {"model": "deepseek", "parallel": {"expert": 2, "replicate": 2}},
    "tp-ddp-llama": {"model": "llama", "parallel": {"tensor": 2, "strategy": "ddp"}},
    "pp-fsdp-llama": {"model": "llama", "parallel": {"pipeline": 2}},
    "pp-hsdp-gpt_neox": {"model": "gpt_neox", "parallel": {"pipeline": 2, "replicate": 2}},
    "pp-ddp-llama": {"model": "llama", "parallel": {"pipeline": 2, "strategy": "ddp"}},
    "pp-tp-gpt_neox": {"model": "gpt_neox", "parallel": {"pipeline": 2, "tensor": 2}},
    "pp-tp-llama": {"model": "llama", "parallel": {"pipeline": 2, "tensor": 2}},
    "pp-cp-llama": {"model": "llama", "parallel": {"pipeline": 2, "context": 2}},
    "pp-interleaved-fsdp": {
        "model": "gpt_neox", "parallel": {"pipeline": 2, "virtual_stages": 2}, "sizes": {"num_layers": 5},
    },
    "pp-interleaved-tp": {
        "model": "gpt_neox", "parallel": {"pipeline": 2, "virtual_stages": 2, "tensor": 2}, "sizes": {"num_layers": 5},
    },
    "pp-four": {
        "model": "gpt_neox", "parallel": {"pipeline": 4}, "sizes": {"num_layers": 5},
        "train": {"gradient_accumulation_steps": 4, "micro_batch_size": 2},
    },
}  # fmt: skip


def alone(case: dict[str, Any]) -> dict[str, Any]:
    return fit({**case, "parallel": {}}, Ranks(torch.device("cpu")))


def together(world_size: int, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    out = folder / "out.pt"
    ranks = run_ranks(world_size, "-m", "tests.distributed.worker", json.dumps(cases), str(out))
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(rank.stdout[-3000:] for rank in ranks)
    found: list[dict[str, Any]] = torch.load(out, weights_only=True)
    return found


def check_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses to 1e-5 relative over all steps; weights as close as AdamW's division by small numbers lets them be.

    Not the biases of keys: softmax does not see them, so their gradient is rounding, which AdamW makes full steps of.
    """
    assert len(got["losses"]) == len(expected["losses"]) == STEPS
    torch.testing.assert_close(got["losses"], expected["losses"], rtol=1e-5, atol=0)
    torch.testing.assert_close(got["norms"], expected["norms"], rtol=1e-3, atol=0)
    torch.testing.assert_close(got["evaluations"], expected["evaluations"], rtol=1e-5, atol=0)
    for name, tensor in expected["tensors"].items():
        if name.startswith("model.") and not name.endswith("qkv.bias"):
            difference = (got["tensors"][name] - tensor).abs().max()
            assert difference <= 1e-3, f"{name} differs by {difference}"


SHORT = {"steps": 3}
TENSOR_FP8 = {
    "model": "llama", "train": {**SHORT, "precision": "bf16"}, "parallel": {"tensor": 2}, "fp8": {"recipe": "row"},
}  # fmt: skip
SPREAD = {
    "model": "deepseek", "train": {**SHORT, "precision": "bf16"}, "parallel": {"expert": 2}, "fp8": {"recipe": "row"},
}  # fmt: skip
WIRED = {
    "model": "llama", "train": {**SHORT, "precision": "bf16"}, "fp8": {"recipe": "tensor-delayed", "wire": "fp8"},
}  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What two ranks make of the cases, and of checkpoints to and from one rank."""
    folder = tmp_path_factory.mktemp("two")
    one = alone({"model": "llama", "train": SHORT, "folder": str(folder / "of_one")})
    cases = {
        **TWO,
        "to-one": {"model": "llama", "train": SHORT, "folder": str(folder / "of_two")},
        "from-one": {"model": "llama", "train": SHORT, "load": str(folder / "of_one")},
        "tensor-from-one": {
            "model": "llama",
            "train": SHORT,
            "load": str(folder / "of_one"),
            "parallel": {"tensor": 2},
        },
        "stages-from-one": {
            "model": "llama",
            "train": SHORT,
            "load": str(folder / "of_one"),
            "parallel": {"pipeline": 2},
        },
        "stages": {
            "model": "gpt_neox",
            "train": SHORT,
            "folder": str(folder / "of_stages"),
            "parallel": {"pipeline": 2},
        },
        "fp8": {**WIRED, "fp8": {"recipe": "tensor-delayed"}},
        "fp8-wire": {**WIRED, "folder": str(folder / "of_wire")},
        "tp-fp8": TENSOR_FP8,
        "ep": SPREAD,
        "ep-wire": {**SPREAD, "fp8": {"recipe": "row", "wire": "fp8"}},
        "fp8-wire-resumed": {**WIRED, "load": str(folder / "of_wire"), "train": {"steps": 4, "precision": "bf16"}},
    }
    *found, stopped = together(2, list(cases.values()), folder)
    return {**dict(zip(cases, found, strict=True)), "one": one, "folder": {"path": str(folder)}, "stopped": stopped}


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_equal_one(name: str, two: dict[str, dict[str, Any]]) -> None:
    check_equal(two[name], alone(TWO[name]))


@pytest.fixture(scope="module")
def two_more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    *found, _ = together(2, list(TWO_MORE.values()), tmp_path_factory.mktemp("two_more"))
    return dict(zip(TWO_MORE, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_MORE)
def test_two_more_ranks_equal_one(name: str, two_more: dict[str, dict[str, Any]]) -> None:
    got, expected = two_more[name], alone(TWO_MORE[name])
    if name == "fsdp-fp8-lora":
        # a rank's sums round otherwise, and FP8 makes steps of that
        torch.testing.assert_close(got["losses"], expected["losses"], rtol=1e-3, atol=0)
    elif name.endswith("-fp16"):
        torch.testing.assert_close(got["losses"], expected["losses"], rtol=5e-3, atol=0)
    elif name.endswith("-fp16-overflow"):
        # not the same steps: a rank's gradients are of its part of the mean, times the number of ranks
        for found in (got, expected):
            assert found["skipped"][0] and 0 < sum(found["skipped"]) < 12 and found["losses"][-1] < found["losses"][0]
    else:
        check_equal(got, expected)


def same_tensors(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []


@pytest.mark.parametrize("name", ["from-one", "tensor-from-one", "stages-from-one"])
def test_a_checkpoint_of_one_rank_on_two(name: str, two: dict[str, dict[str, Any]]) -> None:
    same_tensors(two[name]["resumed"], two["one"]["tensors"])


def test_a_checkpoint_of_two_ranks_on_one(two: dict[str, dict[str, Any]]) -> None:
    found = alone({"model": "llama", "train": SHORT, "load": two["folder"]["path"] + "/of_two"})
    same_tensors(found["resumed"], two["to-one"]["tensors"])


def test_a_checkpoint_of_two_stages_on_one_rank(two: dict[str, dict[str, Any]]) -> None:
    """The tied embedding, which both stages have, is in it once."""
    found = alone({"model": "gpt_neox", "train": SHORT, "load": two["folder"]["path"] + "/of_stages"})
    same_tensors(found["resumed"], two["stages"]["tensors"])


def test_weights_gathered_in_fp8_change_nothing(two: dict[str, dict[str, Any]]) -> None:
    """Losses and everything in a checkpoint, to the bit; the checkpoint goes on on two ranks and on one."""
    plain, wire, resumed = two["fp8"], two["fp8-wire"], two["fp8-wire-resumed"]
    assert wire["losses"] == plain["losses"] and wire["evaluations"] == plain["evaluations"]
    same_tensors(wire["tensors"], plain["tensors"])
    assert any(name.endswith("fp8_amax_history") and t.any() for name, t in wire["tensors"].items())
    (note,) = (note for note in wire["notes"] if note.startswith("fp8: "))
    assert "fp8.wire: the weights of 10 of them are gathered in FP8" in note
    assert not any("fp8.wire" in note for note in plain["notes"])
    same_tensors(resumed["resumed"], wire["tensors"])
    assert len(resumed["losses"]) == 1
    found = alone({**WIRED, "load": two["folder"]["path"] + "/of_wire"})
    same_tensors(found["resumed"], wire["tensors"])


def test_tensor_ranks_compute_in_fp8(two: dict[str, dict[str, Any]]) -> None:
    """Row-parallel sums round otherwise than one rank's, and FP8 makes steps of that."""
    found, expected = two["tp-fp8"], alone(TENSOR_FP8)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=5e-3, atol=0)
    (note,) = (note for note in found["notes"] if note.startswith("fp8: "))
    assert note.startswith("fp8: 10 linear layers by row")
    assert "fp8: 10 of them are sharded over tensor ranks, which gather tokens in FP8" in note


def test_rows_travel_in_fp8_to_the_experts_of_a_run(two: dict[str, dict[str, Any]]) -> None:
    plain, wire = two["ep"], two["ep-wire"]
    assert plain["losses"] != wire["losses"]
    torch.testing.assert_close(wire["losses"], plain["losses"], rtol=1e-2, atol=0)
    (note,) = (note for note in wire["notes"] if note.startswith("fp8: "))
    assert "fp8.wire: rows are sent in FP8 to the experts of 1 layers" in note


def test_what_travels_between_tensor_ranks_is_explained(two: dict[str, dict[str, Any]]) -> None:
    told = [note for note in two["tp-llama"]["notes"] if note.startswith("tensor parallelism over 2 ranks")]
    assert len(told) == 1 and "gather" in told[0] and "scatter" in told[0]
    assert not any("tensor parallelism" in note for note in two["ddp-llama"]["notes"])


def test_a_bad_weight_on_one_rank_stops_all(two: dict[str, dict[str, Any]]) -> None:
    said = two["stopped"]["said"]
    assert "training stopped at step 1" in said
    assert (
        "rank 0, samples [0, 1" in said and "the first module whose output is not finite is layers.1.mlp.down" in said
    )
    assert "rank 1, samples " in said and "the weight layers.1.mlp.down.weight is not finite" in said


def test_a_bad_weight_of_one_stage_stops_all(two: dict[str, dict[str, Any]]) -> None:
    said = two["stopped"]["said in stages"]
    assert "training stopped at step 1" in said and "rank 0, samples [" in said
    assert "rank 1, samples [" in said and "the weight layers.1.mlp.down.weight is not finite" in said


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("four")
    cases = {**FOUR, "to-one": {**FOUR["tp-fsdp-llama"], "train": SHORT, "folder": str(folder / "of_four")}}
    *found, _ = together(4, list(cases.values()), folder)
    return {**dict(zip(cases, found, strict=True)), "folder": {"path": str(folder)}}


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_on_one(four: dict[str, dict[str, Any]]) -> None:
    found = alone({"model": "llama", "train": SHORT, "load": four["folder"]["path"] + "/of_four"})
    same_tensors(found["resumed"], four["to-one"]["tensors"])


THREE: dict[str, dict[str, Any]] = {
    "stages": {"parallel": {"pipeline": 3}, "train": {"gradient_accumulation_steps": 4}},
    "more steps": {"parallel": {"pipeline": 3}, "train": {"gradient_accumulation_steps": 5, "micro_batch_size": 1}},
    "interleaved": {"parallel": {"pipeline": 3, "virtual_stages": 2}, "train": {"gradient_accumulation_steps": 6}},
}  # fmt: skip


@pytest.mark.slow
def test_three_stages_and_a_checkpoint_of_two(tmp_path: Path) -> None:
    """Also on two tensor ranks. gpt_neox: a tied embedding, which two ranks have."""
    whole = {"model": "gpt_neox", "sizes": {"num_layers": 7}}
    (of_two, _) = together(
        2, [{**whole, "train": SHORT, "folder": str(tmp_path / "of_two"), "parallel": {"pipeline": 2}}], tmp_path
    )
    load = {**whole, "train": {"steps": 3, "gradient_accumulation_steps": 4}, "load": str(tmp_path / "of_two")}
    (on_tensor_ranks, _) = together(2, [{**load, "parallel": {"tensor": 2}}], tmp_path)
    cases = [*({**whole, **case} for case in THREE.values()), {**load, "parallel": {"pipeline": 3}}]
    *found, on_three, _ = together(3, cases, tmp_path)
    for resumed in (on_tensor_ranks, on_three):
        same_tensors(resumed["resumed"], of_two["tensors"])
    for got, case in zip(found, cases, strict=False):
        check_equal(got, alone(case))


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_equal_one(name: str, four: dict[str, dict[str, Any]]) -> None:
    check_equal(four[name], alone(FOUR[name]))
