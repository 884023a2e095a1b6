"""Source lines of our device functions, as `inspect.getsourcelines` gives them, at a twentieth of its time.

Triton asks for the source of every device function when its module is imported, and the kernel's key does so again.
`inspect` finds the end of each by Python's tokenizer, written in Python: a third of the import of attention's kernels.
In our files a function ends at the next line that begins in the first column; where that is not plain, `inspect` is
asked. Must not import torch: the compile workers import this module and no torch.
"""

import inspect
import linecache
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
    found = lines[start:end]
    text = "".join(found)
    # the end of a string that holds lines of the first column is not seen
    return None if text.count('"""') % 2 or "'''" in text or not text.endswith("\n") else found


def _goes_on(line: str) -> bool:
    # ")" closes the parameters
    return line[0] in " \n#)"


class Inspect:
    """The module `inspect` with our `getsourcelines`, for Triton's use of it."""

    getsourcelines = staticmethod(source_lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)
