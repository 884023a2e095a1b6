"""From the config section `data:` to samples: text is tokenized once; data sets are split, ordered and blended.

Data   train, validation, test  the samples of each part, or None where the configuration has none
       tokenizer, vocab_size    of the run; pad the size with padded_vocab_size
"""

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from powertrain.runtime import tracing
from powertrain.runtime.reading import one_line
from powertrain.train.checksums import compare, crc_of, read_sums, write_sums
from powertrain.train.config.schema import DataConfig, DataSource, size_to_train
from powertrain.train.data import datasets_library
from powertrain.train.data.blend import (
    BlendedSamples,
    blend_indices,
    normalized,
    samples_wanted,
    weights_by_documents,
)
from powertrain.train.data.corpus import Raw, digest, find_files, raw_documents, text_of
from powertrain.train.data.encode import Counts, Encoding, encode
from powertrain.train.data.file_lock import one_at_a_time
from powertrain.train.data.indexed import (
    DocumentSlice,
    IndexedData,
    IndexedWriter,
    exists,
    folder_of,
    remove,
    sums_path,
    token_dtype,
    verify,
)
from powertrain.train.data.packed import IGNORED, PackedSamples, SampleSource
from powertrain.train.data.quickstart import quickstart_files
from powertrain.train.data.samples import SampleOrder, cached_arrays, cached_order, split_bounds
from powertrain.train.data.tokenizer import FileTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from powertrain.train.data.whole_documents import whole_document_order

QUICKSTART = "quickstart"
PARTS = ("train", "validation", "test")
_SECONDS = 5.0  # between two lines about tokenizing


@dataclass(frozen=True)
class Data:
    """The samples of a run's parts, each at least as many as were asked for, and the tokenizer they were made with.

    identity   of what is trained on: a checkpoint keeps it, so that a run that goes on with other data says so; "" if
               not known
    """

    train: SampleSource
    validation: SampleSource | None
    test: SampleSource | None
    tokenizer: Tokenizer
    vocab_size: int
    identity: str = ""


@dataclass(frozen=True)
class _Part:
    """Documents [start, stop) of a data set, and its weight in the blend."""

    data: IndexedData | DocumentSlice
    documents: range
    weight: float
    labels: IndexedData | None

    def has_tokens(self) -> bool:
        return bool(self.data.sizes[self.documents.start : self.documents.stop].any())


def open_data(
    config: DataConfig,
    *,
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int,
    tokenizer: Tokenizer | None = None,
    cache: Path | None = None,
) -> Data:
    """The data sets of `config`, tokenized, split, ordered and blended: call it on every rank, at any time.

    num_samples: how many samples of train, validation and test the run reads; 0 leaves a held-out part None. GPT-NeoX's
        order depends on them, since they say how many epochs are shuffled together.
    tokenizer: instead of the one that the configuration names.
    cache: the folder of tokenized text, trained tokenizers and orders; else config.cache_folder, else the user's cache.
    A held-out part for which the split leaves no document is None too, and said so but for the test part.
    Raises ValueError or FileNotFoundError naming the file or key.
    """
    folder = cache_folder(config, cache)
    tokenizer = tokenizer or open_tokenizer(config, folder)
    if config.eod_mask_loss and tokenizer.eod is None:
        raise ValueError("data.eod_mask_loss must be false for a tokenizer with no end-of-document token, got true")
    opener = _Opener(config, folder, tokenizer, seq_length, seed)
    parts = opener.parts()
    if not any(part.has_tokens() for part in parts[0]):
        names = ", ".join(source.path for source in config.train)
        raise ValueError(
            f"data.train must hold documents with tokens to train on, got none in {names} (split {config.split!r})"
        )
    samples = [opener.samples(name, part, wanted) for name, part, wanted in zip(PARTS, parts, num_samples, strict=True)]
    train, validation, test = samples
    assert train is not None
    trained = identity_of((part.data, f"{part.documents} {part.weight}") for part in parts[0])
    return Data(train, validation, test, tokenizer, tokenizer.vocab_size, trained)


def identity_of(parts: Iterable[tuple[IndexedData | DocumentSlice, str]]) -> str:
    """A hash of data sets, each with a text of its other properties: document lengths, and tokens by their checksums if
    there are any."""
    total = hashlib.blake2b(digest_size=16)
    for data, about in parts:
        sums = sums_path(data.prefix)
        crc = sorted(crc for _, crc in read_sums(sums).values()) if sums.is_file() else []
        total.update(f"{about} {crc} ".encode())
        total.update(np.ascontiguousarray(data.sizes).tobytes())
    return total.hexdigest()


