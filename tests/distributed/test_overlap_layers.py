"""Layers and models spread over tensor ranks compute what one process does, gradients included, in float64."""

import pytest

from tests.distributed.check_ranks import failures
from tests.distributed.layers_worker import CHECKS, SLOW

_WORKER = "tests.distributed.layers_worker"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return failures(2, _WORKER, tmp_path_factory.mktemp("two") / "failed.json")


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks_equal_one(name: str, two: dict[str, str]) -> None:
    assert not two[name], two[name]


@pytest.fixture(scope="module")
def two_more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return failures(2, _WORKER, tmp_path_factory.mktemp("two_more") / "failed.json", table="SLOW")


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_two_more_ranks_equal_one(name: str, two_more: dict[str, str]) -> None:
    assert not two_more[name], two_more[name]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return failures(1, _WORKER, tmp_path_factory.mktemp("one") / "failed.json")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHECKS.keys() - {"dropout", "wrong_arguments"}))
def test_a_group_of_one(name: str, one: dict[str, str]) -> None:
    assert not one[name], one[name]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return failures(4, _WORKER, tmp_path_factory.mktemp("four") / "failed.json")


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_four_ranks_equal_one(name: str, four: dict[str, str]) -> None:
    assert not four[name], four[name]
