"""`powertrain build -- COMMAND`: plans and supervises the build of a CUDA extension; `powertrain build history`."""

import os
import re
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import platformdirs
import typer
from rich.markup import escape
from rich.table import Table

from powertrain.runtime.console import Console

if TYPE_CHECKING:
    from powertrain.builder.history import History, Record
    from powertrain.builder.host import BuildHost
    from powertrain.builder.plan import Plan
    from powertrain.builder.status import Outcome
    from powertrain.builder.wheels import Wheel

REFUSED = 2  # exit code of a build that was not begun
SLOWEST = 5  # units named at the end
_LONGEST_STALL = 1e6  # seconds: eleven days
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def build(
    command: Annotated[list[str], typer.Argument(help="after --: the command as you would run it; or: history")],
    plan: Annotated[bool, typer.Option("--plan", help="print the plan and stop")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="say why each value")] = False,
    arch: Annotated[list[str] | None, typer.Option(help="build for this GPU (8.6, sm_90, 'RTX 3090'); repeat")] = None,
    memory: Annotated[str | None, typer.Option(help="let the build use no more than this: 24G, 900M")] = None,
    force: Annotated[bool, typer.Option("--force", help="run although the plan says that it cannot work")] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="ask no package index whether a wheel is there that need not be built")
    ] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="rename a lock that no process owns and the build waits for")
    ] = False,
    stall: Annotated[float, typer.Option(help="seconds without any movement before its cause is named")] = 180,
) -> None:
    """Run a build that never hangs: pip, uv, python setup.py, cmake --build, ninja, make.

    \b
    powertrain build -- pip install --no-build-isolation flash-attn
    powertrain build --plan -- pip install transformer-engine\\[pytorch]
    powertrain build history
    """
    from powertrain.builder.history import History
    from powertrain.builder.host import look
    from powertrain.builder.plan import make_plan
    from powertrain.builder.recipes import recipe_of

    # also nan, which no comparison finds too small
    if not 0 < stall <= _LONGEST_STALL:
        raise typer.BadParameter(
            f"--stall must be a number of seconds above 0 and at most {_LONGEST_STALL:.0f}, got {stall:g}"
        )
    console, environment = Console(), dict(os.environ)
    folder = platformdirs.user_data_path("powertrain") / "builds"
    history = History(folder / "history.sqlite")
    if command == ["history"]:
        _print_history(console, history.last())
        return
    try:
        host = look(command, environment, arch or (), _bytes(memory))
    except ValueError as error:
        raise typer.BadParameter(f"--arch: {error}") from None
    measured = history.estimate(recipe_of(command), _text(command), _archs(host.archs))
    wheel, unanswered = (None, None) if offline else _wheel(command, environment, host)
    made = make_plan(command, environment, host, measured, wheel)
    _print_plan(console, made, explain)
    _print_wheel(console, made, wheel, unanswered, offline)
    if made.refusals and not force:
        console.print("[bold red]this cannot work as it stands[/] (--force runs it anyway)")
        raise typer.Exit(REFUSED)
    if not plan:
        raise typer.Exit(_run(console, made, environment, folder, history, stall=stall, fix=fix))


def _run(
    console: Console,
    plan: "Plan",
    environment: dict[str, str],
    folder: Path,
    history: "History",
    *,
    stall: float,
    fix: bool,
) -> int:
    from powertrain.builder.history import Record
    from powertrain.builder.run import Builder
    from powertrain.builder.terminal import keyboard_here
    from powertrain.builder.view import LiveView, PlainView

    text = _text(plan.command)
    if not shutil.which(plan.command[0], path=environment.get("PATH")):
        raise typer.BadParameter(f"COMMAND must be a program on PATH or a path to one, got {plan.command[0]!r}")
    view = LiveView(console) if console.is_terminal else PlainView(console)
    started = time.time()
    known = history.known(plan.recipe, text)
    try:
        builder = Builder(
            plan,
            environment,
            folder=folder,
            view=view,
            known=known,
            stall_seconds=stall,
            fix=fix,
            keyboard=keyboard_here(),
        )
        console.print(f"full output: {builder.files.log}", markup=False, soft_wrap=True)
        outcome = builder.run()
    finally:
        if isinstance(view, LiveView):
            view.close()
    _print_outcome(console, outcome)
    archs = _archs(plan.archs)
    spent = outcome.seconds, outcome.cpu, outcome.peak, outcome.code, str(outcome.log)
    history.add(Record(started, plan.recipe.name, text, archs, plan.jobs, *spent), outcome.units)
    return outcome.code


def _text(command: Sequence[str]) -> str:
    """Key of a build in the history: `ninja` means another one in another folder."""
    text = f"{shlex.join(command)} (in {Path.cwd()})"
    # words and folders may be of any bytes
    return text.encode(errors="replace").decode()


def _archs(archs: Sequence[int]) -> str:
    return ";".join(map(str, archs))


def _print_outcome(console: Console, outcome: "Outcome") -> None:
    from powertrain.builder.view import duration

    verdict = "[green]done[/]" if outcome.code == 0 else f"[bold red]failed[/] with exit code {outcome.code}"
    acts = f", {outcome.paused} paused, {outcome.rerun} run again" if outcome.paused or outcome.rerun else ""
    cost = f"CPU {duration(outcome.cpu)}, the builder's {outcome.overhead:.1f} s"
    console.print(f"{verdict} in {duration(outcome.seconds)}, peak {_gib(outcome.peak)}, {cost}{acts}", soft_wrap=True)
    for unit in sorted(outcome.units, key=lambda unit: -unit.seconds)[:SLOWEST]:
        console.print(f"  {duration(unit.seconds):>8}  {_gib(unit.peak):>9}  {unit.name}", markup=False, soft_wrap=True)
    for wheel in outcome.wheels:
        console.print(f"made {wheel}", markup=False, soft_wrap=True)
    if outcome.code and outcome.failure:
        console.print(f"[bold]{escape(outcome.failure.cause)}[/]: {escape(outcome.failure.line)}", soft_wrap=True)
        console.print(f"Fix: {escape(outcome.failure.fix)}", soft_wrap=True)
    if outcome.code:
        console.print(
            f"powertrain diagnose {outcome.log} says more; all of the output is there", markup=False, soft_wrap=True
        )


