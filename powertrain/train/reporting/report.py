"""report.html: settings and results of a run in one file, made from its folder."""

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from powertrain.runtime.atomic_file import AtomicFile
from powertrain.runtime.reading import reading
from powertrain.train.checkpoint.store import checkpoints_in, step_of
from powertrain.train.reporting.chart import MOST_POINTS, WIDE, line_chart, series
from powertrain.train.reporting.metrics import EvaluationRecord, Metrics, PartialSink, StepRecord, read_metrics
from powertrain.train.reporting.progress import Pace, many, opening_facts, si
from powertrain.train.reporting.run_summary import About

NAME = "report.html"
# reports written while a run goes on take at most a hundredth of its time
_SHARE = 100


def write_report(folder: Path) -> Path:
    """Make report.html of a run's folder anew; it appears whole or not at all. Returns its path.

    Raises FileNotFoundError or ValueError naming the file, where the folder is not a run's.
    """
    about, metrics = About.read(folder), read_metrics(folder / "metrics.jsonl")
    with reading(folder, "hold the files of a run"):
        # rendered before the file is touched: an error leaves the old report
        page = render(about, metrics, _checkpoints(folder, about))
    new = AtomicFile(folder / NAME)
    try:
        # a path or a sample in the page may hold bytes that are no UTF-8
        new.write(page.encode(errors="replace"))
        new.publish()
    finally:
        new.discard()
    return folder / NAME


class ReportFile(PartialSink):
    """The sink that writes the report: at evaluations, unless that took long, and at the end, however it came."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ready = 0.0

    def evaluation(self, record: EvaluationRecord) -> None:
        started = time.monotonic()
        if started >= self._ready:
            write_report(self.folder)
            now = time.monotonic()
            # the report of a long run takes seconds, and the training waits for it
            self._ready = now + _SHARE * (now - started)

    def close(self) -> None:
        write_report(self.folder)


@dataclass(frozen=True)
class Checkpoint:
    """step, path and size on disk of one that is there now."""

    step: int
    path: str
    gib: float


def _checkpoints(folder: Path, about: About) -> list[Checkpoint]:
    """The run's checkpoints, also where its folder was moved after it."""
    # a folder that was copied to another machine still has its checkpoints beside the report
    folders = (*([Path(about.checkpoints)] if about.checkpoints else []), folder / "checkpoints", folder)
    checkpoints = next((paths for each in folders if (paths := checkpoints_in(each))), [])
    found = []
    for path in checkpoints:
        # one that is being removed, by the run's own thread or by a run that goes on, is no longer there
        with suppress(FileNotFoundError):
            size = sum(file.stat().st_size for file in path.iterdir())
            found.append(Checkpoint(step_of(path), str(path), size / 2**30))
    return found


