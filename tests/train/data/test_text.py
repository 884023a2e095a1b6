"""Text to ids: corpora, tokenizers, encoding in parallel."""

import gzip
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import zstandard

from powertrain.train.data.corpus import BadDocument, Raw, digest, find_files, raw_documents, texts
from powertrain.train.data.encode import Encoding, encode
from powertrain.train.data.indexed import IndexedData, IndexedWriter
from powertrain.train.data.quickstart import quickstart_files
from powertrain.train.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    FileTokenizer,
    kept_files,
    load_tokenizer,
    padded_vocab_size,
    save_tokenizer,
    tokenizer_in,
    train_tokenizer,
)

TEXTS = ["one fish\n", "two fish, r\u00e9d fish \U0001f41f", "blue fish " * 30]
LINES = "".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(TEXTS)).encode()


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.zst", ".jsonl.gz", ".JSONL", ".Jsonl.GZ", ".jsonl.ZST"])
def test_jsonl(tmp_path: Path, ending: str) -> None:
    two_frames = zstandard.compress(LINES[:50]) + zstandard.compress(LINES[50:])
    data = {".jsonl": LINES, ".jsonl.zst": two_frames, ".jsonl.gz": gzip.compress(LINES)}[ending.lower()]
    path = tmp_path / f"a{ending}"
    path.write_bytes(data)
    assert list(texts([path])) == TEXTS
    path.write_bytes(data[: len(data) // 2] if ending.lower() != ".jsonl" else data[:20])
    with pytest.raises(BadDocument, match=rf"{path}:\d+: must be "):
        list(texts([path]))


def test_forms_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": ["a", "b"]}\n\n"just text"\n{"body": ""}\n')
    assert list(texts([path], "body")) == ["a\n\nb", "just text", ""]
    path.write_text('\ufeff{"body": "\ufeffkept"}\r\n', encoding="utf-8")
    assert list(texts([path], "body")) == ["\ufeffkept"]


@pytest.mark.parametrize(
    "line, words",
    [
        (b"{", "must be a line of JSON, got '{'"),
        (b'{"a": 1}', "must have a key 'text', got keys 'a'"),
        (b'{"text": 3}', "must hold a string under 'text', got 3"),
        (b'{"text": null}', "must hold a string under 'text', got None"),
        (b'{"text": "\xff"}', "must be UTF-8 text, got byte 0xff at 10"),
        (b"[" * 100_000, "must be a line of JSON, got "),
    ],
)
def test_bad_lines_are_named_or_skipped(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}')
    with pytest.raises(BadDocument, match=f"{path}:3: {words}"):
        list(texts([path]))
    assert list(texts([path], skip_bad=True)) == ["good", "good"]


def test_folders(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", ".hidden/x.txt", "a/.y"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(texts(find_files([tmp_path]))) == ["a/z.md", "b.txt"]
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        find_files([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: must hold a file that is not hidden"):
        find_files([tmp_path / "empty"])
    # `preprocess data/corpus.bin` would make tokens of tokens
    (tmp_path / "corpus.bin").write_bytes(b"\x05\x00")
    with pytest.raises(ValueError, match=r"corpus\.bin: must be text, .*, got \.bin, which holds tokens already"):
        find_files([tmp_path / "corpus.bin"])
    (tmp_path / "b.txt").write_bytes(b"ab\xfe")
    with pytest.raises(BadDocument, match=r"b\.txt: must be UTF-8 text, got byte 0xfe at 2"):
        list(texts([tmp_path / "b.txt"]))


_RECORDS = b'{"text": "a"}\n{"text": "b"}\n'


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.txt", _RECORDS), ("shard-0", b"\xef\xbb\xbf" + _RECORDS), ("a.jl", b"# of 2026\n\n" + _RECORDS),
        ("folder/part-0.json", _RECORDS),
    ],
)  # fmt: skip
def test_lines_of_json_under_another_name_are_said(
    name: str, content: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are one document with its braces, without a word until now."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    files = find_files([file if file.parent == tmp_path else file.parent])
    assert len(list(texts(files))) == 1
    assert f"{file}: its lines are JSON objects, and it is read as one text" in capfd.readouterr().err


@pytest.mark.parametrize(
    "row, columns",
    [('{0},"a, b",c', 3), ("{0}\ta\tb\t", 4), ("{0};a;", 3), ("{0},a", 0), ("It was late, {0}.", 0), ("{0}", 0)],
)
def test_a_table_under_a_text_s_name_is_said(
    row: str, columns: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its rows are one document with their commas; a verse with one in each line is none."""
    file = tmp_path / "t.txt"
    file.write_text("\n".join(row.format(n) for n in range(20)))
    assert len(list(texts([file]))) == 1
    said = capfd.readouterr().err
    assert f"its lines have {columns} columns each, as CSV's" in said if columns else not said


def test_other_texts_are_not_said_to_be_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    contents = {
        "a.txt": b'{"text": "a"}\n', "b.txt": b"{\n{}\n}\n{}\n", "c.json": b'{\n"a": {}\n}\n',
        "d.txt": b"a\nb\nc\nd\n" + _RECORDS, "e.jsonl": _RECORDS,
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert len(list(texts(find_files([tmp_path])))) == 6
    assert "JSON" not in capfd.readouterr().err


@pytest.mark.parametrize("start, kind", [(b"PAR1\x15\xd4", "parquet"), (b"\x1f\x8b", "gzip"), (b"\xff\xfea", "UTF-16")])
def test_a_file_of_another_kind_is_called_by_it(start: bytes, kind: str, tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_bytes(start)
        with pytest.raises(BadDocument, match=f"must be UTF-8 text, got byte 0x.*: it is {kind}$"):
            list(texts([tmp_path / name]))


def test_the_root_of_all_folders_is_refused_and_a_huge_one_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`data.train: $DATA/` without DATA walked the whole machine without a word."""
    (tmp_path / "link").symlink_to("/")
    for root in ("/", tmp_path / "link", "/usr/.."):
        with pytest.raises(
            ValueError, match="must be a file, a pipe or a folder of texts, got the root of all folders"
        ):
            find_files([root])
    (tmp_path / "link").unlink()
    monkeypatch.setattr("powertrain.train.data.corpus._MANY", 3)
    for number in range(4):
        assert not capfd.readouterr().err
        (tmp_path / f"{number}.txt").write_text("a")
        assert len(find_files([tmp_path])) == number + 1
    assert f"{tmp_path} holds more than 3 files and folders" in capfd.readouterr().err


def test_digest_is_of_contents_and_order(tmp_path: Path) -> None:
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    for path, text in ((a, "1"), (b, "2"), (c, "1")):
        path.write_text(text)
    assert digest([a, b]) == digest([c, b]) != digest([b, a])


def test_bytes() -> None:
    plain, wide = load_tokenizer("bytes"), load_tokenizer("CharLevelTokenizer")
    assert (plain.vocab_size, wide.vocab_size, plain.eod) == (256, 512, 0)
    for text in TEXTS:
        assert plain.encode(text) == wide.encode(text) == list(text.encode())
        assert plain.decode(plain.encode(text)) == text
    assert plain.encode_batch(TEXTS) == [plain.encode(text) for text in TEXTS]
    assert wide.decode([72, 400, 0xFF]) == "H\ufffd\ufffd"


def test_trained(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS * 5, 300)
    assert 257 < tokenizer.vocab_size <= 300 and tokenizer.eod == 0
    assert tokenizer.identity == train_tokenizer(TEXTS * 5, 300).identity
    for text in [*TEXTS, "never seen: \u4e2d\u6587 \x00"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert len(tokenizer.encode(TEXTS[2])) < len(TEXTS[2]) / 3
    kept = load_tokenizer(save_tokenizer(tokenizer, tmp_path / "kept"))
    assert kept.identity == tokenizer.identity and kept.eod == 0
    assert load_tokenizer(str(tmp_path / "kept")).encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])
    for tokens in (ByteTokenizer(), ByteTokenizer(512)):
        assert load_tokenizer(save_tokenizer(tokens, tmp_path)).vocab_size == tokens.vocab_size
    with pytest.raises(ValueError, match="vocab_size must be at least 257"):
        train_tokenizer(TEXTS, 256)


def test_what_a_checkpoint_keeps(tmp_path: Path) -> None:
    """Files of which another folder makes the same tokenizer; where it would end documents elsewhere, none."""
    trained = train_tokenizer(TEXTS * 5, 300)
    trained.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    named = load_tokenizer(str(tmp_path))
    files = kept_files(named)
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    other = tmp_path / "other"
    other.mkdir()
    for name, content in files.items():
        (other / name).write_bytes(content)
    kept = load_tokenizer(str(tokenizer_in(other)))
    assert kept.encode_batch(TEXTS) == named.encode_batch(TEXTS) and kept.identity == named.identity
    assert set(kept_files(trained)) == {"tokenizer.json"} and kept_files(ByteTokenizer()) == {}
    assert kept_files(FileTokenizer(trained.backend.to_str(), "here", eod="a")) == {}


def test_gpt2_files(tmp_path: Path) -> None:
    """vocab.json and merges.txt give the ids of the tokenizer they come from; special tokens are no text there."""
    trained = train_tokenizer(TEXTS * 5, 300)
    trained.backend.model.save(str(tmp_path))
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    by_files = load_tokenizer(f"gpt2:{tmp_path}/vocab.json:{tmp_path}/merges.txt")
    by_folder = load_tokenizer(str(tmp_path))
    for loaded in (by_files, by_folder):
        assert loaded.vocab_size == len(vocab) and loaded.eod == vocab[END_OF_TEXT]
        for text in TEXTS:
            assert loaded.encode(text) == trained.encode(text) and loaded.decode(loaded.encode(text)) == text
        assert loaded.eod not in loaded.encode(f"a{END_OF_TEXT}")
    assert trained.encode(END_OF_TEXT) == [0]


def test_a_file_s_own_first_token_is_kept() -> None:
    """As GPT-NeoX's HFTokenizer: the file's post-processor applies."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "fish": 1, "</s>": 2}, unk_token="</s>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = FileTokenizer(backend.to_str(), "here")
    assert tokenizer.encode("fish fish") == [0, 1, 1] and tokenizer.eod == 2


@pytest.mark.parametrize(
    "name, words",
    [
        ("gpt2:a.json", "must be gpt2:VOCAB.json:MERGES.txt, got 'gpt2:a.json'"),
        ("gpt2:none.json:none.txt", "no such file none.json"),
        ("gpt2:bad.json:bad.json", "must be GPT-2's vocabulary and merges"),
        ("none.json", "no such file none.json; it must be tokenizer.json, a folder"),
        ("bad.json", "bad.json: must be a tokenizer.json of Hugging Face"),
        ("latin.json", "latin.json: must be UTF-8 text"),
    ],
)
def test_bad_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text('{"a": 1')
    Path("latin.json").write_bytes(b"\xe9")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        load_tokenizer(name)


def test_padding_of_the_vocabulary() -> None:
    assert padded_vocab_size(50257, 128) == 50304
    assert padded_vocab_size(50304, 128) == 50304
    assert padded_vocab_size(50257, 128, 4) == 50688


def corpus(tmp_path: Path, count: int = 3000) -> Path:
    path = tmp_path / "many.jsonl"
    lines = ({"text": "" if n % 100 == 7 else f"{n} " + "fish " * (n % 200)} for n in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def encoded(path: Path, prefix: Path, workers: int = 1, **kwargs: bool) -> tuple[bytes, bytes]:
    encoding = Encoding(ByteTokenizer(), np.uint16, append_eod=True)
    said: list[int] = []
    with IndexedWriter(prefix, np.uint16) as writer:
        counts = encode(
            raw_documents([path]), writer, encoding, workers=workers, progress=lambda c: said.append(c.bytes), **kwargs
        )
    assert said == sorted(said) and said[-1] == counts.bytes
    assert (len(IndexedData(prefix)), IndexedData(prefix).sizes.sum()) == (counts.documents, counts.tokens)
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_any_number_of_workers_writes_the_same(tmp_path: Path) -> None:
    path = corpus(tmp_path)
    one = encoded(path, tmp_path / "one")
    assert one == encoded(path, tmp_path / "two", workers=2)
    data, wanted = IndexedData(tmp_path / "one"), [text for text in texts([path]) if text]
    assert [document.tolist() for document in data] == [[*text.encode(), 0] for text in wanted]


def test_bad_documents_stop_or_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\nno\n{"text": ""}\n')
    encoding = Encoding(ByteTokenizer(), np.uint16, append_eod=False)
    with pytest.raises(BadDocument, match=r"a\.jsonl:2: "), IndexedWriter(tmp_path / "d", np.uint16) as writer:
        encode(raw_documents([path]), writer, encoding)
    assert not (tmp_path / "d.bin").exists()
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        counts = encode(raw_documents([path]), writer, encoding, skip_bad=True)
    assert (counts.documents, counts.tokens, counts.empty, len(counts.bad)) == (1, 1, 1, 1)


class Deadly(ByteTokenizer):
    """Dies in a worker as the out-of-memory killer would have it."""

    def encode(self, text: str) -> list[int]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []


def test_a_worker_that_dies_is_reported(tmp_path: Path) -> None:
    def documents() -> Iterator[Raw]:
        yield Raw("a", b"x", False)

    encoding = Encoding(Deadly(), np.uint16)
    with (
        pytest.raises(RuntimeError, match="one of 2 tokenizing processes died"),
        IndexedWriter(tmp_path / "d", np.uint16) as writer,
    ):
        encode(documents(), writer, encoding, workers=2)
    assert not list(tmp_path.iterdir())


def test_end_of_document_needs_a_token() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ValueError, match="append_eod must be False for a tokenizer that names no"):
        Encoding(FileTokenizer(backend.to_str(), "here"), np.uint16, append_eod=True)


def test_quickstart_is_the_standard_library(tmp_path: Path) -> None:
    train, validation = quickstart_files()
    assert train == sorted(train) and not set(train) & set(validation)
    assert 0.02 < len(validation) / (len(train) + len(validation)) < 0.08
    assert sum(path.stat().st_size for path in train) > 5e6
    assert all(path.suffix == ".py" and "test" not in path.parts for path in train)
    # where a file goes depends on its name in the library alone
    for path in (*train[:40], *validation[:5]):
        copy = tmp_path / path.relative_to(os.path.commonpath(train + validation))
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    (tmp_path / "latin.py").write_bytes(b"# \xe9")
    copied = quickstart_files(tmp_path)
    assert [path.name for path in copied.train] == [path.name for path in train[:40]]
    assert [path.name for path in copied.validation] == [path.name for path in validation[:5]]
    (tmp_path / "none").mkdir()
    with pytest.raises(FileNotFoundError, match=r"must hold the standard library's \.py files, got 0"):
        quickstart_files(tmp_path / "none")


@pytest.mark.parametrize("as_object", [False, True])
def test_an_unusual_end_token_is_read_beside_the_tokenizer(as_object: bool, tmp_path: Path) -> None:
    """DeepSeek's, for one: without it documents run into each other and no model learns to stop."""
    vocab = {"a": 0, "<stop>": 1, "</s>": 2}
    for names, expected in ((("a", "<stop>"), 1), (("a", "<stop>", "</s>"), 2)):
        model = tokenizers.models.WordLevel({name: vocab[name] for name in names}, unk_token="a")
        tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
        alone = load_tokenizer(str(tmp_path))
        end = {"content": "<stop>"} if as_object else "<stop>"
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        for path in (tmp_path, tmp_path / "tokenizer.json"):
            found = load_tokenizer(str(path))
            # of the usual names the first is taken, as GPT-NeoX does, and the name of a cached file stays
            assert found.eod == expected and (found.identity == alone.identity) == (expected == 2)
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text().replace("</s>", "end"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: must be a tokenizer_config\.json of transformers"):
        load_tokenizer(str(tmp_path))
