"""FP8 layers sharded by FSDP2 over two ranks, against one process."""

import pytest

from tests.distributed import check_ranks
from tests.distributed.fp8_worker import CHECKS


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("fp8") / "failed.json"
    return check_ranks.failures(2, "tests.distributed.fp8_worker", out)


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks_equal_one(name: str, failures: dict[str, str]) -> None:
    assert not failures[name], failures[name]
