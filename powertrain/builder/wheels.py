"""Search for a prebuilt wheel: pip asks its own index; releases on GitHub are recognized by their file names."""

import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from powertrain.builder.host import Python
from powertrain.builder.recipes import Recipe

SECONDS = 5.0  # for all questions together
_INDEX_OPTIONS = ("-i", "--index-url", "--extra-index-url", "-f", "--find-links")
_UNREACHABLE = re.compile(r"Could not fetch URL \S+: (?!404)|connection error|timed? ?out|SSL|name resolution", re.I)
_HEAD = """
import sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], method="HEAD")
try:
    print(urllib.request.urlopen(request, timeout=float(sys.argv[2])).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@dataclass(frozen=True)
class Wheel:
    name: str
    get: str  # the command that installs it
    automatic: bool  # the given command takes it by itself
    by_setup: bool = False  # its setup.py downloads it, and so has to run first


class NotAnswered(Exception):
    """Nobody answered in time, or there is no pip to ask."""


def find(
    recipe: Recipe, command: Sequence[str], environment: Mapping[str, str], python: Python, seconds: float = SECONDS
) -> Wheel | None:
    """A wheel of the project for this Python (and torch, CUDA and C++ ABI), if there is one.

    Raises NotAnswered: no network, no pip, or no answer within `seconds`.
    """
    end = time.monotonic() + seconds
    wanted = _wanted(recipe, command)
    options = _index_options(command)
    unanswered: NotAnswered | None = None
    if recipe.release and python.torch and python.torch_cuda:
        version = wanted or _newest(_versions(recipe.package, python, options, end, binary=False))
        url = version and release_url(recipe, version, python)
        try:
            if url and _exists(url, end):
                forced = any(name.endswith("_FORCE_BUILD") and value == "TRUE" for name, value in environment.items())
                by_itself = _by_name(recipe, command) and not forced
                return Wheel(url.rpartition("/")[2], f"pip install {url}", by_itself, by_setup=True)
        except NotAnswered as why:
            # the index may have one all the same
            unanswered = why
    versions = _versions(recipe.package, python, options, end, binary=True)
    version = wanted if wanted in versions else None if wanted else _newest(versions)
    if not version:
        if unanswered:
            raise unanswered
        return None
    return Wheel(
        f"{recipe.package}-{version}",
        f"pip install --only-binary=:all: {recipe.package}=={version}",
        _by_name(recipe, command) and not any(word.startswith("--no-binary") for word in command),
    )


def release_url(recipe: Recipe, version: str, python: Python) -> str:
    """Address of a wheel that the project's releases name by torch, CUDA and C++ ABI."""
    torch = ".".join((python.torch or "").split("+")[0].split(".")[:2])
    tag = "cp" + "".join(python.version.split(".")[:2])
    abi = "TRUE" if _new_abi(python) else "FALSE"
    cuda = (python.torch_cuda or "").split(".")[0]
    return recipe.release.format(version=version, cuda=cuda, torch=torch, abi=abi, tag=tag)


def _new_abi(python: Python) -> bool:
    """Whether torch was built with C++11's strings; its CMake file says so, and its wheels since 2.7 all are."""
    config = Path(python.site, "torch/share/cmake/Torch/TorchConfig.cmake")
    match = re.search(r"_GLIBCXX_USE_CXX11_ABI=(\d)", config.read_text(errors="replace")) if config.is_file() else None
    return match[1] == "1" if match else tuple(map(int, re.findall(r"\d+", python.torch or "")[:2])) >= (2, 7)


def _wanted(recipe: Recipe, command: Sequence[str]) -> str | None:
    """The version that the command names: "vllm==0.9.1"."""
    pattern = rf"{_name_pattern(recipe)}(?:\[[\w,]*\])?==([\w.+!-]+)"
    return next((found[1] for word in command if (found := re.fullmatch(pattern, word, re.I))), None)


def _by_name(recipe: Recipe, command: Sequence[str]) -> bool:
    """Whether the command installs the project by its name on the index, and not a folder or a repository."""
    pattern = rf"{_name_pattern(recipe)}(?:\[[\w,]*\])?(?:[=<>~!].*)?"
    return "install" in command and any(re.fullmatch(pattern, word, re.I) for word in command)


def _name_pattern(recipe: Recipe) -> str:
    return re.sub(r"[-_.]+", "[-_.]+", recipe.package)


def _index_options(command: Sequence[str]) -> list[str]:
    options: list[str] = []
    for index, word in enumerate(command):
        if word in _INDEX_OPTIONS:
            options += command[index : index + 2]
        elif word == "--no-index" or word.startswith(tuple(f"{name}=" for name in _INDEX_OPTIONS if name[1] == "-")):
            options.append(word)
    return options


def _newest(versions: Sequence[str]) -> str | None:
    """The last of pip's list, which ascends, that is not a release candidate or the like."""
    finals = [version for version in versions if not re.search(r"\d(?:a|b|rc|\.dev)\d", version)]
    return (finals or versions)[-1] if versions else None


def _versions(package: str, python: Python, options: Sequence[str], end: float, *, binary: bool) -> list[str]:
    """Versions of the package that pip's index has for this Python, ascending; `binary`: as wheels.

    pip lists them, having read the index and nothing else, when asked for a version that cannot be there.
    (`pip index versions` does not heed --only-binary.)
    """
    if not package:
        return []
    asks = [python.path, "-m", "pip", "install", "-vv", "--dry-run", "--no-deps", "--ignore-installed", "--retries=0"]
    asks += ["--disable-pip-version-check", *(["--only-binary=:all:"] if binary else []), *options]
    done = _run([*asks, f"{package}==0.dev0+none"], end, f"pip, asked for {package},")
    said = done.stdout + done.stderr
    if "No module named pip" in said:
        raise NotAnswered(f"{python.path} has no pip to ask")
    listed = re.search(r"\(from versions: ([^)]+)\)", said)
    versions = [] if not listed or listed[1] == "none" else listed[1].split(", ")
    if not versions and (not listed or _UNREACHABLE.search(said)):
        raise NotAnswered("pip's index could not be reached" if listed else f"pip failed: {_last_line(said)}")
    return versions


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or ["no output"])[-1]


def _exists(url: str, end: float) -> bool:
    """Whether there is a file at this address. Raises NotAnswered if its server does not say."""
    # in a process, which can be ended: the timeout of urllib does not cover name resolution
    asks = [sys.executable, "-c", _HEAD, url, str(max(0.1, end - time.monotonic()))]
    status = _run(asks, end, url).stdout.strip()
    # another answer, a proxy's 403 say, tells nothing about the file
    if status not in ("200", "404"):
        raise NotAnswered(f"{url} cannot be asked for" + (f" (HTTP {status})" if status else ""))
    return status == "200"


def _run(asks: Sequence[str], end: float, what: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            asks, capture_output=True, text=True, timeout=max(0.1, end - time.monotonic()), stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise NotAnswered(f"{what} gave no answer in time") from None
    except OSError as error:
        raise NotAnswered(f"{what}: {error.strerror}") from None
