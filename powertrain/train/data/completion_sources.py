"""From `data:` of a configuration to samples of completions: records are tokenized once, split, ordered and blended."""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from powertrain.runtime import tracing
from powertrain.train.config.schema import DataConfig, DataSource
from powertrain.train.data import datasets_library
from powertrain.train.data.blend import BlendedSamples, blend_indices, normalized, samples_wanted
from powertrain.train.data.completion_samples import CompletionSamples, Integers, NoExample
from powertrain.train.data.completions import (
    CompletionData,
    CompletionEncoding,
    CompletionFiles,
    Format,
    files_of,
    warn_without_end,
    write_completions,
)
from powertrain.train.data.corpus import digest, find_files, raw_documents
from powertrain.train.data.file_lock import one_at_a_time
from powertrain.train.data.indexed import folder_of
from powertrain.train.data.packed import SampleSource
from powertrain.train.data.samples import cached_arrays, split_bounds
from powertrain.train.data.sources import (
    PARTS,
    Data,
    cache_folder,
    identity_of,
    is_whole,
    open_tokenizer,
    prefix_of,
    refuse_unused,
    warn_of_empty,
    warn_of_none,
)
from powertrain.train.data.tokenizer import Tokenizer


def open_completions(
    config: DataConfig,
    form: Format,
    *,
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int,
    tokenizer: Tokenizer | None = None,
    cache: Path | None = None,
) -> Data:
    """`open_data` for prompts with completions: sources are jsonl, parquet, `datasets`, or GPT-NeoX's .bin/.idx.

    form: what a record has (completions.py). A split counts examples; rows of a held-out part are as those of training.
    A held-out part of which no example can be used is None, with a warning that gives the causes.
    Raises ValueError or FileNotFoundError naming the file or key.
    """
    folder = cache_folder(config, cache)
    tokenizer = tokenizer or open_tokenizer(config, folder)
    opener = _Opener(config, form, folder, tokenizer, seq_length, seed)
    parts = [opener.part(name, wanted) for name, wanted in zip(PARTS, num_samples, strict=True)]
    assert parts[0] is not None
    return Data(parts[0], parts[1], parts[2], tokenizer, tokenizer.vocab_size, opener.identity)


# sides of a source, its examples in a part of the run, its weight
_Opened = tuple[list[CompletionData], Integers, float]


