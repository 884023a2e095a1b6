"""A log or error, searched for known causes: what it is, the line that shows it, what fixes it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from powertrain.doctor.causes import CAUSES, Cause

Language = Literal["en", "zh"]

TAIL = 6  # a log that stops, stops within its last lines
_LINE = 2000  # characters of a line that are searched: a compiler's command line can be longer than a book

# lines that say "error" and tell nothing: what stands around the real one
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
_COLORS = re.compile(r"\x1b\[[\d;]*[A-Za-z]")


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
        for name, found in self.groups.items():
            words = words.replace("{" + name + "}", found)
        return words


def diagnose(text: str) -> list[Diagnosis]:
    """Every known cause in a text, root causes first; empty: none is known."""
    lines = lines_of(text)
    whole = "\n".join(lines)  # one search of it is far cheaper than one of every line
    found = [one for cause in CAUSES if re.search(cause.pattern, whole) and (one := _search(cause, lines))]
    names = {diagnosis.cause.name for diagnosis in found}
    return [diagnosis for diagnosis in found if not _covered(diagnosis.cause.name, names)]


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


def _search(cause: Cause, lines: list[str]) -> Diagnosis | None:
    first = max(0, len(lines) - TAIL) if cause.last else 0
    for number in range(first, len(lines)):
        match = re.search(cause.pattern, lines[number])
        if match:
            if cause.also and not any(re.search(cause.also, line) for line in lines):
                return None
            if cause.last and any(map(_is_error, lines[number + 1 :])):
                return None
            groups = {name: found for name, found in match.groupdict().items() if found}
            return Diagnosis(cause, number + 1, lines[number].strip(), groups)
    return None


def lines_of(text: str) -> list[str]:
    """Lines without colors, each cut to what is searched; what a carriage return overwrote is its own line."""
    plain = _COLORS.sub("", text).rstrip()
    return [line[:_LINE] for line in re.split(r"\r\n|\n|\r", plain)]


def first_error(text: str) -> tuple[int, str] | None:
    """(line from 1, the line) of the first real error: none of those that only report another's."""
    return next(((number, line.strip()) for number, line in enumerate(lines_of(text), 1) if _is_error(line)), None)


def _is_error(line: str) -> bool:
    return bool(_REAL.search(line)) and not _HOLLOW.search(line)


_LAYOUT = re.compile(r"(bshd|sbhd|thd|bhsd)")


def attention_call(text: str) -> list[str] | None:
    """`powertrain explain attention`, as arguments, for the call in TransformerEngine's DEBUG log, if there is one."""
    config = re.search(r"Running with config=(\{.*?\})\s*$", text, re.M)
    if not config:
        return None
    found = dict(re.findall(r"'(\w+)': (?:'([^']*)'|.)", config[1])) | dict(re.findall(r"'(\w+)': (-?\d+)", config[1]))
    sizes = {**found, **dict(re.findall(r"'(max_seqlen_\w+)': (?:tensor\()?(\d+)", config[1]))}
    layout = _LAYOUT.search(sizes.get("qkv_layout", ""))
    dtype = re.search(r"'qkv_dtype': torch\.(\w+)", config[1])
    window = re.search(r"'window_size': \((-?\d+), (-?\d+)\)", config[1])
    return ["explain", "attention", *_options(sizes, layout, dtype, window), *_switches(text)]


def _options(
    found: dict[str, str], layout: re.Match[str] | None, dtype: re.Match[str] | None, window: re.Match[str] | None
) -> Iterator[str]:
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    causal = "causal" in found.get("attn_mask_type", "")
    wide = window is None or (window[1] == "-1" and window[2] in ("-1", "0"))
    flash = found.get("flash_attn_version", "")
    options = {
        "--as": "transformer-engine",
        "--version": found.get("transformer_engine_version", "").split("+")[0],
        "--arch": found.get("compute_capability", "").replace("sm", "sm_"),
        "--head-dim-qk": found.get("head_dim_qk", found.get("head_dim")),
        "--head-dim-v": found.get("head_dim_v", found.get("head_dim")),
        "--heads": found.get("num_heads"),
        "--kv-heads": found.get("num_gqa_groups"),
        "--batch": found.get("batch_size"),
        "--seqlen": found.get("max_seqlen_q"),
        "--seqlen-k": found.get("max_seqlen_kv"),
        "--layout": layout[1] if layout else None,
        "--dtype": short.get(dtype[1]) if dtype else None,
        "--mask": found.get("attn_mask_type"),
        "--window": None if wide or window is None else f"{window[1]},{0 if causal else window[2]}",
        "--cudnn": found.get("cudnn_version"),
        "--flash-attn": "none" if flash == "not installed" else flash.split("+")[0],
    }
    for name, value in options.items():
        if value:
            yield from (name, value)


def _switches(text: str) -> Iterator[str]:
    for switch in dict.fromkeys(re.findall(r"\b(NVTE_(?:FLASH|FUSED|UNFUSED)_ATTN=\d)", text)):
        yield from ("--set", switch)
