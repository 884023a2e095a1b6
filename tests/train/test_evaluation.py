"""Scores of texts, beside a plain computation over each text alone; lm_eval's tasks where it is installed."""

import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.models import build, configure
from powertrain.models.generate import Sampler, generate
from powertrain.runtime import extras
from powertrain.train import ranks
from powertrain.train.checkpoint.convert import convert
from powertrain.train.checkpoint.load import load_model, open_weights
from powertrain.train.data.tokenizer import ByteTokenizer
from powertrain.train.evaluation import Scorer
from powertrain.train.reporting.metrics import JsonLines, TaskRecord, read_metrics
from powertrain.train.reporting.progress import task_line
from powertrain.train.run import start
from powertrain.train.tasks import manager_of, run_tasks
from tests.train.tiny_run import open_trainer, read

HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None
LENGTH = 24
MODELS: dict[str, dict[str, Any]] = {
    "rotary": {"parallel_residual": True}, "learned": {"position_embedding": "learned"},
    "alibi": {"position_embedding": "alibi"}, "window": {"sliding_window": 5},
}  # fmt: skip


def _model(**fields: Any) -> Any:
    sizes = {
        "architecture": "gpt_neox", "vocab_size": 256, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
        "max_position_embeddings": LENGTH, "init_method": "normal", "output_init_method": "normal", "init_std": 0.3,
    }  # fmt: skip
    model = build(configure(**{**sizes, **fields}), device="cpu")
    model.init_weights(1)
    return model.eval()


def _scorer(batch_size: int = 3, **fields: Any) -> Scorer:
    return Scorer(_model(**fields), ByteTokenizer(), batch_size=batch_size)


@torch.no_grad()
def _plain(scorer: Scorer, seen: bytes, scored: bytes) -> tuple[float, bool]:
    """Of the bytes `scored` after `seen`, in one forward, cut on the left."""
    tokens = (seen + scored)[-(LENGTH + 1) :]
    logprobs = scorer.model(torch.tensor([list(tokens[:-1])]))[0].double().log_softmax(-1)[-len(scored) :]
    wanted = torch.tensor(list(scored))
    return logprobs.gather(-1, wanted[:, None]).sum().item(), bool((logprobs.argmax(-1) == wanted).all())


@pytest.mark.parametrize("name", MODELS)
def test_loglikelihood(name: str) -> None:
    """Contexts empty, ending in spaces and too long; in batches of other lengths."""
    scorer = _scorer(**MODELS[name])
    greedy = ByteTokenizer().decode(
        generate(scorer.model, [list(b"abc")], max_new_tokens=3, sampler=Sampler(temperature=0))[0]
    )
    pairs = [
        ("a context", " ends"),
        ("spaces  ", "x"),
        ("", "begins"),
        ("long " * 9, "end"),
        ("q", "abcdefghijklmnopqrstuvwx"),
    ]
    seen = [(b"a context", b" ends"), (b"spaces", b"  x"), (b"\0", b"begins"), (b"long " * 8 + b"long", b" end"),
            (b"q", b"abcdefghijklmnopqrstuvwx")]  # fmt: skip
    if greedy.isascii() and not greedy.isspace():
        pairs.append(("abc", greedy))
        seen.append((b"abc", greedy.encode()))
    for found, (context, continuation) in zip(scorer.loglikelihood(pairs), seen, strict=True):
        expected = _plain(scorer, context, continuation)
        assert found[0] == pytest.approx(expected[0], abs=1e-4) and found[1] == expected[1]


def test_greedy_is_said() -> None:
    scorer = _scorer()
    tokens = generate(scorer.model, [[97]], max_new_tokens=2, sampler=Sampler(temperature=0))[0]
    other = [tokens[0], (tokens[1] + 1) % 256]
    assert [is_greedy for _, is_greedy in scorer.score([([97, tokens[0]], tokens), ([97, tokens[0]], other)])] == [
        True,
        False,
    ]


@pytest.mark.parametrize("length", [1, 5, LENGTH, LENGTH + 1, 3 * LENGTH - 7])
@pytest.mark.parametrize("name", ["rotary", "alibi"])
def test_loglikelihood_rolling(name: str, length: int) -> None:
    """Each token once; in windows of the model's length, the last of which sees as much as it can."""
    scorer = _scorer(**MODELS[name])
    text = bytes(torch.randint(97, 123, (length,)).tolist())
    expected = 0.0
    for begin in range(0, length, LENGTH):
        end = min(begin + LENGTH, length)
        expected += _plain(scorer, (b"\0" + text)[max(0, end - LENGTH) : begin + 1], text[begin:end])[0]
    assert scorer.loglikelihood_rolling([text.decode(), "", text.decode()]) == pytest.approx(
        [expected, 0.0, expected], abs=1e-3
    )


