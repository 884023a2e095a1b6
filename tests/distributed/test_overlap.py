"""powertrain.parallel's functions on ranks over gloo, against one rank in float64; and what ranks say of lost ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks


def _run(size: int, what: str, out: Path, *, dies: int | None = None) -> dict[int, Any]:
    for rank, process in enumerate(run_ranks(size, "-m", "tests.distributed.overlap_worker", what, str(out))):
        assert (process.returncode == 0) == (rank != dies), process.stdout
    return {int(file.stem): json.loads(file.read_text()) for file in out.glob("*.json")}


@pytest.mark.parametrize("size", [2, 4])
def test_functions_and_gradients_are_one_ranks(size: int, tmp_path: Path) -> None:
    assert len(_run(size, "functions", tmp_path)) == size


def test_compiled_and_checkpointed(tmp_path: Path) -> None:
    assert len(_run(2, "compiled", tmp_path)) == 2


def test_ranks_that_differ_are_told_both_calls(tmp_path: Path) -> None:
    for found in _run(2, "mismatch", tmp_path).values():
        assert "rank 0 makes" in found["said"] and "rank 1 makes" in found["said"]
        assert "[2, 6" in found["said"] and "[2, 8" in found["said"]


def test_who_gave_up_has_not_in_the_next_overlap(tmp_path: Path) -> None:
    found = _run(2, "reopened", tmp_path)
    assert found[0]["said"] == [None, None]
    first, second = found[1]["said"]
    assert "rank 0 (host" in first and "gave up: rows did not come" in first and second is None


def test_a_killed_rank_is_named_on_every_survivor(tmp_path: Path) -> None:
    said = _run(3, "killed", tmp_path, dies=1)
    assert sorted(said) == [0, 2]
    for found in said.values():
        assert "rank 1 (host" in found["said"] and "gone" in found["said"]
        assert "in layers.3.mlp.down cannot end" in found["said"]
        assert "reduce-scatter of" in found["said"]
        assert found["seconds"] < 30
