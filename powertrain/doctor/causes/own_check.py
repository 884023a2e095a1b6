"""Messages without a known cause that state the remedy themselves."""

import re

from powertrain.doctor.causes.cause import Cause
from powertrain.doctor.own_words import statement_and_advice
from powertrain.doctor.passage import Passage

# a compiler's words about source code are no advice
_SOURCE = re.compile(r"\.(?:cu|cuh|h|hpp|hxx|cpp|cc|c|inl)[(:]\d+")


def _advice(groups: dict[str, str], passage: Passage) -> dict[str, str] | None:
    if _SOURCE.search(passage.line):
        return None
    found = statement_and_advice(passage.line, passage.below[:4])
    return None if found is None else {"statement": found[0], "advice": found[1]}


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
