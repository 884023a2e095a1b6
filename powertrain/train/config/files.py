"""Checks of the files and folders of a config before a run: whether they exist, can be read and are of the
right form, by their first lines, and whether folders can be written.

Nothing here imports torch, so that a wrong path is reported within a second. Paths on the Hub are not checked here; the
run reports them.
"""

import difflib
import errno
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from powertrain.runtime.reading import one_line
from powertrain.train.config.schema import (
    CheckpointConfig,
    DataConfig,
    DataSource,
    EvaluationConfig,
    LoggingConfig,
    TrainConfig,
    size_to_train,
)
from powertrain.train.config.section import Section
from powertrain.train.config.yaml_source import KeyPath

_TEXT = "name text, jsonl, parquet, a folder of these, a .bin/.idx prefix, hf:ORG/NAME or quickstart"
_TOKENIZER = "name a tokenizer that can be read"
_PREFIX = "name a .bin/.idx prefix"
_CHECKPOINT = "name a checkpoint: a run's, or one of Hugging Face, GPT-NeoX or PEFT"
_FOLDER = "name a folder that can be written"
# of which one is in a checkpoint's folder
_MARKS = (
    "checkpoint.json", "step_*", "checkpoints/step_*", "config.json", "adapter_config.json", "latest", "global_step*",
    "layer_*", "mp_rank_*",
)  # fmt: skip
_HUB = "hf:"
_START = 1 << 12  # bytes of a text that are looked at


class Wrong(NamedTuple):
    """A key, and words that follow its name."""

    key: KeyPath
    words: str


def wrong_files(values: Mapping[str, Any], only_data: bool) -> list[Wrong]:
    """The paths in a config's sections that are wrong. A section that is not valid is passed over: its errors are the
    reader's to say.

    only_data   not what a run may begin without, as checkpoint.load
    """
    sections = {name: _section(kind, values.get(name)) for name, kind in _SECTIONS.items()}
    return list(chain.from_iterable(_found(values, sections, only_data)))


_SECTIONS: dict[str, type[Section]] = {
    "data": DataConfig, "train": TrainConfig, "checkpoint": CheckpointConfig, "evaluation": EvaluationConfig,
    "logging": LoggingConfig,
}  # fmt: skip


def _section(kind: type[Section], value: Any) -> Any:
    try:
        return kind.model_validate(value or {})
    except ValidationError:
        return None


def _found(values: Mapping[str, Any], sections: Mapping[str, Any], only_data: bool) -> Iterator[Iterator[Wrong]]:
    data, train, checkpoint, evaluation, logging = sections.values()
    if data is not None:
        # of a section with an error, which is named first, the objective is not known
        is_text = train is not None and train.objective == "pretrain"
        for part in ("train", "validation", "test"):
            is_list = isinstance(values["data"].get(part), list | tuple)
            for number, source in enumerate(getattr(data, part)):
                key = ("data", part, number) if is_list else ("data", part)
                yield _of_source(key, source, data.text_key if is_text else None)
        yield _checked(("data", "tokenizer"), _TOKENIZER, data.tokenizer, _read_tokenizer)
        yield _checked(("data", "cache_folder"), _FOLDER, data.cache_folder, _write_in)
    for name, section in (("checkpoint", checkpoint), ("logging", logging)):
        yield _checked((name, "folder"), _FOLDER, section and section.folder, _write_in)
    if train is not None:
        yield _checked(("train", "profile", "folder"), _FOLDER, train.profile.folder, _write_in)
    if only_data:
        return
    if train is not None:
        yield _checked(("train", "reference"), _CHECKPOINT, train.reference, _read_checkpoint)
        yield _checked(("train", "distill", "teacher"), _CHECKPOINT, train.distill.teacher, _read_checkpoint)
    # a run that saves where it loads begins at step 0
    if checkpoint is not None and (checkpoint.load != checkpoint.folder or checkpoint.finetune):
        yield _checked(("checkpoint", "load"), _CHECKPOINT, checkpoint.load, _read_checkpoint)
    yield _checked(
        ("evaluation", "tasks_folder"), "name a folder of YAML files", evaluation and evaluation.tasks_folder,
        _read_tasks,
    )  # fmt: skip


def _checked(key: KeyPath, must: str, path: str | None, read: Callable[[str], None]) -> Iterator[Wrong]:
    if path is None:
        return
    try:
        read(path)
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, OSError) and error.strerror:
            yield Wrong(key, f" must {must}, got {error.filename or path} ({error.strerror})")
        else:
            # of a file's content the reader's words say what must be
            yield Wrong(key, f": {one_line(error)}")


