"""Source lines of our device functions, as `inspect.getsourcelines` gives them, at a twentieth of its time; and their
tokens, of which keys of kernels are made.

Triton asks for the source of every device function when its module is imported, and the kernel's key does so again.
`inspect` finds the end of each by Python's tokenizer, written in Python: a third of the import of attention's kernels.
In our files a function ends at the next line that begins in the first column; where that is not plain, `inspect` is
asked. Must not import torch: the compile workers import this module and no torch.
"""

import inspect
import io
import linecache
import tokenize
from collections.abc import Iterator
from types import FunctionType
from typing import Any


def source_lines(function: Any) -> tuple[list[str], int]:
    """The lines of a function, decorators included, and the number of the first."""
    lines = _plain(function) if type(function) is FunctionType else None
    return inspect.getsourcelines(function) if lines is None else (lines, function.__code__.co_firstlineno)


def _plain(function: FunctionType) -> list[str] | None:
    # other people's files may be laid out otherwise, and change while the process lives
    if not function.__module__.startswith("powertrain.") or hasattr(function, "__wrapped__"):
        return None
    lines = linecache.getlines(function.__code__.co_filename)
    start = function.__code__.co_firstlineno - 1
    if start >= len(lines) or not lines[start].startswith(("@", "def ")):
        return None
    at = start
    while at < len(lines) and not lines[at].startswith("def "):
        at += 1
    end = at = at + 1
    while at < len(lines) and _goes_on(lines[at]):
        at += 1
        # blank lines and comments of the first column belong to it only if code follows
        if not lines[at - 1].startswith(("#", "\n")):
            end = at
    block = lines[start:end]
    text = "".join(block)
    # the end of a string that holds lines of the first column is not seen
    return None if text.count('"""') % 2 or "'''" in text or not text.endswith("\n") else block


def _goes_on(line: str) -> bool:
    # ")" closes the parameters
    return line[0] in " \n#)"


class Inspect:
    """The module `inspect` with our `getsourcelines`, for Triton's use of it."""

    getsourcelines = staticmethod(source_lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)


_LAYOUT = (tokenize.COMMENT, tokenize.NL)
# from Python 3.12 on a formatted string is many tokens, before it was one: a kernel pack made by one version must hold
# kernels for the others
_OPENS, _CLOSES = (
    tuple(kind for kind, name in tokenize.tok_name.items() if name in names)
    for names in (("FSTRING_START", "TSTRING_START"), ("FSTRING_END", "TSTRING_END"))
)


def source_tokens(source: str) -> Iterator[str]:
    """The tokens of Python code without comments, line numbers and layout, the same on every version of Python. An
    indent is a token too: `a` inside and after an `if` are different programs."""
    lines = source.splitlines(keepends=True)
    depth, start = 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _OPENS:
            depth += 1
            start = start if depth > 1 else token.start
        elif token.type in _CLOSES:
            depth -= 1
            if not depth:
                yield _between(lines, start, token.end)
        elif depth:
            continue
        elif token.type in (tokenize.INDENT, tokenize.DEDENT):
            yield tokenize.tok_name[token.type]
        elif token.type == tokenize.NEWLINE:
            yield ";"
        elif token.type not in _LAYOUT:
            yield token.string


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """The text from one (row, column) to another, rows counted from 1."""
    text = lines[start[0] - 1 : end[0]]
    text[-1] = text[-1][: end[1]]
    text[0] = text[0][start[1] :]
    return "".join(text)
