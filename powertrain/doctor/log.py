"""The text of a log, as bytes, and its lines."""

import codecs
import re
from collections.abc import Callable, Iterator

from powertrain.doctor.languages import in_english
from powertrain.doctor.literals import Trigrams

# characters of a line that are searched: a compiler's command line can be longer than a book
LINE = 2000
_LINE_BYTES = 4 * LINE
# colors and other control sequences, titles and links of a terminal, character sets
_COLORS = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,2000}(?:\x07|\x1b\\)|[()][0-9A-Z])")


def _as_utf_8(data: bytes) -> bytes:
    """A log without its byte order mark; PowerShell's `>` writes UTF-16."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", errors="replace").encode(errors="replace")
    return data.removeprefix(codecs.BOM_UTF8)


class Log:
    """A text, as bytes: without colors, ended by newlines; text overwritten after a carriage return is its own line."""

    def __init__(self, text: str | bytes) -> None:
        data = text.encode(errors="replace") if isinstance(text, str) else _as_utf_8(text)
        # a search is cheaper than the substitution, and most logs have no colors
        data = _COLORS.sub(b"", data) if b"\x1b" in data else data
        self.data = in_english(data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").rstrip())
        self._trigrams = Trigrams(self.data)

    def line_at(self, start: int) -> str:
        end = self.data.find(b"\n", start, start + _LINE_BYTES)
        cut = self.data[start : end if end >= 0 else start + _LINE_BYTES]
        return cut.decode(errors="replace")[:LINE]

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

    def above(self, start: int, count: int) -> list[str]:
        """The lines before the one that starts there, in order."""
        lines: list[str] = []
        while len(lines) < count and start > 0:
            before = self.data.rfind(b"\n", 0, start - 1) + 1
            lines.append(self.line_at(before))
            start = before
        return lines[::-1]

    def below(self, start: int, count: int) -> list[str]:
        """The lines after the one that starts there, in order."""
        lines: list[str] = []
        while len(lines) < count and (end := self.data.find(b"\n", start)) >= 0:
            start = end + 1
            lines.append(self.line_at(start))
        return lines

    def lines_with(self, literal: bytes) -> Iterator[int]:
        """Start offsets of lines that contain it in the searched part."""
        if not self._trigrams.may_hold(literal):
            return iter(())
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
