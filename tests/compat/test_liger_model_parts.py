"""Liger's MLPs, experts, norms and rotations of single models against plain PyTorch in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from powertrain.compat.liger_kernel import transformers as liger
from powertrain.compat.liger_kernel.transformers.functional import liger_qwen2vl_mrope
from powertrain.compat.liger_kernel.transformers.geglu import LigerGEGLUMLPForGemma4
from powertrain.compat.liger_kernel.transformers.llama4_rope import apply_liger_llama4_rope_full
from powertrain.compat.liger_kernel.transformers.qwen2vl_mrope import liger_multimodal_rotary_pos_emb
from powertrain.compat.liger_kernel.transformers.rope import liger_rotary_pos_emb_gpt_oss
from tests.compat.plain import same, tensors

pytestmark = pytest.mark.usefixtures("on_cpu")


def _config(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"hidden_size": 6, "intermediate_size": 8, "hidden_act": "silu"} | changes)


def _gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _weights(module: torch.nn.Module) -> list[Tensor]:
    return [getattr(module, f"{name}_proj").weight for name in ("gate", "up", "down")]


def test_mlps_of_one_function() -> None:
    (x,) = tensors((2, 3, 6))
    glimmer = SimpleNamespace(hidden_size=6, intermediate_size=8, hidden_activation="silu")
    for module in (liger.LigerMLP(_config()), liger.LigerSwiGLUMLPForMuseGlimmer(glimmer)):
        module.double()
        same(lambda x, *_: module(x), _gated, [x, *_weights(module)])  # noqa: B023
    for make in (liger.LigerMLP, liger.LigerFalconH1SwiGLUMLP, liger.LigerExperts, liger.LigerTiledSwiGLUMLP):
        with pytest.raises(ValueError, match=r"hidden_act must be one of .* got 'gelu'"):
            make(_config(hidden_act="gelu", mlp_multipliers=(1, 1), num_experts=2))


@pytest.mark.parametrize("bias", [False, True])
def test_falcon_h1(bias: bool) -> None:
    config = _config(mlp_multipliers=(0.7, 1.3), mlp_bias=bias)
    module = liger.LigerFalconH1SwiGLUMLP(config).double()
    parts = (module.gate_proj, module.up_proj, module.down_proj)
    biases = [part.bias if bias else torch.zeros(1).double() for part in parts]

    def plain(x: Tensor, g: Tensor, u: Tensor, d: Tensor, *b: Tensor) -> Tensor:
        return 1.3 * ((F.silu(0.7 * (x @ g.T + b[0])) * (x @ u.T + b[1])) @ d.T) + b[2]

    same(lambda x, *_: module(x), plain, [*tensors((3, 6)), *_weights(module), *biases])
    if bias:
        with pytest.raises(ValueError, match="mlp_bias must be False"):
            liger.LigerFalconH1MLP(config)
    else:
        other = liger.LigerFalconH1MLP(config).double()
        other.load_state_dict(module.state_dict())
        same(other, module, tensors((3, 6)))


# 7 tokens: shards of different sizes; None: as many as ceil(7 / 6)
@pytest.mark.parametrize("shards", [None, 1, 3, 20])
@pytest.mark.parametrize("shape", [(7, 6), (2, 7, 6)], ids=str)
def test_tiled_mlps(shards: int | None, shape: tuple[int, ...]) -> None:
    (x,) = tensors(shape)
    swiglu = liger.LigerTiledSwiGLUMLP(_config(), shards).double()
    same(lambda x, *_: swiglu(x), _gated, [x, *_weights(swiglu)])
    geglu = liger.LigerTiledGEGLUMLP(_config(hidden_act="gelu_pytorch_tanh"), shards).double()
    plain = lambda x, g, u, d: (F.gelu(x @ g.T, approximate="tanh") * (x @ u.T)) @ d.T  # noqa: E731
    same(lambda x, *_: geglu(x), plain, [x, *_weights(geglu)])
    with pytest.raises(ValueError, match="hidden_act"):
        liger.LigerTiledGEGLUMLP(_config())


def test_tiled_mlp_keeps_no_hidden_features() -> None:
    module, saved = liger.LigerTiledSwiGLUMLP(_config(intermediate_size=64), 2).double(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        module(*tensors((8, 6)))
    assert all(shape[-1] != 64 for shape in saved)


@pytest.mark.parametrize(
    "names",
    [
        {"num_experts": 3, "moe_intermediate_size": 4, "intermediate_size": 99},
        {"num_local_experts": 3, "intermediate_size": 4},
        {"n_routed_experts": 3, "moe_intermediate_size": 4},
    ],
    ids=["qwen3_moe", "mixtral", "deepseek"],
)
def test_experts(names: dict[str, int]) -> None:
    module = liger.LigerExperts(SimpleNamespace(hidden_size=6, hidden_act="silu", **names)).double()
    for parameter in module.parameters():
        parameter.data.normal_()
    # [2, 4] tokens, two experts each, of which expert 2 has none
    index = torch.tensor([[[0, 1], [1, 0], [0, 1], [1, 0]]] * 2)
    x, weights = tensors((2, 4, 6), (2, 4, 2))

    def plain(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for choice in range(2):
            for expert in range(3):
                gate, up = gate_up[expert].chunk(2)
                out = _gated(x, gate, up, down[expert]) * weights[..., choice, None]
                y = y + torch.where(index[..., choice, None] == expert, out, 0.0)
        return y

    same(lambda x, w, *_: module(x, index, w), plain, [x, weights, module.gate_up_proj, module.down_proj])


def test_gemma4_mlp() -> None:
    config = _config(num_hidden_layers=4, num_kv_shared_layers=2, use_double_wide_mlp=True)
    assert [LigerGEGLUMLPForGemma4(config, i).down_proj.in_features for i in (None, 1, 2)] == [8, 8, 16]
    config.use_double_wide_mlp = False
    assert LigerGEGLUMLPForGemma4(config, 3).gate_proj.out_features == 8


def test_muse_glimmer_norms() -> None:
    (x,) = tensors((3, 8))
    centered = liger.LigerRMSNormForMuseGlimmerTextCentered(8).double()
    scaled = liger.LigerRMSNormForMuseGlimmer(8).double()
    assert torch.equal(centered.weight + 1, scaled.weight)
    for module in (centered, scaled):
        module.weight.data.normal_()
    same(lambda x, _: centered(x), lambda x, w: F.rms_norm(x, (8,), w + 1, 1e-6), [x, centered.weight])
    same(lambda x, _: scaled(x), lambda x, w: F.rms_norm(x, (8,), w, 1e-6), [x, scaled.weight])
    same(liger.LigerRMSNormForMuseGlimmer(with_scale=False), lambda x: F.rms_norm(x, (8,), None, 1e-6), [x])
    with pytest.raises(ValueError, match="dim must be given"):
        liger.LigerRMSNormForMuseGlimmer()


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def test_gpt_oss_rope() -> None:
    q, k = tensors((2, 3, 5, 8), (2, 1, 5, 8))
    # of each sequence its own, in float32, which is the table's dtype
    cos, sin = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    turned = liger_rotary_pos_emb_gpt_oss(q, k, cos, sin)
    wide = [t.double().repeat(1, 1, 2)[:, None] for t in (cos, sin)]
    _same_pair(turned, (_halves(q, *wide), _halves(k, *wide)), (q, k))


def _same_pair(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> None:
    for one, other, x in zip(ours, expected, inputs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        weights = torch.randn_like(one)
        grads = [torch.autograd.grad((y * weights).sum(), x, retain_graph=True)[0] for y in (one, other)]
        torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_mrope() -> None:
    q, k = tensors((2, 3, 5, 12), (2, 1, 5, 12))
    half = torch.randn(3, 2, 5, 6)
    cos, sin = half.cos().repeat(1, 1, 1, 2), half.sin().repeat(1, 1, 1, 2)
    section = [3, 1, 2]
    # as in transformers' modeling_qwen2_vl
    wide = [
        torch.cat([m[i % 3] for i, m in enumerate(t.double().split(section * 2, -1))], -1)[:, None] for t in (cos, sin)
    ]
    turned = liger_multimodal_rotary_pos_emb(q, k, cos, sin, section)
    _same_pair(turned, (_halves(q, *wide), _halves(k, *wide)), (q, k))
    with pytest.raises(ValueError, match=r"mrope_section must be three numbers whose sum is 6, got \[3, 3, 3\]"):
        liger_qwen2vl_mrope(q, k, cos, sin, [3, 3, 3])
    half_precision = [t.half() for t in (q, k, cos, sin)]
    expected = liger_qwen2vl_mrope(*half_precision, section)
    # tables of another dtype than autocast's
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(liger_qwen2vl_mrope(*half_precision, section), expected)
    with pytest.raises(ValueError, match="cos must have shape"):
        liger_qwen2vl_mrope(q, k, cos[0], sin, section)


def _complex(x: Tensor, freqs: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * freqs[:, :, None]).flatten(-2)


def test_llama4_rope() -> None:
    q, k = tensors((2, 5, 3, 8), (2, 5, 1, 8))
    rows = torch.polar(torch.ones(2, 7, 4), torch.randn(2, 7, 4))
    # rows of each sequence, and more of them than tokens; of both the same
    for freqs in (rows, rows[:1, :5], rows[0]):
        turned = liger.liger_llama4_text_rotary_pos_emb(q, k, freqs)
        at = freqs.to(torch.complex128).reshape(-1, *freqs.shape[-2:])[:, :5]
        _same_pair(turned, (_complex(q, at), _complex(k, at)), (q, k))
    with pytest.raises(ValueError, match=r"freqs_cis must have shape \[5, 4\] or \[2, 5, 4\], got \[4, 4\]"):
        liger.liger_llama4_text_rotary_pos_emb(q, k, rows[0, :4])
    with pytest.raises(ValueError, match="freqs_cis must be complex"):
        liger.liger_llama4_text_rotary_pos_emb(q, k, rows.real)


@pytest.mark.parametrize("shape", [(5, 4), (5, 1, 4), (1, 5, 1, 4)], ids=str)
def test_llama4_vision_rope(shape: tuple[int, ...]) -> None:
    q, k = tensors((2, 5, 3, 8), (2, 5, 3, 8))
    freqs = torch.polar(torch.ones(5, 4), torch.randn(5, 4))
    at = freqs.to(torch.complex128)[None]
    turned = liger.liger_llama4_vision_rotary_pos_emb(q, k, freqs.reshape(shape))
    _same_pair(turned, (_complex(q, at), _complex(k, at)), (q, k))
    # a cast of the model leaves the real part
    q, k = q.detach().float(), k.detach().float()
    for y, x in zip(liger.liger_llama4_vision_rotary_pos_emb(q, k, freqs.real.reshape(shape)), (q, k), strict=True):
        torch.testing.assert_close(y, _complex(x, freqs.real[None]))
    with pytest.raises(ValueError, match=r"freqs_ci must have 5 \* 4 elements"):
        liger.liger_llama4_vision_rotary_pos_emb(q, k, freqs[:4])


def test_llama4_functions_are_replaced() -> None:
    module = SimpleNamespace()
    apply_liger_llama4_rope_full(module)  # type: ignore[arg-type]
    assert module.apply_rotary_emb is liger.liger_llama4_text_rotary_pos_emb
    assert module.vision_apply_rotary_emb is liger.liger_llama4_vision_rotary_pos_emb
    assert liger.is_transformers_available()
