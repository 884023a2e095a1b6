"""What a step came to, and those who want to know."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, all ranks together.

    step              1 is the first
    loss              mean over the global batch, nats per counted token
    grad_norm         before clipping;  skipped: gradients were not finite, nothing was updated
    tokens            seen since the run began
    seconds           since the step before ended;  tokens_per_second, mfu: over the same time
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

    def note(self, text: str) -> None:
        """Something to know: a checkpoint was written, a kernel was compiled late."""

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: a line per step or evaluation. A resumed run goes on behind the step it resumed from."""

    def __init__(self, file: Path, *, resumed_at: int = 0) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines(file) if json.loads(line).get("step", 0) <= resumed_at] if resumed_at else []
        self._file = open(file, "w", buffering=1)
        self._file.writelines(kept)

    def step(self, record: StepRecord) -> None:
        self._write("step", asdict(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._write("evaluation", asdict(record))

    def note(self, text: str) -> None:
        self._write("note", {"text": text})

    def close(self) -> None:
        self._file.close()

    def _write(self, kind: str, fields: dict[str, object]) -> None:
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")


def _lines(file: Path) -> list[str]:
    """Whole lines of a file that a killed process may have left in the middle of one."""
    if not file.is_file():
        return []
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("}\n")]
