"""Runs TransformerEngine's own tests of its FP8 recipes against our quantization, on a GPU or a CPU.

    python scripts/te_recipe_tests.py CHECKOUT [-k EXPRESSION]      CHECKOUT: a clone of TransformerEngine

Its test files are copied, unchanged, and run with our quantizers (powertrain.compat.transformer_engine) in place of the
library's; its references are read from the checkout.
Without a GPU tensors on "cuda" are on the CPU, where the formulas are plain PyTorch. Tests of modules against recorded
tensors are left out: the records are not in the checkout. Prints pytest's report;
docs/coming-from-transformer-engine.md has the number that passed.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from powertrain.compat.transformer_engine import pytorch as ours

FILES = ("test_float8_blockwise_scaling_exact.py", "test_float8_current_scaling_exact.py")
TESTS = "quantization_block_tiling or current_scaling_quantization_versus_reference"
_CONFTEST = """
import sys
sys.path.insert(0, {scripts!r})
import te_recipe_tests
te_recipe_tests.install({checkout!r})
import pytest

@pytest.fixture(autouse=True)
def adapted():
    with te_recipe_tests.OnThisDevice():
        yield
"""


class OnThisDevice(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are on the CPU where there is no GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.cuda.is_available() and str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


class _Quantizer:
    """The base class of their reference quantizers, as far as these use it."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


class _Absent(types.ModuleType):
    """A module of theirs that these tests import and do not use: every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


def install(checkout: str) -> None:
    """Put the adapter under the names of their library, and their references beside it."""
    names = [
        "transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe",
        "transformer_engine.pytorch", "transformer_engine.pytorch.constants",
        "transformer_engine.pytorch.quantization", "transformer_engine.pytorch.quantized_tensor",
        "transformer_engine.pytorch.tensor", "transformer_engine.pytorch.tensor.utils",
        "transformer_engine.pytorch.custom_recipes", "transformer_engine_torch",
    ]  # fmt: skip
    for name in names:
        module = sys.modules[name] = _Absent(name)
        module.__path__ = []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    te: Any = sys.modules["transformer_engine.pytorch"]
    te.DType, te.Float8BlockQuantizer = ours.DType, ours.Float8BlockQuantizer
    te.Float8CurrentScalingQuantizer = ours.Float8CurrentScalingQuantizer
    te.get_device_compute_capability = lambda: (9, 0)
    te.is_fp8_available = te.is_fp8_block_scaling_available = lambda return_reason=False: (True, "")
    quantized_tensor: Any = sys.modules["transformer_engine.pytorch.quantized_tensor"]
    quantized_tensor.Quantizer = _Quantizer
    constants: Any = sys.modules["transformer_engine.pytorch.constants"]
    constants.TE_DType, constants.TE_DType_To_Torch = ours.constants.TE_DType, ours.constants.TE_DType_To_Torch
    for name in ("reference_utils", "gemm", "reference_current_scaling"):
        _load(f"transformer_engine.pytorch.custom_recipes.{name}", Path(checkout))


def _load(name: str, checkout: Path) -> None:
    """One file of theirs as the module of that name."""
    file = checkout / (name.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    spec.loader.exec_module(module)


def main() -> int:
    checkout, *options = sys.argv[1:]
    tests = Path(checkout).resolve() / "tests" / "pytorch"
    if not all((tests / name).is_file() for name in FILES):
        raise SystemExit(f"{checkout} must be a clone of TransformerEngine with {', '.join(FILES)} in tests/pytorch")
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            shutil.copy(tests / name, folder)
        shutil.copytree(tests / "references", Path(folder) / "references")
        scripts = str(Path(__file__).resolve().parent)
        conftest = _CONFTEST.format(scripts=scripts, checkout=str(Path(checkout).resolve()))
        (Path(folder) / "conftest.py").write_text(conftest)
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(options or ["-k", TESTS])]
        return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
