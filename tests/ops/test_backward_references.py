"""The backward formulas in plain PyTorch beside the kernels, against autograd of the forward references, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention.backends.reference import attention_ref
from powertrain.ops.attention.mask import MaskSpec, MaskTensors
from powertrain.ops.attention.triton.backward import attention_bwd_ref
from powertrain.ops.cross_entropy import cross_entropy_bwd_ref, cross_entropy_ref
from powertrain.ops.norm import layer_norm_bwd_ref, layer_norm_ref, rms_norm_bwd_ref, rms_norm_ref
from powertrain.ops.rope import rope_bwd_ref, rope_ref
from powertrain.ops.rope_table import rope_table
from powertrain.ops.softmax import scaled_softmax_ref, softmax_bwd_ref


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _assert_equal(found: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("sq, sk, kv_heads", [(5, 7, 4), (9, 3, 2), (1, 6, 1)])
def test_attention(sq: int, sk: int, kv_heads: int, window: tuple[int, int], softcap: float, with_bias: bool) -> None:
    b, h, dqk, dv, scale = 2, 4, 8, 5, 0.4
    shapes = [(b, sq, h, dqk), (b, sk, kv_heads, dqk), (b, sk, kv_heads, dv)]
    q, k, v = (_random(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes))
    bias = _random(b, h, sq, sk, seed=3).requires_grad_() if with_bias else None
    mask = MaskSpec(left=window[0], right=window[1], softcap=softcap, bias="float" if with_bias else "none")
    tensors = MaskTensors(bias=bias)
    out, lse = attention_ref(q, k, v, mask=mask, tensors=tensors, scale=scale)
    dout, dlse = _random(*out.shape, seed=4), _random(*lse.shape, seed=5)
    dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
    inputs = [x for x in (q, k, v, bias) if x is not None]
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    expected = torch.autograd.grad((out * dout).sum() + (finite * dlse).sum(), inputs)
    visible, _ = mask.materialize(sq, sk, tensors, rows=(0, sq), device=q.device, dtype=q.dtype)
    heads_first = [x.detach().transpose(1, 2) for x in (dout, q, k, v)]
    found = attention_bwd_ref(
        *heads_first, scale=scale, visible=visible, bias=None if bias is None else bias.detach(), softcap=softcap,
        dlse=dlse,
    )  # fmt: skip
    grads = (*(x.transpose(1, 2) for x in found[:3]), found[3])
    _assert_equal(grads[: len(expected)], expected)


def test_attention_with_dropout() -> None:
    b, h, n, d = 2, 3, 6, 4
    q, k, v = (_random(b, h, n, d, seed=seed).requires_grad_() for seed in range(3))
    keep, dropout_p, dout = _random(b, h, n, n, seed=3) > -0.5, 0.3, _random(b, h, n, d, seed=4)
    out = (keep / (1 - dropout_p) * torch.softmax(q @ k.mT * 0.5, -1)) @ v
    expected = torch.autograd.grad((out * dout).sum(), (q, k, v))
    details = (x.detach() for x in (q, k, v))
    found = attention_bwd_ref(dout, *details, scale=0.5, keep=keep, dropout_p=dropout_p)
    _assert_equal(found[:3], expected)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("forward, backward", [(rms_norm_ref, rms_norm_bwd_ref), (layer_norm_ref, layer_norm_bwd_ref)])
@pytest.mark.parametrize("shape", [(4, 7), (2, 3, 16), (1, 1)])
def test_norm(forward: Any, backward: Any, shape: tuple[int, ...], zero_centered: bool) -> None:
    x, dy = _random(*shape).requires_grad_(), _random(*shape, seed=1)
    weight, bias = (_random(shape[-1], seed=seed).requires_grad_() for seed in (2, 3))
    y = forward(x, weight, bias, zero_centered=zero_centered)
    expected = torch.autograd.grad((y * dy).sum(), (x, weight, bias))
    _assert_equal(backward(dy, x.detach(), weight.detach(), zero_centered=zero_centered), expected)


@pytest.mark.parametrize("causal", [None, "aligned"])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax(masked: bool, causal: Any) -> None:
    x, dy = _random(3, 4, 6).requires_grad_(), _random(3, 4, 6, seed=1)
    mask = _random(3, 4, 6, seed=2) > 0.5 if masked else None
    if mask is not None:
        mask[0, 0] = True  # a row that sees nothing
    y = scaled_softmax_ref(x, scale=0.7, mask=mask, is_causal=causal)
    (expected,) = torch.autograd.grad((y * dy).sum(), x)
    _assert_equal((softmax_bwd_ref(dy, y.detach(), scale=0.7),), (expected,))


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"label_smoothing": 0.1}, {"z_loss": 0.01}], ids=str)
def test_cross_entropy(options: dict[str, Any]) -> None:
    logits, dloss = _random(6, 11).requires_grad_(), _random(6, seed=1)
    target = torch.tensor([0, 3, -100, 10, 5, 5])
    loss = cross_entropy_ref(logits, target, reduction="none", **options)
    (expected,) = torch.autograd.grad((loss * dloss).sum(), logits)
    _assert_equal((cross_entropy_bwd_ref(dloss, logits.detach(), target, **options),), (expected,))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_rope(layout: str, interleaved: bool) -> None:
    q, k = _random(3, 3, 2, 8).requires_grad_(), _random(3, 3, 1, 8, seed=1).requires_grad_()
    dq, dk = _random(*q.shape, seed=2), _random(*k.shape, seed=3)
    options: dict[str, Any] = {"table": rope_table(6, 8), "layout": layout, "interleaved": interleaved, "offset": 1}
    out_q, out_k = rope_ref(q, k, **options)
    expected = torch.autograd.grad((out_q * dq).sum() + (out_k * dk).sum(), (q, k))
    _assert_equal(rope_bwd_ref(dq, dk, **options), expected)
