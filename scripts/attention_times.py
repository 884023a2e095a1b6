"""`python scripts/attention_times.py FILE...`: rows of powertrain/ops/attention/measured/sm_90.json from the times that
the benchmark attention_choice measured.

    python -m benchmarks.ops.attention_choice --count 400 --seed 7 --raw times.jsonl      (on an H200)
    python scripts/attention_times.py times.jsonl --source random3 --file benchmarks/results/... --commit ...

adds the problems of a file, one row each; they replace the rows of a source of that name, and of other sources those of
the same problems. `--first 55` leaves out the first 55 problems of the file, because another card timed them. `--forget
hopper:136-512` drops a backend's backward times of the other sources at these head dims, because its kernels there have
changed. `--folds 6` writes nothing: it deals the problems into six parts, chooses for each part by a table without it,
and counts the choices that are too slow.
"""

import argparse
import gzip
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.ops.attention_choice import PEER, Problem, miss
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
WAYS = ("forward", "training")
Measured = tuple[Problem, dict[str, dict[str, float]]]  # a problem, and ms by way and backend


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


def read(paths: list[Path]) -> list[Measured]:
    """Problems and their times, repeated measurements as one."""
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
    """The times of one way."""
    names = sorted(set.intersection(*map(set, repeated)))
    least = {name: min(times[name] for times in repeated) for name in names}
    most = {name: max(times[name] for times in repeated) for name in names}
    # rows that agree are one; of others the shorter is nearer to the truth
    return {n: least[n] if most[n] > 1.1 * least[n] else math.sqrt(least[n] * most[n]) for n in names}


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


def choices(found: list[Measured], table: dict[str, Any]) -> Iterator[tuple[Problem, str, str, dict[str, float]]]:
    """For every problem, forward and training: the backend that a table without them chooses, and the times."""
    cases = [row_of(p, times, "")["case"] for p, times in found]
    rows = ((row, 1.0) for row in table["rows"] if row["case"] not in cases)
    points = measurements.points_of(rows, table["sources"])
    with mock.patch.object(backend_order, "measured", lambda arch, device: points):
        for p, times in found:
            for way in WAYS:
                decision = select.decide(problem_of(p, way == "training"), BackendPreference())
                assert decision is not None
                yield p, way, decision.name, times[way]


def judge(found: list[Measured], table: dict[str, Any], folds: int) -> None:
    """Print the choices that are too slow, a part of the problems left out of the table in turn."""
    # dealt as cards are shuffled: problems that stand together in a file are no more alike than others
    made = [choice for n in range(folds) for choice in choices(found[n::folds], table)]
    for way in WAYS:
        # nearly all are hopper's: beside its times only are the others' of use
        of_way = [(p, name, ms) for p, w, name, ms in made if w == way and name in ms and "hopper" in ms]
        lost = [math.log(ms[name] / min(t for n, t in ms.items() if n != PEER)) for _, name, ms in of_way]
        missed = [(p, name, missed) for p, name, ms in of_way if (missed := miss(ms, name)) is not None]
        for p, name, (best, ratio) in missed:
            print(f"| {p.label} {way} | {name} | {ratio:.2f} of {best} |")
        over = sum(ratio > 1.1 for _, _, (_, ratio) in missed)
        mean, worst = math.exp(sum(lost) / max(1, len(lost))), math.exp(max(lost, default=0))
        print(
            f"{way}: {len(of_way)} choices, {len(missed)} over 3 % too slow, {over} over 10 %, the worst {worst:.2f}, "
            f"geometric mean {mean:.4f}"
        )
        kinds = Counter(f"{best} faster than {name}" for _, name, (best, _) in missed)
        for kind, number in kinds.most_common():
            print(f"  {number:4} x {kind}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, nargs="*")
    parser.add_argument("--source", default="random")
    for name in ("file", "date", "commit", "versions"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--forget", default="", help="backend:least-most head dim, whose backward has changed")
    parser.add_argument("--first", type=int, default=0, help="leave out so many problems at the beginning")
    parser.add_argument("--folds", type=int, default=0, help="judge the choices instead")
    asked = parser.parse_args()
    table = json.loads(TABLE.read_text())
    found = read(asked.raw)[asked.first :]
    with assume(SOFTWARE):
        if asked.folds:
            return judge(found, table, asked.folds)
        new = [row_of(p, times, asked.source) for p, times in found]
    if asked.forget:
        name, _, dims = asked.forget.partition(":")
        least, most = map(int, dims.split("-"))
        for row in table["rows"]:
            if least <= max(row["case"]["head_dim_qk"], row["case"]["head_dim_v"]) <= most and name in row["ms"]:
                row["ms"][name][1] = None
    again = [row["case"] for row in new]
    kept = (row for row in table["rows"] if row["source"] != asked.source and row["case"] not in again)
    table["rows"] = [*kept, *new]
    if found:
        table["sources"][asked.source] = {n: getattr(asked, n) for n in ("file", "date", "commit", "versions")}
    rows = [row for row in table["rows"] if any(ms != [None, None] for ms in row["ms"].values())]
    head = {name: value for name, value in table.items() if name != "rows"}
    # a row a line: a change of one is a change of one line
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    TABLE.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