def test_generate_until() -> None:
    """Requests of several options, in order; contexts that are too long lose their beginning."""
    scorer = _scorer()
    contexts = ["abc", "a longer one", "x" * 40]
    room = LENGTH - 6
    tokens = [list(c.encode())[-room:] for c in contexts]
    rows = generate(scorer.model, tokens, max_new_tokens=6, sampler=Sampler(temperature=0), eod=0)
    texts = [ByteTokenizer().decode(row) for row in rows]
    stop = texts[1][2:3]
    found = scorer.generate_until([
        (contexts[0], {"until": [], "max_gen_toks": 6}),
        (contexts[1], {"until": [stop, "never"], "max_gen_toks": 6, "do_sample": False, "temperature": 1.0}),
        (contexts[2], {"max_gen_toks": 6, "until": ["", "never"]}),
    ])  # fmt: skip
    assert found == [texts[0], texts[1][: texts[1].index(stop)], texts[2]]


class _NoEnd(ByteTokenizer):
    eod = None


def test_what_cannot_be_scored_is_refused() -> None:
    scorer = _scorer()
    for ask, message in (
        (lambda: scorer.loglikelihood([("a", "")]), "continuation must have 1 to 24 tokens of its own, got 0"),
        (lambda: scorer.loglikelihood([("a", "b" * 25)]), "got 25"),
        (lambda: scorer.generate_until([("a", {"max_gen_toks": 24})]), "max_gen_toks must be in 1 to 23"),
        (lambda: scorer.generate_until([("a", {"until": ["x"]})]), "got 256"),
        (lambda: scorer.generate_until([("a", {"num_beams": 2})]), r"got \['num_beams'\]"),
        (lambda: Scorer(scorer.model, _NoEnd()).loglikelihood_rolling(["a"]), "end-of-document token"),
    ):
        with pytest.raises(ValueError, match=message):
            ask()


def test_a_task_is_a_line_everywhere(tmp_path: Path) -> None:
    record = TaskRecord(7, "lambada", {"acc": 0.5, "acc_stderr": 0.1, "perplexity": 12.0})
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.task(record)
    sink.close()
    assert read_metrics(tmp_path / "metrics.jsonl").tasks == [record]
    assert task_line(record) == "step 7: lambada acc 0.5, perplexity 12"


def test_a_task_must_be_named() -> None:
    with pytest.raises(ValueError, match="tasks must name at least one task of lm_eval, got none"):
        run_tasks(_scorer(), [])


def test_without_lm_eval_a_line_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = open_trainer(tmp_path, "train.steps=1", "evaluation.at_end=false", sinks=lambda t: [])
    trainer.fit()
    trainer.close()
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run"), "--tasks", "piqa"])
    assert result.exit_code == 2 and "needs lm_eval: pip install 'powertrain[evaluate]'" in result.output
    with pytest.raises(extras.MissingExtra, match=r"evaluation.tasks needs lm_eval"):
        start(read(tmp_path, "evaluation.tasks=[piqa]"), ranks.read_launch_env(), lambda t: [])


def test_files_of_tasks_that_lm_eval_passes_over_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", Mock(TaskManager=lambda **_: Mock(all_tasks=["piqa"])))
    (tmp_path / "mine.yml").write_text("task: mine")
    with pytest.raises(ValueError, match=r"lm_eval or in .*, got mine; .* end in \.yaml, and not .*/mine\.yml"):
        manager_of(["mine"], tmp_path)
    (tmp_path / "other.yaml").write_text("task: [other")
    with pytest.raises(ValueError, match=r"/other\.yaml:1 must be YAML, got expected"):
        manager_of(["piqa"], tmp_path)


def test_unknown_tasks_are_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ended a run at its first evaluation, with a traceback; data that is not there names the key."""
    known = Mock(return_value=Mock(all_tasks=["piqa"]))
    evaluate = Mock(side_effect=FileNotFoundError("Unable to find 'rows.jsonl'"))
    monkeypatch.setattr(extras, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "lm_eval", Mock(simple_evaluate=evaluate))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", Mock(TaskManager=known))
    message = "evaluation.tasks must be known to lm_eval, got pica; did you mean piqa?"
    with pytest.raises(ValueError, match=re.escape(message)):
        start(read(tmp_path, "evaluation.tasks=[pica]"), ranks.read_launch_env(), lambda t: [])
    result = CliRunner().invoke(app, ["lint", str(tmp_path / "tiny.yml"), "evaluation.tasks=[pica]"])
    assert result.exit_code == 2 and message in result.stderr
    monkeypatch.setattr("powertrain.train.tasks.lm_eval_model", Mock())
    trainer = open_trainer(tmp_path, "evaluation.tasks=[piqa]", sinks=lambda t: [])
    with pytest.raises(OSError, match=re.escape("evaluation.tasks (piqa): Unable to find 'rows.jsonl'")):
        trainer.evaluate_tasks()
    trainer.close()


def test_results_stay_on_the_screen_where_their_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is refused before anything is computed, a full disk is met after it."""
    monkeypatch.setattr(extras, "require", lambda *_: None)
    monkeypatch.setattr("powertrain.train.checkpoint.load.load_model", lambda *_, **__: (Mock(), Mock()))
    monkeypatch.setattr("powertrain.train.evaluation.Scorer", Mock())
    tasks = Mock(return_value={"piqa": {"acc,none": 0.5}})
    monkeypatch.setattr("powertrain.train.tasks.run_tasks", tasks)
    words = ["evaluate", str(tmp_path), "--tasks", "piqa", "--device", "cpu", "--output"]
    refused = CliRunner().invoke(app, [*words, str(tmp_path)])
    assert (refused.exit_code, refused.stderr) == (2, f"--output {tmp_path} cannot be written: Is a directory\n")
    assert not tasks.called
    full = CliRunner().invoke(app, [*words, "/dev/full"])
    assert (full.exit_code, full.stderr) == (2, "--output /dev/full cannot be written: No space left on device\n")
    assert "0.5000" in full.stdout


