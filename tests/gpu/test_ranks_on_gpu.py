"""Two GPUs train as one does, in bf16: no further from float32 than one GPU is, times two."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from powertrain.train.ranks import Ranks
from tests.distributed.launch import run_ranks
from tests.distributed.worker import fit

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]  # fmt: skip

_SIZES = {"hidden_size": 256}
CASES: dict[str, dict[str, Any]] = {
    "fsdp-llama": {"model": "llama"},
    "fsdp-deepseek": {"model": "deepseek"},
    "ddp-gpt_neox": {"model": "gpt_neox_rotary", "parallel": {"strategy": "ddp"}},
    "tp-gpt_neox": {"model": "gpt_neox", "parallel": {"tensor": 2}},
    "tp-llama": {"model": "llama", "parallel": {"tensor": 2}, "train": {"activation_checkpointing": "selective"}},
    "pp-gpt_neox": {"model": "gpt_neox", "parallel": {"pipeline": 2}},
    "pp-interleaved": {
        "model": "llama", "parallel": {"pipeline": 2, "virtual_stages": 2}, "layers": 4,
        "train": {"gradient_accumulation_steps": 4, "micro_batch_size": 2, "activation_checkpointing": "full"},
    },
}  # fmt: skip


def _case(name: str, precision: str) -> dict[str, Any]:
    case = CASES[name]
    sizes = {**_SIZES, "num_layers": case.get("layers", 2)}
    return {**case, "sizes": sizes, "train": {**case.get("train", {}), "precision": precision}}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out: Path = tmp_path_factory.mktemp("two") / "out.pt"
    cases = [_case(name, "bf16") for name in CASES]
    ranks = run_ranks(2, "-m", "tests.distributed.worker", json.dumps(cases), str(out))
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(rank.stdout[-3000:] for rank in ranks)
    return dict(zip(CASES, torch.load(out, weights_only=True)[:-1], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_equal_one(name: str, together: dict[str, dict[str, Any]]) -> None:
    device = torch.device("cuda", 0)
    exact, one = (fit({**_case(name, precision), "parallel": {}}, Ranks(device)) for precision in ("fp32", "bf16"))
    expected = torch.tensor(exact["losses"])
    alone, spread = ((torch.tensor(found["losses"]) - expected).abs() for found in (one, together[name]))
    print(f"{name}: mean |loss - fp32's| on one GPU {alone.mean():.2e}, on two {spread.mean():.2e}")
    assert spread.mean() <= 2 * alone.mean() + 1e-3
