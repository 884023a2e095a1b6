"""A training that is killed, asked to end, or robbed of its workers and its disk ends as one that was left alone."""

import errno
import json
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from powertrain.train.checkpoint import store as checkpoint_store
from powertrain.train.checkpoint.store import CheckpointError, Checkpoints, NotWritten, checkpoints_in, load
from powertrain.train.data import workers
from powertrain.train.data.loader import UnreadableSample, batches
from powertrain.train.data.packed import Sample
from powertrain.train.reporting.metrics import read_metrics
from tests.faults.processes import end, left_of, said, start, wait_for, weights
from tests.train.tiny_run import At, open_trainer, write_config

STEPS = 24
SETTINGS = (
    f"train.steps={STEPS}", "checkpoint.every=3", "checkpoint.keep_last=2", "checkpoint.asynchronous=true",
    "evaluation.every=0", "data.num_workers=2", "logging.report=false",
)  # fmt: skip


def command(folder: Path, *more: str, ranks: int = 1, torchrun: bool = False) -> tuple[str, ...]:
    config = str(folder / "tiny.yml")
    train = ("powertrain", "train", config, *SETTINGS, *more)
    if ranks == 1:
        return train
    if torchrun:
        return ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", *train)
    return ("tests.distributed.fork_ranks", str(ranks), *train)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def steps_of(folder: Path) -> int:
    file = folder / "run/metrics.jsonl"
    return file.read_bytes().count(b'"kind": "step"') if file.is_file() else 0


STAGES = (
    "parallel.pipeline=2", "train.gradient_accumulation_steps=3", "model.architecture=gpt_neox",
    "model.hidden_dropout=0.1", "model.tie_embeddings=true",
)  # fmt: skip


def wanted(folder: Path, ranks: int, *more: str) -> dict[str, torch.Tensor]:
    """The final weights of a run that is not interrupted."""
    folder.mkdir()
    write_config(folder)
    process = start(folder, *command(folder, *more, ranks=ranks))
    assert process.wait(timeout=240) == 0, said(folder)[-3000:]
    return weights(folder / "run/checkpoints")


@pytest.mark.parametrize(
    "ranks, kills, more",
    [
        (1, 2, ()),
        pytest.param(1, 100, (), marks=pytest.mark.slow),
        pytest.param(2, 100, (), marks=pytest.mark.slow),
        pytest.param(2, 4, STAGES, marks=pytest.mark.slow, id="2-4-stages"),
    ],
)
def test_kill_9_at_random_moments_changes_no_bit(tmp_path: Path, ranks: int, kills: int, more: tuple[str, ...]) -> None:
    """Each kill ends the whole group at a step and fraction drawn at random; the next start goes on."""
    whole = wanted(tmp_path / "whole", ranks, *more)
    chance, done = random.Random(17 + ranks), 0
    while done < kills:
        folder = tmp_path / f"killed{done}"
        folder.mkdir()
        write_config(folder)
        for _ in range(min(4, kills - done)):
            process = start(folder, *command(folder, *more, ranks=ranks))
            before = steps_of(folder)
            step = min(STEPS, before + chance.randrange(1, 12))
            wait_for(lambda s=step, f=folder, p=process: steps_of(f) >= s or p.poll() is not None, folder)
            time.sleep(chance.random() * 0.05)
            end(process)
            done += 1
            for path in checkpoints_in(folder / "run/checkpoints"):
                checkpoint_store.verify(path, checkpoint_store.read_facts(path))
        process = start(folder, *command(folder, *more, ranks=ranks))
        assert process.wait(timeout=240) == 0, said(folder)[-3000:]
        same(weights(folder / "run/checkpoints"), whole)
        names = {p.name for p in (folder / "run/checkpoints").iterdir()}
        assert names == {".writer", *(p.name for p in checkpoints_in(folder / "run/checkpoints"))}


ENDINGS = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"]


