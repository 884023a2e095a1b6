"""Prompts with completions: records of jsonl, parquet or `datasets` to tokens, labels and a value for each completion.

    format      a record has                                  completions
    messages    messages, or ShareGPT's conversations, and    one; the loss counts on assistant turns, or the completion
                system if it is a text of its own; or
                prompt and completion
    pairs       chosen and rejected; prompt, unless they      two: chosen, rejected
                begin with it: then it is what both have
    labels      prompt, completion, label: true or false      one, with value +1 or -1
    advantages  prompt, completion, advantage;                one, with that value, and the sampler's log-probability
                log_probs, one for each token, if known       of each of its tokens

A prompt and its completion are both strings, or both lists of messages for the tokenizer's chat template. A completion
that is a string ends with the end-of-document token. Beside lists of messages `tools` has the schemas of tools.

On disk they are GPT-NeoX's data sets, with the same documents in the same order: PREFIX_document with tokens,
PREFIX_label_document with labels, PREFIX_reward_document with one float for each document; for pairs
PREFIX_chosen_document, PREFIX_chosen_label_document, PREFIX_rejected_document, PREFIX_rejected_label_document.
PREFIX_log_prob_document, a float for each token, is an addition of ours. Source: GPT-NeoX's
tools/datasets/preprocess_data_with_chat_template.py and megatron/data/gpt2_dataset.py, as facts.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from powertrain.runtime import tracing
from powertrain.train.data.corpus import BadDocument, Raw, check_surrogates
from powertrain.train.data.indexed import IndexedData, IndexedWriter
from powertrain.train.data.packed import IGNORED
from powertrain.train.data.tokenizer import ChatRefused, FileTokenizer, Tokenizer

_ROUNDED = 0.01
_SIDES = ("chosen", "rejected")
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's
_LARGEST = float(np.finfo(np.float32).max)
Format = Literal["messages", "pairs", "labels", "advantages"]
# from messages, and whether a generation prompt follows, to a chat's tokens or its text
Render = Callable[..., Any]


class Completion(NamedTuple):
    """ids of prompt and completion; labels, as long as ids: the id where the loss counts, else IGNORED."""

    ids: list[int]
    labels: list[int]
    value: float = 0.0
    log_probs: list[float] | None = None


@dataclass(frozen=True)
class CompletionEncoding:
    """From a record to its completions. Raises BadDocument naming file, line and key."""

    tokenizer: Tokenizer
    format: Format

    def __call__(self, raw: Raw) -> tuple[Completion, ...]:
        record = _record(raw)
        if self.format == "pairs":
            record = _with_prompt(raw.where, record)
            return tuple(self._completion(raw.where, record, side) for side in _SIDES)
        record = _with_messages(raw.where, record) if self.format == "messages" else record
        if self.format == "messages" and "messages" in record:
            ids, labels = self._chat(raw.where, "messages", record["messages"], [], record.get("tools"))
            return (Completion(ids, labels),)
        one = self._completion(raw.where, record, "completion")
        if self.format == "labels":
            label = record.get("label")
            if not isinstance(label, bool):
                _bad(raw.where, "label", "true or false", label)
            return (one._replace(value=1.0 if label else -1.0),)
        if self.format == "advantages":
            value = _number(raw.where, "advantage", "a number that float32 has", record.get("advantage"))
            return (one._replace(value=value, log_probs=self._log_probs(raw.where, record, one)),)
        return (one,)

    def _completion(self, where: str, record: Mapping[str, Any], key: str) -> Completion:
        completion: Any = record.get(key)
        if not isinstance(completion, (str, list)):
            _bad(where, key, "a string or a list of messages", completion)
        prompt: Any = record.get("prompt")
        if prompt in (None, "", []):
            prompt = type(completion)()
        if type(prompt) is not type(completion):
            kind = "a string" if isinstance(completion, str) else "a list of messages"
            _bad(where, "prompt", f"{kind}, as {key} is", prompt)
        if isinstance(completion, list):
            _check_messages(where, "prompt", prompt)
            return Completion(*self._chat(where, key, completion, prompt, record.get("tools")))
        # prompt and completion are tokenized apart, so that no token spans the border between them
        ids, end = self.tokenizer.encode(prompt), self.tokenizer.eod
        completion_ids = [*self.tokenizer.encode(completion), *([] if end is None else [end])]
        # the end token counts in the loss: without it a model never learns to stop
        return Completion([*ids, *completion_ids], [IGNORED] * len(ids) + completion_ids)

    def _chat(self, where: str, key: str, messages: Any, prompt: list[Any], given: Any) -> tuple[list[int], list[int]]:
        """ids of prompt and messages; labels on the assistant's messages that are not the prompt's.

        given   the record's tools
        """
        _check_messages(where, key, messages)
        chat, tools = [*prompt, *messages], _tools(where, given)
        try:
            if tools and self._ids(tools)(chat) == self._ids([])(chat):
                _bad(where, "tools", "left out with a chat template that writes none", f"{len(tools)} tools")
            return self._labelled(where, key, chat, len(prompt), tools)
        except ChatRefused as error:
            raise BadDocument(f"{where}: {key}: {error}") from None

    def _ids(self, tools: list[Any]) -> Render:
        return partial(self.tokenizer.encode_chat, tools=tools) if tools else self.tokenizer.encode_chat

    def _labelled(
        self, where: str, key: str, chat: list[Any], first: int, tools: list[Any]
    ) -> tuple[list[int], list[int]]:
        """ids and labels of a chat whose messages are trained on from index `first`."""
        ids = self._ids(tools)(chat)
        turns = [turn for turn in range(first, len(chat)) if chat[turn]["role"] == "assistant"]
        if not turns:
            _bad(where, key, "a message of the assistant", f"roles {[m['role'] for m in chat[first:]]}")
        parts = [_answer(self._ids(tools), chat, turn, ids) for turn in turns]
        if None in parts and isinstance(self.tokenizer, FileTokenizer):
            text = partial(self.tokenizer.chat_text, tools=tools)
            whole = text(chat)
            spans = [_answer(text, chat, turn, whole) for turn in turns]
            apart = None if None in spans else _apart(self.tokenizer, whole, spans)
            # some tokenizers begin each text with a space
            if apart is not None and self.tokenizer.decode(apart[0]) == self.tokenizer.decode(ids):
                return apart
        labels = [IGNORED] * len(ids)
        for turn, part in zip(turns, parts, strict=True):
            if part is None:
                raise BadDocument(
                    f"{where}: {key}: the chat template must render the first messages of a chat, and its generation "
                    f"prompt, to the beginning of the whole chat, got "
                    f"{self._difference(chat, turn, tools)}; records with a "
                    "prompt and a completion, one for each answer, need that of the last answer only"
                )
            labels[part] = ids[part]
        if all(label == IGNORED for label in labels):
            _bad(where, key, "an answer of the assistant that is not empty", "no token of one")
        return ids, labels

    def _difference(self, chat: list[Any], turn: int, tools: list[Any]) -> str:
        """What a chat, and the parts of it that a sampler is given, first have different texts in, for an error."""

        def text(part: list[Any], **options: bool) -> str:
            return self.tokenizer.decode(self._ids(tools)(part, **options))

        whole, parts = text(chat), {"messages up to": text(chat[: turn + 1])}
        if turn:
            # first, since it is the shorter one
            parts = {"the generation prompt before": text(chat[:turn], add_generation_prompt=True), **parts}
        for name, part in parts.items():
            same = _common(part, whole)
            if same < len(part):
                shown, instead = part[same : same + 40], whole[same : same + 40]
                return f"{shown!r} from {name} message {turn}, where the whole chat has {instead!r}"
        return f"another one at message {turn}"

    def _log_probs(self, where: str, record: Mapping[str, Any], completion: Completion) -> list[float] | None:
        given = record.get("log_probs")
        if given is None:
            return None
        # a sampler that used another tokenizer would have other tokens, so counts must agree
        count = sum(label != IGNORED for label in completion.labels)
        if not isinstance(given, list) or len(given) != count:
            got = len(given) if isinstance(given, list) else given
            _bad(where, "log_probs", f"one number for each of the completion's {count} tokens", got)
        values = [_number(where, "log_probs", "numbers that float32 has", number) for number in given]
        try:
            check_log_probs(f"{where}: log_probs", values)
        except ValueError as error:
            raise BadDocument(str(error)) from None
        numbers = iter(values)
        return [0.0 if label == IGNORED else next(numbers) for label in completion.labels]


def _answer(render: Render, chat: list[Any], turn: int, whole: Any) -> slice | None:
    """Where the text of an assistant's message is in its chat, as tokens or as a text; None where it is not found."""
    after = render(chat[: turn + 1])
    if turn < len(chat) - 1 and whole[: len(after)] != after:
        # some templates close a chat with a token that stands behind its last message alone
        _, closing = _ends_of_a_question(render)
        if closing and after[-len(closing) :] == closing:
            after = after[: -len(closing)]
    # the text that the sampler would be given: the role's header is prompt, not answer
    before = render(chat[:turn], add_generation_prompt=True) if turn else _header(render, after)
    # a template may look at the whole chat, and drop the reasoning of earlier turns, say: labels would be misplaced
    if before is None or whole[: len(after)] != after or after[: len(before)] != before:
        return None
    return slice(len(before), len(after))


