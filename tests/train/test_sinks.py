"""The screen, metrics.jsonl, W&B; which kernels were seen, and those compiled late."""

import importlib.machinery
import io
import json
import os
import resource
import shutil
import sys
import time
import types
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from powertrain.runtime import tracing
from powertrain.train.api import train
from powertrain.train.checkpoint.store import write_json
from powertrain.train.reporting.kernel_profile import KernelTable, LateCompile, StepWatch, served
from powertrain.train.reporting.metrics import EvaluationRecord, JsonLines, StepRecord, TaskRecord, read_metrics
from powertrain.train.reporting.progress import Lines, Live, Pace, many, si
from powertrain.train.reporting.sinks import TensorBoard, WandB, check
from powertrain.train.run import keep_texts
from tests.train.tiny_run import read, write_config


@pytest.fixture(autouse=True)
def no_kernel_table() -> None:
    """Tables are looked at here."""


def _step(number: int, loss: float = 2.0, **changed: Any) -> StepRecord:
    fields: dict[str, Any] = dict(
        step=number, loss=loss, grad_norm=1.5, lr=1e-3, skipped=False, loss_scale=1.0, tokens=number * 64, seconds=2.0,
        tokens_per_second=32.0, mfu=0.5, memory_bytes=2**30,
    )  # fmt: skip
    return StepRecord(**(fields | changed))


def test_the_metrics_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    """A run that began anew beside a finished one, with another checkpoint.folder, replaced them without a word."""
    file = tmp_path / "metrics.jsonl"
    for number in (1, 2, 3):
        sink = JsonLines(file)
        sink.note("no step was taken")
        sink.close()
        sink = JsonLines(file)
        sink.step(_step(number))
        sink.close()
    assert [read_metrics(path).steps[0].step for path in sorted(tmp_path.iterdir())] == [3, 1, 2]
    JsonLines(file, resumed_at=3).close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["metrics.jsonl", "metrics.jsonl.1", "metrics.jsonl.2"]


def test_all_files_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    """Its report was written over, its curves were joined with the new ones in TensorBoard, and W&B, told to go on in
    the earlier run, drops steps that this has already."""
    for number in (1, 2):
        (tmp_path / "tensorboard").mkdir()
        for name in ("report.html", "about.json", "wandb_id", "tensorboard/events"):
            (tmp_path / name).write_text(f"{name} of run {number}")
        (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n')
        JsonLines(tmp_path / "metrics.jsonl", resumed_at=1).close()
        assert (tmp_path / "report.html").is_file()  # a resumed run goes on with them
        JsonLines(tmp_path / "metrics.jsonl").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "about.json.1", "about.json.2", "metrics.jsonl", "metrics.jsonl.1", "metrics.jsonl.2", "report.1.html",
        "report.2.html", "tensorboard.1", "tensorboard.2", "wandb_id.1", "wandb_id.2",
    ]  # fmt: skip
    assert (tmp_path / "report.1.html").read_text() == "report.html of run 1"
    assert (tmp_path / "tensorboard.2" / "events").read_text() == "tensorboard/events of run 2"


def test_the_config_of_an_earlier_run_is_kept(tmp_path: Path) -> None:
    """It was written over, so that nothing told with what config metrics.jsonl.1 was made."""
    words = ("train.steps=1", "checkpoint.save=false", "evaluation.at_end=false", "logging.report=false")
    for lr in ("0.001", "0.002"):
        file = write_config(tmp_path).rename(tmp_path / "run.json")
        train(file, [*words, f"optimizer.lr={lr}"], quiet=True)
    (kept,), now = json.loads((tmp_path / "run/config.1/overrides.json").read_text())[-1:], tmp_path / "run/config"
    assert kept == "optimizer.lr=0.001" and sorted(os.listdir(now)) == sorted(os.listdir(f"{now}.1"))
    assert json.loads((now / "run.json").read_text())["optimizer"]["lr"] == 0.002
    # a config file of that name was written over with the resolved one
    assert (now / "run.json.given").read_bytes() == file.read_bytes()
    # a folder of that name which no run has written, such as one with the configs of the user
    (now / "run.json").unlink()
    JsonLines(tmp_path / "run/metrics.jsonl").close()
    assert not (tmp_path / "run/config.2").exists()


