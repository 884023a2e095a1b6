"""Parser of YAML files that records the file and line of every key, for reader.py.

GPT-NeoX's files are read as they are: JSON-like braces, trailing commas, comments, True and False, `-` for `_` in keys.
Beyond PyYAML's SafeLoader: of a key given twice the last counts and the first is noted (`repeated`), 1e-3 is a
number (YAML 1.1 reads a string), dates stay strings.
"""

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

KeyPath = tuple[str | int, ...]  # ("optimizer", "betas", 0)
# a "billion laughs" file of aliases is small until it is expanded
_MAX_NODES = 100_000  # limit for a file expanded by aliases


_MOST_BYTES = 1 << 20  # of a file
# of a number: YAML 1.1's 1:30:00 takes time that grows with the square of its length
_MOST_DIGITS = 100
# an error fits on a screen: rows, characters in each, and of one line
_ROWS, _ROW, _MOST_LINE = 20, 100, 800


class ConfigError(ValueError):
    """A config cannot be read; each line names file:line or the command line, key, expectation and value."""

    def __init__(self, message: str) -> None:
        lines, shown, rows = message.splitlines(), [], 0
        # long values are cut, so that the errors of other keys stay on the screen
        for line in lines:
            shown.append(line if len(line) <= _MOST_LINE else f"{line[:_MOST_LINE]} …")
            rows += 1 + len(shown[-1]) // _ROW
            if rows >= _ROWS and len(shown) < len(lines):
                shown.append(f"… and {len(lines) - len(shown)} more")
                break
        super().__init__("\n".join(shown))


# both: callers that ask for NotImplementedError see that it is not a mistake
class UnsupportedConfig(ConfigError, NotImplementedError):
    """A config requests an unsupported feature that would change the result; the message names the alternative."""


