"""Layers and models spread over tensor ranks compute what one process does, gradients included, in float64."""

import json
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.layers_worker import CHECKS, SLOW


def _failures(world_size: int, folder: Path, *which: str) -> dict[str, str]:
    out = folder / "failed.json"
    ranks = run_ranks(world_size, "-m", "tests.distributed.layers_worker", str(out), *which, timeout=120)
    assert out.is_file(), "\n".join(rank.stdout[-3000:] for rank in ranks)
    found: dict[str, str] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return _failures(2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks_equal_one(name: str, two: dict[str, str]) -> None:
    assert not two[name], two[name]


@pytest.fixture(scope="module")
def two_more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return _failures(2, tmp_path_factory.mktemp("two_more"), "slow")


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_two_more_ranks_equal_one(name: str, two_more: dict[str, str]) -> None:
    assert not two_more[name], two_more[name]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return _failures(1, tmp_path_factory.mktemp("one"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHECKS.keys() - {"dropout", "wrong_arguments"}))
def test_a_group_of_one(name: str, one: dict[str, str]) -> None:
    assert not one[name], one[name]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return _failures(4, tmp_path_factory.mktemp("four"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_four_ranks_equal_one(name: str, four: dict[str, str]) -> None:
    assert not four[name], four[name]
