"""`import powertrain` is cheap and does nothing; every public name is there, annotated and documented."""

import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import powertrain
import powertrain.parallel
from powertrain.runtime.lazy_exports import resolve

ROOT = Path(__file__).resolve().parent.parent


def _python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)


def test_import_takes_no_time() -> None:
    code = (
        "import time; start = time.process_time(); import powertrain; spent = time.process_time() - start\n"
        "assert spent < 0.3, f'{spent} s of CPU time'"
    )
    assert _python(code).returncode == 0, _python(code).stderr


def test_import_does_nothing() -> None:
    code = """
import os, sys, threading, warnings
before = (dict(os.environ), threading.active_count(), sys.getrecursionlimit(), list(warnings.filters), list(sys.path))
opened = []
watched = ("open", "socket", "subprocess", "ctypes.dlopen")
sys.addaudithook(lambda event, args: opened.append((event, args)) if event.startswith(watched) else None)
import powertrain
import powertrain.parallel
dir(powertrain)
after = (dict(os.environ), threading.active_count(), sys.getrecursionlimit(), list(warnings.filters), list(sys.path))
assert before == after
assert not {"torch", "triton", "numpy"} & set(sys.modules), "a heavy import"
foreign = [(event, args) for event, args in opened if event != "open" or ".py" not in str(args[0])]
assert not foreign, foreign
"""
    result = _python(code)
    assert result.returncode == 0, result.stderr


# names of other libraries that import much of torch, one at a time, each the first of a process
@pytest.mark.parametrize(
    "module", ["flash_attn", "liger_kernel.transformers", "transformer_engine.pytorch", "xformers"]
)
def test_interpreter_is_chosen_before_triton_is_imported(module: str) -> None:
    code = f"import os; os.environ.pop('TRITON_INTERPRET', None); import powertrain.compat.{module}, powertrain.ops"
    result = _python(code, POWERTRAIN_INTERPRET="1")
    assert result.returncode == 0, result.stderr


def _there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("name", powertrain._PUBLIC)
def test_public_name(name: str) -> None:
    if not _there(powertrain._PUBLIC[name]):
        pytest.skip(f"{powertrain._PUBLIC[name]} is not written yet")
    value = getattr(powertrain, name)
    assert value is getattr(importlib.import_module(powertrain._PUBLIC[name]), name)
    assert inspect.getdoc(value), f"{name} has no docstring"
    function = value.__init__ if inspect.isclass(value) else inspect.unwrap(value)
    signature = inspect.signature(function)
    bare = [p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name != "self"]
    assert not bare, f"{name}: no type for {', '.join(bare)}"
    assert signature.return_annotation is not inspect.Signature.empty, f"{name}: no type for the result"


def test_all_and_dir() -> None:
    assert set(powertrain.__all__) == {"__version__", "compat", "losses", "nn", "parallel", *powertrain._PUBLIC}
    assert dir(powertrain) == sorted(powertrain.__all__)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'powertrain' has no attribute 'rms_form'"):
        _ = powertrain.rms_form


@pytest.mark.parametrize("name", ["parallel", "nn"])
def test_packages_are_attributes_and_export_their_names(name: str) -> None:
    package = getattr(powertrain, name)
    for public in package.__all__:
        assert getattr(package, public).__module__ == package._PUBLIC[public]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_compat_exports_its_modules() -> None:
    for name in powertrain.compat.__all__:
        assert inspect.ismodule(getattr(powertrain.compat, name))


@pytest.fixture(scope="module")
def first_call() -> subprocess.CompletedProcess[str]:
    """The output of a process that calls attention once: a line for each question that the tests below ask."""
    return _python(
        "import gc, sys, torch; before = set(sys.modules); import powertrain\n"
        "found = []\n"
        "gc.callbacks.append(lambda phase, facts: found.append(facts['generation']))\n"
        "powertrain.attention\n"
        "gc.callbacks.clear()\n"
        "x = torch.randn(1, 4, 2, 16, requires_grad=True)\n"
        "powertrain.attention(x, x, x, is_causal=True).sum().backward()\n"
        "print('torch.distributed.tensor' in sys.modules.keys() - before)\n"
        "print([name for name in sys.modules if name.startswith('powertrain.ops.') and\n"
        "       name.split('.')[2] in ('gemm', 'fp8', 'moe', 'norm', 'cases')])\n"
        "print(2 in found)\n"
    )


