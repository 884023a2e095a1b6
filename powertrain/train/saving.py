"""When a run writes checkpoints, and the report of each one that was written or failed."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from powertrain.runtime.reading import why
from powertrain.train.agreement import decided_by_first
from powertrain.train.checkpoint import store as checkpoint_store
from powertrain.train.config.schema import RunConfig
from powertrain.train.data.tokenizer import Tokenizer, kept_files
from powertrain.train.ranks import Ranks
from powertrain.train.restore import Progress


class Saver:
    """The checkpoints of one run; at most one is being written.

    tokenizer   kept in each of them: without it the weights are of no use
    note      called with one line for each checkpoint that is complete, and for each that could not be written
    """

    def __init__(self, config: RunConfig, ranks: Ranks, tokenizer: Tokenizer, note: Callable[[str], None]) -> None:
        self.config, self.note, self.world_size = config, note, ranks.world_size
        self.checkpoints = _checkpoints(config, ranks)
        # now: the file or the checkpoint that it is from may be gone later
        self._beside = kept_files(tokenizer) if config.checkpoint.save and ranks.is_first else {}
        self._saving: int | None = None  # step of the checkpoint being written
        self._not_written: checkpoint_store.NotWritten | None = None  # error of the last save, if it failed

    def is_due(self, step: int) -> bool:
        """Whether the configuration asks for a checkpoint after `step` steps."""
        config = self.config.checkpoint
        if not config.save:
            return False
        last = step == self.config.train.steps
        return last or step in config.extra_steps or save_step(step, config.every, config.scale)

    def save(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        """Begin a checkpoint; a previous one that is still being written is finished first."""
        self.poll(wait=True)
        # the whole config: a resumed run reports the settings that changed
        facts = {**asdict(progress), "world_size": self.world_size, "config": self.config.model_dump(mode="json")}
        self._saving = progress.step
        asynchronous = self.config.checkpoint.asynchronous
        try:
            self.checkpoints.save(tensors, facts, asynchronous=asynchronous, beside=self._beside)
        except checkpoint_store.NotWritten as error:
            self._note_not_written(error)
        except Exception:
            # it did not begin, as where another rank is gone: `close` must not report it as written
            self._saving = None
            raise
        self.poll(wait=not asynchronous)

    def poll(self, *, wait: bool = False) -> None:
        """Report the result of the checkpoint being written, once it is complete."""
        if self._saving is None:
            return
        try:
            if wait:
                self.checkpoints.wait()
            elif not self.checkpoints.poll():
                return
        except checkpoint_store.NotWritten as error:
            self._note_not_written(error)
            return
        self.note(f"checkpoint of step {self._saving} in {self.checkpoints.folder}")
        self._saving, self._not_written = None, None

    def finish(self) -> None:
        """Wait for the checkpoint being written; raises NotWritten if the last one failed."""
        self.poll(wait=True)
        if self._not_written is not None:
            raise self._not_written

    def _note_not_written(self, error: checkpoint_store.NotWritten) -> None:
        # kept, not raised: a full disk may have room again when the next checkpoint is due
        step, self._saving = self._saving, None
        newest = checkpoint_store.find(self.checkpoints.folder)
        words = f"{error}; {f'the newest checkpoint is {newest}' if newest else 'there is no checkpoint yet'}"
        self._not_written = checkpoint_store.NotWritten(words)
        # the last one's error ends the run and is its message
        if step != self.config.train.steps:
            self.note(words)


def save_step(step: int, every: int, scale: str) -> bool:
    """Whether a checkpoint is due after `step` steps; scale log: after 1, every, every^2 ..."""
    if not every or not step:
        return False
    if scale == "linear" or every == 1:
        return step % every == 0
    while step % every == 0:
        step //= every
    return step == 1


def _checkpoints(config: RunConfig, ranks: Ranks) -> checkpoint_store.Checkpoints:
    folder, saves, group = config.checkpoint_folder(), config.checkpoint.save, ranks.checkpoint_group
    # a folder that cannot be made fails now, not at the first checkpoint
    if saves:
        decided_by_first(lambda: _make(folder), group)
    return checkpoint_store.Checkpoints(folder, keep_last=config.checkpoint.kept, group=group, writes=saves)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            "checkpoint.folder (checkpoints in logging.folder, if not set) must name a folder that can be written, got "
            f"{error.filename or folder} ({why(error)})"
        ) from None
