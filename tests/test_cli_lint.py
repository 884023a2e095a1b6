"""`powertrain lint` and `powertrain prebuild run.yml`: what can be known of a run without running it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.models import build
from powertrain.runtime.target import Target
from powertrain.train.config.reader import read_config
from powertrain.train.config.yaml_source import ConfigError
from powertrain.train.lint import lint, memory_of, record_step
from powertrain.train.mesh_shape import fewest_ranks
from powertrain.train.optim import DTYPES

ROOT = Path(__file__).parents[1]
OURS = str(ROOT / "tests/train/fixtures/ours.yml")
QUIRKS = str(ROOT / "tests/train/fixtures/every_quirk.yml")
NEOX = [str(ROOT / f"configs/neox/{name}.yml") for name in ("125M", "local_setup")]


def _run(*arguments: str, files: bool = False) -> tuple[int, str]:
    """The configs of the repository name files that are not here."""
    result = CliRunner().invoke(app, ["lint", *arguments, *([] if files else ["--no-files"])], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_gpt_neox_config() -> None:
    code, output = _run(*NEOX, "--arch", "A100", "--arch", "H100")
    assert code == 0
    for words in (
        "GPT-NeoX config (no section `model:`)",
        "162,322,944 parameters",
        "layers.*.attention.qkv.weight",
        "nothing is built",
        "A100 (sm_80, 37.3 GiB)",
        "kernels to compile: norm_fwd_kernel",
        "attention: ",
    ):
        assert words in output, words


def test_what_a_gpu_cannot_do() -> None:
    code, output = _run(OURS, "train.precision=bf16", "--arch", "RTX 2080")
    assert code == 1 and "RTX 2080 has no bfloat16 arithmetic" in output and "reaches no tensor cores" in output
    code, output = _run(*NEOX, "train_micro_batch_size_per_gpu=64", "checkpoint_activations=false", "--arch", "T4")
    assert code == 1 and "are needed, T4 has 14.9 GiB: train.activation_checkpointing full would fit" in output
    code, output = _run(*NEOX, "num_layers=400", "--arch", "T4")
    assert code == 1 and "shard over more GPUs" in output


def test_mistakes_end_with_2() -> None:
    code, output = _run(OURS, "train.stepz=3")
    assert code == 2 and "command line: train.stepz: unknown key; did you mean steps" in output
    code, output = _run(QUIRKS, "--strict", "--world-size", "2")
    assert code == 2 and "would be ignored (--strict)" in output
    code, output = _run(OURS, "--arch", "RTX 3090 Super")
    assert code == 2 and "RTX 3090" in output
    code, output = _run(OURS, "--format", "gpt_neox")
    assert code == 2 and "model: unknown key" in output


def test_every_kernel_of_a_real_step_is_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of all its layers launches nothing that one layer of each kind did not."""
    config = read_config([OURS], ["train.precision=bf16", "model.num_layers=3"]).config
    target = Target.parse("sm_90")
    all_layers = {spec.key for spec in record_step(config, target)}
    (finding,) = lint(config, [target]).findings
    assert {spec.key for spec in finding.kernels} == all_layers
    sharded = {spec.key for spec in record_step(config, target, world_size=2)}
    assert sharded - all_layers  # the optimizer then updates float32 weights


def test_checkpointing_saves_memory_as_estimated() -> None:
    """What autograd keeps of a real step on the CPU, against the estimate of the same model."""
    config = read_config([OURS], ["model.num_layers=8", "train.precision=fp32"]).config
    memory = lint(config, []).memory
    sizes = memory.activations
    assert sizes["full"] < sizes["selective"] < sizes["none"]
    model = build(config.model, "cpu")
    model.init_weights(0)
    weights = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    tokens = torch.zeros(config.train.micro_batch_size, config.train.seq_length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(tokens, tokens)
    assert loss.requires_grad
    # the CPU's plain ops keep other intermediates than the kernels do
    assert 0.5 < sum(kept.values()) / sizes["none"] < 2.0
    parameters = model.num_parameters()
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * parameters, 4 * parameters, 8 * parameters)


def test_a_rate_that_is_never_reached_is_a_note() -> None:
    code, output = _run(OURS, "schedule.warmup_steps=1e6", "--arch", "A100")
    assert code == 0 and "note: schedule.warmup_steps (1e+06) is not below train.steps" in output


