"""Packages that only some parts of Powertrain need, and the extras of `pip install` that bring them."""

from importlib.util import find_spec

EXTRAS = {
    "train": ("pydantic", "yaml", "safetensors", "tokenizers", "zstandard", "filelock", "jinja2"),
    "data": ("datasets", "transformers"),
    "optimizers": ("torchao",),
    "evaluate": ("lm_eval",),
}


class MissingExtra(ModuleNotFoundError):
    """A part of Powertrain needs packages that are not installed; the message is one line that names the extra."""


def require(extra: str, needed_by: str) -> None:
    """Raise MissingExtra where a package of an extra is not installed; imports none of them."""
    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"{needed_by} needs {', '.join(missing)}: pip install 'powertrain[{extra}]'", name=missing[0]
        )
