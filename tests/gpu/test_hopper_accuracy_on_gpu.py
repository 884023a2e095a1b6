"""Forward and backward on sm_90 within xFormers' tolerances, element by element, on inputs of deviation 3 as there.

A maximum that moves late (hopper_softmax.GROWTH) had cost float16 a few elements in millions.
"""

import pytest
import torch

from powertrain.ops.attention import attention
from tests.gpu.arch import ON_SM90
from tests.ops.attention.attention_launches import any_order

pytestmark = ON_SM90
# forward and gradients: absolute, relative
TOLERANCES = {torch.float16: ((4e-3, 4e-4), (0.2, 2e-2)), torch.bfloat16: ((2e-2, 5e-3), (0.9, 0.1))}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_no_element_beyond(backend: str, causal: bool, head_dim: int, dtype: torch.dtype) -> None:
    beyond, largest = [0] * 4, [0.0] * 4
    for seed in range(8):
        torch.manual_seed(seed)
        leaves = [
            (3 * torch.randn(8, n, 4, head_dim, device="cuda")).to(dtype).requires_grad_() for n in (256, 640, 640)
        ]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        dout = torch.randn(8, 256, 4, head_dim, device="cuda").to(dtype)
        with any_order():
            out = attention(*leaves, is_causal=causal, backend=backend)
            found = [out, *torch.autograd.grad(out, leaves, dout)]
        out = attention(*exact, is_causal=causal, backend="reference")
        expected = [out, *torch.autograd.grad(out, exact, dout.double())]
        for n, (x, y) in enumerate(zip(found, expected, strict=True)):
            absolute, relative = TOLERANCES[dtype][n > 0]
            error = (x.double() - y).abs() / (absolute + relative * y.abs())
            beyond[n] += int((error > 1).sum())
            largest[n] = max(largest[n], error.max().item())
    names = ("out", "dq", "dk", "dv")
    print({name: (count, round(most, 3)) for name, count, most in zip(names, beyond, largest, strict=True)})
    assert not any(beyond), dict(zip(names, zip(beyond, largest, strict=True), strict=True))
    if backend == "hopper" and head_dim > 32:
        assert largest[0] < 0.85  # 0.63 and 0.69 in the emulation, 1.02 and 0.95 where the maximum moved by 2^8
