"""`powertrain tour`: demonstrations of common problems, without and with Powertrain, on this machine."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from powertrain.runtime.console import Console

STUCK_SECONDS = 8  # how long we watch torch's loader do nothing
# for two ranks from their start to the end of a screen that takes about twelve
RANKS_SECONDS = 60

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
from powertrain.ops.cases import cases
from powertrain.runtime.compile.service import entry_for
from powertrain.runtime.recording import record
case = cases("rms_norm")[0]
with record("sm_90") as wanted:
    case.step(case.inputs(case.full, torch.bfloat16, torch.device("meta")))
print("loading", flush=True)
for spec in wanted.specs:
    print(spec.describe() + ": " + entry_for(spec)[1], flush=True)
"""


def tour(
    screen: Annotated[
        str | None,
        typer.Argument(help="one screen only: hang, build, archs, attention, mixed or overlap", show_default=False),
    ] = None,
) -> None:
    """Demonstrate common problems on this machine's CPU, without and with Powertrain.

    \b
    hang       a fused-kernel build killed half-way: the next run of torch's loader waits for ever, ours finishes
    build      "Building wheel for transformer-engine": this machine's plan, made before it starts
    archs      kernels for eight GPU generations compiled here, with no GPU
    attention  "No dot product attention backend is available": DeepSeek-V3's attention on an A100
    mixed      an RTX 2080 and an RTX 3090 in one process
    overlap    tensor parallelism overlapped without MPI, on two ranks of this CPU; then one of them is killed
    """
    screens: dict[str, Callable[[Console], None]] = {
        "hang": _hang,
        "build": _build,
        "archs": _archs,
        "attention": _attention,
        "mixed": _mixed,
        "overlap": _overlap,
    }
    if screen is not None and screen not in screens:
        raise typer.BadParameter(f"must be one of {', '.join(screens)}, got {screen!r}")
    from powertrain.train.signals import exits_on_signals

    console = Console()
    # so that the processes and folders of a screen go with it
    with exits_on_signals():
        for name, show in screens.items():
            if screen in (None, name):
                show(console)


