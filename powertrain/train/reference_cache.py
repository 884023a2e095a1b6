"""train.reference_cache: the reference model's log-probabilities, computed before training and read with each batch.

A pass over the samples that the run will read, in their order and in its micro-batches, computes the tokens of each
example the first time it appears. The key of an example is a hash of its tokens and labels as they stand in a row, so
data, tokenizer and train.seq_length need no key of their own, and an example of a later epoch, of another row or of a
held-out part is found. In its first row the values have the bits that the live reference gives in the same micro-batch.

Files: FOLDER/KEY/HASH.bin, each whole or absent and with a CRC-32, KEY a hash of the reference's weights and of what
else decides its numbers. A file holds the examples of some micro-batches of one rank: a pass that was killed goes on
behind its last files.
    line     JSON: examples, tokens, crc of the rest
    digests  [E, 16] bytes;  counts [E] int64, tokens of each;  values [N] float32, those of E examples in a row
"""

import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from powertrain.runtime import tracing
from powertrain.runtime.atomic_file import write_whole
from powertrain.train.agreement import done_by_all, from_all
from powertrain.train.checksums import shown
from powertrain.train.config.schema import RunConfig
from powertrain.train.data.loader import Batch
from powertrain.train.data.packed import IGNORED

Floats = npt.NDArray[np.float32]
_DIGEST = 16
_AT_ONCE = 32  # micro-batches a file: what a killed pass computes again


class _Example(NamedTuple):
    """An example in a batch: its key, its row, and where its labels that count are in the row."""

    digest: bytes
    row: int
    places: npt.NDArray[np.int64]


class ReferenceCache:
    """Files of log-probabilities in `folder`; `group` are the ranks that fill and read them, None: this process."""

    def __init__(self, folder: Path, group: dist.ProcessGroup | None = None) -> None:
        self.folder, self.group = folder, group
        self._values: dict[bytes, Floats] = {}
        done_by_all(lambda: folder.mkdir(parents=True, exist_ok=True), group)
        self._open()

    def __len__(self) -> int:
        return len(self._values)

    def fill(self, batches: Iterable[Batch], compute: Callable[[Batch], Tensor]) -> int:
        """Compute the examples of this rank's `batches` that no file has; the number of examples added by all ranks.

        compute   (batch) -> log-probabilities [B, S] of its labels. It is called for the same batches, by number, on
                  every rank, since the forward of a sharded model is collective.
        Every rank must give as many batches. An example of several ranks is computed by the first one.
        """
        stream, known = iter(batches), set(self._values)
        before = len(known)
        while True:
            part: list[tuple[Batch, list[_Example]]] = []

            def read(part: list[tuple[Batch, list[_Example]]] = part) -> list[list[bytes]]:
                part += ((batch, examples(batch)) for batch in itertools.islice(stream, _AT_ONCE))
                return [[example.digest for example in found] for _, found in part]

            everywhere = from_all(read, self.group)
            if not part:
                break
            self._add(part, _first_holders(everywhere, known), compute)
        # every file must be there before any rank reads them
        done_by_all(lambda: None, self.group)
        if len(known) > before:
            self._open()
        return len(known) - before

    def _add(
        self, part: list[tuple[Batch, list[_Example]]], holders: list[dict[bytes, int]],
        compute: Callable[[Batch], Tensor],
    ) -> None:  # fmt: skip
        rank = 0 if self.group is None else dist.get_rank(self.group)
        own_values: dict[bytes, Floats] = {}
        for (batch, found), new in zip(part, holders, strict=True):
            if not new:
                continue
            values = compute(batch).float().cpu().numpy()
            own_values |= {e.digest: values[e.row, e.places] for e in found if new.get(e.digest) == rank}
        done_by_all(lambda: _write(self.folder, own_values) if own_values else None, self.group)

    def attach(self, batch: Batch) -> Batch:
        """The batch with `reference` [B, S], 0 where labels do not count. Raises ValueError naming the samples."""
        values = np.zeros(batch.labels.shape, np.float32)
        for example in examples(batch):
            known = self._values.get(example.digest)
            if known is None:
                raise ValueError(
                    f"train.reference_cache: {self.folder} must have every example of samples {list(batch.indices)}, "
                    f"got none for row {example.row}"
                )
            values[example.row, example.places] = known
        reference = torch.from_numpy(values)
        return batch._replace(reference=reference.pin_memory() if torch.cuda.is_available() else reference)

    def _open(self) -> None:
        """Read which examples the files hold; a damaged one is removed, so that its examples are computed again."""
        # the names of all ranks: a network's file system may show a new file late
        names = sorted(set(itertools.chain(*from_all(lambda: [f.name for f in self.folder.glob("*.bin")], self.group))))
        damaged = set(itertools.chain(*from_all(lambda: self._read(names), self.group)))
        for name in damaged:
            (self.folder / name).unlink(missing_ok=True)
        if damaged:
            tracing.warn(f"{self.folder}: {len(damaged)} damaged files; their examples are computed again")
            done_by_all(lambda: None, self.group)
            self._open()

    def _read(self, names: list[str]) -> list[str]:
        self._values, damaged = {}, []
        for name in names:
            try:
                self._values |= _read(self.folder / name)
            except (ValueError, KeyError, TypeError):
                damaged.append(name)
        return damaged


