"""`train(config)` from Python, one text split by tokens, traces of steps, and precision that is slow on a CPU."""

import gzip
import json
import os
import random
import socket
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch
import yaml

from powertrain.runtime import tracing
from powertrain.train import slow_precision, train
from powertrain.train.checkpoint.store import Checkpoints
from powertrain.train.config.reader import read_config, run_of
from powertrain.train.config.schema import DataConfig, DataSource, ProfileConfig, RunConfig
from powertrain.train.config.yaml_source import ConfigError
from powertrain.train.data.indexed import DocumentSlice, IndexedData, IndexedWriter
from powertrain.train.data.sources import open_data
from powertrain.train.data.tokenizer import ByteTokenizer
from powertrain.train.ranks import Ranks, RendezvousError
from powertrain.train.reporting.metrics import StepRecord
from powertrain.train.reporting.step_trace import StepTrace
from powertrain.train.trainer import Trainer
from tests.train.tiny_run import At, open_trainer, read, write_config


def test_a_missing_wandb_is_said_before_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"logging\.wandb must be null where wandb is not installed"):
        train(write_config(tmp_path), ["logging.wandb={project: x}", "data.train=not-there.txt"], quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["path", "dictionary", "RunConfig"])
def test_train_from_each_kind_of_config(kind: str, tmp_path: Path) -> None:
    file = write_config(tmp_path)
    run = read_config([file], ["train.steps=3", "logging.report=false"])
    if kind == "path":
        result = train(file, ["train.steps=3", "logging.report=false"], quiet=True)
    elif kind == "dictionary":
        result = train({**run.config.model_dump(mode="json")}, ["train.seed=1234"], quiet=True)
    else:
        result = train(run.config, quiet=True)
    assert (result.steps, result.finished, result.folder) == (3, True, tmp_path / "run")
    assert result.loss is not None and 0 < result.loss < 8
    assert 0 < result.evaluations["validation"] < 8
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step_00000003"
    again = train(file, ["train.steps=4", "logging.report=false"], quiet=True)  # goes on
    assert again.steps == 4 and json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])["step"] == 1
    with pytest.raises(ValueError, match="--fresh"):
        train(file, fresh=True, quiet=True)


def test_a_run_that_does_not_begin_leaves_its_process_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run of the process ended with "trying to initialize the default process group twice"."""
    train(write_config(tmp_path), ["train.steps=1", "logging.report=false"], quiet=True)
    left: list[Ranks] = []
    released: list[Checkpoints] = []
    monkeypatch.setattr("powertrain.train.run.disconnect", left.append)
    monkeypatch.setattr(Checkpoints, "release", lambda self: released.append(self))
    with pytest.raises(ValueError, match=r"model\.num_layers must be 2"):
        train(tmp_path / "tiny.yml", ["model.num_layers=3"], quiet=True)
    assert left == [Ranks(torch.device("cpu"))] and len(released) == 1
    left.clear()
    with pytest.raises(ValueError, match="--fresh"):
        train(tmp_path / "tiny.yml", fresh=True, quiet=True)
    assert left == [Ranks(torch.device("cpu"))]


def test_quickstart_is_a_config_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anywhere; a file of that name comes first, a folder does not hide it."""
    monkeypatch.chdir(tmp_path)
    assert read_config(["quickstart"]).config.train.steps == 180
    (tmp_path / "quickstart").mkdir()
    assert read_config(["quickstart"]).config.train.steps == 180
    (tmp_path / "quickstart.yml").write_text(write_config(tmp_path).read_text())
    assert read_config(["quickstart"]).config.train.steps == 12


def test_quickstart_in_another_folder_is_another_run() -> None:
    """logging.folder alone: a second start tells users that it begins anew."""
    config = read_config(["quickstart"], ["logging.folder=runs/deeper"]).config
    assert str(config.checkpoint_folder()) == "runs/deeper/checkpoints"
    assert str(read_config(["quickstart"]).config.checkpoint_folder()) == "runs/quickstart/checkpoints"


def test_a_port_that_is_taken_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", **where}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RendezvousError, match=rf"cannot open 127.0.0.1:{port} .* which another process has open"):
            train(write_config(tmp_path), quiet=True)


