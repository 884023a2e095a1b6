"""Small kernels that start before the one before has ended, eager and in a graph: the bits of those that do not."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from powertrain.ops.activations import activation
from powertrain.ops.bias_dropout_add import bias_dropout_add
from powertrain.ops.norm import layer_norm, rms_norm
from powertrain.ops.rope import rope
from powertrain.ops.rope_table import RopeTable, rope_table
from powertrain.runtime import steering
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
            steering.changed()
            expected = _chain(x, weight, bias, table)
        steering.changed()
        graph, in_graph = captured(lambda: _chain(x, weight, bias, table))
        for _ in range(20):
            eager = _chain(x, weight, bias, table)
            graph.replay()
            for each in (eager, in_graph):
                assert all(torch.equal(a, b) for a, b in zip(each, expected, strict=True))
