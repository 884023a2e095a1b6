"""SentencePiece models: vocabulary and end of text from the file, damaged files, text with and without the package."""

import pickle
from pathlib import Path
from random import Random

import pytest

from powertrain.train.config.reader import read_config
from powertrain.train.data.sentencepiece_model import SentencePieceTokenizer
from powertrain.train.data.tokenizer import load_tokenizer

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def model(pieces: list[tuple[str, int]]) -> bytes:
    """ModelProto: pieces (text, a score, a type where it is not NORMAL), then a trainer's message and a string."""
    out = b""
    for text, kind in pieces:
        piece = b"\x0a" + varint(len(text.encode())) + text.encode() + b"\x15\x00\x00\x80\xbf"
        piece += b"" if kind == NORMAL else b"\x18" + varint(kind)
        out += b"\x0a" + varint(len(piece)) + piece
    return out + b"\x12\x04\x18\xe8\x07\x20" + b"\x1a\x03abc"


LLAMA = [
    ("<unk>", UNKNOWN),
    ("<s>", CONTROL),
    ("</s>", CONTROL),
    *((f"<0x{i:02X}>", BYTE) for i in range(256)),
    ("▁the", NORMAL),
]


@pytest.mark.parametrize(
    "pieces, eod",
    [
        (LLAMA, 0),
        ([*LLAMA, ("<|endoftext|>", CONTROL)], 260),
        ([("a", NORMAL), ("<unk>", UNKNOWN)], 1),
        ([("a", NORMAL)], 0),
    ],
    ids=["llama", "with an end", "unknown last", "no unknown"],
)
def test_vocabulary_and_end(pieces: list[tuple[str, int]], eod: int, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(model(pieces))
    for tokenizer in (load_tokenizer(str(file)), load_tokenizer(f"spm:{file}"), SentencePieceTokenizer(file)):
        assert (tokenizer.vocab_size, tokenizer.eod) == (len(pieces), eod)
    assert pickle.loads(pickle.dumps(load_tokenizer(str(file)))).identity == tokenizer.identity


def test_damaged_models_are_one_error(tmp_path: Path) -> None:
    """Every cut, and random bytes changed: a clear error, or a model with fewer or other pieces."""
    whole, random, file = model(LLAMA), Random(3), tmp_path / "tokenizer.model"
    for n in range(400):
        data = bytearray(whole[: random.randrange(len(whole))] if n % 2 else whole)
        for _ in range(n % 2 == 0 and 1 + n % 5):
            data[random.randrange(len(data))] = random.randrange(256)
        file.write_bytes(data)
        try:
            assert SentencePieceTokenizer(file).vocab_size > 0
        except ValueError as error:
            assert str(error).startswith(f"{file}: must be a SentencePiece model")


def test_a_config_needs_no_package(tmp_path: Path) -> None:
    (tmp_path / "any.name").write_bytes(model(LLAMA))
    keys = (
        "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 32\nmax_position_embeddings: 32\n"
        "train_micro_batch_size_per_gpu: 4\ntrain_iters: 9\ndata_path: d\ntokenizer_type: SPMTokenizer\n"
    )
    (tmp_path / "neox.yml").write_text(keys + f"vocab_file: {tmp_path}/any.name\nmake_vocab_size_divisible_by: 64\n")
    config = read_config([tmp_path / "neox.yml"]).config
    assert config.model.vocab_size == 320  # type: ignore[union-attr]


def test_text_needs_the_package_or_has_its_ids(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(model(LLAMA))
    try:
        import sentencepiece  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match="sentencepiece package, which is not installed"):
            load_tokenizer(str(file)).encode("the")
