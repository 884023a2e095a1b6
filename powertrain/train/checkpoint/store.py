"""Checkpoints: sharded safetensors and one JSON file, written beside the training, there whole or not at all.

    FOLDER/step_00000100/shard-00001-model-00001-of-00001.safetensors     a file per rank, or several
    FOLDER/step_00000100/checkpoint.json                                  step, samples seen, config, file sizes

torch.distributed.checkpoint writes and reads the tensors, so any number of ranks can load what any number wrote. The
folder is called `.partial` until every rank's files are on disk; then it is renamed. No pickle is written or read.
"""

import fcntl
import json
import os
import re
import shutil
import socket
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

from powertrain.runtime import tracing

# said from a thread of torch's own, so it cannot be silenced around the call
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

FORMAT = 1
# tensors of one file; safetensors is serialized in memory, so this is the most a rank holds beside the staged copy
_FILE_BYTES = 2 << 30
_NAME = re.compile(r"step_(\d+)")


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: which file or tensor, and why."""


class Checkpoints:
    """The checkpoints of one run.

    folder     where they stand
    keep_last  how many stay; None: all
    group      a process group with a CPU back end, for these collectives alone; None: one process
    """

    def __init__(self, folder: Path, *, keep_last: int | None = None, group: dist.ProcessGroup | None = None) -> None:
        self.folder, self.keep_last, self.group = folder, keep_last, group
        self._pending: Future[None] | None = None
        # one thread that publishes: removing an old checkpoint of many GB takes seconds
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="powertrain-checkpoint")
        self._is_first = group is None or dist.get_rank(group) == 0
        self._claim: TextIO | None = None
        self._claim_folder()
        if self._is_first and folder.is_dir():
            for left in folder.glob("*.partial"):
                shutil.rmtree(left)
        self._barrier()

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, asynchronous: bool = True) -> None:
        """Begin to write `tensors` (every rank its part) and `facts` (JSON; "step" names the checkpoint).

        Tensors are copied before this returns, so training may go on. An earlier save is waited for. Every rank calls.
        """
        self.wait()
        step = int(facts["step"])
        final = self.folder / f"step_{step:08d}"
        partial = final.with_suffix(".partial")
        if self._is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._claim_folder()
        writer = HuggingFaceStorageWriter(
            str(partial), fqn_to_index_mapping=_files_of(tensors), save_distributed=True, thread_count=1
        )
        written: Any = dcp_async_save(
            dict(tensors), storage_writer=writer, process_group=self.group, no_dist=self.group is None
        )
        self._pending = self._publisher.submit(self._publish, written, partial, final, dict(facts))
        if not asynchronous:
            self.wait()

    def poll(self) -> None:
        """Raise what went wrong in a save that has ended. Call it now and then; it waits for nobody."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Until the save that is under way is on disk under its final name."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _publish(self, written: Any, partial: Path, final: Path, facts: dict[str, Any]) -> None:
        """Once all files are written: their sizes and the facts beside them, then the final name."""
        # the first rank's future ends after every rank has told it that its files are there
        written.result()
        if not self._is_first:
            return
        files = {file.name: file.stat().st_size for file in sorted(partial.glob("*.safetensors"))}
        write_json(partial / "checkpoint.json", {"format": FORMAT, "files": files, **facts})
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        _sync_folder(self.folder)
        for old in checkpoints_in(self.folder)[: -self.keep_last] if self.keep_last else []:
            shutil.rmtree(old)

    def _claim_folder(self) -> None:
        """Keep other runs out for as long as this process lives. Every rank calls, and waits for the first."""
        problem = [""]
        if self._is_first and self._claim is None and self.folder.is_dir():
            self._claim, problem = claim(self.folder)
        if self.group is not None:
            dist.broadcast_object_list(problem, dist.get_global_rank(self.group, 0), self.group)
        if problem[0]:
            raise ValueError(problem[0])

    def _barrier(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)


def claim(folder: Path) -> tuple[TextIO | None, list[str]]:
    """An open file whose lock says that this process writes in a folder, or why it must not: [""] if it may.

    The lock is the operating system's and goes with the process; forked children do not have it. Where the file system
    has none, nothing is claimed.
    """
    file = (folder / ".writer").open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        return None, [f"checkpoint.folder must not be another run's while it writes there, got {folder}: {owner} does"]
    except OSError as error:
        tracing.event("checkpoint", f"{folder} cannot be kept from other runs: {error}")
        file.close()
        return None, [""]
    file.truncate(0)
    file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
    file.flush()
    return file, [""]


def checkpoints_in(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [
        path for path in folder.glob("step_*") if _NAME.fullmatch(path.name) and (path / "checkpoint.json").is_file()
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def find(path: Path) -> Path | None:
    """The checkpoint at `path`: itself, or the newest in it; None if there is none."""
    if (path / "checkpoint.json").is_file():
        return path
    found = checkpoints_in(path) if path.is_dir() else []
    return found[-1] if found else None


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, after its files were found whole. Raises CheckpointError."""
    file = checkpoint / "checkpoint.json"
    try:
        facts: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} must be a checkpoint's JSON: {error}") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise CheckpointError(f"{file}: format must be {FORMAT}, got {facts.get('format') if facts else facts!r}")
    for name, size in facts["files"].items():
        got = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else None
        if got != size:
            raise CheckpointError(
                f"{checkpoint / name} must have {size} bytes, got {'no file' if got is None else got}"
            )
    return facts


def load(checkpoint: Path, tensors: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Fill `tensors` in place, every rank its part, and return the facts saved beside them.

    Raises CheckpointError for a damaged file, a tensor that is missing, and a shape that differs; then nothing was
    changed.
    """
    facts = read_facts(checkpoint)
    try:
        reader = HuggingFaceStorageReader(str(checkpoint))
        stored = reader.read_metadata().state_dict_metadata
    except Exception as error:  # safetensors raises its own kind, which names no file
        raise CheckpointError(f"{checkpoint}: a file is damaged: {error}") from None
    for name, tensor in tensors.items():
        if name not in stored:
            near = ", ".join(sorted(stored)[:3])
            raise CheckpointError(
                f"{checkpoint} must hold {name} {list(tensor.shape)}, got {len(stored)} others ({near} …)"
            )
        if tuple(stored[name].size) != tuple(tensor.shape):  # type: ignore[union-attr]
            got = list(stored[name].size)  # type: ignore[union-attr]
            raise CheckpointError(f"{checkpoint}: {name} must have shape {list(tensor.shape)}, got {got}")
    dcp_load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)
    return facts


def dtypes(checkpoint: Path) -> dict[str, torch.dtype]:
    """The dtype of every stored tensor."""
    stored = HuggingFaceStorageReader(str(checkpoint)).read_metadata().state_dict_metadata
    return {name: entry.properties.dtype for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


def _files_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Tensor name -> number of the file it goes to, files of about _FILE_BYTES."""
    files, filled, index = {}, 0, 1
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > _FILE_BYTES:
            index, filled = index + 1, 0
        files[name] = index
        filled += size
    return files


def write_json(file: Path, content: Any) -> None:
    """Written aside, on disk, then renamed."""
    aside = file.with_name(f"{file.name}.{os.getpid()}.partial")
    with open(aside, "w") as out:
        json.dump(content, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    os.replace(aside, file)
    _sync_folder(file.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
