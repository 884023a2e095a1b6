"""Objectives after pretraining: each one learns in a tiny run, resumes bit for bit, and says what is wrong."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain import losses
from powertrain.models import build
from powertrain.models.causal_lm import CausalLM
from powertrain.nn.lora import lora_layers
from powertrain.runtime import tracing
from powertrain.runtime.target import Target
from powertrain.train import mesh_shape, ranks
from powertrain.train.anomaly import SpikeWatch
from powertrain.train.checkpoint.convert import convert
from powertrain.train.checkpoint.load import load_model, open_weights
from powertrain.train.config.reader import Run, read_config
from powertrain.train.config.yaml_source import ConfigError
from powertrain.train.lint import lint, record_step
from powertrain.train.objective import make_objective, token_log_probs
from powertrain.train.reporting.metrics import JsonLines, PartialSink, StepRecord, read_metrics
from powertrain.train.run import start, with_vocabulary
from powertrain.train.trainer import Trainer, TrainingStopped

CONFIG = """
model: {{architecture: llama, hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 64,
  max_position_embeddings: 64, tie_embeddings: false}}
data: {{train: {folder}/records.jsonl, split: "80,20,0", num_workers: 0, cache_folder: {folder}/cache}}
train: {{steps: 8, seq_length: 64, micro_batch_size: 2, precision: fp32, objective: {objective}, spike_factor: 0}}
optimizer: {{lr: 5.0e-3}}
schedule: {{kind: constant}}
evaluation: {{every: 4, steps: 2}}
checkpoint: {{folder: {folder}/run/checkpoints, every: 4, asynchronous: false}}
logging: {{folder: {folder}/run, tensorboard: false}}
"""
RECORDS: dict[str, Any] = {
    "sft": lambda n: {"prompt": f"What is {n}?", "completion": f"It is {n}."},
    "dpo": lambda n: {"prompt": f"Say {n}.", "chosen": f"yes, {n}", "rejected": f"no {n} no"},
    "kto": lambda n: {"prompt": f"Say {n}.", "completion": "yes" if n % 2 else "never", "label": bool(n % 2)},
    "reward": lambda n: {"prompt": f"Say {n}.", "chosen": f"yes, {n}", "rejected": f"no {n} no"},
    "policy": lambda n: {"prompt": f"Say {n}.", "completion": "ab" if n % 2 else "ba", "advantage": 1.0 - 2 * (n % 2)},
    "distill": lambda n: {"prompt": f"What is {n}?", "completion": f"It is {n}."},
}


def _slow(*values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


class Recorder(PartialSink):
    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)


def read_run(folder: Path, objective: str, *overrides: str) -> Run:
    records = [json.dumps(RECORDS[objective](n)) for n in range(40)]
    (folder / "records.jsonl").write_text("\n".join(records))
    file = folder / "tiny.yml"
    file.write_text(CONFIG.format(folder=folder, objective=objective))
    return read_config([file], overrides)


def _open(folder: Path, objective: str, *overrides: str) -> tuple[Trainer, Recorder]:
    recorder = Recorder()
    if objective == "distill" and not (folder / "teacher").exists():
        _make_teacher(folder)
        overrides = (*overrides, f"train.distill.teacher={folder}/teacher")
    elif objective == "distill":
        overrides = (*overrides, f"train.distill.teacher={folder}/teacher")
    trainer = start(read_run(folder, objective, *overrides), ranks.read_launch_env(), lambda _: [recorder])
    return trainer, recorder


def _make_teacher(folder: Path) -> None:
    inside = folder / "of_teacher"
    inside.mkdir()
    trainer, _ = _open(inside, "sft", "train.seed=7", f"checkpoint.folder={folder}/teacher", "train.steps=4")
    trainer.fit()
    trainer.close()


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in trainer.optimizer.tensors().items()}


def test_losses_around_0_are_no_spikes(tmp_path: Path) -> None:
    """A policy's loss is minus the advantage at first; by chance one is above three times the median."""
    trainer, recorder = _open(tmp_path, "policy", "train.steps=24", "train.spike_factor=3", "evaluation.every=0")
    trainer.fit()
    trainer.close()
    losses = [record.loss for record in recorder.steps]
    watch = SpikeWatch(3.0)
    assert len(losses) == 24 and any(watch.median_if_spike(loss) is not None for loss in losses)


