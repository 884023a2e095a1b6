"""Terminal output of a run: a summary before its first step, then a progress bar or plain lines."""

import math
import shlex
import statistics
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from powertrain.train.checkpoint.store import find
from powertrain.train.reporting.kernel_profile import KernelTable
from powertrain.train.reporting.metrics import EvaluationRecord, StepRecord, TaskRecord
from powertrain.train.reporting.run_summary import About

_SMOOTHING = 0.95
_WINDOW = 50


class Pace:
    """The smoothed loss, and how long the rest will take.

    loss      a bias-corrected running mean of finite losses, each step weighs 0.95 of the one after it
    seconds   left at the median of the last 50 steps; the first step of a process, which compiles, is left out
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.loss, self.seconds = float("nan"), float("nan")
        self._sum = self._weight = 0.0
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._count = 0

    def see(self, record: StepRecord) -> None:
        self._count += 1
        # of a step that fp16 skipped the loss may be inf, which would stay in the mean to the end
        if math.isfinite(record.loss):
            self._sum = _SMOOTHING * self._sum + record.loss
            # the sum of the weights so far: without dividing by it the first steps would lean towards 0
            self._weight = _SMOOTHING * self._weight + 1
            self.loss = self._sum / self._weight
        if self._count > 1:
            # the first step of a process is not in it: it compiles or loads kernels
            self._times.append(record.seconds)
            self.seconds = statistics.median(self._times) * (self.steps - record.step)

    @property
    def left(self) -> str:
        # NaN, the only number unequal to itself: no step was timed yet
        return "-:--:--" if self.seconds != self.seconds else str(timedelta(seconds=round(self.seconds)))


class Lines:
    """A line every `every` steps, for a log file or a pipe; evaluations and notes as they come."""

    def __init__(self, console: Console, steps: int, every: int) -> None:
        self.console, self.steps, self.every = console, steps, every
        self.pace = Pace(steps)

    def step(self, record: StepRecord) -> None:
        self.pace.see(record)
        # the first and the last step always, so that the log of a short run is not empty
        if record.step % self.every == 0 or record.step in (1, self.steps) or record.skipped:
            self._print(f"step {record.step}/{self.steps}  {numbers(record, self.pace)}  {self.pace.left} left")

    def evaluation(self, record: EvaluationRecord) -> None:
        self._print(evaluation_line(record))

    def task(self, record: TaskRecord) -> None:
        self._print(task_line(record))

    def kernels(self, table: KernelTable) -> None:
        self._print(kernels_line(table))

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None: ...

    def _print(self, text: str) -> None:
        # without markup: notes hold paths and shapes, whose brackets rich would take for styles
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Bar(Progress):
    """The bar, and the last step's numbers under it: beside it they would not fit in 80 columns."""

    numbers = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.numbers)


class Live:
    """A bar that stays at the bottom of a terminal; evaluations and notes scroll by above it."""

    def __init__(self, console: Console, steps: int, resumed_at: int) -> None:
        self.pace = Pace(steps)
        self.progress = _Bar(
            TextColumn("[bold]step"), MofNCompleteColumn(), BarColumn(), TaskProgressColumn(),
            # rich's own estimate is of the whole run's mean; ours leaves the first step out
            TextColumn("[cyan]{task.fields[left]} left"), console=console, refresh_per_second=4,
        )  # fmt: skip
        # a resumed run's bar begins where the run does
        self.bar: TaskID = self.progress.add_task("", total=steps, completed=resumed_at, left=self.pace.left)
        self.progress.start()

    def step(self, record: StepRecord) -> None:
        self.pace.see(record)
        self.progress.numbers = numbers(record, self.pace)
        self.progress.update(self.bar, completed=record.step, left=self.pace.left)
        if record.skipped:
            self.note(f"step {record.step} skipped: its gradients were not finite")

    def evaluation(self, record: EvaluationRecord) -> None:
        self._print(f"[green]{evaluation_line(record)}[/]")

    def task(self, record: TaskRecord) -> None:
        self._print(f"[green]{escape(task_line(record))}[/]")

    def kernels(self, table: KernelTable) -> None:
        self._print(f"[dim]{escape(kernels_line(table))}[/]")

    def note(self, text: str) -> None:
        self._print(escape(text))

    def close(self) -> None:
        self.progress.stop()

    def _print(self, text: str) -> None:
        self.progress.console.print(text, highlight=False)


