"""`powertrain diagnose`: any log or error of this field: its cause, the line that shows it, the fix."""

import json
import shlex
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from powertrain.doctor.diagnose import Diagnosis


class Language(str, Enum):
    en = "en"
    zh = "zh"


_WORDS = {
    "en": {"cause": "cause", "line": "line {}", "fix": "fix", "source": "seen in", "run": "the call in this log",
           "unknown": "none of the known causes", "first": "the first real error",
           "none": "and no line that reads as an error: give the whole log, from its start"},
    "zh": {"cause": "原因", "line": "第 {} 行", "fix": "解决", "source": "出处", "run": "日志中的这次调用",
           "unknown": "不在已知原因之列", "first": "第一个真正的错误",
           "none": "也没有看起来是错误的行：请提供从头开始的完整日志"},
}  # fmt: skip


def diagnose(
    context: typer.Context,
    log: Annotated[str, typer.Argument(help="a file, or - for pasted or piped text")] = "-",
    lang: Annotated[Language, typer.Option(help="of the answer")] = Language.en,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Name the cause of an error: builds that hang or die, extensions that do not load, attention, NCCL, drivers.

    \b
    powertrain diagnose build.log
    pip install -v flash-attn 2>&1 | powertrain diagnose
    powertrain diagnose train.log --lang zh

    Exit code 0: a cause was found; 1: none is known, and the first real error line is shown.
    """
    from powertrain.doctor.diagnose import Log, attention_call, first_error
    from powertrain.doctor.diagnose import diagnose as search

    text = Log(_read(log))
    diagnosis = search(text)
    if as_json:
        print(json.dumps({"causes": [_as_json(one, lang) for one in diagnosis], "first_error": first_error(text)},
                         ensure_ascii=False, indent=2))  # fmt: skip
        raise typer.Exit(0 if diagnosis else 1)
    console = Console(soft_wrap=True, highlight=False)
    words = _WORDS[lang.value]
    for one in diagnosis:
        _show(console, one, lang)
    if not diagnosis:
        first = first_error(text)
        console.print(f"[bold yellow]{words['unknown']}[/]" + ("" if first else f"; {words['none']}"))
        if first:
            console.print(f"{words['first']} ({words['line'].format(first[0])}): {escape(first[1])}")
        raise typer.Exit(1)
    call = attention_call(text)
    if call and any(one.cause.name == "no-attention-backend" for one in diagnosis):
        console.print(f"\n{words['run']}: [bold]powertrain {escape(shlex.join(call))}[/]\n")
        _explain(context, call)


def _read(log: str) -> bytes:
    if log == "-":
        return sys.stdin.buffer.read()
    path = Path(log)
    if not path.is_file():
        raise typer.BadParameter(f"must be a file or -, got {log!r}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{log} cannot be read: {error.strerror}") from None


def _show(console: Console, one: "Diagnosis", lang: Language) -> None:
    words = _WORDS[lang.value]
    console.print(f"[bold red]{one.cause.name}[/]")
    console.print(f"  {words['cause']}: {escape(one.says(lang.value))}")
    console.print(f"  {words['line'].format(one.line)}: [dim]{escape(one.evidence[:400])}[/]")
    console.print(f"  {words['fix']}: [bold]{escape(one.fix(lang.value))}[/]")
    console.print(f"  {words['source']}: {one.cause.source}")


def _as_json(one: "Diagnosis", lang: Language) -> dict[str, object]:
    return {
        "name": one.cause.name,
        "cause": one.says(lang.value),
        "line": one.line,
        "evidence": one.evidence,
        "fix": one.fix(lang.value),
        "source": one.cause.source,
    }


def _explain(context: typer.Context, call: list[str]) -> None:
    """Answer with `powertrain explain attention`; its exit code is about that call, not about this log."""
    context.find_root().command.main(call, prog_name="powertrain", standalone_mode=False)
