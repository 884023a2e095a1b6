"""`powertrain tour`: a screen for each pain of the field, before and after, on this machine."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

STUCK_SECONDS = 8  # how long we watch torch's loader do nothing

_TORCH_EXTENSION = """
import sys, torch.utils.cpp_extension as extension
source = sys.argv[1] + "/probe.cpp"
open(source, "w").write("#include <torch/extension.h>\\nint one() { return 1; }\\n"
                        "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def(\\"one\\", &one); }\\n")
print("loading", flush=True)
print(extension.load("probe", [source], build_directory=sys.argv[1]).one(), flush=True)
"""

_OUR_KERNELS = """
import torch
from powertrain.ops.catalog import cases
from powertrain.runtime.compile import entry_for
from powertrain.runtime.recording import record
case = cases("rms_norm")[0]
with record("sm_90") as wanted:
    case.step(case.inputs(case.full, torch.bfloat16, torch.device("meta")))
print("loading", flush=True)
for spec in wanted.specs:
    print(spec.describe() + ": " + entry_for(spec)[1], flush=True)
"""


def tour(
    screen: Annotated[str | None, typer.Argument(help="one screen only: hang or archs", show_default=False)] = None,
) -> None:
    """Show, on this machine and its CPU, what the field's pains look like before and after.

    \b
    hang    a fused-kernel build killed half-way: the next run of torch's loader waits for ever, ours finishes
    archs   kernels for eight GPU generations compiled here, with no GPU
    """
    screens: dict[str, Callable[[Console], None]] = {"hang": _hang, "archs": _archs}
    if screen is not None and screen not in screens:
        raise typer.BadParameter(f"must be one of {', '.join(screens)}, got {screen!r}")
    console = Console()
    for name, show in screens.items():
        if screen in (None, name):
            show(console)


def _start(script: str, folder: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "POWERTRAIN_STORE": str(folder / "store"),
        "POWERTRAIN_PACKS": "",
        "POWERTRAIN_LOG": "",
    }
    for name in ("POWERTRAIN_INTERPRET", "TRITON_INTERPRET"):
        environment.pop(name, None)
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[str]) -> str:
    """kill -9 the process and whatever it started in its session; what it had printed."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return process.communicate()[0]


def _kill_once(process: subprocess.Popen[str], appeared: Callable[[], bool]) -> bool:
    """kill -9 as soon as the condition holds; whether it did before the process ended."""
    while process.poll() is None:
        if appeared():
            _kill(process)
            return True
        time.sleep(0.005)
    process.communicate()
    return False


def _hang(console: Console) -> None:
    console.rule("[bold]A training run that hangs in a fused-kernel compile")
    console.print(
        "GPT-NeoX builds its fused kernels at the first step, on every rank, behind a file called `lock`. "
        "Here one such build is killed (a job that hit its time limit, say), and the run started again.\n"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        killed = _kill_once(_start(_TORCH_EXTENSION, folder), (folder / "lock").exists)
        before = time.monotonic()
        process = _start(_TORCH_EXTENSION, folder)
        try:
            process.wait(STUCK_SECONDS + 4)  # the imports take some seconds
            words = f"ended with exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            words = "still waiting for the dead process's lock file, having said nothing"
        printed = _kill(process).strip().replace("\n", " / ") or "nothing"
        seconds = time.monotonic() - before
        left = ", ".join(sorted(path.name for path in folder.iterdir() if path.name == "lock")) or "nothing"
    console.print(
        Panel(
            f"first run: {'killed while it held the lock' if killed else 'ended before it could be killed'}\n"
            f"second run: after {seconds:.0f} s {words}\n"
            f"it printed: {printed}\nleft on disk: {left} (delete it by hand, on every node)",
            title="before: torch.utils.cpp_extension, as GPT-NeoX uses it",
            border_style="red",
        )
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        killed = _kill_once(_start(_OUR_KERNELS, folder), lambda: any((folder / "store" / "locks").glob("*")))
        before = time.monotonic()
        printed = _start(_OUR_KERNELS, folder).communicate(timeout=300)[0]
        seconds = time.monotonic() - before
    console.print(
        Panel(
            f"first run: {'killed while it held the lock' if killed else 'ended before it could be killed'}\n"
            f"second run: done in {seconds:.1f} s, imports included\n" + printed.strip(),
            title="after: Powertrain, killed at the same moment",
            border_style="green",
        )
    )


def _archs(console: Console) -> None:
    from powertrain.cli.demo import Dtype
    from powertrain.cli.prebuild import build_with_progress, recorded
    from powertrain.runtime.target import Target

    console.rule("[bold]A build for one GPU generation takes hours; here are eight")
    names = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
    specs = [spec for name in names for spec in recorded(["rms_norm"], Target.parse(name), Dtype.bf16)]
    before = time.monotonic()
    report = build_with_progress(specs, console, again=True)
    seconds = time.monotonic() - before
    table = Table(
        "arch", "kernels", title="rms_norm, forward and backward, with and without residual", title_justify="left"
    )
    for column in ("most registers", "spilled bytes", "most shared memory", "machine code"):
        table.add_column(column, justify="right")
    for name in names:
        mine = [entry for entry in report.entries if f"sm_{entry.manifest['arch']}" == name]
        launch = [entry.manifest["launch"] for entry in mine]
        table.add_row(
            name,
            str(len(mine)),
            str(max(facts["registers"] for facts in launch)),
            str(max(facts["stack"] for facts in launch)),
            f"{max(facts['shared'] for facts in launch)} bytes",
            f"{sum(len(entry.members['cubin']) for entry in mine) / 1024:.0f} KiB",
        )
    console.print(table)
    made = ", ".join(f"{count} {source}" for source, count in sorted(report.sources.items()))
    console.print(f"{len(report.entries)} kernels in {seconds:.1f} s ({made}); no GPU, no nvcc, no gcc.")