class _Opener:
    def __init__(
        self, config: DataConfig, form: Format, folder: Path, tokenizer: Tokenizer, seq_length: int, seed: int
    ) -> None:
        self.config, self.form, self.folder, self.tokenizer = config, form, folder, tokenizer
        self.seq_length, self.seed = seq_length, seed
        self.identity = ""  # of the examples to train on, once they are open

    def part(self, name: str, wanted: int) -> SampleSource | None:
        """The samples of train, validation or test; None for a held-out part with no example or none wanted."""
        config, number = self.config, PARTS.index(name)
        if name != "train" and not wanted:
            return None
        has_own = bool(config.validation or config.test)
        sources = (config.train, config.validation, config.test)[number] if has_own else config.train
        opened: list[_Opened] = []
        loaded = [self._sides(source) for source in sources]
        if has_own or number == 0:
            warn_of_empty(config, name, [bool(len(sides[0])) for sides in loaded], "example")
        for source, sides in zip(sources, loaded, strict=True):
            # an own validation set is not split; otherwise each source gives its share of every part
            bounds = split_bounds(config.split, len(sides[0])) if not has_own else (0, len(sides[0]))
            examples = np.arange(*((0, len(sides[0])) if has_own else bounds[number : number + 2]), dtype=np.int64)
            if len(examples):
                opened.append((sides, examples, source.weight))
        if name == "train":
            self.identity = _identity(opened)
        if opened:
            return self._blend(name, opened, wanted)
        if name == "train":
            raise ValueError(f"data.train must hold examples to train on, got none; data.split is {config.split!r}")
        warn_of_none(config, name, "example")
        return None

    def _blend(self, name: str, opened: list[_Opened], wanted: int) -> SampleSource | None:
        """The samples of some sources together; of a held-out part without those of which no example can be used."""
        weights = [weight for _, _, weight in opened]
        if opened and not 0 < sum(weights) < math.inf:
            raise ValueError(f"data.{name}: weights must not all be 0 and have a finite sum, got {weights}")
        # a blend may take a little more of a source than its rounded share, hence half a percent in reserve
        counts = samples_wanted(weights, wanted) if len(opened) > 1 else [wanted]
        made = []
        for one, count in zip(opened, counts, strict=False):
            try:
                made.append(self._samples(one[0], one[1], count))
            except NoExample as error:
                if name == "train":
                    raise
                # an evaluation less is no reason to lose a run
                tracing.warn(f"data: {name} has none of these: {error}")
                return self._blend(name, [other for other in opened if other is not one], wanted)
        if not made:
            tracing.warn(f"data: no example is left for {name}; there will be none")
            return None
        if len(made) == 1:
            return made[0]
        shares = normalized(weights)
        about = f"completions {shares} {wanted}".encode()
        # a million choices take about a second in Python, so ranks and restarts read them from a file
        chosen, within = cached_arrays(self.folder, about, lambda: blend_indices(shares, wanted))
        return BlendedSamples(made, chosen, within)

    def _samples(self, sides: Sequence[CompletionData], examples: Integers, wanted: int) -> CompletionSamples:
        return CompletionSamples(
            sides, examples, seq_length=self.seq_length, num_samples=wanted, seed=self.seed,
            vocab_size=self.tokenizer.vocab_size, packed=self.config.packing != "unpacked",
            truncate=self.config.allow_chopped,
        )  # fmt: skip

    def _sides(self, source: DataSource) -> list[CompletionData]:
        # two sides for pairs (chosen, rejected), one for everything else
        return [CompletionData(files) for files in self._files(source)]

    def _files(self, source: DataSource) -> tuple[CompletionFiles, ...]:
        # tokens on disk carry no record, so what a record would say (rewards, rejected) must be named in the config
        prefix = prefix_of(source.path)
        refuse_unused(source)
        if prefix is None:
            return self._tokenized(source)
        first = CompletionFiles(prefix, source.labels)
        if self.form == "pairs":
            if source.rejected is None:
                raise ValueError(f"data {source.path}: rejected must be given for pairs of tokenized data, got none")
            return first, CompletionFiles(source.rejected, source.rejected_labels)
        if self.form != "messages" and source.rewards is None:
            raise ValueError(
                f"data {source.path}: rewards must be given for tokenized data of this objective, got none"
            )
        rewards = source.rewards if self.form != "messages" else None
        return (replace(first, rewards=rewards, log_probs=source.log_probs),)

    def _tokenized(self, source: DataSource) -> tuple[CompletionFiles, ...]:
        """A source's records, tokenized: from the cache, or into it."""
        library = datasets_library.reads(source.path)
        files = [] if library else find_files([source.path])
        records = (
            (lambda: datasets_library.rows(source, None))
            if library
            else (lambda: itertools.islice(raw_documents(files), source.documents))
        )
        if self.tokenizer.eod is None:
            warn_without_end(next(records(), None))
        identity = datasets_library.identity(source) if library else digest(files)
        if not library and source.documents is not None:
            identity += f" {source.documents}"
        # the number is the version of our encoding: a change of it must not find old files
        about = f"completions {3 if self.form == 'pairs' else 2} {identity} {self.tokenizer.identity} {self.form}"
        prefix = self.folder / "tokens" / hashlib.blake2b(about.encode(), digest_size=16).hexdigest()
        sides = tuple(replace(side, source=source.path) for side in files_of(prefix, self.form))
        folder_of(prefix)
        # all ranks of a host come here at once, and one of them does the work
        with one_at_a_time(Path(f"{prefix}.lock"), "tokenizing"):
            # the first side's tokens are published last
            if not all(is_whole(name) for side in sides for name in side.prefixes()):
                encoding = CompletionEncoding(self.tokenizer, self.form)
                count, _ = write_completions(records(), prefix, encoding, overwrite=True)
                tracing.progress(f"tokenized {count} examples of {source.path}")
        return sides


def _identity(opened: Sequence[_Opened]) -> str:
    """`identity_of` all data sets of the training examples."""
    return identity_of(
        (data, f"{examples[0]} {len(examples)} {weight}")
        for sides, examples, weight in opened
        for side in sides
        for data in side.all()
    )
