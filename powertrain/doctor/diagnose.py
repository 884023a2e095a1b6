"""A log or error, searched for known causes: the cause, the line that shows it, the fix."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal

from powertrain.doctor.causes import CAUSES, Cause

_parser = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

Language = Literal["en", "zh"]

TAIL = 6  # a log that stops, stops within its last lines
# characters of a line that are searched: a compiler's command line can be longer than a book
_LINE = 2000
_LINE_BYTES = 4 * _LINE

# lines that contain "error" without information: they surround the real error
_HOLLOW = re.compile(
    r"subprocess-exited-with-error|This error originates from a subprocess|metadata-generation-failed|"
    r"did not run successfully|Failed building wheel|-W(?:no-)?error|subcommand failed|returned non-zero exit status|"
    r"The above exception was|During handling of the above|failed-wheel-build|ChildFailedError|warning:|copying |"
    r"^\s*File \"|errors?\.(?:py|h|cpp)\b|\b0 errors?\b",
    re.I,
)
_REAL = re.compile(
    r"^(?:\[?rank\s?\d+\]?:?\s*|\[default\d+\]:\s*)?(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b\s*:|\berror\s*:|"
    r"\bfatal\b\s*:?|\bFAILED\b|\bSegmentation fault\b|\bAborted\b|\bKilled\b|\bcore dumped\b|\bundefined reference\b",
    re.I,
)
# in lower case; one of them is in all that _REAL matches
_MAYBE_ERROR = re.compile(
    rb"(?:error|exception|interrupt)\s{0,99}:|f(?:atal|ailed)|segmentation fault|aborted|killed|core dumped|undefined r"
)
_COLORS = re.compile(rb"\x1b\[[\d;]*[A-Za-z]")


@dataclass(frozen=True)
class Diagnosis:
    """A cause and the line of the log that shows it; lines count from 1."""

    cause: Cause
    line: int
    evidence: str
    groups: dict[str, str]

    def says(self, language: Language = "en") -> str:
        return self._fill(self.cause.cause if language == "en" else self.cause.cause_zh)

    def fix(self, language: Language = "en") -> str:
        return self._fill(self.cause.fix if language == "en" else self.cause.fix_zh)

    def _fill(self, words: str) -> str:
        for name, text in self.groups.items():
            words = words.replace("{" + name + "}", text)
        return words


class Log:
    """A text, as bytes: without colors, ended by newlines; text overwritten after a carriage return is its own line."""

    def __init__(self, text: str | bytes) -> None:
        data = text.encode(errors="replace") if isinstance(text, str) else text
        data = _COLORS.sub(b"", data) if b"\x1b" in data else data
        self.data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").rstrip()

    def line_at(self, start: int) -> str:
        end = self.data.find(b"\n", start, start + _LINE_BYTES)
        cut = self.data[start : end if end >= 0 else start + _LINE_BYTES]
        return cut.decode(errors="replace")[:_LINE]

    def number(self, start: int) -> int:
        return self.data.count(b"\n", 0, start) + 1

    def tail(self, count: int) -> list[int]:
        """Start offsets of the last lines, in order."""
        starts: list[int] = []
        end = len(self.data)
        while len(starts) < count and end >= 0:
            end = self.data.rfind(b"\n", 0, end)
            starts.append(end + 1)
        return starts[::-1]

    def lines_with(self, literal: bytes) -> Iterator[int]:
        """Start offsets of lines that contain it in the searched part."""
        return self._lines(lambda start: self.data.find(literal, start))

    def lines_matching(self, pattern: "re.Pattern[bytes]") -> Iterator[int]:
        """The same for a pattern, which sees everything in lower case."""
        lower = self.data.lower()
        return self._lines(lambda start: match.start() if (match := pattern.search(lower, start)) else -1)

    def _lines(self, find: Callable[[int], int]) -> Iterator[int]:
        at = find(0)
        while at >= 0:
            start = self.data.rfind(b"\n", max(0, at - _LINE_BYTES), at) + 1
            if start or at < _LINE_BYTES:
                yield start
            following = self.data.find(b"\n", at)
            at = find(following) if following >= 0 else -1


def diagnose(text: "str | bytes | Log") -> list[Diagnosis]:
    """Every known cause in a text, root causes first; empty: none is known. 100 MB take seconds."""
    log = text if isinstance(text, Log) else Log(text)
    diagnoses = [one for cause in CAUSES if (one := _search(cause, log))]
    names = {diagnosis.cause.name for diagnosis in diagnoses}
    return [diagnosis for diagnosis in diagnoses if not _covered(diagnosis.cause.name, names)]


# of two causes that one text can show, the second says less
_COVERS = {
    "nccl-timeout": {"nccl-timeout-while-compiling"},
    "disk-full": {"nccl-shared-memory"},
    "cudnn-execution": {"cudnn-sublibrary"},
    "extension-build": {
        "compiler-killed", "gpu-architecture-unknown", "host-compiler-too-new", "cuda-mismatch", "cuda-home",
        "ninja-missing", "python-headers", "cudnn-headers",
    },
}  # fmt: skip


def _covered(name: str, names: set[str]) -> bool:
    return bool(_COVERS.get(name, set()) & names)


def _search(cause: Cause, log: Log) -> Diagnosis | None:
    if cause.last:
        return _search_tail(cause, log)
    first = min(_matching(cause.pattern, log), key=lambda pair: pair[0], default=None)
    if first is None or (cause.also and not any(_matching(cause.also, log))):
        return None
    return _diagnosis(cause, log, *first)


def _search_tail(cause: Cause, log: Log) -> Diagnosis | None:
    tail = log.tail(TAIL)
    for index, start in enumerate(tail):
        if match := re.search(cause.pattern, log.line_at(start)):
            later = map(log.line_at, tail[index + 1 :])
            return None if any(map(_is_error, later)) else _diagnosis(cause, log, start, match)
    return None


def _matching(pattern: str, log: Log) -> Iterator[tuple[int, re.Match[str]]]:
    """(where the line starts, the match) of the first line that each literal leads to."""
    for literal in literals_of(pattern):
        for start in log.lines_with(literal):
            if match := re.search(pattern, log.line_at(start)):
                yield start, match
                break


def _diagnosis(cause: Cause, log: Log, start: int, match: re.Match[str]) -> Diagnosis:
    groups = {name: text for name, text in match.groupdict().items() if text}
    return Diagnosis(cause, log.number(start), match.string.strip(), groups)


@cache
def literals_of(pattern: str) -> tuple[bytes, ...]:
    """Literals of which every match of a regular expression holds at least one: a prefilter, which is
    hundreds of times faster. Raises ValueError if there are none."""
    literals = _literals(_parser.parse(pattern))
    if not all(literals):
        raise ValueError(f"{pattern!r} must hold a literal in each of its alternatives")
    return tuple(literal.encode() for literal in dict.fromkeys(literals))


def _literals(parts: Any) -> list[str]:
    """The best choice among a sequence's parts: the longest literal, or the alternatives' whose shortest is longest."""
    choices, run = [[""]], ""
    for kind, value in parts:
        if kind is _parser.LITERAL:
            run += chr(value)
            continue
        choices, run = [*choices, [run]], ""
        if kind is _parser.SUBPATTERN:
            choices.append(_literals(value[-1]))
        elif kind is _parser.BRANCH:
            choices.append([literal for branch in value[1] for literal in _literals(branch)])
        elif kind is _parser.MAX_REPEAT and value[0] > 0:
            choices.append(_literals(value[2]))
    return max([*choices, [run]], key=lambda choice: min(map(len, choice)))


def first_error(text: "str | bytes | Log") -> tuple[int, str] | None:
    """(line from 1, the line) of the first real error: none of those that only report another's."""
    log = text if isinstance(text, Log) else Log(text)
    for start in log.lines_matching(_MAYBE_ERROR):
        if _is_error(line := log.line_at(start)):
            return log.number(start), line.strip()
    return None