def _header(render: Render, chat: Any) -> Any:
    """A chat of one assistant's message up to its text; None where that is not found.

    A template cannot render a chat without messages. So the role's header is taken from a chat of one question: the
    header is the text that the generation prompt appends to that chat.
    """
    header, _ = _ends_of_a_question(render)
    starts = range(len(chat) - len(header) + 1) if header else ()
    # the first: behind it is the assistant's text, before it at most a system message that the template adds
    at = next((start for start in starts if chat[start : start + len(header)] == header), None)
    return None if at is None else chat[: at + len(header)]


def _ends_of_a_question(render: Render) -> tuple[Any, Any]:
    """The text or tokens that the template writes after a user's message: before an answer, and at a chat's end."""
    question = [{"role": "user", "content": "?"}]
    asked, prompted = render(question), render(question, add_generation_prompt=True)
    same = _common(asked, prompted)
    return prompted[same:], asked[same:]


def _common(a: Any, b: Any) -> int:
    """The length of what two texts, or lists of tokens, both begin with."""
    pairs = zip(a, b, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _apart(tokenizer: FileTokenizer, text: str, answers: Sequence[slice | None]) -> tuple[list[int], list[int]]:
    """ids and labels of a chat in which a token would span the border of an answer, as two line ends may be one token:
    its sides are tokenized apart, as a sampler has them."""
    ids: list[int] = []
    labels: list[int] = []
    at = 0
    for answer in (*answers, slice(len(text), len(text))):
        assert answer is not None
        before, answer_ids = (tokenizer.encode_rendered(text[part]) for part in (slice(at, answer.start), answer))
        ids += before + answer_ids
        labels += [IGNORED] * len(before) + answer_ids
        at = answer.stop
    return ids, labels


def _tools(where: str, given: Any) -> list[Any]:
    """A record's tools: JSON schemas in a list, or that list as a text (which parquet has)."""
    tools = given
    if isinstance(given, str):
        try:
            tools = json.loads(given or "[]")
        except (ValueError, RecursionError):
            tools = None
    elif given is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        _bad(where, "tools", "a list of JSON schemas, or a text of one", given)
    return tools


def warn_without_end(first: Raw | None) -> None:
    """Warn, once, if completions are strings, going by the first record, for a tokenizer without an end token."""
    try:
        record = {} if first is None else _record(first)
    except BadDocument:  # reported where all of them are read
        return
    if any(isinstance(record.get(key), str) for key in ("completion", "chosen", "rejected")):
        tracing.warn(
            "data.tokenizer: its files declare no end-of-document token (eos_token in tokenizer_config.json), so "
            "completions end without one and the model does not learn to stop"
        )


def check_log_probs(where: str, values: Any) -> None:
    """Raise ValueError for one that is no logarithm of a probability; nan is one that is not known."""
    # fmax: nan counts for nothing
    largest = float(np.fmax.reduce(np.asarray(values, np.float64), initial=0.0))
    # rounding in 16 bits can give a sampler's likeliest token a little more than 0
    if largest > _ROUNDED:
        raise ValueError(f"{where} must be at most 0, logarithms of probabilities, got {largest:g}")


def _record(raw: Raw) -> dict[str, Any]:
    if raw.damage:
        raise BadDocument(raw.damage)
    if not raw.is_json:
        raise BadDocument(f"{raw.where}: must be jsonl, parquet or a data set to hold completions, got a text file")
    try:
        record = json.loads(raw.data)
    except (ValueError, RecursionError) as error:
        raise BadDocument(f"{raw.where}: must be a line of JSON, got {str(error)[:120]}") from None
    if not isinstance(record, dict):
        raise BadDocument(f"{raw.where}: must be an object, got {type(record).__name__}")
    check_surrogates(raw.where, record)
    return record


def _with_messages(where: str, record: dict[str, Any]) -> dict[str, Any]:
    """A record of ShareGPT's form, conversations of {from, value}, as one with messages."""
    turns = record.get("conversations")
    if turns is None or "messages" in record:
        return _with_system(record)
    messages = []
    for turn in turns if isinstance(turns, list) else [turns]:
        given: dict[str, Any] = turn if isinstance(turn, dict) else {}
        role: Any = given.get("role", given.get("from"))
        content: Any = given.get("content", given.get("value"))
        if not isinstance(role, str) or content is None:
            _bad(where, "conversations", "a list of {from, value} or {role, content}", turn)
        rest = {key: value for key, value in given.items() if key not in ("from", "value")}
        messages.append({**rest, "role": _ROLES.get(role, role), "content": content})
    return _with_system({**record, "messages": messages})


def _with_system(record: dict[str, Any]) -> dict[str, Any]:
    """A record whose system message is a text of its own, beside the turns."""
    system, messages = record.get("system"), record.get("messages")
    if not system or not isinstance(system, str) or not isinstance(messages, list):
        return record
    if any(isinstance(m, dict) and m.get("role") == "system" for m in messages):
        return record
    return {**record, "messages": [{"role": "system", "content": system}, *messages]}


def _with_prompt(where: str, record: dict[str, Any]) -> dict[str, Any]:
    """A pair without a prompt as one with the common beginning of both sides as its prompt, as TRL reads it.

    A prompt that is the text of the user's first message in both sides is none of its own (ultrafeedback_binarized).
    """
    sides: list[Any] = [record.get(side) for side in _SIDES]
    prompt: Any = record.get("prompt")
    for name, side in zip(_SIDES, sides, strict=True):
        if isinstance(side, list):
            _check_messages(where, name, side)
    if prompt and isinstance(prompt, str) and all(isinstance(side, list) and _asks(side, prompt) for side in sides):
        prompt = None
    first, second = sides
    if prompt in (None, "", []) and type(first) is type(second) and type(first) in (str, list):
        common = _common_words(first, second) if type(first) is str else _common_messages(first, second)
        rest = {name: side[common:] for name, side in zip(_SIDES, (first, second), strict=True)}
        return {**record, "prompt": first[:common], **rest}
    return record


def _asks(messages: list[Any], prompt: str) -> bool:
    return next((m.get("content") for m in messages if m["role"] != "system"), None) == prompt


def _common_messages(first: list[Any], second: list[Any]) -> int:
    # an answer is left on both sides
    most = min(len(first), len(second)) - 1
    return next((n for n in range(most) if first[n] != second[n]), max(most, 0))


def _common_words(first: str, second: str) -> int:
    """Characters of the beginning that both texts have, up to a space, which goes with the answer, or behind a line."""
    shorter = min(len(first), len(second))
    same = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), shorter)
    # the end of the shorter text is an answer's
    common = first[: max(min(same, shorter - 1), 0)]
    return max(common.rfind(" "), common.rfind("\n") + 1, 0)


