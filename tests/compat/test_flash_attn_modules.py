"""flash-attn's modules, activations and dense layers against their formulas in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from powertrain.compat.flash_attn.modules.mha import FlashCrossAttention, FlashSelfAttention, get_alibi_slopes
from powertrain.compat.flash_attn.modules.mlp import GatedMlp, Mlp
from powertrain.compat.flash_attn.ops import activations as act
from powertrain.compat.flash_attn.ops import fused_dense as dense
from tests.compat.plain import same, tensors

pytestmark = pytest.mark.usefixtures("on_cpu")


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def test_activations() -> None:
    x, y, bias = tensors((3, 5), (3, 5), (5,))
    same(act.gelu_fwd, gelu, [x])
    same(act.bias_gelu_impl, lambda x, b: gelu(x + b), [x, bias])
    same(act.sqrelu_fwd, lambda x: F.relu(x) ** 2, [x])
    same(act.swiglu, lambda x, y: F.silu(x) * y, [x, y])
    g = torch.randn(3, 5, dtype=torch.float64)
    for backward, forward in ((act.gelu_bwd, gelu), (act.relu_bwd, F.relu), (act.sqrelu_bwd, lambda x: F.relu(x) ** 2)):
        torch.testing.assert_close(backward(g, x), torch.autograd.grad(forward(x), x, g)[0])
    grads = torch.autograd.grad(gelu(x + bias), [x, bias], g)
    torch.testing.assert_close(act.bias_gelu_back(g, x, bias), grads)


@pytest.mark.parametrize("kind", ["gelu_approx", "relu", "sqrelu"])
def test_dense_layers(kind: str) -> None:
    (x,) = tensors((4, 6))
    layer = dense.FusedDense(6, 5, return_residual=True).double()
    same(lambda x: torch.cat(layer(x), -1), lambda x: torch.cat((F.linear(x, layer.weight, layer.bias), x), -1), [x])
    mlp = dense.FusedMLP(6, activation=kind).double()
    function = {"gelu_approx": gelu, "relu": F.relu, "sqrelu": lambda x: F.relu(x) ** 2}[kind]
    same(mlp, lambda x: mlp.fc2(function(mlp.fc1(x))), [x])
    assert mlp.fc1.out_features == 24
    with pytest.raises(ValueError, match="activation must be one of"):
        dense.FusedMLP(6, activation="silu")
    with pytest.raises(NotImplementedError, match="process_group"):
        mlp(x, process_group=object())


@pytest.mark.parametrize("activation", [F.sigmoid, F.silu, F.gelu])
def test_feed_forward(activation: object) -> None:
    (x,) = tensors((4, 6))
    gated = GatedMlp(6, 10, activation=activation, multiple_of=4).double()
    assert gated.fc1.out_features == 24 and GatedMlp(6).fc2.in_features == 128

    def plain(x: Tensor) -> Tensor:
        up, gate = gated.fc1(x).chunk(2, -1)
        return gated.fc2(up * activation(gate))  # type: ignore[operator]

    same(gated, plain, [x])
    mlp = Mlp(6, activation=activation, return_residual=True).double()  # type: ignore[arg-type]
    same(lambda x: torch.cat(mlp(x), -1), lambda x: torch.cat((mlp.fc2(activation(mlp.fc1(x))), x), -1), [x])  # type: ignore[operator]


def scores(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    out = F.scaled_dot_product_attention(
        q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2), is_causal=causal
    )
    return out.transpose(-3, -2)


def test_attention_modules() -> None:
    (qkv,) = tensors((2, 5, 3, 2, 8))
    plain = lambda qkv: scores(*qkv.unbind(2), causal=True)  # noqa: E731
    same(FlashSelfAttention(causal=True), plain, [qkv])
    same(lambda x: FlashSelfAttention()(x, causal=True), plain, [qkv])
    starts = torch.tensor([0, 5, 10], dtype=torch.int32)
    packed = lambda qkv: FlashSelfAttention(causal=True)(qkv.flatten(0, 1), cu_seqlens=starts, max_seqlen=5)  # noqa: E731
    same(packed, lambda qkv: plain(qkv).flatten(0, 1), [qkv])
    q, kv = tensors((2, 5, 2, 8), (2, 7, 2, 2, 8))
    cross = lambda q, kv: scores(q, *kv.unbind(2), causal=False)  # noqa: E731
    same(FlashCrossAttention(), cross, [q, kv])
    keys = torch.tensor([0, 7, 14], dtype=torch.int32)
    both = lambda q, kv: FlashCrossAttention()(q.flatten(0, 1), kv.flatten(0, 1), None, starts, 5, keys, 7)  # noqa: E731
    same(both, lambda q, kv: cross(q, kv).flatten(0, 1), [q, kv])
    dropped = FlashSelfAttention(attention_dropout=0.9)
    assert not torch.equal(dropped(qkv), dropped.eval()(qkv))


def test_lengths_that_are_missing() -> None:
    with pytest.raises(ValueError, match="max_seqlen must be given with cu_seqlens"):
        FlashSelfAttention()(torch.randn(4, 3, 2, 8), cu_seqlens=torch.tensor([0, 4], dtype=torch.int32))


def test_alibi_slopes() -> None:
    assert get_alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert get_alibi_slopes(6)[:4] == [2.0 ** (-2 * i) for i in range(1, 5)] and get_alibi_slopes(6)[4:] == [0.5, 0.125]


def test_cross_attention_has_their_order_of_arguments() -> None:
    q, kv = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 2, 8)
    slopes = torch.tensor(get_alibi_slopes(2))
    expected = FlashSelfAttention(True, None, 0.0, (2, 0), slopes)(torch.cat((q.unsqueeze(2), kv), 2))
    torch.testing.assert_close(FlashCrossAttention(True, None, 0.0, slopes, (2, 0))(q, kv), expected)
