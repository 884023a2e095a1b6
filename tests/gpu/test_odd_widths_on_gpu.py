"""MLPs and logits of odd widths, whose products are padded on a GPU, beside float64."""

import pytest
import torch
import torch.nn.functional as F

from powertrain.models.causal_lm import Head
from powertrain.nn.mlp import MLP, GatedMLP
from powertrain.ops.gemm.padded_mlp import has_odd_width

pytestmark = pytest.mark.gpu


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.to(found.device)).norm() / exact.norm())


@pytest.mark.parametrize("rows, hidden, inner", [(128, 256, 683), (600, 512, 1366), (2048, 1024, 2731), (130, 64, 37)])
@pytest.mark.parametrize("kind", [GatedMLP, MLP])
@pytest.mark.parametrize("autocast", [False, True])
def test_an_mlp(rows: int, hidden: int, inner: int, kind: type, autocast: bool) -> None:
    layer = kind(hidden, inner, bias=True).cuda()
    # on the CPU, where layers take float64
    exact = kind(hidden, inner, bias=True).double()
    layer = layer if autocast else layer.bfloat16()
    exact.load_state_dict(layer.state_dict())
    x, dy = (torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        assert has_odd_width(x, layer.up.weight)
        y = layer(x)
    found = y, *torch.autograd.grad(y, [x, *layer.parameters()], dy)
    wide = x.detach().double().cpu().requires_grad_()
    right = exact(wide)
    expected = right, *torch.autograd.grad(right, [wide, *exact.parameters()], dy.double().cpu())
    assert [t.dtype for t in found[2:]] == [p.dtype for p in layer.parameters()]
    for one, other in zip(found, expected, strict=True):
        assert _error(one, other) < 2e-2


@pytest.mark.parametrize("rows", [1, 16, 200])
@pytest.mark.parametrize("words", [1003, 50257])
def test_logits(rows: int, words: int) -> None:
    head = Head(256, words, bias=True).cuda().bfloat16()
    states = torch.randn(2, rows, 256, device="cuda", dtype=torch.bfloat16)
    exact = F.linear(states.double(), head.weight.double(), head.bias.double())
    dy = torch.randn_like(exact).bfloat16()
    expected = torch.autograd.grad(exact, list(head.parameters()), dy.double())
    with torch.no_grad():
        assert _error(head(states), exact) < 1e-2
    logits = head(states)
    assert _error(logits, exact) < 1e-2
    for one, other in zip(torch.autograd.grad(logits, list(head.parameters()), dy), expected, strict=True):
        assert _error(one, other) < 1e-2
