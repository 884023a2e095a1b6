"""Patched models of transformers under DDP and FSDP2 over two ranks, step by step as unpatched ones."""

import pytest

pytest.importorskip("transformers")

from tests.distributed import check_ranks
from tests.distributed.patch_worker import CHECKS


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("patch") / "failed.json"
    return check_ranks.failures(2, "tests.distributed.patch_worker", out, timeout=180)


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks_patched_as_unpatched(name: str, failures: dict[str, str]) -> None:
    assert not failures[name], failures[name]
