"""The console of every command."""

from typing import Any

import rich.console


class Console(rich.console.Console):
    """Rich's, which prints a text as it is: its own would print the `:100:` of `run.yml:100: ...` as an emoji."""

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)
