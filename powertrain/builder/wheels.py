"""Wheels: whether a prebuilt wheel exists. pip is asked, only if the user allows the network."""

import re
import subprocess
from collections.abc import Sequence

_SECONDS = 60


def prebuilt(package: str, python: str, options: Sequence[str] = ()) -> str | None:
    """The wheel of `package` that pip would install for this Python without building, "xformers-0.0.33"; None if none.

    options  for pip, such as --index-url
    Raises TimeoutError when the index does not answer, RuntimeError when this Python has no pip.
    """
    asks = [python, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary=:all:"]
    try:
        done = subprocess.run(
            [*asks, *options, package], capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"pip found no answer on {package} in {_SECONDS} s") from None
    if "No module named pip" in done.stderr:
        raise RuntimeError(f"--online asks pip, and {python} has none: install it, or leave --online out")
    wheel = re.search(r"Would install (\S+)", done.stdout)
    return wheel[1] if wheel and not done.returncode else None
