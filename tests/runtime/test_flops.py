"""FlopCounterMode counts our ops' products as it counts PyTorch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from powertrain.ops.attention import attention, varlen_attention
from powertrain.ops.gemm.gemm import gemm
from powertrain.ops.gemm.linear_activation import linear_activation
from powertrain.ops.grouped_gemm import grouped_gemm
from powertrain.ops.linear_cross_entropy import linear_cross_entropy


def counted(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    """Forward and backward of meta tensors, which take the ops and not plain PyTorch."""
    with FlopCounterMode(display=False) as counter:
        function(*inputs).sum().backward()
    return int(counter.get_total_flops())


def meta(*shape: int, **options: Any) -> Tensor:
    return torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True, **options)


T, D, V, B, S, H = 64, 32, 128, 2, 16, 4


@pytest.mark.parametrize("reduction, products", [("mean", 3), ("none", 4)])
def test_linear_cross_entropy(reduction: Any, products: int) -> None:
    target = torch.zeros(T, dtype=torch.int64, device="meta")
    found = counted(lambda x, w: linear_cross_entropy(x, w, target, reduction=reduction), meta(T, D), meta(V, D))
    assert found == products * 2 * T * D * V


def test_grouped_gemm() -> None:
    offsets = torch.zeros(3, dtype=torch.int32, device="meta")
    found = counted(lambda x, w: grouped_gemm(x, w, offsets), meta(T, D), meta(3, V, D))
    assert found == 3 * 2 * T * D * V


def test_gemm() -> None:
    a, b = meta(T, D), meta(V, D)
    with FlopCounterMode(display=False) as counter:
        gemm(a.detach(), b.detach(), layout="nt")
    assert counter.get_total_flops() == 2 * T * D * V


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_attention_as_pytorchs(layout: Any) -> None:
    shape = (B, S, H, D) if layout == "bshd" else (B, H, S, D)
    found = counted(
        lambda q, k, v: attention(q, k, v, layout=layout, is_causal=True, backend="triton"),
        *(meta(*shape) for _ in range(3)),
    )
    assert found == (2 + 5) * 2 * B * H * S * S * D


def test_packed_attention() -> None:
    starts = torch.zeros(B + 1, dtype=torch.int32, device="meta")
    found = counted(
        lambda q, k, v: varlen_attention(q, k, v, cu_seqlens_q=starts, is_causal=True, backend="triton"),
        *(meta(B * S, H, D) for _ in range(3)),
    )
    assert found == (2 + 5) * 2 * B * H * S * S * D


def test_linear_activation() -> None:
    """Gate and up; backward multiplies four times: dx and dw of each."""
    found = counted(
        lambda x, w, up: linear_activation(x, w, "swiglu", up_weight=up), meta(T, D), meta(V, D), meta(V, D)
    )
    assert found == 3 * 2 * 2 * T * D * V
