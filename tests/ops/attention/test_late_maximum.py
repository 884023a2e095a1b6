"""What the Hopper forward's maximum, which moves late, costs in accuracy: an emulation in float32."""

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention.hopper.softmax import GROWTH

LOG2E = 1.4426950408889634
TOLERANCES = {torch.float16: (4e-3, 4e-4), torch.bfloat16: (2e-2, 5e-3)}  # xFormers' of the forward: absolute, relative


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, growth: float) -> Tensor:
    """hopper_softmax.softmax, block after block of 128 keys from the right."""
    s, factor = q.float() @ k.float().mT, q.shape[-1] ** -0.5 * LOG2E
    m, l, o = torch.tensor(-torch.inf), torch.tensor(0.0), torch.tensor(0.0)  # noqa: E741
    for block, values in zip(reversed(s.split(128, -1)), reversed(v.float().split(128, -2)), strict=True):
        top = block.amax(-1, keepdim=True)
        moved = torch.where((top - m) * factor > growth, top, m)
        p, alpha = torch.exp2((block - moved) * factor), torch.exp2((m - moved) * factor)
        m, l = moved, l * alpha + p.sum(-1, keepdim=True)  # noqa: E741
        o = o * alpha + p.to(v.dtype).float() @ values
    return (o / l).to(v.dtype)


def _largest_error(dtype: torch.dtype, growth: float) -> float:
    """In parts of the tolerance, for inputs as xFormers' tests have them."""
    torch.manual_seed(0)
    q, k, v = ((3 * torch.randn(8, n, 64)).to(dtype) for n in (256, 512, 512))
    exact = (q.double() @ k.double().mT * 64**-0.5).softmax(-1) @ v.double()
    absolute, relative = TOLERANCES[dtype]
    found = _by_blocks(q, k, v, growth).double()
    return ((found - exact).abs() / (absolute + relative * exact.abs())).max().item()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp16", "bf16"])
def test_moves_early_enough(dtype: torch.dtype) -> None:
    at_once, late = _largest_error(dtype, 0.0), _largest_error(dtype, GROWTH.value)
    assert late < 0.75 and late < 1.35 * at_once
    assert _largest_error(dtype, 8.0) > 1.35 * at_once  # what it was
