"""Metrics of a step, and the interface of their sinks."""

import errno
import itertools
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter

from powertrain.runtime import tracing
from powertrain.runtime.atomic_file import AtomicFile, is_still_at
from powertrain.runtime.reading import one_line
from powertrain.train.reporting.kernel_profile import KernelTable

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, all ranks together.

    step              1 is the first
    loss              mean over the global batch, nats per counted token
    grad_norm         before clipping;  skipped: gradients were not finite, nothing was updated
    tokens            seen since the run began
    seconds           since the step before ended;  tokens_per_second, mfu: over the same time
    objective         numbers of the objective beside the loss, by name (powertrain/train/objective.py)
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
    objective: dict[str, float] | None = None


@dataclass(frozen=True)
class EvaluationRecord:
    """The mean loss, and the objective's numbers, over `batches` micro-batches of "validation" or "test"."""

    step: int
    name: str
    loss: float
    batches: int
    objective: dict[str, float] | None = None


@dataclass(frozen=True)
class TaskRecord:
    """The metrics of a task of lm_eval ("acc", "acc_stderr" ...), after `step`."""

    step: int
    task: str
    metrics: dict[str, float]


class Sink(Protocol):
    """Receiver of every step's metrics: the screen, a file, TensorBoard, W&B, the report."""

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, record: EvaluationRecord) -> None: ...

    def task(self, record: TaskRecord) -> None: ...

    def kernels(self, table: KernelTable) -> None:
        """Backend of each op in one step; once in a process."""

    def note(self, text: str) -> None:
        """Something to know: a checkpoint was written, a kernel was compiled late."""

    def close(self) -> None: ...


