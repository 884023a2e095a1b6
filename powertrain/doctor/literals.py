"""Which texts can match a regular expression at all: those that hold one of its literals, and a literal's trigrams."""

import sys
from functools import cache
from importlib import import_module
from typing import Any

_parser = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

# bytes from which a table of trigrams costs less than it spares
_LARGE = 1 << 20
_PIECE = 1 << 22


class Trigrams:
    """The sequences of three bytes in a text: without all of a literal's, the text does not hold it.

    One pass over the text replaces a search for each of a thousand literals. A small text has no table.
    """

    def __init__(self, data: bytes) -> None:
        self._present: Any = None
        if len(data) < _LARGE:
            return
        # importing it takes longer than a small log
        import numpy as np

        self._present = np.zeros(1 << 24, dtype=np.bool_)
        text = np.frombuffer(data, dtype=np.uint8)
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE + 2].astype(np.uint32)
            self._present[piece[:-2] << 16 | piece[1:-1] << 8 | piece[2:]] = True

    def may_hold(self, literal: bytes) -> bool:
        if self._present is None:
            return True
        codes = (literal[at] << 16 | literal[at + 1] << 8 | literal[at + 2] for at in range(len(literal) - 2))
        return all(self._present[code] for code in codes)


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
