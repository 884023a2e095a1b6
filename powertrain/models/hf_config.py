"""Reading values of a Hugging Face config.json: required keys and required values."""

from collections.abc import Mapping
from typing import Any


def required(values: Mapping[str, Any], *names: str) -> list[Any]:
    """The values of these keys of a config.json. Raises ValueError naming one that is not there."""
    # null counts as absent, as in transformers' configs
    missing = [name for name in names if values.get(name) is None]
    if missing:
        raise ValueError(f"config.json: {missing[0]} must be given, got none")
    return [values[name] for name in names]


def only(values: Mapping[str, Any], **expected: Any) -> None:
    """Raise ValueError naming a key of config.json whose value is not supported."""
    for name, must in expected.items():
        # a feature at its neutral value needs no code
        if values.get(name) not in (None, must):
            raise ValueError(f"config.json: {name} must be {must!r}, got {values[name]!r}")


def chosen(values: Mapping[str, Any], name: str, default: Any, choices: Mapping[str, Any]) -> Any:
    """The translation of a key's value. Raises ValueError naming the key and its allowed values."""
    value = values.get(name) or default
    if value not in choices:
        raise ValueError(f"config.json: {name} must be one of {', '.join(choices)}, got {value!r}")
    return choices[value]
