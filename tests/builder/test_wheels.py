"""Prebuilt wheels: pip is asked, of indexes made here; names of releases; no answer is said and takes no time."""

import http.server
import importlib.util
import os
import socket
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from powertrain.builder import wheels
from powertrain.builder.host import Python
from powertrain.builder.recipes import Recipe, recipe_of
from powertrain.builder.wheels import NotAnswered, Wheel, find, release_url
from powertrain.cli import app

HERE = Python(sys.executable, "3.11.7", True, "/nowhere", "2.8.0+cu128", "12.8")
TINY = Recipe("tinyext", "tinyext", 1, "made up", package="tinyext")
FLASH = recipe_of(["pip", "install", "flash-attn"])
needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="asks pip")


@pytest.fixture(autouse=True)
def _only_the_indexes_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def index(tmp_path: Path) -> list[str]:
    """Options of an index with wheels of tinyext 1.4 and 1.5, and a source distribution of 1.6."""
    for version in ("1.4", "1.5"):
        with zipfile.ZipFile(tmp_path / f"tinyext-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr(
                f"tinyext-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: tinyext\nVersion: {version}\n"
            )
    (tmp_path / "tinyext-1.6.tar.gz").write_bytes(b"")
    return ["--no-index", "--find-links", str(tmp_path)]


@needs_pip
@pytest.mark.parametrize(
    "words, name, automatic",
    [
        (["tinyext"], "tinyext-1.5", True),
        (["tinyext==1.4"], "tinyext-1.4", True),
        (["tinyext==1.6"], None, False),
        (["--no-binary=tinyext", "tinyext"], "tinyext-1.5", False),
        (["git+https://example.org/tinyext"], "tinyext-1.5", False),
        (["."], "tinyext-1.5", False),
    ],
)
def test_pip_is_asked_for_a_wheel(index: list[str], words: list[str], name: str | None, automatic: bool) -> None:
    wheel = find(TINY, ["pip", "install", *index, *words], {}, HERE, seconds=60)
    assert (wheel and wheel.name) == name and (wheel is not None and wheel.automatic) == automatic
    if wheel:
        assert "--only-binary" in wheel.get and wheel.name.replace("-", "==") in wheel.get


@needs_pip
def test_no_wheel_is_an_answer(index: list[str]) -> None:
    assert find(replace(TINY, package="otherext"), ["pip", "install", *index, "otherext"], {}, HERE, seconds=60) is None


@needs_pip
def test_an_index_that_refuses_is_not_an_answer() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, and not listening
        command = ["pip", "install", "-i", f"http://127.0.0.1:{nobody.getsockname()[1]}/simple", "tinyext"]
        with pytest.raises(NotAnswered, match="could not be reached"):
            find(TINY, command, {}, HERE, seconds=60)


def test_an_index_that_is_silent_ends_with_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        command = ["pip", "install", "-i", f"http://127.0.0.1:{silent.getsockname()[1]}/simple", "tinyext"]
        start = time.monotonic()
        with pytest.raises(NotAnswered):
            find(TINY, command, {}, HERE, seconds=1.0)
        assert time.monotonic() - start < 20


def test_a_python_without_pip_or_that_does_not_run(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    bare.chmod(0o755)
    for path, says in ((str(bare), "has no pip"), (str(tmp_path / "gone"), "No such file")):
        with pytest.raises(NotAnswered, match=says):
            find(TINY, ["pip", "install", "tinyext"], {}, replace(HERE, path=path))


@pytest.mark.parametrize(
    "torch, cuda, version, ends",
    [
        ("2.8.0+cu128", "12.8", "3.12.3", "+cu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl"),
        ("2.6.0+cu124", "12.4", "3.10.1", "+cu12torch2.6cxx11abiFALSE-cp310-cp310-linux_x86_64.whl"),
        ("2.10.0", "13.0", "3.13.0", "+cu13torch2.10cxx11abiTRUE-cp313-cp313-linux_x86_64.whl"),
    ],
)
def test_the_name_of_a_release(torch: str, cuda: str, version: str, ends: str) -> None:
    url = release_url(FLASH, "2.8.3", replace(HERE, torch=torch, torch_cuda=cuda, version=version))
    assert url.endswith(f"/v2.8.3/flash_attn-2.8.3{ends}")


def test_the_abi_is_read_from_torch(tmp_path: Path) -> None:
    config = tmp_path / "torch/share/cmake/Torch/TorchConfig.cmake"
    config.parent.mkdir(parents=True)
    for flag, abi in (("0", "FALSE"), ("1", "TRUE")):
        config.write_text(f'set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI={flag}")\n')
        assert f"cxx11abi{abi}" in release_url(FLASH, "2.8.3", replace(HERE, site=str(tmp_path)))


def test_a_release_is_looked_for_before_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(wheels, "_exists", lambda url, end: bool(asked.append(url)) or True)
    wheel = find(FLASH, ["pip", "install", "flash-attn==2.8.3"], {}, HERE)
    assert wheel and wheel.by_setup and wheel.automatic and wheel.get == f"pip install {asked[0]}"
    forced = find(FLASH, ["pip", "install", "flash-attn==2.8.3"], {"FLASH_ATTENTION_FORCE_BUILD": "TRUE"}, HERE)
    assert forced and not forced.automatic


@pytest.mark.parametrize("status, there", [(200, True), (404, False), (403, None)])
def test_a_release_that_is_there_is_not_or_is_not_said(status: int, there: bool | None) -> None:
    class Server(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/x.whl"
        if there is None:
            with pytest.raises(NotAnswered, match="HTTP 403"):
                wheels._exists(url, time.monotonic() + 60)
        else:
            assert wheels._exists(url, time.monotonic() + 60) == there


def test_a_release_that_nobody_could_ask_for_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(url: str, end: float) -> bool:
        raise NotAnswered("no network")

    monkeypatch.setattr(wheels, "_exists", silent)
    for versions, name in (([], None), (["2.8.3"], "flash-attn-2.8.3")):
        monkeypatch.setattr(wheels, "_versions", lambda *_, found=tuple(versions), **__: list(found))
        if name is None:
            with pytest.raises(NotAnswered, match="no network"):
                find(FLASH, ["pip", "install", "flash-attn==2.8.3"], {}, HERE)
        else:
            wheel = find(FLASH, ["pip", "install", "flash-attn==2.8.3"], {}, HERE)
            assert wheel and wheel.name == name


# the command


def _plan(monkeypatch: pytest.MonkeyPatch, answer: "Wheel | Exception | None", *options: str) -> str:
    def told(*_: object, **__: object) -> "Wheel | None":
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(wheels, "find", told)
    command = ["build", "--plan", *options, "--", "pip", "install", "xformers"]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code in (0, 2) and not isinstance(result.exception, (KeyError, NotAnswered)), result.output
    return " ".join(result.output.split())


def test_the_plan_says_what_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = Wheel("xformers-0.0.33", "pip install xformers", automatic=True)
    assert "nothing is compiled: this command takes xformers-0.0.33" in _plan(monkeypatch, wheel)
    assert "a wheel is there: pip install xformers" in _plan(monkeypatch, replace(wheel, automatic=False))
    assert "no wheel of xformers" in _plan(monkeypatch, None)
    assert "is unknown: pip gave no answer" in _plan(monkeypatch, NotAnswered("pip gave no answer"))


def test_offline_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said = _plan(monkeypatch, AssertionError("asked"), "--offline")
    assert "asked" not in said and "wheel of" not in said
