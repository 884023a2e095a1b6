"""Bytes damaged as disks, networks, editors and strangers damage them; and what an answer to them must be."""

import random
import time
from collections.abc import Callable
from typing import Any

LINES, WIDTH = 30, 100  # a screen
_BAD = [
    b"\0",
    b"\xff",
    b"\n",
    b"{",
    b"[" * 2000,
    b"9" * 400,
    b"\xed\xa0\xbd",
    b"-1",
    b"1e999",
    b"null",
    b"NaN",
    b"../../x",
]


def damaged(good: bytes, chance: random.Random) -> bytes:
    """One to three damages: a bit, a run of bytes, a cut, a piece put in, taken out, doubled or moved."""
    data = bytearray(good)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(data) + 1)
        length = min(1 << chance.randrange(10), len(data) - at)
        kind = chance.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at : at + length] = chance.randbytes(length)
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data[at:at] = chance.choice(_BAD)
        elif kind == 4:
            del data[at : at + length]
        elif kind == 5:
            data[at:at] = data[at : at + length]
        else:
            data[at : at + length] = b"\0" * length
    return bytes(data)


def answered(work: Callable[[], Any], *expected: type[BaseException], seconds: float = 20.0) -> BaseException | None:
    """The error of `work`, which must be of these kinds and fit on a screen; None if it gave none."""
    started = time.monotonic()
    try:
        work()
    except expected as error:
        text = str(error)
        shown = sum(1 + len(line) // WIDTH for line in text.splitlines())
        assert text.strip() and shown <= LINES, text
        assert "Traceback" not in text, text
        return error
    finally:
        assert time.monotonic() - started < seconds
    return None
