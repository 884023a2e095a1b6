"""Damaged and hostile checkpoints (ours, Hugging Face's, GPT-NeoX's), and damaged inputs of the report."""

import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.models import build, configure, huggingface
from powertrain.models.pickles import load_pickle
from powertrain.train.checkpoint import neox as neox_checkpoint
from powertrain.train.checkpoint.load import load_model, open_weights
from powertrain.train.checkpoint.store import Checkpoints
from powertrain.train.config.schema import LossScale
from powertrain.train.data.indexed import IndexedWriter
from powertrain.train.reporting.report import write_report
from tests.faults.damage import answered, damaged
from tests.train import deepspeed_files
from tests.train.tiny_run import open_trainer, write_config

MANY = pytest.param(600, marks=pytest.mark.slow)
CPU = torch.device("cpu")
CONFIG = configure(
    architecture="llama", vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32,
    max_position_embeddings=32,
)  # fmt: skip


def model() -> Any:
    made = build(CONFIG, "cpu")
    made.init_weights(0)
    return made


def ours(folder: Path) -> Path:
    tensors = {f"model.{name}": t for name, t in model().state_dict().items()}
    facts = {
        "step": 0, "weights_only": True, "config": {"model": CONFIG.model_dump(mode="json")}, "dtype": "float32",
        "tokenizer": "bytes",
    }  # fmt: skip
    Checkpoints(folder).save(tensors, facts, asynchronous=False)
    return folder / "step_00000000"


def hf(folder: Path) -> Path:
    folder.mkdir()
    huggingface.write(folder, CONFIG, model().state_dict().items(), shard_bytes=4096)
    return folder


def hf_pickled(folder: Path) -> Path:
    folder.mkdir()
    huggingface.write(folder, CONFIG, model().state_dict().items())
    torch.save(dict(huggingface.to_hf(CONFIG, model().state_dict().items())), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def neox(folder: Path, pipe: int = 1) -> Path:
    neox_checkpoint.write(folder, CONFIG, model().state_dict().items(), pipe_parallel_size=pipe)
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    "ours": ours, "hf": hf, "hf_pickled": hf_pickled, "neox": neox, "neox_whole": lambda folder: neox(folder, 0),
}  # fmt: skip


@pytest.mark.parametrize("count", [40, MANY])
@pytest.mark.parametrize("kind", MAKERS)
def test_damage(tmp_path: Path, kind: str, count: int) -> None:
    """Any file of the folder: a model comes, or one error names a file. Ours: any change is an error."""
    folder, chance = MAKERS[kind](tmp_path / "whole"), random.Random(kind)
    whole = {name: t.clone() for name, t in load_model(folder, device=CPU)[0].state_dict().items()}
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    for n in range(count):
        file = files[n % len(files)]
        good = file.read_bytes()
        bad = damaged(good, chance)
        file.write_bytes(bad)
        loaded: list[Any] = []
        error = answered(lambda got=loaded: got.append(load_model(folder, device=CPU)), ValueError, OSError)
        assert error is None or str(tmp_path) in str(error) or str(error).startswith("checkpoint"), error
        if kind == "ours" and error is None:
            found = loaded[0][0].state_dict()
            assert all(torch.equal(found[name], whole[name]) for name in whole), file
        file.write_bytes(good)
        loaded.clear()
    load_model(folder, device=CPU)


@pytest.mark.parametrize("count", [30, MANY])
@pytest.mark.parametrize("kind", ["zero", "fused", "stage1"])
def test_damage_of_a_training(tmp_path: Path, kind: str, count: int) -> None:
    """Any file of DeepSpeed's: its optimizer comes, or one error names a file or the folder."""
    config = configure(architecture="gpt_neox", vocab_size=64, hidden_size=16, num_layers=2, num_heads=2)
    weights = build(config, "cpu")
    weights.init_weights(0)
    tensors = {f"{k}.{n}": t for k in ("model", "exp_avg", "exp_avg_sq") for n, t in weights.state_dict().items()}
    scaler = {"cur_scale": 8.0, "cur_iter": 5, "last_overflow_iter": 2, "scale_window": 100, "cur_hysteresis": 1}
    folder = deepspeed_files.write(
        tmp_path / "whole", config, tensors, deepspeed_files.Engine(kind, "fp16", dp=2, pipe=2), step=5, adam_step=4,
        scaler=scaler, lr_scheduler={"num_iters": 4},
    )  # fmt: skip
    files, chance = sorted(file for file in folder.glob("*mp_rank*") if file.is_file()), random.Random(kind)

    def read() -> None:
        opened = open_weights(folder).training
        assert opened is not None
        training = opened()
        assert training.scheduled >= 0
        training.scaler(LossScale())
        sum(float(tensor.double().sum()) for _, tensor in training.tensors(("exp_avg", "exp_avg_sq")))

    read()
    for n in range(count):
        file = files[n % len(files)]
        good = file.read_bytes()
        file.write_bytes(damaged(good, chance))
        error = answered(read, ValueError, OSError)
        assert error is None or str(tmp_path) in str(error), error
        file.write_bytes(good)
    read()