def open_tokenizer(config: DataConfig, cache: Path | None = None) -> Tokenizer:
    """The tokenizer that `config` names; "train:SIZE" trains one on the text of config.train, once for each text."""
    size = size_to_train(config.tokenizer)
    if size is None:
        return load_tokenizer(config.tokenizer)
    folder = cache_folder(config, cache)
    corpora = [_text(source, config.text_key) for source in config.train]
    about = hashlib.blake2b(" ".join(each.identity for each in corpora).encode(), digest_size=16).hexdigest()
    path = folder / "tokenizers" / f"{about}-{_slug(config.text_key)}-{size}.json"
    sums = path.with_suffix(".sum")
    # every rank comes here; one trains, and the others find the file
    with one_at_a_time(Path(f"{path}.lock"), "training a tokenizer"):
        if not _is_whole_tokenizer(path, sums):
            tracing.progress(f"training a tokenizer of {size} ids{_amount(corpora)}")
            every = (text_of(raw, config.text_key) for each in corpora for raw in each.documents())
            train_tokenizer(every, size).save(path)
            write_sums(sums, {path.name: (path.stat().st_size, crc_of(path))})
    loaded = load_tokenizer(str(path))
    assert isinstance(loaded, FileTokenizer)
    return loaded


def _is_whole_tokenizer(path: Path, sums: Path) -> bool:
    # the checksum comes last
    if not path.is_file() or not sums.is_file():
        return False
    try:
        compare(path, *read_sums(sums).get(path.name, (-1, None)))
    except (OSError, ValueError) as error:
        tracing.warn(f"the tokenizer in the cache is trained again: {one_line(error)}")
        return False
    return True


def vocabulary_size(config: DataConfig) -> int:
    """Ids of the tokenizer that `config` names; for "train:SIZE" the SIZE, and nothing is trained."""
    return size_to_train(config.tokenizer) or load_tokenizer(config.tokenizer).vocab_size


@dataclass(frozen=True)
class _Text:
    """Text of one source: what decides it, for names of cached files; its documents; megabytes, 0: not known."""

    identity: str
    documents: Callable[[], Iterator[Raw]]
    megabytes: float


def _text(source: DataSource, key: str) -> _Text:
    """Raises ValueError where the source holds tokens, FileNotFoundError where it is not there."""
    if prefix_of(source.path) is not None:
        raise ValueError(f"data.tokenizer: train:SIZE needs text to train on, got tokens in {source.path}")
    if datasets_library.reads(source.path):
        return _Text(datasets_library.identity(source), lambda: datasets_library.rows(source, key), 0.0)
    files = quickstart_files().train if source.path == QUICKSTART else find_files([source.path])
    return _text_of_files(files, source.documents)


def _text_of_files(files: list[Path], first: int | None = None) -> _Text:
    """first   only so many documents; None: all"""
    identity = digest(files) if first is None else f"{digest(files)} {first}"
    return _Text(identity, lambda: itertools.islice(raw_documents(files), first), _megabytes(files))


def refuse_unused(source: DataSource) -> None:
    """Raise ValueError for an option that would have no effect."""
    words = datasets_library.unused(source, is_tokens=prefix_of(source.path) is not None)
    if words:
        raise ValueError(f"data {source.path}: {words}")


def warn_of_none(config: DataConfig, name: str, what: str) -> None:
    """Warn that a held-out split has no `what`, with the reason."""
    given: Sequence[DataSource] = getattr(config, name)
    if given:
        names = ", ".join(source.path for source in given)
        tracing.warn(f"data.{name}: no {what} with tokens in {names}; there will be no {name}")
    # the test part of a split is often empty: a thousandth by default
    elif name != "test":
        why = "data.test alone is given" if config.test else f"split {config.split!r}"
        tracing.warn(f"data: no {what} is left for {name} ({why}); there will be none")


def warn_of_empty(config: DataConfig, name: str, has_any: Sequence[bool], what: str) -> None:
    """Warn about sources without `what` in a split where other sources have some: the blend uses only the others."""
    for source, has in zip(getattr(config, name), has_any, strict=True):
        if source.weight and not has and any(has_any):
            tracing.warn(f"data.{name}: {source.path} has no {what}; its share goes to the other sources")


