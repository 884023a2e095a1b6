"""`powertrain report`: write a run's report.html again."""

from pathlib import Path
from typing import Annotated

import typer

from powertrain.cli.paths import must_exist
from powertrain.runtime.console import Console


def report(
    folder: Annotated[Path, typer.Argument(help="the run's folder: logging.folder of its config")],
) -> None:
    """Write report.html from the files in a run's folder; works during the run and after a kill.

    \b
    powertrain report runs/quickstart
    """
    must_exist([folder])
    from powertrain.train.reporting.report import write_report

    try:
        path = write_report(folder)
    except (ValueError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), markup=False, highlight=False)
        raise typer.Exit(2) from None
    Console(soft_wrap=True).print(str(path), markup=False, highlight=False)
