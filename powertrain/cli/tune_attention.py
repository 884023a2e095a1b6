"""`powertrain tune attention`: measure the attention backends on this GPU, into a table that the selector reads."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from powertrain import __version__
from powertrain.ops.attention import api, select
from powertrain.ops.attention.backend_measurements import save
from powertrain.ops.attention.backend_preferences import BackendPreference
from powertrain.ops.attention.backends.versions import installed
from powertrain.ops.attention.explain import ask
from powertrain.runtime.errors import PowertrainError
from powertrain.runtime.float32_products import allows_tf32
from powertrain.testing.bench import measure

if TYPE_CHECKING:
    from powertrain.ops.attention.problem import AttentionProblem
    from powertrain.runtime.console import Console

TOKENS = 16384
_HEADS = {(128, 128): 16, (64, 64): 32, (256, 256): 8, (192, 128): 16}
_LENGTHS = (8192, 2048, 512)
_SLOW = ("chunked", "reference")


def tune_attention(console: "Console", dtype: torch.dtype, seconds: float) -> None:
    """Measure every backend on every case until `seconds` have passed, and keep the table in the user's cache."""
    deadline = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    for case in cases(dtype):
        if rows and time.monotonic() > deadline:
            console.print(f"stopped after {seconds:g} s; --seconds gives more time")
            break
        times = measure_case(case, dtype, torch.device("cuda"))
        rows.append({"source": "tune", "case": case, "ms": times})
        words = ", ".join(f"{name} {_ms(times[name])}" for name in times)
        console.print(f"{describe(case):44} {words}")
    source = {
        "file": "powertrain tune attention", "date": time.strftime("%Y-%m-%d"), "commit": _commit(),
        "versions": str(installed()),
    }  # fmt: skip
    console.print(f"kept in {save(torch.cuda.get_device_name(), rows, {'tune': source})}", markup=False)


def cases(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """The measured cases, the most usual ones first: 16k tokens in batches of equal sequences."""
    kind = "half" if dtype in (torch.float16, torch.bfloat16) else "tf32" if allows_tf32() else "float32"
    for (d_qk, d_v), heads in _HEADS.items():
        for mask in ("causal", "full"):
            for length in _LENGTHS:
                yield {
                    "dtype": kind, "mask": mask, "batch": TOKENS // length, "queries": length, "keys": length,
                    "heads": heads, "kv_heads": heads, "head_dim_qk": d_qk, "head_dim_v": d_v,
                }  # fmt: skip


def measure_case(case: dict[str, Any], dtype: torch.dtype, device: torch.device) -> dict[str, list[float | None]]:
    """backend -> [forward ms, backward ms] of every backend that takes the case. A backward belongs to the backend that
    differentiates."""
    query, key, value, dout = _tensors(case, dtype, device)
    options = {"is_causal": case["mask"] == "causal", "causal_align": "top_left"}
    problem, preference = ask(query, key, value, "bshd", options)
    times: dict[str, list[float | None]] = {}
    for verdict in select.verdicts(problem, preference):
        if verdict.reasons or verdict.name in _SLOW:
            continue
        try:
            forward, backward = _measure(verdict.name, query, key, value, dout, options)
        except (PowertrainError, RuntimeError):
            # too much memory, say: this backend has no place in the table
            continue
        times.setdefault(verdict.name, [None, None])[0] = forward
        times.setdefault(_differentiates(verdict.name, problem), [None, None])[1] = backward
    return times


def _tensors(case: dict[str, Any], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    shapes = [
        (case["queries"], case["heads"], case["head_dim_qk"]),
        (case["keys"], case["kv_heads"], case["head_dim_qk"]),
    ]
    shapes.append((*shapes[1][:2], case["head_dim_v"]))
    leaves = [torch.randn(case["batch"], *shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    return [*leaves, torch.randn(case["batch"], *shapes[0][:2], case["head_dim_v"], device=device, dtype=dtype)]


def _measure(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dout: torch.Tensor, options: dict[str, Any]
) -> tuple[float, float]:
    def forward() -> Any:
        with torch.no_grad():
            return api.attention(query, key, value, backend=name, **options)

    out = api.attention(query, key, value, backend=name, **options)

    def backward() -> Any:
        return torch.autograd.grad(out, (query, key, value), dout, retain_graph=True)

    timings = measure({"forward": forward, "backward": backward}, seconds=0.1)
    return timings["forward"].ms, timings["backward"].ms


def _differentiates(name: str, problem: "AttentionProblem") -> str:
    decision = select.decide(problem, BackendPreference((name,), only=True))
    return name if decision is None or decision.backward is None else decision.backward


def describe(case: dict[str, Any]) -> str:
    """ "B2 S8192 H16 D128 causal"."""
    dims = sorted({case["head_dim_qk"], case["head_dim_v"]}, reverse=True)
    return f"B{case['batch']} S{case['queries']} H{case['heads']} D{'/'.join(map(str, dims))} {case['mask']}"


def _ms(times: list[float | None]) -> str:
    return " + ".join("-" if ms is None else f"{ms:.3f}" for ms in times)


def _commit() -> str:
    """The commit of this checkout, or the version of an installed package."""
    here = Path(__file__).resolve().parents[2]
    if (here / ".git").exists():
        result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        if result.returncode == 0:
            return result.stdout.strip()
    return __version__
