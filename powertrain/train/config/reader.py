"""Config files to a typed run: ours, or GPT-NeoX's as they are, with a table of every key's disposition."""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ValidationError

from powertrain.models.config import ModelConfig, as_yaml
from powertrain.models.registry import configure
from powertrain.train.config.schema import RunConfig
from powertrain.train.config.table import Row
from powertrain.train.config.yaml_source import (
    COMMAND_LINE,
    ConfigError,
    KeyPath,
    Location,
    Source,
    merge,
    nearest,
    parse_files,
)

Format = Literal["powertrain", "gpt_neox"]
Files = Literal["any", "data", "all"]


class WrongFiles(ConfigError):
    """Files that a config names are missing or have the wrong format."""


@dataclass(frozen=True)
class Run:
    """A config that was read, with its table of keys and its sources.

    table       a Row for every key that was set, and for defaults of GPT-NeoX that matter
    note        one line: which format it was, and why
    texts       base name -> text of each file as it was, to be saved beside checkpoints
    overrides   the command line's key=value words
    """

    config: RunConfig
    table: tuple[Row, ...]
    format: Format
    note: str
    texts: dict[str, str]
    overrides: tuple[str, ...] = ()


def read_config(
    paths: Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    world_size: int = 1,
    strict: bool = False,
    format: Format | None = None,
    files: Files = "any",
) -> Run:
    """Read and merge config files, apply `key=value` overrides, and check everything.

    paths        YAML or JSON files; "small" finds small.yml, as GPT-NeoX does; "quickstart" is a config of ours
    overrides    "train.steps=100" for ours, "train_iters=100" or "optimizer.params.lr=1e-3" for GPT-NeoX's
    world_size   ranks of the run: GPT-NeoX's batch arithmetic and sharding need it
    strict       a key that would be ignored is an error
    format       None: by content, ours has a section `model:`, `train:` or `data:`
    files        "data", "all": the data and tokenizer, or all files that the config names, must be there
                 (config/files.py); "any": they may be on another machine
    Raises ConfigError naming file:line or the command line, key, expected and given value; UnsupportedConfig,
    a NotImplementedError too, where a config asks for something that is not there and would change the result.
    """
    if isinstance(paths, (str, Path)):
        raise ConfigError(f"paths must be a list of config files, got {str(paths)!r}")
    if not paths:
        raise ConfigError("config: at least one file must be given, got none")
    _check_overrides(overrides)
    if world_size < 1:
        raise ConfigError(f"world_size must be at least 1, got {world_size}")
    if format not in (None, *get_args(Format)):
        raise ConfigError(f"format must be one of {', '.join(get_args(Format))}, got {format!r}")
    documents = parse_files([_found(Path(path)) for path in paths])
    section = next((name for name in _SECTIONS if any(name in document.values for document in documents)), None)
    reason = "given" if format else f"it has the section `{section}:`" if section else "no section `model:`"
    kind: Format = format or ("powertrain" if section else "gpt_neox")
    source = merge(documents, ours=kind == "powertrain")
    for override in overrides:
        # overrides come last: the command line wins over every file
        source.override(override)
    config, table = _ours(source, files) if kind == "powertrain" else _theirs(source, world_size, files)
    if config.logging.folder is None and config.checkpoint.folder is None:
        # runs of different files do not meet in one folder, where each would find the other's checkpoints
        if not _found(Path(paths[0])).is_file() or Path(paths[0]).parts[:2] == ("/", "dev"):
            keys = "logging.folder" if kind == "powertrain" else "save (the run's folder)"
            raise ConfigError(f"{keys} must be given where the config is no file that has a name, got {paths[0]}")
        folder = f"runs/{Path(paths[0]).stem}"
        config = config.model_copy(update={"logging": config.logging.model_copy(update={"folder": folder})})
    if strict:
        _refuse_ignored(table)
    # the other reading is named, for a file may be taken for the wrong kind
    other = "gpt_neox" if kind == "powertrain" else "powertrain"
    note = f"{_NAMES[kind]} config ({reason}); --format {other} reads it as the other kind"
    return Run(config, table, kind, note, source.texts, tuple(overrides))


def run_of(config: RunConfig | Mapping[str, Any], overrides: Sequence[str] = ()) -> Run:
    """The run of a config made in Python: a RunConfig, or a dictionary with its sections.

    Raises ConfigError naming the key, the expected and the given value.
    """
    _check_overrides(overrides)
    if isinstance(config, RunConfig):
        if overrides:
            raise ConfigError(f"overrides must be empty for a RunConfig (model_copy makes another), got {overrides!r}")
        if words := _contradiction(config):
            raise ConfigError(words)
        # a RunConfig was validated when it was made
        return Run(config, (), "powertrain", "a RunConfig", {})
    if not isinstance(config, Mapping):
        got = type(config).__name__
        raise ConfigError(f"config must be a path, a dictionary with the section `model`, or a RunConfig, got {got}")
    # overrides are laid into it, and the dictionary is the caller's
    source = Source(values=copy.deepcopy(dict(config)))
    for override in overrides:
        source.override(override)
    validated, table = _ours(source)
    return Run(validated, table, "powertrain", "a dictionary", {}, tuple(overrides))


