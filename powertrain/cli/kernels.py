"""`powertrain kernels`: list, check and empty the kernel store."""

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from powertrain.cli.paths import must_exist, one_line
from powertrain.runtime.console import Console

if TYPE_CHECKING:
    from powertrain.runtime.compile.kernel_store import Entry


class Action(str, Enum):
    list = "list"
    verify = "verify"
    clear = "clear"


def kernels(
    action: Annotated[Action, typer.Argument(help="list, verify the checksums, or clear the store")] = Action.list,
    pack: Annotated[Path | None, typer.Option(help="look into this pack instead", show_default=False)] = None,
) -> None:
    """List, verify or delete this user's compiled kernels; `--pack` lists those of a pack.

    `verify` moves damaged entries to quarantine (they are compiled again when needed) and then exits with 1.

    \b
    powertrain kernels
    powertrain kernels verify --pack h100.ptp
    """
    if pack is not None and action is Action.clear:
        raise typer.BadParameter("a pack is read-only; delete the file", param_hint="--pack")
    must_exist([] if pack is None else [pack])
    from powertrain.runtime.compile.kernel_store import REFUSED, Pack, user_store
    from powertrain.runtime.errors import StoreError

    console = Console()
    with one_line(StoreError):
        store = Pack(pack) if pack is not None else user_store()
    # refused: said as a warning
    if pack is None and user_store().trouble == REFUSED:
        raise typer.Exit(1)
    where = str(pack or user_store().root)
    if action is Action.clear:
        console.print(f"{where}: {user_store().clear()} files deleted", markup=False)
        return
    keys = list(store.keys())
    entries = [entry for key in keys if (entry := store.get(key)) is not None]
    if action is Action.list:
        console.print_table(_table(where, entries))
    damaged = len(keys) - len(entries)
    console.print(f"{where}: {len(entries)} kernels whole, {damaged} damaged", markup=False)
    if damaged:
        raise typer.Exit(1)


def _table(where: str, entries: "list[Entry]") -> Table:
    table = Table(title=escape(where), title_justify="left")
    # on a narrow screen in several lines: a name that is cut is no name
    table.add_column("kernel", overflow="fold")
    for column in ("arch", "Triton"):
        table.add_column(column)
    for column in ("registers", "stack", "shared", "KiB", "compiled in"):
        table.add_column(column, justify="right")
    for entry in sorted(entries, key=lambda e: (e.manifest["kernel"], e.manifest["arch"])):
        about, launch = entry.manifest, entry.manifest["launch"]
        size = sum(len(data) for data in entry.members.values()) / 1024
        table.add_row(
            about["kernel"],
            f"sm_{about['arch']}",
            about["triton"],
            *(str(launch[name]) for name in ("registers", "stack", "shared")),
            f"{size:.0f}",
            f"{about['seconds']:.2f} s",
        )
    return table
