"""Text out of a model: what ends it, files of prompts and answers, the keyboard, beginnings of documents."""

import errno
import json
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.cli.generate import _write
from powertrain.cli.generate import generate as generate_command
from powertrain.models.causal_lm import CausalLM
from powertrain.models.generate import Sampler, complete, generate
from powertrain.runtime.console import Console
from powertrain.train.checkpoint.load import load_model
from powertrain.train.completion import Completer, Completion, cut
from powertrain.train.data.tokenizer import ByteTokenizer
from tests.train.tiny_run import open_trainer

PROMPTS = ["line 7", "of the text, of 49", "no"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trainer = open_trainer(folder, "train.steps=30", "optimizer.lr=1e-2", "evaluation.at_end=false", sinks=lambda t: [])
    trainer.fit()
    trainer.close()
    return folder / "run"


def _said(run: Path, *words: str, keyboard: str | None = None) -> Any:
    options = ["generate", str(run), "--device", "cpu", "--max-new-tokens", "12", "--temperature", "0", *words]
    return CliRunner().invoke(app, options, input=keyboard)


def _greedy(run: Path, prompts: list[str]) -> list[list[int]]:
    model, _ = load_model(run, device="cpu")
    tokens = [list(prompt.encode()) or [0] for prompt in prompts]
    return generate(model, tokens, max_new_tokens=12, sampler=Sampler(temperature=0), eod=0)


def test_a_file_of_prompts_becomes_a_file_of_answers(run: Path, tmp_path: Path) -> None:
    """With the keys of GPT-NeoX's files; batches of prompts of other lengths change nothing."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join([*PROMPTS, "", ""]))
    result = _said(run, "--input", str(file), "--logprobs", "--batch-size", "2")
    assert result.exit_code == 0, result.output
    answers = [json.loads(line) for line in Path(f"{file}.output.jsonl").read_text().splitlines()]
    assert [a["context"] for a in answers] == PROMPTS
    for answer, tokens in zip(answers, _greedy(run, PROMPTS), strict=True):
        assert answer["tokens"] == tokens and answer["text"] == ByteTokenizer().decode(tokens)
        assert answer["length"] == len(answer["logprobs"]) == len(tokens)
        assert answer["finished"] == (len(tokens) < 12) and answer["reason"] == (
            "eod" if answer["finished"] else "length"
        )


def test_prompts_end_where_one_says(run: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    file.write_text("two\nlines\n--\n\nthree")
    assert _said(run, "--input", str(file), "--output", str(output), "--prompt-end", r"\n--\n").exit_code == 0
    assert [json.loads(line)["context"] for line in output.read_text().splitlines()] == ["two\nlines", "three"]
    # through a link too
    output.unlink()
    output.symlink_to(file)
    for same in (file, output):
        said = _said(run, "--input", str(file), "--output", str(same))
        assert said.exit_code == 2 and "--output must not be --input" in " ".join(said.output.split())
    assert file.read_text() == "two\nlines\n--\n\nthree"
    file.write_text("\n\n")
    assert "must hold prompts, got none" in _said(run, "--input", str(file)).output


def test_blank_prompts_are_said(run: Path, tmp_path: Path) -> None:
    """They have no answer, as with GPT-NeoX, so answers have other line numbers than prompts."""
    file = tmp_path / "prompts.txt"
    file.write_text("line\n\n \ntext\n\n")
    result = _said(run, "--input", str(file))
    assert f"--input {file}: 2 of 4 prompts are blank and get no answer, the first is number 2\n" in result.stderr
    answers = [json.loads(line) for line in Path(f"{file}.output.jsonl").read_text().splitlines()]
    assert [a["context"] for a in answers] == ["line", "text"]
    file.write_text("line\n\n")
    assert "blank" not in _said(run, "--input", str(file)).stderr


def test_a_prompt_that_is_refused_costs_no_earlier_answers(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    output.write_text("earlier\n" * 1000)
    assert _said(run, "--prompt", "x" * 100, "--output", str(output)).exit_code == 2
    assert output.read_text() == "earlier\n" * 1000
    assert _said(run, "--prompt", "line", "--output", str(output)).exit_code == 0
    assert [json.loads(line)["context"] for line in output.read_text().splitlines()] == ["line"]


def test_answers_to_stdout_are_alone_in_its_file(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`--output /dev/stdout > answers.jsonl`: "1 answers in /dev/stdout" was written over the first of them."""
    assert _said(run, "--prompt", "line", "--output", "/dev/stdout").output == ""
    assert json.loads(capfd.readouterr().out)["context"] == "line"


def test_files_that_cannot_be_read_or_written_are_named_by_option(run: Path, tmp_path: Path) -> None:
    """A file without an answer does not stay; stdout is not taken for --output."""
    said = _said(run, "--input", str(tmp_path))
    assert (said.exit_code, said.stderr) == (2, f"--input {tmp_path} cannot be read: Is a directory\n")
    said = _said(run, "--prompt", "line", "--output", str(tmp_path))
    assert (said.exit_code, said.stderr) == (2, f"--output {tmp_path} cannot be written: Is a directory\n")
    output = tmp_path / "answers.jsonl"
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, unlimited[1]))
    try:
        said = _said(run, "--prompt", "line", "--output", str(output))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert (said.exit_code, said.stderr) == (2, f"--output {output} cannot be written: File too large\n")
    assert not output.exists()
    with mock.patch("rich.console.Console.print", side_effect=OSError(errno.ENOSPC, "No space left")):
        said = _said(run, "--prompt", "line", "--output", str(output))
    assert (said.exit_code, said.stderr) == (2, "output cannot be written: No space left\n")


