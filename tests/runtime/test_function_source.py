"""Sources of our device functions are found without the tokenizer, and are the ones that `inspect` finds."""

import functools
import gc
import importlib
import inspect
import pkgutil
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import triton

import powertrain.ops
import powertrain.parallel
from powertrain.runtime import gluon_compat
from powertrain.runtime.compile import function_source
from powertrain.runtime.compile.function_source import source_lines
from powertrain.runtime.gc_disabled import gc_disabled
from powertrain.runtime.settings import settings


def _device_functions() -> list[FunctionType]:
    for package in (powertrain.ops, powertrain.parallel):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("powertrain."):
            for value in vars(module).values():
                function = getattr(value, "fn", None)
                if type(function) is FunctionType:
                    found[function] = None
    return list(found)


def test_sources_are_those_of_inspect(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = _device_functions()
    assert len(functions) > 350
    expected = [inspect.getsourcelines(function) for function in functions]
    monkeypatch.setattr(inspect, "getsourcelines", None)  # every one of ours is laid out plainly
    assert [source_lines(function) for function in functions] == expected


_TEXTS = {
    "comments": "def f(\n    a,\n):\n    return a\n\n    # the last\n\n\n# of the next\ndef g(): ...\n",
    "comment before code": "@staticmethod\ndef f(a):\n    if a:\n# in the first column\n        return a\n\n\nb = 1\n",
    "end of file": "def f(a):\n    return a\n",
    "no newline at the end": "def f(a):\n    return a",
    "a string in the first column": 'def f(a):\n    return """\nb = 1\n"""\n\n\nb = 1\n',
    "another quote": "def f(a):\n    return '''\nb = 1\n'''\n\n\nb = 1\n",
    "decorators": "@staticmethod\n@(\n    lambda x: x\n)\ndef f(a):\n    return a\n\n\n@staticmethod\ndef g(): ...\n",
    "a nested function": "if True:\n    def f(a):\n        return a\n\n    b = 1\n",
    "lambda": "f = lambda a: (\n    a\n)\n",
}


@pytest.mark.parametrize("text", _TEXTS.values(), ids=_TEXTS)
def test_odd_layouts(text: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(text)
    module = types.ModuleType("powertrain.odd")
    exec(compile(text, str(file), "exec"), vars(module))
    function: Any = module.f
    function = getattr(function, "__func__", function)
    function.__module__ = "powertrain.odd"
    assert source_lines(function) == inspect.getsourcelines(function)


def test_a_formatted_string_is_one_token() -> None:
    """From Python 3.12 on it is many."""
    source = 'x = f"{a!r:>{width}} {{b}} {f\'{c}\'}" + rf"""\n{d}\n"""  # comment\nif x:\n    y\n'
    assert list(function_source.source_tokens(source)) == [
        "x", "=", 'f"{a!r:>{width}} {{b}} {f\'{c}\'}"', "+", 'rf"""\n{d}\n"""', ";",
        "if", "x", ":", ";", "INDENT", "y", ";", "DEDENT", "",
    ]  # fmt: skip


_HASH = """
import hashlib, importlib.util, sys
spec = importlib.util.spec_from_file_location("function_source", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
tokens = [" ".join(module.source_tokens(open(path).read())) for path in sys.argv[2:]]
print(hashlib.sha256("\\n".join(tokens).encode()).hexdigest())
"""


@functools.cache  # this Python's is compared with each of the others'
def _hash_of(python: str) -> str | None:
    files = [
        function_source.__file__,
        gluon_compat.__file__,
        *sorted(map(str, Path(powertrain.ops.__path__[0]).rglob("*.py"))),
    ]
    done = subprocess.run([python, "-c", _HASH, *files], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


# 3.11 has the tokenizer of 3.10, and 3.13 that of 3.12
@pytest.mark.parametrize(
    "version",
    [
        pytest.param(f"3.{minor}", marks=pytest.mark.slow if minor in (11, 13) else ())
        for minor in range(10, 16)
    ],
)  # fmt: skip
def test_keys_are_the_same_on_other_versions_of_python(version: str) -> None:
    """A kernel pack is made on one machine and used on others."""
    found = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), shutil.which(f"python{version}")]
    theirs = next((one for python in found if python and (one := _hash_of(str(python)))), None)
    if theirs is None:
        pytest.skip(f"no Python {version} here")
    assert theirs == _hash_of(sys.executable)


@pytest.mark.skipif(settings().interpret, reason="the interpreter has no JITFunction")
@pytest.mark.parametrize("jit", [triton.jit, gluon_compat.gluon.jit])
def test_triton_asks_here(jit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of 220 functions of attention is tokenized on import."""
    asked = []
    find = function_source.Inspect.getsourcelines
    monkeypatch.setattr(function_source.Inspect, "getsourcelines", lambda self, f: asked.append(f) or find(f))
    function = jit(_tokens_of_nothing)
    assert asked == [_tokens_of_nothing] and "return" in function.src


def _tokens_of_nothing() -> None:
    return


def test_collections_go_on_afterwards() -> None:
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), gc_disabled():
        assert not gc.isenabled()
        with gc_disabled():
            pass
        assert not gc.isenabled()
        _ = 1 // 0
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_disabled():
            pass
        assert not gc.isenabled()  # who had none before gets none
    finally:
        gc.enable()