@pytest.mark.parametrize("gone", [shutil.rmtree, lambda folder: folder.rename(f"{folder}-moved-{time.monotonic_ns()}")])
def test_metrics_that_are_moved_or_removed_during_the_run_go_on(
    gone: Callable[[Path], Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They went to a file without a name or to the moved folder, and no line said so."""
    file = tmp_path / "run" / "metrics.jsonl"
    sink = JsonLines(file)
    sink.step(_step(1))
    gone(file.parent)
    for number in (2, 3):
        sink.step(_step(number))
    assert [step.step for step in read_metrics(file).steps] == [2, 3]
    said = f"{file} was moved or removed during the run; a new file there has the records from here on"
    assert capfd.readouterr().err.count(said) == 1
    gone(file.parent)
    other = JsonLines(file)
    with pytest.raises(OSError, match=f"{file} was moved or removed during the run, and another run has begun there"):
        sink.step(_step(4))
    other.close()
    assert file.read_bytes() == b""


def test_metrics_behind_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    first = JsonLines(file)
    for number in range(1, 8):
        first.step(_step(number))
        first.note(f"after {number}")
    first.evaluation(EvaluationRecord(6, "validation", 1.0, 2))
    with open(file, "a") as torn:
        torn.write('{"kind": "step", "step": 8, "lo')
    second = JsonLines(file, resumed_at=5)
    second.note("resumed")
    second.step(_step(6, loss=7.0))
    second.close()
    metrics = read_metrics(file)
    assert [(r.step, r.loss) for r in metrics.steps] == [(n, 2.0) for n in range(1, 6)] + [(6, 7.0)]
    assert metrics.notes == [(n, f"after {n}") for n in range(1, 6)] + [(5, "resumed")]
    assert metrics.evaluations == []
    JsonLines(file).close()
    assert file.read_text() == ""  # a run from the beginning has no past
    file.write_text('{"kind": "note", "step": 1, "text": ""}\n{"kind": 3}\n')
    damaged = file.read_text()
    JsonLines(file, resumed_at=5).close()
    assert read_metrics(file).notes == [(1, "")]
    assert file.with_name("metrics.jsonl.damaged").read_text() == damaged


def test_a_full_disk_is_said_with_its_file(tmp_path: Path) -> None:
    """A run ended with "[Errno 27] File too large" and no more, as its config or earlier metrics were written."""
    run = read(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"kind": "step", "step": 1}\n' * 1000)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
    try:
        with pytest.raises(OSError, match=rf"File too large: '{metrics}'"):
            JsonLines(metrics, resumed_at=1)
        with pytest.raises(OSError, match=rf"File too large: '{tmp_path}/about.json'"):
            write_json(tmp_path / "about.json", ["x" * 20000])
        with pytest.raises(ValueError, match=rf"logging\.folder must .* got {tmp_path}/config/tiny\.yml \(File too"):
            keep_texts(tmp_path / "config", run, run.config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert len(metrics.read_text().splitlines()) == 1000


def test_a_skipped_loss_is_not_in_the_mean() -> None:
    pace = Pace(steps=10)
    for step, loss in enumerate((4.0, float("inf"), float("nan"), 2.0), 1):
        pace.see(_step(step, loss=loss))
    assert pace.loss == pytest.approx((0.95 * 4 + 2) / 1.95)


def test_pace() -> None:
    pace = Pace(steps=10)
    pace.see(_step(1, loss=4.0, seconds=99.0))  # the first step compiles
    assert pace.left == "-:--:--" and pace.loss == 4.0
    pace.see(_step(2, loss=2.0))
    assert pace.left == "0:00:16"
    assert pace.loss == pytest.approx((0.95 * 4 + 2) / 1.95)


def test_lines() -> None:
    out = io.StringIO()
    lines = Lines(Console(file=out, width=60), steps=25, every=10)
    for number in range(1, 26):
        lines.step(_step(number, skipped=number == 7))
    lines.note("checkpoint [of] step 20")
    printed = out.getvalue().splitlines()
    assert [line.split()[1] for line in printed[:-1]] == ["1/25", "7/25", "10/25", "20/25", "25/25"]
    assert printed[2] == (
        "step 10/25  loss 2.0000 (last 2.0000)  lr 1.00e-03  grad norm 1.5  32 tokens/s  MFU 50.0%  1.00 GiB  "
        "0:00:30 left"
    )
    assert printed[1].split("  ")[-2] == "skipped" and printed[-1] == "checkpoint [of] step 20"


def test_a_live_bar() -> None:
    out = io.StringIO()
    live = Live(Console(file=out, width=160, force_terminal=True, color_system=None), steps=40, resumed_at=10)
    for number in range(11, 21):
        live.step(_step(number, skipped=number == 15))
    live.evaluation(EvaluationRecord(20, "validation", 1.25, 4))
    live.task(TaskRecord(20, "a [task]", {"acc": 0.5, "acc_stderr": 0.25}))
    live.note("checkpoint [of] step 20")
    live.close()
    text = out.getvalue()
    for said in ("20/40", "0:00:40 left", "loss 2.0000", "MFU 50.0%", "step 15 skipped", "checkpoint [of] step 20",
                 "step 20: validation loss 1.2500 over 4 batches", "step 20: a [task] acc 0.5"):  # fmt: skip
        assert said in text, said


def test_numbers_in_words() -> None:
    assert [si(n) for n in (0.5, 999, 1e6, 1.2345e10, 3e18)] == ["0.5 ", "999 ", "1 M", "12.3 G", "3 E"]
    assert [many(n) for n in (115_008, 1.24e9)] == ["115k", "1.24B"]


def test_wandb_that_is_not_there_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check(read(tmp_path).config)
    with pytest.raises(ModuleNotFoundError, match=r"logging\.wandb must be null where wandb is not installed, got"):
        check(read(tmp_path, "logging.wandb={project: x}").config)


class _FakeRun:
    id = "abc"

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.logged, self.summary, self.finished = arguments, [], {}, False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_wandb_is_told_and_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[_FakeRun] = []
    wandb: Any = types.ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    wandb.init = lambda **arguments: runs.append(_FakeRun(**arguments)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = read(tmp_path, "logging.wandb={project: x}").config
    check(config)
    for _ in range(2):
        assert config.logging.wandb is not None
        sink = WandB(config.logging.wandb, config, tmp_path)
        sink.step(_step(1))
        sink.evaluation(EvaluationRecord(1, "validation", 1.0, 2))
        sink.task(TaskRecord(1, "piqa", {"acc": 0.5}))
        sink.note("a note")
        sink.close()
    assert "id" not in runs[0].arguments and runs[1].arguments["id"] == "abc"
    assert runs[0].arguments["project"] == "x" and runs[0].arguments["config"]["train"]["steps"] == 12
    assert runs[0].finished and runs[0].summary == {"last note": "a note"}
    assert [(step, sorted(values)[:1]) for step, values in runs[0].logged] == [
        (1, ["memory/gib"]), (1, ["validation/loss"]), (1, ["piqa/acc"])
    ]  # fmt: skip


def _compile(step: str) -> None:
    """The events of a launch that needs a kernel compiled."""
    tracing.event("load", "wanted", key=step, shapes={"x_ptr": (7, 4096)})
    tracing.event(
        "kernel", "_k for sm_90: compiled, 900 ms", kernel="_k", module="powertrain.ops.norm", arch=90,
        constants={"BLOCK_N": 4096}, source="compiled", key=step,
    )  # fmt: skip


def test_a_late_compile_is_told_with_its_shapes() -> None:
    told: list[tuple[str, Any]] = []
    watch = StepWatch(torch.device("cpu"), "warn", lambda *what: told.append(what), profiles=False)
    with watch.step(1):
        _compile("first")
    assert told == []  # the first step of a process may compile
    tracing.event("kernel", "_k: store, 1 ms", kernel="_k", module="powertrain.ops.norm", arch=90, constants={},
                  source="store", key="found")  # fmt: skip
    with watch.step(2):
        _compile("late")
    ((kind, text),) = told
    assert kind == "note" and text.startswith("step 2: compiled after the first step: _k for sm_90: compiled, 900 ms")
    assert "x_ptr [7, 4096]" in text and "BLOCK_N=4096" in text


def test_a_late_compile_can_be_an_error() -> None:
    watch = StepWatch(torch.device("cpu"), "error", lambda *what: None, profiles=False)
    with watch.step(1):
        _compile("first")
    with pytest.raises(LateCompile, match=r"step 2: compiled .* x_ptr \[7, 4096\] .* train\.recompiles is error"):
        with watch.step(2):
            _compile("late")


def test_another_profiler_is_left_alone() -> None:
    told: list[tuple[str, Any]] = []
    watch = StepWatch(torch.device("cpu"), "warn", lambda *what: told.append(what))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        for number in (1, 2, 3):
            with watch.step(number):
                torch.ones(3).sum()
    assert told == [("note", "step 3: no kernel table, another profiler is running")]


def test_the_table_survives_json() -> None:
    told: list[Any] = []
    watch = StepWatch(torch.device("cpu"), "warn", lambda kind, value: told.append(value))
    for number in (5, 6, 7):
        with watch.step(number):
            torch.randn(64, 64) @ torch.randn(64, 64)
    (table,) = told
    assert table.step == 7 and [row.op for row in table.rows].count("matrix products") == 1
    assert KernelTable.of(json.loads(json.dumps(asdict(table)))) == table


# names as torch 2.11 on an H200 has them
@pytest.mark.parametrize(
    ("kernel", "op", "backend", "short"),
    [
        ("_norm_fwd_kernel", "norm", "Triton, ours", "_norm_fwd_kernel"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "matrix products", "cuBLAS or CUTLASS", None),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention", "cudnn", None),
        ("void fmha_reduce_head<true>(int)", "attention", "cudnn", "fmha_reduce_head"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication", "NCCL", None),
        ("Memcpy HtoD (Pinned -> Device)", "copies", "driver", None),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int)",
         "other PyTorch operators", "PyTorch", "vectorized_elementwise_kernel"),
        ("void at::native::<unnamed>::vectorized_gather_kernel<16, long>(char*)",
         "other PyTorch operators", "PyTorch", "vectorized_gather_kernel"),
    ],
)  # fmt: skip
def test_gpu_kernels_by_name(kernel: str, op: str, backend: str, short: str | None) -> None:
    found = served(kernel, {"_norm_fwd_kernel": "norm"}, "cudnn")
    assert found[:2] == (op, backend)
    assert short is None or found[2] == short


@pytest.mark.gpu
def test_a_gpu_step_is_seen() -> None:
    import powertrain

    told: list[Any] = []
    watch = StepWatch(torch.device("cuda"), "warn", lambda kind, value: told.append((kind, value)))
    x = torch.randn(512, 1000, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(1000, device="cuda", dtype=torch.bfloat16)
    for number in (1, 2, 3):
        with watch.step(number):
            powertrain.rms_norm(x, weight) @ x.T
    table = dict(told)["kernels"]
    rows = {row.op: row for row in table.rows}
    assert rows["norm"].backend == "Triton, ours" and rows["matrix products"].calls == 1
    loads = [event.facts for event in tracing.trace() if event.kind == "load"]
    assert any((512, 1000) in facts["shapes"].values() for facts in loads)


def test_a_task_is_a_scalar_of_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path)
    sink.task(TaskRecord(3, "piqa", {"acc": 0.5, "acc_stderr": 0.25}))
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("piqa/acc")] == [(3, 0.5)]
