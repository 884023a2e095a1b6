"""An error's own statement and advice, quoted from its message."""

import re

_ADVICE = re.compile(
    r"\b(?:please|try|use|using|set|pass|install|run|consider|make sure|ensure|upgrade|downgrade|"
    r"update|specify|provide|add|"
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
    r"^\s*$|^\s*File \"|^Traceback|^During handling|^The above|^\s*\[rank\d|^\s*at |^E\d{4} |"
    r"^\d{4}-|^\[?(?:INFO|WARN)|^\W+$"
)
_MOST = 300


# sentences that state a demand, and its consequence
_DEMANDS = (
    (r"(?:[Cc]annot|[Cc]an't|can not) (?:be )?(?:use[d]?|enable[d]?|run|"
    r"combine[d]?) (?P<this>.{3,80}?) without (?P<that>.{3,80})",
     "switch {that} on (or give it), or leave {this} out"),
    (r"(?:When using (?P<that>.{3,80}?), )(?P<this>.{3,80}?) (?:must|should|has to) be (?:used|enabled|set)",
     "switch {this} on (or go without {that})"),
    (r"(?P<this>.{3,80}?) (?:should|must|has to|needs to) be (?:a multiple of|divisible by) (?P<that>[^,.;]{1,80})",
     "choose {this} as a multiple of {that} (pad it, or change {that})"),
    (r"(?P<this>.{3,100}?) (?:is|are) (?:currently |still )?(?:not|un)[ -]?(?:yet )?(?:supported|"
    r"compatible|implemented|available) "
     r"(?:with|for|on|in|by|when|without) (?P<that>.{2,100})",
     "leave {this} out, or change {that}; a newer release may have both"),
    (r"(?P<this>.{3,80}?) (?:does not|doesn't|do not) (?:yet )?(?:support|work with|accept) (?P<that>.{2,100})",
     "go without {that}, or without {this}; a newer release may have both"),
    (r"(?P<this>.{3,80}?) only (?:supports?|works? (?:with|on|for)|accepts?|allows?) (?P<that>.{2,100})",
     "give it {that}, or use another than {this}"),
    (r"(?P<this>.{3,80}?) (?:is|are) (?:currently )?only (?:enabled|supported|available|implemented|allowed|valid|"
     r"defined) "
     r"(?:for|with|on|in|when|if) (?P<that>.{2,100})",
     "give it {that}, or leave {this} out; a newer release may have both"),
    (r"(?P<this>.{3,80}?) requires (?P<that>.{2,100})", "give it {that}: install, set or choose that"),
    (r"(?P<this>.{2,80}?) (?:must|should|has to|needs to) (?:be|have|match|equal|contain) (?P<that>.{2,100})",
     "make {this} so: {that}"),
    (r"[Ee]xpected (?P<that>.{2,80}?),? (?:but )?(?:got|found|received) (?P<this>.{1,80})",
     "give {that} instead of {this}"),
)  # fmt: skip


def _demand(sentence: str) -> str | None:
    for pattern, advice in _DEMANDS:
        if match := re.match(pattern, sentence):
            # the advice repeats the requirement, not the value that was given
            that = re.sub(r",? (?:but |and )?got\b.*| (?:yet|now|currently|at the moment)\W*$", "", match["that"])
            that = that.strip(" .,:")
            # who reads it cannot change a number of the library
            advice = advice.replace(", or change {that}", "") if that.isdigit() else advice
            return advice.format(this=match["this"].strip(" ,:"), that=that)
    return None


def statement_and_advice(line: str, below: list[str]) -> tuple[str, str] | None:
    """The problem and the remedy that a message states itself; None: it states no remedy."""
    words = re.sub(
        r"^.*?(?:(?:\w+\.)*\w*(?:Error|Exception)\b:|what\(\):|daemon:|fatal error:|error:)\s*", "", line, count=1
    )
    for following in below:
        if _MESSAGE_ENDS.search(following):
            break
        words += " " + following.strip()
    sentences = [one.strip() for one in re.split(r"(?<=[.!?;])\s+(?=[A-Z`'\"(\[])|\s+-\s+", words) if one.strip()]
    useful = [one for one in sentences if not _IDLE.search(one)]
    advice = [one for one in useful if _ADVICE.search(one) and _demand(one) is None]
    advice = advice or [one for one in useful if _ADVICE.search(one) or _demand(one)]
    if not advice or len(words.split()) < 4:
        return None
    rest = [one for one in sentences if one not in advice]
    if not rest and (_demand(advice[0]) is None or re.match(r"\w+\(\)|\[Errno", advice[0])):
        return None
    if not rest:
        return _cut(advice[0]), _cut(_demand(advice[0]) or "")
    return _cut(" ".join(rest)), _cut(" ".join(advice[:3]))


def _cut(words: str) -> str:
    return words if len(words) <= _MOST else words[:_MOST].rsplit(" ", 1)[0] + " ..."