TASK = {
    "dataset_path": "json", "test_split": "test", "doc_to_text": "{{context}}", "doc_to_target": "{{continuation}}",
}  # fmt: skip


def _tasks(folder: Path) -> Path:
    """Tasks of three kinds over a file here."""
    folder.mkdir()
    rows = [{"context": f"line {n} of the", "continuation": " text", "choices": [" text", " lines"], "gold": n % 2,
             "text": f"line {n} of the text, of {n * n} lines"} for n in range(6)]  # fmt: skip
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = {**TASK, "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    mean = {"aggregation": "mean", "higher_is_better": True}
    kinds: dict[str, dict[str, Any]] = {
        "chosen": {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "gold",
                   "metric_list": [{"metric": "acc", **mean}]},
        "likely": {"output_type": "loglikelihood", "target_delimiter": "",
                   "metric_list": [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}]},
        "rolled": {"output_type": "loglikelihood_rolling", "doc_to_target": "{{text}}", "doc_to_text": "",
                   "metric_list": [{"metric": "bits_per_byte"}]},
        "generated": {"output_type": "generate_until", "generation_kwargs": {"until": ["o"], "max_gen_toks": 8},
                      "target_delimiter": "", "metric_list": [{"metric": "exact_match", **mean}]},
    }  # fmt: skip
    for name, kind in kinds.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": f"tiny_{name}", **common, **kind}))
    return folder


NAMES = "tiny_chosen,tiny_likely,tiny_rolled,tiny_generated"


@pytest.mark.slow
@pytest.mark.skipif(not HAS_LM_EVAL, reason="lm_eval is not installed")
def test_lm_eval_scores_a_run_and_its_export_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By our class, and by lm_eval's own of the Hugging Face export."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks = _tasks(tmp_path / "tasks")
    options = ("evaluation.tasks=[tiny_likely]", f"evaluation.tasks_folder={tasks}", "evaluation.every=20")
    model = ("model.architecture=gpt_neox", "train.steps=40", "optimizer.lr=1e-2", "evaluation.task_limit=2")
    trainer = open_trainer(tmp_path, *model, *options, sinks=lambda t: [JsonLines(tmp_path / "run" / "metrics.jsonl")])
    trainer.fit()
    trainer.close()
    found = read_metrics(tmp_path / "run" / "metrics.jsonl").tasks
    assert [record.step for record in found] == [20, 40] and found[0].metrics["perplexity"] > found[1].metrics[
        "perplexity"
    ]
    words = ["evaluate", str(tmp_path / "run"), "--tasks", NAMES, "--tasks-folder", str(tasks), "--device", "cpu"]
    result = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "results.json")])
    assert result.exit_code == 0, result.output
    ours = json.loads((tmp_path / "results.json").read_text())
    assert set(ours) == set(NAMES.split(",")) and "tiny_rolled" in result.output
    assert 0 < ours["tiny_rolled"]["bits_per_byte"] < 8 and math.isfinite(ours["tiny_likely"]["perplexity"])
    unknown = CliRunner().invoke(app, [*words[:3], "nothing", *words[4:]])
    assert unknown.exit_code == 2 and "tasks must be known to lm_eval" in unknown.output


@pytest.mark.slow
@pytest.mark.skipif(not HAS_LM_EVAL, reason="lm_eval is not installed")
def test_the_export_of_a_model_scores_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm_eval's own class over the Hugging Face folder, with a tokenizer trained here."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from powertrain.train.tasks import run_tasks

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks = _tasks(tmp_path / "tasks")
    model = ("model.architecture=gpt_neox", "train.steps=40", "optimizer.lr=1e-2", "data.tokenizer=train:320")
    trainer = open_trainer(tmp_path, *model, sinks=lambda t: [])
    trainer.fit()
    trainer.close()
    convert(open_weights(tmp_path / "run"), tmp_path / "hf", "hf", check=False)
    loaded, weights = load_model(tmp_path / "run", device="cpu")
    ours = run_tasks(Scorer(loaded, weights.open_tokenizer()), NAMES.split(","), folder=tasks)
    theirs = simple_evaluate(
        HFLM(str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=1), tasks=NAMES.split(","),
        task_manager=TaskManager(include_path=str(tasks)), bootstrap_iters=0,
    )["results"]  # fmt: skip
    for task, metrics in ours.items():
        for name, value in metrics.items():
            if "_stderr" not in name:
                assert value == pytest.approx(theirs[task][f"{name},none"], rel=1e-4), (task, name)
