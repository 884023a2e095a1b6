"""Prompts with completions: records, labels, packing without leaks, order, files, mistakes."""

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.models import build, configure
from powertrain.runtime import tracing
from powertrain.train.config.schema import DataConfig
from powertrain.train.data.completion_samples import CompletionSamples, NoExample
from powertrain.train.data.completion_sources import open_completions
from powertrain.train.data.completions import (
    Completion,
    CompletionData,
    CompletionEncoding,
    Format,
    files_of,
    write_completions,
)
from powertrain.train.data.corpus import BadDocument, Raw
from powertrain.train.data.indexed import IndexedWriter
from powertrain.train.data.loader import _stacked
from powertrain.train.data.packed import IGNORED
from powertrain.train.data.tokenizer import (
    ByteTokenizer,
    ChatRefused,
    FileTokenizer,
    load_tokenizer,
    train_tokenizer,
)

TOKENIZER = ByteTokenizer()


class _Chat(ByteTokenizer):
    """<role>content; with a generation prompt <assistant>."""

    def encode_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> list[int]:
        if not messages:
            raise ChatRefused("the chat template refuses these messages: no message")
        text = "".join(f"<{m['role']}>{m['content']};" for m in messages)
        return self.encode(text + "<assistant>" * add_generation_prompt)


def _raw(record: Any) -> Raw:
    return Raw("file.jsonl:1", json.dumps(record).encode(), True)


def _text(ids: Sequence[int]) -> str:
    return bytes(i for i in ids if i > 0).decode()


def test_prompt_and_completion() -> None:
    (found,) = CompletionEncoding(TOKENIZER, "messages")(_raw({"prompt": "ab", "completion": "cd"}))
    assert found.ids == [*b"abcd", 0] and found.labels == [-100, -100, *b"cd", 0]
    chosen, rejected = CompletionEncoding(TOKENIZER, "pairs")(_raw({"prompt": "q", "chosen": "y", "rejected": "no"}))
    assert (chosen.ids, rejected.ids) == ([*b"qy", 0], [*b"qno", 0])
    (label,) = CompletionEncoding(TOKENIZER, "labels")(_raw({"prompt": "", "completion": "y", "label": False}))
    assert label.value == -1.0 and label.labels == [*b"y", 0]
    record = {"prompt": "p", "completion": "y", "advantage": -2, "log_probs": [-0.5, -0.25]}
    (policy,) = CompletionEncoding(TOKENIZER, "advantages")(_raw(record))
    assert policy.value == -2.0 and policy.log_probs == [0.0, -0.5, -0.25]


def test_only_the_assistants_turns_count() -> None:
    turns = [("system", "s"), ("user", "u"), ("assistant", "one"), ("user", "v"), ("assistant", "two")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (found,) = CompletionEncoding(_Chat(), "messages")(_raw({"messages": messages}))
    assert _text(found.ids) == "<system>s;<user>u;<assistant>one;<user>v;<assistant>two;"
    assert _text([label for label in found.labels if label >= 0]) == "one;two;"
    record = {"prompt": messages[:2], "chosen": messages[2:3], "rejected": [{"role": "assistant", "content": "bad"}]}
    chosen, rejected = CompletionEncoding(_Chat(), "pairs")(_raw(record))
    assert _text([label for label in chosen.labels if label >= 0]) == "one;"
    assert _text(rejected.ids) == "<system>s;<user>u;<assistant>bad;"


def test_conversations_of_sharegpt_are_messages() -> None:
    chat = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
    ]
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names.get(m["role"], m["role"]), "value": m["content"]} for m in chat]
    encode = CompletionEncoding(_Chat(), "messages")
    assert encode(_raw({"conversations": turns, "id": 3})) == encode(_raw({"messages": chat}))
    assert encode(_raw({"conversations": chat})) == encode(_raw({"messages": chat}))
    for wrong in ("hi", [3], [{"from": "human"}], [{"value": "hi"}]):
        with pytest.raises(BadDocument, match=r"file\.jsonl:1: conversations must be a list of \{from, value\}"):
            encode(_raw({"conversations": wrong}))


