"""transformer_engine.pytorch.ops beside formulas in plain PyTorch: layouts, further inputs, FP8, checkpoints."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from powertrain.compat.transformer_engine import pytorch as te
from powertrain.compat.transformer_engine.common.recipe import Float8CurrentScaling
from powertrain.compat.transformer_engine.pytorch import ops
from tests.compat.plain import same, tensors

pytestmark = pytest.mark.usefixtures("on_cpu")


def split(x: Tensor, block: int | None) -> tuple[Tensor, Tensor]:
    """Gates and ups, column by column."""
    size = x.shape[-1] // 2 if block is None else block
    columns = torch.arange(x.shape[-1])
    is_gate = (columns // size) % 2 == 0
    return x[..., is_gate], x[..., ~is_gate]


def clamped(offset: float) -> Any:
    def value(g: Tensor, u: Tensor) -> Tensor:
        g, u = g.clamp(max=0.5), u.clamp(-0.5, 0.5)
        return g * torch.sigmoid(2 * g) * (u + offset)

    return value


GATED = {
    "SwiGLU": ({}, lambda g, u: F.silu(g) * u),
    "GLU": ({}, lambda g, u: torch.sigmoid(g) * u),
    "ClampedSwiGLU": ({"limit": 0.5, "alpha": 2.0}, clamped(1.0)),
    "ClampedSwiGLU without offset": ({"limit": 0.5, "alpha": 2.0, "glu_linear_offset": 0.0}, clamped(0.0)),
    "SiTUGLU": (
        {"beta1": 2.0, "beta2": 3.0},
        lambda g, u: 2 * torch.tanh(g / 2) * torch.sigmoid(g) * 3 * torch.tanh(u / 3),
    ),
}


@pytest.mark.parametrize("block", [None, 2], ids=["halves", "blocks"])
@pytest.mark.parametrize("name", GATED)
def test_gated_activations(name: str, block: int | None) -> None:
    options, expected = GATED[name]
    (x,) = tensors((2, 3, 12))
    module = getattr(ops, name.split()[0])(**options, glu_interleave_size=block)
    same(module, lambda x: expected(*split(x, block)), [x])


@pytest.mark.parametrize("block", [None, 3], ids=["halves", "blocks"])
@pytest.mark.parametrize("name", ["SwiGLU", "SiTUGLU", "ClampedQGeGLU"])
def test_scaled_gated_activations(name: str, block: int | None) -> None:
    options, expected = GATED["ClampedSwiGLU" if name == "ClampedQGeGLU" else name]
    x, scales = tensors((2, 3, 12), (2, 3))
    module = getattr(ops, f"Scaled{name}")(block, **options)
    same(module, lambda x, s: expected(*split(x, block)) * s[..., None], [x, scales])


def test_scaled_squared_relu() -> None:
    same(ops.ScaledSReLU(), lambda x, s: F.relu(x) ** 2 * s[:, None], tensors((3, 4), (3,)))
    with pytest.raises(ValueError, match="scales must have shape"):
        ops.ScaledSReLU()(torch.ones(3, 4), torch.ones(4))


def test_blocks_of_gates_and_ups() -> None:
    rows = torch.arange(24).reshape(12, 2)
    halves = te.deinterleave_glu_tensor(rows, 3)
    assert halves[:, 0].tolist() == [0, 2, 4, 12, 14, 16, 6, 8, 10, 18, 20, 22]
    assert torch.equal(te.interleave_glu_tensor(halves, 3), rows)
    for function in (te.interleave_glu_tensor, te.deinterleave_glu_tensor):
        with pytest.raises(ValueError, match="multiple of 8 gates and ups"):
            function(rows, 4)
        with pytest.raises(ValueError, match="interleave_size must be positive, got 0"):
            function(rows, 0)
    with pytest.raises(ValueError, match="multiple of 10"):
        ops.SwiGLU(glu_interleave_size=5)(torch.ones(2, 12))


def test_further_inputs_and_outputs() -> None:
    x, one, two = tensors((4, 6), (4, 8), (4,))
    model = ops.Sequential(
        ops.Linear(6, 8, dtype=torch.float64), ops.MakeExtraOutput(), ops.AddExtraInput(), torch.nn.Tanh(),
        ops.ScaledSwiGLU(),
    )  # fmt: skip
    weight, bias = model[0].weight, model[0].bias
    bias.data.normal_()

    def plain(x: Tensor, one: Tensor, two: Tensor, w: Tensor, b: Tensor) -> Tensor:
        h = F.linear(x, w, b)
        g, u = torch.tanh(h + one).chunk(2, -1)
        return torch.cat([F.silu(g) * u * two[:, None], h], -1)

    inputs = [x, one, two, weight, bias]
    same(lambda x, one, two, *_: torch.cat(model(x, one, two), -1), plain, inputs)
    with pytest.raises(ValueError, match="extra_inputs must be 2 tensors, got 1"):
        model(x, one)
    with pytest.raises(NotImplementedError, match="op_kwargs"):
        model(x, one, two, op_kwargs={0: {"out": x}})
    assert isinstance(model[:2], ops.Sequential) and len(model[:2]) == 2


def test_linear_begins_as_in_torch() -> None:
    torch.manual_seed(3)
    layer = ops.Linear(64, 48)
    torch.manual_seed(3)
    expected = torch.empty(48, 64)
    torch.nn.init.kaiming_uniform_(expected, math.sqrt(5))
    assert torch.equal(layer.weight, expected) and not layer.bias.any()
    assert ops.BasicLinear(4, 3, device="meta").weight.is_meta


def test_linear_is_fp8_under_autocast() -> None:
    x = torch.randn(32, 64, requires_grad=True)
    layer, module = ops.Linear(64, 48), te.Linear(64, 48, device="cpu")
    module.load_state_dict(layer.state_dict())
    plain = layer(x)
    with te.autocast(recipe=Float8CurrentScaling()):
        y, expected = ops.Sequential(layer)(x), module(x)
    assert torch.equal(y, expected) and not torch.equal(y, plain)
    # e4m3 has three bits of mantissa
    assert (y - plain).norm() < 0.1 * plain.norm()
    y.sum().backward()
    grads = [layer.weight.grad, layer.bias.grad]
    expected.sum().backward()
    assert torch.equal(grads[0], module.weight.grad) and torch.equal(grads[1], module.bias.grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16


def test_linear_reads_their_checkpoints() -> None:
    layer, empty = ops.Linear(6, 8), torch.empty(0, dtype=torch.uint8)
    theirs = {
        "0.basic_ops.0.weight": torch.randn(8, 6), "0.basic_ops.1.bias": torch.randn(8),
        "0.basic_ops.0._extra_state": empty, "0.basic_ops.1._extra_state": empty,
    }  # fmt: skip
    wanted = theirs["0.basic_ops.0.weight"], theirs["0.basic_ops.1.bias"]
    result = ops.Sequential(layer).load_state_dict(dict(theirs), strict=False)
    assert not result.missing_keys or result.missing_keys == ["0._extra_state"]
    assert not result.unexpected_keys
    assert torch.equal(layer.weight, wanted[0]) and torch.equal(layer.bias, wanted[1])


def test_gradient_into_main_grad() -> None:
    layer = ops.BasicLinear(6, 8, accumulate_into_main_grad=True)
    layer.weight.main_grad = torch.ones(8, 6)
    x = torch.randn(5, 6)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, 1 + torch.ones(8, 5) @ x)
    assert layer.weight.grad is None


def test_autocast() -> None:
    x, scales = torch.randn(3, 4), torch.rand(3)
    modules = [ops.GELU(), ops.SwiGLU(), ops.GLU(), ops.SiTUGLU(), ops.ClampedSwiGLU(glu_linear_offset=0.0)]
    for module in (*modules, ops.LayerNorm(4, device="cpu")):
        with torch.autocast("cpu", torch.bfloat16):
            assert module(x).dtype is torch.bfloat16
    for module in (ops.ScaledSReLU(), ops.ScaledSwiGLU(), ops.ScaledClampedQGeGLU()):
        with torch.autocast("cpu", torch.bfloat16):
            assert module(x, scales).dtype is torch.bfloat16


def test_refusals() -> None:
    with pytest.raises(NotImplementedError, match="userbuffers_options"):
        ops.BasicLinear(4, 4, userbuffers_options={})
    with pytest.raises(TypeError, match="bias"):
        ops.BasicLinear(4, 4, bias=True)
    with pytest.raises(NotImplementedError, match="activation_recompute_in_mlp"):
        ops.ScaledSwiGLU(activation_recompute_in_mlp=True)
    with pytest.raises(ValueError, match="beta1 must be positive and finite"):
        ops.SiTUGLU(beta1=0.0)(torch.ones(2, 4))