def _check_messages(where: str, key: str, messages: Any) -> None:
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        _bad(where, key, "a list of messages with a role", messages)


def _number(where: str, key: str, must: str, value: Any) -> float:
    # to Python true is an integer, which would be an advantage of 1; numbers are stored and computed in float32
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
        _bad(where, key, must, value)
    return float(value)


def _bad(where: str, key: str, must: str, got: Any) -> Any:
    # a number is not shown as the text "5", nor a missing key as one named None
    shown = "nothing" if got is None else repr(got[:60]) if isinstance(got, str) else repr(got)[:60]
    raise BadDocument(f"{where}: {key} must be {must}, got {shown}")


# --- on disk ---


@dataclass(frozen=True)
class CompletionFiles:
    """Prefixes of one side's data sets; rewards and log_probs None: there are none.

    source   what messages name, where `tokens` is in the cache; "": tokens
    """

    tokens: str
    labels: str | None
    rewards: str | None = None
    log_probs: str | None = None
    source: str = ""

    def prefixes(self) -> list[str]:
        return [name for name in (self.tokens, self.labels, self.rewards, self.log_probs) if name is not None]


def files_of(prefix: str | Path, form: Format) -> tuple[CompletionFiles, ...]:
    """The data sets that `write_completions` makes: one side, or of pairs two."""
    if form == "pairs":
        return tuple(
            CompletionFiles(f"{prefix}_{side}_document", f"{prefix}_{side}_label_document")
            for side in ("chosen", "rejected")
        )
    rewards = None if form == "messages" else f"{prefix}_reward_document"
    log_probs = f"{prefix}_log_prob_document" if form == "advantages" else None
    return (CompletionFiles(f"{prefix}_document", f"{prefix}_label_document", rewards, log_probs),)


