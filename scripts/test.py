"""`python scripts/test.py [--slow | --gpu] [pytest options]`: the test runs, what took longest, and one closing line.

Without options: the kernels through Triton's interpreter, then everything on the CPU, GPUs hidden. --slow: the slow
tests too. --gpu: everything on the GPU's own kernels, 14 processes at once where cores and memory allow.
"""

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from powertrain.runtime.jobs import jobs

PER_PROCESS = 1 << 30  # torch, and what a test allocates
HIDE_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
# NumPy's products wait in threads of their own for cores that other test processes use, half of the CPU time of
# attention in the interpreter; torch's threads in processes that tests start do the same
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

# Most of their time they wait: for deadlines, for processes that they kill, for a compiler made up. A process of their
# own runs them beside the others, whose cores they would hold idle.
WAITING = (
    "tests/builder", "tests/faults/test_build_kills.py", "tests/faults/test_compile_kills.py",
    "tests/faults/test_lost_ranks.py", "tests/faults/test_train_kills.py", "tests/runtime/test_faults.py",
)  # fmt: skip

SLOWEST = 20  # tests whose time is printed at the end, and files whose CPU time is
GPU_PROCESSES = 14  # each holds a CUDA context and at most a few GiB: less than an eighth of an 80 GiB card
_seconds: list[tuple[float, str]] = []  # of every test that ran
_cpu_seconds: defaultdict[str, float] = defaultdict(float)  # by file, those of child processes included


def run(title: str, arguments: list[str], environment: dict[str, str], beside: bool = False) -> Counter[str]:
    """One pytest run: how many tests passed, failed (errors too) and were skipped. What one beside another says is
    printed when it has ended."""
    print(f"\n{title}: pytest {' '.join(arguments)}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *arguments, f"--junitxml={report}"]
        # Tests start hundreds of processes, and each would compile the package again: 0.6 of 3.5 s for the trainer.
        bytecode = {"PYTHONDONTWRITEBYTECODE": ""}
        done = subprocess.run(
            command, env={**ONE_THREAD, **os.environ, **bytecode, **environment}, text=True,
            stdin=subprocess.DEVNULL if beside else None, stdout=subprocess.PIPE if beside else None,
            stderr=subprocess.STDOUT if beside else None,
        )  # fmt: skip
        code = done.returncode
        counts = _counts(report, title) if report.exists() else Counter()
        if beside:
            print(f"\n{done.stdout}", flush=True)
    if code not in (0, 5) and not counts["failed"]:  # 5: no test was selected
        counts["failed"] = 1
    print(f"{title}: {_line(counts)} in {time.monotonic() - start:.0f} s", flush=True)
    return counts


def _counts(report: Path, title: str) -> Counter[str]:
    total: Counter[str] = Counter()
    root = ElementTree.parse(report).getroot()
    for case in root.iter("testcase"):
        _seconds.append((float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')} ({title})"))
        for cpu in case.iterfind("properties/property[@name='cpu_seconds']"):
            _cpu_seconds[f"{case.get('classname')} ({title})"] += float(cpu.get("value", 0))
    for suite in root.iter("testsuite"):
        tests, failed, errors, skipped = (
            int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
        )
        total.update(passed=tests - failed - errors - skipped, failed=failed + errors, skipped=skipped)
    return total


def _line(counts: Counter[str]) -> str:
    return f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"


def main(options: list[str]) -> int:
    slow, gpu = "--slow" in options, "--gpu" in options
    rest = [option for option in options if option not in ("--slow", "--gpu")]
    if not slow:
        rest = ["-m", "not slow", *rest]
    processes = jobs(PER_PROCESS)
    # one more than cores was slower: 561 s for 520 on two
    count = min(processes.count, GPU_PROCESSES) if gpu else processes.count
    if count > 1 and find_spec("xdist"):
        print(f"test processes: {count} ({processes.why})")
        # Each process has tests that lie together, so module fixtures are made once; one that is idle takes others'.
        rest = ["-n", str(count), "--dist", "worksteal", *rest]
    if gpu:
        return _close(run("on the GPU", rest, {}))
    kernels = ("kernels in Triton's interpreter", [*rest, "tests/ops"], {"POWERTRAIN_INTERPRET": "1", **HIDE_GPUS})
    if rest[0] != "-n":
        return _close(run(*kernels) + run("on the CPU", [*rest, "tests"], HIDE_GPUS))
    with ThreadPoolExecutor(1) as thread:
        # from the beginning: there are more of them than the second run would have time for beside its own
        waiting = thread.submit(run, "tests that wait", [*rest[4:], *WAITING], HIDE_GPUS, beside=True)
        interpreted = run(*kernels)
        others = run("on the CPU", [*rest, *(f"--ignore={path}" for path in WAITING), "tests"], HIDE_GPUS)
    return _close(interpreted + others + waiting.result())


def _close(counts: Counter[str]) -> int:
    print(f"\nthe slowest {SLOWEST} tests:")
    for seconds, name in sorted(_seconds, reverse=True)[:SLOWEST]:
        print(f"{seconds:7.1f} s  {name}")
    print(f"\nCPU seconds, {sum(_cpu_seconds.values()):.0f} in all:")
    for seconds, name in sorted(((s, n) for n, s in _cpu_seconds.items()), reverse=True)[:SLOWEST]:
        print(f"{seconds:7.1f} s  {name}")
    print(f"\n{_line(counts)}")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
