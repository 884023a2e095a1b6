"""Patched models of transformers under DDP and FSDP2 over two ranks, step by step as unpatched ones."""

import json

import pytest

pytest.importorskip("transformers")

from tests.distributed.launch import run_ranks
from tests.distributed.patch_worker import CHECKS


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("patch") / "failed.json"
    ranks = run_ranks(2, "-m", "tests.distributed.patch_worker", str(out), timeout=180)
    assert out.is_file(), "\n".join(rank.stdout[-3000:] for rank in ranks)
    found: dict[str, str] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks_patched_as_unpatched(name: str, failures: dict[str, str]) -> None:
    assert not failures[name], failures[name]
