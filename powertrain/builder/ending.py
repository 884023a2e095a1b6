"""The first real error in a build's output. pip's last lines only repeat that the build failed."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO

from powertrain.builder.progress import bare

LONGEST_LINE = 2048  # bytes of a line that are looked at


@dataclass(frozen=True)
class Failure:
    line: str  # as the builder wrote it
    cause: str
    fix: str


# first match wins, in this order for each line
_KNOWN = (
    (
        r"Killed\b|fatal error: Killed signal|signal 9|exit code 137|died due to signal 9|out of memory allocating",
        "a compiler was killed for want of memory",
        "fewer jobs (MAX_JOBS=1), more memory or swap; the plan of the next run knows this build's sizes",
    ),
    (r"No space left on device", "the disk is full", "set TMPDIR to a folder on a larger disk"),
    (
        r"[Uu]nsupported gpu architecture '(compute_\d+\w?)'",
        "nvcc does not know this GPU",
        "a CUDA toolkit that lists the arch, or --arch for another",
    ),
    (
        r"unsupported GNU version|host compiler .* is not supported",
        "the host compiler is too new for nvcc",
        "set CC and CXX to the version that the message names",
    ),
    (
        r"The detected CUDA version \(([\d.]+)\) mismatches",
        "nvcc and torch have different CUDA versions",
        "set CUDA_HOME to a toolkit of torch's major version",
    ),
    (
        r"CUDA_HOME environment variable is not set|nvcc.*not found|No CUDA toolset found|Failed to find nvcc",
        "nvcc was not found",
        "set CUDA_HOME to the toolkit's folder",
    ),
    (
        r"fatal error: (\S+\.(?:h|hpp|cuh)): No such file",
        "a header is missing",
        "install the library that has it, or name its folder in CPATH",
    ),
    (
        r"ModuleNotFoundError: No module named '(\w+)'",
        "the build needs a Python package that is not there",
        "install it first, and use --no-build-isolation if it is torch",
    ),
    (r"cannot find -l(\S+)", "a library to link with is missing", "install it, or name its folder in LIBRARY_PATH"),
    (
        r"undefined reference to",
        "a symbol is missing at link time",
        "the library's version does not suit; see the line",
    ),
    (
        r"could not read (Username|Password)|terminal prompts disabled|EOFError: EOF when reading a line|"
        r"Host key verification failed|Permission denied \(publickey|No such device or address: '/dev/tty'|"
        r"a terminal is required to read",
        "something was asked, and nobody was there to answer",
        "run it in a terminal, or answer beforehand: credentials, a key, -y",
    ),
    (
        r"(Could not resolve host|Connection (refused|timed out)|Temporary failure in name resolution|RPC failed)",
        "the network failed",
        "check the connection and the proxy, then run it again",
    ),
    (
        r"CMake Error|CMake [\d.]+ or higher is required",
        "CMake refused",
        "the lines after it say why",
    ),
    (
        r"invalid command 'bdist_wheel'",
        "setuptools cannot make wheels",
        "pip install --upgrade setuptools wheel in the environment that builds",
    ),
    (
        r"^(?=.*\berror\b\s*:).*[\w.+/-][:(]\d.*\berror\b\s*:|\bnvcc fatal\b|\bptxas fatal\b",
        "the compiler refused the source",
        "see the line",
    ),
    (r"^\s*\w*([Ee]rror|ERROR|Exception): ", "the build script failed", "see the line"),
    (r"^ninja: (error|fatal)|^make.*: \*\*\* ", "the builder stopped", "see the lines before it"),
)
_PATTERNS = tuple((re.compile(pattern), cause, fix) for pattern, cause, fix in _KNOWN)
_NOISE = re.compile(r"^\s*(ERROR: Failed building|error: subprocess-exited|× |note: |.*Werror|subprocess\.Called)")


def lines_of(log: IO[bytes]) -> Iterator[str]:
    """A log's lines, each cut to the length that is searched: a compiler's command line can be longer than a book."""
    whole = True
    # with a limit: a regular expression over a line of many megabytes would take longer than the build's end
    while part := log.readline(LONGEST_LINE):
        if whole:
            yield part.decode(errors="replace")
        whole = part.endswith(b"\n")


def first_error(lines: Iterable[str]) -> Failure | None:
    """The first line with a known cause, and its meaning; None if there is none."""
    # uv puts DEBUG before the builder's own lines, and patterns look at their beginning
    for line in map(bare, lines):
        # pip's closing lines say that something failed, never what
        if _NOISE.match(line):
            continue
        for pattern, cause, fix in _PATTERNS:
            if pattern.search(line):
                return Failure(line.strip(), cause, fix)
    return None
