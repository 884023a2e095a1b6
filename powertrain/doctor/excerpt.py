"""An excerpt of a log: the line that matched a cause, and its neighbours."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Excerpt:
    """The line that matched, the lines above it and the lines below."""

    above: list[str]
    line: str
    below: list[str]
