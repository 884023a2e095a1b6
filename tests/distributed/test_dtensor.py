"""Our ops on DTensors: the rule of each `Op(sharding=...)`, on two ranks."""

import json

import pytest

from tests.distributed.dtensor_worker import CHECKS
from tests.distributed.launch import run_ranks


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("dtensor") / "failed.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POWERTRAIN_INTERPRET", "1")
        ranks = run_ranks(2, "-m", "tests.distributed.dtensor_worker", str(out), timeout=120, fresh=True)
    assert out.is_file(), "\n".join(rank.stdout[-3000:] for rank in ranks)
    found: dict[str, str] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks_equal_one(name: str, failures: dict[str, str]) -> None:
    assert not failures[name], failures[name]
