"""Checkpoints: whole or not there, without pickle, and errors that name the file."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from powertrain.train.checkpoint import store as checkpoint_store
from powertrain.train.checkpoint.store import (
    CheckpointError,
    Checkpoints,
    NotWritten,
    checkpoints_in,
    find,
    load,
    read_facts,
)
from tests.distributed.launch import ROOT, clean_environment
from tests.train.tiny_run import At, open_trainer


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "model.weight": torch.arange(12.0).reshape(3, 4),
        "step.weight": torch.tensor([3.0]),
        "exp_avg.weight": torch.randn(3, 4, dtype=torch.bfloat16),
        "model.bias": torch.arange(4),
    }


def _zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(t) for name, t in _tensors().items()}


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    saved = _tensors()
    wanted = {name: t.clone() for name, t in saved.items()}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(saved, {"step": 7, "note": "x"})
    for t in saved.values():
        t.zero_()  # training goes on while the files are written
    checkpoints.wait()
    loaded = _zeros()
    facts = load(tmp_path / "step_00000007", loaded)
    assert facts["step"] == 7 and facts["note"] == "x"
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
    assert not list(tmp_path.glob("*.partial"))


def test_large_states_go_to_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_store, "_FILE_BYTES", 64)
    Checkpoints(tmp_path).save(_tensors(), {"step": 1}, asynchronous=False)
    loaded = _zeros()
    load(tmp_path / "step_00000001", loaded)
    assert len(list((tmp_path / "step_00000001").glob("*.safetensors"))) > 1
    assert torch.equal(loaded["model.weight"], _tensors()["model.weight"])


def test_the_last_n_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (1, 2, 10):
        checkpoints.save(_tensors(), {"step": step}, asynchronous=False)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step_00000002", "step_00000010"]
    found = find(tmp_path)
    assert found is not None and found.name == "step_00000010"


def test_of_a_linked_checkpoint_the_link_is_removed(tmp_path: Path) -> None:
    """Somebody keeps it elsewhere; its files were deleted."""
    for step in (1, 2):
        Checkpoints(tmp_path / "run").save(_tensors(), {"step": step}, asynchronous=False)
        if step == 1:
            kept = (tmp_path / "run/step_00000001").rename(tmp_path / "kept")
            (tmp_path / "run/step_00000001").symlink_to(kept)
    Checkpoints(tmp_path / "run", keep_last=1).save(_tensors(), {"step": 3}, asynchronous=False)
    assert [path.name for path in sorted((tmp_path / "run").glob("step_*"))] == ["step_00000003"]
    assert read_facts(kept)["step"] == 1


def test_what_a_kill_left_is_removed_and_never_found(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(_tensors(), {"step": 1}, asynchronous=False)
    left = tmp_path / "step_00000002.partial"
    left.mkdir()
    (left / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"half")
    (tmp_path / "step_00000003").mkdir()  # no checkpoint.json: not a checkpoint
    found = find(tmp_path)
    assert found is not None and found.name == "step_00000001"
    Checkpoints(tmp_path)
    assert not left.exists()


_KILLED = """
import sys, torch
from pathlib import Path
from powertrain.train.checkpoint.store import Checkpoints
checkpoints, n = Checkpoints(Path(sys.argv[1])), 0
while True:
    n += 1
    checkpoints.save({"value": torch.full((200_000,), float(n))}, {"step": n}, asynchronous=n % 2 == 0)
    print(n, flush=True)
