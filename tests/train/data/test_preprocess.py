"""`powertrain preprocess`."""

import json
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.train.data.indexed import IndexedData
from powertrain.train.data.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["preprocess", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {n} of some text"}) + "\n" for n in range(200)))
    return path


def test_bytes_are_what_gpt_neox_would_write(tmp_path: Path) -> None:
    """The published layout packed by hand, from byte ids, with and without end-of-document."""
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "c"}\n')
    # rich would take [a] for a style
    assert "/o[a].bin and " in run(tmp_path / "a.jsonl", "--output", tmp_path / "o[a]", "--tokenizer", "bytes")[1]
    for flags, values, sizes in (((), b"abc", (2, 1)), (("--append-eod",), b"ab\0c\0", (3, 2))):
        code, output = run(
            tmp_path / "a.jsonl", "--output", tmp_path / "o", "--tokenizer", "bytes", "--overwrite", *flags
        )
        assert code == 0 and f"2 documents, {len(values)} tokens of 256" in output
        assert (tmp_path / "o.bin").read_bytes() == struct.pack(f"<{len(values)}H", *values)
        wanted = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3) + struct.pack("<2i", *sizes)
        assert (tmp_path / "o.idx").read_bytes() == wanted + struct.pack("<2q3q", 0, 2 * sizes[0], 0, 1, 2)


def test_trains_a_tokenizer_and_works_in_parallel(tmp_path: Path, jsonl: Path) -> None:
    tokenizer = tmp_path / "new" / "t.json"
    code, output = run(jsonl, "--output", tmp_path / "one", "--tokenizer", tokenizer, "--train-tokenizer", 300)
    assert code == 0 and "200 documents" in output, output
    code, output = run(jsonl, "--output", tmp_path / "two", "--tokenizer", tokenizer, "--workers", 2)
    assert code == 0, output
    for ending in ("bin", "idx"):
        assert (tmp_path / f"one.{ending}").read_bytes() == (tmp_path / f"two.{ending}").read_bytes()
    text = load_tokenizer(str(tokenizer)).decode(IndexedData(tmp_path / "one")[7].tolist())
    assert text == "line 7 of some text"
    code, output = run(jsonl, "--output", tmp_path / "x", "--tokenizer", tokenizer, "--train-tokenizer", 300)
    assert code == 2 and "exists already; leave --train-tokenizer out to use it" in output


def test_damaged_lines(tmp_path: Path, jsonl: Path) -> None:
    with jsonl.open("a") as file:
        file.write('{"text": ["[red]a", 3]}\n{broken\n')
    arguments = (jsonl, "--output", tmp_path / "o", "--tokenizer", "bytes")
    code, output = run(*arguments)
    assert code == 2 and f"{jsonl}:201: must hold a string under 'text', got ['[red]a', 3]" in output
    assert not list(tmp_path.glob("o.*")) and not list(tmp_path.glob(".*"))
    code, output = run(*arguments, "--skip-bad")
    assert code == 0 and f"{jsonl}:202: must be a line of JSON" in output
    assert "200 documents" in output and "left out: 2 bad, 0 empty" in output
    code, output = run(*arguments)
    assert code == 2 and "o.idx: exists already" in output


def test_wrong_arguments(tmp_path: Path, jsonl: Path) -> None:
    output = ("--output", tmp_path / "o", "--tokenizer")
    for arguments, words in (
        ((tmp_path / "none.txt", *output, "bytes"), "none.txt: no such file or folder"),
        ((jsonl, *output, "none.json"), "no such file none.json"),
        ((jsonl, *output, "bytes", "--train-tokenizer", 300), "--tokenizer must be the .json file to write"),
        ((jsonl, *output, "bytes", "--jsonl-key", "body"), "a.jsonl:1: must have a key 'body', got keys 'text'"),
    ):
        code, said = run(*arguments)
        assert code == 2 and words in said, said


