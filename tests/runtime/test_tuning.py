"""Tuned tile tables: kept per GPU, keyed by size class, never in the way."""

import json
import time
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.runtime import settings, tracing, tuning
from powertrain.runtime.compile.worker import key_lock
from powertrain.runtime.target import Target


class Plan(NamedTuple):
    block_m: int
    num_warps: int


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POWERTRAIN_STORE", str(tmp_path / "kernels"))
    settings.reload()
    tuning.tuned.cache_clear()
    monkeypatch.setattr(tuning, "shipped", {})

    @tuning.tunable("never")
    def _plan(M: int, N: int, target: Target) -> Plan:
        return Plan(2, 8)

    yield _plan
    monkeypatch.undo()
    settings.reload()
    tuning.tuned.cache_clear()


H200, A100 = Target.parse("H200"), Target.parse("A100")


def test_shipped_until_tuned(sample) -> None:
    assert sample(100, 4096, H200) == Plan(2, 8)
    tuning.save(H200.name, {f"{__name__}._plan": {"128,4096": {"num_warps": 4}}}, {"date": "today"})
    assert sample(100, 4096, H200) == Plan(2, 4), "the same size class"
    assert sample(200, 4096, H200) == Plan(2, 8), "another size class"
    assert sample(100, 4096, A100) == Plan(2, 8), "another GPU"


def test_tables_merge(sample) -> None:
    tuning.save(H200.name, {f"{__name__}._plan": {"1,1": {"num_warps": 1}}}, {})
    tuning.save(H200.name, {f"{__name__}._plan": {"2,2": {"num_warps": 2}}}, {})
    assert (sample(1, 1, H200).num_warps, sample(2, 2, H200).num_warps) == (1, 2)


def test_plans_that_another_process_is_merging_are_waited_for(sample) -> None:
    """Of six processes that ended together one's plans were kept."""
    path = tuning.table_path(H200.name)
    tuning.save(H200.name, {"a": {"1": {"num_warps": 1}}}, {})
    with key_lock(path.with_suffix(".lock"), time.monotonic() + 10) as held:
        assert held
        other = Thread(target=tuning.save, args=(H200.name, {"b": {"2": {"num_warps": 2}}}, {}))
        other.start()
        other.join(0.1)
        path.write_text(path.read_text().replace('"a"', '"c"'))
    other.join(10)
    assert json.loads(path.read_text())["plans"].keys() == {"b", "c"}
    assert not path.with_suffix(".lock").exists()


def test_a_table_that_was_copied_from_another_gpu_is_said_and_left(sample) -> None:
    path = tuning.save(H200.name, {f"{__name__}._plan": {"1,1": {"num_warps": 4}}}, {})
    path.rename(tuning.table_path(A100.name))
    tracing.clear()
    assert sample(1, 1, A100) == Plan(2, 8)
    assert f"device must be {A100.name}, got '{H200.name}'" in tracing.trace()[-1].text


PLANS_OF_A_STRING = '{"plans": {"x": {"1,1": {"num_warps": "4"}}}}'


@pytest.mark.parametrize("content", ["", "{", "[]", '{"plans": 3}', '{"plans": {"x": {"1,1": 4}}}', PLANS_OF_A_STRING])
def test_a_bad_table_is_said_and_left(sample, content: str) -> None:
    path = tuning.table_path(H200.name)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    tracing.clear()
    assert sample(1, 1, H200) == Plan(2, 8)
    assert "powertrain tune" in tracing.trace()[-1].text


def test_a_table_of_another_release_has_fields_that_the_plan_has_not(sample) -> None:
    tuning.save(H200.name, {f"{__name__}._plan": {"1,1": {"num_stages": 3, "num_warps": 4}}}, {})
    tracing.clear()
    assert sample(1, 1, H200) == Plan(2, 4)
    assert "has no num_stages in this release" in tracing.trace()[-1].text


def test_two_processes_that_tune_at_once_keep_both_results(sample) -> None:
    tuning.save(H200.name, {f"{__name__}._plan": {"1,1": {"num_warps": 1}}}, {})
    assert sample(1, 1, H200).num_warps == 1, "read, and kept"
    path = tuning.table_path(H200.name)
    path.write_text(path.read_text().replace('"1,1"', '"2,2"'))  # the other process
    tuning.save(H200.name, {f"{__name__}._plan": {"4,4": {"num_warps": 4}}}, {})
    assert (sample(2, 2, H200).num_warps, sample(4, 4, H200).num_warps) == (1, 4)


def test_a_table_that_cannot_be_written_leaves_nothing_behind(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("powertrain.runtime.atomic_file.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        tuning.save(H200.name, {"x": {"1,1": {"num_warps": 1}}}, {})
    assert list(tuning.table_path(H200.name).parent.iterdir()) == []


def test_while_tuning_calls_are_met_and_forced(sample) -> None:
    with tuning.session():
        sample(100, 4096, H200)
        assert tuning.met == {(f"{__name__}._plan", "128,4096"): Plan(2, 8)}
        tuning.forced[f"{__name__}._plan"] = {"num_warps": 16}
        assert sample(100, 4096, H200) == Plan(2, 16)
    assert sample(100, 4096, H200) == Plan(2, 8)


def test_neighbours_start_with_the_plan_itself() -> None:
    found = tuning.neighbours(Plan(2, 8), ("block_m", "num_warps"))
    assert found[0] == {} and {"block_m": 4, "num_warps": 16} in found and {"num_warps": 4} in found


def test_the_command_lists_where_plans_were_measured() -> None:
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 0 and "norm_bwd_kernels._plan_bwd" in result.output and "H200" in result.output
