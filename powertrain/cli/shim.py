"""`powertrain shim NAMES -- COMMAND`: run a command whose imports of other libraries give Powertrain's functions."""

import os
import shutil
from typing import Annotated

import typer


def shim(
    names: Annotated[str, typer.Argument(help="flash_attn, xformers, transformer_engine, ...; several with commas")],
    command: Annotated[list[str], typer.Argument(help="after --: the command as you would run it")],
    force: Annotated[bool, typer.Option("--force", help="put ours before a library that is installed")] = False,
) -> None:
    """Run a command in which `import flash_attn` (or another library) gives Powertrain's modules, in all its processes.

    \b
    powertrain shim flash_attn -- python train.py
    powertrain shim apex,transformer_engine -- torchrun --nproc-per-node 8 pretrain_gpt.py
    powertrain shim xformers -- python -c "import xformers.ops"

    A library that is installed is used itself, unless --force. What there is of each: docs/names.md.
    """
    from powertrain.cli.paths import one_line
    from powertrain.shim.folders import plan, python_path

    try:
        with one_line(OSError):
            shims, installed = plan(names.split(","), force=force)
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("install: ")) from None
    for library in installed:
        note = f"powertrain shim: {library.name} {library.version} is installed and is used; --force takes ours"
        typer.echo(note, err=True)
    program = shutil.which(command[0])
    if program is None:
        raise typer.BadParameter(f"command must begin with a program, got {command[0]!r}, which is not on PATH")
    environment = {**os.environ, "PYTHONPATH": python_path(shims, os.environ.get("PYTHONPATH"))}
    os.execve(program, command, environment)
