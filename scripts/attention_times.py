"""`python scripts/attention_times.py FILE...`: rows of powertrain/ops/attention/measured/sm_90.json from the times that
the benchmark attention_choice measured.

    python -m benchmarks.ops.attention_choice --count 400 --seed 7 --raw times.jsonl      (on an H200)
    python scripts/attention_times.py times.jsonl --source random3 --file benchmarks/results/... --commit ...

adds the problems of a file, one row each, or replaces those of a source of that name. `--forget hopper:136-512` drops
a backend's times of the other sources at these head dims, because its kernels there have changed. `--holdout 100`
writes nothing: it leaves the last 100 problems out of the table, and counts which of their choices are too slow.
"""

import argparse
import gzip
import json
import math
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.ops.attention_choice import Problem, miss
from powertrain.ops.attention import backend_measurements as measurements
from powertrain.ops.attention import backend_order, select
from powertrain.ops.attention.backend_preferences import BackendPreference
from powertrain.ops.attention.backend_registry import BACKENDS
from powertrain.ops.attention.backends.versions import Installed, assume
from powertrain.ops.attention.mask import MaskSpec
from powertrain.ops.attention.problem import AttentionProblem, Lengths
from powertrain.runtime.target import Target

TABLE = Path(measurements.__file__).parent / "measured" / "sm_90.json"
SOFTWARE = Installed((2, 11), True, 91900)  # what was measured: no flash-attn packages in the choice
# PyTorch's own calls take long to launch: where the GPU had to wait, a single time is that of the host
LAUNCHED_BY_PYTORCH = ("cudnn", "flash", "efficient")
WAYS = ("forward", "training")


def problem_of(p: Problem, needs_grad: bool) -> AttentionProblem:
    """As the call poses it."""
    total, batch = sum(p.lengths), len(p.lengths)
    queries, keys = (total, total) if p.packed else (p.lengths[0], p.keys or p.lengths[0])
    head_dim_v = p.head_dim_v or p.head_dim
    rows = batch * queries if not p.packed else total
    elements = p.head_dim * rows * (p.heads + 2 * p.kv_heads)
    mask = MaskSpec(-1 if p.window is None else p.window - 1, 0 if p.causal else -1, p.causal or p.window is not None)
    lengths = Lengths.of(
        queries, keys, equal=True if p.packed else None, batch=batch, elements=elements,
        longest=max(p.lengths) if p.packed else None,
    )  # fmt: skip
    return AttentionProblem(
        torch.bfloat16, p.head_dim, head_dim_v, Target.parse("H200"), mask, "thd" if p.packed else "bshd", p.heads,
        p.kv_heads, lengths, needs_grad=needs_grad,
    )  # fmt: skip


def read(paths: list[Path]) -> list[tuple[Problem, dict[str, dict[str, float]]]]:
    """Problems and their times by way and backend, repeated measurements as one."""
    found: dict[Problem, list[dict[str, dict[str, float]]]] = {}
    for path in paths:
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
        for line in text.splitlines():
            record = json.loads(line)
            ms = record.pop("ms")
            record.pop("chosen")
            found.setdefault(Problem(**{**record, "lengths": tuple(record["lengths"])}), []).append(ms)
    return [(p, {way: _one([times[way] for times in repeated]) for way in WAYS}) for p, repeated in found.items()]


def _one(repeated: list[dict[str, float]]) -> dict[str, float]:
    """The times of one way, without those that are the host's."""
    names = set.intersection(*map(set, repeated))
    least = {name: min(times[name] for times in repeated) for name in names}
    most = {name: max(times[name] for times in repeated) for name in names}
    best = min(least.values(), default=0.0)

    def is_host(name: str) -> bool:
        if name not in LAUNCHED_BY_PYTORCH:
            return most[name] > 1.3 * least[name]
        if len(repeated) == 1:
            return 3 * best < least[name] < best + 1
        apart = most[name] / least[name]
        return (apart > 1.08 and least[name] > 1.25 * best) or (apart > 1.03 and 3 * best < least[name] < best + 0.5)

    kept = sorted(name for name in names if not is_host(name))
    # rows that agree are one; of others the shorter is nearer to the truth
    return {n: least[n] if most[n] > 1.1 * least[n] else math.sqrt(least[n] * most[n]) for n in kept}