def test_pairs_without_a_prompt_begin_with_it() -> None:
    """TRL's implicit prompt: what both sides begin with is not learnt, a user's turn or an earlier answer."""
    turns = [("system", "s"), ("user", "u"), ("assistant", "one"), ("user", "v"), ("assistant", "two")]
    messages = [{"role": role, "content": content} for role, content in turns]
    bad = {"role": "assistant", "content": "bad"}
    encoding = CompletionEncoding(_Chat(), "pairs")

    def learnt(record: dict[str, Any]) -> list[str]:
        return [_text([label for label in side.labels if label >= 0]) for side in encoding(_raw(record))]

    record = {"chosen": messages, "rejected": [*messages[:4], bad]}
    assert _text(encoding(_raw(record))[0].ids).endswith("<assistant>one;<user>v;<assistant>two;")
    assert learnt(record) == ["two;", "bad;"]
    # nothing in common but the roles; the same answer twice
    assert learnt({"chosen": messages[1:3], "rejected": [messages[3], bad]}) == ["one;", "bad;"]
    assert learnt({"chosen": messages, "rejected": messages}) == ["two;", "two;"]
    # the question as a text beside both chats, as in ultrafeedback_binarized
    assert learnt({"prompt": "u", "chosen": messages[:3], "rejected": [*messages[:2], bad]}) == ["one;", "bad;"]
    with pytest.raises(BadDocument, match="prompt must be a list of messages, as chosen is, got 'other'"):
        learnt({"prompt": "other", "chosen": messages[:3], "rejected": [*messages[:2], bad]})
    for chosen, rejected, answers in (
        ("Human: why\n\nAssistant: since A", "Human: why\n\nAssistant: since B", [" A", " B"]),
        ("Human: why\nyes", "Human: why\nyet", ["yes", "yet"]),
        ("yes", "yet", ["yes", "yet"]),
        ("say a b", "say a b", [" b", " b"]),
        ("say ", "say it", ["say ", "say it"]),
        ("", "no", ["", "no"]),
    ):
        assert learnt({"chosen": chosen, "rejected": rejected}) == answers
        ids = [_text(side.ids) for side in encoding(_raw({"chosen": chosen, "rejected": rejected}))]
        assert ids == [chosen, rejected]


class _WithSystem(_Chat):
    """A template that adds a system message."""

    def __init__(self, start: str = "<bos><system>hi;") -> None:
        super().__init__()
        self.start = start

    def encode_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> list[int]:
        inside = super().encode_chat(messages, add_generation_prompt=add_generation_prompt)
        return [*self.encode(self.start), *inside]


class _Closed(_Chat):
    """A template that ends a chat, but for one with a generation prompt, with a token of its own (Phi 3's)."""

    def encode_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> list[int]:
        inside = super().encode_chat(messages, add_generation_prompt=add_generation_prompt)
        return inside if add_generation_prompt else [*inside, 1]


def test_a_template_that_closes_the_chat() -> None:
    """Its last token is learnt behind the last answer; it is not in the chat behind the others."""
    turns = [("user", "u"), ("assistant", "one"), ("user", "v"), ("assistant", "two")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (found,) = CompletionEncoding(_Closed(), "messages")(_raw({"messages": messages}))
    assert found.ids == [*b"<user>u;<assistant>one;<user>v;<assistant>two;", 1]
    assert [label for label in found.labels if label >= 0] == [*b"one;two;", 1]


def test_a_template_that_changes_earlier_answers_names_the_alternative() -> None:
    class Thinking(_Chat):
        def encode_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> list[int]:
            last = [
                {**m, "content": f"(think){m['content']}"} if m["role"] == "assistant" else m for m in messages[-1:]
            ]
            return super().encode_chat([*messages[:-1], *last], add_generation_prompt=add_generation_prompt)

    turns = [("user", "u"), ("assistant", "one"), ("user", "v"), ("assistant", "two")]
    messages = [{"role": role, "content": content} for role, content in turns]
    with pytest.raises(
        BadDocument,
        match=r"got '\(think\)one;' from messages up to message 1, where the whole chat has 'one;<user>v;.*'; records",
    ):
        CompletionEncoding(Thinking(), "messages")(_raw({"messages": messages}))
    record = {"prompt": messages[:3], "completion": messages[3:]}
    (found,) = CompletionEncoding(Thinking(), "messages")(_raw(record))
    assert _text([label for label in found.labels if label >= 0]) == "(think)two;"


def test_a_generation_prompt_that_the_chat_does_not_have_is_shown() -> None:
    class Empty(_Chat):
        def encode_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> list[int]:
            ids = super().encode_chat(messages, add_generation_prompt=add_generation_prompt)
            return [*ids, *b"<think>" * add_generation_prompt]

    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "one"}]
    with pytest.raises(BadDocument, match=r"got '<think>' from the generation prompt before message 1, .* has 'one;'"):
        CompletionEncoding(Empty(), "messages")(_raw({"messages": messages}))