def _first_holders(everywhere: list[list[list[bytes]]], known: set[bytes]) -> list[dict[bytes, int]]:
    """For each micro-batch the examples that are new with it, and the first rank that has each; `known` grows."""
    holders: list[dict[bytes, int]] = []
    for of_ranks in zip(*everywhere, strict=True):
        new: dict[bytes, int] = {}
        for rank, digests in enumerate(of_ranks):
            new |= {digest: rank for digest in digests if digest not in known and digest not in new}
        known.update(new)
        holders.append(new)
    return holders


def examples(batch: Batch) -> list[_Example]:
    """The examples of a batch on the host that have a label which counts."""
    assert batch.document_ids is not None
    examples = []
    tokens, labels, documents = (x.numpy() for x in (batch.tokens, batch.labels, batch.document_ids))
    for row in range(len(tokens)):
        starts = np.flatnonzero(np.diff(documents[row], prepend=-1))
        for start, stop in zip(starts, [*starts[1:], tokens.shape[1]], strict=True):
            counted = np.flatnonzero(labels[row, start:stop] != IGNORED)
            if len(counted):
                content = tokens[row, start:stop].tobytes() + labels[row, start:stop].tobytes()
                examples.append(_Example(hashlib.blake2b(content, digest_size=_DIGEST).digest(), row, start + counted))
    return examples


def _write(folder: Path, values: dict[bytes, Floats]) -> None:
    digests, counts = b"".join(values), np.array([len(v) for v in values.values()], np.int64)
    content = digests + counts.tobytes() + np.concatenate(list(values.values())).astype(np.float32).tobytes()
    facts = {"examples": len(values), "tokens": int(counts.sum()), "crc": shown(zlib.crc32(content))}
    name = hashlib.blake2b(digests, digest_size=_DIGEST).hexdigest()
    write_whole(folder / f"{name}.bin", json.dumps(facts).encode() + b"\n" + content)


def _read(file: Path) -> dict[bytes, Floats]:
    """A file's examples. Raises ValueError, KeyError or TypeError for a damaged one."""
    # not a memory map, which would keep a descriptor of each of thousands of files
    line, _, content = file.read_bytes().partition(b"\n")
    facts = json.loads(line)
    number, tokens = facts["examples"], facts["tokens"]
    if len(content) != (_DIGEST + 8) * number + 4 * tokens or shown(zlib.crc32(content)) != facts["crc"]:
        raise ValueError(f"{file}: must have the bytes that were written, got others")
    counts = np.frombuffer(content, np.int64, number, _DIGEST * number)
    values = np.frombuffer(content, np.float32, tokens, (_DIGEST + 8) * number)
    keys = (content[at : at + _DIGEST] for at in range(0, _DIGEST * number, _DIGEST))
    return dict(zip(keys, np.split(values, np.cumsum(counts)[:-1]), strict=True))


def cache_key(model: nn.Module, config: RunConfig, group: dist.ProcessGroup | None) -> str:
    """A hash of all that decides the reference's numbers beside an example's content.

    The values of all frozen weights; the model's settings and precision; the number of rows in a micro-batch and their
    length, since the sizes of products decide the order of their sums. Collective where parameters are sharded.
    """
    sums = []
    for name, p in sorted(model.named_parameters()):
        if not p.requires_grad:
            # sharded parameters are gathered one at a time
            whole = (p.full_tensor() if isinstance(p, DTensor) else p).detach().contiguous().flatten()
            sums.append((name, shown(zlib.crc32(whole.view(torch.uint8).cpu().numpy().data))))
    everywhere = sorted({json.dumps(each) for each in from_all(lambda: sums, group)})
    train = config.train
    facts: dict[str, Any] = {
        "weights": everywhere, "model": config.model.model_dump(mode="json"), "precision": train.precision,
        "rows": train.micro_batch_size, "seq_length": train.seq_length, "torch": torch.__version__,
    }  # fmt: skip
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=_DIGEST).hexdigest()


def cached_reference(
    model: nn.Module, compute: Callable[[Batch], Tensor], parts: Iterable[Iterator[Batch]], config: RunConfig,
    device: torch.device, group: dist.ProcessGroup | None,
) -> ReferenceCache:  # fmt: skip
    """The cache of a run, in its folder, with every example of `parts`.

    model     the reference, or with LoRA the model whose frozen weights are the reference
    compute   (batch on the device) -> its log-probabilities [B, S]
    """
    cache = ReferenceCache(config.folder() / "reference" / cache_key(model, config, group), group)
    before = len(cache)
    added = sum(cache.fill(part, lambda batch: compute(batch.to(device))) for part in parts)
    if group is None or dist.get_rank(group) == 0:
        tracing.progress(f"reference: log-probabilities of {added} examples computed, of {before} found")
    return cache
