"""Of every process that runs tests: seeds, poisoned memory, and the device the kernels run on."""

import fcntl
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

INTERPRET = os.environ.get("POWERTRAIN_INTERPRET") == "1"
if INTERPRET:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import pytest  # noqa: E402
import torch  # noqa: E402

# what torch.empty hands out is NaN, in C++ too, so that an unwritten output cannot pass
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True
torch.set_num_threads(1)

# after each compile torch.compile measures its guards for its log, with caches flushed, and collects young garbage
import torch._dynamo.guards  # noqa: E402

torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
torch._dynamo.config.run_gc_after_compile = False

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # each torch.manual_seed would format three stacks, for seeds kept until there is a device: 1 ms a test
    for _backend in (torch.cuda, torch.xpu, torch.mtia):
        _backend.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]

# of cases that a GPU and plain PyTorch compute in milliseconds
SLOW_IN_INTERPRETER = pytest.mark.slow if INTERPRET else ()


# bytes that a test may leave in torch's allocator, which the other processes on the GPU cannot use
_KEPT = 1 << 30

# at tests' sizes lora_linear would leave its op on a GPU
importlib.import_module("powertrain.ops.lora_linear")._FEW = 0  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_kernel_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a profiled step takes as long as ten others of a small run: done only where its table is looked at."""
    kernel_profile = sys.modules.get("powertrain.train.reporting.kernel_profile")
    if kernel_profile is not None and not HAS_GPU:
        monkeypatch.setattr(kernel_profile, "PROFILED", 0)


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one, else the CPU (where kernels run only under POWERTRAIN_INTERPRET=1)."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(autouse=True)
def memory_of_others() -> Iterator[None]:
    yield
    if HAS_GPU and torch.cuda.memory_reserved() > _KEPT:
        torch.cuda.empty_cache()


@pytest.fixture
def most_gpu_memory() -> Iterator[None]:
    """One such test at a time, in whichever process."""
    with (Path(tempfile.gettempdir()) / "powertrain_most_gpu_memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if "kernels" in item.keywords and not (HAS_GPU or INTERPRET):
            item.add_marker(pytest.mark.skip(reason="kernels run on a GPU or under POWERTRAIN_INTERPRET=1"))
