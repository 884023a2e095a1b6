"""The loop: resumed runs are bit-exact, precisions, accumulation, schedules, the optimizer's parts."""

import math
import os
import shutil
import signal
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.train.curves import distance, losses_of_ours, losses_of_twin, run_config
from powertrain.models import build, configure
from powertrain.train.checkpoint.store import checkpoints_in
from powertrain.train.config.schema import LossScale, OptimizerConfig, ScheduleConfig, TrainConfig
from powertrain.train.data.loader import UnreadableSample
from powertrain.train.optim import Optimizer, Scaler, global_norm
from powertrain.train.reporting.metrics import JsonLines, read_metrics
from powertrain.train.run import stop_on_signals
from powertrain.train.saving import save_step
from powertrain.train.schedule import learning_rate, unreached
from powertrain.train.trainer import Trainer
from tests.train.tiny_run import MICRO, At, open_trainer, read


class _Losses(At):
    def __init__(self) -> None:
        super().__init__(0, lambda: None)
        self.seen: list[tuple[int, float, float]] = []

    def step(self, record: Any) -> None:
        self.seen.append((record.step, record.loss, record.grad_norm))


def _run(folder: Path, *overrides: str) -> tuple[Trainer, list[tuple[int, float, float]]]:
    losses = _Losses()
    trainer = open_trainer(folder, *overrides, sinks=lambda trainer: [losses])
    trainer.fit()
    trainer.close()
    return trainer, losses.seen


