"""A pseudo-terminal for the build, so that its prompts are shown and answered.

A build inherits no input on which it could wait unnoticed. If the builder has a terminal, the build's standard input
and controlling terminal are a pseudo-terminal, which carries the questions of git, ssh, pip and sudo. Otherwise it has
none, and a question fails at once.
"""

import fcntl
import os
import termios
import time
from collections.abc import Iterable

from powertrain.builder.processes import Process
from powertrain.builder.stall import waits_for_input

# seconds after which an unfinished line on the terminal counts as a question
_SETTLED = 2.0
_LONGEST = 200  # characters of a question that are shown
_KEPT = 4 * _LONGEST  # bytes, of a line without end


def keyboard_here() -> int | None:
    """The descriptor to read answers from, if a user sits at it."""
    return 0 if os.isatty(0) and _in_front(0) else None


def _in_front(terminal: int) -> bool:
    """Whether reading would not stop us, as it does a job in the background."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        # a terminal, but not the one that controls us
        return True


class Terminal:
    """The build's terminal; `keyboard` is where the user types."""

    def __init__(self, keyboard: int) -> None:
        self.keyboard = keyboard
        self.ours, self.theirs = os.openpty()
        self.text = b""  # since the last end of a line
        self.heard = 0.0
        self.said = ""  # the question reported last
        self.open = False  # whether it waits for an answer
        self.asker: int | None = None  # the process that reads the answer, if it was found
        self._before = termios.tcgetattr(keyboard)
        self._hidden = False  # whether the user's terminal hides typed characters

    def take(self) -> None:
        """In the build's first process, which leads a session: make this its controlling terminal."""
        fcntl.ioctl(self.theirs, termios.TIOCSCTTY, 0)

    def hear(self) -> bytes:
        """Output of the build on its terminal."""
        part = os.read(self.ours, 1 << 16)
        self.text = (self.text + part).replace(b"\r", b"\n").rpartition(b"\n")[2][-_KEPT:]
        self.heard = time.time()
        return part

    def type(self) -> None:
        """Forward the user's input."""
        if not _in_front(self.keyboard):
            return
        typed = os.read(self.keyboard, 4096)
        # nothing: end of file, as the terminal says it
        os.write(self.ours, typed or b"\x04")
        # the same question may be asked again: it is reported again
        self.open, self.said, self.text = False, "", b""

    @property
    def waits(self) -> bool:
        """Whether a process waits for the user now."""
        return self.open and self.asker is not None

    def question(self, processes: Iterable[Process], output: bytes, now: float) -> str | None:
        """The prompt and its process, reported once; None if there is none, or it was reported.

        output  output of the build since the last newline: pip prompts there
        """
        if self.waits and not _at_terminal(self.asker or 0):
            # it gave up, or ended
            self.open, self.text = False, b""
        self._show_typing()
        text = (self.text.strip() or output.strip()).decode(errors="replace")[-_LONGEST:]
        if not text or text == self.said:
            return None
        # a process that reads the terminal proves a question; without one, a pause after the text does
        asker = next((each for each in processes if _at_terminal(each.pid)), None)
        if not asker and not (self.text.strip() and now - self.heard > _SETTLED):
            return None
        self.said, self.open, self.asker = text, True, asker.pid if asker else None
        self._hide_typing()
        who = f"{asker.name} (process {asker.pid})" if asker else "the build"
        return f"{who} asks: {text}   [type the answer here]"

    def _hide_typing(self) -> None:
        """Passwords are not shown: the build turned the echo of its terminal off."""
        if termios.tcgetattr(self.ours)[3] & termios.ECHO or not _in_front(self.keyboard):
            return
        now = termios.tcgetattr(self.keyboard)
        now[3] &= ~termios.ECHO
        termios.tcsetattr(self.keyboard, termios.TCSADRAIN, now)
        self._hidden = True

    def _show_typing(self) -> None:
        if self._hidden and not self.open and _in_front(self.keyboard):
            termios.tcsetattr(self.keyboard, termios.TCSADRAIN, self._before)
            self._hidden = False

    def close(self) -> None:
        """Give the user's terminal back as it was."""
        self.open = False
        self._show_typing()
        os.close(self.ours)
        os.close(self.theirs)


def _at_terminal(pid: int) -> bool:
    return (waits_for_input(pid) or "").startswith(("/dev/pts/", "/dev/tty"))