def row_of(p: Problem, times: dict[str, dict[str, float]], source: str) -> dict[str, Any]:
    """A row of the table. A backward belongs to the backend that differentiates."""
    facts = problem_of(p, True)
    lengths = facts.lengths
    case_row: dict[str, Any] = {
        "dtype": "half", "mask": "causal" if p.causal else "full", "batch": lengths.sequences,
        "queries": lengths.queries, "keys": lengths.keys, "heads": p.heads, "kv_heads": p.kv_heads,
        "head_dim_qk": p.head_dim, "head_dim_v": p.head_dim_v or p.head_dim,
    }  # fmt: skip
    features = [name for name, given in (("packed", p.packed), ("window", p.window)) if given]
    case_row |= {"features": features} if features else {}
    case_row |= {"window": p.window} if p.window else {}
    ms: dict[str, list[float | None]] = {}
    for name, forward in times["forward"].items():
        ms.setdefault(name, [None, None])[0] = _rounded(forward)
        step = times["training"].get(name)
        if step is not None and step > forward:
            ms[name][1] = _rounded(step - forward) if _differentiates(name, facts) == name else None
    return {"source": source, "case": case_row, "ms": ms}


def _rounded(ms: float) -> float:
    return float(f"{ms:.4g}")


def _differentiates(name: str, problem: AttentionProblem) -> str | None:
    if name not in BACKENDS or name.startswith("flash-attn"):
        return name
    decision = select.decide(problem, BackendPreference((name,), only=True))
    return decision.backward if decision is not None else None


def holdout(
    found: list[tuple[Problem, dict[str, dict[str, float]]]], count: int, table: dict[str, Any], source: str
) -> None:
    """Print the misses among the last problems, chosen by a table without them."""
    rows = [row_of(p, times, source) for p, times in found[:-count]]
    sources = {**table["sources"], source: {"file": "the others"}}
    points = measurements.points_of(((row, 1.0) for row in [*table["rows"], *rows]), sources)
    judged, unknown, ratios, kinds = 0, 0, list[float](), Counter[str]()
    for p, times in found[-count:]:
        for way in WAYS:
            with mock.patch.object(backend_order, "measured", lambda arch, device: points):
                decision = select.decide(problem_of(p, way == "training"), BackendPreference())
            assert decision is not None
            if decision.name not in times[way]:
                unknown += 1
                continue
            judged += 1
            missed = miss(times[way], decision.name)
            if missed is not None:
                ratios.append(missed[1])
                kinds[f"{way}: {missed[0]} faster than {decision.name}"] += 1
                print(f"| {p.label} {way} | {decision.name} | {missed[1]:.2f} of {missed[0]} |")
    over = sum(ratio > 1.1 for ratio in ratios)
    print(
        f"{judged} choices, {len(ratios)} over 3 % too slow, {over} over 10 %, the worst {max(ratios, default=1):.2f}"
    )
    print(f"{unknown} more choose a backend whose time is not known")
    for kind, number in kinds.most_common():
        print(f"  {number:4} x {kind}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, nargs="*")
    parser.add_argument("--source", default="random")
    for name in ("file", "date", "commit", "versions"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--forget", default="", help="backend:least-most head dim")
    parser.add_argument("--holdout", type=int, default=0)
    asked = parser.parse_args()
    table = json.loads(TABLE.read_text())
    table["rows"] = [row for row in table["rows"] if row["source"] != asked.source]
    if asked.forget:
        name, _, dims = asked.forget.partition(":")
        least, most = map(int, dims.split("-"))
        for row in table["rows"]:
            if least <= max(row["case"]["head_dim_qk"], row["case"]["head_dim_v"]) <= most:
                row["ms"].pop(name, None)
    found = read(asked.raw)
    with ExitStack() as stack:
        stack.enter_context(assume(SOFTWARE))
        if asked.holdout:
            return holdout(found, asked.holdout, table, asked.source)
        table["rows"] += [row_of(p, times, asked.source) for p, times in found]
    if found:
        table["sources"][asked.source] = {n: getattr(asked, n) for n in ("file", "date", "commit", "versions")}
    rows = [row for row in table["rows"] if row["ms"]]
    head = {name: value for name, value in table.items() if name != "rows"}
    # a row a line: a change of one is a change of one line
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    TABLE.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