def test_prompts_of_a_file_are_utf_8(run: Path, tmp_path: Path) -> None:
    """A byte order mark is no part of the first prompt; another encoding is an error that names file and byte."""
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffline\r\ntext\r\n".encode())
    assert _said(run, "--input", str(file)).exit_code == 0
    answers = [json.loads(line) for line in Path(f"{file}.output.jsonl").read_text().splitlines()]
    assert [a["context"] for a in answers] == ["line", "text"]
    file.write_bytes(b"caf\xe9\n")
    result = _said(run, "--input", str(file))
    assert result.exit_code == 2 and f"{file}: must be UTF-8 text, got byte 0xe9 at 3" in result.output
    file.write_bytes("line".encode("utf-16"))
    assert ": it is UTF-16" in _said(run, "--input", str(file)).output


def test_prompts_that_are_json_or_come_from_a_pipe(run: Path, tmp_path: Path) -> None:
    """Braces are part of a prompt; answers to a pipe's would be written beside it, in /dev/fd."""
    file, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    file.write_text('{"a": "b"}\n{"a": "c"}\n')
    result = _said(run, "--input", str(file), "--output", str(output))
    assert result.exit_code == 0 and "its lines are JSON objects, and each is a prompt with its braces" in result.stderr
    with pytest.raises(typer.BadParameter, match="--output must be given for prompts from a pipe or device, got"):
        generate_command(run, input=Path("/dev/null"))


def test_without_a_length_answers_end_with_the_models_positions(run: Path) -> None:
    """64 positions: 128 more tokens, the default, would be refused after any prompt."""
    words = ["generate", str(run), "--device", "cpu", "--temperature", "0", "--prompt", PROMPTS[0]]
    for more in ([], ["--logprobs"]):
        result = CliRunner().invoke(app, [*words, *more])
        assert result.exit_code == 0 and PROMPTS[0] in result.output, result.output


