"""Tensors that are made once: by whichever call comes first, in whatever mode, and right for all later ones."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from powertrain.nn.attention import Rotary, SelfAttention
from powertrain.nn.block_sparsity import BlockSparsity
from powertrain.runtime.kept_tensors import kept, noted

LAYERS: list[dict[str, Any]] = [
    {"rotary": Rotary(8, 77)}, {"alibi": True}, {"sparsity": BlockSparsity(block=2, before=1)},
]  # fmt: skip


def test_the_first_call_makes_them() -> None:
    calls = []

    @kept(2)
    def ramp(size: int) -> Tensor:
        calls.append(size)
        return torch.arange(size)

    assert ramp(3) is ramp(3) and ramp(4) is not ramp(3)
    assert calls == [3, 4]


def test_those_that_a_cuda_graph_reads_are_noted() -> None:
    """Found in the cache or made: another call may end their life there."""

    @kept(1)
    def ramp(size: int) -> Tensor:
        return torch.arange(size)

    first = ramp(3)
    with noted() as read, noted() as other:
        ramp(3)
        ramp(4)
    ramp(5)
    assert read[0] is first and [x.tolist() for x in read] == [[0, 1, 2], [0, 1, 2, 3]]
    assert other == read and other is not read


@pytest.mark.parametrize("options", LAYERS)
def test_a_layer_that_began_in_inference_mode_trains(options: dict[str, Any]) -> None:
    layer, x = SelfAttention(32, 4, **options), torch.randn(1, 4, 32)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("options", LAYERS)
def test_a_layer_that_began_with_fake_tensors_computes(options: dict[str, Any]) -> None:
    with FakeTensorMode():
        layer = SelfAttention(24, 3, **options)
        assert isinstance(layer(torch.randn(1, 5, 24)), FakeTensor)
    layer, x = SelfAttention(24, 3, **options), torch.randn(1, 5, 24)
    assert layer(x).isfinite().all()
    with FakeTensorMode() as mode:
        fake = SelfAttention(24, 3, **options)
        assert isinstance(fake(mode.from_tensor(x)), FakeTensor)


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("options", LAYERS)
def test_compiled_layers_do_not_compute_them(options: dict[str, Any], dynamic: bool) -> None:
    layer, x = SelfAttention(32, 4, **options), torch.randn(2, 6, 32)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)
    torch.testing.assert_close(compiled(x), layer(x))
    [graph] = graphs
    for made in ("cos()", "torch.tensor("):
        assert made not in graph.code
    # nor are they inputs, which CUDA graphs would copy
    assert "self.G_" in graph.code


# the guard is on the table's identity, which sizes do not change: so dynamic=True is a slow test
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_with_other_tables_have_graphs_of_their_own(dynamic: bool) -> None:
    options: list[dict[str, Any]] = [
        {"rotary": Rotary(8, 77)}, {"rotary": Rotary(8, 77, 50.0)}, {"sparsity": BlockSparsity(block=2, before=1)},
        {"sparsity": BlockSparsity(block=2, before=0)},
    ]  # fmt: skip
    x = torch.randn(2, 6, 32)

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="eager")
    def run(layer: SelfAttention, x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    for some in options:
        layer = SelfAttention(32, 4, **some)
        torch.testing.assert_close(run(layer, x), layer(x))


@pytest.mark.parametrize("options", LAYERS)
def test_an_exported_layer_leaves_none_behind(options: dict[str, Any]) -> None:
    layer, x = SelfAttention(40, 5, **options), torch.randn(1, 7, 40)
    exported = torch.export.export(layer, (x,))
    torch.testing.assert_close(exported.module()(x), layer(x))
