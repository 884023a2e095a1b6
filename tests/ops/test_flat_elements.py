"""Rows of odd widths taken flat: that the compiler makes whole vectors of their accesses, which no result shows."""

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.activations import activation
from powertrain.ops.bias_dropout_add import bias_dropout_add
from powertrain.runtime.compile.service import entry_for
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings

M, N = 65536, 777

pytestmark = pytest.mark.skipif(settings().interpret, reason="compiles")


def _empty(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=torch.bfloat16, requires_grad=True)


def _ptx(call: Callable[[], Any], name: str) -> str:
    with record("sm_90") as wanted:
        call()
    (spec,) = (spec for spec in wanted.specs if spec.kernel.name == name)
    return zlib.decompress(entry_for(spec)[0].members["ptx"]).decode()


def test_forward_loads_and_stores_vectors() -> None:
    x, bias, residual = _empty(M, N), _empty(N), _empty(M, N)
    with torch.no_grad():
        added = _ptx(lambda: bias_dropout_add(x, bias, residual, 0.0), "_bias_add_flat_kernel")
        activated = _ptx(lambda: activation(x, "gelu", bias), "_activation_fwd_flat_kernel")
    for ptx, streams in ((added, 2), (activated, 1)):
        assert ptx.count("ld.global.v4.b32") >= streams and "st.global.v4.b32" in ptx
        # the last elements, fewer than a vector
        assert ptx.count("st.global.b16") == 1


def test_sums_over_eight_rows_as_one_load_vectors() -> None:
    x, bias = _empty(M, N), _empty(N)
    dy = _empty(M, N).detach()
    ptx = _ptx(lambda: torch.autograd.grad(activation(x, "gelu", bias), (x, bias), dy), "_activation_bwd_kernel")
    assert "st.global.v4.b32" in ptx and "st.global.b16" not in ptx
    assert "cp.async.cg.shared.global" in ptx  # of 16 bytes, which `num_stages` prefetches
