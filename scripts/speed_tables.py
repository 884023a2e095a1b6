"""`python scripts/speed_tables.py`: write the tables of docs/speed.md, each from the newest run of
`python -m benchmarks.all` that has its section.

They stand between the lines `<!-- made by scripts/speed_tables.py -->` and `<!-- until here -->`; tests/test_docs.py
fails if they differ from the runs' figures. If a case was measured twice, the first figure is taken.
"""

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "speed.md"
GPU = "h200"
# as in benchmarks/all.py, which needs torch
PEERS = ("torch", "liger", "quack", "flash", "flex", "cudnn", "cut")
TITLES = {
    "attention": "Attention",
    "head-dims": "Attention of other head dims",
    "short": "Attention of few tokens, with backward; few queries beside many keys, forward",
    "masks": "Attention with masks, biases and changed scores",
    "decode": "Decoding and chunked prefill",
    "mla": "Decoding over MLA caches",
    "ops": "Norms, activations, dropout, losses, optimizer",
    "few-rows": "Few rows, in CUDA graphs",
    "host": "Host time of eager calls",
}
NAMES = {
    "flash-attn-3": "FlashAttention-3",
    "cudnn": "cuDNN",
    "flash": "FlashAttention-2",
    "flex": "FlexAttention",
    "torch": "PyTorch",
    "liger": "Liger",
}
Row = dict[str, Any]


class Case(NamedTuple):
    label: str
    ours: float  # ms
    theirs: float
    other: str

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


def _cases(rows: list[Row]) -> Iterator[Case]:
    by_label: dict[str, dict[str, float]] = {}
    for row in rows:
        by_label.setdefault(row["label"], {}).setdefault(row["variant"], row["ms"])
    for label, times in by_label.items():
        theirs = {name: ms for name, ms in times.items() if name.startswith(PEERS)}
        # the first variant is a call without options; the others need an argument
        ours = [ms for name, ms in times.items() if name not in theirs]
        if theirs and ours:
            other = min(theirs, key=lambda name: theirs[name])
            yield Case(label, ours[0], theirs[other], NAMES.get(other, other))


def _time(ms: float) -> str:
    return f"{ms:.3g} ms" if ms >= 0.1 else f"{ms * 1e3:.3g} us"


def _table(cases: list[Case]) -> Iterator[str]:
    yield "| case | ours | best other | | ratio |"
    yield "|---|---|---|---|---|"
    for case in cases:
        ratio = f"{case.ratio:.2f}" if case.ratio >= 0.995 else f"**{case.ratio:.2f}**"
        yield f"| {case.label} | {_time(case.ours)} | {_time(case.theirs)} | {case.other} | {ratio} |"


def _newest() -> dict[str, Path]:
    """For each section the newest file that has it."""
    found = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob(f"*_{GPU}_*.json")):
        run = json.loads(path.read_text())
        # other benchmarks write lists
        for row in run["rows"] if isinstance(run, dict) else ():
            found[row["section"]] = path
    return {section: found[section] for section in TITLES if section in found}


def _about(path: Path) -> str:
    run = json.loads(path.read_text())
    return (
        f"{run['gpu']}, torch {run['torch']}, triton {run['triton']}, commit {run['commit']}, {path.name[:10]}; every "
        f"variant in [{path.name}](../benchmarks/results/{path.name}). Not installed: {', '.join(run['left_out'])}."
    )


def tables() -> str:
    of_sections = _newest()
    lines = []
    for path in dict.fromkeys(of_sections.values()):
        titles = [TITLES[section] for section, its in of_sections.items() if its == path]
        lines += [f"- {'; '.join(titles)}: {_about(path)}"]
    for section, path in of_sections.items():
        rows = json.loads(path.read_text())["rows"]
        cases = list(_cases([row for row in rows if row["section"] == section]))
        ratios = [case.ratio for case in cases]
        slower = sum(ratio < 0.995 for ratio in ratios)
        summary = (
            f"{len(cases)} cases, of which ours is slower in {slower}; ratio {min(ratios):.2f} to {max(ratios):.2f}, "
            f"median {statistics.median(ratios):.2f}."
        )
        lines += ["", f"## {TITLES[section]}", "", summary, "", *_table(cases)]
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """The page with its tables as the newest runs have them."""
    marks = r"(<!-- made by scripts/speed_tables.py -->\n).*?(<!-- until here -->)"
    return re.sub(marks, lambda found: f"{found[1]}{tables()}{found[2]}", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
