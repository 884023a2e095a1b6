"""`powertrain explain attention` and `powertrain doctor --kernels`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.ops.attention import explain_attention
from powertrain.runtime import settings as settings_module

DEEPSEEK = (
    "--head-dim-qk", "192", "--head-dim-v", "128", "--layout", "thd", "--mask", "padding_causal", "--dtype", "bf16",
    "--heads", "64", "--seqlen", "588",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Under which our kernels serve the CPU."""
    monkeypatch.delenv("POWERTRAIN_INTERPRET", raising=False)
    settings_module.reload()
    yield
    monkeypatch.undo()
    settings_module.reload()


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_explain_has_a_column_per_gpu_and_needs_none() -> None:
    code, output = _run("explain", "attention", "--arch", "A100", "--arch", "H100", "--arch", "RTX 2080", *DEEPSEEK)
    assert code == 0
    (row,) = [line for line in output.splitlines() if line.startswith("triton ")]
    assert row.split() == ["triton", "chosen", "supported", "chosen"]
    (row,) = [line for line in output.splitlines() if line.startswith("hopper ")]
    assert row.split() == ["hopper", "no", "chosen", "no"]
    assert "why not cudnn:" in output and "sm_80" in output and "head dim 192 (value 128)" in output
    assert "heads 64" in output and "thd" in output


@pytest.mark.parametrize(
    "name", ["seqlen", "seqlen-k", "batch", "heads", "kv-heads", "head-dim", "head-dim-qk", "head-dim-v"]
)
def test_sizes_beyond_any_tensor_are_refused_by_name(name: str) -> None:
    for size in ("9999999999999999", "9" * 40):
        code, output = _run("explain", "attention", "--arch", "H100", f"--{name}", size)
        assert code == 2 and f"'--{name}'" in output and "less than or equal to" in output


def test_sizes_that_only_together_are_too_large() -> None:
    code, output = _run("explain", "attention", "--arch", "H100", "--seqlen", str(1 << 30), "--batch", str(1 << 20))
    assert code == 2 and "must give tensors of at most" in output
    sizes = ("--seqlen", str(1 << 30), "--dtype", "fp32", "--bias", "float")
    assert _run("explain", "attention", "--arch", "H100", *sizes)[0] in (0, 1)


def test_explain_on_the_cpu() -> None:
    code, output = _run("explain", "attention", "--arch", "cpu", "--dtype", "fp32", "--mask", "no_mask")
    assert code == 0 and "cpu: cpu, float32" in output


@pytest.mark.parametrize(
    "options, words",
    [
        (("--window", "128,0"), "window (128, 0)"),
        (("--alibi", "--sinks", "--softcap", "30"), "softcap 30"),
        (("--bias", "float"), "float bias"),
        (("--mask", "arbitrary"), "bool bias"),
        (("--mask", "padding"), "padded"),
        (("--mask", "causal_bottom_right"), "causal (bottom right)"),
        (("--kv-heads", "4"), "heads 16, KV heads 4"),
        (("--inference", "--lse"), "forward, batch of about 2 x 4096 queries, returns LSE"),
        (("--deterministic",), "deterministic"),
        (("--layout", "bmghk"), "bmghk"),
        (("--seqlen", "1", "--seqlen-k", "8192", "--inference"), "batch of about 2 x 1 queries and 8192 keys"),
        (("--dropout", "0.1"), "dropout"),
        (("--torch", "2.12", "--cudnn", "9.22"), "torch 2.12, cuDNN 9.22.0"),
        (("--flash-attn", "4.0.0b36"), "flash-attn-4 4.0.0b36"),
    ],
)
def test_options(options: tuple[str, ...], words: str) -> None:
    code, output = _run("explain", "attention", "--arch", "H100", *options)
    assert code == 0 and words in output


def test_forbidding() -> None:
    code, output = _run("explain", "attention", "--arch", "H100", "--backend=-cudnn")
    assert code == 0 and "cudnn         forbidden" in output
    code, output = _run("explain", "attention", "--arch", "A100", "--backend", "cudnn", "--head-dim", "256")
    assert code == 1 and "smallest change: allow" in output


def test_as_transformer_engine() -> None:
    """DeepSeek-V3 on an A100 with TransformerEngine 2.3: nothing, and what would help (TransformerEngine#1821)."""
    code, output = _run(
        "explain", "attention", "--arch", "A100", *DEEPSEEK, "--as", "transformer-engine", "--version", "2.3",
        "--torch", "2.6", "--cudnn", "9.8", "--set", "NVTE_FLASH_ATTN=0", "--set", "NVTE_UNFUSED_ATTN=0",
    )  # fmt: skip
    assert code == 1
    for words in (
        "as TransformerEngine 2.3 with torch 2.6, cuDNN 9.8.0, flash-attn 2.7.4",
        "NVTE_FLASH_ATTN=0",
        "no backend is left; changes that would help:",
        "unset NVTE_FLASH_ATTN and TransformerEngine 2.20: FlashAttention 2",
        "Powertrain: triton",
        "why not FusedAttention:",
    ):
        assert words in output


