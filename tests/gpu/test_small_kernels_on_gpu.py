"""Small kernels that start before the one before has ended, eager and in a graph: the bits of those that do not."""

import ctypes
from unittest import mock

import pytest
import torch
from torch import Tensor

from powertrain.ops.activations import activation
from powertrain.ops.bias_dropout_add import bias_dropout_add
from powertrain.ops.norm import layer_norm, rms_norm
from powertrain.ops.rope import rope
from powertrain.ops.rope_table import RopeTable, rope_table
from powertrain.runtime import invalidation
from tests.cuda_graph import captured
from tests.gpu.arch import ON_SM90
from tests.ops.attention.attention_launches import any_order

pytestmark = ON_SM90


def _chain(x: Tensor, weight: Tensor, bias: Tensor, table: RopeTable) -> tuple[Tensor, Tensor]:
    """Each kernel reads the result of the previous one; after some of them a kernel of PyTorch runs."""
    stream = x
    for i in range(20):
        x, stream = rms_norm(x, weight, residual=stream)
        x = bias_dropout_add(activation(x, "silu"), bias, stream, 0.0)
        x = layer_norm(x, weight, bias)
        rotated = rope(x.view(1, len(x), -1, 64), table=table)
        assert isinstance(rotated, Tensor)
        x = rotated.view_as(x)
        if i % 3 == 0:
            x = torch.cat((x[:, 1:], x[:, :1]), 1)
    return x, stream


@pytest.mark.parametrize("rows, width", [(1, 64), (3, 960), (16, 4096), (64, 5120), (130, 8192), (17, 16384)])
def test_chains(rows: int, width: int) -> None:
    x, weight, bias = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((rows, width), (width,), (width,))
    )
    table = rope_table(64, rows, device="cuda")
    with torch.no_grad(), any_order():
        with mock.patch.multiple("powertrain.ops.early_start", starts_early=lambda target: False):
            invalidation.changed()
            expected = _chain(x, weight, bias, table)
        invalidation.changed()
        graph, in_graph = captured(lambda: _chain(x, weight, bias, table))
        for _ in range(20):
            eager = _chain(x, weight, bias, table)
            graph.replay()
            for each in (eager, in_graph):
                assert all(torch.equal(a, b) for a, b in zip(each, expected, strict=True))


def _fill(x: Tensor, bits: int) -> None:
    """A memset on the current stream, a node of its own in a graph."""
    address, stream = ctypes.c_uint64(x.data_ptr()), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    words = ctypes.c_size_t(x.numel() * x.element_size() // 4)
    assert ctypes.CDLL("libcuda.so.1").cuMemsetD32Async(address, ctypes.c_uint(bits), words, stream) == 0


def _branches(x: Tensor, filled: Tensor, copied: Tensor, weight: Tensor, side: torch.cuda.Stream) -> list[Tensor]:
    """Kernels that start early behind memsets, copies and kernels of another stream, and these behind such kernels. One
    that does not wait reads old values."""
    main, found = torch.cuda.current_stream(), list[Tensor]()
    for step in range(4):
        _fill(filled, 0x3F803F80)  # ones
        found.append(rms_norm(filled + x, weight))
        _fill(filled, 0x40004000)  # twos, while the last kernel reads ones
        found.append(activation(filled, "silu"))
        copied.copy_(filled)
        copied[:, step::8] = found[0][:, step::8]
        found.append(layer_norm(copied, weight, weight))
        side.wait_stream(main)
        with torch.cuda.stream(side):
            # long beside the kernel on the main stream
            other = rms_norm((filled.float() @ x.float().T @ x.float()).to(x.dtype), weight)
            _fill(filled, 0x40404040)
        near = rms_norm(found[-1], weight)
        main.wait_stream(side)
        found += rms_norm(other, weight, residual=near)
        found.append(activation(filled, "silu"))
        copied.copy_(found[-1])
        x = layer_norm(copied, weight, weight)
    return [*found, x]


@pytest.mark.parametrize("rows, width", [(1, 64), (16, 4096), (700, 8192)])
def test_beside_memsets_copies_and_other_streams(rows: int, width: int) -> None:
    x, filled, copied = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    weight, side = torch.randn(width, device="cuda", dtype=torch.bfloat16), torch.cuda.Stream()
    with torch.no_grad():
        graph, in_graph = captured(lambda: _branches(x, filled, copied, weight, side))
        for seed in range(20):
            torch.manual_seed(seed)
            x.normal_()
            graph.replay()
            replayed = [y.clone() for y in in_graph]
            eager = _branches(x, filled, copied, weight, side)
            with mock.patch.multiple("powertrain.ops.early_start", starts_early=lambda target: False):
                invalidation.changed()
                expected = _branches(x, filled, copied, weight, side)
            invalidation.changed()
            for each in (eager, replayed):
                assert all(torch.equal(a, b) for a, b in zip(each, expected, strict=True))
