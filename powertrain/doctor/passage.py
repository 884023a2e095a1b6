"""A place in a log."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Passage:
    """The line that matched, and those around it."""

    above: list[str]
    line: str
    below: list[str]
