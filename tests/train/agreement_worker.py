"""`python -m tests.train.agreement_worker CASE FOLDER`, one rank: an error on one rank ahead of a collective."""

import errno
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from powertrain.train.agreement import decided_by_first, from_all
from powertrain.train.checkpoint import store as checkpoint_store
from powertrain.train.checkpoint.store import Checkpoints


class Unpicklable(ValueError):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def fails(error: Exception) -> Any:
    def work(*args: Any, **options: Any) -> Any:
        raise error

    return work


def main(case: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    full = OSError(errno.ENOSPC, "No space left on device", str(folder))
    tensors = {"model.weight": torch.ones(3)}
    if case == "claim" and rank == 0:
        checkpoint_store.claim = fails(PermissionError(errno.EACCES, "denied", str(folder)))  # type: ignore[assignment]
    if case == "mkdir" and rank == 0:
        Checkpoints._make = fails(full)  # type: ignore[method-assign]
    if case == "publish" and rank == 0:
        checkpoint_store.write_json = fails(full)
    if case == "shard" and rank == 1:
        checkpoint_store.HuggingFaceStorageWriter.write_data = fails(full)
    if case == "odd" and rank == 0:
        checkpoint_store.claim = fails(Unpicklable("this", "that"))  # type: ignore[assignment]
    try:
        if case == "load":
            Checkpoints(folder, group=group).save(tensors, {"step": 1, "config": {}}, asynchronous=False)
            if rank == 1:
                checkpoint_store.compare = fails(checkpoint_store.Damaged("seen on rank 1 alone"))
            checkpoint_store.load(folder / "step_00000001", tensors, group=group)
        else:
            Checkpoints(folder, group=group).save(tensors, {"step": 1, "config": {}}, asynchronous=False)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        assert checkpoint_store.find(folder) is None or case == "load"
    else:
        print("no error", flush=True)
    # nobody waits in the other's collective
    assert decided_by_first(lambda: rank, group) == 0 and from_all(lambda: rank, group) == [0, 1]
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