@dataclass(frozen=True)
class Location:
    """Location of a key. `str()` is "file.yml:12", "command line" or "default"."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class Repeated(NamedTuple):
    """A key that one file has twice."""

    path: KeyPath
    first: Location
    last: Location


COMMAND_LINE = Location("command line")
DEFAULT = Location("default")
DICTIONARY = "config"  # in place of a file's name: the argument of `train(config)`


_COMMENT = re.compile(r"(?:^|\s)#")


@dataclass
class Source:
    """Values of one or more files, where each stands, and the files' text.

    values   nested plain values
    locations   path of keys -> where; a path without one stands where its nearest parent does
    texts    base name of each file -> its text as it is, for saving beside checkpoints
    typed    command-line values as they were typed, for fields that are strings
    origins  path in the values -> the key of another format that set it
    repeated keys that a file has twice; the last counts
    """

    values: dict[str, Any] = field(default_factory=dict)
    locations: dict[KeyPath, Location] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    typed: dict[KeyPath, str] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    repeated: list[Repeated] = field(default_factory=list)

    def location(self, path: KeyPath) -> Location:
        # a value without a place of its own (a list's element) stands where its parent does
        while path and path not in self.locations and path not in self.origins:
            path = path[:-1]
        path = tuple(self.origins[path].split(".")) if path in self.origins else path
        return self.locations.get(path) or Location(", ".join(self.texts) or DICTIONARY)

    def override(self, text: str) -> None:
        """Apply one override `key=value`; `a.b=1` sets a key of a section. Raises ConfigError."""
        name, equals, value = text.partition("=")
        keys = [part.strip() for part in name.split(".")]
        if not equals or not all(keys):
            raise ConfigError(f"{COMMAND_LINE}: an override must be key=value or section.key=value, got {text!r}")
        # GPT-NeoX allows - for _ in its top-level keys
        keys[0] = keys[0].replace("-", "_")
        path = tuple(keys)
        section = self.values
        for depth, key in enumerate(keys[:-1], 1):
            # null counts as an empty section
            if section.get(key) is None:
                section[key] = {}
                # an unknown section is a slip of the command line, not of a file
                self.locations[path[:depth]] = COMMAND_LINE
            section = section[key]
            if not isinstance(section, dict):
                raise ConfigError(f"{COMMAND_LINE}: {'.'.join(keys[:depth])} must be a section, got {section!r}")
        # of a section that is replaced as a whole
        for inner in [place for place in self.locations if place[: len(path)] == path]:
            del self.locations[inner]
        reader = _Reader(COMMAND_LINE.file, self.locations)
        read = reader.read(value, path)
        is_plain = not isinstance(read, (dict, list)) and value.strip()[:1] not in ("'", '"')
        # a command line has no comments: to YAML `runs/try #2` is the folder runs/try, and `#2` nothing
        section[keys[-1]] = value.strip() if is_plain and _COMMENT.search(value) else read
        # one override, one value: `a={b: 1, b: 2}` is a slip
        if reader.repeated:
            raise ConfigError(f"{COMMAND_LINE}: {_dotted(reader.repeated[0].path)}must be set once, got it twice")
        self.locations[path] = COMMAND_LINE
        self.typed[path] = value


@dataclass
class Document:
    """One parsed file."""

    path: Path
    text: str
    values: dict[str, Any]
    locations: dict[KeyPath, Location]
    repeated: list[Repeated]


def parse_files(paths: list[Path]) -> list[Document]:
    """Each file by itself. Raises ConfigError; two files of one base name are an error."""
    documents: dict[str, Document] = {}
    for path in paths:
        # texts are saved under base names beside every checkpoint
        if path.name in documents:
            raise ConfigError(
                f"{path}: two config files are called {path.name}; base names must differ, because the files are"
                " saved side by side with every checkpoint"
            )
        text = _text_of(path)
        locations: dict[KeyPath, Location] = {}
        reader = _Reader(str(path), locations)
        values = reader.read(text, ())
        if not isinstance(values, dict):
            raise ConfigError(f"{path}:1: a config must be a mapping of keys to values, got {_short(values)}")
        documents[path.name] = Document(path, text, values, locations, reader.repeated)
    return list(documents.values())


def merge(documents: list[Document], *, ours: bool) -> Source:
    """The files' values together. Raises ConfigError for a key in two files with two values.

    ours   a section may be spread over files, key by key, and a key twice in a file is an error. Else as GPT-NeoX reads
           them: a section belongs to one file, and of a key given twice in a file the last counts
    """
    source = Source()
    for document in documents:
        # in our own format a repeated key is always a slip; GPT-NeoX's files in the field have them
        if ours and document.repeated:
            twice = document.repeated[0]
            words = f"must be set once, it is at {twice.first} already"
            raise ConfigError(f"{twice.last}: {_dotted(twice.path)}{words}")
        source.repeated += document.repeated
        source.texts[document.path.name] = document.text
        _merge(source, source.values, document.values, (), document.locations, ours)
        source.locations |= document.locations
    return source


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        # one byte more than allowed is enough to know
        if len(text) > _MOST_BYTES:
            raise ConfigError(f"{path}: a config must have at most {_MOST_BYTES} bytes, got more")
        return text.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: a config must be UTF-8 text; byte {error.start} is not ({error.reason})") from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        # strerror alone: the path is said already
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _merge(
    source: Source,
    into: dict[str, Any],
    new: dict[str, Any],
    path: KeyPath,
    locations: dict[KeyPath, Location],
    deep: bool,
) -> None:
    for key, value in new.items():
        here = (*path, key)
        if key not in into:
            into[key] = value
        elif deep and isinstance(value, dict) and isinstance(into[key], dict):
            _merge(source, into[key], value, here, locations, deep)
        elif not deep and into[key] == value:
            continue
        else:
            first = source.locations[here]
            name = ".".join(map(str, here))
            raise ConfigError(f"{locations[here]}: {name} must be set once, it is at {first} already")


# a subclass: SafeLoader's tables are global, and other users of PyYAML have them too
class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Resolves scalars as SafeLoader does, except dates (strings here) and exponents (numbers here)."""


