"""Typed access to the keys of a GPT-NeoX config, with a table row for each key and all errors at once."""

from typing import Any

from powertrain.models.config import as_yaml
from powertrain.train.config.neox_keys import KEYS
from powertrain.train.config.table import Disposition, Row
from powertrain.train.config.yaml_source import DEFAULT, ConfigError, KeyPath, Source, UnsupportedConfig, nearest

MISSING: Any = object()
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (float, int), "bool": (bool,), "str": (str,), "list": (list,), "dict": (dict,),
}  # fmt: skip
_KIND_WORDS = {
    "int": "an integer", "float": "a number", "bool": "true or false", "str": "text", "list": "a list",
    "dict": "a section",
}  # fmt: skip


def given(value: object) -> str:
    """A wrong value in an error message; a text in quotes."""
    return repr(value[:80]) if isinstance(value, str) else as_yaml(value)[:80]


class NeoXKeys:
    """The config's keys, type-checked as read; collects a table row per key and all errors."""

    def __init__(self, source: Source) -> None:
        # a copy: wrong values are taken out, and the source keeps all
        self.source = source
        self.values = dict(source.values)
        self.mistakes: list[str] = []
        self.missing: list[str] = []  # features, not mistakes
        self._outcomes: dict[str, tuple[Disposition, str]] = {}
        self._defaults: list[Row] = []
        self._hoist()
        self._check_names_and_kinds()
        # told and not refused: public configs have such keys
        for path, first, last in source.repeated:
            name = ".".join(map(str, path))
            words = f"given again at {last}, and the last counts, as in GPT-NeoX"
            self._defaults.append(Row(name, "(replaced)", str(first), "ignored", words))

    def _hoist(self) -> None:
        """Keys of deepspeed_extra_args count as DeepSpeed's own, which stand beside it."""
        extra = self.values.get("deepspeed_extra_args")
        for key, value in extra.items() if isinstance(extra, dict) else ():
            if key in self.values:
                self.wrong(
                    ("deepspeed_extra_args", key), "must be set once, it stands outside deepspeed_extra_args too"
                )
            elif key in KEYS:
                self.values[key] = value
                self.source.locations[(key,)] = self.source.location(("deepspeed_extra_args", key))
            else:
                self._defaults.append(
                    self._row(f"deepspeed_extra_args.{key}", value, "ignored", "DeepSpeed is not used")
                )

    def _check_names_and_kinds(self) -> None:

        # a copy of the items, for wrong ones are deleted in the loop
        for key, value in list(self.values.items()):
            if key not in KEYS:
                self.mistakes.append(f"{self.source.location((key,))}: {key}: unknown key{nearest(key, KEYS)}")
            elif value is not None and not is_kind(value, KEYS[key].kind):
                self.wrong((key,), f"must be {kind_words(KEYS[key].kind)}, got {given(value)}")
            else:
                # a refused feature that is off is no reason to stop
                if KEYS[key].disposition == "refused" and _is_on(value):
                    self.unsupported(key, value, KEYS[key].words)
                continue
            # taken out, so that the rest sees the default and finds more mistakes
            del self.values[key]

    def get(self, key: str, default: Any = None) -> Any:
        """The key's value; the default if it is null or missing."""
        # null is GPT-NeoX's "not set"
        value = self.values.get(key)
        return default if value is None else value

    def path(self, key: str) -> str | None:
        """A file or folder; the empty name is GPT-NeoX's "not set" too."""
        return self.get(key) or None

    def lacks(self, key: str) -> bool:
        """Whether the config does not have the key. A value of a wrong type counts as given; its error is collected."""
        return self.get(key) is None and self.source.values.get(key) is None

    def number(self, key: str, default: Any = None, *, above: float | None = None, least: float | None = None) -> Any:
        """A number, checked before use; for a wrong one an error is collected and the default is returned."""
        value = self.get(key, default)
        if value is not None and above is not None and value <= above:
            self.wrong((key,), f"must be above {above}, got {given(value)}")
            # the default goes on: all mistakes are reported at once
            return default
        if value is not None and least is not None and value < least:
            self.wrong((key,), f"must be at least {least}, got {given(value)}")
            return default
        return value

    def choice(self, key: str, default: Any, known: dict[str, Any], refused: dict[str, str] | None = None) -> Any:
        """The value's meaning; GPT-NeoX's choices ignore case."""
        value = self.get(key, default)
        # GPT-NeoX lowers most names before it compares them
        served = {name.lower(): meaning for name, meaning in known.items()}
        if str(value).lower() in served:
            return served[str(value).lower()]
        why = {name.lower(): why for name, why in (refused or {}).items()}.get(str(value).lower())
        if why:
            self.unsupported(key, value, why)
        else:
            self.wrong((key,), f"must be one of {', '.join([*known, *(refused or {})])}, got {given(value)}")
        # a meaning that lets the rest be checked
        return served[str(default).lower()]

    def wrong(self, path: KeyPath, words: str) -> None:
        self.mistakes.append(f"{self.source.location(path)}: {'.'.join(map(str, path))} {words}")

    def unsupported(self, key: str, value: Any, todo: str) -> None:
        self.missing.append(f"{self.source.location((key,))}: {key} is not supported at {as_yaml(value)[:60]}: {todo}")

    def add_row(self, key: str, disposition: Disposition, words: str, value: Any = MISSING) -> None:
        """The key's row in the table; for a key that was not set, `value` is its default there."""
        if key in self.values:
            self._outcomes[key] = (disposition, words)
        elif value is not MISSING:
            self._defaults.append(Row(key, value, str(DEFAULT), disposition, words))

    def add_inner_row(self, path: KeyPath, value: Any, disposition: Disposition, words: str) -> None:
        """A row for a key inside a section."""
        self._defaults.append(self._row(".".join(map(str, path)), value, disposition, words, path))

    def section(self, key: str) -> dict[str, Any]:
        value = self.get(key, {})
        return value if isinstance(value, dict) else {}

    def inner(self, section: str, key: str, default: Any, kind: str, *, least: float | None = None) -> Any:
        """A typed value inside a section such as fp16."""
        value = self.section(section).get(key)
        if value is None:
            return default
        if not is_kind(value, kind):
            self.wrong((section, key), f"must be {kind_words(kind)}, got {given(value)}")
            return default
        if least is not None and value < least:
            self.wrong((section, key), f"must be at least {least}, got {given(value)}")
            return default
        return value

    def _row(self, key: str, value: Any, disposition: Disposition, words: str, path: KeyPath | None = None) -> Row:
        return Row(key, value, str(self.source.location(path or tuple(key.split(".")))), disposition, words)

    def finish(self) -> None:
        """Raise the collected errors, each once."""
        # two readers of one key note the same mistake
        problems = list(dict.fromkeys(self.mistakes + self.missing))
        if problems:
            # a mistake is shown as one even where a feature is missing too
            raise (ConfigError if self.mistakes else UnsupportedConfig)("\n".join(problems))

    def rows(self) -> list[Row]:
        rows = []
        for key, value in self.values.items():
            default, words = KEYS[key].disposition, KEYS[key].words
            # a refused key that got here has a value that switches the feature off
            usual: tuple[Disposition, str] = ("honoured", "off, as here") if default == "refused" else (default, words)
            rows.append(self._row(key, value, *self._outcomes.get(key, usual)))
        return rows + self._defaults


def is_kind(value: Any, kind: str) -> bool:
    kinds = kind.split("|")
    # bool is a subclass of int in Python
    if isinstance(value, bool):
        return "bool" in kinds
    return isinstance(value, tuple(t for name in kinds for t in _KINDS[name] if name != "bool"))


def kind_words(kind: str) -> str:
    return " or ".join(_KIND_WORDS[name] for name in kind.split("|"))


def _is_on(value: Any) -> bool:
    """A feature that a value switches on; `{"enabled": false}` does not."""
    return bool(value.get("enabled", True)) if isinstance(value, dict) and value else bool(value)
