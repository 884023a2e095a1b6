"""Result of a check: ok, a warning or a problem, the evidence, and the command that fixes it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from powertrain.runtime.machine import Machine

Level = Literal["ok", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")


@dataclass(frozen=True)
class Finding:
    """One thing found. `apply` is there only where the fix is safe: it changes the machine, deletes nothing, and
    returns a description of the change."""

    level: Level
    message: str
    evidence: tuple[str, ...] = ()
    fix: str | None = None  # a command or an instruction
    apply: Callable[[], str] | None = None

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {self.level!r}")
        if self.level != "ok" and not self.fix:
            raise ValueError(f"a {self.level} must come with its fix: {self.message!r} has none")

    def as_json(self, check: "Check") -> dict[str, Any]:
        return {
            "check": check.name,
            "asks": check.question,
            "level": self.level,
            "says": self.message,
            "evidence": list(self.evidence),
            "fix": self.fix,
            "fixable": self.apply is not None,
        }


@dataclass(frozen=True)
class Check:
    name: str
    question: str  # the question it answers
    run: Callable[[Machine], Iterable[Finding]]


def examine(checks: Sequence[Check], machine: Machine) -> Iterator[tuple[Check, Finding]]:
    """Every finding, as it is made. A check that fails is itself a problem, and the others go on."""
    for check in checks:
        try:
            for finding in check.run(machine):
                yield check, finding
        except Exception as error:
            fix = f"report it, with this line; meanwhile: powertrain doctor --skip {check.name}"
            yield check, Finding("problem", f"the check failed: {type(error).__name__}: {error}", fix=fix)


def worst(findings: Iterable[Finding]) -> Level:
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
