"""`powertrain doctor`: problems of this machine; --kernels: tests of every attention backend on every device."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from powertrain.runtime.console import Console

if TYPE_CHECKING:
    import torch

    from powertrain.doctor.finding import Check, Finding
    from powertrain.ops.attention.backend_registry import Backend
    from powertrain.runtime.machine import Machine

TILE = (2, 256, 4, 64)  # batch, queries, heads, head dim: shape of the accuracy check
LOAD = (4, 4096, 16, 128)  # shape that is timed on a GPU
CPU_LOAD = (1, 512, 4, 64)

_GOOD = "every backend that takes this errs no more than allowed"  # last line of --kernels
_STYLE = {"ok": "green", "warning": "bold yellow", "problem": "bold red"}


def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="apply the safe fixes: they rename, and delete nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="findings as JSON, one object")] = False,
    only: Annotated[list[str] | None, typer.Option(help="run this check only; may be repeated")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="leave this check out; may be repeated")] = None,
    hostfile: Annotated[Path | None, typer.Option(help="check the hosts of this file instead")] = None,
    overlap: Annotated[bool, typer.Option("--overlap", help="can tensor parallelism be overlapped here?")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="run every attention backend on every device")] = False,
) -> None:
    """Check this machine: problems, the evidence, and the command that fixes each.

    \b
    powertrain doctor                     every check; changes nothing
    powertrain doctor --fix               and apply the safe fixes
    powertrain doctor --hostfile hosts    are several hosts ready to train together? ssh, versions, ports
    powertrain doctor --overlap           requirements of tensor-parallel overlap, for us and for TransformerEngine
    powertrain doctor --kernels           every attention backend on every device, judged against float64 and timed

    Exit code 0: no problem (warnings alone are none); 1: a problem. --kernels runs causal attention, forward and
    backward; its TFLOP/s count 3.5 forwards for forward and backward.
    """
    from powertrain.doctor.checks import CHECKS
    from powertrain.runtime.machine import Machine

    if kernels:
        if fix or as_json or only or skip or hostfile or overlap:
            raise typer.BadParameter("--kernels takes no other option: it prints its own table")
        _kernels()
        return
    if hostfile and overlap:
        raise typer.BadParameter("choose one of --hostfile and --overlap")
    if hostfile and not hostfile.is_file():
        raise typer.BadParameter(f"{hostfile}: no such file", param_hint="--hostfile")
    machine = Machine.here()
    checks = [*CHECKS, *_contributed()]
    if hostfile:
        from powertrain.doctor.hosts import check_hosts

        checks = [check_hosts(hostfile)]
    if overlap:
        from powertrain.doctor.overlap import CHECKS as OVERLAP

        checks = [*OVERLAP, _overlap_check()]
    _examine(_chosen(checks, only, skip), machine, fix, as_json)


def _contributed() -> "list[Check]":
    """Checks of packages above the doctor's; they run in processes of their own, with a deadline."""
    from powertrain.doctor.finding import Check

    return [Check("attention", "does every attention backend err no more than allowed?", _attention)]


def _overlap_check() -> "Check":
    from powertrain.doctor.finding import Check

    return Check("overlap-powertrain", "which transport has Powertrain here, and is it right?", _overlap)


def _overlap(machine: "Machine") -> "Iterator[Finding]":
    """A rank for each GPU, or two on the CPU, over the best transport that there is."""
    from powertrain.doctor.echo import run_ranks
    from powertrain.doctor.finding import Finding

    on_gpus = len(machine.gpus) >= 2 and machine.torch_cuda is not None
    backend, size, seconds = ("nccl", len(machine.gpus), 120.0) if on_gpus else ("gloo", 2, 60.0)
    ran = run_ranks(machine, backend, size, seconds, ("-m", "powertrain.parallel.self_check"))
    passed = [line for line in ran.output.splitlines() if line.startswith("products are right over")]
    if ran.status == 0 and len(passed) == size:
        yield Finding("ok", f"tensor parallelism without MPI, {size} ranks: {passed[0]}")
        return
    ended = f"did not end within {seconds:.0f} s" if ran.status == 124 else f"failed (exit status {ran.status})"
    evidence = tuple(line for line in ran.output.strip().splitlines() if line.strip())[-3:]
    fix = "docs/overlap.md; parallel.transport: sequential in a run's config goes without it"
    yield Finding("problem", f"{size} ranks over {backend} {ended}", evidence, fix)


def _attention(machine: "Machine") -> "Iterator[Finding]":
    from powertrain.doctor.finding import Finding

    # a first run compiles kernels
    seconds = 300.0
    ran = machine.run([machine.python, "-m", "powertrain", "doctor", "--kernels"], seconds)
    if ran is not None and ran.status == 0:
        yield Finding("ok", ran.output[ran.output.rindex(_GOOD) :].strip())
        return
    lines = ran.output.strip().splitlines() if ran else []
    bad = [line.strip() for line in lines if " WRONG " in line or " error " in line] or lines[-3:]
    ended = f"was ended after {seconds:.0f} s" if ran and ran.status == 124 else "found backends that err or fail"
    yield Finding("problem", f"powertrain doctor --kernels {ended}", tuple(bad), "powertrain doctor --kernels")


def _chosen(checks: "list[Check]", only: list[str] | None, skip: list[str] | None) -> "list[Check]":
    known = [check.name for check in checks]
    for name in (*(only or ()), *(skip or ())):
        if name not in known:
            raise typer.BadParameter(f"unknown check {name!r}; known: {', '.join(known)}")
    return [check for check in checks if (not only or check.name in only) and check.name not in (skip or ())]


