"""CPU offload: the gradients' bits, when memory is given back and when it returns, as the documented schedule says."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powertrain.compat.transformer_engine import pytorch as te
from powertrain.compat.transformer_engine.pytorch import cpu_offload

pytestmark = pytest.mark.usefixtures("on_cpu")
L = 4


@pytest.fixture
def from_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of any size leave, of the CPU too: copies to another place of its memory."""
    monkeypatch.setattr(cpu_offload, "DEVICES", ("cpu",))
    monkeypatch.setattr(cpu_offload, "MIN_NUMEL", 1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.hidden: weakref.ref[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        # saved once by sigmoid, once by the product
        hidden = torch.sigmoid(self.linear(x))
        self.hidden = weakref.ref(hidden.untyped_storage())
        return hidden * torch.tanh(hidden)


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(L))


def run(model: nn.ModuleList, x: Tensor, context: Any, synchronize: Any) -> Tensor:
    for layer in model:
        with context:
            x = layer(x)
        x = synchronize(x)
    return x


def grads(model: nn.ModuleList) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("retain", [False, True], ids=["", "retained"])
@pytest.mark.parametrize("offloaded", [1, 2, 3])
def test_same_bits_over_steps(offloaded: int, retain: bool, from_the_cpu: None) -> None:
    context = te.get_cpu_offload_context(True, offloaded, L, retain_pinned_cpu_buffers=retain)
    ours, plain = layers(), layers()
    for step in range(3):
        x = torch.randn(5 + step, 6)
        run(ours, x, *context).square().sum().backward()
        expected = x
        for layer in plain:
            expected = layer(expected)
        expected.square().sum().backward()
        for a, b in zip(grads(ours), grads(plain), strict=True):
            assert torch.equal(a, b)
    assert not cpu_offload.is_cpu_offload_enabled()


def states(context: Any) -> list[str]:
    return [layer.state for layer in context._synchronizer._layers]


def test_schedule(from_the_cpu: None) -> None:
    context, synchronize = te.get_cpu_offload_context(True, 2, L)
    model, x, seen = layers(), torch.randn(5, 6), []
    for layer in model:
        with context:
            assert cpu_offload.is_cpu_offload_enabled()
            seen.append(states(context))
            x = layer(x)
        x = synchronize(x)
    assert seen == [
        ["here"], ["leaving", "here"], ["away", "leaving", "here"], ["away", "away", "here", "here"],
    ]  # fmt: skip
    # a layer that is away has given its memory back
    assert [layer.hidden() is None for layer in model] == [True, True, False, False]
    during: list[list[str]] = []
    for layer in model:
        layer.linear.weight.register_hook(lambda g: during.append(states(context)))
    x.sum().backward()
    # the first layers return while the layer two behind is computed
    assert during == [
        ["away", "away", "here", "here"], ["away", "returning", "here", "here"],
        ["returning", "here", "here", "here"], ["here", "here", "here", "here"],
    ]  # fmt: skip
    assert not any(layer._all() for layer in context._synchronizer._layers)


def test_several_forwards_before_their_backwards(from_the_cpu: None) -> None:
    context = te.get_cpu_offload_context(True, 2, L)
    ours, plain = layers(), layers()
    inputs = [torch.randn(5, 6) for _ in range(3)]
    outputs = [run(ours, x, *context) for x in inputs]
    for y in outputs:
        y.sum().backward()
    for x in inputs:
        for layer in plain:
            x = layer(x)
        x.sum().backward()
    for a, b in zip(grads(ours), grads(plain), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("calls", ["all", "no reload", "no release", "none"])
def test_manual(calls: str, from_the_cpu: None) -> None:
    context, synchronize, manual = te.get_cpu_offload_context(True, model_layers=L, manual_synchronization=True)
    assert isinstance(manual, te.ManualOffloadSynchronizer)
    ours, plain = layers(), layers()
    x = torch.randn(5, 6)
    y = run(ours, x, context, synchronize)
    for i in range(L) if calls != "none" else ():
        manual.start_offload_layer(i)
    for i in range(L) if calls in ("all", "no reload") else ():
        manual.release_activation_forward_gpu_memory(i)
        assert ours[i].hidden() is None
    for i in reversed(range(L)) if calls != "no reload" else ():
        manual.start_reload_layer(i)
    y.sum().backward()
    for layer in plain:
        x = layer(x)
    x.sum().backward()
    for a, b in zip(grads(ours), grads(plain), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="layer_id must be of 0 to 3, got 4"):
        manual.start_reload_layer(4)


def test_tensors_that_stay(from_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, gap, marked = nn.Parameter(torch.randn(4, 4)), torch.randn(4, 8)[:, :4], torch.randn(4, 4)
    cpu_offload.mark_not_offload(marked, None)
    for tensor in (weight, weight.T, gap, marked):
        assert not cpu_offload._is_offloadable(tensor)
    assert cpu_offload._is_offloadable(torch.randn(4, 4).T)
    monkeypatch.setattr(cpu_offload, "MIN_NUMEL", 17)
    assert not cpu_offload._is_offloadable(torch.randn(4, 4))
    # neither does anything
    cpu_offload.mark_activation_offload(marked)
    cpu_offload.start_offload(marked, offload_base_tensor=True)


def test_arguments() -> None:
    for off in (te.get_cpu_offload_context(), te.get_cpu_offload_context(True, 1, 4, False, True)):
        context, same = off
        with context:
            assert same(L) == L
    assert te.get_cpu_offload_context(manual_synchronization=True)[2] is None
    for options, text in (
        ({"num_layers": 4, "model_layers": 4}, "num_layers must be of 1 to model_layers - 1 = 3, got 4"),
        ({"offload_activations": False}, "offload_activations must be True if enabled"),
        ({"num_layers": 1, "model_layers": 2, "offload_stream": 1}, "offload_stream must be None but for"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            te.get_cpu_offload_context(True, **options)
    context, synchronize = te.get_cpu_offload_context(True, 1, 2)
    with pytest.raises(ValueError, match="tensor must require a gradient"):
        synchronize(torch.ones(1))
    with pytest.raises(RuntimeError, match="after the context has ended"):
        synchronize(torch.ones(1, requires_grad=True) * 2)
    with context, pytest.raises(RuntimeError, match="entered already"):
        context.__enter__()