def _check_overrides(overrides: Sequence[str]) -> None:
    # one text would be taken letter by letter
    if isinstance(overrides, str) or not isinstance(overrides, Sequence):
        raise ConfigError(f"overrides must be a list of key=value words, got {overrides!r}")
    for word in overrides:
        if not isinstance(word, str):
            raise ConfigError(f"overrides must be key=value words, got {word!r}")


# that only our configs have; the model may be on the command line
_SECTIONS = ("model", "train", "data")
_NAMES = {"powertrain": "Powertrain", "gpt_neox": "GPT-NeoX"}


QUICKSTART = "quickstart"


def _found(path: Path) -> Path:
    """The file of a name: `small` is small.yml, as in GPT-NeoX; `quickstart` is our own where no such file is here."""
    with_suffix = path.with_name(path.name + ".yml") if path.name else path
    # a folder of that name is not a config
    if path.exists() and not path.is_dir():
        return path
    if with_suffix.exists():
        return with_suffix
    return Path(__file__).parents[1] / "quickstart.yml" if str(path) == QUICKSTART else path


def _theirs(source: Source, world_size: int, files: Files) -> tuple[RunConfig, tuple[Row, ...]]:
    from powertrain.train.config.neox import translate

    # two section names exist in both formats
    ours = sorted(source.values.keys() & RunConfig.model_fields.keys() - {"optimizer", "checkpoint"})
    try:
        values, table, origins = translate(source, world_size)
    except ConfigError as error:
        if not ours:
            raise
        missing = "leave out --format gpt_neox" if "model" in ours else "one must have the section model:"
        hint = f"\n(section {ours[0]}: looks like a Powertrain config; {missing})"
        raise type(error)(str(error) + hint) from None
    translated = Source(locations=source.locations, texts=source.texts, origins=origins)
    return _validated(values, translated, files), table


def _ours(source: Source, files: Files = "any") -> tuple[RunConfig, tuple[Row, ...]]:
    config = _validated(source.values, source, files)
    rows = (Row(".".join(map(str, path)), value, str(source.location(path)), "honoured", "")
            for path, value in _leaves(source.values, ()))  # fmt: skip
    return config, tuple(rows)


