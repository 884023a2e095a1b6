"""report.html is one whole file that holds everything, however long the run; its charts are what the numbers say."""

import errno
import math
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.train.reporting import report
from powertrain.train.reporting.chart import line_chart, series, tick
from powertrain.train.reporting.kernel_profile import KernelRow, KernelTable
from powertrain.train.reporting.metrics import EvaluationRecord, Metrics, StepRecord, TaskRecord
from powertrain.train.reporting.run_summary import About

ABOUT = About(
    folder="runs/x", checkpoints="runs/x/checkpoints", command="powertrain train x.yml", started="2026-01-01T00:00:00",
    resumed_at=0, steps=100, architecture="llama", parameters=1_240_000_000, vocab_size=128_256, tokenizer="bytes",
    train_samples=10, seq_length=4096, micro_batch_size=2, gradient_accumulation_steps=2, dp_size=4, world_size=4,
    precision="bf16", device="NVIDIA H200", flops_per_token=9e9, flops_attention=1e9, peak_flops=989.4e12,
    attention="cudnn", why_attention="order: measured", kernels="16 kernels in 0.6 s: 16 pack",
    table=[
        {"key": "bias_gelu_fusion", "value": "true", "place": "a.yml:3", "disposition": "changes numerics",
         "explanation": "GELU by <tanh>"},
        {"key": "train_iters", "value": "100", "place": "a.yml:4", "disposition": "honoured", "explanation": ""},
    ],
    environment={"torch": "2.12.0"},
)  # fmt: skip
TABLE = KernelTable(
    3, "NVIDIA H200", 20.0, (KernelRow("norm", "Triton, ours", "NVIDIA H200", ("_k",), "why <not>", 4, 5.0, 0.25),)
)
VOID = {"meta", "br", "link", "input", "img"}


