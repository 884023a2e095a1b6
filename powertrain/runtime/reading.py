"""Files from other sources: any library's error about a damaged file becomes a ValueError of one line with its name."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# a config.json, an index, a tokenizer.json: the largest there are have some 30 MB
MOST_JSON_BYTES = 1 << 28


@contextmanager
def reading(file: Path | str, must: str) -> Iterator[None]:
    """Turn any error raised in the block into `FILE must MUST, got ...`, a ValueError of one line.

    OSError passes: it names the file and is no damage. So does a ValueError that names the file already.
    """
    try:
        yield
    except (OSError, MemoryError):
        raise
    except BaseException as error:
        # libraries raise kinds of their own (safetensors, torch, struct); tokenizers' Rust panics are no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, ValueError) and str(file) in str(error):
            raise
        raise ValueError(f"{file} must {must}, got {one_line(error)}") from None


def one_line(error: BaseException, most: int = 300) -> str:
    """An error's words in at most so many characters."""
    words = " ".join(str(error).split()) or type(error).__name__
    words = f"{type(error).__name__} {words}" if isinstance(error, (KeyError, IndexError)) else words
    return words if len(words) <= most else f"{words[:most]} …"


def why(error: OSError) -> str:
    """The error's message without its path. Where a folder cannot be made, "File exists" hides what stands there, so
    a broken link and a file are named instead."""
    path = Path(os.fsdecode(error.filename or ""))
    if error.filename and path.is_symlink() and not path.exists():
        return f"a link to {path.readlink()}, which is not there"
    if isinstance(error, FileExistsError):
        return "Not a directory"
    return error.strerror or one_line(error)


def named(error: BaseException) -> str:
    """An error's message. The system's errors as file and reason, in place of "[Errno 27] File too large: 'file'"."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    return str(error.strerror) if error.filename is None else f"{os.fsdecode(error.filename)}: {error.strerror}"


def read_json(file: Path, most_bytes: int = MOST_JSON_BYTES) -> Any:
    """The value in a JSON file. Raises OSError, or ValueError naming file, line and column."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    if (size := file.stat().st_size) > most_bytes:
        raise ValueError(f"{file} must have at most {most_bytes} bytes, got {size}")
    try:
        return json.loads(file.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} must be UTF-8 text, got byte 0x{error.object[error.start]:02x} at {error.start}"
        ) from None
    except RecursionError:
        raise ValueError(f"{file} must be JSON, got one that is nested too deeply") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ValueError(f"{file} must be JSON: {error.msg} ({where})") from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"{file} must be JSON: {one_line(error)}") from None