def test_beginnings_of_documents(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    assert _said(run, "--num-samples", "3", "--output", str(output), "--temperature", "1").exit_code == 0
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(answers) == 3 and {a["context"] for a in answers} == {""} and len({a["text"] for a in answers}) > 1
    assert _said(run).output.strip() == ByteTokenizer().decode(_greedy(run, [""])[0]).strip()


def test_an_answer_ends_before_a_text_or_a_token(run: Path) -> None:
    whole = ByteTokenizer().decode(_greedy(run, PROMPTS[:1])[0])
    for words, end in ((["--stop", whole[4:6]], whole[4:6]), (["--stop-token", str(ord(whole[5]))], whole[5])):
        output = _said(run, "--prompt", PROMPTS[0], *words).output
        assert output.rstrip("\n").endswith(PROMPTS[0] + whole[: whole.index(end)])
    assert cut("a stop b end", ["end", "stop", "none"]) == "a " and cut("a", []) == cut("a", ["b"]) == "a"


def test_a_streamed_answer_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Tabs stay tabs, and what looks like an emoji's name too; of a character that is cut off its sign is shown."""
    prompt, answer = "if x:\n\t", b"[b]:100:\t\xc3\xa9\r\n \xe2\x82"
    tokens = [torch.tensor([byte]) for byte in answer]
    _write(Console(soft_wrap=True), prompt, list(prompt.encode()), iter(tokens), ByteTokenizer())
    assert capsys.readouterr().out == f"{prompt}[b]:100:\té\r\n \ufffd\n"


def test_the_keyboard(run: Path) -> None:
    """A line is a prompt; one that is too long is said and the next one is taken; an empty one ends."""
    result = _said(run, "--interactive", keyboard=f"{PROMPTS[0]}\n{'x' * 70}\n{PROMPTS[2]}\n\nnever\n")
    assert result.exit_code == 0, result.output
    first, _, last = (ByteTokenizer().decode(t) for t in _greedy(run, PROMPTS))
    assert PROMPTS[0] + first in result.output and PROMPTS[2] + last in result.output
    assert "prompts must have fewer than" in result.output and "never" not in result.output
    # a pipe of Windows
    piped = _said(run, "--interactive", keyboard=f"\ufeff{PROMPTS[0]}\r\n\r\nnever\r\n")
    assert f"> {PROMPTS[0]}{first}" in piped.output and "never" not in piped.output
    assert _said(run, "--interactive", keyboard="").exit_code == 0


def test_a_keyboard_of_another_encoding_or_none(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is not UTF-8 is said as that; a closed standard input ended in a traceback."""
    with mock.patch("builtins.input", side_effect=["caf\udce9", PROMPTS[0], ""]):
        result = _said(run, "--interactive")
    assert r"a prompt must be UTF-8 text, got '\udce9' at 3" in result.output and PROMPTS[0] in result.output
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(typer.BadParameter, match="--interactive must have a standard input"):
        generate_command(run, interactive=True)


def test_log_probabilities_on_the_screen(run: Path) -> None:
    model, _ = load_model(run, device="cpu")
    row = complete(model, [list(b"no")], max_new_tokens=12, sampler=Sampler(temperature=0), eod=0)[0]
    output = _said(run, "--prompt", "no", "--logprobs").output
    for token, logprob in zip(row.tokens, row.logprobs, strict=True):
        assert f"{ByteTokenizer().decode([token])!r} {logprob:.3f}" in output


def test_prompts_come_from_one_place(run: Path, tmp_path: Path) -> None:
    result = _said(run, "--prompt", "a", "--interactive")
    assert result.exit_code == 2 and "from one of --prompt" in result.output


@pytest.mark.parametrize(
    "words, message",
    [
        (["--interactive", "--output", "answers.jsonl"], "--output must be left out with --interactive"),
        (["--prompt", "a", "--stop", ""], "--stop must not be empty"),
        (["--prompt", "a", "--prompt-end", ""], "--stop must not be empty"),
        (["--prompt", "a", "--stop-token", "256"], "stop tokens must be in [0, 256), the tokenizer's ids, got 256"),
        (["--prompt", "caf\udce9"], r"must be UTF-8 text, got '\udce9' at 3"),
    ],
)
def test_options_without_an_effect_are_refused(words: list[str], message: str, run: Path) -> None:
    result = _said(run, *words)
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())


def test_an_empty_prompt_needs_an_end_of_document() -> None:
    class NoEnd(ByteTokenizer):
        eod = None

    completer = Completer(torch.nn.Identity(), NoEnd(), Sampler(), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not be empty for a tokenizer with no end-of-document token"):
        completer.tokens_of("")


class _Words:
    """Pieces as Llama's tokenizer has them: "_" is the space before a word, which a text does not begin with; <E2> is a
    byte."""

    vocab_size, eod, identity = 300, 0, "words"

    def __init__(self, *pieces: str) -> None:
        self.pieces = ["<end>", *pieces]

    def decode(self, ids: Sequence[int]) -> str:
        data = b"".join(self._bytes(self.pieces[i]) for i in ids)
        return data.decode(errors="replace").removeprefix(" ")

    @staticmethod
    def _bytes(piece: str) -> bytes:
        byte = re.fullmatch("<([0-9A-F]{2})>", piece)
        return bytes.fromhex(byte[1]) if byte else piece.replace("_", " ").encode()

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(f"_{word}") for word in text.split()]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Completion]]:
    """The completions of prompts by a model that says given pieces, a row each."""

    def complete_by(prompts: dict[str, list[str]], stops: list[str]) -> list[Completion]:
        tokenizer = _Words(*{f"_{word}" for p in prompts for word in p.split()}, *chain(*prompts.values()))
        rows = [[tokenizer.pieces.index(piece) for piece in pieces] for pieces in prompts.values()]

        def steps(*_: object) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for column in zip(*rows, strict=True):
                yield torch.tensor(column), torch.zeros(len(rows), len(tokenizer.pieces))

        monkeypatch.setattr("powertrain.models.generate._steps", steps)
        count = len(rows[0])
        model = mock.Mock(spec=CausalLM, config=mock.Mock(vocab_size=1000))
        return list(Completer(model, tokenizer, Sampler(), count, stops)(list(prompts)))  # type: ignore[arg-type]

    return complete_by


def test_the_space_before_the_first_word_is_part_of_an_answer(says: Any) -> None:
    [answer] = says({"one day": ["_two", "x", "_three"]}, [])
    assert answer.text == " twox three"
    # also where a text that ends the answer begins with it
    [answer] = says({"one day": ["_two", "x", "_three"]}, [" two"])
    assert (answer.text, len(answer.row.tokens), answer.row.finished) == ("", 1, "stop")


@pytest.mark.parametrize(
    "pieces, stops, text, count",
    [
        # over the border of two tokens, of three; one that begins another
        (["_a", "b_c", "d", "e"], ["b c"], " a", 2),
        (["_a", "b", "c", "d"], ["abcd"], " ", 4),
        (["_a", "b", "c", "d"], ["abcx", "bc"], " a", 3),
        (["_a", "b", "c", "d"], ["bc", "b"], " a", 2),
        (["_a", "bcd", "e", "f"], ["d", "bc"], " a", 2),
        # longer than the answer
        (["_a", "b", "c", "d"], [" abcde"], " abcd", 4),
        # a character in pieces, whole and cut off; the sign for those that are none
        (["<E2>", "<82>", "<AC>", "d"], ["\u20ac"], "", 3),
        (["<E2>", "<82>", "<AC>", "d"], ["\ufffd"], "\u20acd", 4),
        (["<E2>", "<82>", "d", "e"], ["\ufffd"], "", 3),
        (["b", "<E2>", "<82>", "<AC>"], ["\u20acx"], "b\u20ac", 4),
    ],
)  # fmt: skip
def test_texts_that_end_an_answer(says: Any, pieces: list[str], stops: list[str], text: str, count: int) -> None:
    # with a row beside it that ends at once, and one that never does
    beside = {"two": [stops[0].replace(" ", "_"), *"xyz"], "three": list("wwww")}
    first, second, third = says({"one": pieces, **beside}, stops)
    assert (first.text, len(first.row.tokens)) == (text, count)
    assert second.text == "" or stops[0] == "\ufffd"
    assert (third.text, third.row.finished) == ("wwww", "length")


@pytest.mark.parametrize("stops", ["end", ["end", ""], [3]])
def test_texts_that_would_end_every_answer_are_refused(stops: Any) -> None:
    with pytest.raises(ValueError, match="stops must be a list of texts that are not empty, got"):
        Completer(mock.Mock(), ByteTokenizer(), Sampler(), 3, stops)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        Completer(mock.Mock(), ByteTokenizer(), Sampler(), 3, batch_size=0)
