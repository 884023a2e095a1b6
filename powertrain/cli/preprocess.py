"""`powertrain preprocess`: text to .bin/.idx, in parallel."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from powertrain.cli.paths import one_line, unwritten
from powertrain.runtime.console import Console

if TYPE_CHECKING:
    from powertrain.train.data.encode import Counts, Encoding
    from powertrain.train.data.tokenizer import Tokenizer


class Records(str, Enum):
    """Kinds of records of docs/fine-tuning.md: `Format` of powertrain/train/data/completions.py."""

    messages = "messages"
    pairs = "pairs"
    labels = "labels"
    advantages = "advantages"


def preprocess(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help="text files, jsonl(.zst, .gz), folders")],
    output: Annotated[Path, typer.Option(help="prefix: OUTPUT.bin and OUTPUT.idx are written")],
    tokenizer: Annotated[
        str,
        typer.Option(help="tokenizer.json, a folder with one, gpt2:VOCAB.json:MERGES.txt or bytes"),
    ],
    train_tokenizer: Annotated[
        int | None,
        typer.Option(
            help="first train one with so many ids on the input, into the file --tokenizer", min=257, max=999_999_999
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="processes that tokenize; with 1 threads do", min=1)] = 1,
    append_eod: Annotated[bool, typer.Option("--append-eod", help="end each document with its token")] = False,
    jsonl_key: Annotated[str, typer.Option(help="where the text of a jsonl line is")] = "text",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="leave out documents that are damaged")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace OUTPUT if it is there")] = False,
    completions: Annotated[
        Records | None,
        typer.Option(help="inputs are records for fine-tuning of this kind; writes OUTPUT_document and others"),
    ] = None,
) -> None:
    """Tokenize text into Megatron's and GPT-NeoX's .bin/.idx, byte for byte as GPT-NeoX's preprocess_data.py does.

    A text file is one document, a line of jsonl is one. The files appear when they are whole, so a run that is stopped
    or killed leaves none. A damaged document stops it and is named by file and line; the exit code is 2 then, and where
    the input, the tokenizer or the output cannot be used.

    \b
    powertrain preprocess corpus.jsonl.zst --output data/corpus --tokenizer tokenizer.json --append-eod --workers 8
    powertrain preprocess books/ --output data/books --tokenizer books.json --train-tokenizer 8192 --append-eod
    powertrain preprocess pairs.jsonl --output data/dpo --tokenizer tokenizer.json --completions pairs
    """
    # refused rather than ignored: completions have their own end token and one process
    ignored = {"--workers": workers > 1, "--append-eod": append_eod, "--train-tokenizer": train_tokenizer is not None}
    if completions is not None and any(ignored.values()):
        names = ", ".join(name for name, is_given in ignored.items() if is_given)
        raise typer.BadParameter(f"--completions takes none of {', '.join(ignored)}, got {names}")
    # OUTPUT.bin.bin is a name that readers, who take a data set by either of its files, look for as OUTPUT
    if output.name in ("", "..") or output.suffix in (".bin", ".idx"):
        raise typer.BadParameter(
            f"must be a prefix of names, such as data/corpus, without .bin or .idx, got {str(output)!r}",
            param_hint="--output",
        )
    from powertrain.train.data.corpus import find_files
    from powertrain.train.data.encode import Encoding
    from powertrain.train.data.indexed import token_dtype

    console = Console()
    with one_line(OSError, ValueError, RuntimeError):
        files = find_files(inputs)
        chosen = _tokenizer(files, tokenizer, train_tokenizer, jsonl_key, skip_bad, overwrite, console)
        if completions is not None:
            with _naming(f"--output {output}", files):
                _write_completions(files, output, chosen, completions, skip_bad, overwrite, console)
            return
        encoding = Encoding(chosen, token_dtype(chosen.vocab_size), jsonl_key, append_eod)
        with _naming(f"--output {output}", files):
            counts = _encoded(files, output, encoding, workers, skip_bad, overwrite, console)
    # twenty are enough to find the cause; a damaged corpus may have millions
    for message in counts.bad[:20]:
        console.print(f"left out: {_plain(message)}", soft_wrap=True)
    console.print(
        f"{output}.bin and {output}.idx: {counts.documents} documents, {counts.tokens} tokens of {chosen.vocab_size}; "
        f"left out: {len(counts.bad)} bad, {counts.empty} empty",
        markup=False,
        soft_wrap=True,
    )


def _write_completions(
    files: list[Path],
    output: Path,
    tokenizer: "Tokenizer",
    form: Records,
    skip_bad: bool,
    overwrite: bool,
    console: Console,
) -> None:
    from powertrain.train.data.completions import CompletionEncoding, files_of, warn_without_end, write_completions
    from powertrain.train.data.corpus import raw_documents, refuse_pipes
    from powertrain.train.data.indexed import folder_of

    folder_of(output)
    if tokenizer.eod is None:
        refuse_pipes(files, "its first record is looked at for the end of a text, which the tokenizer does not name")
        warn_without_end(next(raw_documents(files), None))
    encoding = CompletionEncoding(tokenizer, form.value)
    count, bad = write_completions(
        raw_documents(files), output, encoding, skip_bad=skip_bad, overwrite=overwrite, least=1
    )
    for message in bad[:20]:
        console.print(f"left out: {_plain(message)}", soft_wrap=True)
    names = ", ".join(side.tokens for side in files_of(output, form.value))
    console.print(f"{names}: {count} examples; left out: {len(bad)} bad", markup=False, soft_wrap=True)


def _tokenizer(
    files: list[Path], name: str, size: int | None, key: str, skip_bad: bool, overwrite: bool, console: Console
) -> "Tokenizer":
    from powertrain.train.data.corpus import refuse_pipes, texts
    from powertrain.train.data.tokenizer import load_tokenizer, train_tokenizer

    if size is None:
        return load_tokenizer(name)
    path = Path(name)
    refuse_pipes(files, "--train-tokenizer trains on it first")
    if path.suffix != ".json":
        raise ValueError(f"--tokenizer must be the .json file to write when --train-tokenizer is given, got {name!r}")
    # another tokenizer under the same name would give existing data sets other meanings
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path}: exists already; leave --train-tokenizer out to use it, or --overwrite it")
    with console.status(f"training a tokenizer of {size} ids"):
        trained = train_tokenizer(texts(files, key, skip_bad=skip_bad), size)
    with _naming(f"--tokenizer {path}", files):
        path.parent.mkdir(parents=True, exist_ok=True)
        trained.save(path)
    console.print(f"{path}: {trained.vocab_size} ids", markup=False)
    return trained


def _encoded(
    files: list[Path],
    output: Path,
    encoding: "Encoding",
    workers: int,
    skip_bad: bool,
    overwrite: bool,
    console: Console,
) -> "Counts":
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from powertrain.train.data.corpus import is_lines, raw_documents
    from powertrain.train.data.encode import encode
    from powertrain.train.data.indexed import IndexedWriter, folder_of

    folder_of(output)
    # of compressed files the final size is not known, so there is no total to show
    compressed = any(is_lines(file) and file.suffix.lower() in (".zst", ".gz") for file in files)
    total = None if compressed else sum(file.stat().st_size for file in files)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[documents]} documents"),
        TimeRemainingColumn(),
    )
    with (
        Progress(*columns, console=console) as bar,
        IndexedWriter(output, encoding.dtype, overwrite=overwrite) as writer,
    ):
        task = bar.add_task("tokenizing", total=total, documents=0)
        counts = encode(
            raw_documents(files),
            writer,
            encoding,
            workers=workers,
            skip_bad=skip_bad,
            progress=lambda counts: bar.update(task, completed=counts.bytes, documents=counts.documents),
        )
        # within: with --overwrite an input that is empty by mistake would replace a data set
        if not counts.documents:
            first = f", the first: {counts.bad[0]}" if counts.bad else ""
            got = f"none in {len(files)} files ({counts.empty} empty, {len(counts.bad)} bad{first})"
            raise ValueError(f"the input must have a document with tokens, got {got}; nothing was written")
        return counts


@contextmanager
def _naming(name: str, files: list[Path]) -> Iterator[None]:
    """Name what cannot be written: the system's errors name a folder, a temporary file, or on a full disk nothing."""
    try:
        yield
    except OSError as error:
        # errors of our own have no number, and those of the input name its file
        if error.errno is None or error.filename in map(str, files):
            raise
        raise OSError(unwritten(name, error)) from None


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
