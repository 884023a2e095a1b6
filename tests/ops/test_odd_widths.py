"""Products padded to whole vectors: values and gradients, what they save, which calls take them."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.compat.xformers.ops.swiglu_op import swiglu
from powertrain.models.causal_lm import Head
from powertrain.nn.mlp import MLP, GatedMLP
from powertrain.ops import linear_cross_entropy as losses
from powertrain.ops.batch_invariance import batch_invariant
from powertrain.ops.gemm import linear_activation as linear_activations
from powertrain.ops.gemm import odd_widths
from powertrain.ops.gemm.linear_activation import linear_activation, linear_activation_ref
from powertrain.ops.gemm.odd_widths import is_slow, padded_linear, padded_width
from powertrain.ops.gemm.padded_mlp import has_odd_width
from tests.torch_setup import INTERPRET


def _bf16(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


@pytest.fixture
def slow_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if products on this CPU were slow as a GPU's are."""
    for module in (odd_widths, losses):
        monkeypatch.setattr(module, "is_slow", lambda x, weight: weight.shape[0] % 8 > 0)
    monkeypatch.setattr(odd_widths, "_FEWEST_ROWS_OF_ODD", 1)
    monkeypatch.setattr(odd_widths, "_FEWEST_ROWS_OF_EVEN", 4)


