"""The message of an error that states what to do: its statement and its advice, as the program wrote them."""

import re

_ADVICE = re.compile(
    r"\b(?:please|try|use|using|set|pass|install|run|consider|make sure|ensure|upgrade|downgrade|update|specify|provide|add|"
    r"remove|disable|enable|change|switch|reduce|increase|decrease|check|you (?:must|should|need|can|may|have|might)|"
    r"instead|did you mean|needs? to be|has to be|must be|should be|pip install|available:|choose|one of|supported)\b",
    re.I,
)
# advice of no use to who reads a diagnosis, or of all messages
_IDLE = re.compile(
    r"report|open an issue|file an issue|traceback|stacktrace|TORCH_USE_CUDA_DSA|CUDA_LAUNCH_BLOCKING|for debugging|"
    r"further information|more details|more information|see https?:|NCCL_DEBUG|TORCHDYNAMO_VERBOSE|HYDRA_FULL_ERROR|"
    r"set TORCH|below for|AMD_SERIALIZE|if you think|to see the full",
    re.I,
)
_MESSAGE_ENDS = re.compile(
    r"^\s*$|^\s*File \"|^Traceback|^During handling|^The above|^\s*\[rank\d|^\s*at |^E\d{4} |^\d{4}-|^\[?(?:INFO|WARN)|^\W+$"
)
_MOST = 300


def statement_and_advice(line: str, below: list[str]) -> tuple[str, str] | None:
    """What the message says is wrong, and what it says to do; None: it says nothing to do."""
    words = re.sub(
        r"^.*?(?:(?:\w+\.)*\w*(?:Error|Exception)\b:|what\(\):|daemon:|fatal error:|error:)\s*", "", line, count=1
    )
    for following in below:
        if _MESSAGE_ENDS.search(following):
            break
        words += " " + following.strip()
    sentences = [one.strip() for one in re.split(r"(?<=[.!?;])\s+(?=[A-Z`'\"(\[])|\s+-\s+", words) if one.strip()]
    advice = [one for one in sentences if _ADVICE.search(one) and not _IDLE.search(one)]
    if not advice or len(words.split()) < 4:
        return None
    rest = [one for one in sentences if one not in advice]
    return _cut(" ".join(rest) or advice[0]), _cut(" ".join(advice[:3]))


def _cut(words: str) -> str:
    return words if len(words) <= _MOST else words[:_MOST].rsplit(" ", 1)[0] + " ..."
