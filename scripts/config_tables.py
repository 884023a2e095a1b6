"""Makes the tables of docs/configuration.md and docs/coming-from-gpt-neox.md from the code; a test compares them.

python scripts/config_tables.py    writes them between their marks
"""

import inspect
import re
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from powertrain.train.config.neox_keys import KEYS
from powertrain.train.config.schema import MAX_SCALE, RunConfig

DOCS = Path(__file__).resolve().parent.parent / "docs"
_DISPOSITIONS = {
    "honoured": ("Honoured", "is"),
    "mapped": ("Mapped", "becomes"),
    "ignored": ("Ignored: no effect on the result", "because"),
    "refused": ("Refused when switched on", "instead"),
}


def sections() -> str:
    """A table of fields for each section of a RunConfig, sections within sections included."""
    parts = []
    for name, field in RunConfig.model_fields.items():
        parts += [f"### {name}", "", MODEL, ""] if name == "model" else _section(name, field.annotation)
    return "\n".join(parts)


def _section(name: str, schema: type[BaseModel] | None) -> list[str]:
    assert schema is not None
    parts = [f"### {name}", "", "```", inspect.cleandoc(schema.__doc__ or ""), "```", ""]
    parts += ["| key | default | values |", "|---|---|---|"]
    within: dict[type[BaseModel], str] = {}  # each once: train, validation and test take the same sources
    for key, inner in schema.model_fields.items():
        default = "" if inner.is_required() else _default(inner.default)
        parts.append(f"| `{key}` | {default} | {_kind(inner)} |")
        for kind in (inner.annotation, *get_args(inner.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                within.setdefault(kind, f"{name}.{key}")
    parts.append("")
    return parts + [line for kind, inner_name in within.items() for line in _section(inner_name, kind)]


MODEL = """`architecture` names the fields (`gpt_neox`, `llama` ...); `preset` fills them in, other keys change them:

```
model: llama-1b
model: {preset: pythia-160m, num_layers: 6}
model: {architecture: llama, vocab_size: 32000, hidden_size: 512, num_layers: 8, num_heads: 8, intermediate_size: 1376}
```

Each architecture's file in powertrain/models/ begins with its fields and ends with its presets."""


def _default(value: object) -> str:
    if isinstance(value, BaseModel):
        return "its own"
    if value is None or isinstance(value, (bool, str)):
        return f"`{yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _kind(field: FieldInfo) -> str:
    kind, limits = field.annotation, list(field.metadata)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    choices = [choice for part in get_args(kind) if get_origin(part) is Literal for choice in get_args(part)]
    if choices:  # some words, or None
        return ", ".join(f"`{choice}`" for choice in choices) + " or None"
    within = [choice for choice in get_args(kind) if get_origin(choice) is Annotated]
    if within and type(None) in get_args(kind):  # an int with limits, or None
        base, *about = get_args(within[0])
        # validators, of paths, change a value and limit nothing
        kind, limits = base | None, [*limits, *(limit for part in about for limit in getattr(part, "metadata", ()))]
    text = str(getattr(kind, "__name__", kind) if get_origin(kind) is None else kind)
    text = re.sub(r"typing\.(Annotated\[(\w+), .*?\)\])?|powertrain\.[\w.]+\.", r"\2", text)
    text = re.sub(r"tuple\[(.*?)(, \.\.\.)?\]", r"list of \1", text).replace("|", "or")
    bounds = {"Gt(gt=0)": "above 0", "Ge(ge=0)": "at least 0", "MinLen(min_length=1)": "at least one",
              "Lt(lt=4294967296)": "below 2^32", "Lt(lt=1)": "below 1", "Lt(lt=0.5)": "below 0.5",
              "Le(le=1)": "at most 1", "Le(le=127)": "at most 127", "Le(le=1000000.0)": "at most 1000000",
              "Le(le=1024)": "at most 1024",
              f"Le(le={MAX_SCALE})": "at most 2^127"}  # fmt: skip
    changes = BeforeValidator, AfterValidator
    return ", ".join([text, *(bounds[str(bound)] for bound in limits if not isinstance(bound, changes))])


def keys() -> str:
    """A table of GPT-NeoX's keys for each disposition."""
    parts = []
    for disposition, (title, heading) in _DISPOSITIONS.items():
        chosen = {key: row for key, row in KEYS.items() if row.disposition == disposition}
        parts += [f"### {title} ({len(chosen)})", "", f"| key | type | {heading} |", "|---|---|---|"]
        parts += [f"| `{key}` | {row.kind.replace('|', ' or ')} | {row.words} |" for key, row in sorted(chosen.items())]
        parts.append("")
    return "\n".join(parts)


TABLES = {"configuration.md": sections, "coming-from-gpt-neox.md": keys}


def with_tables(page: str, text: str) -> str:
    """The page with its table made anew."""
    begin, end = "<!-- made by scripts/config_tables.py -->\n", "<!-- until here -->\n"
    head, _, rest = text.partition(begin)
    tail = rest.partition(end)[2]
    return f"{head}{begin}{TABLES[page]()}{end}{tail}"


if __name__ == "__main__":
    for page in TABLES:
        path = DOCS / page
        path.write_text(with_tables(page, path.read_text()))
