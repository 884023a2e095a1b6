"""`powertrain lint`: check of a training config without training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.table import Table

from powertrain.cli.paths import must_exist
from powertrain.runtime.console import Console
from powertrain.runtime.reading import named
from powertrain.runtime.target import Target

if TYPE_CHECKING:
    from powertrain.train.config.reader import Files, Run
    from powertrain.train.config.schema import RunConfig
    from powertrain.train.lint import Finding, Memory, Report


def lint(
    files: Annotated[list[str], typer.Argument(help="config files, ours or GPT-NeoX's, and key=value overrides")],
    arch: Annotated[
        list[str] | None, typer.Option(help="a GPU or arch that need not be here; repeatable", show_default=False)
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="GPUs of the run; default: as few as it takes", min=1, show_default=False)
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="a key that would be ignored is an error")] = False,
    format: Annotated[str | None, typer.Option(help="powertrain or gpt_neox; default: recognized by content")] = None,
    no_files: Annotated[
        bool, typer.Option("--no-files", help="data, tokenizer and checkpoints need not be on this machine")
    ] = False,
) -> None:
    """Check a training config without training: all keys, the files that it names, shapes, memory, kernels, and
    unsupported features of a GPU.

    The exit code is 0 if nothing is wrong, 1 if the run cannot work on a named GPU, 2 if the config or a file that it
    names cannot be read.

    \b
    powertrain lint configs/neox/125M.yml configs/neox/local_setup.yml --no-files --arch A100 --arch "RTX 2080"
    powertrain lint run.yml train.seq_length=8192 --world-size 8
    """
    console = Console()
    named: Files = "any" if no_files else "all"
    run = read_run(files, world_size=world_size, strict=strict, format=format, named=named)
    from powertrain.train.config.table import render
    from powertrain.train.lint import lint as inspect

    try:
        targets = [Target.parse(name) for name in arch or ["A100", "H100"]]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--arch") from None
    console.print(run.note, highlight=False)
    render(run.table, console)
    try:
        config, ranks = sized(run, world_size, compares=not no_files)
        report = inspect(config, targets, world_size=ranks)
    except ValueError as error:  # sizes that no op takes
        _end_with(error)
    show(report, run, console)
    if not report.passed:
        raise typer.Exit(1)


def read_run(
    words: list[str], *, world_size: int | None, strict: bool = False, format: str | None = None,
    named: "Files" = "any",
) -> "Run":  # fmt: skip
    """The run of a command line's files and key=value words; its errors are printed, and the command exits with 2.

    named   which of the files that the config names must be there
    """
    must_exist(missing_files(words), words=CONFIG_WORDS)
    overrides = _overrides(words)
    files = [word for word in words if word not in overrides]
    from powertrain.train.config.reader import WrongFiles, read_config
    from powertrain.train.config.yaml_source import ConfigError

    try:
        kind: Any = format  # checked by read_config
        return read_config(files, overrides, world_size=world_size or 1, strict=strict, format=kind, files=named)
    except ConfigError as error:
        elsewhere = isinstance(error, WrongFiles) and named == "all"
        _end_with(f"{error}\n(on another machine? --no-files leaves files out)" if elsewhere else error)


def _end_with(words: object) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(str(words), markup=False, highlight=False)
    raise typer.Exit(2) from None


# in place of a file
CONFIG_WORDS = ("quickstart",)


def missing_files(words: list[str]) -> list[str]:
    """Arguments of a command line that are neither an override nor an existing config."""
    # "small" stands for small.yml, as in GPT-NeoX's own command line
    known = {*CONFIG_WORDS, *_overrides(words)}
    return [word for word in words if word not in known and not Path(f"{word}.yml").exists()]


def _overrides(words: list[str]) -> list[str]:
    # a file may have "=" in its name
    return [word for word in words if "=" in word and not _is_there(word)]


def _is_there(word: str) -> bool:
    try:
        return Path(word).exists()
    except OSError:  # an override may be longer than a file's name
        return False


def sized(run: "Run", world_size: int | None, *, compares: bool = False) -> "tuple[RunConfig, int]":
    """The run's config with its vocabulary's size, and its GPUs, by default the fewest that it takes. A tokenizer that
    cannot be read, and a parallel section that so many GPUs cannot train by, is said and ends with 2.

    compares   a size in the config with that of the tokenizer, if its file is on this machine
    """
    from powertrain.train.config.files import is_local
    from powertrain.train.data.sources import vocabulary_size
    from powertrain.train.mesh_shape import check_parallel, fewest_ranks
    from powertrain.train.run import check_packages, with_vocabulary

    try:
        check_packages(run.config)
    except ValueError as error:
        _end_with(error)
    ranks = world_size or fewest_ranks(run.config.parallel)
    try:
        check_parallel(run.config, ranks)
    except (ValueError, NotImplementedError) as error:
        _end_with(f"{error} (--world-size {ranks})")
    # a size in the config spares reading the tokenizer, which may not be on this machine
    if run.config.model.vocab_size and not (compares and is_local(run.config.data.tokenizer)):
        return run.config, ranks
    try:
        size = vocabulary_size(run.config.data)
    except (ValueError, OSError) as error:
        _end_with(f"data.tokenizer: {named(error)}")
    return with_vocabulary(run.config, size), ranks


def show(report: "Report", run: "Run", console: Console) -> None:
    """Print shapes, memory, a rate that is never reached, and each GPU's backends."""
    from powertrain.train.schedule import unreached

    shapes = Table(
        "parameters", "shape", "layers", "elements", title=_title(report, run), title_justify="left", box=None
    )
    for group in report.groups:
        shapes.add_row(group.name, str(list(group.shape)), str(group.count), f"{group.elements:,}")
    console.print(shapes)
    console.print()
    console.print(_memory_table(report.memory))
    if words := unreached(run.config.optimizer.lr, run.config.schedule, run.config.train.steps):
        console.print(f"\nnote: {words}", highlight=False)
    for finding in report.findings:
        console.print()
        _show_finding(finding, console)