def test_a_section_with_an_error_is_named_before_the_files(tmp_path: Path) -> None:
    """Not records for want of `text`: the objective of a section that is wrong is not known."""
    file = tmp_path / "tiny.yml"
    (tmp_path / "records.jsonl").write_text(json.dumps(RECORDS["distill"](0)))
    file.write_text(CONFIG.format(folder=tmp_path, objective="distill"))
    with pytest.raises(ConfigError, match=r"train\.distill\.teacher must name a checkpoint .* got none"):
        read_config([file], files="all")


def test_records_that_changed_since_the_checkpoint_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    # a text is printed once in a process, where another test may have been first
    monkeypatch.setattr(tracing, "warn", warnings.append)
    for steps, answer in ((1, "It is"), (2, "It is"), (3, "It was")):
        records = RECORDS | {
            "sft": lambda n, answer=answer: {"prompt": f"What is {n}?", "completion": f"{answer} {n}."}
        }
        monkeypatch.setattr("tests.train.test_objectives.RECORDS", records)
        trainer, _ = _open(tmp_path, "sft", f"train.steps={steps}", "evaluation.at_end=false")
        trainer.fit()
        trainer.close()
        said = any("data.train is not what the checkpoint was trained on" in text for text in warnings)
        assert said == (answer == "It was"), warnings


@pytest.mark.parametrize("objective", RECORDS)
def test_it_learns_and_resumes_bit_for_bit(objective: str, tmp_path: Path) -> None:
    trainer, recorder = _open(tmp_path, objective)
    trainer.fit()
    trainer.close()
    whole, seen = _weights(trainer), recorder.steps
    first, last = seen[0], seen[-1]
    # a policy's loss is about 0 whatever happens; its log-probabilities are looked at below
    if objective != "policy":
        assert last.loss < first.loss
    if objective in ("dpo", "reward"):
        assert first.objective is not None and last.objective is not None
        assert last.objective["margin"] > first.objective["margin"] and last.objective["accuracy"] == 1.0
    (tmp_path / "run/checkpoints/step_00000008").rename(tmp_path / "aside")
    again, recorder = _open(tmp_path, objective)
    assert again.progress.step == 4
    again.fit()
    again.close()
    for name, tensor in _weights(again).items():
        assert torch.equal(tensor, whole[name]), name
    assert [r.objective for r in recorder.steps] == [r.objective for r in seen[4:]]


def test_a_run_goes_on_with_a_smaller_batch(tmp_path: Path) -> None:
    trainer, _ = _open(tmp_path, "sft", "train.steps=3", "train.micro_batch_size=4")
    trainer.fit()
    trainer.close()
    again, recorder = _open(tmp_path, "sft", "train.steps=5", "train.micro_batch_size=1")
    again.fit()
    again.close()
    assert [record.step for record in recorder.steps] == [4, 5] and again.progress.samples == 14


@pytest.mark.parametrize("loss", ["ipo", *_slow("robust", "simpo", "cpo", "orpo")])
def test_preference_losses(loss: str, tmp_path: Path) -> None:
    smoothing = ("train.preference.label_smoothing=0.1",) if loss in ("robust", "simpo", "cpo") else ()
    trainer, recorder = _open(tmp_path, "dpo", f"train.preference.loss={loss}", "checkpoint.save=false", *smoothing)
    trainer.fit()
    trainer.close()
    assert recorder.steps[-1].loss < recorder.steps[0].loss