@pytest.mark.parametrize("tokenizer", [_Chat(), _WithSystem(), _Closed()], ids=["plain", "system", "closed"])
def test_a_chat_may_begin_with_the_assistant(tokenizer: ByteTokenizer) -> None:
    """A greeting is learnt, its role's header is not; as part of a prompt it is not learnt."""
    turns = [("assistant", "hello"), ("user", "u"), ("assistant", "one")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (found,) = CompletionEncoding(tokenizer, "messages")(_raw({"messages": messages}))
    assert _text(found.ids).rstrip("\x01").endswith("<assistant>hello;<user>u;<assistant>one;")
    assert _text([label for label in found.labels if label > 1]) == "hello;one;"
    at = found.labels.index(ord("h"))
    assert _text(found.ids[:at]).endswith("<assistant>") and _text(found.ids[:at]).count("<assistant>") == 1
    record = {"prompt": messages[:2], "completion": messages[2:]}
    (found,) = CompletionEncoding(tokenizer, "messages")(_raw(record))
    assert _text([label for label in found.labels if label > 1]) == "one;"
    # an answer to nothing
    record = {"chosen": messages[:1], "rejected": [{"role": "assistant", "content": "bad"}]}
    chosen, rejected = CompletionEncoding(tokenizer, "pairs")(_raw(record))
    assert _text([label for label in chosen.labels if label > 1]) == "hello;"
    assert _text([label for label in rejected.labels if label > 1]) == "bad;"


def test_a_greeting_in_a_template_without_a_header_is_refused() -> None:
    class Bare(_Chat):
        def encode_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> list[int]:
            return super().encode_chat(messages)

    with pytest.raises(BadDocument, match=r"file\.jsonl:1: messages: the chat template must render .* at message 0"):
        CompletionEncoding(Bare(), "messages")(_raw({"messages": [{"role": "assistant", "content": "a"}]}))


_TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}{% for m in messages %}{{ m.role ~ ':\\n' ~ m.content }}"
    "{% if m.calls is defined %}{{ m.calls | length }}{% endif %}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)


def _with_template(folder: Path, template: str = _TEMPLATE) -> FileTokenizer:
    """A tokenizer in which two line ends are one token, and three another."""
    pytest.importorskip("transformers")
    train_tokenizer(["assistant:\n\n\n" * 50, "user:\n a" * 50], 300).save(folder / "tokenizer.json")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    tokenizer = load_tokenizer(str(folder))
    assert isinstance(tokenizer, FileTokenizer)
    return tokenizer


def _learnt(tokenizer: FileTokenizer, found: Completion) -> str:
    assert all(label in (IGNORED, id) for id, label in zip(found.ids, found.labels, strict=True))
    return tokenizer.decode([label for label in found.labels if label != IGNORED])