def _title(report: "Report", run: "Run") -> str:
    train = run.config.train
    tokens = train.micro_batch_size * train.gradient_accumulation_steps * train.seq_length
    return f"{report.parameters:,} parameters; {tokens:,} tokens a step on each data-parallel rank, {train.precision}"


def _memory_table(memory: "Memory") -> Table:
    from powertrain.train.lint import gib

    table = Table("memory of one GPU", "estimate", title_justify="left", box=None)
    for name in ("weights", "gradients", "optimizer"):
        table.add_row(name, gib(getattr(memory, name)))
    for mode, size in memory.activations.items():
        chosen = " (train.activation_checkpointing)" if mode == memory.mode else ""
        table.add_row(f"activations, checkpointing {mode}{chosen}", gib(size), style="" if chosen else "dim")
    table.add_row("together", gib(memory.total), style="bold")
    return table


def _show_finding(finding: "Finding", console: Console) -> None:
    from powertrain.train.lint import gib

    size = "" if finding.memory_bytes is None else f", {gib(finding.memory_bytes)}"
    console.print(f"[bold]{finding.target.name}[/] (sm_{finding.target.arch}{size})")
    for problem in finding.problems:
        console.print(f"  [red]cannot[/] {problem}")
    for note in finding.notes:
        console.print(f"  note: {note}")
    # one kernel is compiled for several shapes; its name is shown once, in order
    names = dict.fromkeys(spec.describe().split(" for ")[0].strip("_") for spec in finding.kernels)
    console.print(f"  {len(finding.kernels)} kernels to compile: {', '.join(names)}", highlight=False)
    if finding.attention is None:
        console.print("  attention: none", highlight=False)
        return
    console.print(f"  attention: {finding.attention.chosen}", highlight=False)
    table = "\n".join("    " + line for line in str(finding.attention).splitlines())
    console.print(table, style="dim", markup=False, soft_wrap=True)