def _of_source(key: KeyPath, source: DataSource, text_key: str | None) -> Iterator[Wrong]:
    wrong = [*_checked(key, _TEXT, source.path, lambda path: _read_text(path, text_key))]
    yield from wrong or _checked(key, "", source.path, lambda _: _refuse_unused(source))
    for name in ("labels", "rejected", "rejected_labels", "rewards", "log_probs"):
        yield from _checked((*key, name), _PREFIX, getattr(source, name), _read_indexed)


def _read_text(path: str, text_key: str | None) -> None:
    """text_key   of the first record of jsonl; None: records are of another form"""
    from powertrain.train.data import corpus
    from powertrain.train.data.sources import QUICKSTART, prefix_of

    if path == QUICKSTART or path.startswith(_HUB):
        return
    prefix = prefix_of(path)
    if prefix is not None:
        _read_indexed(prefix)
        return
    _there(path)
    files = corpus.find_files([path])
    corpus.refuse_pipes(files, "a run looks for its tokens in the cache, then tokenizes it")
    first = files[0]
    with first.open("rb") as file:
        start = file.read(_START)
    if first.suffix.lower() == ".parquet":
        if not start.startswith(b"PAR1"):
            raise ValueError(f"{first} must be parquet, which begins with PAR1, got {start[:4]!r}")
    elif corpus.is_lines(first):
        raw = next(corpus.raw_documents([first]), None)
        if raw is not None and text_key is not None:
            corpus.document_of(raw, text_key)
    elif b"\0" in start and Path(path).is_file():
        raise ValueError(f"{first} must be UTF-8 text, got a file with bytes of 0{corpus.other_kind(start)}")
    elif text_key is not None:
        corpus.warn_of_records(first, start)


def _refuse_unused(source: DataSource) -> None:
    from powertrain.train.data.sources import refuse_unused

    refuse_unused(source)


def _read_indexed(prefix: str) -> None:
    from powertrain.train.data.indexed import IndexedData

    IndexedData(prefix.removesuffix(".bin").removesuffix(".idx"))


def is_local(tokenizer: str) -> bool:
    """Whether a tokenizer is read from a file here: not on the Hub, not yet to be trained, not by transformers, which
    takes seconds to be imported."""
    by_transformers = tokenizer.startswith(_HUB) or (Path(tokenizer) / "tokenizer_config.json").is_file()
    return size_to_train(tokenizer) is None and not by_transformers


def _read_tokenizer(name: str) -> None:
    from powertrain.train.data.tokenizer import load_tokenizer

    if is_local(name):
        load_tokenizer(name)


def _read_checkpoint(path: str) -> None:
    _there(path)
    # a folder that cannot be read has no names for glob
    names = [*Path(path).iterdir()]
    if not any(next(Path(path).glob(mark), None) for mark in _MARKS):
        found = f"{len(names)} other files" if names else "an empty folder"
        raise ValueError(f"{path} must hold a checkpoint of a run, of Hugging Face, GPT-NeoX or PEFT, got {found}")


def _read_tasks(path: str) -> None:
    _there(path)
    [*Path(path).iterdir()]
    check_tasks(Path(path))


def check_tasks(folder: Path) -> None:
    """Raise ValueError for a YAML file of the folder that is broken: lm_eval passes over it without a word."""
    for file in sorted(folder.rglob("*.yaml")):
        if ".ipynb_checkpoints" in file.parts:
            continue
        try:
            # no values are made of it, so tags such as !function may stand there
            node = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} must be UTF-8 text, got byte {error.start} ({error.reason})") from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = f":{mark.line + 1}" if mark else ""
            raise ValueError(f"{file}{line} must be YAML, got {error.problem or error.context}") from None
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"{file} must be YAML, got {one_line(error)}") from None
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{file} must hold keys and values of a task, got {'none' if node is None else node.tag}")
        for included in _included(node):
            if not (file.parent / included).is_file():
                raise ValueError(f"{file}: include must name a file, got {included}, which is not there")


def _included(node: yaml.MappingNode) -> list[str]:
    given = [value for key, value in node.value if key.value == "include"]
    return [each.value for value in given for each in (value.value if isinstance(value.value, list) else [value])]


def _write_in(path: str) -> None:
    """The folder itself, or the nearest one above it, in which it would be made."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        if folder.is_symlink():
            _there(str(folder))
        folder = folder.parent
    try:
        # leaves nothing. Not os.access: it knows nothing of a file system that is read-only to root
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None


def _there(path: str) -> None:
    """Raises FileNotFoundError with the nearest name beside it."""
    file = Path(path)
    if file.exists():
        return
    if file.is_symlink():
        raise OSError(errno.ENOENT, f"a link to {file.readlink()}, which is not there", path)
    beside: Sequence[str] = ()
    with suppress(OSError):
        beside = [other.name for other in file.parent.iterdir()]
    near = difflib.get_close_matches(file.name, beside, 1)
    hint = f"; did you mean {file.with_name(near[0])}?" if near else ""
    raise OSError(errno.ENOENT, f"no such file or folder{hint}", path)