def _turns(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


def test_an_answer_whose_first_token_would_begin_in_its_header(tmp_path: Path) -> None:
    """Line ends of both are one token. It was refused, with the template as the reason; it is learnt apart."""
    tokenizer = _with_template(tmp_path)
    whole = "user:\nu<|endoftext|>assistant:\n\none<|endoftext|>user:\nv<|endoftext|>assistant:\ntwo<|endoftext|>"
    messages = _turns("u", "\none", "v", "two")
    assert tokenizer.decode(tokenizer.encode_chat(messages)) == whole
    for record in ({"messages": messages}, {"prompt": messages[:1], "completion": messages[1:]}):
        (found,) = CompletionEncoding(tokenizer, "messages")(_raw(record))
        assert tokenizer.decode(found.ids) == whole and _learnt(tokenizer, found) == (
            "\none<|endoftext|>two<|endoftext|>"
        )
        # a sampler is given these tokens
        prompted = tokenizer.encode_chat(messages[:1], add_generation_prompt=True)
        assert found.ids[: len(prompted)] == prompted and found.labels[len(prompted)] != IGNORED


def test_tools_are_given_to_the_template(tmp_path: Path) -> None:
    """They were dropped without a word."""
    tokenizer, tools = _with_template(tmp_path), [{"name": "add"}, {"name": "sub"}]
    for given in (tools, json.dumps(tools)):
        (found,) = CompletionEncoding(tokenizer, "messages")(_raw({"messages": _turns("u", "one"), "tools": given}))
        assert tokenizer.decode(found.ids).startswith("[add][sub]user:\nu")
        assert _learnt(tokenizer, found) == "one<|endoftext|>"
    pair = {"prompt": _turns("u"), "chosen": _turns("", "one")[1:], "rejected": _turns("", "two")[1:], "tools": tools}
    for side in CompletionEncoding(tokenizer, "pairs")(_raw(pair)):
        assert tokenizer.decode(side.ids).startswith("[add][sub]user:\nu")
    for none in (None, [], "", "[]"):
        (found,) = CompletionEncoding(tokenizer, "messages")(_raw({"messages": _turns("u", "one"), "tools": none}))
        assert tokenizer.decode(found.ids).startswith("user:\nu")
    with pytest.raises(BadDocument, match="1: tools must be a list of JSON schemas, or a text of one, got 'add'"):
        CompletionEncoding(tokenizer, "messages")(_raw({"messages": _turns("u", "one"), "tools": "add"}))


def test_tools_that_the_template_does_not_write_are_refused(tmp_path: Path) -> None:
    tokenizer = _with_template(tmp_path, _TEMPLATE.replace("tools or []", "[]"))
    with pytest.raises(BadDocument, match=r"jsonl:1: tools must be left out with a chat template that writes none"):
        CompletionEncoding(tokenizer, "messages")(_raw({"messages": _turns("u", "one"), "tools": [{"name": "add"}]}))


def test_keys_of_a_message_that_are_null_are_not_there(tmp_path: Path) -> None:
    """A row of parquet has every key that any of its messages has."""
    tokenizer, messages = _with_template(tmp_path), _turns("u", "one")
    with_null = [{**message, "calls": None} for message in messages]
    assert tokenizer.encode_chat(with_null) == tokenizer.encode_chat(messages)
    assert tokenizer.decode(tokenizer.encode_chat([{**messages[0], "calls": [1]}])) == "user:\nu1<|endoftext|>"


def test_a_system_message_beside_the_turns_is_the_first_message() -> None:
    """ShareGPT's; it was dropped without a word."""
    turns = [{"from": "human", "value": "u"}, {"from": "gpt", "value": "one"}]
    for record in ({"conversations": turns}, {"messages": _turns("u", "one")}):
        (found,) = CompletionEncoding(_Chat(), "messages")(_raw({**record, "system": "be brief"}))
        assert _text(found.ids) == "<system>be brief;<user>u;<assistant>one;"
        (found,) = CompletionEncoding(_Chat(), "messages")(_raw({**record, "system": ""}))
        assert _text(found.ids) == "<user>u;<assistant>one;"
    own = [{"role": "system", "content": "own"}, *_turns("u", "one")]
    (found,) = CompletionEncoding(_Chat(), "messages")(_raw({"messages": own, "system": "other"}))
    assert _text(found.ids) == "<system>own;<user>u;<assistant>one;"


@pytest.mark.parametrize(
    "form, record, words",
    [
        (
            "advantages",
            {"completion": "a", "advantage": 1, "log_probs": [-1.0, 0.5]},
            r"file\.jsonl:1: log_probs must be at most 0, logarithms of probabilities, got 0\.5",
        ),
        ("messages", {"prompt": "a"}, r"file\.jsonl:1: completion must be a string or a list of messages, got nothing"),
        ("pairs", {"chosen": "a", "rejected": 3}, "rejected must be a string or a list of messages, got 3"),
        ("labels", {"completion": "a", "label": 1}, "label must be true or false, got 1"),
        ("advantages", {"completion": "a", "advantage": True}, "advantage must be a number that float32 has, got True"),
        ("advantages", {"completion": "a", "advantage": float("nan")}, "advantage must be a number .* got nan"),
        ("advantages", {"completion": "a", "advantage": 10**400}, "advantage must be a number .* got 1000"),
        ("advantages", {"completion": "a", "advantage": -1e39}, "advantage must be a number .* got -1e.39"),
        (
            "advantages",
            {"completion": "a", "advantage": 1, "log_probs": [-1.0, None]},
            "file.jsonl:1: log_probs must be numbers that float32 has, got nothing",
        ),
        (
            "advantages",
            {"completion": "a", "advantage": 1, "log_probs": [-1.0, "b"]},
            "log_probs must be numbers that float32 has, got 'b'",
        ),
        ("messages", {"prompt": "a", "completion": "\ud800"}, r"file.jsonl:1: must be text .* lone surrogate U\+D800"),
        ("messages", {"messages": []}, r"file.jsonl:1: messages: the chat template refuses these messages: no message"),
        (
            "advantages",
            {"completion": "ab", "advantage": 1, "log_probs": [0.0]},
            "log_probs must be one number for each of the completion's 3 tokens, got 1",
        ),
        (
            "messages",
            {"prompt": "p", "completion": [{"role": "assistant", "content": "a"}]},
            "prompt must be a list of messages, as completion is, got 'p'",
        ),
        ("pairs", {"prompt": [{"role": "user"}], "chosen": "a", "rejected": "b"}, "prompt must be a string, as chosen"),
        ("messages", {"prompt": 0, "completion": "a"}, "prompt must be a string, as completion is, got 0"),
        ("messages", {"prompt": ["p"], "completion": []}, "prompt must be a list of messages with a role"),
        ("messages", ["a"], "must be an object, got list"),
        ("messages", {"messages": [{"role": "user", "content": "u"}]}, "must be a message of the assistant"),
        ("messages", {"messages": "hello"}, "messages must be a list of messages with a role"),
    ],
)
def test_bad_records_name_file_line_and_key(form: Format, record: Any, words: str) -> None:
    with pytest.raises(BadDocument, match=words):
        CompletionEncoding(_Chat(), form)(_raw(record))
    with pytest.raises(BadDocument, match="must be jsonl, parquet or a data set"):
        CompletionEncoding(TOKENIZER, form)(Raw("a.txt", b"text", False))


def _written(folder: Path, form: Format, records: list[Any]) -> list[CompletionData]:
    write_completions(map(_raw, records), folder / "x", CompletionEncoding(TOKENIZER, form))
    return [CompletionData(files) for files in files_of(folder / "x", form)]


def _pairs(count: int, seed: int) -> list[dict[str, str]]:
    draw = Random(seed)
    word = lambda n: "".join(draw.choice("abcdef") for _ in range(n))  # noqa: E731
    return [
        {"prompt": word(draw.randint(0, 6)), "chosen": word(draw.randint(1, 9)), "rejected": word(draw.randint(1, 20))}
        for _ in range(count)
    ]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_rows_hold_whole_examples(seed: int, packed: bool, tmp_path: Path) -> None:
    records = _pairs(23, seed)
    sides = _written(tmp_path, "pairs", records)
    source = CompletionSamples(
        sides, np.arange(23), seq_length=32, num_samples=40, seed=seed, vocab_size=256, packed=packed
    )
    source = pickle.loads(pickle.dumps(source))
    assert len(source) >= 40
    seen = []
    for index in range(len(source)):
        sample = source.sample(index)
        assert sample.tokens.shape == (2, 32) and sample.completions is not None and sample.document_ids is not None
        count = len(sample.completions.values) // 2
        assert count == 1 or packed
        for place in range(count):
            for row, side in enumerate(("chosen", "rejected")):
                here = sample.document_ids[row] == place
                counted, text = sample.labels[row][here], _text(sample.tokens[row][here])
                assert text in [record["prompt"] + record[side] for record in records]
                seen += [text] * (row == 0)
                of = sample.completions.sequence[row][here]
                assert set(of.tolist()) <= {-1, row * count + place}
                assert ((of >= 0) == (counted >= 0)).all()
        padding = sample.document_ids == count
        assert (sample.labels[padding] == -100).all() and (sample.completions.sequence[padding] == -1).all()
    # every epoch has each example once
    assert sorted(seen[:23]) == sorted(record["prompt"] + record["chosen"] for record in records)


def test_too_long_ones_are_left_out_or_cut(tmp_path: Path) -> None:
    records = [{"prompt": "", "completion": "a" * n} for n in (3, 9, 30)] + [{"prompt": "p" * 20, "completion": "x"}]
    sides = _written(tmp_path, "messages", records)

    def lengths(**options: Any) -> set[int]:
        source = CompletionSamples(
            sides, np.arange(4), seq_length=8, num_samples=9, seed=0, vocab_size=256, packed=False, **options
        )
        return {int((source.sample(n).labels >= 0).sum()) for n in range(len(source))}

    # the first token of a completion without a prompt is not predicted
    assert lengths() == {3}
    assert lengths(truncate=True) == {3, 8}
    with pytest.raises(
        NoExample, match="must hold an example that can be used, got none of 2: 2 are longer than train"
    ):
        CompletionSamples(sides, np.arange(2, 4), seq_length=8, num_samples=1, seed=0, vocab_size=256)


def test_why_examples_are_left_out_is_said(tmp_path: Path) -> None:
    """A single token is not a long example; a completion behind the end of a row is none that is too long."""
    side = _written(tmp_path, "messages", [{"prompt": "", "completion": "a" * n} for n in (0, 0, 2, 30)])
    options: dict[str, Any] = dict(seq_length=8, num_samples=1, seed=0, vocab_size=256)
    with pytest.raises(NoExample, match=r"got none of 2: 2 are of a single token, which predicts nothing$"):
        CompletionSamples(side, np.arange(2), **options)
    CompletionSamples(side, np.arange(4), **options)
    said = "of 4 examples 3 are left out: 1 is longer than train.seq_length 8 (data.allow_chopped: true cuts them), 2 "
    assert any(said in event.text for event in tracing.trace())
    (tmp_path / "b").mkdir()
    side = _written(tmp_path / "b", "messages", [{"prompt": "p" * 20, "completion": "x"}])
    with pytest.raises(NoExample, match="got none of 1: 1 is without a label that counts in the first 9 tokens"):
        CompletionSamples(side, np.arange(1), truncate=True, **options)


def test_an_empty_validation_is_named_and_no_split_blamed(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"prompt": "", "completion": "abc"}) for _ in range(8)))
    (tmp_path / "none.jsonl").touch()
    tracing.clear()
    for given in ("validation", "test"):
        config = DataConfig(train=f"{tmp_path}/train.jsonl", cache_folder=str(tmp_path / "cache"),
                            **{given: f"{tmp_path}/none.jsonl"})  # type: ignore[arg-type]  # fmt: skip
        open_completions(config, "messages", seq_length=16, num_samples=(4, 2, 2), seed=1)
        texts = [event.text for event in tracing.trace()]
        assert f"data.{given}: no example with tokens in {tmp_path}/none.jsonl; there will be no {given}" in texts
    assert not any("split" in text for text in texts), texts
    sources = (f"{tmp_path}/train.jsonl", f"{tmp_path}/none.jsonl")
    config = DataConfig(train=sources, cache_folder=str(tmp_path / "cache"))  # type: ignore[arg-type]
    open_completions(config, "messages", seq_length=16, num_samples=(4, 0, 0), seed=1)
    said = f"data.train: {tmp_path}/none.jsonl has no example; its share goes to the other sources"
    assert said in [event.text for event in tracing.trace()]


