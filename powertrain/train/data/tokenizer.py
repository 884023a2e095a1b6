"""Tokenizers: text to ids and back, loaded from common file formats or trained here, by Hugging Face's `tokenizers`.

load_tokenizer(...) takes
    "bytes"                          one id for each byte of UTF-8: 256 ids, 0 ends a document
    "CharLevelTokenizer"             the same with GPT-NeoX's 512 ids
    "hf:ORG/NAME"                    the Hub's, through transformers
    tokenizer.json, or a folder      Hugging Face; a folder may hold vocab.json and merges.txt instead
    tokenizer.model, or "spm:FILE"   SentencePiece; its text needs the package `sentencepiece`
    "gpt2:VOCAB.json:MERGES.txt"     GPT-2's byte-level BPE, as GPT-NeoX's GPT2BPETokenizer

Ids equal GPT-NeoX's from the same files: a tokenizer.json's own post-processor applies (some add a first token);
with GPT-2's files no text stands for a special token.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from powertrain.runtime import tracing
from powertrain.runtime.atomic_file import AtomicFile
from powertrain.runtime.extras import require
from powertrain.runtime.reading import MOST_JSON_BYTES, one_line, reading
from powertrain.train.data.sentencepiece_model import SentencePieceTokenizer

END_OF_TEXT = "<|endoftext|>"
_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>")
_TEMPLATE, _TOKENIZER_CONFIG, _SENTENCEPIECE = "chat_template.jinja", "tokenizer_config.json", "tokenizer.model"
# what transformers reads beside a tokenizer.json
_BESIDE = (_TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", _TEMPLATE)
# names of the files that a tokenizer is kept in
FILES = ("tokenizer.json", *_BESIDE, _SENTENCEPIECE)


class Tokenizer(Protocol):
    """vocab_size: ids are below it, before padding; eod: the id that ends a document, or None if the files name none.

    identity: a hash of everything that decides the ids, for names of cached files.
    """

    vocab_size: int
    eod: int | None
    identity: str

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ChatRefused(ValueError):
    """The chat template raised an error for these messages."""


class ByteTokenizer:
    """One id for each byte of UTF-8; 0 ends a document."""

    eod: int | None = 0

    def __init__(self, vocab_size: int = 256) -> None:
        self.vocab_size = vocab_size
        self.identity = f"bytes{vocab_size}"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        raise ValueError("data.tokenizer must have a chat template for messages, got bytes")

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8, and ids past 255, become U+FFFD."""
        # a model with a padded vocabulary can sample ids that no byte has
        return b"".join(bytes([i]) if 0 <= i < 256 else "\ufffd".encode() for i in ids).decode(errors="replace")


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, from the JSON text that describes it.

    chat     a folder or Hub id from which transformers reads the chat template; None: there is none
    source   the folder or Hub id that the definition is from, with the other files of the tokenizer
    """

    def __init__(
        self, definition: str, where: str, eod: str | None = None, chat: str | None = None, source: str | None = None
    ) -> None:
        import tokenizers

        with reading(f"{where}:", "be a tokenizer.json of Hugging Face tokenizers"):
            self.backend = tokenizers.Tokenizer.from_str(definition)
        self.vocab_size: int = self.backend.get_vocab_size()
        # files of the library do not say which token ends a document; these are the names in use
        self.eod: int | None = self._first_known([eod] if eod else _ENDS)
        # of the content: a file that moves keeps its cache, one that changes does not
        self.identity = hashlib.blake2b(definition.encode(), digest_size=16).hexdigest()
        # not in the definition
        if self.eod is not None and self._first_known(_ENDS) is None:
            self.identity += f"-end{self.eod}"
        if chat is not None:
            self.identity += _chat_identity(chat)
        self._definition, self._where, self._eod, self._chat, self._source = definition, where, eod, chat, source

    def _first_known(self, names: Iterable[str]) -> int | None:
        return next((i for i in map(self.backend.token_to_id, names) if i is not None), None)

    def __reduce__(self) -> tuple[Any, ...]:
        # the JSON text is pickled, not the library's object: workers on any start method rebuild the same one
        return FileTokenizer, (self._definition, self._where, self._eod, self._chat, self._source)

    def encode(self, text: str) -> list[int]:
        with reading(f"{self._where}:", "be a tokenizer that encodes text"):
            ids: list[int] = self.backend.encode(text).ids
        return ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """As `encode` of each, on all cores."""
        with reading(f"{self._where}:", "be a tokenizer that encodes text"):
            # the fast variant computes no character offsets, which are not used here
            return [encoding.ids for encoding in self.backend.encode_batch_fast(texts)]

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """The ids of a chat's messages through the chat template. Raises ValueError where there is none.

        add_generation_prompt   what the template writes before an answer of the assistant follows
        tools                   JSON schemas of tools, for the template
        """
        # return_dict=False, since transformers 5 returns a dictionary by default
        ids: list[int] = self._rendered(messages, add_generation_prompt, tools, tokenize=True, return_dict=False)
        return ids

    def chat_text(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The text that `encode_chat` tokenizes."""
        text: str = self._rendered(messages, add_generation_prompt, tools, tokenize=False)
        return text

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of a part of a chat's text."""
        ids: list[int] = _transformers(str(self._chat))(text, add_special_tokens=False).input_ids
        return ids

    def _rendered(
        self, messages: list[dict[str, Any]], prompted: bool, tools: list[dict[str, Any]] | None, **options: bool
    ) -> Any:
        if self._chat is None:
            raise ValueError(f"{self._where}: must have a chat template (tokenizer_config.json) for messages")
        # a row of parquet has every key that any message has, as null; templates ask whether a key is there
        messages = [{k: v for k, v in m.items() if v is not None or k == "content"} for m in messages]
        try:
            return _transformers(self._chat).apply_chat_template(
                messages, add_generation_prompt=prompted, tools=tools or None, **options
            )
        except Exception as error:  # a template raises what it likes
            raise ChatRefused(f"{self._where}: the chat template refuses these messages: {one_line(error)}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens are kept, so the text shows the model's exact output."""
        with reading(f"{self._where}:", "be a tokenizer that decodes its ids"):
            # the library's default drops them, and a model that emits stray special tokens would look fine
            text: str = self.backend.decode(list(ids), skip_special_tokens=False)
        return text

    def save(self, path: Path) -> None:
        """Write tokenizer.json; it appears whole or not at all."""
        new = AtomicFile(path)
        try:
            new.write(self.backend.to_str().encode())
            new.publish()
        finally:
            new.discard()

    def save_with_files(self, folder: Path) -> None:
        """`save` to FOLDER/tokenizer.json, with the other files of its source: special tokens, chat template."""
        if self._source is not None and Path(self._source).is_dir():
            copy_files(Path(self._source), folder)
        elif self._source is not None:
            _transformers(self._source).save_pretrained(folder)
        self.save(folder / "tokenizer.json")

    def special_ids(self) -> dict[str, int | None]:
        """The ids of bos_token, eos_token and pad_token as its source declares them; None: it does not."""
        source, found = self._source, {}
        for name in _SPECIAL if source is not None else ():
            if Path(str(source)).is_dir():
                token = _declared(Path(str(source)) / _TOKENIZER_CONFIG, name)
            else:
                token = getattr(_transformers(str(source)), name, None)
            found[name] = None if token is None else self.backend.token_to_id(token)
        return found


def copy_files(source: Path, folder: Path) -> None:
    """The files that transformers reads beside a tokenizer.json: special tokens and chat templates."""
    for name in _BESIDE:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    # templates that are chosen by name
    for file in sorted((source / _NAMED_TEMPLATES).glob("*.jinja")):
        (folder / _NAMED_TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(file, folder / _NAMED_TEMPLATES / file.name)


def write_files(tokenizer: Tokenizer, folder: Path) -> None:
    """The files that `tokenizer_in` finds in a folder; none of a tokenizer that counts bytes."""
    if isinstance(tokenizer, FileTokenizer):
        tokenizer.save_with_files(folder)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        shutil.copyfile(tokenizer.path, folder / _SENTENCEPIECE)


def tokenizer_in(folder: Path) -> str | None:
    """The name of a folder's tokenizer, for `load_tokenizer`; None: it has none that is read here."""
    if (folder / "tokenizer.json").is_file() or all((folder / name).is_file() for name in ("vocab.json", "merges.txt")):
        return str(folder)
    # beside tokenizer_config.json it is one of transformers, which changes the text first
    file = folder / _SENTENCEPIECE
    return str(file) if file.is_file() and not (folder / _TOKENIZER_CONFIG).is_file() else None


def kept_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """The contents of `write_files`, by name, for a checkpoint that is read where its run's text and folders are not.

    Empty where a folder with them would be another tokenizer: a Hub id's files do not always say what ends a document;
    and of one with several chat templates, which are in a folder of their own.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="powertrain-") as name:
            folder = Path(name)
            write_files(tokenizer, folder)
            again = tokenizer_in(folder)
            has_several = (folder / _NAMED_TEMPLATES).exists()
            if again is None or has_several or _facts(load_tokenizer(again)) != _facts(tokenizer):
                return {}
            return {file: (folder / file).read_bytes() for file in FILES if (folder / file).is_file()}
    except (OSError, ValueError) as error:
        tracing.warn(f"data.tokenizer is not kept in the checkpoints: {one_line(error)}")
        return {}


def _facts(tokenizer: Tokenizer) -> tuple[int, int | None, bool]:
    return tokenizer.vocab_size, tokenizer.eod, getattr(tokenizer, "_chat", None) is not None


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `name` stands for; the module's docstring lists the forms.

    Raises FileNotFoundError naming the file, ValueError if it is no tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "CharLevelTokenizer":
        return ByteTokenizer(512)
    if name.startswith("gpt2:"):
        parts = name.split(":")
        # a path with a colon would split wrongly, so it is refused and not guessed
        if len(parts) != 3:
            raise ValueError(f"tokenizer must be gpt2:VOCAB.json:MERGES.txt, got {name!r}")
        return _gpt2(Path(parts[1]), Path(parts[2]))
    if name.startswith("hf:"):
        return _from_transformers(name.removeprefix("hf:"), name)
    # the prefix is for SentencePiece files whose name does not end in .model
    path = Path(name.removeprefix("spm:"))
    if path.is_dir():
        if (
            not any((path / file).is_file() for file in ("tokenizer.json", "vocab.json"))
            and (path / "tokenizer_config.json").is_file()
        ):
            return _from_transformers(str(path), name)
        if not (path / "tokenizer.json").is_file() and (path / "vocab.json").is_file():
            return _gpt2(path / "vocab.json", path / "merges.txt")
        path /= "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer: no such file {path}; it must be tokenizer.json, a folder with one (or with vocab.json and "
            f"merges.txt), gpt2:VOCAB.json:MERGES.txt or bytes, got {name!r}"
        )
    if path.suffix == ".model" or name.startswith("spm:"):
        return SentencePieceTokenizer(path)
    # tokenizer.json has no chat template: it is in files beside it
    chat = str(path.parent) if _has_chat_template(path.parent) else None
    beside = str(path.parent)
    found = FileTokenizer(_text(path), str(path), chat=chat, source=beside)
    # none of the usual names: without an end token documents would run into each other, and no model learn to stop
    end = _end_beside(path) if found.eod is None else None
    return found if end is None else FileTokenizer(_text(path), str(path), end, chat, beside)


def _end_beside(path: Path) -> str | None:
    """eos_token of the tokenizer_config.json beside a tokenizer.json; None: there is none."""
    return _declared(path.with_name(_TOKENIZER_CONFIG), "eos_token")


def _declared(config: Path, name: str) -> str | None:
    """A special token of a tokenizer_config.json; None: it has none, or is not there."""
    if not config.is_file():
        return None
    with reading(f"{config}:", "be a tokenizer_config.json of transformers"):
        token = json.loads(_text(config)).get(name)
    # an AddedToken is an object
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _from_transformers(source: str, name: str) -> FileTokenizer:
    """The tokenizer that transformers finds at a Hub id or in a folder, converted if need be."""
    loaded = _transformers(source)
    # slow tokenizers are Python code of their own, which the `tokenizers` library cannot run
    if not getattr(loaded, "is_fast", False):
        raise ValueError(f"{name}: must be a tokenizer with a fast form, got {type(loaded).__name__}")
    chat = source if loaded.chat_template else None
    return FileTokenizer(loaded.backend_tokenizer.to_str(), name, loaded.eos_token, chat, source)


@cache
def _transformers(source: str) -> Any:
    require("data", f"tokenizer {source}")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        words = f"tokenizer {source}: cannot be read: {one_line(error)}"
        # a Hub that cannot be reached, or has no such tokenizer
        is_missing = isinstance(error, OSError) and not Path(source).is_dir()
        raise (FileNotFoundError if is_missing else ValueError)(words) from None


_SPECIAL = ("bos_token", "eos_token", "pad_token")
_NAMED_TEMPLATES = "additional_chat_templates"


def _has_chat_template(folder: Path) -> bool:
    config = folder / _TOKENIZER_CONFIG
    return (folder / _TEMPLATE).is_file() or (config.is_file() and '"chat_template"' in _text(config))


def _chat_identity(source: str) -> str:
    """A hash of the chat template's files; of a Hub id its template."""
    files = [Path(source) / name for name in (_TEMPLATE, _TOKENIZER_CONFIG)]
    # another template gives other ids for the same chat, so it is part of a cached file's name
    texts = [_text(file) for file in files if file.is_file()] or [str(_transformers(source).chat_template)]
    return hashlib.blake2b("".join(texts).encode(), digest_size=8).hexdigest()


def _text(path: Path) -> str:
    if (size := path.stat().st_size) > MOST_JSON_BYTES:
        raise ValueError(f"{path}: must have at most {MOST_JSON_BYTES} bytes, got {size}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be UTF-8 text, got {error}") from None


def _gpt2(vocab: Path, merges: Path) -> FileTokenizer:
    import tokenizers

    for path in (vocab, merges):
        if not path.is_file():
            raise FileNotFoundError(f"tokenizer: no such file {path}")
    with reading(f"{vocab}, {merges}:", "be GPT-2's vocabulary and merges"):
        model = tokenizers.models.BPE.from_file(str(vocab), str(merges))
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return FileTokenizer(backend.to_str(), f"{vocab}, {merges}", eod=END_OF_TEXT, source=str(vocab.parent))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> FileTokenizer:
    """A byte-level BPE of at most `vocab_size` ids, trained on `texts`; id 0 is <|endoftext|>.

    Any text encodes, and decodes to itself. The same texts give the same tokenizer. Small corpora may have fewer than
    `vocab_size` - 257 pairs worth merging; then the vocabulary is smaller.
    """
    import tokenizers

    if vocab_size < 257:
        raise ValueError(f"vocab_size must be at least 257 (the bytes and {END_OF_TEXT}), got {vocab_size}")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    # all 256 bytes are in the alphabet from the beginning, so text unlike the corpus still encodes
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_batches(texts), trainer)
    return FileTokenizer(backend.to_str(), "the trained tokenizer", eod=END_OF_TEXT)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        # batches let the library work on all cores between two calls into Python
        if len(batch) == 256:
            yield batch
            batch = []
    yield batch


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> str:
    """Keep a tokenizer in a folder; returns the name under which `load_tokenizer` finds it again, from anywhere."""
    if isinstance(tokenizer, ByteTokenizer):
        return "CharLevelTokenizer" if tokenizer.vocab_size == 512 else "bytes"
    if not isinstance(tokenizer, FileTokenizer):
        raise ValueError(f"tokenizer must come from load_tokenizer or train_tokenizer, got {type(tokenizer).__name__}")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / "tokenizer.json")
    return str((folder / "tokenizer.json").resolve())


def padded_vocab_size(vocab_size: int, multiple: int, tensor_parallel: int = 1) -> int:
    """`vocab_size` rounded up to a multiple of `multiple` times the tensor-parallel degree, as GPT-NeoX pads it."""
    step = multiple * tensor_parallel
    return -(-vocab_size // step) * step
