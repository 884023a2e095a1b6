"""Parquet, folders of the `datasets` library, chat messages: local files only, the same tokens as jsonl gives."""

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from powertrain.runtime import extras
from powertrain.train.config.schema import DataConfig, DataSource
from powertrain.train.data import datasets_library, tokenizer
from powertrain.train.data.packed import SampleSource
from powertrain.train.data.sources import open_data, open_tokenizer
from powertrain.train.data.tokenizer import ByteTokenizer, load_tokenizer, train_tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
TEXTS = [f"document {n} of the data, {n * n} words, ü" for n in range(30)]
CHATS = [
    [{"role": "user", "content": f"what is {n}?"}, {"role": "assistant", "content": f"{n} is {n}"}] for n in range(20)
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # imported here: it takes a second, and each test process collects this file
    datasets = pytest.importorskip("datasets")
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def _tokens(source: dict[str, Any], cache: Path, key: str = "text", name: str = "bytes") -> list[int]:
    config = DataConfig(
        train=(DataSource(**source),), split="1", tokenizer=name, text_key=key, order="sequential", num_workers=0
    )
    data = open_data(config, seq_length=8, num_samples=(1, 0, 0), seed=0, cache=cache)
    return _all(data.train)


def _all(samples: SampleSource) -> list[int]:
    part = samples.data  # type: ignore[attr-defined]
    return [int(value) for n in range(len(part)) for value in part.get(n, 0, int(part.sizes[n]))]


def _write(folder: Path, rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same rows in each form: name -> source."""
    import datasets

    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    data = datasets.Dataset.from_list(rows)
    data.to_parquet(folder / "rows.parquet")
    data.save_to_disk(folder / "saved")
    datasets.DatasetDict(train=data.select(range(3)), other=data).save_to_disk(folder / "splits")
    (folder / "parts").mkdir()
    data.select(range(7)).to_parquet(folder / "parts" / "train-00000-of-00002.parquet")
    data.select(range(7, len(rows))).to_parquet(folder / "parts" / "train-00001-of-00002.parquet")
    return {
        "jsonl": {"path": str(folder / "rows.jsonl")},
        "parquet": {"path": str(folder / "rows.parquet")},
        "saved": {"path": str(folder / "saved")},
        "split": {"path": str(folder / "splits"), "split": "other"},
        "folder of parquet": {"path": str(folder / "parts")},
        "streaming": {"path": str(folder / "parts"), "streaming": True},
    }


def test_every_form_gives_the_same_tokens(tmp_path: Path) -> None:
    random.seed(0)
    rows = [{"id": n, "text": "".join(random.choice("abc \nü\"\\") for _ in range(random.randrange(40)))}
            for n in range(50)]  # fmt: skip
    expected: list[int] = []
    for row in rows:
        expected += [*row["text"].encode(), 0] if row["text"] else []  # type: ignore[attr-defined]
    for name, source in _write(tmp_path, rows).items():
        assert _tokens(source, tmp_path / "cache" / name) == expected, name


def test_so_many_documents(tmp_path: Path) -> None:
    sources = _write(tmp_path, [{"text": text} for text in TEXTS])
    for count in (1, 7, 30, 31):
        for name in ("parquet", "saved", "split", "folder of parquet"):
            got = _tokens({**sources[name], "documents": count}, tmp_path / "cache")
            assert bytes(got).decode().split("\0")[:-1] == TEXTS[:count]


def test_texts_beside_parquet_files_are_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`datasets` reads the files of one kind, the most frequent one."""
    source = _write(tmp_path, [{"text": text} for text in TEXTS])["folder of parquet"]
    (tmp_path / "parts/more.jsonl").write_text('{"text": "lost"}')
    assert b"lost" not in bytes(_tokens(source, tmp_path / "cache"))
    words = "its parquet files alone are read; 1 other file is left out, the first: more.jsonl"
    assert words in capfd.readouterr().err


def test_the_ending_of_parquet_may_be_in_capitals(tmp_path: Path) -> None:
    source = _write(tmp_path, [{"text": text} for text in TEXTS])["parquet"]
    expected = _tokens(source, tmp_path / "cache")
    Path(source["path"]).rename(tmp_path / "ROWS.PARQUET")
    assert _tokens({"path": str(tmp_path / "ROWS.PARQUET")}, tmp_path / "other") == expected


def test_a_tokenizer_is_trained_on_rows(tmp_path: Path) -> None:
    sources = _write(tmp_path, [{"text": text} for text in TEXTS])
    made = []
    for name in ("jsonl", "parquet"):
        config = DataConfig(train=(DataSource(**sources[name]),), tokenizer="train:300")
        made.append(open_tokenizer(config, tmp_path / name).encode(TEXTS[3]))
    assert made[0] == made[1]


def _chat_folder(folder: Path) -> Path:
    folder.mkdir()
    train_tokenizer(TEXTS, 400).save(folder / "tokenizer.json")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_messages_take_the_chat_template(tmp_path: Path) -> None:
    """As transformers renders and tokenizes them; special tokens are one id each, none twice."""
    folder = _chat_folder(tmp_path / "tokenizer")
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    expected: list[int] = []
    for chat in CHATS:
        expected += [*reference.apply_chat_template(chat, return_dict=False), 0]
    for name, source in _write(tmp_path, [{"messages": chat} for chat in CHATS]).items():
        got = _tokens(source, tmp_path / "cache" / name, "messages", str(folder))
        assert got == expected and got.count(0) == 4 * len(CHATS), name
    for name in (str(folder), f"hf:{folder}"):
        loaded = load_tokenizer(name)
        again = pickle.loads(pickle.dumps(loaded))
        assert again.encode_chat(CHATS[0]) == loaded.encode_chat(CHATS[0]) and again.identity == loaded.identity


def test_another_template_is_another_cache(tmp_path: Path) -> None:
    folder = _chat_folder(tmp_path / "tokenizer")
    before = load_tokenizer(str(folder)).identity
    (folder / "chat_template.jinja").write_text(TEMPLATE + " ")
    assert load_tokenizer(str(folder)).identity != before
    tokenizer._transformers.cache_clear()


@pytest.mark.parametrize(
    "source, key, said",
    [
        ({"path": "none.parquet"}, "text", "none.parquet: no such file or folder"),
        ({"path": "bad.parquet"}, "text", "data bad.parquet: cannot be read"),
        ({"path": "splits", "split": "test"}, "text", "split must be one of train, other, got 'test'"),
        ({"path": "rows.parquet"}, "body", "rows.parquet:1: must have a key 'body', got keys 'text'"),
        ({"path": "hf:nobody/nothing"}, "text", "data hf:nobody/nothing: cannot be read"),
    ],
)
def test_errors_name_the_source(
    source: dict[str, Any], key: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, [{"text": text} for text in TEXTS])
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=said.replace("(", r"\(")) as caught:
        _tokens(source, tmp_path / "cache", key)
    assert "\n" not in str(caught.value)


def test_messages_without_a_template(tmp_path: Path) -> None:
    sources = _write(tmp_path, [{"messages": chat} for chat in CHATS])
    with pytest.raises(ValueError, match=r"data\.tokenizer must have a chat template for messages, got bytes"):
        _tokens(sources["jsonl"], tmp_path / "cache", "messages")
    with pytest.raises(ValueError, match="chat template"):
        ByteTokenizer().encode_chat(CHATS[0])


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(extras.MissingExtra, match=r"data a.parquet needs datasets.*'powertrain\[data\]'"):
        next(datasets_library.rows(DataSource(path="a.parquet"), "text"))