"""


def test_kill_9_at_any_moment_leaves_whole_checkpoints(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment(), cwd=ROOT) as process:
        assert process.stdout is not None
        for _ in range(5):
            process.stdout.readline()
        time.sleep(0.013)
        process.send_signal(signal.SIGKILL)
    steps = checkpoints_in(tmp_path)
    assert len(steps) >= 4
    for folder in steps:
        value = {"value": torch.zeros(200_000)}
        facts = load(folder, value)
        assert bool((value["value"] == facts["step"]).all())


def test_damage_is_named(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(_tensors(), {"step": 1}, asynchronous=False)
    folder = tmp_path / "step_00000001"
    (file,) = folder.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=f"{file.name}: must have {len(whole)} bytes, got {len(whole) - 1}"):
        load(folder, _zeros())
    file.write_bytes(b"\xff" * len(whole))
    with pytest.raises(CheckpointError, match="must have the CRC-32"):
        load(folder, _zeros())
    file.unlink()
    with pytest.raises(CheckpointError, match="got no file"):
        load(folder, _zeros())
    (folder / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"checkpoint.json must be JSON"):
        read_facts(folder)
    (folder / "checkpoint.json").write_text(json.dumps({"format": 99, "files": {}}))
    with pytest.raises(CheckpointError, match="format must be 1, got 99"):
        read_facts(folder)


def test_another_models_checkpoint_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(_tensors(), {"step": 1}, asynchronous=False)
    wanted = {**_zeros(), "model.weight": torch.zeros(5, 4)}
    with pytest.raises(CheckpointError, match=r"model.weight must have shape \[5, 4\], got \[3, 4\]"):
        load(tmp_path / "step_00000001", wanted)
    with pytest.raises(CheckpointError, match=r"must hold model.other \[2\]"):
        load(tmp_path / "step_00000001", {**_zeros(), "model.other": torch.zeros(2)})
    assert not any(t.any() for t in wanted.values())


def test_no_pickle_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    Checkpoints(tmp_path).save(_tensors(), {"step": 1}, asynchronous=False)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *a, **k: pytest.fail("a pickle was read"))
    load(tmp_path / "step_00000001", _zeros())
    assert {path.suffix for path in (tmp_path / "step_00000001").iterdir()} == {".safetensors", ".json"}


_KEEPER = """
import sys, time
from pathlib import Path
from powertrain.train.checkpoint.store import Checkpoints
kept = Checkpoints(Path(sys.argv[1]))
print("here", flush=True)
time.sleep(60)
"""


def test_another_run_is_kept_out_until_the_first_has_ended(tmp_path: Path) -> None:
    left = tmp_path / "step_00000003.partial"
    command = [sys.executable, "-c", _KEEPER, str(tmp_path)]
    with subprocess.Popen(command, env=clean_environment(), stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "here\n"
        left.mkdir()  # what the first is writing
        with pytest.raises(ValueError, match=f"checkpoint.folder must not be another run's .* process {first.pid} of"):
            Checkpoints(tmp_path)
        assert left.is_dir()
        first.kill()
    Checkpoints(tmp_path)
    assert not left.exists()


@pytest.mark.parametrize("gone", [shutil.rmtree, lambda folder: folder.rename(f"{folder}-moved-{time.monotonic_ns()}")])
def test_a_run_whose_folder_is_gone_stays_out_of_the_next_ones(
    gone: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wrote its checkpoints among those of the run that had begun there since, and removed that one's old ones."""
    first = Checkpoints(tmp_path / "run")
    for step in (1, 2):
        first.save(_tensors(), {"step": step}, asynchronous=False)
        gone(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.writer").write_text("process 7 of there")

    def locked(*_: object) -> None:
        raise BlockingIOError

    with monkeypatch.context() as other:
        other.setattr("powertrain.train.checkpoint.store.fcntl.lockf", locked)
        with pytest.raises(NotWritten, match=r"step_00000003 was not written: .* process 7 of there does"):
            first.save(_tensors(), {"step": 3}, asynchronous=False)
    first.save(_tensors(), {"step": 4}, asynchronous=False)
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == ["step_00000004"]


def test_a_run_without_checkpoints_is_kept_out_too(tmp_path: Path) -> None:
    """Two runs of one config with `checkpoint.save: false` wrote into each other's metrics.jsonl and report."""
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", _KEEPER, str(tmp_path / "run")]
    with subprocess.Popen(command, env=clean_environment(), stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "here\n"
        with pytest.raises(ValueError, match=f"logging.folder must not be another run's .* process {first.pid} of"):
            open_trainer(tmp_path, "checkpoint.save=false", sinks=lambda trainer: [])
        first.kill()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".writer"]


def test_a_checkpoint_that_did_not_begin_is_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another rank is gone: "checkpoint of step 0" was said at the end of the run, and there was none."""
    sink = At(0, lambda: None)
    trainer = open_trainer(tmp_path, sinks=lambda trainer: [sink])

    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("gloo: Connection closed by peer")

    monkeypatch.setattr(trainer.checkpoints, "save", lost)
    with pytest.raises(RuntimeError, match="closed by peer"):
        trainer.save()
    trainer.close()
    assert not any("checkpoint of step" in note for note in sink.notes)


@pytest.mark.parametrize(
    "name, said",
    [
        (
            "checkpoints/.writer",
            "checkpoint.folder must name a folder .* got {0}/checkpoints/.writer .a link to /gone/x",
        ),
        (
            "checkpoints",
            "checkpoint.folder .* must name a folder .* got {0}/checkpoints .a link to /gone/x, which is not",
        ),
        (
            "config",
            "logging.folder must name a folder that can be written, got {0}/config .a link to /gone/x, which is",
        ),
    ],
)
def test_a_link_to_nothing_in_the_folder_is_said(name: str, said: str, tmp_path: Path) -> None:
    """ "No such file or directory: .writer" named no key, "checkpoints (File exists)" had to be decoded."""
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to("/gone/x")
    with pytest.raises(ValueError, match=said.format(tmp_path / "run")):
        open_trainer(tmp_path, sinks=lambda trainer: [])


def test_the_lock_of_a_run_outlives_the_run_before_it(tmp_path: Path) -> None:
    """The first trainer's file was closed when it was collected, and with it the lock of the second, of one process."""
    first = open_trainer(tmp_path, sinks=lambda trainer: [])
    first.close()
    second = open_trainer(tmp_path, sinks=lambda trainer: [])
    del first
    gc.collect()
    for folder in ("run", "run/checkpoints"):
        command = [sys.executable, "-c", _KEEPER, str(tmp_path / folder)]
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
        assert done.returncode and f"process {os.getpid()} of" in done.stderr
    second.close()