@pytest.mark.parametrize(
    "number, times, ranks",
    [
        ("SIGTERM", 2, 1),
        *(pytest.param(n, t, 1, marks=pytest.mark.slow) for n in ENDINGS for t in (1, 3)),
        *(pytest.param("SIGTERM", t, 2, marks=pytest.mark.slow) for t in (1, 2)),
    ],
)
def test_a_signal_to_the_whole_group_saves_once(tmp_path: Path, number: str, times: int, ranks: int) -> None:
    """Data workers are in the group too; torchrun, a terminal and systemd send it more than once."""
    write_config(tmp_path)
    process = start(
        tmp_path, *command(tmp_path, "train.steps=100000", "checkpoint.every=0", ranks=ranks, torchrun=True)
    )
    wait_for(lambda: steps_of(tmp_path) >= 5, tmp_path, process)
    for _ in range(times):
        try:
            os.killpg(process.pid, getattr(signal, number))
        except ProcessLookupError:
            break
        time.sleep(0.05)
    code = process.wait(timeout=120)
    assert ranks > 1 or code == 0, said(tmp_path)[-3000:]
    (only,) = checkpoints_in(tmp_path / "run/checkpoints")
    facts = checkpoint_store.read_facts(only)
    checkpoint_store.verify(only, facts)
    assert 5 <= facts["step"] < 100000 and facts["samples"] == 4 * ranks * facts["step"]
    assert f"checkpoint of step {facts['step']} in" in said(tmp_path)
    wait_for(lambda: not left_of(process.pid), tmp_path)


def test_a_killed_main_leaves_no_worker(tmp_path: Path) -> None:
    write_config(tmp_path)
    process = start(tmp_path, *command(tmp_path, "train.steps=100000"))
    wait_for(lambda: steps_of(tmp_path) >= 2, tmp_path, process)
    assert len(left_of(process.pid)) == 3
    end(process, group=False)
    wait_for(lambda: not left_of(process.pid), tmp_path)


class Numbers:
    """Sample n is n; reading it takes a moment. Sample `deadly` kills its reader, as often as `lives` has bytes."""

    def __init__(self, count: int, deadly: int = -1, lives: Path | None = None) -> None:
        self.count, self.deadly, self.lives = count, deadly, lives

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int) -> Sample:
        if index == self.deadly and self.lives is not None and self.lives.stat().st_size:
            os.truncate(self.lives, self.lives.stat().st_size - 1)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.001)
        return Sample(np.full(4, index), np.full(4, index), None)


def data_workers() -> list[psutil.Process]:
    """Those that live; a test starts other processes as well."""
    named = [child for child in multiprocessing.active_children() if child.name == "powertrain-data"]
    return [psutil.Process(child.pid) for child in named]


def rows(read: Iterator[Any]) -> list[int]:
    return [n for batch in read for n in batch.tokens[:, 0].tolist()]


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 20))])
def test_killed_workers_are_replaced_and_no_sample_is_lost(seed: int, capfd: pytest.CaptureFixture[str]) -> None:
    chance, killed, seen = random.Random(seed), 0, []
    for batch in batches(Numbers(400), micro_batch_size=2, num_workers=3):
        seen += batch.tokens[:, 0].tolist()
        if chance.random() < 0.02 and killed < 6:
            chance.choice(data_workers()).kill()
            killed += 1
    assert seen == list(range(400)) and killed
    assert capfd.readouterr().err.count("its samples again") >= 1
    assert not data_workers()