class PartialSink:
    """Base class of sinks that use only some kinds of records: its own methods do nothing."""

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, record: EvaluationRecord) -> None: ...

    def task(self, record: TaskRecord) -> None: ...

    def kernels(self, table: KernelTable) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: a line per step, evaluation, task, kernel table or note.

    A resumed run appends after the step it resumed from; records of later steps are dropped. A run that begins anew
    keeps the files of an earlier one in its folder as metrics.jsonl.1, report.1.html, config.1 and so on; it must not
    have written its own config yet. A damaged line is dropped with a warning, and the original file kept as .damaged. A
    line that does not fit on the disk is an OSError and leaves nothing in the file, so that later lines stay readable.
    """

    def __init__(self, file: Path, *, resumed_at: int = 0) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not resumed_at:
            _set_aside(file)
        kept = _kept(file, resumed_at) if resumed_at else b""
        new = AtomicFile(file)
        try:
            new.write(kept)
            new.publish()
        finally:
            new.discard()
        # unbuffered: a killed process loses no record
        self._file = open(file, "ab", buffering=0)
        self._size = len(kept)
        self._step = resumed_at

    def step(self, record: StepRecord) -> None:
        self._step = record.step
        self._write("step", asdict(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._write("evaluation", asdict(record))

    def task(self, record: TaskRecord) -> None:
        self._write("task", asdict(record))

    def kernels(self, table: KernelTable) -> None:
        self._write("kernels", asdict(table))

    def note(self, text: str) -> None:
        self._write("note", {"step": self._step, "text": text})

    def close(self) -> None:
        self._file.close()

    def _write(self, kind: str, fields: dict[str, object]) -> None:
        # lines would be written to a place where the user does not look
        if not is_still_at(self._file, Path(self._file.name)):
            self._begin_anew()
        line = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        try:
            written = self._file.write(line)
            # the disk took a part
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += len(line)

    def _begin_anew(self) -> None:
        """The file was moved or removed during the run. Raises OSError where another run has begun in its place."""
        file = Path(self._file.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            new = open(file, "ab", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_EXCL, 0o666))
        except FileExistsError:
            raise OSError(f"{file} was moved or removed during the run, and another run has begun there") from None
        self._file.close()
        self._file, self._size = new, 0
        tracing.warn(f"{file} was moved or removed during the run; a new file there has the records from here on")


_STEP, _EVALUATION, _TASK = TypeAdapter(StepRecord), TypeAdapter(EvaluationRecord), TypeAdapter(TaskRecord)


@dataclass
class Metrics:
    """Contents of a metrics.jsonl, in order; `kernels` is the last table."""

    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    tasks: list[TaskRecord] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)  # (last step before it, text)
    kernels: KernelTable | None = None


def read_metrics(file: Path) -> Metrics:
    """Everything in a metrics.jsonl, which a killed process may have left in the middle of a line.

    Raises ValueError naming file and line for one that is not ours.
    """
    metrics = Metrics()
    for number, line in enumerate(_lines(file), 1):
        try:
            # lines are validated one by one, so an error can name its number
            fields = json.loads(line)
            kind = fields.pop("kind")
            if kind == "step":
                metrics.steps.append(_STEP.validate_python(fields))
            elif kind == "evaluation":
                metrics.evaluations.append(_EVALUATION.validate_python(fields))
            elif kind == "task":
                metrics.tasks.append(_TASK.validate_python(fields))
            elif kind == "kernels":
                metrics.kernels = KernelTable.of(fields)
            elif kind == "note":
                metrics.notes.append((int(fields["step"]), str(fields["text"])))
            else:
                raise ValueError(f"unknown kind {kind!r}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _not_ours(file, number, error) from None
    return metrics


def evaluated_at(file: Path, step: int) -> frozenset[str] | None:
    """What the file says was evaluated after a step: the names of held-out sets, and "tasks" for the tasks of lm_eval.
    None: the file has no record of the step."""
    known, evaluated = False, set()
    for line in _lines(file):
        try:
            fields = json.loads(line)
            if fields["step"] == step:
                known = known or fields["kind"] == "step"
                evaluated.add({"evaluation": fields.get("name", ""), "task": "tasks"}.get(fields["kind"], ""))
        # the sink says which lines are damaged
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return frozenset(evaluated - {""}) if known else None


# what else a run leaves in its folder; W&B would drop the steps that a run of that id has already
_BESIDE = ("report.html", "about.json", "tensorboard", "wandb_id")
CONFIG, RESOLVED = "config", "run.json"  # the folder of the run's config files, and the resolved one there


def _set_aside(file: Path) -> None:
    """Rename the files of an earlier run that took a step: its checkpoints may be elsewhere, or it wrote none."""
    if not any('"kind": "step"' in line for line in _lines(file)):
        return
    folder, names = file.parent, (file.name, *_BESIDE)
    taken = (*names, CONFIG)
    number = next(n for n in itertools.count(1) if not any(os.path.lexists(folder / _aside(name, n)) for name in taken))
    moved = []
    if (folder / CONFIG / RESOLVED).is_file():
        _copy_files(folder / CONFIG, folder / _aside(CONFIG, number))
        moved.append(CONFIG)
    # its metrics last: a start that is killed between two renames leaves them for the next one
    for name in reversed(names):
        if os.path.lexists(folder / name):
            (folder / name).rename(folder / _aside(name, number))
            moved.append(name)
    now = ", ".join(_aside(name, number) for name in reversed(moved))
    tracing.warn(f"{', '.join(reversed(moved))} in {folder} were of an earlier run and are {now} now")


def _copy_files(source: Path, to: Path) -> None:
    """Not renamed: with `logging.folder: .` it may be the folder in which the user keeps configs."""
    to.mkdir()
    for file in source.iterdir():
        if file.is_file():
            shutil.copyfile(file, to / file.name)


def _aside(name: str, number: int) -> str:
    # a browser shows what ends in .html
    return f"report.{number}.html" if name == "report.html" else f"{name}.{number}"


def _kept(file: Path, resumed_at: int) -> bytes:
    """The lines of steps up to that one."""
    kept, damaged = [], []
    for number, line in enumerate(_lines(file), 1):
        try:
            if int(json.loads(line)["step"]) <= resumed_at:
                kept.append(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            damaged.append(number)
    if damaged:
        # kept, because the user may want to repair it by hand
        shutil.copyfile(file, f"{file}.damaged")
        more = f" and {len(damaged) - 1} others" if len(damaged) > 1 else ""
        tracing.warn(f"{file}:{damaged[0]}{more}: damaged, left out; the file as it was is {file}.damaged")
    return "".join(kept).encode()


def _not_ours(file: Path, number: int, error: Exception) -> ValueError:
    return ValueError(f"{file}:{number}: a line must be a step, evaluation, table or note: {one_line(error)}")


def _lines(file: Path) -> list[str]:
    """Whole lines of a file that a killed process may have left in the middle of one."""
    if not file.is_file():
        return []
    # damage may be anywhere in the file, so bytes that are no UTF-8 must not end the reading
    text = file.read_bytes().decode(errors="replace")
    return [line + "\n" for line in text.split("\n")[:-1] if line]