def test_the_first_dpo_step_is_the_formula(tmp_path: Path) -> None:
    """Each completion by itself, unpacked, through plain logits: the loss is log 2 at the start, the gradient too."""
    trainer, _ = _open(tmp_path, "dpo", "checkpoint.save=false", "train.gradient_accumulation_steps=2")
    batches = [next(trainer._batches(trainer.data.train, 2 * n, 2 * n + 2)) for n in range(2)]
    loss = trainer._forward_backward(batches)[0]
    assert loss.item() == pytest.approx(0.6931472, rel=1e-6)
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    sides: dict[bool, list[Tensor]] = {True: [], False: []}
    model: CausalLM = trainer.model
    for batch in batches:
        for row in range(len(batch.tokens)):
            for document in batch.document_ids[row].unique():
                mine = (batch.document_ids[row] == document) & (batch.labels[row] != -100)
                here = batch.document_ids[row] == document
                if not mine.any():
                    continue  # padding
                log_p = model(batch.tokens[row][here][None]).log_softmax(-1)[0]
                labels = batch.labels[row][here]
                picked = log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
                sides[row % 2 == 0].append(picked[labels != -100].sum())
    chosen, rejected = (torch.stack(sides[side]) for side in (True, False))
    losses.dpo_loss(chosen, rejected, chosen.detach(), rejected.detach()).mean().backward()
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-6)
    trainer.close()


def test_policy_prefers_what_has_an_advantage(tmp_path: Path) -> None:
    trainer, _ = _open(tmp_path, "policy", "checkpoint.save=false", "train.policy.kl_weight=0.01")
    batch = next(trainer._batches(trainer.data.train, 0, 2))
    before = token_log_probs(trainer.model, batch).log_probs.detach()
    trainer.fit()
    after = token_log_probs(trainer.model, batch).log_probs.detach()
    completions = batch.completions
    assert completions is not None
    gained = losses.sum_by_sequence(after - before, completions.sequence, len(completions.values))
    assert (gained[completions.values > 0].mean() > gained[completions.values < 0].mean()).item()
    trainer.close()


def test_sampled_log_probabilities_are_used(tmp_path: Path) -> None:
    records = [{"prompt": "a", "completion": "bc", "advantage": 1.0, "log_probs": [-1.0, -2.0, -3.0]}] * 8
    run = read_run(tmp_path, "policy", "checkpoint.save=false", "train.steps=1")
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    recorder = Recorder()
    trainer = start(run, ranks.read_launch_env(), lambda _: [recorder])
    batch = next(trainer._batches(trainer.data.train, 0, 2))
    known = batch.completions.log_probs[0][batch.labels[0] != -100]
    assert known[:3].tolist() == [-1.0, -2.0, -3.0]
    trainer.fit()
    trainer.close()
    assert recorder.steps[0].objective["ratio"] != 1.0


@pytest.mark.parametrize("ratio, shares", [("token", (1.25, 1.0)), ("sequence", (1.0, 0.0))])
def test_ratios_are_counted_as_the_loss_clips_them(ratio: str, shares: tuple[float, float], tmp_path: Path) -> None:
    """Half of a completion's tokens have a ratio of 2, half of 0.5, all together 1. GSPO's were counted by token."""
    run = read_run(tmp_path, "policy", "checkpoint.save=false", f"train.policy.ratio={ratio}")
    records = [{"prompt": "a", "completion": "bcd", "advantage": 1.0}] * 8
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    trainer = start(run, ranks.read_launch_env(), lambda _: [])
    batch = next(trainer._batches(trainer.data.train, 0, 2))
    assert batch.completions is not None
    mine = token_log_probs(trainer.model, batch).log_probs.detach()
    other = mine + torch.tensor([2.0, 0.5]).log().repeat(mine.shape[1] // 2)
    batch = batch._replace(completions=batch.completions._replace(log_probs=other))
    _, metrics = trainer.objective(batch, trainer.objective.count(batch))
    assert metrics[:2].tolist() == pytest.approx(shares)
    trainer.close()


@pytest.mark.parametrize("kind, precision", [pytest.param("lora", "fp32", marks=pytest.mark.slow), ("dora", "bf16")])
def test_lora_trains_adapters_alone_and_resumes(kind: str, precision: str, tmp_path: Path) -> None:
    options = ["train.lora.rank=4", f"train.precision={precision}", "train.activation_checkpointing=full"]
    options += ["train.lora.dora=true"] * (kind == "dora")
    trainer, recorder = _open(tmp_path, "dpo", *options)
    before = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    assert recorder.steps == [] and set(lora_layers(trainer.model)) > {"layers.0.attention.qkv"}
    trainer.fit()
    trainer.close()
    assert recorder.steps[0].loss == pytest.approx(0.6931472, rel=1e-2 if precision == "bf16" else 1e-5)
    assert recorder.steps[-1].loss < recorder.steps[0].loss
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters() if n in before)
    whole = _weights(trainer)
    (tmp_path / "run/checkpoints/step_00000008").rename(tmp_path / "aside")
    again, _ = _open(tmp_path, "dpo", *options)
    again.fit()
    again.close()
    assert all(torch.equal(t, whole[name]) for name, t in _weights(again).items())