def _metrics(steps: int) -> Metrics:
    metrics = Metrics(kernels=TABLE)
    for n in range(1, steps + 1):
        loss = 2 + math.exp(-n / steps) + 0.01 * math.sin(n)
        metrics.steps.append(StepRecord(n, loss, 100 / n, 1e-3, False, 1.0, n * 65536, 0.5, 131072.0, 0.3, 5 * 2**30))
        if n % (steps // 10) == 0:
            metrics.evaluations.append(EvaluationRecord(n, "validation", loss + 0.1, 10))
            metrics.tasks.append(TaskRecord(n, "piqa", {"acc": 0.625, "acc_stderr": 0.25}))
    return metrics


class _Page(HTMLParser):
    """Checks that tags close in order; notes texts, and every attribute that loads something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _parsed(text: str) -> _Page:
    page = _Page()
    page.feed(text)
    page.close()
    assert page.open == []
    return page


def test_the_page_is_whole_and_loads_nothing() -> None:
    text = report.render(ABOUT, _metrics(100))
    page = _parsed(text)
    assert page.loads == [] and "http" not in text and "@import" not in text and "url(" not in text
    for said in ("all 100 steps", "1.24B parameters", "GELU by <tanh>", "why <not>", "25.0%", "2.12.0",
                 "989.4 TFLOP/s dense", "powertrain train x.yml", "Triton, ours", "changes numerics (1)",
                 "piqa acc", "0.625"):  # fmt: skip
        assert said in page.text, said
    charts = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(charts) == 6  # loss, throughput, MFU, gradient norm, learning rate, memory
    for chart in charts:
        assert ET.fromstring(chart).find("polyline") is not None


def test_the_mfu_of_the_page_is_the_formula() -> None:
    page = _parsed(report.render(ABOUT, _metrics(100)))
    assert "8 GFLOP a token" in page.text and "1 GFLOP a token" in page.text
    assert "131,072 tokens/s (median), 295 TFLOP/s on each of 4" in " ".join(page.text.split())
    assert f"{131072 * 9e9 / (4 * 989.4e12):.1%}" in page.text
    unknown = _parsed(report.render(replace(ABOUT, peak_flops=None), _metrics(100)))
    assert "logging.peak_tflops sets it" in unknown.text


def test_a_long_run_stays_small() -> None:
    text = report.render(replace(ABOUT, steps=50_000), _metrics(50_000))
    assert len(text) < 300_000
    assert "Each point is the mean of 125 steps" in _parsed(text).text


def test_before_the_first_step_and_after_a_stop() -> None:
    assert "No step is done yet" in _parsed(report.render(ABOUT, Metrics())).text
    metrics = _metrics(50)
    metrics.notes.append((50, "training stopped at step 50: loss nan.\n  rank 0, samples [3]: the weight a.b"))
    page = _parsed(report.render(ABOUT, metrics))
    assert "stopped at step 50 of 100" in page.text and page.text.count("the weight a.b") == 2


def test_a_report_that_cannot_be_made_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = replace(ABOUT, folder=str(tmp_path), checkpoints=str(tmp_path / "checkpoints"))
    about.write()
    (tmp_path / "metrics.jsonl").write_text("")
    path = report.write_report(tmp_path)
    before = path.read_text()
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError("killed here")))
    (tmp_path / "metrics.jsonl").write_text('{"kind": "note", "step": 0, "text": "new"}\n')
    with pytest.raises(OSError, match="killed here"):
        report.write_report(tmp_path)
    assert path.read_text() == before


def test_a_report_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was "[Errno 27] File too large: 'report.html'"."""
    replace(ABOUT, folder=str(tmp_path), checkpoints=str(tmp_path / "checkpoints")).write()
    (tmp_path / "metrics.jsonl").write_text("")
    large = OSError(errno.EFBIG, "File too large", str(tmp_path / "report.html"))
    monkeypatch.setattr("powertrain.train.reporting.report.AtomicFile", Mock(side_effect=large))
    said = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (said.exit_code, said.stderr) == (2, f"{tmp_path}/report.html cannot be written: File too large\n")


def test_a_checkpoint_that_is_being_removed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own thread removes an old one between a look at the folder and one into the checkpoint."""
    replace(ABOUT, folder=str(tmp_path), checkpoints=str(tmp_path / "checkpoints")).write()
    (tmp_path / "metrics.jsonl").write_text("")
    there, gone = (tmp_path / "checkpoints" / name for name in ("step_00000004", "step_00000002"))
    there.mkdir(parents=True)
    monkeypatch.setattr(report, "checkpoints_in", lambda folder: [gone, there])
    page = report.write_report(tmp_path).read_text()
    assert str(there) in page and str(gone) not in page


def test_a_line_that_is_not_ours_is_named(tmp_path: Path) -> None:
    replace(ABOUT, folder=str(tmp_path)).write()
    (tmp_path / "metrics.jsonl").write_text('{"kind": "note", "step": 0, "text": "x"}\n{"kind": "step", "loss": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: a line must be a step"):
        report.write_report(tmp_path)
    (tmp_path / "about.json").write_text("{}")
    with pytest.raises(ValueError, match=r"about\.json must be written by a run"):
        report.write_report(tmp_path)


def test_a_curve_is_means_and_ranges() -> None:
    curve = series("x", [(n, float(n)) for n in range(1, 1001)] + [(1001, math.nan), (1002, math.inf)], most=100)
    assert len(curve.points) == 100
    assert (curve.points[0].y, curve.points[0].low, curve.points[0].high) == (5.5, 1.0, 10.0)
    assert curve.points[-1].x == 1000


def test_a_chart_places_points_by_its_axes() -> None:
    chart = ET.fromstring(line_chart([series("x", [(0, 0.0), (5, 1.0), (10, 2.0)])], marks=[5], zero=True))
    line = chart.find("polyline")
    assert line is not None
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in line.attrib["points"].split())
    assert x1 - x0 == pytest.approx(x2 - x1) and y0 - y1 == pytest.approx(y1 - y2) and y0 > y2
    (mark,) = chart.findall("line[@class='mark']")
    assert float(mark.attrib["x1"]) == pytest.approx(x1)
    assert line_chart([series("x", [(1, math.nan)])]) == ""
    logarithmic = ET.fromstring(line_chart([series("x", [(0, 0.1), (1, 1.0), (2, 10.0)])], log=True))
    line = logarithmic.find("polyline")
    assert line is not None
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (3 * 1e-4, "3e-4"), (2.5e-5, "2.5e-5"), (0.05, "0.05"), (1.5, "1.5"), (2000, "2000"), (20_000, "20k"),
     (410_000, "410k"), (3e6, "3M"), (2e9, "2G")],
)  # fmt: skip
def test_ticks_read_well(value: float, text: str) -> None:
    assert tick(value) == text


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="looks at the page with Chromium, which is not installed")
def test_the_page_opens_in_a_browser(tmp_path: Path) -> None:
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(report.render(ABOUT, _metrics(1000)))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1200,2400"]
    run = subprocess.run(
        [str(CHROMIUM), *options, f"--screenshot={picture}", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0 and "Uncaught" not in run.stderr
    # a blank page of this size compresses to a tenth of it
    assert picture.stat().st_size > 60_000
