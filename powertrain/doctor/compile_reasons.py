"""The reason that a torch.compile error states, on its own line or in the lines below."""

import re

from powertrain.doctor.excerpt import Excerpt

_EXPLANATION = re.compile(r"^\s*(?:Explanation|Graph Break Reason|reason): ?(?P<said>.+)")
_INNER = re.compile(r"(?:[\w.]*(?:Error|Exception|Violation)|AssertionError)\b:? ?(?P<said>.*)")
_WRAPPERS = re.compile(
    r"torch\._(?:dynamo|inductor)\.exc\.\w+: ?|BackendCompilerFailed: ?|LoweringException: ?|InductorError: ?|"
    r"backend='\w+' raised:? ?|An exception occurred in a subprocess:? ?"
)
_MOST = 240


def compile_reason(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str]:
    """What Dynamo explains, else the innermost error that the message names, else "no reason is given"."""
    for line in excerpt.below[:12]:
        if match := _EXPLANATION.match(line):
            return {"reason": match["said"].strip()[:_MOST]}
    rest = _WRAPPERS.sub("", excerpt.line).strip()
    rest = rest.removeprefix("[rank0]:").strip()
    if rest and not rest.endswith("raised"):
        return {"reason": rest[:_MOST]}
    for line in excerpt.below[:12]:
        if (match := _INNER.search(line)) and not line.lstrip().startswith("File "):
            return {"reason": line.strip()[:_MOST] if match["said"] else match[0]}
    return {"reason": "no reason is given (TORCHDYNAMO_VERBOSE=1 gives one)"}
