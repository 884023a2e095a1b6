"""lora_linear with few tokens for the layer's size, where PyTorch's own autograd computes it."""

import importlib

import pytest
import torch

import powertrain
from powertrain.ops.cases.lora_linear import CASES
from powertrain.ops.lora_linear import lora_linear_ref

module = importlib.import_module("powertrain.ops.lora_linear")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_few_tokens(case: powertrain.ops.cases.Case, dtype: torch.dtype) -> None:  # type: ignore[name-defined]
    """Beside float64, no further than one op is, with a margin for the other order of rounding."""
    few, module._FEW = 1 << 36, 0  # type: ignore[attr-defined]
    inputs = case.inputs((1024, 512, 384, 16), dtype, torch.device("cuda"))
    wanted = [t for t in inputs.values() if t is not None and t.requires_grad]
    wide = {
        name: None if t is None else t.detach().double().requires_grad_(t.requires_grad) for name, t in inputs.items()
    }
    options = case.run.keywords
    dy = torch.randn(1024, 384, device="cuda", dtype=torch.float64)

    def results(run: object, tensors: dict[str, torch.Tensor | None]) -> list[torch.Tensor]:
        y = run(**tensors, **options)  # type: ignore[operator]
        leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
        return [y.detach().double(), *(g.double() for g in torch.autograd.grad(y, leaves, dy.to(y.dtype)))]

    exact, one = results(lora_linear_ref, wide), results(powertrain.lora_linear, inputs)
    module._FEW = few  # type: ignore[attr-defined]
    try:
        apart = results(powertrain.lora_linear, inputs)
    finally:
        module._FEW = 0  # type: ignore[attr-defined]
    assert len(apart) == 1 + len(wanted)
    for a, b, right in zip(apart, one, exact, strict=True):
        assert (a - right).norm() <= 2 * (b - right).norm() + 1e-6 * right.norm()
