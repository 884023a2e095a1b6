"""`python -m tests.distributed.worker CASES OUT`, one rank of these tests: trains small models as each case says.

The first rank writes to OUT what each case came to; the tests train the same cases in one process beside it. Before
that the ranks meet with different configs, which every one of them must be told.
"""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from powertrain.train.config.schema import RunConfig
from powertrain.train.data.packed import IGNORED, Sample
from powertrain.train.data.tokenizer import ByteTokenizer
from powertrain.train.ranks import Ranks, arrange, connect, disconnect, read_launch_env
from powertrain.train.reporting import kernel_profile
from powertrain.train.reporting.metrics import PartialSink, StepRecord
from powertrain.train.trainer import Trainer, TrainingStopped

SEQ_LENGTH, GLOBAL_BATCH, STEPS = 12, 8, 4
_SMALL = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 16}
# every option of a layer that tensor parallelism must know of is in one of them; 61 and 12 divide by no number of ranks
MODELS: dict[str, dict[str, Any]] = {
    "gpt_neox": {**_SMALL, "architecture": "gpt_neox", "position_embedding": "alibi", "parallel_residual": True,
                 "tie_embeddings": True},
    "gpt_neox_rotary": {**_SMALL, "architecture": "gpt_neox", "rotary_pct": 0.5, "activation": "swiglu"},
    "gpt_neox_experts": {**_SMALL, "architecture": "gpt_neox", "num_experts": 4, "experts_per_token": 2,
                         "expert_interval": 2, "expert_intermediate_size": 24},
    "gpt_neox_sparse": {**_SMALL, "architecture": "gpt_neox", "layer_types": ["sparse", "attention"],
                        "sparsity": {"block": 2, "before": 1}},
    "llama": {**_SMALL, "architecture": "llama", "intermediate_size": 48, "num_kv_heads": 2, "qk_norm": True,
              "qkv_bias": True},
    "deepseek": {**_SMALL, "architecture": "deepseek", "intermediate_size": 48, "moe_intermediate_size": 24,
                 "num_experts": 6, "experts_per_token": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
                 "qk_rope_head_dim": 8, "v_head_dim": 8, "balance_loss": 0.0},
}  # fmt: skip


class Tokens:
    """Random samples of which every third counts in part only, and each fifth not at all."""

    def __len__(self) -> int:
        return 1 << 20

    def sample(self, index: int) -> Sample:
        tokens = np.random.default_rng(index % 16).integers(0, 61, SEQ_LENGTH + 1)
        labels = tokens[1:].copy()
        labels[: {0: 7, 1: 0, 2: 0}[index % 3]] = IGNORED
        if index % 5 == 0:
            labels[:] = IGNORED
        return Sample(tokens[:-1], labels, None)


class Losses(PartialSink):
    """A sink that keeps each step's loss and gradient norm, and what else is said."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.evaluations: list[float] = []
        self.notes: list[str] = []

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def evaluation(self, record: Any) -> None:
        self.evaluations.append(record.loss)

    def note(self, text: str) -> None:
        self.notes.append(text)


def run_config(case: dict[str, Any], dp_size: int) -> RunConfig:
    train = {
        "steps": STEPS, "seq_length": SEQ_LENGTH, "micro_batch_size": GLOBAL_BATCH // 2 // dp_size,
        "gradient_accumulation_steps": 2, "precision": "fp32", "spike_factor": 0, **case.get("train", {}),
    }  # fmt: skip
    sections: dict[str, Any] = {
        "model": {**MODELS[case["model"]], **case.get("sizes", {})},
        "data": {"train": "nothing", "num_workers": 0},
        "train": train,
        "optimizer": {"lr": 3e-3},
        "fp8": case.get("fp8", {}),
        "parallel": {"timeout_minutes": 1, **case.get("parallel", {})},
        "checkpoint": {"save": "folder" in case, "folder": case.get("folder"), "load": case.get("load")},
        "evaluation": {"every": STEPS, "steps": 2},
        "logging": {"folder": case.get("folder", "/nonexistent")},
    }
    return RunConfig(**sections)


def fit(case: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Train a case; its losses, gradient norms, evaluations and, whole, everything a checkpoint holds."""
    sink = Losses()
    data: Any = SimpleNamespace(train=Tokens(), validation=Tokens(), test=None, tokenizer=ByteTokenizer(), identity="")
    trainer = Trainer(run_config(case, ranks.dp_size), ranks, data, [sink])
    if "load" in case:
        assert trainer.resume(Path(case["load"]))
    resumed = everything(trainer)
    trainer.fit()
    return {
        "losses": [record.loss for record in sink.steps],
        "norms": [record.grad_norm for record in sink.steps],
        "skipped": [record.skipped for record in sink.steps],
        "evaluations": sink.evaluations,
        "notes": sink.notes,
        "resumed": resumed,
        "tensors": everything(trainer),
    }


def stopped_by_nan(ranks: Ranks, parallel: dict[str, Any]) -> str:
    """What a run says whose second rank has a weight that is not finite."""
    data: Any = SimpleNamespace(train=Tokens(), validation=None, test=None, tokenizer=ByteTokenizer(), identity="")
    trainer = Trainer(run_config({"model": "llama", "parallel": parallel}, ranks.dp_size), ranks, data)
    if ranks.rank == 1:
        weight = trainer.model.get_parameter("layers.1.mlp.down.weight")
        weight.data.to_local().fill_(float("nan"))
    try:
        trainer.fit()
    except TrainingStopped as stopped:
        return str(stopped)
    raise AssertionError("a run with bad weights must stop")


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """Of a pipeline all stages' tensors; those that two have must be equal."""
    mine = {name: whole(tensor).cpu() for name, tensor in trainer.optimizer.tensors().items()}
    if trainer.pipeline is None:
        return mine
    merged: dict[str, Tensor] = {}
    for stage in trainer.ranks.gather(mine):
        assert all(torch.equal(tensor, merged.get(name, tensor)) for name, tensor in stage.items())
        merged |= stage
    return merged


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def main(cases: list[dict[str, Any]], out: str) -> None:
    torch.set_num_threads(1)
    kernel_profile.PROFILED = 0  # takes as long as ten steps
    here, results = read_launch_env(), []
    refused = ""
    try:
        connect(here, run_config({"model": "llama", "train": {"seed": here.rank}}, here.world_size))
    except RuntimeError as error:
        refused = str(error)
    assert "config train.seed: 0 on rank 0" in refused and "; 1 on rank 1" in refused, refused
    first = connect(here, run_config({"model": "llama"}, here.world_size))
    for case in cases:
        parallel = case.get("parallel", {})
        sizes = (parallel.get(axis, 1) for axis in ("pipeline", "tensor", "context"))
        dp_size = here.world_size // math.prod(sizes)
        results.append(fit(case, arrange(here, run_config(case, dp_size))))
    results.append({"said": stopped_by_nan(first, {})})
    if here.world_size == 2:
        staged = {"pipeline": 2}
        ranks = arrange(here, run_config({"model": "llama", "parallel": staged}, 1))
        results[-1]["said in stages"] = stopped_by_nan(ranks, staged)
    if here.rank == 0:
        torch.save(results, out)
    disconnect(first)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
