"""Experts spread over ranks, over gloo, against one rank in float64: results, and gradients of all there are."""

import json
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_results_and_gradients_are_one_ranks(size: int, tmp_path: Path) -> None:
    for process in run_ranks(size, "-m", "tests.distributed.experts_worker", str(tmp_path)):
        assert process.returncode == 0, process.stdout
    assert len(list(tmp_path.glob("*.json"))) == size


@pytest.mark.slow
def test_a_rank_that_dies_before_backward_is_named(tmp_path: Path) -> None:
    run_ranks(3, "-m", "tests.distributed.experts_worker", str(tmp_path), "killed")
    said = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    assert sorted(said) == ["0", "2"]
    assert all("rank 1 (host" in text and "gone" in text for text in said.values()), said
