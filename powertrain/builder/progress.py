"""Progress of a build, parsed from the build tool's output, which pip and uv hide unless a flag shows it."""

import re
from collections.abc import Sequence
from pathlib import Path

_COUNT = re.compile(r"^\s*\[(\d+)/(\d+)\]\s*(.*)")  # ninja
_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]\s*(.*)")  # CMake's makefiles
_PHASES = (
    ("resolve", r"^\s*(Collecting|Looking in indexes|Resolved \d+ packages?|Using cached|Processing )"),
    ("clone", r"^\s*(Cloning |Fetching source distribution from Git|Updating https?://\S+ \()"),
    ("clone", r"^\s*Running command git (clone|fetch|checkout|rev-parse)"),
    ("submodules", r"^\s*(Running command git submodule|Submodule |Submodule path )"),
    ("dependencies", r"^\s*(Installing build dependencies|Installing backend dependencies)"),
    (
        "metadata",
        r"^\s*(Getting requirements to build wheel|Preparing (editable )?metadata|Calling `\S*metadata_for_build)",
    ),
    ("configure", r"^\s*-- (The \w+ compiler|Configuring done|Check|Detecting|Found )"),
    ("wheel", r"^\s*(creating '.*\.whl'|adding '|Created wheel for|Successfully built)"),
    ("link", r"^\s*(\[\d+/\d+\]|\[ *\d+%\]) *(Linking |\S*(c\+\+|g\+\+|ld) .*-shared)"),
    ("compile", r"^\s*(\[\d+/\d+\]|\[ *\d+%\]|building '.*' extension|running build_ext|Building \S+ @ )"),
    ("compile", r"^\s*Building wheel for (?!.*finished)"),
    ("install", r"^\s*(Installing collected packages|Successfully installed|Installed \d+ packages?)"),
)
_COMPILED_PHASES = tuple((name, re.compile(pattern)) for name, pattern in _PHASES)
_WHEEL = re.compile(r"(?:filename=|creating '|Successfully built |into `)(\S*[\w+-]\.whl)")
_LEVEL = re.compile(r"^(DEBUG|INFO|TRACE) ")  # uv -v puts it before the builder's lines
_PIP = {"install": "-v", "wheel": "-v"}
_UV = ("pip", "sync", "build", "add", "run", "tool")


def bare(line: str) -> str:
    """The builder's line, without uv's prefix."""
    return _LEVEL.sub("", line)


class Progress:
    """Fed line by line; knows the phase, how many of how many are done, and the wheels made."""

    def __init__(self) -> None:
        self.phase = "start"
        self.done = 0
        self.total = 0
        self.before = 0  # done by earlier runs of ninja in the same build
        self.wheels: list[str] = []

    def feed(self, line: str) -> bool:
        """Whether the line changed the phase."""
        line = bare(line)
        if count := _COUNT.match(line):
            self._count(int(count[1]), int(count[2]))
        elif percent := _PERCENT.match(line):
            # makefiles tell no number of files, only a share
            self.done, self.total = int(percent[1]), 100
        if wheel := _WHEEL.search(line):
            name = Path(wheel[1]).name
            self.wheels += [name] if name not in self.wheels else []
        phase = next((name for name, pattern in _COMPILED_PHASES if pattern.match(line)), self.phase)
        changed, self.phase = phase != self.phase, phase
        return changed

    def _count(self, done: int, total: int) -> None:
        # a build may run ninja several times, once for each extension; a count that starts again is a new run
        if total != self.total and self.total and done <= 1:
            self.before += self.done
        self.done, self.total = done, total

    def eta(
        self, finished: Sequence[float], running: Sequence[float], earlier: float | None, elapsed: float
    ) -> float | None:
        """Seconds still to go, None while nothing tells.

        finished  seconds that each unit took since the builder began to count
        running   seconds that those at work have had
        earlier   seconds that the whole build took the last time
        """
        # an earlier build knows phases that no count covers: downloads, linking, the wheel
        if earlier is not None and elapsed < earlier:
            return earlier - elapsed
        if self.total == 100:
            return elapsed * (100 - self.done) / self.done if self.done else None
        if not finished or not self.total:
            return None
        mean = sum(finished) / len(finished)
        # what is being compiled counts for the time it has had, at most a mean file's
        left = (self.total - self.done) * mean - sum(min(seconds, mean) for seconds in running)
        # files are compiled side by side, as many as are at work now
        return max(0.0, left) / max(1, len(running))


def is_pip(command: Sequence[str]) -> bool:
    """Whether the command is pip's own: `pip …` or `python -m pip …`."""
    name = Path(command[0]).name
    called = re.fullmatch(r"python[\d.]*", name) and list(command[1:3]) == ["-m", "pip"]
    return bool(called or re.fullmatch(r"pip[\d.]*", name))


def verbose(command: Sequence[str]) -> list[str]:
    """The command, with the flag that makes pip or uv show the builder's output; others as they are."""
    words = list(command)
    name = Path(words[0]).name
    # the user's own choice, quiet included, stays
    if any(re.fullmatch(r"-v+|--verbose|-q+|--quiet", word) for word in words[1:]):
        return words
    if is_pip(words):
        for index in range(1, len(words)):
            if words[index] in _PIP:
                return [*words[: index + 1], "-v", *words[index + 1 :]]
    if name == "uv" and len(words) > 1 and words[1] in _UV:
        return [words[0], "-v", *words[1:]]
    return words