def write_completions(
    documents: Iterable[Raw], prefix: str | Path, encoding: CompletionEncoding, *, skip_bad: bool = False,
    overwrite: bool = False, least: int = 0,
) -> tuple[int, list[str]]:  # fmt: skip
    """Tokenize records into the data sets of `files_of`: (number of examples, messages about those left out).

    Data sets appear whole when all are written, the chosen or only tokens last. A log-probability that is not known is
    nan. Warns of pairs whose sides have the same tokens. Raises BadDocument without `skip_bad`, FileExistsError,
    ValueError for fewer than `least` examples.
    """
    # the stack closes in reverse, so the tokens, which were opened first, appear last
    sides, count, bad = files_of(prefix, encoding.format), 0, []
    alike: list[str] = []
    # an error on any record discards all the files, so no part of a data set is left
    with ExitStack() as stack:
        writers = [_writers(stack, side, overwrite) for side in sides]
        for raw in documents:
            try:
                example = encoding(raw)
            except BadDocument as error:
                if not skip_bad:
                    raise
                bad.append(str(error))
                continue
            count += 1
            if encoding.format == "pairs" and example[0].ids == example[1].ids:
                alike.append(raw.where)
            for completion, (tokens, labels, rewards, log_probs) in zip(example, writers, strict=True):
                tokens.add(completion.ids)
                labels.add(completion.labels)
                if rewards is not None:
                    rewards.add(np.array([completion.value], np.float32))
                if log_probs is not None:
                    unknown = np.full(len(completion.ids), np.nan, np.float32)
                    known = completion.log_probs
                    log_probs.add(unknown if known is None else np.array(known, np.float32))
        if count < least:
            left_out = f" and {len(bad)} bad, the first: {bad[0]}" if bad else ""
            raise ValueError(f"the input must have at least {least} records that can be used, got {count}{left_out}")
    if alike:
        tracing.warn(
            f"{len(alike)} of {count} pairs must have two different answers to teach a preference, got the same tokens "
            f"as chosen and rejected, the first: {alike[0]}"
        )
    return count, bad


