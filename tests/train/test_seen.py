"""What a run leaves to be seen: metrics, TensorBoard's events, the report; while it goes well, ill, or is cut off."""

import math
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.runtime import tracing
from powertrain.train.checkpoint.store import find
from powertrain.train.reporting.metrics import JsonLines, Sink, read_metrics
from powertrain.train.reporting.report import ReportFile
from powertrain.train.reporting.run_summary import About, about
from powertrain.train.reporting.sinks import open_sinks
from powertrain.train.trainer import Trainer, TrainingStopped
from tests.train.tiny_run import MICRO, SEQ, VOCAB, At, open_trainer, read, write_config

PEAK = 1e-3  # TFLOP/s, made up: what matters is the division


@pytest.fixture(autouse=True)
def no_kernel_table() -> None:
    """Tables are looked at here."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """(folder, what it said, what it said when resumed) of a run of 12 steps that was then given 4 more."""
    folder = tmp_path_factory.mktemp("whole")
    # events without a compile's facts, of a kernel and of a backward that were not compiled ahead: the report's table
    # of kernels raised an error at them, and the run stopped
    tracing.event("kernel", "_a_kernel for sm_90: not compiled ahead: no", key="test_seen")
    tracing.event("kernel", "an op: its backward is not compiled ahead: no", op="test_seen")
    words = ["train", str(write_config(folder)), "logging.tensorboard=true", f"logging.peak_tflops={PEAK}"]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, first.output
    second = CliRunner().invoke(app, [*words, "train.steps=16"])
    assert second.exit_code == 0, second.output
    return folder / "run", first.output, second.output


def test_the_screen(whole: tuple[Path, str, str]) -> None:
    folder, first, second = whole
    for said in ("llama starts", "step 1/12", "step 10/12", "step 12/12", "left", "step 10: validation loss",
                 "step 3 was profiled", "checkpoint of step 12", f"report    {folder}/report.html",
                 f"generate  powertrain generate {folder}", f"vocabulary of {VOCAB}"):  # fmt: skip
        assert said in first, said
    assert "goes on after step 12" in second and f"resumed after step 12 from {folder}/checkpoints" in second
    assert "step 16/16" in second and "step 12/" not in second


def test_metrics_count_tokens_and_mfu_by_the_formula(whole: tuple[Path, str, str]) -> None:
    metrics = read_metrics(whole[0] / "metrics.jsonl")
    assert [r.step for r in metrics.steps] == list(range(1, 17))
    assert [r.step for r in metrics.evaluations] == [5, 10, 12, 15, 16]
    # by hand: qkv, out, gate and up, down, head; two heads of 16 see half of the keys
    layer = 32 * 3 * 32 + 32 * 32 + 32 * 2 * 64 + 64 * 32
    flops = 6 * (2 * layer + 32 * VOCAB) + 6 * 2 * (2 * (16 + 16) * SEQ / 2)
    for record in metrics.steps:
        assert record.tokens == record.step * MICRO * SEQ
        assert record.tokens_per_second == pytest.approx(MICRO * SEQ / record.seconds)
        assert record.mfu == pytest.approx(record.tokens_per_second * flops / (PEAK * 1e12))
        assert 0 < record.seconds < 60 and record.memory_bytes > 2**20 and not record.skipped
    known = About.read(whole[0])
    assert known.flops_per_token == pytest.approx(flops) and known.resumed_at == 12
    assert known.parameters == 2 * (layer + 2 * 32) + 2 * 32 * VOCAB + 32


def test_parts_of_a_step_are_timed_where_wanted(whole: tuple[Path, str, str], tmp_path: Path) -> None:
    assert all(record.phases is None for record in read_metrics(whole[0] / "metrics.jsonl").steps)
    words = ["train", str(write_config(tmp_path)), "logging.phase_timers=true", "train.gradient_accumulation_steps=2"]
    result = CliRunner().invoke(app, [*words, "logging.tensorboard=true", "train.steps=4"])
    assert result.exit_code == 0, result.output
    assert " ms  optimizer " in result.output
    for record in read_metrics(tmp_path / "run/metrics.jsonl").steps:
        assert record.phases is not None and list(record.phases) == ["data", "forward", "backward", "optimizer"]
        assert all(spent > 0 for spent in record.phases.values())
        assert sum(record.phases.values()) <= record.seconds
    assert "Parts of a step" in (tmp_path / "run/report.html").read_text()
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    assert len(events.Scalars("phases/backward_ms")) == 4


def test_tensorboard_has_every_step_once(whole: tuple[Path, str, str]) -> None:
    events = EventAccumulator(str(whole[0] / "tensorboard"))
    events.Reload()
    losses = {r.step: r.loss for r in read_metrics(whole[0] / "metrics.jsonl").steps}
    assert {e.step: e.value for e in events.Scalars("train/loss")} == pytest.approx(losses)
    assert len(events.Scalars("train/loss")) == 16 and len(events.Scalars("validation/loss")) == 5
    assert events.Scalars("speed/mfu") and events.Scalars("memory/gib")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what the operators of a CPU are called")
def test_the_kernel_table_says_what_served_each_op(whole: tuple[Path, str, str]) -> None:
    table = read_metrics(whole[0] / "metrics.jsonl").kernels
    assert table is not None and table.step == 15  # the third of the second process
    rows = {row.op: row for row in table.rows}
    assert rows.keys() >= {"matrix products", "attention", "rms_norm", "linear_cross_entropy", "adamw"}
    assert "cpu" in rows["rms_norm"].why and "causal" in rows["attention"].why
    # qkv, out, gate, up and down in each of two layers: forward, and twice in backward
    assert rows["matrix products"].calls == 3 * 2 * 5
    assert any("backward" in name for name in rows["attention"].kernels)
    assert sum(row.share for row in table.rows) == pytest.approx(1.0)
    assert all(row.milliseconds >= 0 for row in table.rows)


def test_the_report_anew(whole: tuple[Path, str, str]) -> None:
    file = whole[0] / "report.html"
    text = file.read_text()
    assert "all 16 steps" in text and "resumed after step 12" in text and "step_00000016" in text
    file.unlink()
    result = CliRunner().invoke(app, ["report", str(whole[0])])
    assert result.exit_code == 0 and result.output.strip() == str(file)
    assert file.read_text() == text


def test_a_report_of_no_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path}/about.json: a run's folder must hold it" in result.output


def _seen(trainer: Trainer, folder: Path, *more: Sink) -> list[Sink]:
    about(trainer, read(folder)).write()
    run = folder / "run"
    return [JsonLines(run / "metrics.jsonl", resumed_at=trainer.progress.step), ReportFile(run), *more]


def test_poisoned_weights_stop_the_run_and_name_step_samples_and_module(tmp_path: Path) -> None:
    def poison() -> None:
        trainer.model.layers[1].mlp.down.weight.data[3, 3] = torch.inf

    trainer = open_trainer(tmp_path, sinks=lambda t: _seen(t, tmp_path, At(6, poison)))
    with pytest.raises(TrainingStopped) as stopped:
        trainer.fit()
    trainer.close()
    message = str(stopped.value)
    # step 6 is read while step 7 has its gradients already: step 8 is the first to see it
    assert "training stopped at step 8" in message and "nothing was updated" in message
    assert f"rank 0, samples {list(range(7 * MICRO, 8 * MICRO))}: the weight layers.1.mlp.down.weight" in message
    assert f"The last checkpoint is {tmp_path}/run/checkpoints/step_00000005." in message
    metrics = read_metrics(tmp_path / "run/metrics.jsonl")
    assert metrics.steps[-1].step == 8 and metrics.steps[-1].skipped and metrics.notes[-1][1] == message
    report = (tmp_path / "run/report.html").read_text()
    assert "stopped at step 8 of 12" in report and "layers.1.mlp.down.weight" in report


def test_an_output_that_overflows_is_named(tmp_path: Path) -> None:
    def enlarge() -> None:
        for linear in (trainer.model.layers[0].mlp.up, trainer.model.layers[0].mlp.down):
            linear.weight.data.fill_(1e30)

    trainer = open_trainer(tmp_path, sinks=lambda t: [At(2, enlarge)])
    with pytest.raises(TrainingStopped, match=r"the first module whose output is not finite is layers\.0\.mlp\.down"):
        trainer.fit()


def test_a_spike_stops_the_run(tmp_path: Path) -> None:
    def enlarge() -> None:
        trainer.model.head.weight.data.mul_(300)

    more = ["train.steps=40", "evaluation.every=0", "checkpoint.every=0"]
    trainer = open_trainer(tmp_path, *more, sinks=lambda t: [At(25, enlarge)])
    with pytest.raises(TrainingStopped) as stopped:
        trainer.fit()
    message = str(stopped.value)
    assert "training stopped at step 27: a loss of" in message and "median of the last steps" in message
    assert f"samples {list(range(26 * MICRO, 27 * MICRO))}: every output is finite, the largest is" in message


class PowerCut(BaseException):
    """No Exception: those of a sink end no run."""


def test_a_crash_leaves_whole_files(tmp_path: Path) -> None:
    def crash() -> None:
        raise PowerCut

    trainer = open_trainer(tmp_path, sinks=lambda t: _seen(t, tmp_path, At(8, crash)))
    with pytest.raises(PowerCut):
        trainer.fit()
    run = tmp_path / "run"
    assert "step 5 of 12" in (run / "report.html").read_text()  # the evaluation's
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')  # and a line that was under way
    assert [r.step for r in read_metrics(run / "metrics.jsonl").steps] == list(range(1, 9))
    assert CliRunner().invoke(app, ["report", str(run)]).exit_code == 0
    assert "step 8 of 12" in (run / "report.html").read_text()
    trainer = open_trainer(tmp_path, sinks=lambda t: _seen(t, tmp_path))
    trainer.fit()
    trainer.close()
    found = find(run / "checkpoints")
    assert found is not None and found.name == "step_00000012"
    metrics = read_metrics(run / "metrics.jsonl")
    assert [r.step for r in metrics.steps] == list(range(1, 13))
    assert all(math.isfinite(r.loss) for r in metrics.steps)


def test_open_sinks_does_what_logging_asks(tmp_path: Path) -> None:
    from rich.console import Console

    made: list[Sink] = []

    def sinks(trainer: Trainer) -> list[Sink]:
        made.extend(open_sinks(trainer.config, about(trainer, read(tmp_path)), Console(quiet=True)))
        return made

    trainer = open_trainer(tmp_path, "logging.report=false", "train.steps=1", "checkpoint.every=0", sinks=sinks)
    trainer.close()
    assert [type(sink).__name__ for sink in made] == ["JsonLines", "Lines"]
    assert (tmp_path / "run/about.json").is_file()


def test_a_run_stopped_before_its_first_checkpoint_says_there_is_none(tmp_path: Path) -> None:
    def poison() -> None:
        trainer.model.layers[1].mlp.down.weight.data[3, 3] = torch.inf

    trainer = open_trainer(tmp_path, sinks=lambda t: _seen(t, tmp_path, At(1, poison)))
    with pytest.raises(TrainingStopped, match=r"\nThere is no checkpoint yet\.$"):
        trainer.fit()
    trainer.close()