def test_sharding_divides_memory() -> None:
    config = read_config([OURS], ["train.precision=bf16", "parallel.shard=-1"], world_size=8).config
    one, eight = lint(config, []).memory, lint(config, [], world_size=8).memory
    assert eight.gradients * 4 == one.gradients and eight.optimizer * 12 == one.optimizer


def test_accumulated_gradients_stay_whole() -> None:
    """FSDP2 sums them over ranks only after the last micro-batch."""
    options = ["train.precision=bf16", "parallel.shard=-1"]
    more = [*options, "train.gradient_accumulation_steps=2"]
    once, twice = (lint(read_config([OURS], o, world_size=8).config, [], world_size=8).memory for o in (options, more))
    assert twice.gradients - once.gradients == 8 * once.gradients
    assert twice.weights == once.weights


def test_tensor_ranks_share_the_activations() -> None:
    config = read_config([OURS], ["parallel.tensor=2"], world_size=2).config
    one, two = lint(read_config([OURS], []).config, []).memory, lint(config, [], world_size=2).memory
    assert one.activations and two.activations == {mode: size // 2 for mode, size in one.activations.items()}


def test_context_ranks_share_the_activations() -> None:
    config = read_config([OURS], ["parallel.context=2"], world_size=2).config
    one, two = lint(read_config([OURS], []).config, []).memory, lint(config, [], world_size=2).memory
    more = {two.activations[mode] - size // 2 for mode, size in one.activations.items()}
    model, tokens = config.model, config.train.micro_batch_size * config.train.seq_length
    # keys and values, each of half of the heads, with gradients
    assert more == {tokens * model.hidden_size * (DTYPES[config.train.precision].itemsize + 4)}


@pytest.mark.parametrize(
    "name, gigabytes", [("A100", 40), ("A100 80GB", 80), ("sm_90", 80), ("H200", 141), ("Jetson Orin NX", None)]
)
def test_memory_of_cards(name: str, gigabytes: int | None) -> None:
    assert memory_of(Target.parse(name)) == (None if gigabytes is None else gigabytes * 10**9)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["parallel.tensor=3"], "must be the number of processes, 2, got 1 * 1 * 2 * 1 * 3 (--world-size 2)"),
        (["parallel.tensor=3", "parallel.shard=-1"], "parallel.tensor must divide the number of processes, 2, got 3"),
        (["parallel.expert=2"], "parallel.expert"),
        (
            ["parallel={pipeline: 2}", "train.gradient_accumulation_steps=2", "fp8={recipe: tensor, watch: 1}"],
            "parallel.pipeline must be 1",
        ),
    ],
)
def test_a_parallel_section_that_so_many_gpus_cannot_train_by(overrides: list[str], message: str) -> None:
    """It was a traceback, an attention of no heads, or nothing."""
    code, output = _run(OURS, *overrides, "--world-size", "2")
    assert code == 2 and message in output, output


def test_a_run_has_as_many_gpus_as_it_takes() -> None:
    code, output = _run(OURS, "parallel={tensor: 2, context: 2}", "--arch", "A100")
    assert code == 0, output
    shown = read_config([OURS], ["parallel={tensor: 2, replicate: 2, shard: 3, pipeline: 2}"]).config.parallel
    assert fewest_ranks(shown) == 24