class Runs:
    """A pickle that calls something when it is read."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


def _hostile(mark: Path) -> dict[str, Any]:
    command = f"touch {mark}"
    return {
        "system": Runs(os.system, command),
        "eval": Runs(eval, f"__import__('os').system({command!r})"),
        "exec": Runs(exec, f"open({str(mark)!r}, 'w')"),
        "getattr": Runs(getattr, "text", "upper"),
        "open": Runs(open, str(mark), "w"),
        "within a dictionary": {"module": {"a": Runs(os.system, command)}},
        "nested": [[[[Runs(os.mkdir, str(mark))]]]],
    }


@pytest.mark.parametrize("name", list(_hostile(Path())))
@pytest.mark.parametrize("form", ["torch.save", "legacy", "plain"])
def test_a_hostile_pickle_is_refused_in_a_line_and_not_run(tmp_path: Path, name: str, form: str) -> None:
    mark, file = tmp_path / "mark", tmp_path / "mp_rank_00_model_states.pt"
    content = _hostile(mark)[name]
    if form == "plain":
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=form == "torch.save")
    error = answered(lambda: load_pickle(file), ValueError)
    assert error is not None and len(str(error).splitlines()) == 1 and str(file) in str(error)
    result = CliRunner().invoke(app, ["generate", str(tmp_path), "--prompt", "x"])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert len(result.output.strip().splitlines()) <= 3 and not mark.exists()


def test_a_tensor_without_memory_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="memory of their own"):
        load_pickle(tmp_path / "x.pt")


def test_what_is_no_file_of_torch(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
        file.writestr("x/data.pkl", b"\x80\x02" + b"(" * 100_000)
    for content in (None, b"", b"\0" * 100, b"PK\x03\x04", b"\x80\x02."):
        if content is not None:
            (tmp_path / "x.pt").write_bytes(content)
        assert answered(lambda: load_pickle(tmp_path / "x.pt"), ValueError) is not None
    with pytest.raises(OSError, match="no such file"):
        load_pickle(tmp_path)


def test_names_that_lead_out_of_the_folder(tmp_path: Path) -> None:
    """Of an index, of `latest`, of a checkpoint's files: nothing outside is read."""
    folder = hf(tmp_path / "hf")
    index = folder / "model.safetensors.index.json"
    for name in ("../x.safetensors", "/etc/passwd", "", 7, None, "a\0b"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        assert answered(lambda: open_weights(folder), ValueError) is not None
    checkpoint = ours(tmp_path / "ours")
    facts = json.loads((checkpoint / "checkpoint.json").read_text())
    del facts["checksum"], facts["checksums"]
    for name in ("../../secret", "/etc/passwd", "a\0b"):
        (checkpoint / "checkpoint.json").write_text(json.dumps({**facts, "files": {name: 1}}))
        assert answered(lambda: open_weights(checkpoint), ValueError) is not None
    folder = neox(tmp_path / "neox")
    for text in (b"", b".", b"..", b"../../etc", b"\xff\xfe\0", b"a\0b", b"/" * 5000):
        (folder / "latest").write_bytes(text)
        open_weights(folder)  # the newest that is in it


@pytest.mark.parametrize("count", [60, MANY])
def test_what_a_run_left_for_its_report(tmp_path: Path, count: int) -> None:
    config, chance = str(write_config(tmp_path)), random.Random(9)
    assert CliRunner().invoke(app, ["train", config, "train.steps=6"]).exit_code == 0
    folder = tmp_path / "run"
    files = [folder / "about.json", folder / "metrics.jsonl"]
    for n in range(count):
        file = files[n % 2]
        good = file.read_bytes()
        file.write_bytes(damaged(good, chance))
        before = (folder / "report.html").read_bytes()
        error = answered(lambda: write_report(folder), ValueError, OSError)
        assert error is None or (folder / "report.html").read_bytes() == before
        file.write_bytes(good)
    write_report(folder)


def test_numbers_that_a_run_never_writes(tmp_path: Path) -> None:
    config = str(write_config(tmp_path))
    assert CliRunner().invoke(app, ["train", config, "train.steps=3"]).exit_code == 0
    folder = tmp_path / "run"
    good = (folder / "metrics.jsonl").read_text()
    line = next(line for line in good.splitlines() if '"step"' in line)
    for name in ("step", "loss", "lr", "tokens", "seconds", "tokens_per_second", "memory_bytes", "phases", "mfu"):
        for value in (10**400, -(10**18), 1e308, float("nan"), float("inf"), "x", None, [], {"a": 1e308}, True):
            (folder / "metrics.jsonl").write_text(good + json.dumps({**json.loads(line), name: value}) + "\n")
            answered(lambda: write_report(folder), ValueError, OSError)


def test_a_gpt_neox_checkpoint_without_its_optimizer_needs_finetune(tmp_path: Path) -> None:
    """Silently at step 0, or with a new optimizer, is another training."""
    folder = neox(tmp_path / "neox")
    shutil.move(folder / "global_step0", folder / "global_step500")
    (folder / "latest").write_text("global_step500")
    small = [
        f"checkpoint.load={folder}", "train.steps=2", "model.hidden_size=16", "model.intermediate_size=32",
        "model.max_position_embeddings=32", "data.tokenizer=bytes",
    ]  # fmt: skip
    state = folder / "global_step500" / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(state, weights_only=True), "iteration": 7}, state)
    with pytest.raises(
        ValueError,
        match=r"must hold an optimizer.s state, got weights alone; set no_load_optim: true .* finetune: true",
    ):
        open_trainer(tmp_path, *small, sinks=lambda t: [])
    shutil.move(folder / "global_step500", folder / "global_step0")
    state = folder / "global_step0" / "mp_rank_00_model_states.pt"
    assert neox_checkpoint.trained_steps(folder / "global_step0") == 7
    state.unlink()
    shutil.move(folder / "global_step0", folder / "global_step500")
    with pytest.raises(ValueError, match=r"must hold mp_rank_XX_model_states.pt"):
        open_trainer(tmp_path, *small, f"checkpoint.load={folder}/global_step500", sinks=lambda t: [])