@pytest.mark.parametrize("objective", ["sft", "reward"])
def test_a_run_with_lora_is_read_merged(objective: str, tmp_path: Path) -> None:
    """Of a reward model without its value head, which has adapters too."""
    trainer, _ = _open(tmp_path, objective, "train.lora.rank=4", "train.lora.dora=true")
    trainer.fit()
    trainer.close()
    tokens = torch.randint(0, 256, (2, 16))
    trainer.model.eval()
    model, _ = load_model(tmp_path / "run", device="cpu")
    torch.testing.assert_close(model(tokens), trainer.model(tokens), rtol=1e-4, atol=1e-5)
    assert not any("lora" in name for name, _ in open_weights(tmp_path / "run").tensors())


@pytest.mark.parametrize("dora", [True, *_slow(False)])
def test_convert_writes_adapters_and_merges_them(dora: bool, tmp_path: Path) -> None:
    """A run on a Hugging Face folder, its adapters as PEFT's, and those merged into a Hugging Face folder again."""
    first, _ = _open(tmp_path, "sft", "train.steps=2")
    first.fit()
    first.close()
    convert(open_weights(tmp_path / "run"), tmp_path / "base", "hf", check=False)
    inside = tmp_path / "inside"
    inside.mkdir()
    options = (f"checkpoint.load={tmp_path}/base", f"train.lora.dora={str(dora).lower()}")
    trainer, _ = _open(inside, "sft", *options)
    trainer.fit()
    trainer.close()
    convert(open_weights(inside / "run"), tmp_path / "adapter", "peft")
    done = convert(open_weights(tmp_path / "adapter"), tmp_path / "merged", "hf")
    assert done.compared is not None and done.compared.ok
    tokens = torch.randint(0, 256, (2, 16))
    model, _ = load_model(tmp_path / "merged", device="cpu")
    torch.testing.assert_close(model(tokens), trainer.model.eval()(tokens), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="must have adapters"):
        convert(open_weights(tmp_path / "run"), tmp_path / "none", "peft")


def test_metrics_file_and_report_have_the_numbers(tmp_path: Path) -> None:
    from powertrain.train.reporting.report import _charts
    from powertrain.train.reporting.run_summary import about

    file = tmp_path / "metrics.jsonl"
    sink = JsonLines(file)
    trainer, recorder = _open(tmp_path, "dpo", "checkpoint.save=false")
    trainer.sinks = [recorder, sink]
    trainer.fit()
    charts = _charts(about(trainer, read_run(tmp_path, "dpo")), read_metrics(file))
    trainer.close()
    metrics = read_metrics(file)
    assert metrics.steps[-1].objective == recorder.steps[-1].objective
    assert metrics.evaluations[-1].objective is not None
    titles = {title for title, *_ in charts}
    assert {"Rewards of chosen completions", "Margin of rewards", "Accuracy"} <= titles


