"""A log or error, searched for known causes: the cause, the line that shows it, the fix."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from powertrain.doctor.causes import CAUSES, Cause
from powertrain.doctor.causes.cause import Derive
from powertrain.doctor.causes.covers import COVERS
from powertrain.doctor.excerpt import Excerpt
from powertrain.doctor.literals import literals_of
from powertrain.doctor.log import Log

Language = Literal["en", "zh"]

TAIL = 6  # a log that stops, stops within its last lines
# lines that contain "error" without information: they surround the real error
_HOLLOW = re.compile(
    r"subprocess-exited-with-error|This error originates from a subprocess|metadata-generation-failed|"
    r"did not run successfully|Failed (?:to build|building wheel)|Could not build wheels|-W(?:no-)?error|"
    r"subcommand failed|"
    r"The above exception was|During handling of the above|failed-wheel-build|legacy-install-failure|ChildFailedError|"
    r"CalledProcessError|failed \(exitcode|warning:|copying |not a git repository|HTTP Error 404: Not Found|"
    r"BackendCompilerFailed|^\s*File \"|errors?\.(?:py|h|cpp)\b|\b0 errors?\b|^\s*(?:raise|assert|except|return) ",
    re.I,
)
_PREFIX = r"(?:\[?rank\s?\d+\]?:?\s*|\[default\d+\]:\s*|\[stderr\]\s*|ERROR:\s+|E\s+|\(\w+ pid=\d+\)\s*)?"
_REAL = re.compile(
    rf"^\s*{_PREFIX}(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b\s*(?::|$)|\berror\s*:|"
    r"\bCMake Error\b|"
    r"\bfatal\b\s*:?|\bwhat\(\):|\bundefined reference\b|NCCL WARN|Memory access fault|"
    r"Assertion .{0,200} failed|\bCUDA error\b|\bError response from daemon:|^OMP: Error|^\s*Error \d{3}:",
    re.I,
)
# a line of a program, a warning, or a probe of CMake
_SOURCE = re.compile(r"\s*(?:raise|assert|except|return)\b|-- Performing Test |.*\bwarning:", re.I)
_WARNING = re.compile(
    r"\bWARN(?:ING)?\b(?!\[XFORMERS)|\w+Warning: |\[INFO\]|NCCL INFO|: [IW] tensorflow/|"
    r"without specifying a torch dtype"
)
# what libraries look for and do without, on lines that every healthy log has
_USUAL = re.compile(
    r"NCCL INFO .{0,200}\blib(?:nccl|ibverbs|mlx5|nvidia-ml|gdrapi|rccl)[\w.-]*\.so|^\s*-- Could NOT find|"
    r"Ignoring this choice"
)
# of ranks that waited for one that failed
_CONSEQUENCES = {"nccl-timeout", "nccl-peer-gone", "gloo-peer", "store-timeout", "store-unreachable"}
# an error, but a later line or none says which
_WEAK = re.compile(
    r"\bFAILED\b|\bSegmentation fault\b|\bAborted\b|\bKilled\b|\bcore dumped\b|ninja: build stopped|^make.{0,20}\*\*\*|"
    r"exit(?:code|s| code)\b.{0,30}-?[1-9]|returned non-zero exit status|\bcould not load\b|failed building wheel|"
    r"ChildFailedError|CalledProcessError|failed \(exitcode",
    re.I,
)
# in lower case; one of them is in all that _REAL and _WEAK match
_MAYBE_ERROR = re.compile(
    rb"(?:error|exception|interrupt)\s{0,99}(?::|\n|$)|cmake error|memory access fault|cuda error|nccl warn|"
    rb"assertion|what\(\):|"
    rb"f(?:atal|ailed)|segmentation fault|aborted|killed|core dumped|undefined r|ninja: b|\*\*\*|exit|could not load|"
    rb"processerror"
)


@dataclass(frozen=True)
class Diagnosis:
    """A cause and the line of the log that shows it; lines count from 1."""

    cause: Cause
    line: int
    evidence: str
    groups: dict[str, str]

    def message(self, language: Language = "en") -> str:
        return self._fill(self.cause.cause if language == "en" else self.cause.cause_zh)

    def fix(self, language: Language = "en") -> str:
        return self._fill(self.cause.fix if language == "en" else self.cause.fix_zh)

    def _fill(self, words: str) -> str:
        # of alternatives, one has matched
        return re.sub(r"\{([a-z]\w*)\}", lambda name: self.groups.get(name[1], ""), words)


def diagnose(text: "str | bytes | Log") -> list[Diagnosis]:
    """Every known cause in a text, root causes first; empty: none is known. 100 MB take seconds.

    Where one explains it, those that only name a symptom (Cause.confidence "possible") are left out, and those that
    only repeat a message (Cause.fallback).
    """
    log = text if isinstance(text, Log) else Log(text)
    diagnoses = [one for cause in CAUSES if (one := _search(cause, log))]
    named = [one for one in diagnoses if one.cause.confidence != "possible" and not one.cause.fallback]
    diagnoses = named or diagnoses[:1]
    # an error that only a warning shows did not end the run
    diagnoses.sort(key=lambda one: bool(_WARNING.search(one.evidence)))
    names = {diagnosis.cause.name for diagnosis in diagnoses}
    return [diagnosis for diagnosis in diagnoses if not _covered(diagnosis.cause.name, names)]


def leaves_an_error(diagnoses: list[Diagnosis], text: "str | bytes | Log") -> bool:
    """Whether the first real error is to be shown beside the causes, which leave it unexplained.

    They name a symptom only, come from lines that did not end the run, or from ranks that waited for another, whose
    error stands above.
    """
    if all(one.cause.confidence == "possible" or _WARNING.search(one.evidence) for one in diagnoses):
        return True
    if not all(one.cause.name in _CONSEQUENCES for one in diagnoses):
        return False
    first = first_error(text)
    return first is not None and first[0] < min(one.line for one in diagnoses)


def _covered(name: str, names: set[str]) -> bool:
    return bool(COVERS.get(name, set()) & names)


def _search(cause: Cause, log: Log) -> Diagnosis | None:
    if cause.last:
        return _search_tail(cause, log)
    if cause.derive is not None:
        return _search_derived(cause, cause.derive, log)
    first = min(_matching(cause.pattern, log), key=lambda pair: pair[0], default=None)
    if first is None or (cause.also and not any(_matching(cause.also, log))):
        return None
    return _diagnosis(cause, log, *first)


# a line that derive() refuses is seldom followed by hundreds of others
_MOST_DERIVED = 40
_ABOVE, _BELOW = 12, 30


def _search_derived(cause: Cause, derive: Derive, log: Log) -> Diagnosis | None:
    """The first match from which derive() makes something."""
    matches: list[tuple[int, re.Match[str]]] = []
    for literal in literals_of(cause.pattern):
        lines = ((start, re.search(cause.pattern, log.line_at(start))) for start in log.lines_with(literal))
        telling = ((start, match) for start, match in lines if match and not _USUAL.search(match.string))
        matches += islice(telling, _MOST_DERIVED)
    for start, match in sorted(matches, key=lambda pair: pair[0]):
        diagnosis = _diagnosis(cause, log, start, match)
        groups = derive(diagnosis.groups, Excerpt(log.above(start, _ABOVE), match.string, log.below(start, _BELOW)))
        if groups is not None:
            return Diagnosis(cause, diagnosis.line, diagnosis.evidence, {**diagnosis.groups, **groups})
    return None


def _search_tail(cause: Cause, log: Log) -> Diagnosis | None:
    tail = log.tail(TAIL)
    for index, start in enumerate(tail):
        if match := re.search(cause.pattern, log.line_at(start)):
            later = [log.line_at(after) for after in tail[index + 1 :]]
            # the last error is the cause only if none follows it
            ends = any(map(_is_error, later)) or (cause.unless and any(re.search(cause.unless, line) for line in later))
            return None if ends else _diagnosis(cause, log, start, match)
    return None


def _matching(pattern: str, log: Log) -> Iterator[tuple[int, re.Match[str]]]:
    """(where the line starts, the match) of the first line that each literal leads to."""
    # bytes.find over the whole log, then the expression on single lines: 100 MB take seconds
    for literal in literals_of(pattern):
        for start in log.lines_with(literal):
            if (match := re.search(pattern, log.line_at(start))) and not _USUAL.search(match.string):
                yield start, match
                break


def _diagnosis(cause: Cause, log: Log, start: int, match: re.Match[str]) -> Diagnosis:
    groups = {name: text for name, text in match.groupdict().items() if text}
    return Diagnosis(cause, log.number(start), match.string.strip(), groups)


def first_error(text: "str | bytes | Log") -> tuple[int, str] | None:
    """(line from 1, the line) of the first real error: a compiler's first `error:`, or how the first traceback ends.

    Lines that only report another's failure ("FAILED: a.o", "exit code 1") stand in where there is no other. An error
    whose message is on the next line is given with it.
    """
    log = text if isinstance(text, Log) else Log(text)
    weak, tracebacks = None, list(_tracebacks(log))
    ends = [end for _, end in tracebacks if not _HOLLOW.search(log.line_at(end))]
    for start in log.lines_matching(_MAYBE_ERROR):
        if ends and ends[0] < start:
            break
        if any(begin < start < end for begin, end in tracebacks):
            continue
        line = log.line_at(start)
        if _is_error(line):
            return log.number(start), _with_message(log, start, line)
        if weak is None and _WEAK.search(line) and not _SOURCE.match(line):
            weak = start
    if ends:
        return log.number(ends[0]), _with_message(log, ends[0], log.line_at(ends[0]))
    return None if weak is None else (log.number(weak), log.line_at(weak).strip())


_MOST_TRACEBACKS, _MOST_FRAME_LINES = 20, 400


def _tracebacks(log: Log) -> Iterator[tuple[int, int]]:
    """(start of the heading, start of the line with the exception) of Python's first tracebacks."""
    for begin in islice(log.lines_with(b"Traceback (most recent call last)"), _MOST_TRACEBACKS):
        # "[rank0]: ", an indentation
        before = log.line_at(begin).partition("Traceback (")[0]
        start = begin
        for _ in range(_MOST_FRAME_LINES):
            start = log.data.find(b"\n", start) + 1
            if start == 0:
                break
            line = log.line_at(start)
            frame = line.removeprefix(before)
            if line.startswith(before) and frame[:1].strip() and not frame.startswith(("|", "│")):
                yield begin, start
                break


def last_line(text: "str | bytes | Log") -> tuple[int, str] | None:
    """(line from 1, the line) of the last line with a word in it."""
    log = text if isinstance(text, Log) else Log(text)
    starts = (start for start in reversed(log.tail(TAIL)) if re.search(r"\w", log.line_at(start)))
    return next(((log.number(start), log.line_at(start).strip()) for start in starts), None)


def _is_error(line: str) -> bool:
    return bool(_REAL.search(line)) and not _HOLLOW.search(line)


def _with_message(log: Log, start: int, line: str) -> str:
    """The line, and the next one where the message begins there: "RuntimeError:", "CMake Error at x (message):"."""
    following = log.data.find(b"\n", start)
    if not line.rstrip().endswith(":") or following < 0:
        return line.strip()
    return f"{line.strip()} {log.line_at(following + 1).strip()}".strip()


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