def _amount(corpora: Sequence[_Text]) -> str:
    known = sum(each.megabytes for each in corpora)
    return f" on {known:.0f} MB of text" if known else ""


@dataclass(frozen=True)
class _Opener:
    config: DataConfig
    folder: Path
    tokenizer: Tokenizer
    seq_length: int
    seed: int

    def parts(self) -> list[list[_Part]]:
        """The data sets of train, validation and test."""
        config = self.config
        given = [self._whole(getattr(config, name)) for name in PARTS]
        for name, wholes in zip(PARTS, given, strict=True):
            warn_of_empty(config, name, [whole.has_tokens() for whole in wholes], "document with tokens")
        if config.validation or config.test:
            return given
        parts: list[list[_Part]] = [[], [], []]
        train, validation, _ = parts
        for source, whole in zip(config.train, given[0], strict=True):
            if source.path == QUICKSTART:
                train.append(whole)
                validation.append(self._part(source, self._tokens(_text_of_files(quickstart_files().validation))))
                continue
            data = whole.data
            # else one part would get all of it and the run have no validation loss
            if len(data) == 1 and isinstance(data, IndexedData) and prefix_of(source.path) is None:
                self._split_document(data, whole.weight, parts)
                continue
            bounds = split_bounds(config.split, len(whole.data))
            for number, part in enumerate(parts):
                documents = range(bounds[number], bounds[number + 1])
                if documents:
                    part.append(_Part(whole.data, documents, whole.weight, whole.labels))
        return parts

    def _split_document(self, data: IndexedData, weight: float, parts: list[list[_Part]]) -> None:
        """The only document of a text, split by its tokens: its beginning to train on, its end held out."""
        bounds = split_bounds(self.config.split, int(data.sizes[0]))
        for number, part in enumerate(parts):
            start, stop = bounds[number], bounds[number + 1]
            if start < stop:
                part.append(_Part(DocumentSlice(data, 0, start, stop), range(1), weight, None))

    def _whole(self, sources: Sequence[DataSource]) -> list[_Part]:
        return [self._part(source, self._open(source)) for source in sources]

    def _part(self, source: DataSource, data: IndexedData) -> _Part:
        labels = None if source.labels is None else IndexedData(source.labels)
        return _Part(data, range(len(data)), source.weight, labels)

    def _open(self, source: DataSource) -> IndexedData:
        prefix = prefix_of(source.path)
        refuse_unused(source)
        if prefix is not None:
            return IndexedData(prefix)
        if source.labels is not None:
            raise ValueError(f"data labels {source.labels}: need tokens in .bin/.idx beside them, got {source.path}")
        return self._tokens(_text(source, self.config.text_key))

    def _tokens(self, text: _Text) -> IndexedData:
        """A source's text, tokenized: from the cache, or into it."""
        config, dtype = self.config, token_dtype(self.tokenizer.vocab_size)
        encoding = Encoding(self.tokenizer, dtype, config.text_key, config.append_eod)
        # all that decides the file's bytes: a change of any of it is another file
        about = f"{text.identity} {self.tokenizer.identity} {config.text_key} {config.append_eod} {dtype.__name__}"
        prefix = self.folder / "tokens" / hashlib.blake2b(about.encode(), digest_size=16).hexdigest()
        folder_of(prefix)
        if not is_whole(prefix):
            with one_at_a_time(Path(f"{prefix}.lock"), "tokenizing"):
                if not is_whole(prefix):
                    with IndexedWriter(prefix, dtype, overwrite=True) as writer:
                        encode(text.documents(), writer, encoding, progress=_progress_line(text.megabytes))
        return IndexedData(prefix)

    def samples(self, name: str, parts: Sequence[_Part], wanted: int) -> SampleSource | None:
        """At least `wanted` samples of one split (train, validation or test)."""
        if name != "train" and wanted == 0:
            return None
        parts = [part for part in parts if part.has_tokens()]
        if not parts:
            warn_of_none(self.config, name, "document")
            return None
        weights = [part.weight for part in parts]
        if self.config.weight_by_num_documents:
            weights = weights_by_documents([len(part.documents) for part in parts], self.config.weighted_sampler_alpha)
        # of a split a part may have documents of sources that are not to be trained on alone
        if name != "train" and not getattr(self.config, name) and not sum(weights):
            warn_of_none(self.config, name, "document")
            return None
        if not 0 < sum(weights) < math.inf:
            raise ValueError(f"data.{name}: weights must not all be 0 and have a finite sum, got {weights}")
        if len(parts) == 1 and not (self.config.validation or self.config.test):
            return self._packed(parts[0], wanted)
        sources = [self._packed(p, n) for p, n in zip(parts, samples_wanted(weights, wanted), strict=True)]
        shares = normalized(weights)
        about = f"blend {shares} {wanted}".encode()
        chosen, within = cached_arrays(self.folder, about, lambda: blend_indices(shares, wanted))
        return BlendedSamples(sources, chosen, within)

    def _packed(self, part: _Part, wanted: int) -> PackedSamples:
        order = self._order(part, wanted)
        return PackedSamples(
            part.data,
            order,
            self.seq_length,
            self.tokenizer.vocab_size,
            labels=part.labels,
            document_ids=self.config.document_mask,
            eod=self.tokenizer.eod if self.config.eod_mask_loss else None,
        )

    def _order(self, part: _Part, wanted: int) -> SampleOrder:
        sizes, config = part.data.sizes, self.config
        if config.packing == "packed":
            return cached_order(
                self.folder, sizes, part.documents, seq_length=self.seq_length, num_samples=wanted, seed=self.seed,
                order=config.order,
            )  # fmt: skip
        if config.packing == "unpacked" and part.labels is None:
            raise ValueError("data.packing must be packed or until_overflow without label data, got unpacked")
        packing, labels = config.packing, part.labels
        # GPT-NeoX looks at a token more of them where documents are packed
        looked_at = self.seq_length + (packing == "until_overflow")

        def build() -> SampleOrder:
            return whole_document_order(
                sizes, part.documents, packing=packing, seq_length=self.seq_length, num_samples=wanted,
                seed=self.seed, allow_chopped=config.allow_chopped,
                has_labels=lambda d: labels is None or bool((labels.get(d)[:looked_at] != IGNORED).any()),
            )  # fmt: skip

        span = f"{part.documents.start} {part.documents.stop}"
        about = f"{packing} {span} {self.seq_length} {wanted} {self.seed} {config.allow_chopped} "
        about += "" if labels is None else f"{labels.prefix} {labels.sizes.sum()} "
        return SampleOrder(*cached_arrays(self.folder, about.encode() + np.ascontiguousarray(sizes).tobytes(), build))


