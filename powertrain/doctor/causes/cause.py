"""A cause: its pattern in a log, the words for it in English and Chinese, where it was seen, and how sure it is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from powertrain.doctor.excerpt import Excerpt

Derive = Callable[[dict[str, str], Excerpt], dict[str, str] | None]
Confidence = Literal["certain", "likely", "possible"]


@dataclass(frozen=True)
class Cause:
    """`{names}` in the words are the pattern's groups."""

    name: str
    pattern: str  # a regular expression, for one line
    cause: str
    fix: str
    cause_zh: str
    fix_zh: str
    source: str
    also: str = ""  # a regular expression that some line must match, too
    last: bool = False  # only among the last lines: the log stops there
    unless: str = ""  # with last: a regular expression that no later line may match, for then it went on
    # certain: the message states it; likely: it is the usual reason; possible: the message names a symptom only
    confidence: Confidence = "certain"
    # further groups, from the pattern's groups and the lines around the match; None: this is not the cause
    derive: Derive | None = None
    derives: tuple[str, ...] = ()  # the names of the groups that derive() adds
    fallback: bool = False  # it repeats the message: said only where no other cause is found
