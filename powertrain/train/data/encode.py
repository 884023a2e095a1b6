"""Tokenization of documents to .bin/.idx files, in several processes.

The parent reads raw documents and hands them out by blocks of about a megabyte; workers decode and tokenize; the parent
writes their results, in reading order. With one worker there is no other process, and the tokenizer itself
uses all cores. At most a few blocks a worker are under way, so memory does not grow
with the corpus. A worker that dies (out of memory, a signal) is an error that says so, never a wait; workers end with
the parent, whatever ends that.
"""

import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from powertrain.train.data.corpus import BadDocument, Messages, Raw, document_of
from powertrain.train.data.indexed import IndexedWriter
from powertrain.train.data.tokenizer import Tokenizer
from powertrain.train.signals import children_without_signals

_BLOCK = 1 << 20  # bytes of raw text


@dataclass
class Counts:
    """Progress of an encoding. `bad`: messages of skipped documents."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    empty: int = 0
    bad: list[str] = field(default_factory=list)


class _Encoded(NamedTuple):
    values: bytes
    sizes: list[int]
    read: int
    empty: int
    bad: list[str]


@dataclass(frozen=True)
class Encoding:
    """Encoding of a document: its tokenizer, jsonl key, whether end-of-document is appended, and their dtype."""

    tokenizer: Tokenizer
    dtype: type[np.uint16] | type[np.int32]
    key: str = "text"
    append_eod: bool = True

    def __post_init__(self) -> None:
        if self.append_eod and self.tokenizer.eod is None:
            raise ValueError("append_eod must be False for a tokenizer that names no end-of-document token, got True")

    def __call__(self, block: list[Raw], *, skip_bad: bool, all_cores: bool) -> _Encoded:
        texts: list[str | Messages] = []
        bad: list[str] = []
        for raw in block:
            try:
                texts.append(document_of(raw, self.key))
            except BadDocument as error:
                if not skip_bad:
                    raise
                bad.append(str(error))
        # an empty document would be a lone end-of-document token
        full = [text for text in texts if text]
        parts = [self._values(ids) for ids in self._encoded(full, all_cores) if ids]
        values = np.concatenate(parts).tobytes() if parts else b""
        sizes = [len(part) for part in parts]
        return _Encoded(values, sizes, sum(len(raw.data) for raw in block), len(texts) - len(parts), bad)

    def _encoded(self, documents: list[str | Messages], all_cores: bool) -> Iterator[list[int]]:
        strings = [document for document in documents if isinstance(document, str)]
        # workers encode one text at a time: each is a core, and the library's threads would only compete
        ids = iter(self.tokenizer.encode_batch(strings) if all_cores else map(self.tokenizer.encode, strings))
        for document in documents:
            yield next(ids) if isinstance(document, str) else self.tokenizer.encode_chat(document)

    def _values(self, ids: list[int]) -> npt.NDArray[Any]:
        try:
            return np.array([*ids, self.tokenizer.eod] if self.append_eod else ids, self.dtype)
        except OverflowError:
            size = self.tokenizer.vocab_size
            raise ValueError(f"tokenizer: ids must be below its vocabulary's {size}, got {max(ids)}") from None


def encode(
    documents: Iterable[Raw],
    writer: IndexedWriter,
    encoding: Encoding,
    *,
    workers: int = 1,
    skip_bad: bool = False,
    progress: Callable[[Counts], None] = lambda counts: None,
) -> Counts:
    """Tokenize `documents` into `writer`; the result is the same for any number of workers.

    Empty documents are left out and counted. A bad one raises BadDocument, or is counted with `skip_bad`.
    progress: called after each block, with the counts so far. Raises RuntimeError if a worker dies.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    counts = Counts()
    blocks = _blocks(documents)
    # with one worker no process is started: the library's threads already use all cores
    results = (
        _in_this_process(blocks, encoding, skip_bad)
        if workers == 1
        else _in_processes(blocks, encoding, skip_bad, workers)
    )
    for result in results:
        writer.add_encoded(result.values, result.sizes)
        counts.documents += len(result.sizes)
        counts.tokens += sum(result.sizes)
        counts.bytes += result.read
        counts.empty += result.empty
        counts.bad += result.bad
        progress(counts)
    return counts


def _blocks(documents: Iterable[Raw]) -> Iterator[list[Raw]]:
    block, size = [], 0
    for raw in documents:
        block.append(raw)
        size += len(raw.data)
        if size >= _BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def _in_this_process(blocks: Iterator[list[Raw]], encoding: Encoding, skip_bad: bool) -> Iterator[_Encoded]:
    return (encoding(block, skip_bad=skip_bad, all_cores=True) for block in blocks)


_worker: Encoding


def _start(encoding: Encoding) -> None:
    global _worker
    # set once in each process: sending the tokenizer with every block would cost more than the block
    _worker = encoding
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's process waits for work on a pipe whose writing end it holds too, so no end of file tells it.

    Not PR_SET_PDEATHSIG: that one comes when the thread ends that started the process.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    # sys.exit would end this thread only
    os._exit(1)


def _work(block: list[Raw], skip_bad: bool) -> _Encoded:
    return _worker(block, skip_bad=skip_bad, all_cores=False)


def _in_processes(blocks: Iterator[list[Raw]], encoding: Encoding, skip_bad: bool, workers: int) -> Iterator[_Encoded]:
    # spawned, not forked: the caller may have threads (tokenizers' own among them) that a fork would cut off
    context = multiprocessing.get_context("spawn")
    # before signals are blocked: the tracker unblocks them when it starts
    multiprocessing.resource_tracker.ensure_running()
    # an executor and not multiprocessing.Pool, which waits for ever when a worker is killed
    pool = ProcessPoolExecutor(workers, context, _start, (encoding,))
    waiting: deque[Future[_Encoded]] = deque()
    try:
        for block in blocks:
            with children_without_signals():
                waiting.append(pool.submit(_work, block, skip_bad))
            # bounded, so that memory does not grow with the corpus
            if len(waiting) >= 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise RuntimeError(
            f"one of {workers} tokenizing processes died (killed, or out of memory); nothing was written. "
            "Try fewer workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