def test_in_inference_mode_and_beside_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, said = write_config(tmp_path), []

    def another(*_: object) -> int:
        with pytest.raises(RuntimeError) as caught:
            train(file, quiet=True)
        said.append(str(caught.value))
        return 0

    overrides = ["train.steps=2", "logging.report=false", "evaluation.at_end=false"]
    with monkeypatch.context() as patched, torch.inference_mode():
        patched.setattr("powertrain.train.api.about", another)
        patched.setattr("powertrain.train.api.open_sinks", lambda *_: [])
        assert train(file, overrides, quiet=True).steps == 2
    assert said == ["train: another run is under way in this process; a process has one at a time"]
    with torch.no_grad():
        assert train(file, [*overrides, "train.steps=3"], quiet=True).steps == 3


def test_what_train_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config must be a path, a dictionary"):
        train(7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"train.stepz: unknown key, did you mean steps|train.stepz"):
        train({"model": "pythia-70m", "data": {"train": "quickstart"}, "train": {"stepz": 1, "seq_length": 8}})
    with pytest.raises(ConfigError, match="overrides must be empty"):
        train(read_config([write_config(tmp_path)]).config, ["train.steps=1"])
    file = write_config(tmp_path)
    for config in (file, {"model": "pythia-70m"}, read_config([file]).config):
        with pytest.raises(ConfigError, match=r"overrides must be a list of key=value words, got 'train\.steps=3'"):
            train(config, "train.steps=3")
    with pytest.raises(ConfigError, match="overrides must be key=value words, got 3"):
        train(file, ["train.steps=3", 3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"paths must be a list of config files, got 'run\.yml'"):
        read_config("run.yml")


def test_names_that_the_system_refuses_are_named_with_their_key(tmp_path: Path) -> None:
    """They were raw OSErrors."""
    file, run = write_config(tmp_path), tmp_path / "run"
    keys = ("logging.folder", "checkpoint.folder", "checkpoint.load", "data.train", "data.validation", "data.tokenizer")
    for key in keys:
        words = rf"{key}[.0-9a-z]* must be a path that the system takes as a name, got '?xx+"
        with pytest.raises(ConfigError, match=words):
            train(file, [f"{key}={'x' * 5000}"], quiet=True)
    with pytest.raises(
        ConfigError, match=r"config: logging\.folder must be a path without null characters, got 'a\\x00b'"
    ):
        train({"model": "pythia-70m", "data": {"train": "quickstart"}, "logging": {"folder": "a\0b"}})
    for name in ("metrics.jsonl", "about.json"):
        (run / name).mkdir(parents=True)
        words = rf"^logging\.folder must name a folder that can be written, got {run}/{name} \(Is a directory\)"
        with pytest.raises(ValueError, match=words):
            train(file, quiet=True)
        (run / name).rmdir()


def test_a_dictionary_s_errors_say_config_and_its_paths_may_be_of_any_kind(tmp_path: Path) -> None:
    config = yaml.safe_load(write_config(tmp_path).read_text())
    with pytest.raises(ConfigError, match=r"^config: logging\.folder must be text .*, got '3'$"):
        run_of({**config, "logging": {"folder": 3}})
    with pytest.raises(ConfigError, match=r"^command line: train\.steps must be greater than 0, got '0'$"):
        run_of(config, ["train.steps=0"])
    folder = PurePosixPath("~/runs")
    read = run_of({**config, "logging": {"folder": folder}, "data": {"train": [tmp_path / "a", {"path": folder}]}})
    home = os.path.expanduser("~/runs")
    assert read.config.logging.folder == home
    assert [source.path for source in read.config.data.train] == [str(tmp_path / "a"), home]
    assert run_of({**config, "data": {"train": tmp_path}}).config.data.train[0].path == str(tmp_path)


def test_one_text_is_split_by_tokens(tmp_path: Path) -> None:
    """Sizes from one token on, any split: the parts follow each other and hold every token once."""
    random.seed(0)
    for length in (1, 2, 3, 7, 64, 1000, random.randrange(10_000)):
        text = tmp_path / f"{length}.txt"
        text.write_bytes(bytes(random.randrange(97, 123) for _ in range(length)))
        for split in ("969, 30, 1", "1,1", "80,20,0", "1"):
            config = DataConfig(train=(DataSource(path=str(text)),), split=split, num_workers=0)
            data = open_data(
                config, seq_length=4, num_samples=(3, 2, 2), seed=0, tokenizer=ByteTokenizer(), cache=tmp_path / "cache"
            )
            parts = [part for part in (data.train, data.validation, data.test) if part is not None]
            held = [part.data for part in parts]  # type: ignore[union-attr]
            assert all(isinstance(each, DocumentSlice) for each in held)
            values = np.concatenate([each.get(0, 0, int(each.sizes[0])) for each in held])
            assert values.tolist() == [*text.read_bytes(), 0]
            assert len(parts) == (1 if split == "1" else len(parts)) and parts[0].sample(0).tokens.shape == (4,)
            if length >= 1000 and split != "1":
                assert data.validation is not None


def test_a_data_set_of_one_document_is_not_split(tmp_path: Path) -> None:
    """GPT-NeoX has no validation there, and its order of samples is kept."""
    with IndexedWriter(tmp_path / "one", "uint16") as writer:
        writer.add(list(range(100)))
    config = DataConfig(train=(DataSource(path=str(tmp_path / "one")),), num_workers=0)
    data = open_data(config, seq_length=4, num_samples=(3, 2, 2), seed=0, tokenizer=ByteTokenizer(), cache=tmp_path)
    assert data.validation is None and isinstance(data.train.data, IndexedData)  # type: ignore[attr-defined]


def test_ctrl_c_saves(tmp_path: Path) -> None:
    """What the first page says of checkpoints: they are there after an early end too."""

    def stop_at_2(trainer: Trainer) -> list[At]:
        return [At(2, lambda: setattr(trainer, "should_stop", True))]

    trainer = open_trainer(tmp_path, "train.steps=9", sinks=stop_at_2)
    step = trainer.fit().step
    trainer.close()
    assert 2 <= step < 9 and (tmp_path / f"run/checkpoints/step_{step:08}/checkpoint.json").is_file()


@pytest.mark.parametrize("start, steps, last", [(1, 1, 1), (2, 3, 4), (4, 9, 5), (9, 0, None)])
def test_trace_of_steps(start: int, steps: int, last: int | None, tmp_path: Path) -> None:
    notes: list[str] = []

    class Notes(At):
        def note(self, text: str) -> None:
            notes.append(text)

        def step(self, record: StepRecord) -> None: ...

    words = [f"train.profile.start={start}", f"train.profile.steps={steps}", "train.steps=5", "checkpoint.save=false"]
    trainer = open_trainer(tmp_path, *words, sinks=lambda trainer: [Notes(0, lambda: None)])
    trainer.fit()
    trainer.close()
    files = sorted((tmp_path / "run" / "profile").glob("*")) if (tmp_path / "run" / "profile").exists() else []
    if last is None:
        assert not files
        return
    (file,) = files
    assert file.name == f"steps_{start}-{last}_rank_0.json.gz" and any(str(file) in note for note in notes)
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


def test_a_trace_behind_the_last_step_is_refused(tmp_path: Path) -> None:
    words = [r"tiny\.yml:\d+|command line", r"train\.profile\.start must be at most train\.steps \(5\), got 6"]
    overrides = ("train.profile.start=6", "train.profile.steps=2", "train.steps=5")
    with pytest.raises(ConfigError, match=rf"({words[0]}).*{words[1]}"):
        read(tmp_path, *overrides)
    config = read(tmp_path, "train.steps=7", *overrides[:2]).config
    short = config.model_copy(update={"train": config.train.model_copy(update={"steps": 5})})
    with pytest.raises(ConfigError, match=words[1]):
        run_of(short)
    # a checkpoint's config of an earlier version is read
    assert RunConfig.model_validate(short.model_dump(mode="json")) == short


def test_a_trace_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    notes: list[str] = []
    trace = StepTrace(ProfileConfig(start=1, steps=1), tmp_path / "file" / "in", torch.device("cpu"), 0, notes.append)
    with trace.step(1):
        torch.ones(2) + 1
    assert len(notes) == 1 and notes[0].startswith("train.profile: no trace")


@pytest.mark.parametrize("ratio, warns", [(3.0, True), (1.0, False)])
def test_slow_precision_is_said(ratio: float, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_precision, "_seconds", lambda dtype: 1.0 if dtype == torch.float32 else ratio)
    said: list[str] = []
    monkeypatch.setattr(tracing, "warn", said.append)
    slow_precision.warn_if_slow("fp32", torch.device("cpu"))
    slow_precision.warn_if_slow("bf16", torch.device("cuda"))
    assert not said
    slow_precision.warn_if_slow("bf16", torch.device("cpu"))
    assert bool(said) == warns and all("train.precision=fp32" in text for text in said)
