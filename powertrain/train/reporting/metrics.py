"""What a step came to, and those who want to know."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from powertrain.train.reporting.kernel_profile import KernelTable


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, all ranks together.

    step              1 is the first
    loss              mean over the global batch, nats per counted token
    grad_norm         before clipping;  skipped: gradients were not finite, nothing was updated
    tokens            seen since the run began
    seconds           since the step before ended;  tokens_per_second, mfu: over the same time
    phases            seconds of data, forward, backward and optimizer on this rank, with logging.phase_timers
    memory_bytes      highest allocated on this rank's GPU (resident size of the process on a CPU)
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    loss_scale: float
    tokens: int
    seconds: float
    tokens_per_second: float
    mfu: float | None
    memory_bytes: int
    phases: dict[str, float] | None = None


@dataclass(frozen=True)
class EvaluationRecord:
    """The mean loss over `batches` micro-batches of a data set ("validation", "test"), after `step`."""

    step: int
    name: str
    loss: float
    batches: int


class Sink(Protocol):
    """Somebody who is told of every step: the screen, a file, TensorBoard, W&B, the report."""

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, record: EvaluationRecord) -> None: ...

    def kernels(self, table: KernelTable) -> None:
        """What served each op in one step; once in a process."""

    def note(self, text: str) -> None:
        """Something to know: a checkpoint was written, a kernel was compiled late."""

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: a line per step, evaluation, kernel table or note.

    A resumed run goes on behind the step it resumed from; what the file held of later ones is dropped. Raises
    ValueError naming file and line for one that is not ours.
    """

    def __init__(self, file: Path, *, resumed_at: int = 0) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = _lines(file) if resumed_at else []
        kept = [line for number, line in enumerate(lines, 1) if _step_of(file, number, line) <= resumed_at]
        aside = file.with_suffix(".partial")
        aside.write_text("".join(kept))
        aside.replace(file)
        self._file = open(file, "a", buffering=1)
        self._step = resumed_at

    def step(self, record: StepRecord) -> None:
        self._step = record.step
        self._write("step", asdict(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._write("evaluation", asdict(record))

    def kernels(self, table: KernelTable) -> None:
        self._write("kernels", asdict(table))

    def note(self, text: str) -> None:
        self._write("note", {"step": self._step, "text": text})

    def close(self) -> None:
        self._file.close()

    def _write(self, kind: str, fields: dict[str, object]) -> None:
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")


@dataclass
class Metrics:
    """What a metrics.jsonl holds, in order; `kernels` is the last table."""

    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)  # (last step before it, text)
    kernels: KernelTable | None = None


def read_metrics(file: Path) -> Metrics:
    """Everything in a metrics.jsonl, which a killed process may have left in the middle of a line.

    Raises ValueError naming file and line for one that is not ours.
    """
    found = Metrics()
    for number, line in enumerate(_lines(file), 1):
        try:
            fields = json.loads(line)
            kind = fields.pop("kind")
            if kind == "step":
                found.steps.append(StepRecord(**fields))
            elif kind == "evaluation":
                found.evaluations.append(EvaluationRecord(**fields))
            elif kind == "kernels":
                found.kernels = KernelTable.of(fields)
            else:
                found.notes.append((fields["step"], fields["text"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _not_ours(file, number, error) from None
    return found


def _step_of(file: Path, number: int, line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise _not_ours(file, number, error) from None


def _not_ours(file: Path, number: int, error: Exception) -> ValueError:
    return ValueError(f"{file}:{number}: a line must be a step, evaluation, table or note: {error!r}")


def _lines(file: Path) -> list[str]:
    """Whole lines of a file that a killed process may have left in the middle of one."""
    if not file.is_file():
        return []
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("}\n")]
