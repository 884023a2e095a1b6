"""The table shown before the first step: every key and its disposition."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from powertrain.models.config import as_yaml

if TYPE_CHECKING:
    from rich.console import Console

Disposition = Literal["honoured", "mapped", "ignored", "changes numerics"]
_HEADINGS: dict[Disposition, str] = {
    "changes numerics": "changes numerics",
    "ignored": "ignored, and why",
    "mapped": "mapped to",
}


@dataclass(frozen=True)
class Row:
    """One key: its value, where it stands ("file:line", "command line", "default"), and its disposition.

    honoured           has the same meaning here
    mapped             reached by other means, with the same result
    ignored            has no effect; it would not have changed the result
    changes numerics   results differ from those the key's name suggests, or from GPT-NeoX's; the explanation says how
    """

    key: str
    value: Any
    place: str
    disposition: Disposition
    explanation: str


def render(rows: Sequence[Row], console: "Console") -> None:
    """Print the table: changes of numerics first, then ignored, then mapped; honoured keys in one paragraph."""
    # rich is imported when the table is shown: reading a config must not need it
    from rich.markup import escape
    from rich.table import Table

    # in the order of their weight for the reader
    for disposition, heading in _HEADINGS.items():
        chosen = [row for row in rows if row.disposition == disposition]
        if not chosen:
            continue
        table = Table(title=f"{heading} ({len(chosen)})", title_justify="left", title_style="bold", box=None)
        table.add_column("key", no_wrap=True)
        table.add_column("value", max_width=24, overflow="fold")
        table.add_column("where", style="dim")
        table.add_column("what it means", overflow="fold")
        for row in chosen:
            table.add_row(
                *(escape(cell) for cell in (row.key, shown(row.value), Path(row.place).name, row.explanation))
            )
        console.print(table)
        console.print()
    honoured = [f"{row.key}={shown(row.value)}" for row in rows if row.disposition == "honoured"]
    if honoured:
        # honoured keys need no explanation
        console.print(f"[bold]honoured ({len(honoured)})[/]")
        console.print(escape(", ".join(honoured)), style="dim")


def shown(value: object) -> str:
    """The value as YAML would have it, cut to a line."""
    text = as_yaml(value)
    return text if len(text) <= 60 else text[:57] + "..."