def is_whole(prefix: str | Path) -> bool:
    """Whether tokenized text is in the cache; a damaged entry is removed and made again."""
    if not exists(prefix):
        return False
    try:
        IndexedData(prefix)
        # an earlier version wrote none
        if sums_path(prefix).is_file():
            verify(prefix)
    except (OSError, ValueError) as error:
        tracing.warn(f"text in the cache is tokenized again: {one_line(error)}")
        remove(prefix)
        return False
    return True


def prefix_of(path: str) -> str | None:
    """The prefix of a .bin/.idx data set that `path` names, with or without an ending; None if it is text."""
    for prefix in (path, path.removesuffix(".bin"), path.removesuffix(".idx")):
        if exists(prefix):
            return prefix
    # half a data set, as well as an ending that says so, gets IndexedData's message about the missing file
    return path if path.endswith((".bin", ".idx")) or Path(f"{path}.bin").exists() else None


def _progress_line(megabytes: float) -> Callable[[Counts], None]:
    start = reported = time.monotonic()

    def progress(counts: Counts) -> None:
        nonlocal reported
        if time.monotonic() - reported > _SECONDS:
            reported = time.monotonic()
            done = counts.bytes / 1e6
            of = f" of {megabytes:.0f}" if megabytes else ""
            tracing.progress(f"tokenizing: {done:.0f}{of} MB, {done / (reported - start):.1f} MB/s")

    return progress


def _megabytes(files: Sequence[Path]) -> float:
    return sum(file.stat().st_size for file in files) / 1e6


def _slug(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def cache_folder(config: DataConfig, cache: Path | None) -> Path:
    """`cache`, else the folder that `config` names, else the user's, made if it is missing."""
    folder = cache or (Path(config.cache_folder) if config.cache_folder else user_cache())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{folder} ({error.strerror})"
        raise ValueError(f"data.cache_folder must name a folder that can be written, got {reason}") from None
    return folder


def user_cache() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("powertrain")) / "data"
