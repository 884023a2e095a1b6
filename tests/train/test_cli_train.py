"""`powertrain train` and what it cannot begin with: one line that names it, and no traceback."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.train.checkpoint.load import open_weights
from powertrain.train.config.schema import DataConfig
from powertrain.train.data.indexed import IndexedWriter
from powertrain.train.ranks import Ranks
from powertrain.train.reporting.metrics import read_metrics
from powertrain.train.trainer import Trainer
from tests.train.tiny_run import MICRO, open_trainer, write_config


def _train(folder: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train", str(write_config(folder)), "logging.report=false", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize(
    "word, said",
    [
        ("data.train={0}/no.jsonl", "got {0}/no.jsonl (no such file or folder"),
        ("data.train={0}/empty", "{0}/empty: must hold a file that is not hidden"),
        ("data.train={0}/rows.csv", "{0}/rows.csv: must be text, jsonl or parquet, got csv"),
        ("data.validation={0}/rows.JSON.gz", "{0}/rows.JSON.gz: must be text, jsonl or parquet, got json"),
        ("data.train={0}/text.txt.gz", "{0}/text.txt.gz: must be unpacked first, got .gz; jsonl alone is read as .gz"),
        ("data.train={0}/pipe", "{0}/pipe: must be a file or a folder, got a pipe, which cannot be read twice"),
        ("data.tokenizer={0}/no.json", "{0}/no.json"),
        ("data.split=0,0,0", "data.split must be one to three shares"),
        ("train.seed=-1", "train.seed must be greater than or equal to 0, got '-1'"),
        ("optimizer.betas=[0.9,1.5]", "optimizer.betas must be in [0, 1), got [0.9, 1.5]"),
        ("optimizer.eps=1e-60", "optimizer.eps must be at least 1.17549e-38, float32's smallest, got 1e-60"),
        ("optimizer.lr=inf", "optimizer.lr must be a finite number"),
        # an OverflowError as soon as there were two ranks
        ("parallel.timeout_minutes=1e300", "parallel.timeout_minutes must be less than or equal to 1000000, got"),
        ("train.loss_scale.static=0", "train.loss_scale.static must be greater than 0"),
        ("model.vocab_size=100", "model.vocab_size must be at least the tokenizer's 256, got 100"),
        (
            "logging.folder={0}/text.jsonl/run checkpoint.save=false",
            "logging.folder must name a folder that can be written, got {0}/text.jsonl (Not a directory)",
        ),
        ("checkpoint.load={0}/no", "checkpoint.load must name a checkpoint to begin with, got {0}/no (no such folder)"),
        ("checkpoint.load={0}/empty checkpoint.finetune=true", "got {0}/empty (no checkpoint there); null: random"),
        (
            "checkpoint.folder={0}/link",
            "checkpoint.folder must name a folder that can be written, got {0}/link (a",
        ),
        (
            "checkpoint.load={0}/empty checkpoint.folder={0}/text.jsonl",
            "must name a folder that can be written, got {0}/text.jsonl (Not a directory)",
        ),
    ],
)
def test_what_cannot_begin_ends_with_2(word: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("gone")
    os.mkfifo(tmp_path / "pipe")
    for name in ("rows.csv", "rows.JSON.gz", "text.txt.gz"):
        (tmp_path / name).write_text("{}")
    code, output = _train(tmp_path, *word.format(tmp_path).split())
    assert code == 2 and said.format(tmp_path) in output.replace("\n", "")


def test_an_override_may_be_longer_than_a_files_name(tmp_path: Path) -> None:
    """`data.train=` with a list of many files; a run that saves where it loads begins with random weights."""
    sources = ", ".join([f"{tmp_path}/text.jsonl"] * 20)
    load = f"checkpoint={{load: {tmp_path}/c, folder: {tmp_path}/c}}"
    code, output = _train(tmp_path, f"data.train=[{sources}]", "train.steps=1", load)
    assert code == 0 and "the run starts at step 0" in output, output


def test_generate_says_what_is_wrong_and_nothing_else(tmp_path: Path) -> None:
    assert _train(tmp_path, "train.steps=1")[0] == 0
    for words, said in (
        (["--prompt", "long " * 20], "prompts must have fewer than model.max_position_embeddings (64) tokens, got 100"),
        (["--prompt", "abc", "--max-new-tokens", "62"], "max_new_tokens must be at most 61 after a prompt of 3 tokens"),
        (["--prompt", "abc", "--device", "cuda:77"], "--device must be cpu or one of the"),
        (["--prompt", "abc", "--device", "cuda:x"], "--device must be cpu or one of the"),
        (["--prompt", "abc", "--device", "tpu"], "--device must be cpu or one of the"),
    ):
        result = CliRunner().invoke(app, ["generate", str(tmp_path / "run"), *words])
        assert result.exit_code == 2 and result.output.startswith(said), result.output


def test_data_that_changed_since_the_checkpoint_is_said(tmp_path: Path) -> None:
    """A line that reads as long as before, too; and nothing is said where nothing changed."""
    config = write_config(tmp_path)
    words = ["train", str(config), "logging.report=false"]
    first = CliRunner().invoke(app, [*words, "train.steps=2"])
    same = CliRunner().invoke(app, [*words, "train.steps=4"])
    text = tmp_path / "text.jsonl"
    text.write_text(text.read_text().replace("line 7 ", "word 7 "))
    changed = CliRunner().invoke(app, [*words, "train.steps=6"])
    assert [result.exit_code for result in (first, same, changed)] == [0, 0, 0], changed.output
    said = "data.train is not what the checkpoint was trained on"
    assert said not in first.output + same.output
    assert said in " ".join(changed.output.split())


def test_a_bad_loss_is_said_once(tmp_path: Path) -> None:
    code, output = _train(tmp_path, "optimizer.lr=1e20")
    assert code == 1 and output.count("training stopped at step 2: loss") == 1, output


def test_a_run_keeps_its_tokenizer(tmp_path: Path) -> None:
    """train:SIZE on text that has changed would be another one; without the text, none."""
    config = write_config(tmp_path)
    words = ["train", str(config), "logging.report=false", "data.tokenizer=train:300"]
    assert CliRunner().invoke(app, [*words, "train.steps=1"]).exit_code == 0
    ids = open_weights(tmp_path / "run").open_tokenizer().encode("line 7 of the text")
    assert len(ids) < len("line 7 of the text")
    text = tmp_path / "text.jsonl"
    text.write_text(text.read_text().replace("of the", "xy zzz"))
    changed = CliRunner().invoke(app, [*words, "train.steps=2"])
    assert changed.exit_code == 0, changed.output
    other = CliRunner().invoke(app, [*words[:-1], "data.tokenizer=train:299", "train.steps=3"])
    said = "data.tokenizer must be train:SIZE with at least the 300 ids of the tokenizer in"
    assert other.exit_code == 2 and said in other.output

    file = tmp_path / "run/checkpoints/step_00000002/tokenizer.json"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'"of"', b'"fo"').replace(b"endoftext", b"endoftxet"))
    flipped = CliRunner().invoke(app, [*words, "train.steps=3"])
    assert flipped.exit_code == 2 and "tokenizer.json: must have the CRC-32" in flipped.output, flipped.output
    file.write_bytes(whole)

    text.unlink()
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert open_weights(moved).open_tokenizer().encode("line 7 of the text") == ids
    answer = CliRunner().invoke(app, ["generate", str(moved), "--prompt", "line", "--max-new-tokens", "2"])
    assert answer.exit_code == 0 and answer.output.startswith("line"), answer.output
    # of an earlier version, which kept none
    without = replace(open_weights(moved), tokenizer=DataConfig(train=str(text), tokenizer="train:300"))
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer, and the data.tokenizer of its run.*text"):
        without.open_tokenizer()
    (moved / "checkpoints/step_00000002/tokenizer.json").unlink()
    damaged = CliRunner().invoke(app, ["verify", str(moved)])
    assert damaged.exit_code == 1 and "tokenizer.json: must have" in damaged.output


def test_another_models_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    """Two heads or four: the weights have the same shapes."""
    assert _train(tmp_path, "train.steps=1")[0] == 0
    code, output = _train(tmp_path, "model.num_heads=4")
    assert code == 2 and f"model.num_heads must be 2 as in {tmp_path}/run/checkpoints/step_00000001, got 4" in output
    code, output = _train(tmp_path, "model.hidden_size=64")
    assert code == 2 and "model.hidden_size must be 32 as in" in output


def test_settings_that_changed_are_said(tmp_path: Path) -> None:
    assert _train(tmp_path, "train.steps=1")[0] == 0
    code, output = _train(tmp_path, "train.steps=2", "train.micro_batch_size=8", "logging.every=1")
    found = tmp_path / "run/checkpoints/step_00000001"
    changed = "train.steps 1 -> 2, train.micro_batch_size 4 -> 8"
    assert code == 0 and f"resumed after step 1 from {found}, with other settings: {changed}" in output
    assert read_metrics(tmp_path / "run/metrics.jsonl").steps[-1].tokens == (4 + 8) * 32
    assert "other settings" not in _train(tmp_path, "train.steps=3", "--smoke")[1]


def test_another_order_of_the_samples_is_said(tmp_path: Path) -> None:
    """The list of changed settings was all, as of a learning rate."""
    assert _train(tmp_path, "train.steps=1")[0] == 0
    code, output = _train(tmp_path, "train.steps=2", "train.seed=7", "train.seq_length=16", "optimizer.lr=0.1")
    settings = f"train.seq_length 32 -> 16, train.seed 1234 -> 7 since {tmp_path}/run/checkpoints/step_00000001"
    assert code == 0 and f"{settings}: samples come in another order from sample 4 on" in output


def test_magnitudes_are_not_dropped(tmp_path: Path) -> None:
    assert _train(tmp_path, "train.steps=1", "train.lora={rank: 2, dora: true}")[0] == 0
    code, output = _train(tmp_path, "train.steps=2", "train.lora.rank=2")
    assert code == 2 and "train.lora.dora must be true as in" in output


def test_another_vocabulary_is_named(tmp_path: Path) -> None:
    assert _train(tmp_path, "train.steps=1")[0] == 0
    code, output = _train(tmp_path, "train.steps=2", "model.vocab_size=512")
    assert (
        code == 2 and f"model.vocab_size must be 256 as in {tmp_path}/run/checkpoints/step_00000001, got 512" in output
    )


def test_rows_that_padded_the_vocabulary_stay(tmp_path: Path) -> None:
    """They were made for other tensor ranks, whose number multiplies data.vocab_multiple: 512 with it, 256 without."""
    assert _train(tmp_path, "train.steps=1", "data.vocab_multiple=512")[0] == 0
    code, output = _train(tmp_path, "train.steps=2")
    assert code == 0 and "resumed after step 1" in output
    again = [f"{key}={tmp_path}/again" for key in ("logging.folder", "checkpoint.folder")]
    weights = (f"checkpoint.load={tmp_path}/run", "checkpoint.finetune=true")
    assert _train(tmp_path, "train.steps=1", *weights, *again)[0] == 0
    for checkpoint in (tmp_path / "run/checkpoints/step_00000002", tmp_path / "again/step_00000001"):
        assert json.loads((checkpoint / "checkpoint.json").read_text())["config"]["model"]["vocab_size"] == 512


@pytest.mark.parametrize(
    "before, after, said",
    [
        (
            "kind: sgd",
            "kind: adamw",
            "optimizer.kind must be sgd as in {}, which holds no exp_avg, exp_avg_sq, got adamw",
        ),
        ("kind: lion", "kind: adamw", "optimizer.kind must be lion as in {}, which holds no exp_avg_sq, got adamw"),
        (
            "kind: adamw",
            "kind: lion",
            "optimizer.kind must be adamw as in {}, which holds exp_avg, exp_avg_sq, got lion",
        ),
        ("kind: sgd", "kind: sgd, momentum: 0.9", "optimizer.momentum must be 0.0 as in {}, which holds no momentum_"),
    ],
)
def test_an_optimizer_without_its_state_is_named(before: str, after: str, said: str, tmp_path: Path) -> None:
    assert _train(tmp_path, "train.steps=1", f"optimizer={{{before}}}")[0] == 0
    code, output = _train(tmp_path, "train.steps=2", f"optimizer={{{after}}}")
    checkpoint = tmp_path / "run/checkpoints/step_00000001"
    assert code == 2 and said.format(checkpoint) in output and "checkpoint.load_optimizer: false" in output
    folder = f"{tmp_path}/other"
    words = (f"checkpoint.load={tmp_path}/run", "checkpoint.load_optimizer=false", f"logging.folder={folder}")
    code, output = _train(tmp_path, "train.steps=2", f"optimizer={{{after}}}", f"checkpoint.folder={folder}", *words)
    assert code == 0, output


@pytest.mark.parametrize("finetune", [False, True])
def test_learned_positions_of_another_length_are_named(finetune: bool, tmp_path: Path) -> None:
    model = ("model.architecture=gpt_neox", "model.position_embedding=learned", "evaluation.at_end=false")
    assert _train(tmp_path, "train.steps=1", *model)[0] == 0
    words: list[str] = []
    if finetune:
        words = [f"checkpoint.load={tmp_path}/run", "checkpoint.finetune=true", f"logging.folder={tmp_path}/other",
                 f"checkpoint.folder={tmp_path}/other"]  # fmt: skip
    code, output = _train(tmp_path, "train.steps=2", *model, "model.max_position_embeddings=128", *words)
    assert code == 2 and "model.max_position_embeddings must be 64 as in" in output and "got 128" in output


@pytest.mark.parametrize("way", ["folder", "load"])
def test_a_run_goes_on_with_a_smaller_batch(way: str, tmp_path: Path) -> None:
    """Behind it are more samples than its steps have now."""
    # more than an epoch of the data
    assert _train(tmp_path, "train.steps=5", "train.micro_batch_size=64", "evaluation.at_end=false")[0] == 0
    words = ["train.steps=7", "train.micro_batch_size=1", "evaluation.at_end=false"]
    if way == "load":
        other = f"{tmp_path}/other"
        words += [f"checkpoint.load={tmp_path}/run", f"checkpoint.folder={other}", f"logging.folder={other}"]
    code, output = _train(tmp_path, *words)
    assert code == 0, output
    folder = tmp_path / ("run" if way == "folder" else "other")
    assert read_metrics(folder / "metrics.jsonl").steps[-1].tokens == (5 * 64 + 2) * 32


@pytest.mark.parametrize("before, after", [("fp32", "fp16"), ("bf16", "fp16"), ("fp16", "fp32")])
def test_another_precision_goes_on(before: str, after: str, tmp_path: Path) -> None:
    assert _train(tmp_path, "train.steps=1", f"train.precision={before}")[0] == 0
    code, output = _train(tmp_path, "train.steps=2", f"train.precision={after}")
    assert code == 0 and f"train.precision {before} -> {after}" in " ".join(output.split())


@pytest.mark.parametrize(
    "before, after, got", [([], ["train.lora.rank=2"], "rank 2"), (["train.lora.rank=2"], [], "null")]
)
def test_adapters_are_not_resumed_without_them(before: list[str], after: list[str], got: str, tmp_path: Path) -> None:
    assert _train(tmp_path, "train.steps=1", *before)[0] == 0
    code, output = _train(tmp_path, "train.steps=2", *after)
    said = f"train.lora must be as in {tmp_path}/run/checkpoints/step_00000001, which holds"
    assert code == 2 and said in output and f", got {got}; another logging.folder" in output


def test_adapters_of_other_layers_are_not_left_out(tmp_path: Path) -> None:
    assert _train(tmp_path, "train.steps=1", "train.lora.rank=2")[0] == 0
    code, output = _train(tmp_path, "train.steps=2", "train.lora={rank: 2, targets: [attention.qkv]}")
    found = f"{tmp_path}/run/checkpoints/step_00000001"
    assert code == 2 and f"train.lora.targets must be null as in {found}, got [attention.qkv]; another" in output
    code, output = _train(tmp_path, "train.steps=2", "train.lora={rank: 2, alpha: 80}")
    assert code == 2 and "train.lora.alpha must be" in output and "got 80.0; another" in output
    for words, said in (
        ("rank: 4", "train.lora.rank must be 2"),
        ("rank: 2, dora: true", "train.lora.dora must be false"),
    ):
        code, output = _train(tmp_path, "train.steps=2", f"train.lora={{{words}}}")
        assert code == 2 and f"{said} as in {found}, got" in output
    assert _train(tmp_path, "train.steps=2", "train.lora.rank=2")[0] == 0


def test_what_does_not_go_together_ends_with_2(tmp_path: Path) -> None:
    code, output = _train(tmp_path, "train.batch_invariant=true", "train.precision=bf16", "fp8.recipe=row")
    assert code == 2 and "train.batch_invariant must be false with fp8.recipe row" in " ".join(output.split())


@pytest.mark.parametrize("steps", [2, 3])
def test_no_more_steps_than_the_checkpoint_has(steps: int, tmp_path: Path) -> None:
    assert _train(tmp_path, "train.steps=3")[0] == 0
    code, output = _train(tmp_path, f"train.steps={steps}")
    said = f"no step was left: the checkpoint is of step 3, and train.steps is {steps}; more steps go on from there"
    assert code == 0 and said in output
    assert [f.name for f in (tmp_path / "run/checkpoints").glob("step_*")] == ["step_00000003"]


def test_the_last_line_is_a_command_that_works(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    code, output = _train(tmp_path, "train.steps=1", f"checkpoint.folder={elsewhere}")
    assert code == 0 and f"powertrain generate {elsewhere} --prompt" in output
    words = ["generate", str(elsewhere), "--prompt", "def main(", "--max-new-tokens", "2"]
    assert CliRunner().invoke(app, words).exit_code == 0
    code, output = _train(
        tmp_path, "train.steps=1", "checkpoint.folder=null", "checkpoint.save=false", f"logging.folder={tmp_path}/other"
    )
    assert code == 0 and "powertrain generate" not in output


def test_a_test_set_is_looked_at_once_at_the_end(tmp_path: Path) -> None:
    held_out = ["data.validation={0}/text.jsonl", "data.test={0}/text.jsonl", "evaluation.every=2", "train.steps=4"]
    code, _ = _train(tmp_path, *(word.format(tmp_path) for word in held_out))
    seen = [(r.step, r.name) for r in read_metrics(tmp_path / "run/metrics.jsonl").evaluations]
    assert code == 0 and seen == [(2, "validation"), (4, "validation"), (4, "test")]


def test_the_test_part_of_a_split_is_looked_at_once_at_the_end(tmp_path: Path) -> None:
    """Its first samples, however evaluations of validation advance."""
    options = ("data.split=60,20,20", "evaluation.every=2", "evaluation.steps=1", "evaluation.advance=true")
    assert _train(tmp_path, *options, "train.steps=4")[0] == 0
    seen = read_metrics(tmp_path / "run/metrics.jsonl").evaluations
    assert [(r.step, r.name) for r in seen] == [(2, "validation"), (4, "validation"), (4, "test")]
    trainer = open_trainer(tmp_path, *options, "train.steps=4", sinks=lambda t: [])
    assert trainer.data.test is not None
    weights = [trainer._loss(batch) for batch in trainer._batches(trainer.data.test, 0, MICRO)]
    assert len(weights) == 1 and weights[0].item() == pytest.approx(seen[-1].loss, rel=1e-6)
    trainer.close()
    assert "no document is left for test" not in _train(tmp_path, "train.steps=5")[1]


def test_a_sample_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        writer.add(np.arange(100, 400, dtype=np.uint16))
    code, output = _train(tmp_path, f"data.train={tmp_path}/data", "data.split=1,0,0")
    assert code == 1 and "cannot be read" in output and "256" in output


def test_any_seed_of_32_bits(tmp_path: Path) -> None:
    """A date is one."""
    assert _train(tmp_path, "train.steps=1", "train.seed=4294967295")[0] == 0


def test_a_batch_without_a_counted_label_changes_nothing_but_the_decay(tmp_path: Path) -> None:
    trainer = open_trainer(tmp_path, "optimizer.weight_decay=0", sinks=lambda t: [])
    before = {name: t.clone() for name, t in trainer.optimizer.tensors().items() if name.startswith("model.")}
    batch = next(trainer._stream())
    loss = trainer._forward_backward([batch._replace(labels=torch.full_like(batch.labels, -100))])
    stepped = trainer.optimizer.step(1e-3)
    assert loss[0] == 0 and stepped.grad_norm == 0 and not stepped.skipped
    for name, t in before.items():
        assert torch.equal(trainer.optimizer.tensors()[name], t), name
    trainer.close()


def test_skipped_steps_do_not_count_for_spikes(tmp_path: Path) -> None:
    """A loss that is not finite is no number to take a median of."""
    trainer = open_trainer(
        tmp_path, "train.precision=fp16", "train.loss_scale.initial_power=40", "train.steps=6", "checkpoint.every=0",
        sinks=lambda t: [],
    )  # fmt: skip
    trainer.fit()
    assert not trainer._spikes._losses  # all were skipped
    trainer.close()


def test_a_signal_ends_the_smoke_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Trainer.fit

    def asked(self: Trainer) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return fit(self)

    monkeypatch.setattr(Trainer, "fit", asked)
    code, output = _train(tmp_path, "--smoke")
    assert code == 1 and "the smoke test did not finish: SIGTERM ended it" in output and "passed" not in output


@pytest.mark.parametrize("at", ["start", "step"])
def test_out_of_memory_is_no_traceback(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr(Trainer, "_forward_backward" if at == "step" else "__init__", full)
    code, output = _train(tmp_path)
    assert code == (1 if at == "step" else 2)
    assert "out of memory: " in output and "a smaller train.micro_batch_size" in " ".join(output.split())


def test_a_rank_lost_before_the_first_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others ended with gloo's "Connection closed by peer" under a traceback."""

    told: list[str] = []
    peers: Any = SimpleNamespace(
        gone=lambda: ["rank 1"], reported_failure=lambda: None, broadcast_failure=told.append, close=lambda: None,
        wait_until_heard=lambda: None,
    )  # fmt: skip

    def lost(*_: Any) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:45242")

    alone = Ranks(torch.device("cpu"), peers=peers)
    monkeypatch.setattr("powertrain.train.run.connect", lambda *_: alone)
    monkeypatch.setattr("powertrain.train.run.open_run_data", lost)
    code, output = _train(tmp_path)
    assert code == 2 and told
    assert "rank 0: training cannot go on: rank 1 is gone: look at its output" in output
