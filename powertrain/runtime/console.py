"""The console that every command prints to."""

from typing import Any

import rich.console
import rich.table
from rich.measure import Measurement

from powertrain.runtime.settings import width_is_asked_for


class Console(rich.console.Console):
    """Rich's, which prints a text as it is: its own would print the `:100:` of `run.yml:100: ...` as an emoji."""

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def print_table(self, table: rich.table.Table) -> None:
        """Print a table whose names are to be found by `| grep`: into a pipe or a file it is as wide as they are.

        Rich takes 80 columns there, and cuts words that are longer than their column.
        """
        if self.is_terminal or width_is_asked_for():
            self.print(table)
            return
        unlimited = self.options.update(max_width=1 << 16)
        width = Measurement.get(self, unlimited, table).maximum
        Console(file=self.file, width=width, color_system=None).print(table)
