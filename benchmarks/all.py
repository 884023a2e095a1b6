"""`python -m benchmarks.all [SECTION...]`: the regression table as raw JSON, beside the last committed one.

Sections: host, decode, mla, attention, head-dims, short, masks, few-rows, ops; all of them if none is named. Opponents
that are not installed, or not named by FLASH_3_LIBRARY, are left out and said.
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from benchmarks import ahead, peers
from powertrain.testing.bench import copy_bandwidth, recorded

RESULTS = Path(__file__).parent / "results"
# of variants that are not ours: slower ones are no regression. In attention "triton" is our own backend
PEERS = ("torch", "liger", "quack", "flash", "flex", "cudnn", "cut")
# cards of one kind differ by about 2 %
NOISE = 0.03
Row = dict[str, Any]


class Part(NamedTuple):
    run: Callable[[], Iterator[str]]
    launch: Callable[[], None]  # ours on meta tensors, whose kernels are compiled before anything is timed


def _module(name: str) -> Part:
    def module() -> Any:
        return importlib.import_module(f"benchmarks.ops.{name}")

    return Part(lambda: module().run(), lambda: module().launch())


def _attention(*names: str) -> Part:
    def of_cases(function: str) -> Any:
        attention = importlib.import_module("benchmarks.ops.attention")
        return getattr(attention, function)([case for name in names for case in getattr(attention, name)])

    return Part(lambda: of_cases("against_peers"), lambda: of_cases("launch_cases"))


SECTIONS: dict[str, tuple[Part, ...]] = {
    "host": (_module("host"),),
    "decode": (_module("decode"),),
    "mla": (_module("decode_mla"),),
    "attention": (_attention("CASES", "GROUPED"),),
    "head-dims": (_attention("HEAD_DIMS"),),
    "short": (_module("attention_short"),),
    "masks": (_module("attention_masks"),),
    "few-rows": (_module("few_rows"),),
    "ops": tuple(
        map(
            _module,
            ("linear_cross_entropy", "cross_entropy", "norm", "activations", "bias_dropout_add", "rope", "adamw"),
        )
    ),
}


def _of(section: str, rows: list[Row]) -> list[Row]:
    return [{"section": section, **row} for row in rows]


def measure(sections: list[str], write: Callable[[list[Row]], None]) -> tuple[list[Row], list[str]]:
    """Every row, and the sections in which something failed; `write` is called after each table."""
    found: list[Row] = []
    failed = []
    for section in sections:
        start = time.monotonic()
        for part in SECTIONS[section]:
            with recorded() as rows:
                try:
                    for lines in part.run():
                        print(lines, end="\n\n", flush=True)
                        # a run that is ended keeps what it measured
                        write([*found, *_of(section, rows)])
                except Exception:
                    # rows measured before the error are kept; the next section runs
                    traceback.print_exc()
                    failed.append(section)
            found += _of(section, rows)
            write(found)
            torch.cuda.empty_cache()
        print(f"{section}: {time.monotonic() - start:.0f} s", end="\n\n", flush=True)
    return found, failed


def slower(rows: list[Row], before: list[Row]) -> Iterator[str]:
    """Our rows that take longer than before by more than noise and both spreads."""
    past = {(row["label"], row["variant"]): row for row in before}
    for row in rows:
        old = past.get((row["label"], row["variant"]))
        if old is None or row["variant"].startswith(PEERS):
            continue
        ratio = row["ms"] / old["ms"]
        if ratio > 1 + NOISE + row["spread"] + old["spread"]:
            yield f"{row['label']} | {row['variant']} | {old['ms']:.4f} -> {row['ms']:.4f} ms ({ratio:.2f}x)"


def behind(rows: list[Row]) -> Iterator[str]:
    """Labels at which another library is faster than the best of ours."""
    by_label: dict[str, list[Row]] = {}
    for row in rows:
        by_label.setdefault(row["label"], []).append(row)
    for label, variants in by_label.items():
        theirs = [row for row in variants if row["variant"].startswith(PEERS)]
        ours = [row for row in variants if not row["variant"].startswith(PEERS)]
        if ours and theirs:
            best, other = (min(group, key=lambda row: row["ms"]) for group in (ours, theirs))
            if other["ms"] < best["ms"]:
                cells = [f"{row['variant']} {row['ms']:.4f}" for row in (best, other)]
                yield " | ".join([label, *cells, f"{other['ms'] / best['ms']:.3f}"])


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=RESULTS).stdout.strip()


def short_name(gpu: str) -> str:
    """A GPU's name as a file's: all of it, since "Ti" and "80GB HBM3" end the names of several."""
    return "-".join(gpu.lower().removeprefix("nvidia ").removeprefix("geforce ").split())


def last_committed(gpu: str) -> tuple[str, list[Row]] | None:
    """The name and rows of the newest committed table of this GPU; an uncommitted change of it is not read."""
    names = sorted(_git("ls-tree", "--name-only", "HEAD", "./").splitlines())
    names = [name for name in names if name.endswith(f"_{gpu}_all.json")]
    if not names:
        return None
    return names[-1], json.loads(_git("show", f"HEAD:./{names[-1]}"))["rows"]


def _report(title: str, lines: Iterator[str], nothing: str) -> None:
    found = list(lines)
    print("\n".join([f"{title}:", *found]) if found else f"{title}: {nothing}", end="\n\n")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    sections = parser.parse_args(arguments).sections or list(SECTIONS)
    unknown = [name for name in sections if name not in SECTIONS]
    if unknown:
        parser.error(f"SECTION must be of {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    if not torch.cuda.is_available():
        sys.exit("benchmarks need a CUDA GPU; none is visible here")
    peers.set_up_torch_compile()
    gpu = short_name(torch.cuda.get_device_name())
    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "commit": _git("rev-parse", "--short", "HEAD"), "copy_bytes_per_s": copy_bandwidth(),
        "left_out": peers.missing(),
    }  # fmt: skip
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), end="\n\n")
    # a part of the table is never the base of a comparison, nor does it replace the whole of the same day
    what = "all" if set(sections) == set(SECTIONS) else "-".join(sections)
    path = RESULTS / f"{time.strftime('%Y-%m-%d')}_{gpu}_{what}.json"
    before = last_committed(gpu)
    print(ahead.build(part.launch for section in sections for part in SECTIONS[section]), end="\n\n", flush=True)
    rows, failed = measure(sections, lambda rows: _write(path, machine, rows))
    _report("other libraries are faster (best of ours | best of theirs | ratio)", behind(rows), "nowhere")
    if before is None:
        print(f"slower than before: no table of {gpu} is committed; commit that of all sections to compare with")
    else:
        _report(f"slower than {before[0]}", slower(rows, before[1]), "nothing")
    for section in failed:
        print(f"FAILED: {section}; see the traceback above")
    return 1 if failed else 0


def _write(path: Path, machine: dict[str, Any], rows: list[Row]) -> None:
    path.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
