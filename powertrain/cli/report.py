"""`powertrain report`: write a run's report.html again."""

from pathlib import Path
from typing import Annotated

import typer

from powertrain.cli.paths import end_unwritten, must_exist, one_line
from powertrain.runtime.console import Console


def report(
    folder: Annotated[Path, typer.Argument(help="the run's folder: logging.folder of its config")],
) -> None:
    """Write report.html from the files in a run's folder; works during the run and after a kill.

    \b
    powertrain report runs/quickstart
    """
    must_exist([folder])
    from powertrain.train.reporting.report import NAME, write_report

    with one_line(ValueError, OSError):
        try:
            path = write_report(folder)
        except OSError as error:
            if error.filename != str(folder / NAME):
                raise
            end_unwritten(folder / NAME, error)
    Console(soft_wrap=True).print(str(path), markup=False, highlight=False)
