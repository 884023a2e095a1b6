"""Checkpoints: sharded safetensors and one JSON file, written during training, visible complete or not at all.

    FOLDER/step_00000100/shard-00001-model-00001-of-00001.safetensors     a file per rank, or several
    FOLDER/step_00000100/tokenizer.json      and other files of the tokenizer, if it has any
    FOLDER/step_00000100/checkpoint.json     step, samples seen, config, sizes and CRC-32 of the files, its own CRC-32

torch.distributed.checkpoint writes and reads the tensors, so a checkpoint loads on any number of ranks. No
pickle is written or read. A folder has one of these names while it is not a checkpoint, or not the one of its step:

    step_00000100.partial    being written: it takes its name when all of it is on disk
    step_00000100.replaced   the step was saved again: moved away before the new one takes its name, then removed
    step_00000100.removing   being removed

A process that begins to write in FOLDER first completes or removes folders of these names from a killed one. In any
folder it deletes only files named like those of checkpoints.
"""

import fcntl
import json
import os
import re
import socket
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

from powertrain.runtime import tracing
from powertrain.runtime.atomic_file import AtomicFile, is_still_at, write_whole
from powertrain.runtime.reading import named, read_json, why
from powertrain.train.agreement import decided_by_first, done_by_all, from_all
from powertrain.train.checksums import Damaged, compare, crc_of, crc_of_json, sync
from powertrain.train.data.tokenizer import FILES

# torch warns from a thread of its own, so the warning cannot be silenced around the call
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