def _examine(checks: "list[Check]", machine: "Machine", fix: bool, as_json: bool) -> None:
    from powertrain.doctor.finding import examine, worst

    console = Console(soft_wrap=True, highlight=False)
    checked, fixed = [], []
    for check, finding in examine(checks, machine):
        checked.append((check, finding))
        done = finding.apply() if fix and finding.apply else None
        if done is not None:
            fixed.append({"check": check.name, "did": done})
        if not as_json:
            _show(console, check.name, finding, done)
    level = worst(finding for _, finding in checked)
    if as_json:
        findings = [finding.as_json(check) for check, finding in checked]
        print(json.dumps({"worst": level, "findings": findings, "fixed": fixed}, indent=2))
    else:
        _sum_up(console, [finding for _, finding in checked], fix)
    if level == "problem":
        raise typer.Exit(1)


def _show(console: Console, name: str, finding: "Finding", done: str | None) -> None:
    console.print(f"[{_STYLE[finding.level]}]{finding.level:8}[/]{name:20} {escape(finding.message)}")
    if finding.level == "ok":
        return
    for line in finding.evidence:
        console.print(f"{'':29}[dim]{escape(line)}[/]")
    console.print(f"{'':29}fix: [bold]{escape(finding.fix or '')}[/]")
    for line in (done or "").splitlines():
        console.print(f"{'':29}[green]done: {escape(line)}[/]")


def _sum_up(console: Console, findings: "list[Finding]", fix: bool) -> None:
    counts = {level: sum(finding.level == level for finding in findings) for level in ("problem", "warning")}
    words = ", ".join(f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items() if count)
    console.print(f"\n{words or 'all is well'}")
    if not fix and any(finding.apply for finding in findings):
        console.print("powertrain doctor --fix applies the safe fixes")


def _kernels() -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=150)
    bad = 0
    table = Table("device", "backend", "verdict", title="causal attention, forward and backward", title_justify="left")
    for column in ("error", "allowed", "ms", "TFLOP/s"):
        table.add_column(column, justify="right")
    table.add_column("why not")
    with Live(table, console=console, vertical_overflow="visible"):
        for device in _devices():
            for row, ok in _rows(device):
                table.add_row(*map(escape, row), style=None if ok else "bold red")
                bad += not ok
            table.add_section()
    if bad:
        console.print(f"[bold red]{bad} backends err more than allowed, or failed")
        raise typer.Exit(1)
    gpus = len(_devices()) - 1
    where = f"{gpus} GPU{'s' if gpus > 1 else ''} and the CPU" if gpus else "the CPU; torch sees no GPU"
    console.print(f"{_GOOD}, on {where}")


def _devices() -> list["torch.device"]:
    import torch

    return [*(torch.device("cuda", n) for n in range(torch.cuda.device_count())), torch.device("cpu")]


def _rows(device: "torch.device") -> Iterator[tuple[tuple[str, ...], bool]]:
    """A row for each backend that is made for the device."""
    import torch

    from powertrain.ops.attention.backend_registry import BACKENDS
    from powertrain.ops.attention.explain import explain_attention

    gpu = device.type == "cuda"
    name = f"{device} {torch.cuda.get_device_name(device)}" if gpu else "cpu"
    verdicts = explain_attention(*_inputs(device, TILE), is_causal=True).columns[0].verdicts
    for verdict in verdicts:
        if verdict.reasons:
            yield (name, verdict.name, "-", "", "", "", "", str(verdict.reasons[0])), True
            continue
        try:
            yield _run(name, BACKENDS[verdict.name], device)
        except Exception as error:
            yield (name, verdict.name, "error", "", "", "", "", f"{type(error).__name__}: {error}"[:300]), False


def _inputs(device: "torch.device", shape: tuple[int, ...]) -> list[Any]:
    import torch

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        dtype = torch.float16
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]


def _run(name: str, backend: "Backend", device: "torch.device") -> tuple[tuple[str, ...], bool]:
    from powertrain.ops.attention import attention
    from powertrain.ops.attention.backends.reference import attention_ref
    from powertrain.ops.attention.mask import MaskSpec
    from powertrain.testing.numerics import errors

    def ours(query: Any, key: Any, value: Any) -> Any:
        return attention(query, key, value, is_causal=True, backend=backend.name)

    def plain(query: Any, key: Any, value: Any, upcast: bool = False) -> Any:
        return attention_ref(query, key, value, mask=MaskSpec(right=0), upcast=upcast)[0]

    def exact(query: Any, key: Any, value: Any) -> Any:
        return plain(query, key, value, upcast=True)

    tensors = dict(zip(("query", "key", "value"), _inputs(device, TILE), strict=True))
    worst = max(errors(ours, plain, exact, tensors), key=lambda e: e.ours / max(e.allowed, 1e-30))
    ms, flops = _time(ours, device)
    verdict = "PASS" if worst.ok else "WRONG"
    cells = (f"{worst.ours:.2g}", f"{worst.allowed:.2g}", f"{ms:.3f}", f"{flops / ms / 1e9:.3g}")
    return (name, backend.name, verdict, *cells, "" if worst.ok else worst.name), worst.ok


def _time(ours: Any, device: "torch.device") -> tuple[float, float]:
    """(ms, FLOPs) of a forward and backward."""
    import torch

    b, s, h, d = LOAD if device.type == "cuda" else CPU_LOAD
    tensors = _inputs(device, (b, s, h, d))
    grad = torch.randn_like(tensors[0])
    flops = 3.5 * 4 * b * h * s * s * d / 2

    def step() -> None:
        torch.autograd.grad(ours(*tensors), tensors, grad)

    if device.type == "cuda":
        from powertrain.testing.bench import measure

        with torch.cuda.device(device):
            return measure({"step": step}, seconds=0.1, rounds=20)["step"].ms, flops
    step()
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3, flops