def render(about: About, metrics: Metrics, checkpoints: list[Checkpoint] | None = None) -> str:
    """The page's HTML. Curves have at most 400 points however long the run; nothing is read from elsewhere."""
    environment = Environment(
        # StrictUndefined: a name that the template misspells is an error, not an empty place in the page
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    facts = opening_facts(about)
    last = metrics.steps[-1].step if metrics.steps else about.resumed_at
    return environment.get_template("report.html.j2").render(
        about=about, facts=facts, last=last, state=_state(about, metrics, last), tiles=_tiles(about, metrics),
        # only the last one: a run may have been stopped and resumed before
        stopped=[text for _, text in metrics.notes if text.startswith("training stopped")][-1:],
        charts=_charts(about, metrics), table=metrics.kernels, groups=_config(about), mfu=_mfu(about, metrics),
        checkpoints=checkpoints or [], notes=metrics.notes, per_point=-(-len(metrics.steps) // MOST_POINTS),
        parameters=many(about.parameters),
    )  # fmt: skip


def _state(about: About, metrics: Metrics, last: int) -> tuple[str, str]:
    """(class, words) of how far the run is."""
    if metrics.notes and metrics.notes[-1][1].startswith("training stopped"):
        return "bad", f"stopped at step {last:,} of {about.steps:,}"
    # by the number, since a run that was killed after its last step wrote no closing note
    if last >= about.steps:
        return "good", f"all {about.steps:,} steps"
    return "open", f"step {last:,} of {about.steps:,}"


def _tiles(about: About, metrics: Metrics) -> list[tuple[str, str, str]]:
    """(label, number, remark) of the key figures."""
    steps = metrics.steps
    if not steps:
        return []
    # the same smoothing as on the screen, so that both show one number
    pace = Pace(about.steps)
    for record in steps:
        pace.see(record)
    tiles = [("training loss", f"{pace.loss:.3f}", f"smoothed; {steps[0].loss:.3f} at step {steps[0].step}")]
    for name in dict.fromkeys(record.name for record in metrics.evaluations):
        mine = [record for record in metrics.evaluations if record.name == name]
        best = min(mine, key=lambda record: record.loss)
        tiles.append((f"{name} loss", f"{mine[-1].loss:.3f}", f"best {best.loss:.3f} at step {best.step:,}"))
    # a dictionary keeps the last record of each task
    for last in {record.task: record for record in metrics.tasks}.values():
        for name, value in last.metrics.items():
            # lm_eval reports a standard error beside each metric
            if "_stderr" not in name:
                tiles.append((f"{last.task} {name}", f"{value:.4g}", f"at step {last.step:,}"))
    tiles.append(("tokens seen", many(steps[-1].tokens), f"{about.tokens_per_step:,} a step"))
    tiles.append(("tokens/s", f"{_rate(steps):,.0f}", "median of all steps"))
    if (mfu := _median_mfu(steps)) is not None:
        tiles.append(("MFU", f"{mfu:.1%}", "median of all steps"))
    tiles.append(("memory", f"{max(r.memory_bytes for r in steps) / 2**30:.3g} GiB", "at most, of the first rank"))
    spent = timedelta(seconds=round(sum(record.seconds for record in steps)))
    tiles.append(("time in steps", str(spent), f"{len(steps):,} steps"))
    return tiles


def _rate(steps: list[StepRecord]) -> float:
    # the median: a step with a checkpoint or an evaluation's compile in it would pull a mean down
    return statistics.median(record.tokens_per_second for record in steps)


def _median_mfu(steps: list[StepRecord]) -> float | None:
    # a run that was resumed on another device may have steps without a peak to compare with
    known = [record.mfu for record in steps if record.mfu is not None]
    return statistics.median(known) if known else None


def _charts(about: About, metrics: Metrics) -> list[tuple[str, str, list[tuple[str, str]], Markup]]:
    """(title, unit, legend of (style, name), SVG)."""
    steps, evaluations = metrics.steps, metrics.evaluations
    names = dict.fromkeys(record.name for record in evaluations)
    losses = [series("training", [(r.step, r.loss) for r in steps])]
    losses += [
        series(name, [(r.step, r.loss) for r in evaluations if r.name == name], style=style, dots=True)
        for name, style in zip(names, "bcd", strict=False)
    ]

    def of(name: str) -> list[tuple[float, float]]:
        return [(r.step, value) for r in steps if (value := getattr(r, name)) is not None]

    gib = [(step, value / 2**30) for step, value in of("memory_bytes")]
    percent = [(step, 100 * value) for step, value in of("mfu")]
    marks = [about.resumed_at] if about.resumed_at else []
    charts = [("Loss", "nats per token", losses, line_chart(losses, width=WIDE, marks=marks))]
    for title, unit, values, options in (
        ("Throughput", "tokens/s", of("tokens_per_second"), {"zero": True}),
        ("MFU", "% of peak", percent, {"zero": True}),
        ("Gradient norm", "before clipping", of("grad_norm"), {"log": True}),
        ("Learning rate", "", of("lr"), {"zero": True}),
        ("Memory", "GiB, of the first rank", gib, {"zero": True}),
    ):
        curve = series(title, values)
        charts.append((title, unit, [curve], line_chart([curve], marks=marks, **options)))
    for name in steps[-1].objective or {} if steps else ():
        lines = [series("training", _objective(steps, name))]
        lines += [
            series(part, _objective([r for r in evaluations if r.name == part], name), style=style, dots=True)
            for part, style in zip(names, "bcd", strict=False)
        ]
        charts.append((_TITLES.get(name, name.capitalize()), "", lines, line_chart(lines, marks=marks)))
    if steps and steps[-1].phases:
        lines = [
            series(name, [(r.step, 1e3 * r.phases[name]) for r in steps if r.phases], style=style)
            for name, style in zip(steps[-1].phases, "dabc", strict=False)
        ]
        charts.append(("Parts of a step", "ms, of the first rank", lines, line_chart(lines, marks=marks, log=True)))
    return [
        (title, unit, [(line.style, line.name) for line in lines if line.points and len(lines) > 1], svg)
        for title, unit, lines, svg in charts
    ]


def _objective(records: Sequence[StepRecord | EvaluationRecord], name: str) -> list[tuple[float, float]]:
    return [(r.step, r.objective[name]) for r in records if r.objective and name in r.objective]


_TITLES = {
    "rewards_chosen": "Rewards of chosen completions", "rewards_rejected": "Rewards of rejected completions",
    "margin": "Margin of rewards", "kl": "KL divergence", "nll": "Loss a token of completions",
    "ratio": "Ratio of policies", "clipped": "Share of clipped ratios",
}  # fmt: skip


def _config(about: About) -> list[tuple[str, list[dict[str, Any]]]]:
    """(disposition, rows), those that need attention first."""
    order = ("changes numerics", "ignored", "mapped", "honoured")
    groups = [(kind, [row for row in about.table if row["disposition"] == kind]) for kind in order]
    return [(kind, rows) for kind, rows in groups if rows]


def _mfu(about: About, metrics: Metrics) -> dict[str, str]:
    """The formula's numbers."""
    numbers = {
        "products": f"{si(about.flops_per_token - about.flops_attention)}FLOP",
        "attention": f"{si(about.flops_attention)}FLOP",
        "together": f"{si(about.flops_per_token)}FLOP",
        "peak": "" if about.peak_flops is None else f"{about.peak_flops / 1e12:,.1f} TFLOP/s",
        "rate": f"{_rate(metrics.steps):,.0f}" if metrics.steps else "",
        "achieved": "",
        "mfu": "",
    }
    if metrics.steps:
        achieved = _rate(metrics.steps) * about.flops_per_token / about.world_size
        numbers["achieved"] = f"{achieved / 1e12:,.3g} TFLOP/s"
        numbers["mfu"] = f"{achieved / about.peak_flops:.1%}" if about.peak_flops else ""
    return numbers