FORMAT = 1
# tensors of one file; safetensors is serialized in memory, so this is the most a rank holds beside the staged copy
_FILE_BYTES = 2 << 30
_NAME = re.compile(r"step_(\d+)(\.replaced)?")
_LEFT = re.compile(r"step_(\d+)\.(partial|replaced|removing)")
_OURS = re.compile(
    r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors|\.?checkpoint\.json(\.\w+\.(partial|tmp))?|"
    + "|".join(map(re.escape, FILES))
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: which file or tensor, and why."""


class NotWritten(RuntimeError):
    """A checkpoint that could not be written: of which step, where, and why. The older ones are there as before."""


class Checkpoints:
    """The checkpoints of one run.

    folder     where they stand
    keep_last  how many stay; None: all
    group      a process group with a CPU back end, for these collectives alone; None: one process
    writes     False: nothing will be saved, so the folder is neither claimed nor cleared after a kill
    Every rank calls every method; an error on one is raised on all.
    """

    def __init__(
        self, folder: Path, *, keep_last: int | None = None, group: dist.ProcessGroup | None = None, writes: bool = True
    ) -> None:
        self.folder, self.keep_last, self.group = folder, keep_last, group
        self._pending: Future[None] | None = None
        # not in the training thread: fsync, rename and removal of old checkpoints made one step take 1.8 s, not 0.03
        # one thread: checkpoints are published in the order in which they were saved
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="powertrain-checkpoint")
        self._rank = 0 if group is None else dist.get_rank(group)
        self._claim: TextIO | None = None
        self._sizes: dict[str, int] = {}  # bytes of the tensors saved last
        self._files: dict[str, int] = {}
        if writes:
            decided_by_first(self._begin, group)

    def save(
        self,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        *,
        asynchronous: bool = True,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        """Begin to write `tensors` (every rank its part) and `facts` (JSON; "step" names the checkpoint).

        beside   contents of the tokenizer's files, by name; the first rank writes them
        Tensors are copied before this returns, so training may go on. An earlier save is waited for.
        Raises NotWritten: for the earlier one, or for this if not `asynchronous`, or if it cannot begin.
        """
        self.wait()
        final = self.folder / f"step_{int(facts['step']):08d}"
        partial = final.with_suffix(".partial")
        try:
            decided_by_first(lambda: self._make(partial), self.group)
        except (OSError, ValueError) as error:
            raise _not_written(final, error) from None
        # safetensors: nothing in them is executed when they are read
        writer = HuggingFaceStorageWriter(
            str(partial), fqn_to_index_mapping=self._files_of(tensors), save_distributed=True, thread_count=1
        )
        written: Any = dcp_async_save(
            dict(tensors), storage_writer=writer, process_group=self.group, no_dist=self.group is None
        )
        # the copy is made by now, so the training may change the weights while the files are written
        self._pending = self._publisher.submit(self._publish, written, partial, final, dict(facts), beside or {})
        if not asynchronous:
            self.wait()

    def _files_of(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """`_files_of` of all ranks' tensors: pipeline stages have different ones. Exchanged once in a run."""
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        # the mapping depends on sizes alone, so one exchange between ranks serves the whole run
        if self._sizes != sizes:
            self._sizes = sizes
            self._files = {}
            for part in from_all(lambda: sizes, self.group):
                self._files |= {name: n for name, n in _files_of(part).items() if name not in self._files}
        return self._files

    def poll(self) -> bool:
        """Whether a save that was under way has ended well; `wait` without waiting. Its moment differs among ranks."""
        is_done = self._pending is not None and self._pending.done()
        if is_done:
            self.wait()
        return is_done

    def wait(self) -> None:
        """Until the save that is under way is on disk under its final name. Raises NotWritten, on every rank."""
        if self._pending is None:
            return
        try:
            self._pending.result()
        except Exception:
            self._pending = None
            raise
        # not after a KeyboardInterrupt: the save is still under way, and it is not known whether it will succeed
        self._pending = None

    def release(self) -> None:
        """Let other runs write in the folder. Not left to the garbage collector: a lock of this process ends with any
        file that it closes there, so a collected run's would end that of the run after it."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def _begin(self) -> None:
        """Keep other runs out of a folder that is there, and complete or remove folders of a killed process."""
        if self._claim is None and self.folder.is_dir():
            self._claim = claim(self.folder, "checkpoint.folder")
            _recover(self.folder)

    def _make(self, partial: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # moved or removed with its folder, in whose place another run may have begun since
        if self._claim is not None and not is_still_at(self._claim, Path(self._claim.name)):
            self.release()
        self._begin()
        if partial.exists():
            _remove(partial)
        # a folder left by a save that failed must not lend its files to this one
        partial.mkdir()

    def _publish(
        self, written: Any, partial: Path, final: Path, facts: dict[str, Any], beside: Mapping[str, bytes]
    ) -> None:
        """Once all files are written: their checksums and the facts beside them, then the final name."""

        def mine() -> dict[str, tuple[int, str]]:
            try:
                written.result()
            except CheckpointException as error:  # derives from BaseException; holds every rank's traceback
                raise _not_written(final, error) from None
            # only this rank's files: each rank checks its own, in parallel
            shards = partial.glob(f"shard-{self._rank + 1:05d}-*.safetensors")
            return {file.name: (file.stat().st_size, crc_of(file)) for file in shards}

        try:
            files = {name: known for part in from_all(mine, self.group) for name, known in sorted(part.items())}
            decided_by_first(lambda: self._name(partial, final, files, facts, beside), self.group)
        except Exception as error:
            if self._rank == 0:
                _remove(partial)
            raise error if isinstance(error, NotWritten) else _not_written(final, error) from None

    def _name(
        self,
        partial: Path,
        final: Path,
        written: dict[str, tuple[int, str]],
        facts: dict[str, Any],
        beside: Mapping[str, bytes],
    ) -> None:
        """On the first rank: the tokenizer, the facts, the final name, and fewer old ones."""
        for name, kept in beside.items():
            write_whole(partial / name, kept)
            written[name] = (len(kept), crc_of(partial / name))
        files = {name: size for name, (size, _) in written.items()}
        content = {"format": FORMAT, "files": files, "checksums": {name: crc for name, (_, crc) in written.items()}}
        content |= facts
        # last and durably: a folder with this file is complete
        write_json(partial / "checkpoint.json", {**content, "checksum": crc_of_json(content)})
        _exchange(partial, final)
        for old in checkpoints_in(self.folder)[: -self.keep_last] if self.keep_last else []:
            _discard(old)


def _not_written(final: Path, error: BaseException) -> NotWritten:
    """The error in one line; of several ranks' errors the first."""
    where = ""
    if isinstance(error, CheckpointException):
        rank, (error, _) = sorted(error.failures.items(), key=lambda item: item[0])[0]
        where = f"rank {rank}: "
    words = " ".join(named(error).split()) or type(error).__name__
    return NotWritten(f"checkpoint {final} was not written: {where}{words[:300]}")


def _exchange(new: Path, final: Path) -> None:
    """Rename `new` to `final`. At every moment the old or the new one has a name that `_recover` knows."""
    replaced = final.with_suffix(".replaced")
    if final.exists():
        os.rename(final, replaced)
    os.rename(new, final)
    # the new name is durable before the old checkpoint goes
    sync(final.parent)
    if replaced.exists():
        _discard(replaced)


def _discard(checkpoint: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that a kill leaves no partial one under a checkpoint's name."""
    aside = checkpoint.with_suffix(".removing")
    try:
        os.rename(checkpoint, aside)
    except OSError as error:
        tracing.warn(f"{checkpoint} could not be removed: {error}")
        return
    _remove(aside)


def _remove(folder: Path) -> None:
    """Delete a checkpoint's files in a folder, and the folder if nothing else is in it. Of a link the link alone."""
    try:
        if folder.is_symlink():
            folder.unlink()
            return
        # checkpoint.json first: without it the rest is not taken for a checkpoint
        for file in sorted(folder.iterdir()):
            if _OURS.fullmatch(file.name) and (file.is_file() or file.is_symlink()):
                file.unlink()
        folder.rmdir()
    except OSError as error:
        tracing.warn(f"{folder} remains, because of files that are not a checkpoint's: {error}")


def _recover(folder: Path) -> None:
    """Complete or undo the renames of a killed process."""
    for path in sorted(folder.iterdir()):
        match = _LEFT.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        final = path.with_suffix("")
        # killed between the two renames: the old checkpoint is the only whole one
        if match[2] == "replaced" and not final.exists():
            os.rename(path, final)
        else:
            _remove(path)


def claim(folder: Path, key: str) -> TextIO | None:
    """An open file whose lock says that this process writes in a folder; ValueError, naming the config's key, if
    another does.

    The lock is the operating system's and goes with the process; forked children do not have it. Where the file system
    has none, nothing is claimed.
    """
    name = folder / ".writer"
    try:
        # not "w": that would erase the owner's name before the lock is had
        file = name.open("a+", errors="replace")
    except OSError as error:
        raise ValueError(f"{key} must name a folder that can be written, got {name} ({why(error)})") from None
    try:
        # POSIX locks work on NFS, and end with the process however it ends
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        owner = file.read(200).strip() or "another process"
        file.close()
        raise ValueError(f"{key} must not be another run's while it writes there, got {folder}: {owner} does") from None
    except OSError as error:
        tracing.event("checkpoint", f"{folder} cannot be kept from other runs: {error}")
        file.close()
        return None
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
        file.flush()
    except OSError as error:  # a full disk: the lock holds, its owner has no name
        tracing.event("checkpoint", f"{folder}/.writer cannot be written: {error}")
    return file


def checkpoints_in(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first; one that is being replaced is listed until the new one has its name."""
    by_step: dict[int, Path] = {}
    # a step comes before the one it replaced
    for path in sorted(folder.glob("step_*")):
        if _NAME.fullmatch(path.name) and (path / "checkpoint.json").is_file():
            by_step.setdefault(step_of(path), path)
    return [by_step[step] for step in sorted(by_step)]


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def warn_of_incomplete(folder: Path) -> None:
    """Say which folders of later steps than the newest checkpoint's have no checkpoint.json, and so are none."""
    newest = find(folder)
    for path in sorted(folder.glob("step_*")):
        match = _NAME.fullmatch(path.name)
        if match is None or match[2] or not path.is_dir() or (path / "checkpoint.json").exists():
            continue
        if newest is None or step_of(newest) < step_of(path):
            then = "does not go on from it" if newest is None else f"goes on from {newest}"
            tracing.warn(f"{path} is no checkpoint, as it has no checkpoint.json: the run {then}")


def find(path: Path) -> Path | None:
    """The checkpoint at `path`: itself, or the newest in it; None if there is none."""
    if (path / "checkpoint.json").is_file():
        return path
    checkpoints = checkpoints_in(path) if path.is_dir() else []
    return checkpoints[-1] if checkpoints else None


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """The description of a checkpoint, after a check that its files have their sizes. Raises CheckpointError."""
    with _naming_an_older(checkpoint):
        return _facts(checkpoint)


def _facts(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / "checkpoint.json"
    try:
        facts = read_json(file)
    except (OSError, ValueError) as error:
        # which names the file
        raise CheckpointError(str(error)) from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        got = repr(facts.get("format") if isinstance(facts, dict) else facts)[:80]
        raise CheckpointError(f"{file}: format must be {FORMAT}, got {got}")
    written = facts.pop("checksum", None)
    if ("checksums" in facts or written is not None) and crc_of_json(facts) != written:
        raise CheckpointError(
            f"{file} must have the checksum {crc_of_json(facts)}, got {str(written)[:80]!r}: the file is damaged"
        )
    if not _is_whole(facts):
        raise CheckpointError(f"{file} must name its step, files and sizes, got others: the file is damaged")
    # sizes only, which costs nothing: contents are compared once, before a load
    _compare(checkpoint, facts, facts["files"], contents=False)
    return facts


def _is_whole(facts: dict[str, Any]) -> bool:
    """Whether the entries that every checkpoint has exist, with the right types."""
    files = facts.get("files")
    return (
        isinstance(files, dict)
        and all(_OURS.fullmatch(name) and isinstance(size, int) for name, size in files.items())
        and isinstance(facts.get("step"), int)
        and isinstance(facts.get("config"), (dict, type(None)))
    )


def verify(checkpoint: Path, facts: Mapping[str, Any], *, group: dist.ProcessGroup | None = None) -> None:
    """Read every file and compare it with its checksum, each rank some of them. Raises CheckpointError.

    A checkpoint from before checksums were introduced is loaded without the comparison, with a warning.
    """
    if "checksums" not in facts:
        tracing.warn(f"{checkpoint} has no checksums (an earlier version wrote it); damage in it would not be seen")
        return
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def compare_mine() -> None:
        with _naming_an_older(checkpoint):
            _compare(checkpoint, facts, sorted(facts["files"])[rank::size], contents=True)

    done_by_all(compare_mine, group)


def _compare(checkpoint: Path, facts: Mapping[str, Any], names: Any, *, contents: bool) -> None:
    sums = facts.get("checksums", {}) if contents else {}
    try:
        for name in names:
            compare(checkpoint / name, facts["files"][name], sums.get(name))
    except (Damaged, OSError) as error:
        raise CheckpointError(str(error)) from None


@contextmanager
def _naming_an_older(checkpoint: Path) -> Iterator[None]:
    """Around what reads a checkpoint: its error, and an alternative. Inside, nothing names one itself."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_older(checkpoint)}") from None


def _older(checkpoint: Path) -> str:
    """An alternative to resume from: the newest older checkpoint that is complete."""
    # a converted checkpoint may have any name, and folders beside it are not older ones of the same run
    if not _NAME.fullmatch(checkpoint.name):
        return ""
    for other in reversed(checkpoints_in(checkpoint.parent)):
        if step_of(other) < step_of(checkpoint):
            try:
                facts = _facts(other)
                _compare(other, facts, facts["files"], contents=True)
            except CheckpointError:
                continue
            return f". {other} is whole: move {checkpoint.name} out of the folder to go on from there"
    return ". There is no older checkpoint that is whole"


def load(checkpoint: Path, tensors: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Fill `tensors` in place, every rank its part, and return the facts saved beside them.

    Raises CheckpointError, on every rank, for a damaged file, a tensor that is missing, and a shape that differs; then
    nothing was changed.
    """
    facts = done_by_all(lambda: read_facts(checkpoint), group)
    verify(checkpoint, facts, group=group)
    fill(checkpoint, tensors, group=group)
    return facts


def fill(checkpoint: Path, tensors: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None) -> None:
    """`load` of a checkpoint that was verified."""
    reader = done_by_all(lambda: _reader_for(checkpoint, tensors), group)
    try:
        dcp_load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as failed:
        rank, (error, _) = sorted(failed.failures.items(), key=lambda item: item[0])[0]
        raise CheckpointError(f"{checkpoint} cannot be read on rank {rank}: {' '.join(str(error).split())}") from None


def _reader_for(checkpoint: Path, tensors: Mapping[str, Tensor]) -> HuggingFaceStorageReader:
    """A reader of a checkpoint that has these tensors in these shapes."""
    # names and shapes are compared before a value is read, so a failure changes nothing
    reader, stored = _stored(checkpoint)
    for name, tensor in tensors.items():
        if name not in stored:
            near = ", ".join(sorted(stored)[:3])
            raise CheckpointError(
                f"{checkpoint} must hold {name} {list(tensor.shape)}, got {len(stored)} others ({near} …)"
            )
        if tuple(stored[name].size) != tuple(tensor.shape):
            got = list(stored[name].size)
            raise CheckpointError(f"{checkpoint}: {name} must have shape {list(tensor.shape)}, got {got}")
    return reader


def _stored(checkpoint: Path) -> tuple[HuggingFaceStorageReader, dict[str, Any]]:
    reader = HuggingFaceStorageReader(str(checkpoint))
    try:
        return reader, reader.read_metadata().state_dict_metadata
    except Exception as error:  # safetensors raises its own kind, which names no file
        words = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{checkpoint}: a file is damaged: {words}{_older(checkpoint)}") from None


def dtypes(checkpoint: Path) -> dict[str, torch.dtype]:
    """The dtype of every stored tensor."""
    stored = _stored(checkpoint)[1]
    return {name: entry.properties.dtype for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


def _files_of(sizes: Mapping[str, int]) -> dict[str, int]:
    """Tensor name -> number of the file it goes to, files of about _FILE_BYTES."""
    files, filled, index = {}, 0, 1
    for name, size in sizes.items():
        # `filled` first: a tensor larger than the limit gets a file of its own
        if filled and filled + size > _FILE_BYTES:
            index, filled = index + 1, 0
        files[name] = index
        filled += size
    return files


def write_json(file: Path, content: Any) -> None:
    """Write JSON atomically and durably."""
    new = AtomicFile(file)
    try:
        new.write(json.dumps(content, indent=1).encode())
        new.publish()
    finally:
        new.discard()
    sync(file.parent)
