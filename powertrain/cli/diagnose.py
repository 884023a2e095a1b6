"""`powertrain diagnose`: the cause of an error in a log of a build or a training, the line that shows it, the fix."""

import json
import shlex
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from powertrain.runtime.console import Console

if TYPE_CHECKING:
    from powertrain.doctor.diagnose import Diagnosis
    from powertrain.doctor.log import Log


class Language(str, Enum):
    en = "en"
    zh = "zh"


_WORDS = {
    "en": {"cause": "cause", "line": "line {}", "fix": "fix", "source": "source", "run": "the call in this log",
           "unknown": "none of the known causes", "first": "the first real error",
           "none": "and no line that reads as an error: give the whole log, from its start", "last": "the last line",
           "certain": "certain", "likely": "likely", "possible": "possible: the message names a symptom only"},
    "zh": {"cause": "原因", "line": "第 {} 行", "fix": "解决", "source": "出处", "run": "日志中的这次调用",
           "unknown": "不在已知原因之列", "first": "第一个真正的错误",
           "none": "也没有看起来是错误的行：请提供从头开始的完整日志", "last": "最后一行",
           "certain": "确定", "likely": "很可能", "possible": "可能：消息只说明了症状"},
}  # fmt: skip


def diagnose(
    context: typer.Context,
    log: Annotated[str, typer.Argument(help="a file, or - for pasted or piped text")] = "-",
    lang: Annotated[Language, typer.Option(help="of the answer")] = Language.en,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Find the cause of an error in a log: failed or hanging builds, unloadable extensions, attention, NCCL, drivers.

    \b
    powertrain diagnose build.log
    pip install -v flash-attn 2>&1 | powertrain diagnose
    powertrain diagnose train.log --lang zh

    Each cause is certain (the message states it), likely (its usual reason) or possible (a symptom only, and the first
    error line is shown too). Exit code 0: a cause was found; 1: none is known, and the first error line is shown.
    """
    from powertrain.doctor.diagnose import attention_call, leaves_an_error
    from powertrain.doctor.diagnose import diagnose as search
    from powertrain.doctor.log import Log

    text = Log(_read(log))
    diagnosis = search(text)
    if as_json:
        from powertrain.doctor.diagnose import first_error

        print(json.dumps({"causes": [_as_json(one, lang) for one in diagnosis], "first_error": first_error(text)},
                         ensure_ascii=False, indent=2))  # fmt: skip
        raise typer.Exit(0 if diagnosis else 1)
    console = Console(soft_wrap=True, highlight=False)
    words = _WORDS[lang.value]
    for one in diagnosis:
        _show(console, one, lang)
    if leaves_an_error(diagnosis, text):
        _show_error(console, text, lang, known=bool(diagnosis))
    if not diagnosis:
        raise typer.Exit(1)
    call = attention_call(text)
    if call and any(one.cause.name == "no-attention-backend" for one in diagnosis):
        console.print(f"\n{words['run']}: [bold]powertrain {escape(shlex.join(call))}[/]\n")
        _explain(context, call)


def _read(log: str) -> bytes:
    content = _bytes_of(log)
    program = next((name for start, name in _PACKED.items() if content.startswith(start)), None)
    if program:
        file = "" if log == "-" else f" {log}"
        raise typer.BadParameter(f"must be text, got data of {program}: {program} -dc{file} | powertrain diagnose -")
    return content


def _bytes_of(log: str) -> bytes:
    if log == "-":
        # None: a process whose stdin was closed when it started
        if sys.stdin is None:
            raise typer.BadParameter("must be a file where stdin is closed, got -")
        return sys.stdin.buffer.read()
    path = Path(log)
    # a shell's <(command) is a pipe with a name
    if not (path.is_file() or path.is_fifo()):
        raise typer.BadParameter(f"must be a file or -, got {log!r}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{log} cannot be read: {error.strerror}") from None


# first bytes of compressed files, as logrotate leaves them -> the program that unpacks them
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\0": "xz", b"BZh": "bzip2"}


def _show_error(console: Console, text: "Log", lang: Language, known: bool) -> None:
    """The first real error line; where no line reads as one, the last."""
    from powertrain.doctor.diagnose import first_error, last_line

    words = _WORDS[lang.value]
    first, last = first_error(text), last_line(text)
    if not known:
        console.print(f"[bold yellow]{words['unknown']}[/]" + ("" if first else f"; {words['none']}"))
    for name, found in (("first", first), ("last", None if first else last)):
        if found:
            console.print(f"{words[name]} ({words['line'].format(found[0])}): {escape(found[1][:400])}")


def _show(console: Console, one: "Diagnosis", lang: Language) -> None:
    words = _WORDS[lang.value]
    console.print(f"[bold red]{one.cause.name}[/] ({words[one.cause.confidence]})")
    console.print(f"  {words['cause']}: {escape(one.message(lang.value))}")
    console.print(f"  {words['line'].format(one.line)}: [dim]{escape(one.evidence[:400])}[/]")
    console.print(f"  {words['fix']}: [bold]{escape(one.fix(lang.value))}[/]")
    console.print(f"  {words['source']}: {one.cause.source}")


def _as_json(one: "Diagnosis", lang: Language) -> dict[str, object]:
    return {
        "name": one.cause.name,
        "confidence": one.cause.confidence,
        "cause": one.message(lang.value),
        "line": one.line,
        "evidence": one.evidence,
        "fix": one.fix(lang.value),
        "source": one.cause.source,
    }


def _explain(context: typer.Context, call: list[str]) -> None:
    """Answer with `powertrain explain attention`; its exit code is about that call, not about this log."""
    context.find_root().command.main(call, prog_name="powertrain", standalone_mode=False)