def test_errors_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"records.jsonl:1: chosen must be a string or a list of messages, got nothing"
    ):
        run = read_run(tmp_path, "dpo", "checkpoint.save=false")
        (tmp_path / "records.jsonl").write_text(json.dumps({"prompt": "a"}))
        start(run, ranks.read_launch_env(), lambda _: [])
    inside = tmp_path / "distill"
    inside.mkdir()
    for objective, override, words in (
        ("distill", "checkpoint.save=false", r"train\.distill\.teacher must name a checkpoint"),
        (
            "sft",
            "train.reference=base",
            r"train\.reference must be null where objective sft reads no reference, got base",
        ),
        ("policy", "train.reference=base", r"train\.reference must be null where objective policy reads no reference"),
        ("kto", "train.z_loss=0.1", r"train\.z_loss must be 0 for objective kto, got 0\.1"),
        ("sft", "train.lora.targets=[]", r"train\.lora\.targets"),
        ("dpo", "train.preference={loss: ipo, label_smoothing: 0.1}", r"train\.preference\.label_smoothing must be 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_run(inside, objective, override)


@pytest.mark.parametrize("objective", ["reward", *_slow("sft", "dpo", "kto", "policy")])
def test_a_poisoned_weight_stops_the_run_by_name(objective: str, tmp_path: Path) -> None:
    trainer, _ = _open(tmp_path, objective, "checkpoint.save=false")
    with torch.no_grad():
        trainer.model.layers[1].mlp.up.weight[0] = float("nan")
    with pytest.raises(TrainingStopped, match=r"layers\.1\.mlp"):
        trainer.fit()
    trainer.close()


@pytest.mark.parametrize("objective", ["policy", "distill", *_slow("sft", "dpo", "kto", "reward")])
def test_kernels_of_a_step_are_known_before_it(objective: str, tmp_path: Path) -> None:
    """What `record_step` records, for which kernels are built before ranks wait for each other."""
    run = read_run(tmp_path, objective, *(["train.distill.teacher=teacher"] if objective == "distill" else []))
    config = with_vocabulary(run.config, 256)
    names = {spec.kernel.name for spec in record_step(config, Target.parse("sm_90"))}
    wanted = {"sft": "_row_stats_kernel", "reward": "_norm_fwd_kernel", "distill": "_divergence_kernel"}
    assert wanted.get(objective, "_log_prob_grads_kernel") in names


@pytest.mark.parametrize(
    "objective, key", [("dpo", "train.reference"), ("kto", "train.reference"), ("distill", "train.distill.teacher")]
)
def test_a_second_model_that_is_not_there_is_named_by_its_key(objective: str, key: str, tmp_path: Path) -> None:
    run = read_run(tmp_path, objective, f"{key}={tmp_path}/nothing")
    model = build(with_vocabulary(run.config, 256).model)
    with pytest.raises(FileNotFoundError, match=rf"^{re.escape(key)}: .*nothing must be a checkpoint"):
        make_objective(model, run.config, torch.device("cpu"))


def test_what_is_not_there_yet_says_so(tmp_path: Path) -> None:
    for objective, options, words in (
        ("dpo", ("parallel.context=2",), "parallel.context must be 1 for train.objective dpo, got 2"),
        (
            "sft",
            ("parallel.tensor=2", "train.batch_invariant=true"),
            "batch_invariant must be false with parallel.tens",
        ),
        ("sft", ("train.lora.dora=true",), "train.lora.dora must be false with several ranks, got true on 2"),
    ):
        config = with_vocabulary(read_run(tmp_path, objective, *options).config, 256)
        with pytest.raises(NotImplementedError, match=words):
            mesh_shape.check_parallel(config, 2)


def test_lint_counts_a_reference_and_adapters(tmp_path: Path) -> None:
    """Weights twice for DPO's copy, once with LoRA, whose gradients and optimizer are those of the adapters."""
    found = {}
    for objective, options in (("sft", ()), ("dpo", ()), ("dpo", ("train.lora.rank=2",))):
        config = with_vocabulary(read_run(tmp_path, objective, *options).config, 256)
        found[objective, options] = lint(config, [Target.parse("sm_90")]).memory
    plain, copied, adapted = found.values()
    assert copied.weights == 2 * plain.weights and copied.optimizer == plain.optimizer
    assert adapted.weights < 1.2 * plain.weights and 0 < 10 * adapted.optimizer < 3 * plain.optimizer