@pytest.mark.parametrize(
    "text, words", [("", "(0 empty, 0 bad)"), ('{"text": ""}', "(1 empty"), ("no JSON", "(0 empty, 1 bad")]
)
def test_an_input_without_documents_replaces_nothing(text: str, words: str, tmp_path: Path, jsonl: Path) -> None:
    """An empty data set was written, over another one with --overwrite."""
    output = ("--output", tmp_path / "o", "--tokenizer", "bytes", "--skip-bad", "--overwrite")
    assert run(jsonl, *output)[0] == 0
    before = (tmp_path / "o.bin").read_bytes()
    (tmp_path / "none.jsonl").write_text(text)
    code, said = run(tmp_path / "none.jsonl", *output)
    assert code == 2 and "the input must have a document with tokens, got none in 1 files" in said and words in said
    code, records = run(tmp_path / "none.jsonl", *output, "--completions", "pairs")
    assert code == 2 and "the input must have at least 1 records that can be used, got 0" in records
    assert (tmp_path / "o.bin").read_bytes() == before and not list(tmp_path.glob("o_*"))


def test_an_earlier_output_in_the_input_s_folder_is_no_text(tmp_path: Path) -> None:
    """Tokens of ASCII bytes are UTF-8: .bin, .idx and .sum became documents of the second data set."""
    folder = tmp_path / "books"
    folder.mkdir()
    for name in ("a.txt", "b.idx", "c.bin"):
        (folder / name).write_text("hello world")
    for number in range(3):
        output = folder / "sets" / f"v1.{number % 2}"
        code, said = run(folder, "--output", output, "--tokenizer", "bytes", "--overwrite")
        assert code == 0 and "3 documents, 33 tokens" in said, said
    words = "books: the .bin, .idx and .sum of sets/v1.0, sets/v1.1 are left out: they hold tokens"
    assert words in said
    code, said = run(folder / "sets", "--output", tmp_path / "o", "--tokenizer", "bytes")
    assert code == 2 and "must hold a file that is not hidden, got data sets alone" in said


def test_pipes_that_would_be_read_twice(tmp_path: Path) -> None:
    """The second time they are empty: nothing was written, without a word."""
    os.mkfifo(tmp_path / "pipe")
    words = (tmp_path / "pipe", "--output", tmp_path / "o", "--tokenizer", tmp_path / "t.json")
    code, said = run(*words, "--train-tokenizer", 300)
    assert code == 2 and f"{tmp_path / 'pipe'}: must be a file or a folder, got a pipe, which cannot be read tw" in said
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("some text",))
    writer.start()
    code, said = run(*words[:-1], "bytes")
    writer.join()
    assert code == 0 and IndexedData(tmp_path / "o")[0].tolist() == list(b"some text")


def test_output_that_cannot_be_written_is_named(tmp_path: Path, jsonl: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", Path("/proc")):
        code, said = run(jsonl, "--output", folder / "o", "--tokenizer", "bytes")
        assert code == 2 and f"--output {folder / 'o'} cannot be written: " in said, said
    files = sorted(tmp_path.iterdir())
    words = ("--output", tmp_path / "o", "--tokenizer", "bytes")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, unlimited[1]))
    try:
        ends = [run(jsonl, *words), run(jsonl, "--output", tmp_path / "o", "--tokenizer", tmp_path / "t.json",
                                        "--train-tokenizer", 300)]  # fmt: skip
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert [code for code, _ in ends] == [2, 2] and sorted(tmp_path.iterdir()) == files
    assert f"--output {tmp_path / 'o'} cannot be written: File too large" in ends[0][1]
    assert f"--tokenizer {tmp_path / 't.json'} cannot be written: File too large" in ends[1][1]


def test_kill_leaves_no_file(tmp_path: Path) -> None:
    """Killed while it reads: the input is a pipe that stays open, so the command cannot be done."""
    import os

    pipe = tmp_path / "endless.jsonl"
    os.mkfifo(pipe)
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-m", "powertrain", "preprocess", str(pipe), "--output", str(out / "o")]
    with subprocess.Popen([*command, "--tokenizer", "bytes"], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        with pipe.open("wb", buffering=0) as feed:
            # more than two blocks and the pipe hold: when it is written, documents have gone into the output
            line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
            for _ in range(2500):
                feed.write(line)
            time.sleep(0.1)
            assert process.poll() is None
            process.send_signal(signal.SIGKILL)
    assert not list(out.iterdir())
