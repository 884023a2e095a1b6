"""Messages without a known cause that state the remedy themselves."""

import re

from powertrain.doctor.causes.cause import Cause
from powertrain.doctor.excerpt import Excerpt
from powertrain.doctor.own_words import statement_and_advice

# a compiler's words about source code are no advice
_SOURCE = re.compile(r"\.(?:cu|cuh|h|hpp|hxx|cpp|cc|c|inl)[(:]\d+")


def _advice(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    if _SOURCE.search(excerpt.line):
        return None
    pair = statement_and_advice(excerpt.line, excerpt.below[:4])
    return None if pair is None else {"statement": pair[0], "advice": pair[1]}


CAUSES = (
    Cause(
        "own-check",
        r"Error: |Exception: |what\(\): |Error response from daemon: |\berror: |\bERROR:? ",
        "a check of the program itself ended it: {statement}",
        "as the message has it: {advice}",
        "程序自身的检查使其退出：{statement}",
        "程序的提示：{advice}",
        "https://docs.python.org/3/library/exceptions.html",
        confidence="likely",
        derive=_advice,
        derives=("statement", "advice"),
        fallback=True,
    ),
)