def test_as_honours_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    code, output = _run("explain", "attention", "--arch", "H100", "--as", "transformer-engine")
    assert code == 0 and "NVTE_FUSED_ATTN=0: unset NVTE_FUSED_ATTN" in output
    (row,) = [line for line in output.splitlines() if line.startswith("FlashAttention 2 ")]
    assert row.endswith("chosen")


def test_as_a_version_in_between_says_so() -> None:
    _, output = _run("explain", "attention", "--arch", "H100", "--as", "transformer-engine", "--version", "2.9")
    assert "rules were read for 2.20 and 2.3" in output


@pytest.mark.parametrize("library", ["xformers", "flash-attn"])
def test_as_others(library: str) -> None:
    code, output = _run("explain", "attention", "--arch", "A100", "--arch", "H100", "--as", library)
    assert code == 0 and "chosen" in output


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("explain", "softmax"), "must be attention"),
        (("explain", "attention", "--mask", "diagonal"), "mask must be one of no_mask"),
        (("explain", "attention", "--dtype", "fp8"), "dtype must be one of bf16"),
        (("explain", "attention", "--arch", "RTX 3090 Super"), "RTX 3090"),
        (("explain", "attention", "--layout", "hsd"), "layout must be one of"),
        (("explain", "attention", "--as", "apex"), "--as must be one of"),
        (("explain", "attention", "--as", "xformers", "--set", "A=1"), "--set takes"),
        (("explain", "attention", "--kv-heads", "3"), "multiple"),
        (("explain", "attention", "--backend", "tritn"), "got 'tritn'"),
        (("doctor", "--kernels", "--fix"), "--kernels takes no other option"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], words: str) -> None:
    code, output = _run(*arguments)
    assert code == 2 and words in " ".join(output.replace("│", " ").split())


def test_explanation_of_a_call() -> None:
    q, k, v = (torch.randn(2, 8, 4, 16) for _ in range(3))
    explanation = explain_attention(q, k, v, is_causal=True)
    assert explanation.chosen == "cpu" and explanation.by_gpu == {"cpu": "cpu"}
    assert "cpu: cpu, float32, bshd, heads 4, head dim 16, causal" in str(explanation)
    on_gpus = explain_attention(q, k, v, arch=["A100", "sm_75"])
    assert on_gpus.by_gpu == {"A100": "efficient", "sm_75": "efficient"}
    with pytest.raises(ValueError, match="causal_align must be one of"):
        explain_attention(q, k, v, causal_align="centre")


def test_explanation_of_facts() -> None:
    arguments: dict[str, Any] = {"alibi_slopes": True, "sinks": True, "attn_bias": "float", "seqused_k": True}
    explanation = explain_attention(arch="H100", is_causal=True, **arguments)
    assert explanation.chosen == "triton"
    packed = explain_attention(arch="A100", layout="thd", is_causal=True, seqused_k=True)
    assert packed.columns[0].problem.has_key_lengths and packed.chosen == "triton"


def test_doctor() -> None:
    code, output = _run("doctor", "--kernels")
    assert code == 0
    verdicts = [line for line in output.splitlines() if "PASS" in line]
    assert any("reference" in line for line in verdicts) and any("│ cpu " in line for line in verdicts)
    assert "flash-attn-4 is not installed" in output or torch.cuda.is_available()


def test_doctor_fails_when_a_backend_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from powertrain.ops.attention.backend_registry import BACKENDS

    def run(call: object) -> None:
        raise RuntimeError("no kernel today")

    monkeypatch.setattr(BACKENDS["reference"], "run", run)
    code, output = _run("doctor", "--kernels")
    assert code == 1 and "no kernel today" in output


