"""Which value in a traceback's line of code is None, and which package the code belongs to."""

import re

from powertrain.doctor.excerpt import Excerpt
from powertrain.doctor.frames import code_line, packages

_NAME = r"[A-Za-z_][\w.]*(?:\([^()]*\))?(?:\[[^\[\]]*\])?"


def none_value(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str]:
    """what: the expression, or "a value"; where: the library; advice: the remedy for both."""
    code = code_line(excerpt.above)
    expression = _expression(code, groups.get("attribute"))
    found = packages(excerpt.above)
    # the last frame's package used None, the one before it made the call
    if len(found) > 1:
        where = f" inside {found[-1]}, called by {found[-2]}"
        advice = f"the release of {found[-1]} that {found[-2]} names in its requirements; what {found[-2]} passes"
    elif found:
        where = f" inside {found[-1]}"
        advice = (
            f"what the call gives {found[-1]} (an argument that newer releases require), or the release of it that the "
            "code was written for"
        )
    else:
        where, advice = "", "what made that variable on the line in the traceback"
    return {"what": f"`{expression}`" if expression else "a value", "where": where, "advice": advice}


def _expression(code: str, attribute: str | None) -> str:
    if attribute and (match := re.search(rf"({_NAME})\.{attribute}\b", code)):
        return match[1]
    if attribute is None and (match := re.search(rf"({_NAME})\[", code)):
        return match[1]
    if match := re.search(rf"\b(?:int|float|len|list|sorted|join)\(({_NAME})\)", code):
        return match[1]
    if match := re.search(rf"({_NAME}) (?://|[-+*/<>]=?|in) ({_NAME})", code):
        return f"{match[1]}` or `{match[2]}"
    return ""
