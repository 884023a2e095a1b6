"""The `powertrain` command. A command is a function in a file of this package, listed in _COMMANDS.

Importing this package must stay cheap (no torch, no triton): commands import their modules when they run.
"""

import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from inspect import cleandoc
from itertools import dropwhile, pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import powertrain
from powertrain.cli import (
    build,
    check,
    convert,
    demo,
    diagnose,
    doctor,
    evaluate,
    explain,
    facts,
    generate,
    init,
    kernels,
    lint,
    prebuild,
    preprocess,
    report,
    shim,
    tour,
    train,
    tune,
    verify,
)
from powertrain.runtime.extras import MissingExtra
from powertrain.runtime.settings import SettingsError, forget_no_columns

_COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Start here": (init.init, demo.demo, tour.tour, check.check),
    "Train": (
        train.train,
        generate.generate,
        evaluate.evaluate,
        convert.convert,
        report.report,
        lint.lint,
        preprocess.preprocess,
        verify.verify,
    ),
    "Kernels": (prebuild.prebuild, kernels.kernels, tune.tune),
    "Other projects": (build.build, shim.shim),
    "This machine": (facts.target, facts.env, doctor.doctor, diagnose.diagnose, explain.explain),
}


# of a write: the disk is full, the quota or the largest file reached, the terminal gone
_NO_MORE_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# of a name on the command line that is not looked at before
_NO_FILE = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOEXEC)
_NO_READER = 141  # as shells tell SIGPIPE; 1 would be a command's verdict, such as "damaged"


class _Commands(TyperGroup):
    """The commands. A package that is not installed, an environment variable with a wrong value, or output that cannot
    be written ends any of them with one line."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        try:
            try:
                return super().main(*arguments, **options)
            finally:
                # Python's own flush at the end of the process would print a traceback
                if sys.stdout is not None:
                    sys.stdout.flush()
        except OSError as error:
            _end_without_output(error)
            if error.errno in _NO_FILE and isinstance(error.filename, str):
                name = error.filename if len(error.filename) <= 100 else f"{error.filename[:60]}..."
                typer.echo(f"{name}: {error.strerror}", err=True)
                raise SystemExit(2) from None
            if str(error.strerror).startswith("No usable temporary directory"):
                # of modules that look for one while they are imported: each folder is full or read-only
                typer.echo(f"{error.strerror}: one must have room; TMPDIR names another", err=True)
                raise SystemExit(2) from None
            raise
        except SystemExit as error:
            # typer's and rich's, both with 1
            if isinstance(error.__context__, BrokenPipeError):
                _end_without_output(error.__context__)
            raise

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # behind -- is another program's command line
        words = args[: args.index("--")] if "--" in args else args
        for before, word in pairwise(words):
            # pathlib would make it this folder, and `preprocess "$DATA"` tokenize all that is in it
            if not word and not before.startswith("-"):
                raise typer.BadParameter(
                    f"must not be empty (behind {before!r}); is a variable of the shell not set?", ctx
                )
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        forget_no_columns()
        for stream in (sys.stdout, sys.stderr):
            # in a locale without UTF-8 a path or a generated text would be a traceback
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            os.getcwd()
        except FileNotFoundError:
            # torch ends a process there with words of another library
            typer.echo("the current folder must be there, got one that was removed; cd to another", err=True)
            raise typer.Exit(2) from None
        try:
            return super().invoke(ctx)
        except (MissingExtra, SettingsError) as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from None
        except _UsageError as error:
            _name_the_value(error)
            _name_the_dashes(error)
            raise


# of which typer exports subclasses only
_UsageError: Any = typer.BadParameter.__base__


def _name_the_value(error: Any) -> None:
    """`--top-k -1`: typer reads values by pydantic, whose sentence leaves out the value."""
    if hasattr(error.__cause__, "errors"):
        given = repr(error.__cause__.errors()[0]["input"])
        message = error.message.removeprefix("Value error, ").replace("Input should ", "must ", 1)
        error.message = message if given in message else f"{message}, got {given}"


def _name_the_dashes(error: Any) -> None:
    """`powertrain build make -j4`: the option is another program's."""
    if error.ctx is not None and isinstance(error.ctx.command, _OfOtherProgram) and hasattr(error, "option_name"):
        error.message += f"; {_dashes(error.ctx)}"