@pytest.mark.parametrize("own", [False, True])
def test_a_held_out_part_without_an_example_that_can_be_used(own: bool, tmp_path: Path) -> None:
    """The run goes on without that evaluation, or that source of it, and says why; training data are an error."""
    short, long = ([{"prompt": "", "completion": "a" * n}] * 8 for n in (5, 50))
    for name, records in (("short", short), ("long", long), ("mixed", short + long)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    options: dict[str, Any] = {"cache_folder": str(tmp_path / "cache"), "allow_chopped": False}
    read: dict[str, Any] = dict(seq_length=16, num_samples=(4, 2, 0), seed=1)
    if own:
        config = DataConfig(train=f"{tmp_path}/short.jsonl", validation=f"{tmp_path}/long.jsonl", **options)  # type: ignore[arg-type]
    else:
        config = DataConfig(train=f"{tmp_path}/mixed.jsonl", split="50,50,0", **options)  # type: ignore[arg-type]
    data = open_completions(config, "messages", **read)
    assert data.validation is None and len(data.train) >= 4
    texts = [event.text for event in tracing.trace()]
    assert any("validation has none of these" in t and "8 are longer than train.seq_length 16" in t for t in texts)
    assert "data: no example is left for validation; there will be none" in texts
    both = (f"{tmp_path}/long.jsonl", f"{tmp_path}/short.jsonl")
    config = DataConfig(train=f"{tmp_path}/short.jsonl", validation=both, **options)  # type: ignore[arg-type]
    validation = open_completions(config, "messages", **read).validation
    assert isinstance(validation, CompletionSamples)
    with pytest.raises(NoExample, match="got none of 8"):
        open_completions(DataConfig(train=f"{tmp_path}/long.jsonl", split="1,0,0", **options), "messages", **read)  # type: ignore[arg-type]


def test_log_probs_of_files_are_logarithms(tmp_path: Path) -> None:
    """Rounding may give a little more than 0; half is a probability."""
    sides = _written(tmp_path, "advantages", [{"completion": "ab", "advantage": 1, "log_probs": [-1, 1e-4, 0]}])
    options: dict[str, Any] = dict(seq_length=8, num_samples=1, seed=0, vocab_size=256)
    CompletionSamples(sides, np.arange(1), **options).sample(0)
    with IndexedWriter(f"{tmp_path}/bad", np.float32) as writer:
        writer.add(np.array([0, 0.5, np.nan], np.float32))
    files = replace(files_of(tmp_path / "x", "advantages")[0], log_probs=f"{tmp_path}/bad")
    with pytest.raises(ValueError, match=r"bad: document 0 must be at most 0, .* got 0\.5"):
        CompletionSamples([CompletionData(files)], np.arange(1), **options).sample(0)


def test_a_missing_end_token_is_said_once(tmp_path: Path) -> None:
    """At the start of each run, tokenized before or not, where completions are strings."""
    tokenizer = _Chat()
    tokenizer.eod = None
    chat = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    records: dict[str, list[Any]] = {"strings": _pairs(4, 1), "chats": [chat] * 4}
    for name, rows in records.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        config = DataConfig(train=f"{tmp_path}/{name}.jsonl", split="50,50,0", cache_folder=str(tmp_path / "cache"))  # type: ignore[arg-type]
        for _ in range(2):
            tracing.clear()
            open_completions(config, "pairs", seq_length=32, num_samples=(1, 1, 0), seed=0, tokenizer=tokenizer)
            said = [event for event in tracing.trace() if "no end-of-document token" in event.text]
            assert len(said) == (name == "strings")


def test_batches_number_completions_through(tmp_path: Path) -> None:
    sides = _written(tmp_path, "pairs", _pairs(30, 5))
    source = CompletionSamples(sides, np.arange(30), seq_length=48, num_samples=8, seed=3, vocab_size=256)
    samples = [source.sample(n) for n in range(3)]
    batch = _stacked(samples, [0, 1, 2])
    assert batch.tokens.shape == (6, 48) and batch.completions is not None
    total = len(batch.completions.values)
    assert total == sum(len(s.completions.values) for s in samples if s.completions is not None)
    used = batch.completions.sequence
    assert sorted(used[0::2][used[0::2] >= 0].unique().tolist()) == list(range(total // 2))
    assert sorted(used[1::2][used[1::2] >= 0].unique().tolist()) == list(range(total // 2, total))


def test_packed_documents_leak_nothing(tmp_path: Path) -> None:
    """Logits in a packed row are those of the document alone."""
    sides = _written(tmp_path, "messages", [{"prompt": "ab" * n, "completion": "cd" * n} for n in range(1, 6)])
    source = CompletionSamples(sides, np.arange(5), seq_length=64, num_samples=1, seed=0, vocab_size=256)
    batch = _stacked([source.sample(0)], [0])
    config = configure(architecture="llama", num_layers=2, hidden_size=32, intermediate_size=48, num_heads=2,
                       vocab_size=256, max_position_embeddings=64)  # fmt: skip
    model = build(config, device="cpu").eval()
    model.init_weights(0)
    ids = batch.document_ids
    assert ids is not None and int(ids.max()) > 2
    packed = model(batch.tokens, position_ids=batch.position_ids, document_ids=ids)[0]
    for document in ids[0].unique():
        here = ids[0] == document
        torch.testing.assert_close(packed[here], model(batch.tokens[:, here])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_sources(kind: str, tmp_path: Path) -> None:
    records = _pairs(20, 2)
    if kind == "jsonl":
        path = tmp_path / "x.jsonl"
        path.write_text("\n".join(map(json.dumps, records)))
    else:
        datasets = pytest.importorskip("datasets")
        data = datasets.Dataset.from_list(records)
        path = tmp_path / ("x.parquet" if kind == "parquet" else "saved")
        data.to_parquet(path) if kind == "parquet" else data.save_to_disk(path)
    config = DataConfig(train=str(path), split="80,20,0", cache_folder=str(tmp_path / "cache"))
    options: dict[str, Any] = dict(seq_length=32, num_samples=(10, 2, 0), seed=1)
    data = open_completions(config, "pairs", **options)
    again = open_completions(config, "pairs", **options)
    assert data.validation is not None and data.test is None
    for n in range(10):
        assert np.array_equal(data.train.sample(n).tokens, again.train.sample(n).tokens)
    held_out = {_text(data.validation.sample(n).tokens[0]) for n in range(len(data.validation))}
    trained = "".join(_text(data.train.sample(n).tokens[0]) for n in range(len(data.train)))
    assert held_out and not any(text and text in trained for text in held_out if len(text) > 8)


@pytest.mark.parametrize("name", ["_document.bin", "_label_document.bin", "_reward_document.idx"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_damaged_tokens_in_the_cache_are_made_again(tmp_path: Path, name: str, is_cut: bool) -> None:
    """A changed bit would be trained on; a file that is cut short, or gone, would end every start."""
    file = tmp_path / "r.jsonl"
    file.write_text("".join(json.dumps({"prompt": "q", "completion": f"a{n}", "label": True}) + "\n" for n in range(9)))
    config = DataConfig(train=str(file), cache_folder=str(tmp_path / "cache"))
    read: dict[str, Any] = dict(seq_length=16, num_samples=(1, 0, 0), seed=0)
    right = open_completions(config, "labels", **read)
    (damaged,) = (tmp_path / "cache/tokens").glob("?" * 32 + name)
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-3] if is_cut else bytes([*whole[:-1], whole[-1] ^ 1]))
    again = open_completions(config, "labels", **read)
    assert damaged.read_bytes() == whole and again.identity == right.identity
    assert any("text in the cache is tokenized again" in event.text for event in tracing.trace())
    damaged.unlink()
    assert open_completions(config, "labels", **read).identity == right.identity
    file.write_text(file.read_text().replace("a7", "b7"))
    assert open_completions(config, "labels", **read).identity != right.identity


def test_messages_name_the_records_not_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "p" * 20, "completion": "x"}))
    config = DataConfig(train=str(file), split="1,0,0", cache_folder=str(tmp_path / "cache"))
    with pytest.raises(NoExample, match=rf"^{file}: must hold an example that can be used, got none of 1"):
        open_completions(config, "messages", seq_length=8, num_samples=(1, 0, 0), seed=0)


def test_tokens_beside_each_other_and_blends(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_completions(map(_raw, _pairs(9, 1)), tmp_path / "a/x", CompletionEncoding(TOKENIZER, "pairs"))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, _pairs(9, 7))))
    x = f"{tmp_path}/a/x"
    tokens = {
        "path": f"{x}_chosen_document", "labels": f"{x}_chosen_label_document", "rejected": f"{x}_rejected_document",
        "rejected_labels": f"{x}_rejected_label_document", "weight": 3.0,
    }  # fmt: skip
    config = DataConfig(train=[tokens, f"{tmp_path}/b.jsonl"], split="1,0,0", cache_folder=str(tmp_path / "cache"))  # type: ignore[arg-type]
    data = open_completions(config, "pairs", seq_length=32, num_samples=(12, 0, 0), seed=1)
    assert len(data.train) == 12 and data.train.sample(11).tokens.shape == (2, 32)
    without = DataConfig(train=[{"path": tokens["path"]}], cache_folder=str(tmp_path / "cache"))  # type: ignore[list-item]
    with pytest.raises(ValueError, match="rejected must be given for pairs of tokenized data"):
        open_completions(without, "pairs", seq_length=32, num_samples=(1, 0, 0), seed=1)
    with pytest.raises(ValueError, match="rewards must be given for tokenized data"):
        open_completions(without, "labels", seq_length=32, num_samples=(1, 0, 0), seed=1)


def test_pairs_of_equal_sides_are_counted(tmp_path: Path) -> None:
    records = [{"prompt": "q", "chosen": "a", "rejected": rejected} for rejected in "abaa"]
    tracing.clear()
    write_completions(map(_raw, records), tmp_path / "x", CompletionEncoding(TOKENIZER, "pairs"))
    (warned,) = [event.text for event in tracing.trace() if event.kind == "warning"]
    assert warned.startswith("3 of 4 pairs must have two different answers") and warned.endswith("file.jsonl:1")


def test_preprocess_writes_the_files(tmp_path: Path) -> None:
    records = [*map(json.dumps, _pairs(7, 3)), json.dumps({"chosen": "a"})]
    (tmp_path / "x.jsonl").write_text("\n".join(records))
    arguments = ["preprocess", f"{tmp_path}/x.jsonl", "--output", f"{tmp_path}/y", "--tokenizer", "bytes"]
    result = CliRunner().invoke(app, [*arguments, "--completions", "pairs"])
    assert result.exit_code == 2 and "x.jsonl:8: rejected must be" in result.output
    assert not list(tmp_path.glob("y*.idx"))
    result = CliRunner().invoke(app, [*arguments, "--completions", "pairs", "--skip-bad"])
    assert result.exit_code == 0 and "7 examples; left out: 1 bad" in result.output.replace("\n", " ")
    assert {path.stem for path in tmp_path.glob("y*.idx")} == {
        f"y_{side}{label}_document" for side in ("chosen", "rejected") for label in ("", "_label")
    }
    result = CliRunner().invoke(app, [*arguments, "--completions", "pairs", "--append-eod"])
    assert result.exit_code == 2 and "got --append-eod" in " ".join(result.output.replace("│", " ").split())