@pytest.mark.parametrize(
    "screen, words",
    [
        ("attention", ("TransformerEngine 2.3", "no backend is left", "served by triton")),
        ("build", ("transformer-engine-torch: 2.7 GiB a job", "MAX_JOBS")),
        ("mixed", ("RTX 2080: 5-D query", "RTX 3090: 5-D query", "was built for sm75")),
    ],
)
def test_tour(screen: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from powertrain.cli import tour

    monkeypatch.setattr(tour, "_compiled", lambda *arguments, **options: ["a kernel"])
    code, output = _run("tour", screen)
    assert code == 0 and all(word in output for word in words)


@pytest.mark.parametrize(
    "options, words",
    [
        (("--window", "5"), "window must be two numbers such as 1024,0 (-1: unbounded), got '5'"),
        (("--bias", "int"), "bias must be bool or float, got 'int'"),
        (("--layout", "thd", "--bias", "bool"), "packed sequences (thd) take no dense mask"),
        (("--version", "2.3"), "--version and --set are of the library that --as names"),
        (("--as", "transformer-engine", "--version", "new"), "TransformerEngine's version must be numbers with dots"),
        (("--arch", "H100", "--flash-attn", ""), "--flash-attn must be a version such as 2.8.3, or none, got ''"),
        (("--arch", "H100", "--flash-attn", "no"), "--flash-attn must be a version such as 2.8.3, or none, got 'no'"),
        (("--arch", "H100", "--cudnn", "x"), "cuDNN's version must be numbers with dots between, got 'x'"),
        (("--layout", "bmghk", "--kv-heads", "3"), "num_heads must be a multiple of num_kv_heads 3, got 16"),
        (("--dropout", "1"), "dropout_p must be a number in [0, 1), got 1.0"),
    ],
)
def test_explain_names_what_is_wrong(options: tuple[str, ...], words: str) -> None:
    code, output = _run("explain", "attention", *options)
    assert code == 2 and words in " ".join(output.replace("│", " ").split()), output


def test_reasons_name_gpus_where_they_do_not_hold_on_all() -> None:
    _, output = _run("explain", "attention", "--arch", "A100", "--arch", "H100", "--alibi", "--flash-attn", "none")
    assert "\n  efficient attention has no ALiBi slopes: use triton" in output
    assert "\n  [A100] flash-attn-3 runs on sm_90, got sm_80: use triton" in output


def test_xformers_groups_and_what_would_help() -> None:
    code, output = _run(
        "explain", "attention", "--arch", "A100", "--layout", "bmghk", "--kv-heads", "2", "--as", "xformers"
    )
    assert code == 1 and "4-D tensors, key and value repeated: flash2" in output and "no gradients: flash2" in output


_RUN = """
model: {{preset: llama-8b, num_layers: 2, vocab_size: 1024}}
data: {{train: {folder}/none.txt}}
train: {{steps: 1, seq_length: 8192, micro_batch_size: 2}}
fp8: {{recipe: block, keep: [lm_head, first_block]}}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    file = tmp_path / "run.yml"
    file.write_text(_RUN.format(folder=tmp_path))
    return str(file)


def test_fp8_of_a_run_without_a_gpu(run_file: str) -> None:
    """Per layer the recipe or why it stays, times beside bf16; on a GPU without FP8 nothing is quantized."""
    code, output = _run("explain", "fp8", run_file, "--arch", "H200", "--arch", "A100", "--arch", "RTX 4090")
    assert code == 0, output
    h200, a100, ada = output.split("A100:")[0], *output.split("A100:")[1].split("RTX 4090:")
    assert "keep has 'first_block'" in h200 and "5 layers in FP8:" in h200
    rows = [line.split() for line in h200.splitlines() if line.startswith("layers") and "block" in line.split()[2:3]]
    assert len(rows) == 5
    for *_, fp8, bf16, saved, saved_bf16, _wire in rows:
        assert 0 < float(fp8) < float(bf16) and 0 < float(saved) < float(saved_bf16)
    said = "wire: 8 ranks (assumed, as parallel.shard is not set) gather 0 of these weights in FP8; all weights once: "
    assert said in " ".join(h200.split())
    # no time of an H200 stands in a table without times
    assert "measured on one H200" in h200 and "measured on one H200" not in a100 + ada
    assert "sm_80 has no FP8 products" in a100 and "0 layers in FP8" in a100
    assert "5 layers in FP8: no rate was measured on sm_89" in ada


@pytest.mark.parametrize(("shard", "said"), [(-1, "5 of"), (32, "2 of"), (1, "nothing is gathered")])
def test_bytes_on_the_wire(run_file: str, shard: int, said: str) -> None:
    """32 ranks have 128 rows each of the attention's output and of down; parts of blocks are gathered in 16 bits."""
    code, output = _run("explain", "fp8", run_file, "fp8.wire=fp8", f"parallel.shard={shard}", "--arch", "H200")
    (line,) = (line for line in output.splitlines() if line.startswith("wire: "))
    assert code == 0 and said in line, output
    if shard == -1:
        plain, fp8 = (int(words.split()[-1]) for words in line.split(" MiB")[:2])
        # the layers of the first block stay
        assert 0.74 * plain < fp8 < 0.76 * plain


def test_fp8_of_experts(run_file: str) -> None:
    """By measured rates no number of rows makes a training step faster, so they stay in bf16, with the reason."""
    model = (
        "model={architecture: deepseek, hidden_size: 7168, num_layers: 2, num_heads: 8, intermediate_size: 2048, "
        "moe_intermediate_size: 2048, num_experts: 32, experts_per_token: 8, vocab_size: 64, "
        "max_position_embeddings: 4096}"
    )
    options = (model, "fp8.recipe=row", "fp8.keep=[lm_head]", "train.seq_length=4096", "--arch", "H200")
    code, output = _run("explain", "fp8", run_file, "train.micro_batch_size=8", *options)
    (line,) = (line for line in output.splitlines() if line.startswith("layers.*.mlp.experts.gate_up"))
    assert code == 0 and line.split()[1:3] == ["4096x7168", "bf16:"], output
    assert "FP8 by row is" in line and "expected to be slower" in output  # folded
    # the times of three products and of quantization in FP8, beside those in bf16; no sum of FP8 layers has them
    *times, fp8, bf16 = (float(word) for word in line.split()[-9:-3])
    assert fp8 == pytest.approx(sum(times), abs=0.01) and fp8 > 1.5 * bf16 > 0
    (total,) = (line for line in output.splitlines() if "layers in FP8:" in line)
    assert float(total.split()[4]) < fp8 and "rows to" not in output
    code, output = _run("explain", "fp8", run_file, *options[:-2], "fp8.keep=[lm_head, '*.experts']", "--arch", "H200")
    (line,) = (line for line in output.splitlines() if line.startswith("layers.*.mlp.experts.gate_up"))
    assert "keep has" in line and len(line.split()) < 8


@pytest.mark.parametrize(
    ("recipe", "wire", "row_bytes", "said"),
    [
        ("row", "bf16", 7184, "with fp8.wire fp8"),
        ("block", "fp8", 7392, "as this config sends them"),
        ("tensor", "fp8", 0, ""),
    ],
)
def test_fp8_of_rows_to_other_ranks(run_file: str, recipe: str, wire: str, row_bytes: int, said: str) -> None:
    """Bytes as FP8Rows packs them, of 3 of 4 rows; weights of experts are gathered by the ranks that share none."""
    model = (
        "model={architecture: deepseek, hidden_size: 7168, num_layers: 4, num_heads: 8, intermediate_size: 2048, "
        "moe_intermediate_size: 2048, num_experts: 32, experts_per_token: 8, vocab_size: 64, "
        "max_position_embeddings: 4096}"
    )
    options = (model, f"fp8.recipe={recipe}", f"fp8.wire={wire}", "fp8.keep=[lm_head]", "train.seq_length=4096")
    code, output = _run("explain", "fp8", run_file, *options, "parallel.expert=4", "--arch", "H200")
    assert code == 0, output
    rows = 2 * 4096 * 8 * 3 // 4
    assert f"rows to layers.*.mlp.experts of 3 layers, over 4 ranks: a rank sends {rows} to others" in output
    there = 3 * rows * 14336 / 2**20
    assert f"14336 bytes a row, {there:.0f} MiB a forward; with results and backward {4 * there:.0f} MiB" in output
    if row_bytes:
        fp8 = 3 * rows * row_bytes / 2**20
        assert f"in FP8 with scales, {said}: {row_bytes} bytes a row, {fp8:.0f} MiB a forward" in output
        assert f"which are sent in the model's dtype, {fp8 + 3 * there:.0f} MiB" in output
        assert "experts spread over 4" in output
    else:
        assert "in FP8: by row and by block only" in output
    # 32 / 4 experts, shared by 8 / 4 ranks
    (line,) = (line for line in output.splitlines() if line.startswith("layers.*.mlp.experts.gate_up"))
    assert int(line.split()[-1]) == 8 * 4096 * 7168 * 2 / 2**20
    code, output = _run("explain", "fp8", run_file, *options, "parallel.expert=5", "--arch", "H200")
    assert code == 2 and "parallel.expert must divide model.num_experts (32), got 5" in output


def test_fp8_that_cannot_be_explained(run_file: str) -> None:
    code, output = _run("explain", "fp8", run_file, "fp8.recipe=none")
    assert code == 2 and "fp8.recipe must be tensor, tensor-delayed, row or block to be explained" in output
    code, output = _run("explain", "fp8")
    assert code == 2 and "fp8 needs a config file" in output
    code, output = _run("explain", "attention", run_file)
    assert code == 2 and "attention takes options only" in output


def test_the_order_is_a_short_line_and_sources_are_lines_of_their_own() -> None:
    code, output = _run("explain", "attention", "--arch", "H200")
    lines = output.splitlines()
    (order,) = [line for line in lines if line.startswith("  order:")]
    assert code == 0 and "nearest measured: B" in order and "results" not in order and len(order) < 130
    first = lines.index("estimated from measurements in:")
    assert len(lines) > first + 1 and all(line.startswith("  ") for line in lines[first + 1 :])
    assert len(set(lines[first + 1 :])) == len(lines) - first - 1