def _is_error(line: str) -> bool:
    return bool(_REAL.search(line)) and not _HOLLOW.search(line)


_LAYOUT = re.compile(r"(bshd|sbhd|thd|bhsd)")


def attention_call(text: "str | bytes | Log") -> list[str] | None:
    """`powertrain explain attention`, as arguments, for the call in TransformerEngine's DEBUG log, if there is one."""
    log = text if isinstance(text, Log) else Log(text)
    lines = map(log.line_at, log.lines_with(b"Running with config={"))
    config = next(filter(None, (re.search(r"Running with config=(\{.*\})\s*$", line) for line in lines)), None)
    if not config:
        return None
    logged = dict(re.findall(r"'(\w+)': (?:'([^']*)'|.)", config[1])) | dict(re.findall(r"'(\w+)': (-?\d+)", config[1]))
    sizes = {**logged, **dict(re.findall(r"'(max_seqlen_\w+)': (?:tensor\()?(\d+)", config[1]))}
    layout = _LAYOUT.search(sizes.get("qkv_layout", ""))
    dtype = re.search(r"'qkv_dtype': torch\.(\w+)", config[1])
    window = re.search(r"'window_size': \((-?\d+), (-?\d+)\)", config[1])
    return ["explain", "attention", *_options(sizes, layout, dtype, window), *_switches(log)]


def _options(
    logged: dict[str, str], layout: re.Match[str] | None, dtype: re.Match[str] | None, window: re.Match[str] | None
) -> Iterator[str]:
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    causal = "causal" in logged.get("attn_mask_type", "")
    wide = window is None or (window[1] == "-1" and window[2] in ("-1", "0"))
    flash = logged.get("flash_attn_version", "")
    options = {
        "--as": "transformer-engine",
        "--version": logged.get("transformer_engine_version", "").split("+")[0],
        "--arch": logged.get("compute_capability", "").replace("sm", "sm_"),
        "--head-dim-qk": logged.get("head_dim_qk", logged.get("head_dim")),
        "--head-dim-v": logged.get("head_dim_v", logged.get("head_dim")),
        "--heads": logged.get("num_heads"),
        "--kv-heads": logged.get("num_gqa_groups"),
        "--batch": logged.get("batch_size"),
        "--seqlen": logged.get("max_seqlen_q"),
        "--seqlen-k": logged.get("max_seqlen_kv"),
        "--layout": layout[1] if layout else None,
        "--dtype": short.get(dtype[1]) if dtype else None,
        "--mask": logged.get("attn_mask_type"),
        "--window": None if wide or window is None else f"{window[1]},{0 if causal else window[2]}",
        "--cudnn": logged.get("cudnn_version"),
        "--flash-attn": "none" if flash == "not installed" else flash.split("+")[0],
    }
    for name, value in options.items():
        if value:
            yield from (name, value)


def _switches(log: Log) -> Iterator[str]:
    lines = map(log.line_at, log.lines_with(b"NVTE_"))
    switches = (switch for line in lines for switch in re.findall(r"\b(NVTE_(?:FLASH|FUSED|UNFUSED)_ATTN=\d)", line))
    for switch in dict.fromkeys(switches):
        yield from ("--set", switch)