def _leaves(value: Any, path: KeyPath) -> Iterable[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _validated(values: dict[str, Any], source: Source, files: Files) -> RunConfig:
    """The RunConfig of these values, the model apart: its schema is its architecture's."""
    # before the model's schema, which needs torch
    if files != "any":
        _refuse_wrong_files(values, source, files)
    lines: list[str] = []
    values = dict(values)
    # the model's schema depends on its own values, so it is validated apart
    try:
        values["model"] = _model(values.get("model"), source)
    except ValidationError as error:
        lines += _lines(error, source, ("model",), values)
        values["model"] = _STAND_IN
    except ValueError as error:
        lines.append(f"{_place(str(error), ('model',), source)}: {error}")
        values["model"] = _STAND_IN
    try:
        config = _retyped(values, source)
    except ValidationError as error:
        lines += _lines(error, source, (), values)
    if not lines and (words := _contradiction(config)):
        lines.append(f"{_place(words, ('train',), source)}: {words}")
    if lines:
        raise ConfigError("\n".join(lines))
    return config


def _refuse_wrong_files(values: dict[str, Any], source: Source, files: Files) -> None:
    from powertrain.train.config.files import wrong_files

    wrong = wrong_files(values, only_data=files == "data")
    lines = [f"{source.location(path)}: {_named(path, source)}{words}" for path, words in wrong]
    if lines:
        raise WrongFiles("\n".join(lines))


def _named(path: KeyPath, source: Source) -> str:
    """The key, behind that of another format which set it, or the list that it is in."""
    key = ".".join(map(str, path)) or "config"
    origin = source.origins.get(path) or source.origins.get(path[:-1])
    return f"{origin} ({key})" if origin else key


def _contradiction(config: RunConfig) -> str:
    """The error for settings that exclude one another. Not in the schema, which also reads configs of checkpoints."""
    profile, steps = config.train.profile, config.train.steps
    if profile.steps and profile.start > steps:
        return f"train.profile.start must be at most train.steps ({steps}), got {profile.start}"
    # GPT-NeoX's formulas take the larger of the two, as there
    lr, schedule = config.optimizer.lr, config.schedule
    if schedule.clamp == "safe" and schedule.min_lr > lr:
        return f"schedule.min_lr must be at most optimizer.lr ({lr:g}), got {schedule.min_lr:g}"
    return ""


# keeps the other sections' errors coming when the model's own is already known; the longest that the schema allows, so
# that none is about the model
_STAND_IN: Any = ModelConfig.model_construct(architecture="", max_position_embeddings=1 << 24)


def _model(value: Any, source: Source) -> ModelConfig:
    if isinstance(value, str):
        value = {"preset": value}
    if not isinstance(value, dict):
        got = "nothing" if value is None else repr(value)
        raise ValueError(f"model must be a section or the name of a preset, got {got}")
    for key in ("preset", "architecture"):
        if not isinstance(value.get(key, ""), str):
            raise ValueError(f"model.{key} must be a name, got {value[key]!r}")
    return configure(**value)


def _retyped(values: dict[str, Any], source: Source) -> RunConfig:
    """Validated; a command-line value that should be text is taken as it was typed (`checkpoint.folder=2024`)."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        # pydantic says which fields wanted text
        text = {tuple(e["loc"]) for e in error.errors() if e["type"] == "string_type"} & source.typed.keys()
        if not text:
            raise
    for path in text:
        values = _replaced(values, path, source.typed[path])
    return RunConfig.model_validate(values)


def _replaced(values: dict[str, Any], path: KeyPath, value: Any) -> dict[str, Any]:
    key, *rest = path
    return {**values, str(key): _replaced(values[str(key)], tuple(rest), value) if rest else value}


def _lines(error: ValidationError, source: Source, above: KeyPath, values: dict[str, Any]) -> list[str]:
    """Each of pydantic's errors as `place: key must ..., got ...`."""
    lines = []
    for problem in error.errors():
        # a list whose entries are wrong has none left in pydantic's eyes; the entries' own errors say it
        if problem["type"] == "too_short" and problem["input"]:
            continue
        path = (*above, *problem["loc"])
        words = _wording(problem, path, source, values)
        ours = problem["type"] == "value_error"
        lines.append(f"{_place(words, path, source) if ours else source.location(path)}: {words}")
    return lines


def _place(words: str, path: KeyPath, source: Source) -> Location:
    """Where the key stands that our own words about `path` name: a section's check is of several keys, of which some
    may be defaults. The command line's comes first: it was the last to be changed."""
    names = re.findall(r"[A-Za-z_]+(?:\.\w+)*", words)
    keys = [tuple(name.split(".")) if "." in name else (*path, name) for name in names]
    known = source.locations.keys() | source.origins.keys()
    locations = [source.location(key) for key in keys if len(key) > 1 and key in known]
    return COMMAND_LINE if COMMAND_LINE in locations else [*locations, source.location(path)][0]


# pydantic names Python's types here, and its reader writes YAML
_YAML = {
    "tuple_type": "be a list, such as [a, b]",
    "list_type": "be a list, such as [a, b]",
    "dict_type": "be a section, such as {key: value}",
    "model_type": "be a section, such as {key: value}",
    "model_attributes_type": "be a section, such as {key: value}",
    "string_type": "be text (in quotes where it looks like a number)",
    "too_short": "hold at least one entry",
    **dict.fromkeys(("bool_type", "bool_parsing"), "be true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "be a number"),
}


def _wording(problem: Any, path: KeyPath, source: Source, values: dict[str, Any]) -> str:
    key = _named(path, source)
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown key{nearest(str(path[-1]), _fields(path[:-1], values))}"
    if problem["type"] == "missing":
        return f"{key} must be given"
    if problem["type"] == "value_error":
        # our own validators' words name the key already
        return str(problem["msg"]).removeprefix("Value error, ")
    message = str(problem["msg"])
    # pydantic's sentence without its subject
    must = message.removeprefix("Input should ") if message.startswith("Input should ") else f"be right: {message}"
    must = _YAML.get(str(problem["type"]), must)
    if problem["type"] == "too_long":
        must = f"hold at most {problem['ctx']['max_length']} entries"
    given = problem["input"]
    # a section whose keys are all commented out is null to YAML
    got = "nothing" if given is None else as_yaml(given) if isinstance(given, bool) else repr(as_yaml(given)[:80])
    return f"{key} must {must}, got {got}"


def _fields(path: KeyPath, values: dict[str, Any]) -> Iterable[str]:
    """The keys that a section has."""
    if path[:1] == ("model",):
        return _model_fields(values.get("model"))
    schema: Any = RunConfig
    for key in path:
        if isinstance(key, int):
            # an index is a list's: its element type is the schema
            schema = next((a for a in get_args(schema) if a is not ...), None)
        else:
            field = schema.model_fields.get(key) if _is_section(schema) else None
            schema = field.annotation if field else None
    return schema.model_fields if _is_section(schema) else ()


def _is_section(schema: Any) -> bool:
    return isinstance(schema, type) and issubclass(schema, BaseModel)


def _model_fields(model: Any) -> Iterable[str]:
    from powertrain.models.registry import architecture, presets

    # an unknown architecture was refused before
    name = model.get("architecture") or presets().get(model.get("preset"), ("",))[0]
    return [*architecture(name).Config.model_fields, "preset"]


def _refuse_ignored(table: tuple[Row, ...]) -> None:
    # an ignored default is no mistake of the user
    ignored = [row for row in table if row.disposition == "ignored" and row.place != "default"]
    if ignored:
        lines = [f"{row.place}: {row.key} would be ignored (--strict): {row.explanation}" for row in ignored]
        raise ConfigError("\n".join(lines))