@pytest.mark.parametrize("N, K, columns, wide", [(5, 7, 8, 7), (8, 7, 8, 16), (13, 8, 16, 8), (3, 5, 3, 5)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_padded_linear(N: int, K: int, columns: int, wide: int, has_bias: bool) -> None:
    x, dy = torch.randn(2, 3, wide, dtype=torch.float64), torch.randn(2, 3, columns, dtype=torch.float64)
    weight, bias = torch.randn(N, K, dtype=torch.float64), torch.randn(N, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in ((x, weight, bias) if has_bias else (x, weight))]
    y = padded_linear(x, weight, bias if has_bias else None, columns)
    exact = F.linear(x[..., :K], weight, bias if has_bias else None)
    torch.testing.assert_close(y, F.pad(exact, (0, columns - N)))
    expected = torch.autograd.grad(exact, inputs, dy[..., :N])
    torch.testing.assert_close(torch.autograd.grad(y, inputs, dy), expected)


@pytest.mark.parametrize("M, N", [(5, 1030), (9, 3), (1, 2048)])
@pytest.mark.parametrize("rows, columns", [(5, 1030), (8, 1032), (9, 5), (1, 2), (3, 2049)])
@pytest.mark.parametrize("step", [1, 2])
def test_resized(M: int, N: int, rows: int, columns: int, step: int) -> None:
    """Cut off or padded in each dim, of a part of a wider matrix too: by the kernel, or by PyTorch."""
    dtype = torch.float32 if INTERPRET else torch.float64
    x = torch.arange(M * (N + 3) * step, dtype=dtype).view(M, -1)[:, 1 : 1 + N * step : step]
    found = odd_widths._resized(x, rows, columns)
    expected = torch.zeros(rows, columns, dtype=dtype)
    expected[:M, :N] = x[:rows, :columns]
    assert found.is_contiguous() and torch.equal(found, expected)


def _saved(call: Any) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []

    def pack(t: Tensor) -> Tensor:
        shapes.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call()
    return shapes


@pytest.mark.parametrize("width", [37, 38, 44])
@pytest.mark.parametrize("kind", [GatedMLP, MLP])
def test_an_mlp_of_odd_width(width: int, kind: type, slow_here: None) -> None:
    layer = kind(24, width, bias=True).double()
    x, dy = (torch.randn(2, 5, 24, dtype=torch.float64) for _ in range(2))
    inputs = [x.requires_grad_(), *layer.parameters()]
    first = layer.up if kind is MLP else layer.gate
    assert has_odd_width(x, first.weight)
    y = layer(x)
    # the weights, not their copies, are in memory until backward
    saved = _saved(lambda: layer(x))
    assert tuple(layer.down.weight.shape) in saved and (40 if width < 40 else 48, 24) not in saved
    found = torch.autograd.grad(y, inputs, dy)
    # a hook sees its module called, so that layer is not padded
    seen: list[torch.Size] = []
    layer.down.register_forward_hook(lambda module, given, result: seen.append(given[0].shape))
    plain = layer(x)
    assert seen == [(2, 5, width)]
    torch.testing.assert_close(y, plain)
    torch.testing.assert_close(found, torch.autograd.grad(plain, inputs, dy))


def test_nothing_is_saved_for_a_gradient_that_nobody_wants() -> None:
    """Of a frozen weight x, the inner features of a whole MLP."""
    x, weight = torch.randn(5, 24, dtype=torch.float64), torch.randn(37, 24, dtype=torch.float64)
    for wanted, saved in ((x, weight), (weight, x)):
        wanted.requires_grad_()
        assert _saved(lambda: padded_linear(x, weight, None, 40)) == [tuple(saved.shape)]
        (found,) = torch.autograd.grad(padded_linear(x, weight, None, 40).square().sum(), wanted)
        torch.testing.assert_close(found, *torch.autograd.grad(F.linear(x, weight).square().sum(), wanted))
        wanted.requires_grad_(False)


@pytest.mark.parametrize("kind, gated", [("gelu", False), ("swiglu", True), (None, False)])
@pytest.mark.parametrize("has_residual", [True, False])
def test_linear_activation(
    kind: str | None, gated: bool, has_residual: bool, slow_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apart, as on a GPU: the product is padded, the result is contiguous and as wide as without."""
    monkeypatch.setattr(linear_activations, "_is_plain", lambda x: False)
    dtype = torch.float32 if INTERPRET else torch.float64
    shapes = {"x": (2, 3, 16), "weight": (13, 16), "bias": (13,)}
    shapes |= {"up_weight": (13, 16), "up_bias": (13,)} if gated else {}
    shapes |= {"residual": (2, 3, 13)} if has_residual else {}
    given = {name: torch.randn(shape, dtype=dtype).requires_grad_() for name, shape in shapes.items()}
    with mock.patch.object(odd_widths, "_padded_linear_op", wraps=odd_widths._padded_linear_op) as padded:
        y = linear_activation(**given, kind=kind)
    assert padded.call_count == 1 + gated
    assert y.is_contiguous() and y.shape == (2, 3, 13)
    exact = linear_activation_ref(**given, kind=kind)
    torch.testing.assert_close(y, exact)
    dy = torch.randn_like(exact)
    found, expected = (torch.autograd.grad(out, list(given.values()), dy) for out in (y, exact))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("has_bias", [True, False])
def test_logits_of_an_odd_vocabulary(tokens: int, has_bias: bool, slow_here: None) -> None:
    head = Head(16, 203, bias=has_bias).double()
    states = torch.randn(2, tokens, 16, dtype=torch.float64)
    exact = F.linear(states, head.weight, head.bias)
    with torch.no_grad():
        logits = head(states)
        # rows at multiples of 64 elements
        assert logits.stride(0) == 256 * tokens
        torch.testing.assert_close(logits, exact)
    dy = torch.randn_like(exact)
    parameters = list(head.parameters())
    with_gradient = head(states)
    assert with_gradient.stride(0) == 208 * tokens
    expected = torch.autograd.grad(exact, parameters, dy)
    torch.testing.assert_close(torch.autograd.grad(with_gradient, parameters, dy), expected)


def test_states_of_one_token(slow_here: None) -> None:
    head, states = Head(16, 203, bias=False).double(), torch.randn(16, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(head(states), F.linear(states, head.weight))


@pytest.mark.parametrize("wrong", ["x", "w1", "w2", "w3", "b1", "b2", "b3"])
def test_sizes_that_do_not_fit(wrong: str, slow_here: None) -> None:
    """They are errors, where padding and cutting off would make them fit."""
    shapes = {"x": (4, 16), "w1": (13, 16), "w2": (13, 16), "w3": (6, 13), "b1": (13,), "b2": (13,), "b3": (6,)}
    shapes[wrong] = (*shapes[wrong][:-1], shapes[wrong][-1] - 1)
    x, w1, w2, w3, b1, b2, b3 = (torch.randn(shape) for shape in shapes.values())
    assert has_odd_width(x, w1, w2, w3)
    with pytest.raises(ValueError, match="must"):
        swiglu(x, w1, b1, w2, b2, w3, b3)
    if wrong in ("x", "w1", "b1"):
        for wants_gradients in (False, True):
            with pytest.raises(RuntimeError):
                losses.whole_logits(x, w1.requires_grad_(wants_gradients), b1)


def test_weights_of_other_kinds_are_left_to_their_own_code(slow_here: None) -> None:
    """A quantized weight of another library, say, in a plain nn.Linear."""
    layer, x = GatedMLP(24, 37), torch.randn(5, 24)
    expected = layer(x)
    for part in (layer.up, layer.down):
        weight, found = part.weight, []

        class Other(Tensor):
            @classmethod
            def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                found.append(func)  # noqa: B023 - called in this turn
                return super().__torch_function__(func, types, args, kwargs)

        part.weight = torch.nn.Parameter(weight.detach().as_subclass(Other))
        torch.testing.assert_close(torch.Tensor(layer(x)), expected)
        assert F.linear in found
        part.weight = weight


def test_which_products_are_padded() -> None:
    """Those of 16 bits whose width is no multiple of 8, from as many rows on as pay for the copy of the weight."""
    odd, even, whole = _bf16(5461, 64), _bf16(5462, 64), _bf16(5456, 64)
    assert padded_width(_bf16(128, 64), odd) == 5464
    assert padded_width(_bf16(2, 64, 64), odd) == 5464
    assert padded_width(_bf16(127, 64), odd) == 5461
    assert padded_width(_bf16(511, 64), even) == 5462
    assert padded_width(_bf16(512, 64), even) == 5464
    assert padded_width(_bf16(4096, 64), whole) == 5456
    assert padded_width(_bf16(0, 64), odd) == 5461
    assert is_slow(_bf16(1, 64), odd) and not is_slow(_bf16(1, 64), whole)
    assert not is_slow(_bf16(128, 64).float(), odd.float())
    assert not is_slow(torch.ones(128, 64, dtype=torch.bfloat16), torch.ones(9, 64, dtype=torch.bfloat16))
    # its bits do not depend on the number of rows
    with batch_invariant():
        assert not is_slow(_bf16(128, 64), odd)
    with torch.autograd.forward_ad.dual_level():
        assert not is_slow(_bf16(128, 64), odd)
    # what looks at products sees them
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert not is_slow(_bf16(128, 64), odd)


def test_modules_take_it_on_meta() -> None:
    """Forward and backward of a layer as a GPU computes it, by shapes."""
    layer = GatedMLP(64, 171).bfloat16().to("meta")
    x = _bf16(2, 100, 64).requires_grad_()
    y = layer(x)
    assert y.shape == x.shape and y.dtype is torch.bfloat16
    grads = torch.autograd.grad(y, [x, *layer.parameters()], torch.empty_like(y))
    assert [g.shape for g in grads] == [x.shape, *(p.shape for p in layer.parameters())]
    assert all(g.is_contiguous() for g in grads)