_FLOAT = re.compile(
    r"[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\.\d[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(?:inf|Inf|INF))$"
    r"|\.(?:nan|NaN|NAN)$"
)
_Loader.yaml_implicit_resolvers = {
    # PyYAML follows YAML 1.1, in which 1e-3 is a string and 2024-01-01 a date
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


@dataclass
class _Reader:
    """Turns one text into values and notes the location of every key."""

    file: str
    locations: dict[KeyPath, Location]
    repeated: list[Repeated] = field(default_factory=list)
    _nodes: int = 0

    def read(self, text: str, path: KeyPath) -> Any:
        try:
            loader = _Loader(text)
            try:
                node = loader.get_single_node()
                # nodes and not values: they know their lines
                return None if node is None else self._value(loader, node, path, ())
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            words = " ".join(filter(None, (error.context, error.problem))) or "not YAML"
            raise ConfigError(f"{self._at(mark)}: {_dotted(path)}must be YAML: {words}") from None
        except yaml.YAMLError as error:
            words = " ".join(str(error).split())
            raise ConfigError(f"{self.file}: {_dotted(path)}must be YAML: {words}") from None
        except RecursionError:
            raise ConfigError(f"{self.file}: {_dotted(path)}is nested too deeply to be a config") from None

    def _at(self, mark: yaml.Mark | None) -> Location:
        if self.file == COMMAND_LINE.file or mark is None:
            return Location(self.file)
        return Location(self.file, mark.line + 1)

    def _value(self, loader: _Loader, node: yaml.Node, path: KeyPath, inside: tuple[yaml.Node, ...]) -> Any:
        location = self._at(node.start_mark)
        self._nodes += 1
        # an alias may lead back to its own anchor
        if node in inside:
            raise ConfigError(f"{location}: {_dotted(path)}must not contain itself (alias)")
        if self._nodes > _MAX_NODES:
            raise ConfigError(f"{location}: {_dotted(path)}too large: aliases grow the file past {_MAX_NODES} values")
        if isinstance(node, yaml.MappingNode) and node.tag.endswith(":map"):
            return self._mapping(loader, node, path, (*inside, node))
        if isinstance(node, yaml.SequenceNode) and node.tag.endswith(":seq"):
            self.locations |= {(*path, i): self._at(item.start_mark) for i, item in enumerate(node.value)}
            return [self._value(loader, item, (*path, i), (*inside, node)) for i, item in enumerate(node.value)]
        if not isinstance(node, yaml.ScalarNode):
            raise ConfigError(f"{location}: {_dotted(path)}must be a plain list or mapping, got one tagged {node.tag}")
        return self._scalar(loader, node, path, location)

    def _mapping(
        self, loader: _Loader, node: yaml.MappingNode, path: KeyPath, inside: tuple[yaml.Node, ...]
    ) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        lines: dict[str, Location] = {}
        for key_node, value_node in node.value:
            location = self._at(key_node.start_mark)
            # `<<` is YAML's merge key
            if key_node.tag.endswith(":merge"):
                merged |= self._merged(loader, value_node, path, inside)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{location}: {_dotted(path)}a key must be a word, got a list or mapping")
            # - for _ at the top level only: inside sections keys are data
            key = key_node.value if path else key_node.value.replace("-", "_")
            if key in lines:
                self.repeated.append(Repeated((*path, key), lines[key], location))
                # the places of the first value's inner keys would be wrong
                for inner in [p for p in self.locations if p[: len(path) + 1] == (*path, key)]:
                    del self.locations[inner]
            lines[key] = self.locations[(*path, key)] = location
            values[key] = self._value(loader, value_node, (*path, key), inside)
        # a key of the mapping itself wins over a merged one
        return merged | values

    def _merged(self, loader: _Loader, node: yaml.Node, path: KeyPath, inside: tuple[yaml.Node, ...]) -> dict[str, Any]:
        """Mappings merged by `<<`: a mapping, or a list of them, of which the first to have a key wins."""
        value = self._value(loader, node, path, inside)
        sections = value if isinstance(value, list) else [value]
        if not all(isinstance(section, dict) for section in sections):
            raise ConfigError(f"{self._at(node.start_mark)}: {_dotted(path)}<< must be given a mapping")
        # reversed, so that the first mapping is laid on last
        return {key: section[key] for section in reversed(sections) for key in section}

    def _scalar(self, loader: _Loader, node: yaml.ScalarNode, path: KeyPath, location: Location) -> Any:
        # checked before construction: sexagesimal numbers take time that grows with the square of their length
        if node.tag.endswith((":int", ":float")) and len(node.value) > _MOST_DIGITS:
            raise ConfigError(f"{location}: {_dotted(path)}must be a number of at most {_MOST_DIGITS} digits, got more")
        try:
            value = loader.construct_object(node)
        except (ValueError, OverflowError, LookupError) as error:
            raise ConfigError(f"{location}: {_dotted(path)}must be a value that YAML knows, {error}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{location}: {_dotted(path)}must be a finite number, got {node.value}")
        # 64 bits: tensors, NumPy and files have no larger integers
        if isinstance(value, int) and value.bit_length() > 63:
            raise ConfigError(f"{location}: {_dotted(path)}must fit in 64 bits, got {node.value[:40]}")
        # binary, set and the like are YAML types that no key has
        if value is not None and not isinstance(value, (str, int, float)):
            raise ConfigError(f"{location}: {_dotted(path)}must be text, a number, true, false or null, got {node.tag}")
        return value


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path)) + ": " if path else ""


def _short(value: object) -> str:
    return "nothing (an empty file)" if value is None else repr(value)[:80]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean ..." with the nearest known names, or nothing."""
    close = difflib.get_close_matches(word, sorted(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean ..." with the nearest known names, or all names where there are few, or nothing."""
    names = sorted(known)
    listed = f"; known: {', '.join(names)}" if 0 < len(names) <= 30 else ""
    return did_you_mean(word, names) or listed