def _wheel(command: Sequence[str], environment: dict[str, str], host: "BuildHost") -> "tuple[Wheel | None, str | None]":
    """A prebuilt wheel, and why the search was not possible."""
    from powertrain.builder.recipes import recipe_of
    from powertrain.builder.wheels import NotAnswered, find

    recipe = recipe_of(command)
    if not recipe.package or not host.python:
        return None, None
    try:
        return find(recipe, command, environment, host.python), None
    except NotAnswered as why:
        return None, str(why)


def _print_wheel(console: Console, plan: "Plan", wheel: "Wheel | None", unanswered: str | None, offline: bool) -> None:
    """Print whether a prebuilt wheel exists; nothing if the command installs it, because the plan says so."""
    recipe = plan.recipe
    if wheel and not wheel.automatic:
        console.print(
            f"[green]instead[/] a wheel is there: {escape(wheel.get)}  ({escape(wheel.name)})", soft_wrap=True
        )
    elif unanswered:
        console.print(f"[yellow]note[/] whether a wheel is there is unknown: {escape(unanswered)}", soft_wrap=True)
    elif recipe.package and not wheel and not offline and plan.host.python:
        version = plan.host.python.version
        console.print(f"[yellow]note[/] no wheel of {recipe.package} for Python {version} was found", soft_wrap=True)


def _print_history(console: Console, records: "Sequence[Record]") -> None:
    from powertrain.builder.view import duration

    table = Table("when", "recipe", "command", "archs", "jobs", "time", "peak", "exit")
    for record in records:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started))
        sizes = duration(record.seconds), _gib(record.peak), str(record.code)
        table.add_row(when, record.recipe, escape(record.command), record.archs, str(record.jobs), *sizes)
    if records:
        console.print_table(table)
    else:
        console.print("no builds yet")


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = float(match[1]) * _SIZES[match[2].upper()] if match else 0.0
    # no compiler runs in less than a megabyte, and 64 bits count no more
    if not 2**20 <= size < 2.0**63:
        raise typer.BadParameter(f"--memory must be a size such as 24G or 900M and at least 1M, got {text!r}")
    return int(size)


def _print_plan(console: Console, plan: "Plan", explain: bool) -> None:
    from powertrain.builder.view import duration

    host = plan.host
    facts = {
        "recipe": f"{plan.recipe.name}: {plan.estimate.bytes / 2**30:.1f} GiB a job ({plan.estimate.why})",
        "cores": f"{host.cores} ({host.cores_why})",
        "memory": f"{host.memory / 2**30:.1f} GiB ({host.memory_why})",
        "disk": f"no folder {host.tmp}" if host.disk is None else f"{host.disk / 2**30:.1f} GiB free in {host.tmp}",
        "GPUs": ", ".join(map(str, host.gpus)) or f"none ({host.gpus_why})",
        "nvcc": _nvcc(plan),
        "host compiler": f"{host.compiler.version} {host.compiler.path}" if host.compiler else "none",
    }
    if host.python:
        torch = f"torch {host.python.torch}, CUDA {host.python.torch_cuda or 'none'}"
        facts["python"] = f"{host.python.version} {host.python.path}, {torch if host.python.torch else 'no torch'}"
    seconds = plan.estimate.seconds
    facts["time"] = f"{f'about {duration(seconds)}' if seconds else 'unknown'} ({plan.estimate.time_why})"
    if plan.taken:
        facts["time"] = f"that of a download ({plan.taken.name})"
    rows = [(f"[bold]{name}[/]", len(name), escape(value)) for name, value in facts.items()]
    for variable in plan.variables:
        why = f"  [dim]{escape(variable.why)}[/]" if explain or variable.yours else ""
        rows.append((f"[cyan]{variable.name}[/]", len(variable.name), f"{escape(variable.value)}{why}"))
    if console.is_terminal:
        table = Table.grid(padding=(0, 2))
        for name, _, value in rows:
            table.add_row(name, value)
        console.print(table)
    else:  # a line each: a log is searched, not looked at
        widest = max(width for _, width, _ in rows)
        for name, width, value in rows:
            console.print(f"{name}{' ' * (widest - width)}  {value}", soft_wrap=True)
    for note in plan.notes:
        console.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
    for refusal in plan.refusals:
        console.print(f"[red]problem[/] {escape(str(refusal))}", soft_wrap=True)
    if plan.refusals and plan.recipe.wheels:
        console.print(f"[green]instead[/] already built: {escape(plan.recipe.wheels)}", soft_wrap=True)


def _nvcc(plan: "Plan") -> str:
    """The compiler, its target archs, and whether it suits torch."""
    nvcc, python = plan.host.nvcc, plan.host.python
    if not nvcc:
        return "none"
    archs = f"sm_{nvcc.archs[0]} to sm_{nvcc.archs[-1]}" if nvcc.archs else "archs unknown"
    suits = ""
    if python and python.torch_cuda:
        same = nvcc.version[0] == int(python.torch_cuda.split(".")[0])
        suits = f"; {'matches' if same else 'does not match'} torch's CUDA {python.torch_cuda}"
    return f"{'.'.join(map(str, nvcc.version))} {nvcc.path} ({archs}{suits})"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
