"""Functions of numbers at the edge, as a GPU's instructions have them: one test for the interpreter and for a GPU."""

import math

import pytest
import torch
import triton.language as tl

import powertrain.runtime.compile.triton_compat  # noqa: F401
from powertrain.runtime.launch import kernel

_SUBNORMAL, _SMALLEST, _NAN = 1e-40, 2.0**-126, math.nan
_CASES = {
    # name: x, and the result of each; of maximum, minimum and clamp with 1
    "exp2": ([-126.0, -127.0, -149.0, _SUBNORMAL, -math.inf, _NAN], [_SMALLEST, 0.0, 0.0, 1.0, 0.0, _NAN]),
    "exp": ([-87.0, -math.inf, math.inf, _NAN], [math.exp(-87.0), 0.0, math.inf, _NAN]),
    "sqrt": ([_SUBNORMAL, _SMALLEST, -1.0, math.inf], [0.0, 2.0**-63, _NAN, math.inf]),
    "sqrt_rn": ([_SUBNORMAL], [1e-20]),
    "rsqrt": ([_SUBNORMAL, 0.0, _SMALLEST, math.inf], [math.inf, math.inf, 2.0**63, 0.0]),
    "log": ([_SUBNORMAL, 0.0, -1.0], [math.log(1e-40), -math.inf, _NAN]),
    "log2": ([_SUBNORMAL, 0.0, -1.0], [math.log2(1e-40), -math.inf, _NAN]),
    "maximum": ([_NAN, 2.0, -math.inf], [1.0, 2.0, 1.0]),
    "minimum": ([_NAN, 2.0, -math.inf], [1.0, 1.0, -math.inf]),
    "clamp": ([_NAN, 2.0, -math.inf, 0.5], [0.0, 1.0, 0.0, 0.5]),
    "clamp_nan": ([_NAN, 2.0, -math.inf, 0.5], [_NAN, 1.0, 0.0, 0.5]),
}


@kernel()
def _function_kernel(x_ptr, y_ptr, n, NAME: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < n, other=0.0)
    if NAME == "maximum":
        y = tl.maximum(x, 1.0)
    elif NAME == "minimum":
        y = tl.minimum(x, 1.0)
    elif NAME == "clamp":
        y = tl.clamp(x, 0.0, 1.0)
    elif NAME == "clamp_nan":
        y = tl.clamp(x, 0.0, 1.0, propagate_nan=tl.PropagateNan.ALL)
    elif NAME == "exp2":
        y = tl.exp2(x)
    elif NAME == "exp":
        y = tl.exp(x)
    elif NAME == "sqrt":
        y = tl.sqrt(x)
    elif NAME == "sqrt_rn":
        y = tl.sqrt_rn(x)
    elif NAME == "rsqrt":
        y = tl.rsqrt(x)
    elif NAME == "log":
        y = tl.log(x)
    else:
        y = tl.log2(x)
    tl.store(y_ptr + place, y, mask=place < n)


@pytest.mark.kernels
@pytest.mark.parametrize("name", _CASES)
def test_functions_at_the_edge(name: str, device: torch.device) -> None:
    x, expected = (torch.tensor(values, device=device) for values in _CASES[name])
    y = torch.empty_like(x)
    _function_kernel[(1,)](x, y, len(x), NAME=name, BLOCK=8)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=0.0, equal_nan=True)