def _dashes(ctx: Any) -> str:
    usage = "shim NAMES --" if ctx.info_name == "shim" else "build --"
    return f"a command with options stands behind --: powertrain {usage} COMMAND"


class _OfOtherProgram(TyperCommand):
    """`build` and `shim`. `powertrain build pip install --force PACKAGE` would take pip's option as ours, and run pip
    without it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = args[: args.index("--")] if "--" in args else [*args]
        # first, for it shows the help and refuses options that are not ours
        rest = super().parse_args(ctx, args)
        parser = self.make_parser(ctx)
        # all that follows the first argument is an argument
        parser.allow_interspersed_args = False
        command = parser.parse_args(words)[0].get("command")
        # `shim NAMES --force COMMAND` is clear
        command = [*dropwhile(_is_option, command if isinstance(command, list | tuple) else ())]
        option = next(filter(_is_option, command), None)
        if option is not None:
            ctx.fail(f"{option} behind {command[0]} may be meant for either; ours stand before it, and {_dashes(ctx)}")
        return rest


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-"


def _end_without_output(error: OSError) -> None:
    """Exit with 2 and a line on stderr where output cannot be written, with 141 where its reader has closed it."""
    if error.errno not in (*_NO_MORE_OUTPUT, errno.EPIPE):
        return
    if sys.stdout is sys.__stdout__:
        # Python flushes the buffer once more at exit, which would fail again
        sys.stdout = open(os.devnull, "w")
    if error.errno == errno.EPIPE:
        raise SystemExit(_NO_READER) from None
    with suppress(OSError):
        typer.echo(f"{error.filename or 'output'} cannot be written: {error.strerror}", err=True)
    raise SystemExit(2) from None


app = typer.Typer(
    cls=_Commands,
    name="powertrain",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"powertrain {powertrain.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="show and exit")] = False,
) -> None:
    """Transformer training and inference in PyTorch, accelerated in pure Python.

    \b
    powertrain init                   write a commented run.yml
    powertrain train quickstart       a first run, nothing to download
    powertrain demo                   train a small GPT, kill it, resume it, generate from it
    powertrain check                  describe this machine, compare every op with float64
    powertrain check rms_norm rope    the same for some ops
    powertrain tour                   demonstrate common problems without and with Powertrain
    powertrain train run.yml          train or resume; also reads GPT-NeoX YAML unchanged
    powertrain generate runs/NAME --prompt "def "   generate text from a checkpoint
    powertrain evaluate runs/NAME --tasks piqa      evaluate a checkpoint on lm_eval's tasks
    powertrain convert runs/NAME OUT --to hf        convert to and from Hugging Face and GPT-NeoX
    powertrain report runs/NAME       write a run's report.html again
    powertrain lint run.yml           check a training config without training
    powertrain verify runs/NAME       compare checkpoints and data sets with their checksums
    powertrain prebuild --arch H100   compile kernels ahead of time, for GPUs that need not be present
    powertrain kernels                list and verify compiled kernels
    powertrain tune rms_norm          measure the tile sizes of an op on this GPU
    powertrain build -- pip install ...   build another project's CUDA extension within this machine's memory
    powertrain shim flash_attn -- python train.py   run a program with Powertrain in place of flash-attn
    powertrain target "RTX 3090 Ti"   show the properties of a GPU, present or not
    powertrain env                    list environment variables and their values
    powertrain doctor                 check this machine: problems and their fixes
    powertrain diagnose train.log     find the cause of an error in a log, and the fix
    powertrain explain attention      show which attention backend a GPU uses, and why not the others

    `powertrain COMMAND --help` describes each command.
    """


def _help(docstring: str | None) -> str:
    """A docstring without the line ends in its paragraphs, which typer would print, but in those behind \\b."""
    paragraphs = cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(each if each.startswith("\b") else each.replace("\n", " ") for each in paragraphs)


for _panel, _functions in _COMMANDS.items():
    for _function in _functions:
        _class = _OfOtherProgram if _panel == "Other projects" else TyperCommand
        app.command(cls=_class, rich_help_panel=_panel, help=_help(_function.__doc__))(_function)
