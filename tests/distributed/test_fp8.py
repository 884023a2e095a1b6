"""FP8 layers sharded by FSDP2 over two ranks, against one process."""

import json

import pytest

from tests.distributed.fp8_worker import CHECKS
from tests.distributed.launch import run_ranks


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("fp8") / "failed.json"
    ranks = run_ranks(2, "-m", "tests.distributed.fp8_worker", str(out), timeout=120)
    assert out.is_file(), "\n".join(rank.stdout[-3000:] for rank in ranks)
    found: dict[str, str] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks_equal_one(name: str, failures: dict[str, str]) -> None:
    assert not failures[name], failures[name]
