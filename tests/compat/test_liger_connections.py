"""Liger's hyper-connections, attention over depth, neighborhoods and probabilities against plain PyTorch in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powertrain.compat.liger_kernel.transformers import (
    LigerMHC,
    LigerMultiTokenAttention,
    LigerVocabParallelCrossEntropy,
    functional,
)
from powertrain.compat.liger_kernel.transformers.fused_neighborhood_attention import (
    LigerFusedNeighborhoodAttention,
    LigerFusedNeighborhoodAttentionConfig,
    LigerFusedNeighborhoodAttentionLayer,
)
from tests.compat.plain import attend, same, tensors

pytestmark = pytest.mark.usefixtures("on_cpu")
STREAMS, SIZE = 3, 4
MHC = {"tmax": 3, "rms_eps": 1e-3, "pre_eps": 0.1, "sinkhorn_eps": 1e-3, "post_mult": 1.5}


def _mhc(x: Tensor, phi: Tensor, b: Tensor, pre: Tensor, post: Tensor, res: Tensor, w: Tensor) -> Tensor:
    """One token after the other, as the paper writes it, around x @ w.T."""
    n, out = STREAMS, []
    for token in x.reshape(-1, n, SIZE):
        v = token.flatten()
        z = (v @ phi) / torch.sqrt(v.square().mean() + MHC["rms_eps"])
        h_pre = torch.sigmoid(pre * z[:n] + b[:n]) + MHC["pre_eps"]
        h_post = MHC["post_mult"] * torch.sigmoid(post * z[n : 2 * n] + b[n : 2 * n])
        e = torch.exp((res * z[2 * n :] + b[2 * n :]).view(n, n))
        eps = MHC["sinkhorn_eps"]
        h = e / e.sum(1, keepdim=True) + eps
        for step in range(MHC["tmax"]):
            h = h if step == 0 else h / (h.sum(1, keepdim=True) + eps)
            h = h / (h.sum(0, keepdim=True) + eps)
        f = (h_pre @ token) @ w.T
        out.append(h @ token + h_post[:, None] * f)
    return torch.stack(out).view(x.shape)


def test_hyper_connections() -> None:
    layer = nn.Linear(SIZE, SIZE, bias=False)
    module = LigerMHC(layer, hc=STREAMS, c=SIZE, allow_fp32=True, **MHC)
    assert module.phi.dtype is torch.float16 and module.b.dtype is torch.float32
    module.double()
    for parameter in module.parameters():
        parameter.data.normal_()
    names = ("phi", "b", "alpha_pre", "alpha_post", "alpha_res")
    inputs = [*tensors((2, 3, STREAMS, SIZE)), *(getattr(module, name) for name in names), layer.weight]
    same(lambda x, *_: module(x), _mhc, inputs)

    def in_steps(x: Tensor, *rest: Tensor) -> Tensor:
        h = functional.liger_mhc_coeffs(x, *rest[:5], allow_fp32=True, **MHC)
        f = functional.liger_mhc_pre(x, h[0]) @ rest[5].T
        y, x_in = functional.liger_mhc_apply(x, f, *h, return_x_in=True)
        torch.testing.assert_close(x_in @ rest[5].T, f)
        torch.testing.assert_close(functional.liger_mhc_apply(x, f, *h), y)
        return y

    same(in_steps, _mhc, inputs)
    y, (_, _, h_res) = functional.liger_mhc_forward(
        *inputs[:1], layer, *inputs[1:6], allow_fp32=True, return_coeffs=True
    )
    torch.testing.assert_close(h_res.sum(-2), torch.ones(2, 3, STREAMS).double(), rtol=1e-4, atol=1e-4)
    assert y.shape == (2, 3, STREAMS, SIZE)


def test_hyper_connections_in_16_bits() -> None:
    module = LigerMHC(nn.Linear(SIZE, SIZE), hc=STREAMS, c=SIZE, phi_dtype=torch.bfloat16)
    x = torch.randn(5, STREAMS, SIZE, dtype=torch.bfloat16, requires_grad=True)
    # the layer is float32: it gets its own dtype
    y = module(x)
    y.float().sum().backward()
    assert y.dtype is torch.bfloat16 and x.grad is not None and all(p.grad is not None for p in module.parameters())
    expected = functional.liger_mhc_coeffs(x, **_coeffs(module))
    with torch.autocast("cpu", torch.bfloat16):
        for one, other in zip(functional.liger_mhc_coeffs(x, **_coeffs(module)), expected, strict=True):
            assert torch.equal(one, other)


def _coeffs(module: LigerMHC) -> dict[str, Any]:
    return {name: getattr(module, name) for name in ("phi", "b", "alpha_pre", "alpha_post", "alpha_res")}


def test_hyper_connection_errors() -> None:
    module, x = LigerMHC(nn.Identity(), hc=STREAMS, c=SIZE), torch.randn(2, STREAMS, SIZE)
    with pytest.raises(ValueError, match="x must be float16 or bfloat16 without allow_fp32, got float32"):
        module(x)
    with pytest.raises(ValueError, match=r"x must have shape \[..., 3, 4\]"):
        module(x[:, :2])
    with pytest.raises(ValueError, match="phi must have shape"):
        functional.liger_mhc_coeffs(x, **_coeffs(module) | {"phi": module.phi[1:]}, allow_fp32=True)
    with pytest.raises(ValueError, match="tmax must be 1 or more"):
        functional.liger_mhc_coeffs(x, **_coeffs(module), allow_fp32=True, tmax=0)
    with pytest.raises(ValueError, match="f_out must have shape"):
        functional.liger_mhc_post_res(x, x, x[..., 0], x[..., :STREAMS])
    with pytest.raises(ValueError, match="h_pre must have shape"):
        functional.liger_mhc_pre(x, x)
    with pytest.raises(ValueError, match="hc must be 1 or more"):
        LigerMHC(nn.Identity(), hc=0, c=SIZE)


def test_attention_over_depth() -> None:
    def plain(v: Tensor, query: Tensor, norm: Tensor) -> Tensor:
        scores = (F.rms_norm(v, (6,), norm, 1e-6) * query).sum(-1)
        return (scores.softmax(0)[..., None] * v).sum(0)

    inputs = tensors((4, 2, 3, 6), (6,), (6,))
    same(functional.liger_attn_res, plain, inputs)
    same(lambda v, *weights: functional.liger_attn_res(list(v.unbind()), *weights), plain, inputs)
    half = [t.detach().half() for t in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        found = functional.liger_attn_res(list(half[0].unbind()), *half[1:])
    torch.testing.assert_close(found, functional.liger_attn_res(*half))
    v = torch.randn(2, 3, 6).bfloat16()
    assert functional.liger_attn_res(v, torch.ones(6), torch.ones(6)).dtype is torch.bfloat16
    with pytest.raises(ValueError, match="w_norm must have shape"):
        functional.liger_attn_res(v, torch.ones(6), torch.ones(5))


def _neighbors(S: int, kernel: int, dilation: int) -> Tensor:
    apart = torch.arange(S)[:, None] - torch.arange(S)
    return (apart.abs() <= kernel // 2 * dilation) & (apart % dilation == 0)


# 7 tokens: no multiple of the dilations; a dilation past the end leaves each token alone
@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (3, 1), (3, 2), (5, 3), (99, 1), (3, 20)])
def test_neighborhood_attention(kernel: int, dilation: int) -> None:
    def plain(*qkv: Tensor) -> Tensor:
        return attend(*(x.transpose(1, 2) for x in qkv), _neighbors(7, kernel, dilation), 0.3)[0].transpose(1, 2)

    ours = functional.liger_fused_neighborhood_attention
    same(lambda q, k, v: ours(q, k, v, kernel, dilation, 0.3), plain, tensors(*[(2, 3, 7, 8)] * 3))


def test_neighborhood_modules() -> None:
    config = LigerFusedNeighborhoodAttentionConfig(hidden_size=8, num_heads=2, kernel_size=3, dropout=0.5).to_dict()
    assert config == {
        "hidden_size": 8, "num_heads": 2, "kernel_size": 3, "dilation": 1, "bias": True, "dropout": 0.5,
        "layer_norm_eps": 1e-5, "scale": None,
    }  # fmt: skip
    layer = LigerFusedNeighborhoodAttentionLayer(**config).double().eval()
    inner = layer.attention

    def plain(x: Tensor) -> Tensor:
        y = layer.layer_norm(x)
        q, k, v = (part(y).unflatten(-1, (2, 4)) for part in (inner.q_proj, inner.k_proj, inner.v_proj))
        return x + inner.out_proj(attend(q, k, v, _neighbors(7, 3, 1))[0].flatten(-2))

    (x,) = tensors((2, 7, 8))
    same(layer, plain, [x])
    layer.train()
    assert not torch.equal(layer(x), layer(x))
    with pytest.raises(NotImplementedError, match="attention_mask"):
        layer(x, torch.ones(7))
    for changes, text in (
        ({"kernel_size": 4}, "kernel_size must be odd and positive, got 4"), ({"dilation": 0}, "dilation must be 1"),
        ({"num_heads": 3}, "hidden_size must be a multiple of 3"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            LigerFusedNeighborhoodAttention(**{"hidden_size": 8, "num_heads": 2} | changes)
    with pytest.raises(ValueError, match="key must have shape"):
        functional.liger_fused_neighborhood_attention(*tensors((1, 2, 7, 8), (1, 2, 6, 8), (1, 2, 7, 8)))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_multi_token_attention(sparse: bool, bias: bool) -> None:
    module = LigerMultiTokenAttention(4, 2, 3, padding=1, groups=2, bias=bias, sparse=sparse).double()
    scores = tensors((2, 4, 6, 6))[0]

    def plain(scores: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        masked = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9)
        p = functional.liger_sparsemax(masked) if sparse else masked.softmax(-1)
        return F.conv2d(p, weight, rest[0] if rest else None, 1, 1, 1, 2) * torch.ones(6, 6).double().tril()

    assert module.bias is None or not module.bias.any()
    if module.bias is not None:
        module.bias.data.normal_()
    inputs = [scores, module.weight] + ([module.bias] if bias else [])
    same(lambda scores, *_: module(scores), plain, inputs)


def test_multi_token_attention_errors() -> None:
    with pytest.raises(ValueError, match=r"scores must have shape \[B, C, L, L\], got \[1, 2, 3, 4\]"):
        functional.liger_multi_token_attention(torch.ones(1, 2, 3, 4), torch.ones(2, 2, 1, 1))
    with pytest.raises(ValueError, match="must give a square result"):
        functional.liger_multi_token_attention(torch.ones(1, 2, 4, 4), torch.ones(2, 2, 1, 3))


@pytest.mark.parametrize("formula", ["pytorch", "megatron"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_vocab_parallel_cross_entropy(formula: str, smoothing: float) -> None:
    (x,) = tensors((3, 2, 7))
    target = torch.tensor([[0, 6], [-100, 2], [3, 3]])
    module = LigerVocabParallelCrossEntropy(label_smoothing=smoothing, label_smoothing_formula=formula)

    def plain(x: Tensor) -> Tensor:
        log_p = x.log_softmax(-1)
        onehot = F.one_hot(target.clamp(min=0), 7).double()
        # the rest of the smoothing on all words, or on all but the target
        other = torch.ones(7).double() / 7 if formula == "pytorch" else (1 - onehot) / 6
        return -(((1 - smoothing) * onehot + smoothing * other) * log_p).sum(-1) * (target != -100)

    same(lambda x: module(x, target), plain, [x])
    for options, text in (
        ({"reduction": "mean"}, "reduction must be"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\), got 1.0"),
        ({"label_smoothing_formula": "x"}, "label_smoothing_formula must be"),
        ({"label_smoothing_mode": "x"}, "label_smoothing_mode must be"),
    ):
        with pytest.raises(ValueError, match=text):
            LigerVocabParallelCrossEntropy(**options)
    with pytest.raises(ValueError, match=r"vocab_parallel_logits must have shape \[S, B, V\]"):
        module(x[0], target)
    with pytest.raises(ValueError, match="target must have shape"):
        module(x, target.T)
    two_ranks: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(NotImplementedError, match="label_smoothing_mode = 'partition'"):
        LigerVocabParallelCrossEntropy(label_smoothing=0.1, label_smoothing_mode="partition")(x, target, two_ranks)
