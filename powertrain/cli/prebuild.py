"""`powertrain prebuild`: compile kernels for any GPU into a pack, ahead of time, also on a machine without a GPU."""

import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from powertrain.cli.check import Dtype
from powertrain.cli.paths import end_unwritten, must_take_a_file
from powertrain.runtime.console import Console
from powertrain.runtime.target import Target

if TYPE_CHECKING:
    from powertrain.runtime.compile.prebuild import Report
    from powertrain.runtime.compile.service import Spec


def prebuild(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="what",
            help="ops, or a training config, or one Python file whose launches are recorded; all ops if none",
            show_default=False,
        ),
    ] = None,
    arch: Annotated[
        list[str] | None, typer.Option(help="sm_80, or a card's name; repeatable", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="the pack to write")] = Path("kernels.ptp"),
    dtype: Annotated[Dtype, typer.Option(help="of the ops' inputs (a file chooses its own)")] = Dtype.bf16,
    world_size: Annotated[
        int | None,
        typer.Option(help="GPUs of a training config's run; default: as few as it takes", min=1, show_default=False),
    ] = None,
) -> None:
    """Compile kernels for any GPU archs, in parallel within this machine's memory, and write them as a pack.

    Machines that set POWERTRAIN_PACKS to the pack compile none of them. A file is run once for each arch with
    torch's default device set to "meta": its launches are recorded, nothing is computed. Of a training config, ours or
    GPT-NeoX's, with key=value words, it is one training step.

    \b
    powertrain prebuild rms_norm rope --arch sm_80 --arch "RTX 4090"
    powertrain prebuild step.py --arch H100 --out h100.ptp
    powertrain prebuild run.yml train.seq_length=4096 --arch A100
    """
    must_take_a_file(out, "--out")
    console = Console()
    try:
        targets = [Target.parse(name) for name in arch or ["sm_80", "sm_90"]]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--arch") from None
    specs = [spec for target in targets for spec in recorded(inputs or [], target, dtype, world_size)]
    if not specs:
        raise typer.BadParameter(f"nothing was launched by {inputs}", param_hint="WHAT")
    report = build_with_progress(specs, console)
    for name, failure in report.failures.items():
        console.print(f"[red]failed[/] {escape(f'{name}: {failure}')}")
    if report.failures and not report.entries:
        # an older pack at this name may hold kernels
        console.print(f"{out}: not written, since no kernel compiled", markup=False)
        raise typer.Exit(1)
    # also where some kernels failed: the others are of use, and the exit code tells
    try:
        report.write_pack(out)
    except OSError as error:
        end_unwritten(f"--out {out}", error)
    sources = ", ".join(f"{count} {source}" for source, count in sorted(report.sources.items()))
    size = out.stat().st_size / 2**20
    words = f"{len(report.entries)} kernels for {', '.join(t.name for t in targets)}, {size:.1f} MiB ({sources})"
    console.print(f"{out}: {words}", markup=False)
    console.print(f"use it with  POWERTRAIN_PACKS={out.resolve()}", markup=False)
    if report.failures:
        raise typer.Exit(1)


def recorded(inputs: list[str], target: Target, dtype: Dtype, world_size: int | None = None) -> "list[Spec]":
    """The specializations that a training step, a file, or ops at their benchmark's size would launch."""
    if any(word.endswith((".yml", ".yaml", ".json")) for word in inputs):
        from powertrain.cli.lint import read_run, sized
        from powertrain.train.lint import record_step

        config, ranks = sized(read_run(inputs, world_size=world_size), world_size)
        return record_step(config, target, world_size=ranks)
    import torch

    from powertrain.ops.cases import cases
    from powertrain.runtime.recording import record

    # launches on meta tensors are noted and not run, so the GPU need not be here
    with record(target) as wanted:
        if len(inputs) == 1 and inputs[0].endswith(".py"):
            if not Path(inputs[0]).is_file():
                raise typer.BadParameter(f"no such file: {inputs[0]}", param_hint="WHAT")
            # the file's tensors then have shapes and no memory
            with torch.device("meta"):
                # as a program, so that code under `if __name__ == "__main__"` runs too
                runpy.run_path(inputs[0], run_name="__main__")
            return wanted.specs
        unknown = set(inputs) - {case.op for case in cases()}
        if unknown:
            known = sorted({case.op for case in cases()})
            raise typer.BadParameter(f"unknown ops {sorted(unknown)}; known: {', '.join(known)}", param_hint="WHAT")
        for case in cases():
            if not inputs or case.op in inputs:
                case.step(case.inputs(case.full, dtype.torch, torch.device("meta")))
    return wanted.specs


def build_with_progress(specs: "list[Spec]", console: Console, *, again: bool = False) -> "Report":
    """Build with a progress bar: last kernel, number of workers and the reason for it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from powertrain.runtime.compile.prebuild import build
    from powertrain.runtime.compile.service import PER_JOB_BYTES
    from powertrain.runtime.jobs import jobs
    from powertrain.runtime.settings import settings

    console.print(f"{len(specs)} kernels; {jobs(PER_JOB_BYTES, settings().jobs).why}")
    columns = (TextColumn("{task.description:60.60}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        # several specializations may be one kernel, which is compiled once
        task = bar.add_task("starting", total=len({spec.key for spec in specs}))
        return build(
            specs,
            lambda spec, _, source: bar.update(task, advance=1, description=f"{spec.describe()}: {source}"),
            again=again,
        )
