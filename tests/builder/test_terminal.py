"""What a build asks on its terminal: named, answered by who sits at ours, refused at once where nobody does."""

import os
import re
import select
import shlex
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from powertrain.builder.processes import tree
from powertrain.builder.terminal import Terminal

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 60  # seconds
STARTED = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class User:
    """Somebody at a terminal in which `powertrain build` runs."""

    def __init__(self, folder: Path, script: str, *options: str) -> None:
        self.terminal, theirs = os.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(folder), "COLUMNS": "200"}
        build = [sys.executable, "-m", "powertrain", "build", *options, "--", "sh", "-c", script]
        self.build = subprocess.Popen(
            [sys.executable, "-IS", "-c", STARTED, *build],
            cwd=folder,
            env=environment,
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        os.close(theirs)
        self.output = ""

    def reads(self, pattern: str) -> re.Match[str]:
        """Wait for a text in the output."""
        deadline = time.monotonic() + DEADLINE
        assert self.build.stdout
        while not (found := re.search(pattern, self.output)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.output}"
            if select.select([self.build.stdout], [], [], 0.1)[0]:
                part = os.read(self.build.stdout.fileno(), 4096)
                assert part, f"ended without {pattern!r}: {self.output}"
                self.output += part.decode()
        return found

    def types(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def echo(self) -> bool:
        return bool(termios.tcgetattr(self.terminal)[3] & termios.ECHO)

    def ended(self) -> int:
        rest, _ = self.build.communicate(timeout=DEADLINE)
        self.output += rest.decode()
        return self.build.returncode


@pytest.fixture
def user(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[User]:
    user = User(tmp_path, *request.param)
    yield user
    if user.build.poll() is None:
        user.build.kill()
        user.build.communicate()
    os.close(user.terminal)


def asked(script: str) -> list[str]:
    return [f"{shlex.quote(sys.executable)} -IS -c {shlex.quote(script)}"]


# as git and ssh do: /dev/tty, whatever their input is
ASKS_THE_TERMINAL = "t = open('/dev/tty', 'r+b', 0); t.write(b'Username for x: '); open('a', 'wb').write(t.readline())"
# as pip does: the question goes to the output, the answer comes from the input
ASKS_THE_OUTPUT = "open('a', 'w').write(input('Proceed (Y/n)? ') + '\\n')"
ASKS_A_PASSWORD = "import getpass; open('a', 'w').write(getpass.getpass('Password: ') + '\\n')"


@pytest.mark.parametrize("user", [asked(ASKS_THE_TERMINAL), asked(ASKS_THE_OUTPUT)], indirect=True)
def test_who_asks_is_named_and_gets_the_answer(user: User, tmp_path: Path) -> None:
    user.reads(r"python\S* \(process \d+\) asks: (Username for x:|Proceed \(Y/n\)\?)")
    user.types("somebody\n")
    assert user.ended() == 0
    assert (tmp_path / "a").read_text() == "somebody\n"
    assert user.output.count("asks:") == 1


@pytest.mark.parametrize("user", [asked(ASKS_A_PASSWORD)], indirect=True)
def test_a_password_is_not_shown(user: User, tmp_path: Path) -> None:
    assert user.echo()
    user.reads(r"asks: Password:")
    assert not user.echo()
    user.types("secret\n")
    assert user.ended() == 0
    assert user.echo() and (tmp_path / "a").read_text() == "secret\n"
    (log,) = (tmp_path / "powertrain/builds/logs").iterdir()
    assert "secret" not in user.output + log.read_text()


def test_a_question_that_is_given_up_stands_no_longer(tmp_path: Path) -> None:
    users, keyboard = os.openpty()
    terminal = Terminal(keyboard)
    asks = [sys.executable, "-IS", "-c", ASKS_A_PASSWORD]
    child = subprocess.Popen(
        asks, cwd=tmp_path, stdin=terminal.theirs, start_new_session=True, preexec_fn=terminal.take
    )
    question, deadline = None, time.monotonic() + DEADLINE
    while not question:
        assert time.monotonic() < deadline
        if select.select([terminal.ours], [], [], 0.05)[0]:
            terminal.hear()
        question = terminal.question(tree(os.getpid()).values(), b"", time.time())
        if question and not terminal.waits:  # known by the line alone: its reader is not there yet
            terminal.said, question = "", None
    assert terminal.waits and "Password:" in question
    assert not termios.tcgetattr(keyboard)[3] & termios.ECHO
    child.kill()
    child.wait()
    assert terminal.question([], b"", time.time()) is None and not terminal.waits
    assert termios.tcgetattr(keyboard)[3] & termios.ECHO
    terminal.close()
    os.close(users)
    os.close(keyboard)


@pytest.mark.parametrize("user", [["cat > a"]], indirect=True)
def test_the_end_of_input_is_handed_on(user: User, tmp_path: Path) -> None:
    user.reads("full output")
    user.types("two\nwords\n\x04")
    assert user.ended() == 0
    assert (tmp_path / "a").read_text() == "two\nwords\n"


@pytest.mark.parametrize("user", [[*asked(ASKS_THE_TERMINAL), "--stall", "1"]], indirect=True)
def test_an_answer_that_does_not_come_is_a_stall_with_that_cause(user: User) -> None:
    user.reads(r"nothing has moved for .*waits for input on /dev/(pts|tty)")


def test_nobody_there_a_question_fails_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(tmp_path), "COLUMNS": "200"}
    for question, says in ((ASKS_THE_TERMINAL, "No such device or address"), (ASKS_THE_OUTPUT, "EOFError")):
        command = [sys.executable, "-m", "powertrain", "build", "--", "sh", "-c", *asked(question)]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=DEADLINE,
        )  # fmt: skip
        assert done.returncode == 1 and says in done.stdout
        assert "asked, and nobody was there to answer" in done.stdout
