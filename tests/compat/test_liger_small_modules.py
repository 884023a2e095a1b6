"""Liger's smaller norms, MLPs and functions against plain PyTorch in float64."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from powertrain.compat.liger_kernel.transformers import (
    LigerBlockSparseTop2MLP,
    LigerModulatedRMSNorm,
    LigerPolyNorm,
    LigerSparsemax,
)
from powertrain.compat.liger_kernel.transformers.functional import liger_modulated_rms_norm, liger_poly_norm
from powertrain.compat.liger_kernel.transformers.rms_norm import LigerRMSNormForGemma3, LigerRMSNormForGemma4
from powertrain.compat.liger_kernel.transformers.rope import liger_rotary_pos_emb_vision
from powertrain.compat.liger_kernel.transformers.swiglu import LigerHunyuanV1SwiGLUMLP
from tests.compat.plain import same, tensors

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 8), (2, 3, 8)], ids=str)
@pytest.mark.parametrize("shifted", [False, True])
def test_modulated_rms_norm(shape: tuple[int, ...], shifted: bool) -> None:
    x, scale, shift = tensors((2, 3, 8), shape, shape)
    module = LigerModulatedRMSNorm(8, offset=1.0, casting_mode="gemma").double()
    module.weight.data.normal_()
    inputs = [x, scale, shift if shifted else None, module.weight]

    def plain(x: Tensor, scale: Tensor, shift: Tensor | None, w: Tensor) -> Tensor:
        over = (2, 1, 8) if shape == (2, 8) else shape
        y = F.rms_norm(x, (8,), w + 1, 1e-6) * (1 + scale.reshape(over))
        return y if shift is None else y + shift.reshape(over)

    same(lambda x, scale, shift, _: module(x, scale, shift), plain, inputs)
    with pytest.raises(ValueError, match="M a divisor of 6"):
        liger_modulated_rms_norm(x, None, torch.ones(4, 8))
    with pytest.raises(ValueError, match="shift must have shape"):
        liger_modulated_rms_norm(x, None, torch.ones(2, 8), torch.ones(8))


def test_poly_norm() -> None:
    module = LigerPolyNorm().double()
    module.weight.data.normal_()
    norm = lambda u: F.rms_norm(u, u.shape[-1:], eps=1e-6)  # noqa: E731
    expected = lambda x, w, b: w[0] * norm(x**3) + w[1] * norm(x**2) + w[2] * norm(x) + b  # noqa: E731
    same(lambda x, *_: module(x), expected, [*tensors((4, 6)), module.weight, module.bias])
    with pytest.raises(ValueError, match="W must have shape"):
        liger_poly_norm(torch.ones(2, 2), torch.ones(2), torch.ones(()))


@pytest.mark.parametrize("dim", [-1, 0])
def test_sparsemax(dim: int) -> None:
    (x,) = tensors((5, 7))
    y = LigerSparsemax(dim)(x)
    torch.testing.assert_close(y.sum(dim), torch.ones_like(y.sum(dim)))
    rows, projected = (t.detach().movedim(dim, -1) for t in (x, y))
    for z, p in zip(rows, projected, strict=True):
        # the projection onto the simplex, by bisection of its threshold
        low, high = z.min() - 1, z.max()
        for _ in range(80):
            tau = (low + high) / 2
            low, high = (tau, high) if (z - tau).clamp(min=0).sum() > 1 else (low, tau)
        torch.testing.assert_close(p, (z - low).clamp(min=0))
    assert (projected == 0).any()
    assert torch.autograd.gradcheck(LigerSparsemax(dim), (x,))
    assert LigerSparsemax()(x.half()).dtype is torch.half


def test_mlps() -> None:
    config = SimpleNamespace(hidden_size=6, intermediate_size=8, hidden_act="silu")
    (x,) = tensors((3, 6))
    expected = lambda x, g, u, d: (F.silu(x @ g.T) * (x @ u.T)) @ d.T  # noqa: E731
    expert, mlp = LigerBlockSparseTop2MLP(config).double(), LigerHunyuanV1SwiGLUMLP(config, 3, True).double()
    same(lambda x, *_: expert(x), expected, [x, expert.w1.weight, expert.w3.weight, expert.w2.weight])
    weights = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
    same(lambda x, *_: mlp(x), expected, [x, *weights])
    assert mlp.layer_idx == 3
    for make in (LigerBlockSparseTop2MLP, LigerHunyuanV1SwiGLUMLP):
        with pytest.raises(ValueError, match="hidden_act"):
            make(SimpleNamespace(hidden_size=6, intermediate_size=8, hidden_act="gelu"))


def test_gemma4_norm() -> None:
    (x,) = tensors((3, 8))
    module = LigerRMSNormForGemma4(8).double()
    assert torch.equal(module.weight, torch.ones(8).double())
    module.weight.data.normal_()
    same(lambda x, _: module(x), lambda x, w: F.rms_norm(x, (8,), w, 1e-6), [x, module.weight])
    bare = LigerRMSNormForGemma4(8, with_scale=False)
    assert not list(bare.parameters())
    same(bare, lambda x: F.rms_norm(x, (8,), None, 1e-6), [x])


def test_vision_rope() -> None:
    q, k, angles = torch.randn(5, 2, 8), torch.randn(5, 2, 8), torch.randn(5, 4)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    turned = liger_rotary_pos_emb_vision(q.bfloat16(), k, cos, sin)
    for x, y in zip((q.bfloat16(), k), turned, strict=True):
        a, b = x.float().chunk(2, -1)
        expected = x.float() * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]
        torch.testing.assert_close(y, expected.to(x.dtype))


def test_gemma3_norm_takes_its_options_by_position() -> None:
    norm = LigerRMSNormForGemma3(8, 1e-5, 1.0, "gemma", "ones", True).double()
    (x,) = tensors((2, 3, 8))
    same(norm, lambda x: 2 * F.rms_norm(x, (8,), None, 1e-5), [x])