def numbers(record: StepRecord, pace: Pace) -> str:
    """A step's numbers in a line."""
    words = [
        f"loss {pace.loss:.4f} (last {record.loss:.4f})",
        f"lr {record.lr:.2e}",
        f"grad norm {record.grad_norm:.3g}",
        f"{record.tokens_per_second:,.0f} tokens/s",
    ]
    words += [] if record.mfu is None else [f"MFU {record.mfu:.1%}"]
    words += [f"{record.memory_bytes / 2**30:.2f} GiB"]
    # bf16 and fp32 have no loss scale
    words += [f"scale {record.loss_scale:g}"] if record.loss_scale != 1.0 else []
    words += ["skipped"] if record.skipped else []
    words += [f"{name} {1e3 * spent:.1f} ms" for name, spent in (record.phases or {}).items()]
    return "  ".join(words)


def evaluation_line(record: EvaluationRecord) -> str:
    return f"step {record.step}: {record.name} loss {record.loss:.4f} over {record.batches} batches"


def task_line(record: TaskRecord) -> str:
    values = [f"{name} {value:.4g}" for name, value in record.metrics.items() if "_stderr" not in name]
    return f"step {record.step}: {record.task} {', '.join(values)}"


def kernels_line(table: KernelTable) -> str:
    """The most time-consuming ops of the profiled step."""
    first = ", ".join(f"{row.op} {row.share:.0%}" for row in table.rows[:4])
    return f"step {table.step} was profiled: {first}; all of it is in the report"


def opening(about: About) -> Panel:
    """The page before the first step."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in opening_facts(about).items():
        table.add_row(label, escape(text))
    where = f"goes on after step {about.resumed_at}" if about.resumed_at else "starts"
    return Panel(table, title=f"{about.architecture} {where}", title_align="left", border_style="cyan")


def opening_facts(about: About) -> dict[str, str]:
    """The opening page's lines: label -> text."""
    dp = f" x {about.dp_size} data-parallel ranks" if about.dp_size > 1 else ""
    accumulated = f" x {about.gradient_accumulation_steps} accumulated" if about.gradient_accumulation_steps > 1 else ""
    wanted = about.steps * about.tokens_per_step
    peak = f", {about.peak_flops / 1e12:,.0f} TFLOP/s at most" if about.peak_flops else ""
    ranks = f"{about.world_size} x " if about.world_size > 1 else ""
    return {
        "model": f"{about.architecture}, {about.parameters:,} parameters, {si(about.flops_per_token)}FLOP a token "
        f"(forward and backward, {about.flops_attention / about.flops_per_token:.0%} of it attention)",
        "data": f"{wanted:,} tokens to read in {about.steps:,} steps; vocabulary of {about.vocab_size:,} "
        f"({about.tokenizer})",
        "batch": f"{about.micro_batch_size} sequences{accumulated}{dp} x {about.seq_length:,} tokens = "
        f"{about.tokens_per_step:,} tokens a step",
        "device": f"{ranks}{about.device}, {about.precision}{peak}",
        "kernels": about.kernels or "none to compile: plain PyTorch serves a CPU",
        "attention": f"{about.attention}; {about.why_attention}",
        "writes": f"{about.folder}  ({_checkpoints(about)})",
    }


def _checkpoints(about: About) -> str:
    return f"checkpoints in {about.checkpoints}" if about.checkpoints else "no checkpoints: checkpoint.save is false"


def closing(about: About, *, report: bool) -> list[str]:
    """The last lines of a run: paths of its files, and next commands. Console markup."""
    file = Path(about.folder) / "report.html"
    # one that could not be written was warned of
    lines = [f"report    [bold]{escape(str(file))}[/]"] if report and file.exists() else []
    # the commonest surprise of a second start: the command ends at once, and must say why
    if about.resumed_at >= about.steps:
        lines.append(
            f"no step was left: the checkpoint is of step {about.resumed_at}, and train.steps is "
            f"{about.steps}; more steps go on from there, another checkpoint.folder begins anew (another "
            "logging.folder, where that is not set)"
        )
    if not about.checkpoints or find(Path(about.checkpoints)) is None:
        return lines
    # `generate` takes a run's folder too, where its checkpoints stand in it
    is_inside = Path(about.checkpoints) == Path(about.folder) / "checkpoints"
    # quoted, so that the line can be copied to a shell
    folder = shlex.quote(about.folder if is_inside else about.checkpoints)
    return [*lines, f'generate  [bold]powertrain generate {escape(folder)} --prompt "def main("[/]']


def many(number: float) -> str:
    """A count as people say it: 115k, 1.24B."""
    return si(number).replace(" ", "").replace("G", "B")


def si(number: float) -> str:
    """1.23 M, 4.5 G: three digits and a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        # 999.5 and not 1000: three digits would round it up to 1e+03
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} E"
