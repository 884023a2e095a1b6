"""CPU seconds of each test, few collections of cycles, and torch's setup (torch_setup.py) where tests run."""

import gc
import os
import sys
from collections.abc import Iterator

import psutil
import pytest

import tests.few_collections  # noqa: F401


def pytest_configure(config: pytest.Config) -> None:
    # xdist's first process runs no test, and waits 2 to 3 s for torch before it starts the others
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.import_plugin("tests.torch_setup")


def _cpu_seconds() -> float:
    """Of this process and the children that it has waited for; the same of the server that forks ranks for it."""
    times = os.times()
    seconds = times.user + times.system + times.children_user + times.children_system
    forkserver = sys.modules.get("multiprocessing.forkserver")
    server = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    if server is not None and psutil.pid_exists(server):
        of_server = psutil.Process(server).cpu_times()
        seconds += of_server.user + of_server.system + of_server.children_user + of_server.children_system
    return seconds


_STARTED = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[_STARTED] = _cpu_seconds()
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    item.user_properties.append(("cpu_seconds", _cpu_seconds() - item.stash[_STARTED]))  # scripts/test.py adds them up


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    # pytest collects twice more before the process ends, each time through all of torch
    gc.freeze()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of patched models run our ops on the CPU too, in plain PyTorch, where they would run their own code."""
    from powertrain.patching import attention, replace

    for module in (attention, replace):
        monkeypatch.setattr(module, "has_kernels", lambda x: True)
    monkeypatch.setattr(attention, "_has_kernels_on", lambda device: True)
