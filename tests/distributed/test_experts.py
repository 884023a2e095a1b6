"""Experts spread over ranks, over gloo, against one rank in float64: results, and gradients of all there are."""

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_results_and_gradients_are_one_ranks(size: int, tmp_path: Path) -> None:
    for process in run_ranks(size, "-m", "tests.distributed.experts_worker", str(tmp_path)):
        assert process.returncode == 0, process.stdout
    assert len(list(tmp_path.glob("*.json"))) == size
