"""The regression table: rows recorded from tables, what counts as slower, what of it is kept when a part fails."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import ahead, peers
from benchmarks import all as bench_all
from benchmarks.ops import host, rope
from powertrain.ops import norm_fwd_kernels
from powertrain.runtime.compile import prebuild
from powertrain.runtime.compile.service import Spec
from powertrain.runtime.errors import CompileError
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target
from powertrain.testing.bench import Timing, recorded, table

# some of each section's kernels
KERNELS = {
    "host": {"_norm_fwd_kernel", "_norm_bwd_kernel", "_hopper_attention_bwd_kernel", "_hopper_attention_fwd_kernel"},
    "decode": {"_few_tiles_kernel", "_hopper_attention_fwd_kernel", "_combine_tiles_kernel"},
    "mla": {"_few_tiles_kernel", "_hopper_decode_mla_kernel", "_combine_tiles_kernel"},
    "attention": {"_hopper_attention_fwd_kernel", "_hopper_attention_bwd_kernel", "_attention_fwd_kernel"},
    "short": {"_hopper_attention_fwd_kernel", "_hopper_attention_bwd_kernel", "_hopper_attention_sums_kernel"},
    "head-dims": {"_hopper_attention_fwd_d512_kernel", "_attention_dkdv_kernel"},
    "few-rows": {
        "_norm_fwd_kernel", "_norm_bwd_kernel", "_activation_fwd_kernel", "_activation_bwd_kernel",
        "_bias_dropout_add_fwd_kernel", "_bias_dropout_add_bwd_kernel", "_column_sums_kernel",
    },
    "ops": {
        "_row_stats_kernel", "_dlogits_kernel", "_norm_bwd_kernel", "_activation_bwd_kernel", "_rope_kernel",
        "_adamw_kernel", "_norm_partials_kernel",
    },
}  # fmt: skip


def _row(label: str, variant: str, ms: float, spread: float = 0.01) -> dict[str, Any]:
    return {"label": label, "variant": variant, "ms": ms, "spread": spread}


def test_slower_is_beyond_noise_and_both_spreads() -> None:
    before = [_row("a", "powertrain", 1.0), _row("b", "powertrain", 1.0, 0.2), _row("a", "torch.compile", 1.0)]
    rows = [_row("a", "powertrain", 1.06), _row("b", "powertrain", 1.2), _row("a", "torch.compile", 9.0)]
    assert list(bench_all.slower(rows, before)) == ["a | powertrain | 1.0000 -> 1.0600 ms (1.06x)"]
    assert not list(bench_all.slower([_row("a", "powertrain", 1.04), _row("new", "powertrain", 9.0)], before))
    # a backend of our own attention
    assert list(bench_all.slower([_row("a", "triton", 2.0)], [_row("a", "triton", 1.0)]))


def test_names_of_gpus_are_told_apart() -> None:
    names = ["NVIDIA H200", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4070 Ti", "NVIDIA H100 80GB HBM3"]
    assert [bench_all.short_name(n) for n in names] == ["h200", "rtx-3090-ti", "rtx-4070-ti", "h100-80gb-hbm3"]


def test_behind_takes_the_best_of_each_side() -> None:
    rows = [_row("a", "powertrain", 1.2), _row("a", "in place", 1.1), _row("a", "liger", 1.0), _row("a", "torch", 2.0)]
    rows += [_row("b", "powertrain", 0.9), _row("b", "quack", 1.0), _row("c", "powertrain", 1.0)]
    assert list(bench_all.behind(rows)) == ["a | in place 1.1000 | liger 1.0000 | 0.909"]


def test_tables_are_recorded_and_a_failing_part_does_not_lose_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Iterator[str]:
        yield table("label", {"powertrain": Timing(1.0, 0.02, 3.0)})
        raise RuntimeError("out of memory")

    def works() -> Iterator[str]:
        yield table("other", {"powertrain": Timing(2.0, 0.02, 3.0)})

    parts = tuple(bench_all.Part(run, lambda: None) for run in (fails, works))
    monkeypatch.setattr(bench_all, "SECTIONS", {"ops": parts})
    written: list[Any] = []
    rows, failed = bench_all.measure(["ops"], lambda rows: written.append(list(rows)))
    first = {"section": "ops", "label": "label", "variant": "powertrain", "ms": 1.0, "spread": 0.02, "peak_mib": 3.0}
    assert rows[0] == first and rows[1]["label"] == "other" and failed == ["ops"]
    # the file is written after each table and at the end of each part: an interrupted run keeps its rows
    assert written == [rows[:1], rows[:1], rows, rows]
    with recorded() as outside:
        pass
    table("after", {"powertrain": Timing(1.0, 0.0, 0.0)})
    assert not outside


@torch._functorch.config.patch(donated_buffer=True)
@torch._dynamo.config.patch(recompile_limit=8)
def test_torch_compile_compiles_every_size() -> None:
    peers.set_up_torch_compile()
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    for n in range(1, 13):
        torch.compile(lambda x: x + 1, dynamic=False, backend=backend)(torch.zeros(n + 1))
    assert len(compiled) == 12


def test_the_launch_that_is_timed_names_every_constant_of_its_kernel() -> None:
    parameters = list(inspect.signature(norm_fwd_kernels._norm_fwd_kernel.jit.fn).parameters)
    assert parameters[parameters.index("eps") + 1 :] == [name for name in host.LAUNCH if name != "num_warps"]


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize(("section", "names"), KERNELS.items())
def test_kernels_that_are_compiled_ahead_of_the_tables(section: str, names: set[str]) -> None:
    with record("H100") as wanted:
        for part in bench_all.SECTIONS[section]:
            part.launch()
    assert names <= {spec.kernel.name for spec in wanted.specs}


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
def test_what_cannot_be_launched_ahead_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def build(specs: list[Spec]) -> prebuild.Report:
        built.extend(spec.kernel.name for spec in specs)
        return prebuild.Report(
            sources={"store": 2, "compiled": len(built) - 2}, failures={"a for sm_90": CompileError("no")}
        )

    def fails() -> None:
        raise RuntimeError("no such op")

    monkeypatch.setattr(prebuild, "build", build)
    told = ahead.build([fails, rope.launch], Target.parse("H100"))
    assert built == ["_rope_kernel"] * 3
    assert told == "3 kernels, 1 of them compiled now, in 0 s\na for sm_90: no"
    assert "no such op" in capsys.readouterr().err