def _writers(stack: ExitStack, files: CompletionFiles, overwrite: bool) -> tuple[Any, ...]:
    """tokens, labels, rewards, log_probs; leaving the stack publishes the tokens last."""
    # labels hold -100, which no unsigned dtype can
    integers = ((files.tokens, np.int32), (files.labels, np.int32))
    kinds = (*integers, (files.rewards, np.float32), (files.log_probs, np.float32))
    return tuple(
        None if name is None else stack.enter_context(IndexedWriter(name, dtype, overwrite=overwrite))
        for name, dtype in kinds
    )


class CompletionData:
    """One side's documents: `get(i)` -> tokens, labels, value, log-probabilities of document i.

    Without labels all tokens but the first count. Raises ValueError where the files differ in their documents.
    """

    def __init__(self, files: CompletionFiles) -> None:
        self.files = files
        self.tokens = IndexedData(files.tokens)
        self.sizes = self.tokens.sizes
        self.labels, self.rewards, self.log_probs = (
            None if name is None else IndexedData(name) for name in (files.labels, files.rewards, files.log_probs)
        )
        for each in (self.labels, self.log_probs):
            if each is not None and not np.array_equal(each.sizes, self.sizes):
                raise ValueError(f"{each.prefix}: must have the document lengths of {files.tokens}, got others")
        if self.rewards is not None and len(self.rewards) != len(self.tokens):
            must = f"one document for each of the {len(self.tokens)} of {files.tokens}"
            raise ValueError(f"{self.rewards.prefix}: must have {must}, got {len(self.rewards)}")

    def __len__(self) -> int:
        return len(self.tokens)

    def all(self) -> list[IndexedData]:
        """Its data sets."""
        return [each for each in (self.tokens, self.labels, self.rewards, self.log_probs) if each is not None]

    def __reduce__(self) -> tuple[Any, ...]:
        # a data worker opens the files itself: their memory maps are not sent
        return CompletionData, (self.files,)

    def get(self, document: int) -> tuple[Any, Any, float, Any]:
        tokens = self.tokens[document].astype(np.int64)
        labels = tokens.copy() if self.labels is None else self.labels[document].astype(np.int64)
        labels[labels < 0] = IGNORED
        value = 0.0 if self.rewards is None else float(self.rewards[document][0])
        log_probs = None if self.log_probs is None else self.log_probs[document].astype(np.float32)
        return tokens, labels, value, log_probs
