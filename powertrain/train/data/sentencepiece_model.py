"""SentencePiece models (tokenizer.model): vocabulary from the file alone, text through the `sentencepiece` package.

The file is a protobuf message, ModelProto of sentencepiece_model.proto: field 1, repeated, is a piece, with its text in
field 1 and its type in field 3 (2: unknown). Tokenized data need nothing else of it.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from powertrain.runtime.reading import MOST_JSON_BYTES

END_OF_TEXT = "<|endoftext|>"
_UNKNOWN = 2  # type of the piece that stands for what is in no piece
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


class SentencePieceTokenizer:
    """A tokenizer.model. `eod` is the id of <|endoftext|>, else that of the unknown piece, as in GPT-NeoX."""

    def __init__(self, path: Path) -> None:
        if (size := path.stat().st_size) > MOST_JSON_BYTES:
            raise ValueError(f"{path}: must have at most {MOST_JSON_BYTES} bytes, got {size}")
        self.path, data = path, path.read_bytes()
        pieces = list(_pieces(data, path))
        if not pieces:
            raise ValueError(f"{path}: must be a SentencePiece model with pieces, got none")
        self.vocab_size = len(pieces)
        # reversed, so that of two pieces with the same text the first id is kept
        ids = {text: i for i, (text, _) in reversed(list(enumerate(pieces)))}
        unknown = next((i for i, (_, kind) in enumerate(pieces) if kind == _UNKNOWN), 0)
        self.eod: int | None = ids.get(END_OF_TEXT.encode(), unknown)
        self.identity = hashlib.blake2b(data, digest_size=16).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        # a worker reads the file again: SentencePiece's own processor, if it was made, is not sent
        return SentencePieceTokenizer, (self.path,)

    @cached_property
    def _processor(self) -> Any:
        try:
            # only text needs the package: a run over tokenized .bin and .idx works without it
            import sentencepiece
        except ImportError:
            raise ValueError(
                f"{self.path}: text is encoded by the sentencepiece package, which is not installed (pip install"
                " sentencepiece); tokenized .bin and .idx data need only the vocabulary"
            ) from None
        return sentencepiece.SentencePieceProcessor(model_file=str(self.path))

    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(ids) for ids in self._processor.encode(texts)]

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        raise ValueError(f"{self.path}: must have a chat template for messages; SentencePiece models have none")

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(i) for i in ids]))


def _pieces(data: bytes, path: Path) -> Iterator[tuple[bytes, int]]:
    """(text, type) of every piece, in the order of their ids."""
    for number, value in _fields(data, path):
        if number == 1 and isinstance(value, bytes):
            # protobuf leaves out fields that hold their default: type 1 is a normal piece
            fields = dict(_fields(value, path))
            text, kind = fields.get(1, b""), fields.get(3, 1)
            yield text if isinstance(text, bytes) else b"", kind if isinstance(kind, int) else 1


def _fields(data: bytes, path: Path) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a protobuf message; raises ValueError where it is none."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at, path)
        # a field begins with its number and, in three bits, how its value is written
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(data, at, path)
            yield number, value
            continue
        length = {_FIXED64: 8, _FIXED32: 4}.get(wire)
        if wire == _BYTES:
            length, at = _varint(data, at, path)
        # wire types 3 and 4 (groups) are in no SentencePiece file, and field 0 is not allowed in protobuf
        if length is None or number == 0 or at + length > len(data):
            raise ValueError(f"{path}: must be a SentencePiece model, got a damaged message at byte {at}")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int, path: Path) -> tuple[int, int]:
    value = 0
    for shift in itertools.count(0, 7):
        # at most ten bytes of seven bits: more cannot be a 64-bit number
        if at >= len(data) or shift > 63:
            break
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError(f"{path}: must be a SentencePiece model, got a damaged number at byte {at}")