def test_a_worker_that_dies_twice_is_forgiven_and_three_times_named(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    lives.write_bytes(b"xx")
    assert rows(batches(Numbers(20, 7, lives), micro_batch_size=2, num_workers=2)) == list(range(20))
    lives.write_bytes(b"xxxxxx")
    with pytest.raises(UnreadableSample, match=r"samples 6 to 7 .* data worker \d+ was killed by SIGKILL \(out of mem"):
        rows(batches(Numbers(20, 7, lives), micro_batch_size=2, num_workers=2))


def test_more_workers_than_this_process_may_start() -> None:
    """Each needs open files. Those that started end, and a run of few batches starts as few."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, before[1]))
    try:
        with pytest.raises(OSError, match=r"num_workers must be at most \d+ here, got 1000 \(Too many open files"):
            rows(batches(Numbers(4000), micro_batch_size=2, num_workers=1000))
        assert not data_workers()
        assert rows(batches(Numbers(6), micro_batch_size=2, num_workers=1000)) == list(range(6))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_worker_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(workers, "_QUIET", 0.5)
    monkeypatch.setattr(workers, "_PATIENCE", 2.0)
    read = batches(Numbers(20), micro_batch_size=2, num_workers=1)
    next(read)
    (worker,) = data_workers()
    worker.suspend()
    with pytest.raises(UnreadableSample, match=f"data worker {worker.pid} has not answered for"):
        list(read)
    assert f"worker {worker.pid} has not answered" in capfd.readouterr().err


class Large(Numbers):
    """Samples larger than a pipe holds: their worker stops in the middle of sending until somebody reads."""

    def sample(self, index: int) -> Sample:
        return Sample(np.full(100_000, index), np.full(100_000, index), None)


def stopped_in_sending(read: Iterator[Any]) -> psutil.Process:
    """After the first batch: the worker, which has sent a part of the next one, stopped."""
    next(read)
    (worker,) = data_workers()
    time.sleep(0.5)  # the pipe is full by then
    worker.suspend()
    return worker


def test_a_worker_that_stops_in_the_middle_of_sending_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "_QUIET", 0.5)
    monkeypatch.setattr(workers, "_PATIENCE", 2.0)
    read = batches(Large(20), micro_batch_size=2, num_workers=1)
    worker = stopped_in_sending(read)
    started = time.monotonic()
    # a stopped process still ends its write if the pipe is emptied before the kernel looks for signals
    named = rf"samples (2 to 3|4 to 5) .* data worker {worker.pid} has not answered for"
    with pytest.raises(UnreadableSample, match=named):
        list(read)
    assert time.monotonic() - started < 60
    assert f"worker {worker.pid} has not answered" in capfd.readouterr().err
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("goes_on", [True, False], ids=["goes on", "killed"])
def test_a_worker_that_stopped_for_a_while_in_sending_loses_no_sample(goes_on: bool) -> None:
    read = batches(Large(12), micro_batch_size=2, num_workers=1)
    worker = stopped_in_sending(read)
    later = threading.Timer(1.0, worker.resume if goes_on else worker.kill)
    later.start()
    assert rows(read) == list(range(2, 12))
    later.join()


@pytest.mark.parametrize("seed", range(20))
def test_a_message_arrives_in_any_parts(seed: int) -> None:
    chance = random.Random(seed)
    wanted = [os.urandom(chance.choice([0, 1, 100, 5000])) for _ in range(5)]
    ours, theirs = os.pipe()
    for value in wanted:
        workers._Message.send(theirs, value)
    os.close(theirs)
    data = b"".join(iter(lambda: os.read(ours, 1 << 16), b""))
    os.close(ours)
    got, message = [], workers._Message()
    while data:
        ours, theirs = os.pipe()
        part, data = data[: (cut := chance.choice([1, 3, 8, 9, 700]))], data[cut:]
        os.write(theirs, part)
        os.close(theirs)
        try:
            while True:
                if message.read(ours):
                    got.append(message.take())
        except EOFError:
            os.close(ours)
    assert got == wanted


# ---- a kill between any two steps of writing a checkpoint

_CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync", "link")


def _tensors(value: float) -> dict[str, torch.Tensor]:
    return {"model.weight": torch.full((3, 4), value)}


def _save(folder: Path, step: int, value: float, keep_last: int | None = None) -> None:
    saving = Checkpoints(folder, keep_last=keep_last)
    saving.save(_tensors(value), {"step": step, "config": {}}, asynchronous=False)


def _dies_at(call: int, work: Any) -> bool:
    """Run `work` in a child that ends before its `call`-th change of the file system; whether it came so far."""
    child = os.fork()
    if child == 0:
        left = [call]

        def counted(real: Any) -> Any:
            def step(*args: Any, **options: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(77)
                return real(*args, **options)

            return step

        for name in _CALLS:
            setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 77


@pytest.mark.parametrize("again", [True, False], ids=["the same step", "a later step"])
def test_a_kill_before_any_change_loses_no_checkpoint(tmp_path: Path, again: bool) -> None:
    """Saved again, a step is there as it was or as it is now, at every moment; and nothing is left over."""
    step, calls = (2 if again else 3), 0
    for calls in range(60):
        folder = tmp_path / str(calls)
        _save(folder, 1, 1.0)
        _save(folder, 2, 2.0)
        (folder / "step_00000009.partial").mkdir()
        (folder / "step_00000009.partial" / "notes.txt").write_text("a user's")
        (folder / "notes.partial").mkdir()
        if not _dies_at(calls, lambda f=folder: _save(f, step, 3.0, keep_last=2)):
            break
        for path in checkpoints_in(folder):  # what a reader finds, who recovers nothing
            value = _tensors(0.0)
            load(path, value)
            assert checkpoint_store.step_of(path) in (1, 2, 3)
            assert value["model.weight"][0, 0] in ((2.0, 3.0) if checkpoint_store.step_of(path) == 2 else (1.0, 3.0))
        newest = checkpoint_store.find(folder)
        assert newest is not None and checkpoint_store.step_of(newest) >= 2
        _save(folder, 4, 4.0, keep_last=2)
        assert [checkpoint_store.step_of(path) for path in checkpoints_in(folder)][-1] == 4
        left = {path.name for path in folder.iterdir()} - {path.name for path in checkpoints_in(folder)}
        assert left == {".writer", "step_00000009.partial", "notes.partial"}
        assert [p.name for p in (folder / "step_00000009.partial").iterdir()] == ["notes.txt"]
    assert 10 < calls < 59  # the child died at each of them, and then came through


# ---- a full disk


@pytest.mark.parametrize("where", ["every write", "publish"])
def test_a_checkpoint_that_cannot_be_written_is_said_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    notes: list[str] = []
    trainer = open_trainer(tmp_path, "checkpoint.every=4", sinks=lambda t: [_notes(notes)])
    real = trainer.checkpoints._name if where == "publish" else trainer.checkpoints._make
    name = "_name" if where == "publish" else "_make"

    def fails(*args: Any) -> None:
        if trainer.progress.step == 8:
            raise full
        real(*args)

    monkeypatch.setattr(trainer.checkpoints, name, fails)
    trainer.fit()
    trainer.close()
    failed = [note for note in notes if "was not written" in note]
    assert len(failed) == 1 and "step_00000008" in failed[0] and "No space left" in failed[0]
    assert [checkpoint_store.step_of(p) for p in checkpoints_in(tmp_path / "run/checkpoints")] == [4, 12]
    assert not list((tmp_path / "run/checkpoints").glob("*.partial"))


def test_the_last_checkpoint_must_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the checkpoint that `generate` and the next start would take instead."""
    trainer = open_trainer(tmp_path, "checkpoint.every=0", "train.steps=4", sinks=lambda t: [])
    trainer.fit()
    trainer.close()
    monkeypatch.setattr(checkpoint_store, "write_json", lambda *a: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    trainer = open_trainer(tmp_path, "checkpoint.every=0", sinks=lambda t: [])
    with pytest.raises(NotWritten, match=r"step_00000012 was not written: .*full; the newest .* is .*step_00000004$"):
        trainer.fit()
    trainer.close()


def _notes(kept: list[str]) -> At:
    sink = At(0, lambda: None)
    sink.note = kept.append  # type: ignore[method-assign]
    return sink


def test_a_sink_that_fails_ends_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    after: list[int] = []
    trainer = open_trainer(tmp_path, sinks=lambda t: [At(3, full), At(12, lambda: after.append(1))])
    trainer.fit()
    trainer.close()
    assert trainer.progress.step == 12 and after == [1]
    assert capfd.readouterr().err.count("training continues without it") == 1


@pytest.mark.parametrize(
    "tail", [b"", b'{"kind": "st', b"\0" * 512, b'{"kind": "step", "step": 9\n', b"\xff\xfe\n{}\n"]
)
def test_a_torn_metrics_file_is_cut(tmp_path: Path, tail: bytes) -> None:
    open_trainer(tmp_path, "train.steps=5", sinks=lambda t: []).close()
    from typer.testing import CliRunner

    from powertrain.cli import app

    config = str(write_config(tmp_path))
    assert CliRunner().invoke(app, ["train", config, "train.steps=5", "logging.report=false"]).exit_code == 0
    with open(tmp_path / "run/metrics.jsonl", "ab") as file:
        file.write(tail)
    result = CliRunner().invoke(app, ["train", config, "train.steps=7", "logging.report=false"])
    assert result.exit_code == 0, result.output
    assert [record.step for record in read_metrics(tmp_path / "run/metrics.jsonl").steps] == [1, 2, 3, 4, 5, 6, 7]


def test_metrics_on_a_full_disk_have_whole_lines(tmp_path: Path) -> None:
    from powertrain.train.reporting.metrics import JsonLines

    sink = JsonLines(tmp_path / "metrics.jsonl")
    real, room = sink._file, [250]

    class Full:
        name = real.name
        truncate = real.truncate
        close = real.close
        fileno = real.fileno

        def write(self, line: bytes) -> int:
            part = line[: room[0]]
            room[0] -= len(part)
            return int(real.write(part) or 0)

    sink._file = Full()  # type: ignore[assignment]
    failed = 0
    for n in range(20):
        if n == 15:
            room[0] = 10_000
        try:
            sink.note(f"note {n}, of some length")
        except OSError:
            failed += 1
    sink.close()
    notes = [text for _, text in read_metrics(tmp_path / "metrics.jsonl").notes]
    assert failed and 5 < len(notes) == 20 - failed and notes[-1] == "note 19, of some length"


# ---- a flipped bit


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_any_flipped_bit_of_a_checkpoint_is_named(tmp_path: Path, count: int) -> None:
    _save(tmp_path, 1, 1.0)
    _save(tmp_path, 2, 2.0)
    chance = random.Random(3)
    newest = tmp_path / "step_00000002"
    files = sorted(newest.iterdir())
    for n in range(count):
        file = files[n % len(files)]
        good = file.read_bytes()
        bad = bytearray(good)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        file.write_bytes(bad)
        value = _tensors(0.0)
        if file.suffix == ".json" and _means_the_same(good, bytes(bad)):
            file.write_bytes(good)
            continue
        with pytest.raises(CheckpointError, match=r"step_00000002") as caught:
            load(newest, value)
        assert "step_00000001 is whole" in str(caught.value), caught.value
        assert not value["model.weight"].any()
        file.write_bytes(good)
    load(newest, _tensors(0.0))


@pytest.mark.parametrize(
    "content", [b"{", b"{}", b'{"format": 1, "checksum": "0"}'], ids=["json", "format", "checksum"]
)
def test_each_of_many_damaged_checkpoints_is_read_once(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each named an older one, which named an older one: with n of them 2 ** n reads."""
    _save(tmp_path, 1, 1.0)
    for step in range(2, 30):
        (tmp_path / f"step_{step:08d}").mkdir()
        (tmp_path / f"step_{step:08d}/checkpoint.json").write_bytes(content)
    reads: list[Path] = []
    real = checkpoint_store.read_json
    monkeypatch.setattr(checkpoint_store, "read_json", lambda file: (reads.append(file), real(file))[1])
    with pytest.raises(CheckpointError, match=r"step_00000029.*step_00000001 is whole"):
        checkpoint_store.read_facts(tmp_path / "step_00000029")
    assert len(reads) == 29


def _means_the_same(good: bytes, bad: bytes) -> bool:
    """A flip in white space."""
    try:
        return bool(json.loads(good) == json.loads(bad))
    except ValueError:
        return False


def test_a_checkpoint_without_checksums_still_loads(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _save(tmp_path, 1, 1.0)
    file = tmp_path / "step_00000001/checkpoint.json"
    facts = json.loads(file.read_text())
    del facts["checksum"], facts["checksums"]
    file.write_text(json.dumps(facts))
    value = _tensors(0.0)
    for _ in range(2):
        load(tmp_path / "step_00000001", value)
    assert bool((value["model.weight"] == 1).all())
    assert capfd.readouterr().err.count("has no checksums") == 1


def test_a_loss_scale_that_cannot_come_back_stops_the_run(tmp_path: Path) -> None:
    from powertrain.train import trainer as module
    from powertrain.train.trainer import TrainingStopped

    trainer = open_trainer(tmp_path, "train.precision=fp16", "train.steps=12", sinks=lambda t: [])
    assert trainer.optimizer.scaler is not None
    trainer.optimizer.scaler.scale.fill_(float("inf"))  # as an earlier version left it in a checkpoint
    with pytest.raises(TrainingStopped, match="nothing was updated"):
        trainer.fit()
    again = open_trainer(tmp_path, "train.precision=fp16", "train.loss_scale.initial_power=127", sinks=lambda t: [])
    original, module.MOST_SKIPPED = module.MOST_SKIPPED, 4
    try:
        with pytest.raises(TrainingStopped, match=r"7 steps in a row were skipped.*the loss scale is"):
            again.fit()
    finally:
        module.MOST_SKIPPED = original
