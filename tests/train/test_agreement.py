"""An error on one rank is raised on every rank, at once."""

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks


@pytest.mark.parametrize(
    "case, says",
    [
        ("publish", "NotWritten: checkpoint {0}/step_00000001 was not written: {0}: No space left on device"),
        ("load", "CheckpointError: seen on rank 1 alone"),
        *(
            pytest.param(case, says, marks=pytest.mark.slow)
            for case, says in [
                ("claim", "PermissionError: [Errno 13] denied"),
                ("mkdir", "NotWritten: checkpoint {0}/step_00000001 was not written: {0}: No space"),
                ("shard", "NotWritten: checkpoint {0}/step_00000001 was not written: rank 1: {0}: No space"),
                ("odd", "RuntimeError: Unpicklable: this and that"),
                ("none", "no error"),
            ]
        ),
    ],
)
def test_an_error_of_one_rank_is_everybodys(tmp_path: Path, case: str, says: str) -> None:
    """Well within gloo's 30 minutes: both ranks go on together after it."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    ranks = run_ranks(2, "-m", "tests.train.agreement_worker", case, str(folder), timeout=120)
    for rank in ranks:
        assert rank.returncode == 0, rank.stdout[-3000:]
        assert says.format(folder) in rank.stdout, rank.stdout[-3000:]
    assert not list(folder.glob("*.partial"))
