"""`powertrain target` and `powertrain env`: properties of a GPU, and settings from the environment."""

from typing import Annotated

import typer
from rich.table import Table

from powertrain.runtime.console import Console
from powertrain.runtime.settings import VARIABLES, settings, unknown_variables
from powertrain.runtime.target import Target, known_cards


def target(
    name: Annotated[
        str | None, typer.Argument(help="a card, as you or its driver writes it, or an arch", show_default=False)
    ] = None,
) -> None:
    """Show the properties of a GPU from which kernels are planned, present or not. Without NAME: all known cards.

    \b
    powertrain target "NVIDIA A100-SXM4-40GB"
    powertrain target sm_89
    """
    console = Console()
    if name is None:
        console.print(_cards())
        return
    try:
        parsed = Target.parse(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    table = Table(title=parsed.name, show_header=False, title_justify="left")
    for label, value in facts(parsed).items():
        table.add_row(label, value)
    console.print(table)


def facts(target: Target) -> dict[str, str]:
    """A target's facts in words."""
    can = [ability.replace("_", " ") for ability, yes in target.abilities.items() if yes]
    cannot = [ability.replace("_", " ") for ability, yes in target.abilities.items() if not yes]
    return {
        "arch": f"sm_{target.arch}",
        "multiprocessors": str(target.num_sms),
        "shared memory per block": f"{target.shared_per_block} bytes",
        "shared memory per multiprocessor": f"{target.shared_per_sm} bytes",
        "registers per multiprocessor": str(target.registers_per_sm),
        "L2": f"{target.l2_bytes / 2**20:g} MiB",
        "bandwidth": f"{target.bandwidth / 1e9:g} GB/s",
        "has": ", ".join(can),
        "has not": ", ".join(cannot),
    }


def _cards() -> Table:
    table = Table("card", "arch")
    for column in ("SMs", "L2 MiB", "GB/s"):
        table.add_column(column, justify="right")
    for card in known_cards():
        sizes = (f"{card.l2_bytes / 2**20:g}", f"{card.bandwidth / 1e9:g}")
        table.add_row(card.name, f"sm_{card.arch}", str(card.num_sms), *sizes)
    return table


def env(
    markdown: Annotated[bool, typer.Option("--markdown", help="the page docs/environment.md, without values")] = False,
) -> None:
    """List every environment variable of Powertrain with its current value, default and meaning."""
    if markdown:
        print(environment_page(), end="")
        return
    try:
        now = settings()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    table = Table()
    for heading in ("variable", "now", "default"):
        table.add_column(heading, no_wrap=True)
    table.add_column("meaning")
    for field, variable in VARIABLES.items():
        value = getattr(now, field)
        # a variable that differs from its default is what one looks for here
        style = "bold" if value != variable.default else None
        table.add_row(variable.name, _text(value), _text(variable.default), variable.meaning, style=style)
    console = Console()
    console.print(table)
    for name, near in unknown_variables().items():
        console.print(
            f"{name} is set, and nothing reads it" + (f"; did you mean {near}?" if near else ""), style="yellow"
        )


def environment_page() -> str:
    """docs/environment.md, made from runtime/settings.py."""
    rows = (f"| `{v.name}` | {_text(v.default)} | {v.meaning} |" for v in VARIABLES.values())
    return "\n".join(
        [
            "# Environment variables",
            "",
            "Made by `powertrain env --markdown` from powertrain/runtime/settings.py, the only place that reads them.",
            "`powertrain env` shows the values now in force.",
            "",
            "| variable | default | meaning |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _text(value: object) -> str:
    if value is None or value == ():
        return "unset"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    # a bool as 0 or 1, as it is written in the environment
    return f"{value:g}" if isinstance(value, bool | float) else str(value)
