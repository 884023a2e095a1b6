"""Runs TransformerEngine's own tests of its FP8 recipes against our quantization, on a GPU or a CPU.

    python scripts/te_recipe_tests.py CHECKOUT [-k EXPRESSION]      CHECKOUT: a clone of TransformerEngine

Its test files are copied, unchanged, and run with an adapter in place of the library: its quantizers are
`fp8_quantize`, with scales laid out as its own tests expect them, and its references are read from the checkout.
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
from torch import Tensor
from torch.overrides import TorchFunctionMode

from powertrain.ops.fp8.formulas import Copies
from powertrain.ops.fp8.quantize import fp8_quantize

FILES = ("test_float8_blockwise_scaling_exact.py", "test_float8_current_scaling_exact.py")
TESTS = "quantization_block_tiling or current_scaling_quantization_versus_reference"
_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
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


class BlockQuantizer:
    """Float8BlockQuantizer of theirs: 1x128 (block_scaling_dim 1) or 128x128 (2), both copies on request."""

    def __init__(
        self, *, fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool, amax_epsilon: float,
        force_pow_2_scales: bool, block_scaling_dim: int,
    ) -> None:  # fmt: skip
        assert amax_epsilon == 0 and rowwise
        self.format, self.columnwise, self.power_of_two = _FORMATS[fp8_dtype], columnwise, force_pow_2_scales
        self.by = "group" if block_scaling_dim == 1 else "block"

    def make_empty(self, shape: Any, **options: Any) -> types.SimpleNamespace:
        return types.SimpleNamespace(_columnwise_data=None, _columnwise_scale_inv=None)

    def update_quantized(self, x: Tensor, out: Any) -> Any:
        M, N = x.shape
        made: Copies = fp8_quantize(
            x, self.by, self.format, power_of_two=self.power_of_two, columns=self.columnwise
        )  # fmt: skip
        out._rowwise_data, out._rowwise_scale_inv = _bytes(made.data, N), self._scales(made.scale_inv)
        if self.columnwise:
            out._columnwise_data, out._columnwise_scale_inv = _bytes(made.data_t, M), self._scales(made.scale_inv_t)
        return out

    def _scales(self, scale_inv: Tensor) -> Tensor:
        """As theirs for cuBLAS: of groups transposed, rows padded to multiples of 4."""
        scale_inv = (scale_inv.T if self.by == "group" else scale_inv).contiguous()
        return torch.nn.functional.pad(scale_inv, (0, -scale_inv.shape[1] % 4))


class CurrentScalingQuantizer:
    """Float8CurrentScalingQuantizer of theirs."""

    def __init__(self, *, fp8_dtype: torch.dtype, device: Any, rowwise: bool = True, columnwise: bool = True) -> None:
        self.format = _FORMATS[fp8_dtype]

    def __call__(self, x: Tensor) -> types.SimpleNamespace:
        made = fp8_quantize(x, "tensor", self.format, power_of_two=False, columns=False)
        return types.SimpleNamespace(_data=_bytes(made.data, x.shape[1]), _scale_inv=made.scale_inv)


def _bytes(data: Tensor, columns: int) -> Tensor:
    return data.view(torch.uint8)[:, :columns].contiguous()


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
    te.DType = types.SimpleNamespace(kFloat8E4M3=torch.float8_e4m3fn, kFloat8E5M2=torch.float8_e5m2)
    te.Float8BlockQuantizer, te.Float8CurrentScalingQuantizer = BlockQuantizer, CurrentScalingQuantizer
    te.get_device_compute_capability = lambda: (9, 0)
    te.is_fp8_available = te.is_fp8_block_scaling_available = lambda return_reason=False: (True, "")
    quantized_tensor: Any = sys.modules["transformer_engine.pytorch.quantized_tensor"]
    quantized_tensor.Quantizer = _Quantizer
    constants: Any = sys.modules["transformer_engine.pytorch.constants"]
    constants.TE_DType = constants.TE_DType_To_Torch = {dtype: dtype for dtype in _FORMATS}
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