def test_finetune_takes_weights_alone(tmp_path: Path) -> None:
    """Of a run too: it begins at step 0."""
    first = open_trainer(tmp_path, "train.steps=4", sinks=lambda t: [])
    first.fit()
    first.close()
    load = f"checkpoint.load={tmp_path}/run/checkpoints"
    elsewhere = f"checkpoint.folder={tmp_path}/other"
    on = open_trainer(tmp_path, load, elsewhere, "checkpoint.finetune=true", sinks=lambda t: [])
    assert on.progress.step == 0
    for name, tensor in first.optimizer.tensors().items():
        if name.startswith("model."):
            assert torch.equal(tensor, on.optimizer.tensors()[name])
        if name.startswith("exp_avg."):
            assert not on.optimizer.tensors()[name].any()


def test_verify_names_what_is_damaged(tmp_path: Path) -> None:
    """The command, over a run and a data set."""
    with IndexedWriter(tmp_path / "data", "uint16") as writer:
        writer.add([1, 2, 3])
    checkpoint = ours(tmp_path / "run" / "checkpoints")
    words = ["verify", str(tmp_path / "run"), str(tmp_path / "data")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and result.output.count(": whole") == 2, result.output
    for file in (next(checkpoint.glob("*.safetensors")), tmp_path / "data.bin"):
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 1 and result.output.count(": whole") == 1 and f"{file}: must have" in result.output
        file.write_bytes(good)
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "none")]).exit_code == 2
    (tmp_path / "hugging-face").mkdir()
    (tmp_path / "hugging-face" / "config.json").write_text("{}")
    said = CliRunner().invoke(app, ["verify", str(tmp_path / "hugging-face")])
    assert said.exit_code == 2 and "got nothing that has checksums" in said.output.replace("\n", " ")