@contextmanager
def _started(script: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own session, which ends with the block, also by Ctrl-C: torch's loader would wait for ever."""
    environment = {
        **os.environ,
        "POWERTRAIN_STORE": str(folder / "store"),
        "POWERTRAIN_PACKS": "",
        "POWERTRAIN_LOG": "",
    }
    for name in ("POWERTRAIN_INTERPRET", "TRITON_INTERPRET"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            _kill(process)


def _kill(process: subprocess.Popen[str]) -> str:
    """kill -9 the process and its session; returns its output."""
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
        with _started(_TORCH_EXTENSION, folder) as first:
            killed = _kill_once(first, (folder / "lock").exists)
        before = time.monotonic()
        with _started(_TORCH_EXTENSION, folder) as process:
            try:
                # the imports take some seconds
                process.wait(STUCK_SECONDS + 4)
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
        with _started(_OUR_KERNELS, folder) as first:
            killed = _kill_once(first, lambda: any((folder / "store" / "locks").glob("*")))
        before = time.monotonic()
        with _started(_OUR_KERNELS, folder) as process:
            printed = process.communicate(timeout=300)[0]
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
    from powertrain.cli.check import Dtype
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


def _attention(console: Console) -> None:
    from powertrain.cli.explain import explained_as
    from powertrain.ops.attention import explain_attention

    console.rule('[bold]"No dot product attention backend is available for the provided inputs"')
    console.print(
        "Training DeepSeek-V3 on A100s: packed sequences (thd), 64 heads, head dim 192 for query and key and 128 for "
        "value, bfloat16, with NVTE_FLASH_ATTN=0 and NVTE_UNFUSED_ATTN=0 (TransformerEngine#1821).\n"
    )
    arguments = {
        "layout": "thd", "head_dim_qk": 192, "head_dim_v": 128, "num_heads": 64, "queries": 588, "is_causal": True,
        "causal_align": "top_left",
    }  # fmt: skip
    ours = explain_attention(arch="A100", **arguments)  # type: ignore[arg-type]
    switches = ["NVTE_FLASH_ATTN=0", "NVTE_UNFUSED_ATTN=0"]
    theirs = explained_as("transformer-engine", ours, 588, 588, ("2.3", "2.6", "9.8", None), switches)
    console.print(Panel(_plain(theirs), title="before: the choice of TransformerEngine 2.3", border_style="red"))
    lines = [*ours.columns[0].notes, "", "compiled here, for an A100 that need not be:"]
    lines += _compiled(console, "A100", 1176, 64, (192, 128), thd=True)
    title = f"after: powertrain.varlen_attention is served by {ours.chosen}"
    console.print(Panel(_plain("\n".join(lines)), title=title, border_style="green"))
    console.print("powertrain explain attention --help  answers the same for any problem and GPU.")


def _build(console: Console) -> None:
    command = ["pip", "install", "--no-build-isolation", "transformer_engine[pytorch]"]
    console.rule("[bold]Building wheel for transformer-engine … (stuck)")
    console.print(
        "By itself it compiles for every GPU generation, with as many compilers at once as there are cores, until "
        "memory is full, and prints nothing meanwhile (NVIDIA/TransformerEngine issues 976, 978, 1077).\n"
    )
    silence = f"{shlex.join(command)}\nBuilding wheel for transformer-engine (pyproject.toml): started"
    console.print(Panel(_plain(silence), title="before: all that is said for an hour", border_style="red"))
    build = [sys.executable, "-m", "powertrain", "build", "--plan", "--", *command]
    inside = {**os.environ, "COLUMNS": str(console.width - 4)}
    done = subprocess.run(build, capture_output=True, text=True, env=inside)
    title = "after: powertrain build --plan -- pip install …"
    console.print(Panel(_plain((done.stdout + done.stderr).strip()), title=title, border_style="green"))


def _mixed(console: Console) -> None:
    import torch

    from powertrain.ops.attention import explain_attention

    console.rule("[bold]An RTX 2080 and an RTX 3090 in one machine")
    console.print(
        "A build of xFormers made on the 2080 holds sm_75 code only. On the 3090 its host picks the kernel for sm_80, "
        "whose body was compiled away: it prints a line on the device and returns, no exception is raised, and the "
        "result is uninitialized memory (xformers#1045).\n"
    )
    console.print(
        Panel(
            "FATAL: kernel fmha_cutlassF_f16_aligned_64x128_rf_sm80 is for sm80-sm100, but was built for sm75",
            title="before: all that is said on the 3090",
            border_style="red",
        )
    )
    cards = ("RTX 2080", "RTX 3090")
    five = explain_attention(arch=cards, layout="bmghk", num_heads=8, dtype=torch.float16, head_dim_qk=64)
    four = explain_attention(arch=cards, num_heads=8, dtype=torch.float16, head_dim_qk=64)
    lines = []
    for card in cards:
        lines.append(f"{card}: 5-D query [batch, M, groups, heads, K]: {five.by_gpu[card]}; 4-D: {four.by_gpu[card]}")
        lines += _compiled(console, card, 256, 8, (64, 64), thd=False)
    lines.append("chosen, planned and compiled by the device of the tensors of each call; nothing is global")
    console.print(Panel(_plain("\n".join(lines)), title="after: Powertrain, both cards", border_style="green"))


def _overlap(console: Console) -> None:
    console.rule("[bold]Overlapped tensor parallelism needs MPI, GDRCopy and a fixed number of tokens")
    console.print(
        "TransformerEngine's Userbuffers overlap transfers of tensor-parallel ranks with the products. Getting "
        "there has no guide (NVIDIA/TransformerEngine issues 827, 986, 994, 1071).\n"
    )
    theirs = (
        "NVTE_UB_WITH_MPI=1 MPI_HOME=/usr/lib/openmpi pip install --no-build-isolation transformer_engine[pytorch]\n"
        "mpirun -np 2 -x CUDA_DEVICE_MAX_CONNECTIONS=1 python train.py    # or a bootstrap_backend, one of three\n"
        "initialize_ub([8192, 4096], tp_size)    # so many tokens in every call, on consecutive ranks\n"
        "a rank dies: after UB_TIMEOUT (110 s) a kernel prints a line, and continues with stale data"
    )
    console.print(Panel(_plain(theirs), title="before: Userbuffers", border_style="red"))
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "rank 0"
        before = time.monotonic()
        worked = _ranks_lose_one(log)
        seconds = time.monotonic() - before
        output = log.read_text().strip()
    title = "after: two plain processes with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; output of rank 0"
    console.print(Panel(_plain(output), title=title, border_style="green" if worked else "red"))
    if not worked:
        console.print("The two ranks did not come to the end of this screen; above is how far they came.")
        raise typer.Exit(1)
    console.print(
        f"{seconds:.0f} s, imports included. torchrun, srun and mpiexec start ranks as well as this did; on GPUs the "
        "same lines take NVLink (docs/overlap.md)."
    )


def _ranks_lose_one(log: Path) -> bool:
    """Two ranks of powertrain/cli/tour_ranks.py; rank 1 is killed once rank 0 waits for it. Whether rank 0 named it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks: list[subprocess.Popen[str]] = []
    try:
        for output in (log, log.with_name("rank 1")):
            ranks.append(_start_rank(len(ranks), port, output))
        deadline = time.monotonic() + RANKS_SECONDS
        while ranks[0].poll() is None and time.monotonic() < deadline and "has waited" not in log.read_text():
            time.sleep(0.05)
        if "has waited" in log.read_text():
            with log.open("a") as file:
                file.write(f"kill -9 {ranks[1].pid}\n")
            _kill(ranks[1])
            ranks[0].wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in ranks:
            _kill(process)
    return "PeerTimeout" in log.read_text()


def _start_rank(rank: int, port: int, log: Path) -> subprocess.Popen[str]:
    """As a launcher would, without one. Variables of an outer launcher or for a GPU are left out."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    environment |= {name: str(value) for name, value in variables.items()}
    environment |= {"MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name in ("POWERTRAIN_INTERPRET", "TRITON_INTERPRET", "POWERTRAIN_LOG_FILE"):
        environment.pop(name, None)
    with log.open("a") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "powertrain.cli.tour_ranks"],
            env=environment, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip


def _plain(text: object) -> Text:
    return Text(str(text))


def _compiled(
    console: Console, card: str, length: int, heads: int, head_dims: tuple[int, int], *, thd: bool
) -> list[str]:
    """Compile the kernels of attention, forward and backward, for a card; a line for each."""
    import torch

    from powertrain.cli.prebuild import build_with_progress
    from powertrain.ops.attention import attention, varlen_attention
    from powertrain.runtime.recording import record
    from powertrain.runtime.target import Target

    dtype = torch.float16 if Target.parse(card).arch < 80 else torch.bfloat16
    # packed, or 5-D
    shape = (length, heads) if thd else (1, length, 1, heads)
    q, k, v = (
        torch.empty(*shape, d, dtype=dtype, device="meta", requires_grad=True)
        for d in (head_dims[0], head_dims[0], head_dims[1])
    )
    with record(Target.parse(card)) as wanted:
        if thd:
            starts = torch.empty(3, dtype=torch.int32, device="meta")
            out = varlen_attention(q, k, v, starts, max_seqlen_q=length // 2, is_causal=True, backend="triton")
        else:
            out = attention(q, k, v, layout="bmghk", backend="triton")
        torch.autograd.backward(out, torch.empty_like(out))
    report = build_with_progress(wanted.specs, console)
    lines = [f"  {name}: {str(failure).splitlines()[0]}" for name, failure in report.failures.items()]
    for entry in report.entries:
        launch = entry.manifest["launch"]
        lines.append(
            f"  {entry.manifest['kernel']} for sm_{entry.manifest['arch']}: {launch['registers']} registers, "
            f"{launch['shared']} bytes of shared memory"
        )
    return lines