def test_prebuild_takes_a_training_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from powertrain.cli import prebuild

    asked = []

    def build_nothing(specs: list[object], *arguments: object, **options: object) -> object:
        asked.extend(specs)
        from powertrain.runtime.compile.prebuild import Report

        return Report()

    monkeypatch.setattr(prebuild, "build_with_progress", build_nothing)
    out = tmp_path / "k.ptp"
    result = CliRunner().invoke(
        app, ["prebuild", OURS, "train.precision=bf16", "--arch", "sm_80", "--arch", "sm_90", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    config = read_config([OURS], ["train.precision=bf16"]).config
    assert len(asked) == sum(len(record_step(config, Target.parse(arch))) for arch in ("sm_80", "sm_90"))
    assert out.exists()


def test_experts_and_latent_attention(tmp_path: Path) -> None:
    """Layers that differ: the first is dense, the others have experts, whose kernels are foreseen too."""
    run = tmp_path / "run.yml"
    run.write_text(
        "model: {preset: deepseek-1b, vocab_size: 512, hidden_size: 64, num_layers: 6, num_experts: 8}\n"
        "data: {train: x}\ntrain: {steps: 1, seq_length: 64, precision: bf16}\n"
    )
    config = read_config([run]).config
    report = lint(config, [Target.parse("H100")])
    (finding,) = report.findings
    names = " ".join(spec.describe() for spec in finding.kernels)
    assert "grouped" in names and "route" in names and finding.attention.chosen
    assert {spec.key for spec in finding.kernels} == {spec.key for spec in record_step(config, finding.target)}
    assert report.parameters == build(config.model).num_parameters()


def test_the_vocabulary_is_the_tokenizers(tmp_path: Path) -> None:
    """A tokenizer that a run would train first counts as one of its size; one that is not there is said."""
    quickstart = str(ROOT / "configs/quickstart.yml")
    code, output = _run(quickstart, "data.tokenizer=train:4000", "model.vocab_size=0", "--arch", "A100")
    assert code == 0 and "[4096, " in output
    code, output = _run(OURS, "data.tokenizer=bytes", "model.vocab_size=0", "--arch", "A100")
    assert code == 0 and "[256, " in output
    code, output = _run(OURS, f"data.tokenizer={tmp_path}/no.json", "model.vocab_size=0", "--arch", "A100")
    assert code == 2 and f"{tmp_path}/no.json" in output and "Traceback" not in output


@pytest.mark.parametrize("kind", ["attention", "sparse"])
def test_documents_of_a_run(kind: str) -> None:
    """Attention's kernels that a run of packed documents compiles ahead know them, beside a mask of blocks too."""
    sparsity = "{block: 16, before: 1}" if kind == "sparse" else "null"
    model = "{architecture: gpt_neox, vocab_size: 512, hidden_size: 64, num_layers: 1, num_heads: 2, "
    model += f"layer_types: [{kind}], sparsity: {sparsity}}}"
    run = read_config([OURS], [f"model={model}", "train.precision=bf16", "data.document_mask=true"]).config
    kernels = [
        spec for spec in record_step(run, Target.parse("sm_90")) if spec.signature.keys() & {"do_ptr", "do_desc"}
    ]
    documents = {"attention": "starts_ptr", "sparse": "doc_ptr"}[kind]
    # the sums of o * do for the backward need none
    knowing = [{n for n in s.signature if n.endswith(documents) and n not in s.constants} for s in kernels]
    assert sum(bool(names) for names in knowing) >= 2


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "other.jsonl").write_text('{"words": "a"}\n')
    (tmp_path / "bytes").write_bytes(b"PK\0\0")
    (tmp_path / "rows.parquet").write_bytes(b"none")
    (tmp_path / "half.bin").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("[]")
    (tmp_path / "link").symlink_to("gone")
    (tmp_path / "empty").mkdir()
    (tmp_path / "run.yml").write_text(
        "model: {architecture: llama, hidden_size: 32, num_layers: 1, num_heads: 2, intermediate_size: 64, "
        "vocab_size: 256}\n"
        f"data:\n  train: {tmp_path}/text.jsonl\ntrain: {{steps: 1, seq_length: 32, precision: fp32}}\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    "word, said",
    [
        ("data.train={0}/txt.jsonl", "data.train must name text, jsonl, parquet, a folder .* got {0}/txt.jsonl "
         r"\(no such file or folder; did you mean {0}/text.jsonl\?\)"),
        ("data.train=[quickstart,{0}/link]", r"data.train.1 must name text, .* got {0}/link \(a link to gone"),
        ("data.train={0}/empty", "data.train: {0}/empty: must hold a file that is not hidden, got an empty folder"),
        ("data.train={0}/other.jsonl", "data.train: {0}/other.jsonl:1: must have a key 'text', got keys 'words'"),
        ("data.train={0}/rows.parquet", "data.train: {0}/rows.parquet must be parquet, which begins with PAR1"),
        ("data.train={0}/half", "data.train: {0}/half.idx: no such file; a data set {0}/half needs"),
        ("data.validation={0}/bytes", "data.validation: {0}/bytes must be UTF-8 text, got a file with bytes of 0"),
        ("data.tokenizer={0}/tokenizer.json", "data.tokenizer: {0}/tokenizer.json: must be a tokenizer.json"),
        ("data.tokenizer={0}/no.json", "data.tokenizer: tokenizer: no such file {0}/no.json"),
        ("data.cache_folder={0}/bytes/a/b", r"cache_folder must name a folder that can be written, got {0}/bytes \("),
        ("checkpoint.folder={0}/bytes", r"checkpoint.folder must name a folder that can be written, got {0}/bytes \("),
        ("logging.folder={0}/bytes", r"logging.folder must name a folder that can be written, got {0}/bytes \("),
        ("checkpoint.load={0}/no", r"checkpoint.load must name a checkpoint: .* got {0}/no \(no such file or folder"),
        ("checkpoint.load={0}/empty", "checkpoint.load: {0}/empty must hold a checkpoint .* got an empty folder"),
        ("train={{steps: 1, seq_length: 8, objective: distill, distill: {{teacher: {0}/no}}}}", "teacher must name a "),
        ("evaluation.tasks_folder={0}/no", r"tasks_folder must name a folder of YAML files, got {0}/no \(no such"),
    ],
)  # fmt: skip
def test_files_that_a_config_names(word: str, said: str, data: Path) -> None:
    code, output = _run(str(data / "run.yml"), word.format(data), files=True)
    assert code == 2 and re.search(said.format(data), output) and "command line: " in output, output
    assert output.endswith("(on another machine? --no-files leaves files out)\n")


def test_files_are_looked_at_before_torch_is_imported(data: Path) -> None:
    """The line is that of the entry of a list; `lint` and `train` say the same."""
    run = data / "run.yml"
    run.write_text(run.read_text().replace(f"train: {data}/text.jsonl", "train:\n    - quickstart\n    - no.txt"))
    code = "import sys, powertrain.cli.lint as m\ntry:\n    m.read_run(sys.argv[1:], world_size=None, named='all')\n"
    code += "finally:\n    print('torch' in sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, cwd=ROOT)
    assert f"{run}:5: data.train.1 must name text" in done.stderr and done.stdout == "False\n", done
    with pytest.raises(ConfigError, match=r"run\.yml:5: data\.train\.1 must name text"):
        read_config([run], files="data")
    assert read_config([run]).config.data.train[1].path == "no.txt"


def test_a_run_that_saves_where_it_loads_begins_with_nothing(data: Path) -> None:
    code, output = _run(str(data / "run.yml"), f"checkpoint={{load: {data}/c, folder: {data}/c}}", files=True)
    assert code == 0, output


@pytest.mark.parametrize(
    "content, said",
    [
        (b"task: mine\ndoc: [1\nb: 2\n", r"{0}:3 must be YAML, got expected ',' or ']'"),
        (b"task: caf\xe9\n", r"{0} must be UTF-8 text, got byte 9"),
        (b"- task: mine\n", r"{0} must hold keys and values of a task, got tag:yaml.org,2002:seq"),
        (b"", r"{0} must hold keys and values of a task, got none"),
        (b"include: [none.yaml]\n", r"{0}: include must name a file, got none.yaml, which is not there"),
        (b"task: mine\nf: !function utils.f\ninclude: base\n", None),
    ],
)
def test_broken_yaml_of_a_task_is_named(content: bytes, said: str | None, data: Path) -> None:
    """lm_eval passes over it, and a task of the name is then not known."""
    file = data / "tasks/deep/mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    (file.parent / "base").write_text("task: base\n")
    code, output = _run(str(data / "run.yml"), f"evaluation.tasks_folder={data}/tasks", files=True)
    if said is None:
        assert code == 0, output
    else:
        assert code == 2 and re.search(f"evaluation.tasks_folder: {said.format(file)}", output), output


def test_lines_of_json_in_a_text_are_said(data: Path) -> None:
    (data / "a.txt").write_text('{"text": "a"}\n' * 3)
    code, output = _run(str(data / "run.yml"), f"data.train={data}/a.txt", files=True)
    assert code == 0 and f"{data}/a.txt: its lines are JSON objects" in output


def test_a_vocabulary_is_compared_with_the_tokenizers(data: Path) -> None:
    """`train` refused it after `lint` had passed it."""
    code, output = _run(str(data / "run.yml"), "model.vocab_size=100", files=True)
    assert code == 2 and "model.vocab_size must be at least the tokenizer's 256, got 100" in output
    assert _run(str(data / "run.yml"), "model.vocab_size=100")[0] == 0
