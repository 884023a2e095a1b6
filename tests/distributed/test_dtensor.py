"""Our ops on DTensors: the rule of each `Op(sharding=...)`, on two ranks."""

import pytest

from tests.distributed import check_ranks
from tests.distributed.dtensor_worker import CHECKS


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("dtensor") / "failed.json"
    return check_ranks.failures(2, "tests.distributed.dtensor_worker", out, interpret=True)


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks_equal_one(name: str, failures: dict[str, str]) -> None:
    assert not failures[name], failures[name]