def test_a_first_call_imports_neither_distributed_tensors_nor_other_ops(
    first_call: subprocess.CompletedProcess[str],
) -> None:
    """torch.distributed.tensor took 0.6 to 1.0 s of the time to a first attention call (docs/log/runtime.md)."""
    # nor kernels of other ops: each device function costs time on import
    assert first_call.stdout.splitlines()[:2] == ["False", "[]"], first_call.stdout + first_call.stderr


def test_no_collection_of_the_whole_heap_while_attention_is_imported(
    first_call: subprocess.CompletedProcess[str],
) -> None:
    """Two took 0.2 s of the 0.5 s between torch and a first call."""
    assert first_call.stdout.splitlines()[2:] == ["False"], first_call.stdout + first_call.stderr


_INTERRUPTED = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
from powertrain.runtime.lazy_exports import resolve
sys.path.insert(0, sys.argv[1])
import package
def get():
    return resolve("package", "value", {"value": "package.slow"})
"""


def _interrupted(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """`code` with a package whose module is half imported when it sends this process the signals in `package.sent`."""
    (folder / "package").mkdir()
    (folder / "package/__init__.py").write_text("sent = []\nruns = 0\n")
    (folder / "package/slow.py").write_text(
        "import os, package\npackage.runs += 1\n"
        "for number in package.sent:\n    os.kill(os.getpid(), number)\n    for _ in range(1000): pass\nvalue = 7\n"
    )
    code = _INTERRUPTED + code
    return subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, cwd=ROOT)


def test_a_first_use_that_ctrl_c_interrupts_can_be_repeated(tmp_path: Path) -> None:
    code = """
package.sent = [signal.SIGINT]
try:
    get()
except KeyboardInterrupt:
    assert get() == 7 and package.runs == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("repeated")
"""
    done = _interrupted(tmp_path, code)
    assert done.stdout == "repeated\n", done


def test_a_handler_may_use_what_is_imported_when_its_signal_comes(tmp_path: Path) -> None:
    code = """
seen = []
def handle(number, frame):
    seen.append(get())
signal.signal(signal.SIGTERM, handle)
package.sent = [signal.SIGTERM]
assert get() == 7 and seen == [7] and signal.getsignal(signal.SIGTERM) is handle
results = []
thread = threading.Thread(target=lambda: results.append(get()))
thread.start(); thread.join()
assert results == [7]
print("handled")
"""
    done = _interrupted(tmp_path, code)
    assert done.stdout == "handled\n", done


def test_what_fails_after_a_second_ctrl_c_says_what_to_do(tmp_path: Path) -> None:
    code = """
package.sent = [signal.SIGINT, signal.SIGINT]
try:
    get()
except KeyboardInterrupt:
    package.sent = ["registered already"]
    try:
        get()
    except ImportError as error:
        print(error)
"""
    done = _interrupted(tmp_path, code)
    assert done.stdout.startswith(
        "package.slow cannot be imported, since the import of package.slow was interrupted"
    ), done


def test_ops_that_are_registered_twice_say_what_to_do() -> None:
    code = """
import importlib, powertrain.ops.bias_dropout_add as module
try:
    importlib.reload(module)
except ImportError as error:
    print(error)
"""
    done = _python(code)
    assert "is registered with PyTorch already" in done.stdout and "start a new process" in done.stdout, done


def test_first_uses_in_several_threads_wait_for_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "import time, shared_by_threads as s; s.seen.append({0!r}); time.sleep(0.05); s.seen.append({0!r}); x = 1"
    (tmp_path / "shared_by_threads.py").write_text("seen = []")
    names = [f"used_by_thread_{i}" for i in range(3)]
    for name in names:
        (tmp_path / f"{name}.py").write_text(body.format(name))
    monkeypatch.syspath_prepend(tmp_path)
    threads = [threading.Thread(target=resolve, args=(name, "x", {"x": name})) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = sys.modules["shared_by_threads"].seen
    assert len(seen) == 6 and seen[::2] == seen[1::2]
