"""Logs of any size and any bytes: `diagnose` and a failed build read them in time that grows as they do."""

import random
import re
import time
from collections.abc import Callable
from functools import partial

import pytest
from typer.testing import CliRunner

from powertrain.builder import ending
from powertrain.cli import app
from powertrain.doctor.causes import CAUSES
from powertrain.doctor.diagnose import diagnose, first_error
from powertrain.doctor.literals import literals_of
from powertrain.doctor.log import LINE, Log
from tests.doctor.texts import TEXTS

NOISE = random.Random(13)
LINES = [text for _, text in TEXTS]


def test_every_pattern_has_literals_to_look_for_first() -> None:
    for cause in CAUSES:
        for pattern in filter(None, (cause.pattern, cause.also)):
            assert all(len(literal) > 4 for literal in literals_of(pattern)) or cause.also, cause.name
    with pytest.raises(ValueError, match="literal"):
        literals_of(r"\w+|error")


@pytest.mark.parametrize("name, text", TEXTS, ids=[f"{index}-{name}" for index, (name, _) in enumerate(TEXTS)])
def test_what_matches_holds_a_literal(name: str, text: str) -> None:
    (cause,) = (cause for cause in CAUSES if cause.name == name)
    matching = [line for line in Log(text).data.decode().split("\n") if re.search(cause.pattern, line)]
    assert matching and all(any(word in line.encode() for word in literals_of(cause.pattern)) for line in matching)


def _words() -> list[str]:
    """Pieces of the patterns: what a line has to be made of to keep a regular expression busy."""
    pieces = {piece for cause in CAUSES for piece in re.findall(r"[\w .:/'-]{2,}", cause.pattern)}
    return [
        *sorted(pieces),
        ".so",
        "a",
        "1",
        " ",
        "_Z",
        "(",
        "error",
        "x.cu(1",
        ":1:",
        "https://",
        "\x1b[",
        "...",
        "\t",
    ]


def _quickest(read: Callable[[], object], enough: float = 0.0) -> float:
    """Seconds of the quickest of three readings, or of the first that takes less than `enough`."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        read()
        best = min(best, time.process_time() - start)
        if best < enough:
            break
    return best


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_no_line_takes_long(count: int) -> None:
    """Each line that can be searched: the regular expressions' own bound, with what a slow machine takes on top."""
    words = _words()
    # more than `re` keeps compiled
    patterns = [re.compile(pattern) for cause in CAUSES for pattern in (cause.pattern, cause.also) if pattern]
    fixed = [word * (LINE // len(word)) for word in words]
    for number in range(count):
        few = [NOISE.choice(words) for _ in range(NOISE.randint(1, 4))]
        line = "".join(NOISE.choice(few) for _ in range(LINE))[:LINE] if number >= len(fixed) else fixed[number]
        for pattern in patterns:
            assert _quickest(partial(pattern.search, line), 0.1) < 0.1, (pattern, line[:80])
        assert _quickest(partial(ending.first_error, [line]), 0.2) < 0.2, line[:80]


@pytest.mark.parametrize(
    "piece",
    [
        ".so",
        "undefined symbol: ",
        "error",
        "Error: ",
        "A" * 64,
        " ",
        "\x1b[",
        "\x1b[1",
        "\r",
        "nvcc ",
        "failed to ",
        "\0",
    ],
)
@pytest.mark.parametrize("lines", [False, True], ids=["one line", "lines"])
def test_twice_as_much_takes_about_twice_as_long(piece: str, lines: bool) -> None:
    unit = (piece * (150 // len(piece) + 1) + ("\n" if lines else "")).encode()

    def read(times: int, enough: float) -> float:
        data = unit * times
        return _quickest(lambda: (diagnose(data), first_error(data)), enough)

    most = 30 * max(read(150, 0.0), 2e-3)
    large = read(1200, most)  # 8 times as much; quadratic would be 64
    assert large < most, (large, most)


@pytest.mark.parametrize("count", [150, pytest.param(2500, marks=pytest.mark.slow)])
def test_damaged_logs(count: int) -> None:
    """Any bytes: an answer, no traceback."""
    for _ in range(count):
        data = bytearray("\n".join(NOISE.sample(LINES, 4)).encode())
        for _ in range(NOISE.randint(1, 40)):
            at = NOISE.randrange(len(data))
            data[at : at + NOISE.randint(0, 9)] = NOISE.randbytes(NOISE.randint(0, 9))
        for one in diagnose(bytes(data)):
            assert len(one.evidence) <= LINE and one.message("zh") and one.fix()
        first_error(bytes(data))
    result = CliRunner().invoke(app, ["diagnose"], input=bytes(data), env={"COLUMNS": "100"})
    assert result.exit_code in (0, 1) and not isinstance(result.exception, UnicodeError), result.output


def test_100_mb() -> None:
    """A tenth of it here; the whole takes 10 seconds on one core."""
    pieces = [b"INFO step 17 loss 2.31 /usr/include/foo.h\n", b"[12/300] g++ -O3 -c a.cpp -o b.o -Wno-error ninja\n"]
    data = b"".join(NOISE.choices(pieces, k=220_000)) + dict(TEXTS)["compiler-killed"].encode()
    start = time.process_time()
    (found,) = diagnose(data)
    assert found.cause.name == "compiler-killed" and found.line == 220_001
    assert time.process_time() - start < 5


def test_a_log_of_one_line_in_a_build(tmp_path) -> None:  # type: ignore[no-untyped-def]
    log = tmp_path / "log"
    log.write_bytes(b"A" * (8 << 20) + b"\nx.cpp:3:4: error: no such thing\n")
    with log.open("rb") as file:
        found = ending.first_error(ending.lines_of(file))
    assert found and found.line == "x.cpp:3:4: error: no such thing"
