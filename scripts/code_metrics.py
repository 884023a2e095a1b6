"""`python scripts/code_metrics.py [FOLDER] [--list WHAT]`: length of files and functions, comments, private names.

FOLDER (default: powertrain) is read with `ast` and `tokenize`, nothing is imported. To compare with an older commit,
check it out with `git worktree add` and give its folder. docs/log/house.md holds the counts and the goals.
"""

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LONG_FILE, LONG_FUNCTION = 500, 60
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
# comments that tools read, and shapes of tensors: they give no reason
NO_REASON = ("# type:", "# noqa", "# fmt:", "# ruff:", "# [", "# tile of [", "# scalar")


class Private(NamedTuple):
    """A name that begins with an underscore, used outside the file that defines it."""

    file: Path
    line: int
    name: str


def comments(source: str) -> tuple[list[str], int]:
    """Texts of comments on lines of their own, and the number of lines with code, docstrings included."""
    own, code = [], set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            own.append(token.string)
        elif token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return own, len(code)


def long_functions(tree: ast.AST) -> Iterator[tuple[int, int, str]]:
    """(lines, first line, name) of functions over LONG_FUNCTION lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LONG_FUNCTION:
                yield lines, node.lineno, node.name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(file: Path, tree: ast.AST, modules: set[str]) -> Iterator[Private]:
    """Private names imported from a module of the folder, and private attributes of such a module."""
    imported = set()  # local names of modules of the folder
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("powertrain")):
            for alias in node.names:
                if _is_private(alias.name):
                    yield Private(file, node.lineno, f"{node.module}.{alias.name}")
                elif alias.name in modules:
                    imported.add(alias.asname or alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            if _is_private(node.attr):
                yield Private(file, node.lineno, f"{node.value.id}.{node.attr}")


class Counts(NamedTuple):
    """One file's."""

    file: Path
    lines: int
    code: int  # lines with code or a docstring
    comments: list[str]  # on lines of their own
    what: int  # times the word occurs
    functions: list[tuple[int, int, str]]  # those over LONG_FUNCTION lines
    private: list[Private]


def count(file: Path, modules: set[str]) -> Counts:
    source = file.read_text()
    tree = ast.parse(source)
    own, code = comments(source)
    what = len(re.findall(r"\bwhat\b", source, flags=re.IGNORECASE))
    private = list(private_uses(file, tree, modules))
    return Counts(file, source.count("\n"), code, own, what, list(long_functions(tree)), private)


def table(counts: list[Counts]) -> str:
    lines, code = sum(c.lines for c in counts), sum(c.code for c in counts)
    own = [text for c in counts for text in c.comments]
    reasons = [text for text in own if not text.startswith(NO_REASON)]
    rows = {
        "files": len(counts),
        "lines; with code or docstring": f"{lines}; {code}",
        f"files over {LONG_FILE} lines": sum(c.lines > LONG_FILE for c in counts),
        f"functions over {LONG_FUNCTION} lines": sum(len(c.functions) for c in counts),
        "private names of another file": sum(len(c.private) for c in counts),
        "comments on lines of their own, of all lines": f"{len(own)}, {len(own) / lines:.2%}",
        "of these neither shapes nor for tools, of lines with code": f"{len(reasons)}, {len(reasons) / code:.2%}",
        'the word "what" in 1000 lines': f"{1000 * sum(c.what for c in counts) / lines:.2f}",
    }
    return "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def listing(counts: list[Counts], subject: str) -> list[str]:
    if subject == "private":
        return [f"{use.file}:{use.line} {use.name}" for c in counts for use in c.private]
    if subject == "functions":
        return sorted(
            (f"{size:5} {c.file}:{line} {name}" for c in counts for size, line, name in c.functions), reverse=True
        )
    if subject == "files":
        return sorted((f"{c.lines:5} {c.file}" for c in counts if c.lines > LONG_FILE), reverse=True)
    return sorted(f"{len(c.comments) / max(1, c.code):7.2%} of {c.code:4} {c.file}" for c in counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("powertrain"))
    parser.add_argument("--list", choices=["private", "functions", "files", "comments"])
    options = parser.parse_args()
    files = sorted(options.folder.rglob("*.py"))
    counts = [count(file, {file.stem for file in files}) for file in files]
    print("\n".join(listing(counts, options.list)) if options.list else table(counts))


if __name__ == "__main__":
    main()
