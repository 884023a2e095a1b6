"""`powertrain demo`: what it judges and what it may remove. `make demo` runs it whole."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from typer import BadParameter, Exit

from powertrain.cli import demo, tour
from powertrain.train.signals import Ended


def _metrics(folder: Path, *losses: float, torn: str = "") -> None:
    lines = [json.dumps({"kind": "evaluation", "step": i, "loss": loss}) + "\n" for i, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(lines) + torn)


def test_half_of_what_there_is_to_learn(tmp_path: Path) -> None:
    _metrics(tmp_path, 5.0, 2.7)
    demo._compare_ranks(tmp_path, Console())
    _metrics(tmp_path, 2.0, 2.8)
    with pytest.raises(Exit):
        demo._compare_ranks(tmp_path, Console())


def test_a_torn_last_line_is_not_read(tmp_path: Path) -> None:
    _metrics(tmp_path, 3.0, torn='{"kind": "eval')
    assert [record["loss"] for record in demo._records(tmp_path)] == [3.0]


def test_only_a_demo_is_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "thesis.tex"
    precious.write_text("")
    with pytest.raises(BadParameter, match="other files"):
        demo._clear(tmp_path)
    assert precious.exists()
    # a run of somebody's, such as `train quickstart logging.folder=runs/demo`, was removed with its checkpoints
    _metrics(tmp_path, 3.0)
    with pytest.raises(BadParameter, match="must be new or an earlier demo's, got other files"):
        demo._clear(tmp_path)
    assert (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("is_link", [False, True])
def test_an_earlier_demo_is_replaced(is_link: bool, tmp_path: Path) -> None:
    (tmp_path / "aside").mkdir()
    (folder := tmp_path / "runs" / "demo").parent.mkdir()
    if is_link:
        folder.symlink_to(tmp_path / "aside")
    demo._clear(folder)
    (folder / "checkpoints").mkdir()
    _metrics(folder, 3.0)
    demo._clear(folder)
    assert [path.name for path in folder.iterdir()] == [demo._MARK] and folder.is_symlink() == is_link


def test_one_config_for_demo_and_reader() -> None:
    linked = Path(__file__).parent.parent / "configs" / "quickstart.yml"
    assert linked.resolve() == Path(demo.__file__).parent.parent / "train" / "quickstart.yml"


def test_the_training_ends_with_its_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout 10 powertrain demo` left it running, and the next demo found its folder taken."""
    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(demo, "_POWERTRAIN", ["sh", "-c", "exec sleep 100"])
    monkeypatch.setattr(demo.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command: started.append(popen(command)) or started[0])
    with pytest.raises(Ended):
        demo.demo(tmp_path / "run")
    assert [process.poll() for process in started] == [-signal.SIGKILL]


def test_a_tours_processes_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's loader, which waits for a lock for ever, did so behind a tour that Ctrl-C had ended."""
    with pytest.raises(KeyboardInterrupt), tour._started("import time; time.sleep(100)", tmp_path) as process:
        raise KeyboardInterrupt
    assert process.returncode == -signal.SIGKILL
    monkeypatch.setattr(tour, "_attention", lambda _: os.kill(os.getpid(), signal.SIGHUP))
    with pytest.raises(Ended):
        tour.tour("attention")