_DROPOUT = ("model.architecture=gpt_neox", "model.hidden_dropout=0.1", "model.attention_dropout=0.1")


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.precision=fp32",),
        ("train.precision=bf16", "train.gradient_accumulation_steps=2", *_DROPOUT),
        ("train.precision=fp16", "train.loss_scale.initial_power=30", *_DROPOUT),
    ],
    ids=["fp32", "bf16-accumulated-dropout", "fp16-dropout"],
)
def test_a_resumed_run_has_the_same_bits(overrides: tuple[str, ...], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    trainer, losses = _run(whole, *overrides)
    # ends after 5 of the same 12 steps
    first = open_trainer(parts, *overrides, sinks=lambda t: [At(4, lambda: setattr(t, "should_stop", True))])
    first.fit()
    first.close()
    assert first.progress.step < 12
    resumed, rest = _run(parts, *overrides)
    # as text, since a norm may be nan where a step was skipped
    assert repr(losses[-len(rest) :]) == repr(rest) and len(rest) == 12 - first.progress.step
    for name, t in trainer.optimizer.tensors().items():
        assert torch.equal(t, resumed.optimizer.tensors()[name]), name


def test_recomputation_changes_no_bit(tmp_path: Path) -> None:
    runs = []
    for mode in ("none", "selective", "full"):
        (tmp_path / mode).mkdir()
        runs.append(_run(tmp_path / mode, f"train.activation_checkpointing={mode}", *_DROPOUT)[1])
    assert runs[0] == runs[1] == runs[2]


def test_accumulation_equals_a_larger_batch(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _, small = _run(tmp_path / "a", "train.micro_batch_size=2", "train.gradient_accumulation_steps=4")
    _, large = _run(tmp_path / "b", "train.micro_batch_size=8")
    assert [a[1] for a in small] == pytest.approx([b[1] for b in large], rel=1e-5)


def test_sigterm_ends_with_a_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sink = At(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    trainer = open_trainer(tmp_path, sinks=lambda t: [sink])
    with stop_on_signals(trainer):
        trainer.fit()
    trainer.close()
    assert 3 <= trainer.progress.step < 12
    assert capfd.readouterr().err.count("powertrain: SIGTERM: the run ends after the current step\n") == 1
    said = f"ended early, after step {trainer.progress.step} of 12 (SIGTERM); the same command continues from its"
    assert sink.notes[-1].startswith(said)
    again = open_trainer(tmp_path, sinks=lambda t: [])
    assert again.progress.step == trainer.progress.step
    again.close()


def test_a_first_ctrl_c_behind_another_signal_ends_nothing_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's SIGUSR1 and, later, Ctrl-C: the run ended without a checkpoint."""
    now = 100.0
    monkeypatch.setattr("powertrain.train.run.time", SimpleNamespace(monotonic=lambda: now))
    trainer = open_trainer(tmp_path, sinks=lambda t: [])
    with stop_on_signals(trainer):
        os.kill(os.getpid(), signal.SIGUSR1)
        now += 5
        os.kill(os.getpid(), signal.SIGINT)
        now += 1
        os.kill(os.getpid(), signal.SIGINT)  # the same, from the launcher
        now += 5
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    trainer.close()
    said = capfd.readouterr().err
    assert trainer.should_stop and trainer.stop_reason == "SIGUSR1"
    assert said.count("SIGUSR1: the run ends") == said.count("SIGINT: the run ends after the current step; Ctrl-C") == 1


# the trainer's steps are the same; GPT-NeoX's gradients beside plain PyTorch's are in tests/models/test_gpt_neox.py
@pytest.mark.parametrize(
    "architecture, steps",
    [("llama", 80), *(pytest.param(name, 200, marks=pytest.mark.slow) for name in ("llama", "gpt_neox"))],
)
def test_steps_follow_the_plain_twin(architecture: str, steps: int) -> None:
    """In float32; `python -m benchmarks.train.curves` draws larger ones."""
    sizes = {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
    kind: dict[str, Any] = {
        "gpt_neox": {"rotary_pct": 0.25, "parallel_residual": True},
        "llama": {"num_kv_heads": 2, "intermediate_size": 96},
    }
    model = {"architecture": architecture, **sizes, **kind[architecture]}
    config = run_config(model, steps=steps, precision="fp32", seq_length=64, micro_batch_size=4)
    ours, first = losses_of_ours(config, torch.device("cpu"))
    twin = losses_of_twin(config, torch.device("cpu"), first)
    assert len(ours) == steps and ours[-1] < 0.75 * ours[0]
    assert distance(ours, twin)[0] < 1e-4


def test_schedules() -> None:
    cosine = ScheduleConfig(kind="cosine", warmup_steps=10, decay_steps=110, min_lr=0.1)
    assert [learning_rate(s, 1.0, cosine, 200) for s in (0, 5, 10)] == [0.0, 0.5, 1.0]
    assert learning_rate(60, 1.0, cosine, 200) == pytest.approx(0.55)
    assert learning_rate(110, 1.0, cosine, 200) == learning_rate(160, 1.0, cosine, 200) == pytest.approx(0.1)
    rising = cosine.model_copy(update={"clamp": "neox"})
    assert learning_rate(160, 1.0, rising, 200) == pytest.approx(0.55)
    wsd = ScheduleConfig(kind="wsd", wsd_decay_steps=20)
    rates = [learning_rate(s, 1.0, wsd, 100) for s in (0, 79, 80, 90, 100)]
    assert rates == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.0])
    assert learning_rate(50, 1.0, ScheduleConfig(kind="linear"), 100) == pytest.approx(0.5)
    assert learning_rate(50, 1.0, ScheduleConfig(kind="constant"), 100) == 1.0


def test_a_warm_up_as_long_as_the_run_is_said(tmp_path: Path) -> None:
    """With one step of warm-up and of the run the only rate is 0."""
    schedule, said = ScheduleConfig(warmup_steps=3), At(99, lambda: None)
    assert [bool(unreached(1.0, schedule, steps)) for steps in (3, 4)] == [True, False]
    assert learning_rate(3, 1.0, schedule, 4) == 1.0
    open_trainer(tmp_path, "schedule.warmup_steps=1", "train.steps=1", sinks=lambda _: [said]).fit()
    assert said.notes[0].startswith("schedule.warmup_steps (1) is not below train.steps (1): the learning rate stays")


def test_checkpoint_steps() -> None:
    assert [s for s in range(30) if save_step(s, 10, "linear")] == [10, 20]
    assert [s for s in range(1001) if save_step(s, 10, "log")] == [1, 10, 100, 1000]
    assert not any(save_step(s, 0, "linear") for s in range(5))


def test_the_loss_scale_follows_deepspeeds_rules() -> None:
    scaler = Scaler(LossScale(initial_power=4, window=3, hysteresis=2, minimum=4), torch.device("cpu"))
    bad, good = torch.tensor(1.0), torch.tensor(0.0)
    scales = []
    for skipped in (bad, bad, bad, bad, good, good, good, bad, bad):
        scaler.update(skipped)
        scales.append(float(scaler.scale))
    # the first is forgiven; then halves, not below 4; three good ones double it and forgive one again
    assert scales == [16, 8, 4, 4, 4, 4, 8, 8, 4]
    fixed = Scaler(LossScale(static=128.0), torch.device("cpu"))
    fixed.update(bad)
    assert float(fixed.scale) == 128


def _model() -> Any:
    model = build(configure(architecture="llama", vocab_size=64, hidden_size=16, num_layers=1, num_heads=2,
                            intermediate_size=32), "cpu")  # fmt: skip
    model.init_weights(0)
    return model


def test_a_step_clips_as_torch_does_and_leaves_norms_undecayed() -> None:
    models = [_model(), _model()]
    tokens = torch.randint(0, 64, (2, 16))
    train = TrainConfig(steps=1, seq_length=16, precision="fp32", gradient_clipping=0.1)
    optimizer = Optimizer(models[0], OptimizerConfig(weight_decay=0.5), train)
    models[0](tokens, tokens).backward()
    norm = optimizer.step(1e-2).grad_norm

    models[1](tokens, tokens).backward()
    expected = torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.1)
    groups = [
        {"params": [p for p in models[1].parameters() if p.dim() > 1], "weight_decay": 0.5},
        {"params": [p for p in models[1].parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, 1e-2, (0.9, 0.95)).step()
    torch.testing.assert_close(norm, expected)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_bad_gradients_change_nothing() -> None:
    model = _model()
    optimizer = Optimizer(model, OptimizerConfig(), TrainConfig(steps=1, seq_length=16, precision="fp32"))
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, math.inf if p.dim() > 1 else 1.0)
    stepped = optimizer.step(1.0)
    assert float(stepped.skipped) == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_norm_of_no_gradients() -> None:
    assert float(global_norm([])) == 0.0


def test_step_0_is_saved_where_it_is_asked_for(tmp_path: Path) -> None:
    """The first weights, as GPT-NeoX's extra_save_iters: [0, ...] writes them; a run resumes from them."""
    options = ("checkpoint.extra_steps=[0,3]", "checkpoint.every=0", "evaluation.every=0")
    open_trainer(tmp_path, *options, "train.steps=4", sinks=lambda _: []).fit()
    saved = checkpoints_in(tmp_path / "run/checkpoints")
    assert [path.name for path in saved] == ["step_00000000", "step_00000003", "step_00000004"]
    for path in saved[1:]:
        shutil.rmtree(path)
    open_trainer(tmp_path, *options, "train.steps=4", sinks=lambda _: []).fit()
    assert checkpoints_in(tmp_path / "run/checkpoints") == saved


def test_evaluations_are_without_the_z_loss(tmp_path: Path) -> None:
    """As without the load balancing loss: they compare runs with other weights of it."""
    losses = {}
    for weight in (0, 0.1):
        trainer = open_trainer(tmp_path, f"train.z_loss={weight}", "checkpoint.save=false", sinks=lambda _: [])
        (batch,) = trainer._batches(trainer.data.train, 0, 4)
        trained = trainer._share(batch.to(trainer.ranks.device), torch.ones(()))[0]
        losses[weight] = float(trained), trainer.evaluate("validation")
    assert losses[0.1][0] > losses[0][0] and losses[0.1][1] == losses[0][1]


def test_evaluations_move_along_the_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """advance: each takes the next batches, around the set; a resumed run goes on where it was."""
    seen: list[tuple[int, int]] = []
    taken = Trainer._batches

    def note(self: Trainer, source: Any, start: int, limit: int) -> Any:
        if source is self.data.validation:
            seen.append((start, limit))
        return taken(self, source, start, limit)

    monkeypatch.setattr(Trainer, "_batches", note)
    options = ("evaluation.every=2", "evaluation.steps=2", "evaluation.advance=true", "train.steps=9")
    trainer = open_trainer(tmp_path, *options, "checkpoint.every=4", sinks=lambda _: [])
    trainer.fit()
    each, samples = 2 * 4, len(trainer.data.validation)
    number = samples // each
    assert number > 1
    expected = [(each * (n % number), each * (n % number) + each) for n in range(5)]  # steps 2, 4, 6, 8 and 9, the last
    assert seen == expected
    seen.clear()
    for path in checkpoints_in(tmp_path / "run/checkpoints")[1:]:
        shutil.rmtree(path)
    open_trainer(tmp_path, *options, "checkpoint.every=4", sinks=lambda _: []).fit()
    assert seen == expected[2:]


@pytest.mark.parametrize("clamp", ["neox", "safe"])
def test_the_rate_of_skipped_steps(clamp: str, tmp_path: Path) -> None:
    """GPT-NeoX's schedules stand still while an fp16 run's first steps overflow, also after it is resumed."""
    rates: dict[int, tuple[float, bool]] = {}

    class Rates(At):
        def step(self, record: Any) -> None:
            rates[record.step - 1] = record.lr, record.skipped

    options = (
        "train.precision=fp16", "train.loss_scale.initial_power=22", "train.loss_scale.hysteresis=1", "train.steps=9",
        f"schedule.clamp={clamp}", "schedule.kind=linear", "schedule.warmup_steps=4", "checkpoint.every=3",
    )  # fmt: skip

    def train() -> None:
        open_trainer(tmp_path, *options, sinks=lambda _: [Rates(0, lambda: None)]).fit()

    train()
    whole, skipped = dict(rates), 0
    highest = read(tmp_path, *options).config.optimizer.lr
    schedule = ScheduleConfig(kind="linear", warmup_steps=4, clamp=clamp)  # type: ignore[arg-type]
    for step, (rate, overflowed) in sorted(whole.items()):
        taken = step - skipped if clamp == "neox" else step
        assert rate == pytest.approx(learning_rate(taken, highest, schedule, 9))
        skipped += overflowed
    assert 0 < skipped < 9
    for path in checkpoints_in(tmp_path / "run/checkpoints")[1:]:
        shutil.rmtree(path)
    rates.clear()
    train()
    assert rates == {step: value for step, value in whole.items() if step >= 3}


def test_each_start_ends_at_the_next_interval(tmp_path: Path) -> None:
    """GPT-NeoX's exit_interval: with a checkpoint, and the schedule of the whole run."""
    whole = _run(tmp_path, "checkpoint.folder=null", "checkpoint.save=false")[1]
    options, seen = ("train.exit_interval=5", "checkpoint.every=0"), []
    for end in (5, 10, 12):
        trainer, losses = _run(tmp_path, *options)
        assert trainer.progress.step == end
        seen += losses
    assert seen == whole


class _Unreadable:
    """A set whose sample number `bad` cannot be read."""

    def __init__(self, source: Any, bad: int) -> None:
        self.source, self.bad = source, bad

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, index: int) -> Any:
        if index == self.bad:
            raise OSError("the disk is gone")
        return self.source.sample(index)


_HELD_OUT = ("evaluation.at_end=true", "evaluation.steps=2", "evaluation.every=0", "checkpoint.every=0")


def test_an_evaluation_that_fails_costs_no_steps(tmp_path: Path) -> None:
    trainer = open_trainer(tmp_path, *_HELD_OUT, sinks=lambda t: [])
    trainer.data = replace(trainer.data, validation=_Unreadable(trainer.data.validation, 1))
    with pytest.raises(UnreadableSample, match="validation: sample 1 cannot be read: the disk is gone"):
        trainer.fit()
    trainer.close()
    assert [path.name for path in checkpoints_in(tmp_path / "run/checkpoints")] == ["step_00000012"]


def test_a_sample_that_cannot_be_read_costs_no_steps(tmp_path: Path) -> None:
    trainer = open_trainer(tmp_path, "checkpoint.every=0", sinks=lambda t: [])
    trainer.data = replace(trainer.data, train=_Unreadable(trainer.data.train, 5 * MICRO))
    with pytest.raises(UnreadableSample, match="the disk is gone"):
        trainer.fit()
    trainer.close()
    assert [path.name for path in checkpoints_in(tmp_path / "run/checkpoints")] == ["step_00000005"]


def test_sigterm_ends_an_evaluation(tmp_path: Path) -> None:
    sink = At(0, lambda: None)
    trainer = open_trainer(tmp_path, *_HELD_OUT, sinks=lambda t: [sink])
    objective, seen = trainer.objective, []

    def asked(*arguments: Any) -> Any:
        if not trainer.model.training:
            seen.append(trainer.progress.step)
            os.kill(os.getpid(), signal.SIGTERM)
        return objective(*arguments)

    with stop_on_signals(trainer):
        trainer._share = asked  # type: ignore[method-assign]
        trainer.fit()
    trainer.close()
    # one batch of two, behind the checkpoint
    assert seen == [12] and trainer.progress.step == 12
    assert sink.notes[-2:] == [
        f"checkpoint of step 12 in {tmp_path}/run/checkpoints",
        "the evaluation of validation after step 12 was left, as the run is to end",
    ]


def test_an_evaluation_that_was_left_is_made_by_the_next_start(tmp_path: Path) -> None:
    """A signal or a kill during the last evaluation: the next start had no step to take, and there never was a loss."""

    def sinks(trainer: Trainer) -> list[Any]:
        return [JsonLines(tmp_path / "run/metrics.jsonl", resumed_at=trainer.progress.step)]

    def evaluations() -> list[tuple[int, str, float]]:
        return [(e.step, e.name, e.loss) for e in read_metrics(tmp_path / "run/metrics.jsonl").evaluations]

    trainer = open_trainer(tmp_path, *_HELD_OUT, "data.split='60,20,20'", sinks=sinks)
    trainer.fit()
    trainer.close()
    whole = evaluations()
    assert [(step, name) for step, name, _ in whole] == [(12, "validation"), (12, "test")]
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines(keepends=True)
    for missing in ({"test"}, {"validation", "test"}, set()):
        kept = [line for line in lines if not any(f'"name": "{name}"' in line for name in missing)]
        (tmp_path / "run/metrics.jsonl").write_text("".join(kept))
        trainer = open_trainer(tmp_path, *_HELD_OUT, "data.split='60,20,20'", sinks=sinks)
        assert trainer.progress.step == 12
        trainer.fit()
        trainer.close()
        assert evaluations() == whole


@pytest.mark.parametrize("kept", [1, 2])
def test_a_newer_folder_without_facts_is_said(kept: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose newest checkpoint had lost checkpoint.json went on from an older one, or step 0, without a word."""
    trainer, _ = _run(tmp_path, "checkpoint.every=6", f"checkpoint.keep_last={kept}")
    newest = trainer.checkpoints.folder / "step_00000012"
    capsys.readouterr()
    open_trainer(tmp_path, sinks=lambda t: []).close()
    assert "no checkpoint" not in capsys.readouterr().err
    (newest / "checkpoint.json").unlink()
    trainer = open_trainer(tmp_path, sinks=lambda t: [])
    trainer.close()
    then = "does not go on from it" if kept == 1 else f"goes on from {newest.with_name('step_00000006')}"
    assert f"{newest} is no checkpoint, as it has no checkpoint.json: the run {then}" in capsys.readouterr().err
    assert trainer.progress.step == 6 * (kept - 1)


def test_an_interrupted_wait_announces_no_checkpoint(tmp_path: Path) -> None:
    """A second Ctrl-C while the last checkpoint is written: closing waits for it, and says so only then."""
    sink = At(0, lambda: None)
    trainer = open_trainer(tmp_path, "checkpoint.every=0", sinks=lambda t: [sink])
    trainer.fit()

    class Interrupted(Future[None]):
        asked = 0

        def result(self, timeout: float | None = None) -> None:
            self.asked += 1
            if self.asked == 1:
                raise KeyboardInterrupt
            assert not any("step 12" in note for note in sink.notes[said:])

    said, pending = len(sink.notes), Interrupted()
    trainer._saver._saving, trainer.checkpoints._pending = 12, pending
    with pytest.raises(KeyboardInterrupt):
        trainer._saver.finish()
    assert len(sink.notes) == said
    trainer.close()
    assert pending.asked == 2 and len(sink.notes) == said + 1
