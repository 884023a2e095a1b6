"""Megatron's fused functions and TransformerEngine's small ones against plain PyTorch in float64, forward and
backward.
"""

import types

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powertrain.compat.megatron.core.fusions import fused_bias_dropout as dropout
from powertrain.compat.megatron.core.fusions import fused_bias_geglu as geglu
from powertrain.compat.megatron.core.fusions import fused_bias_gelu as gelu
from powertrain.compat.megatron.core.fusions import fused_bias_swiglu as swiglu
from powertrain.compat.megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from powertrain.compat.megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from powertrain.compat.transformer_engine import pytorch as te
from powertrain.compat.transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from tests.compat.plain import same, tensors

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_megatron_activations() -> None:
    x, b, w = tensors((5, 3, 8), (8,), (5, 3, 1))
    tanh = lambda x: F.gelu(x, approximate="tanh")  # noqa: E731
    quick = lambda x: x * torch.sigmoid(1.702 * x)  # noqa: E731
    gated = lambda x, act, plus=0.0: act(x[..., :4]) * (x[..., 4:] + plus)  # noqa: E731
    same(gelu.bias_gelu_impl, lambda x, b: tanh(x + b), [x, b])
    same(lambda x, b: gelu.bias_gelu(b, x), lambda x, b: tanh(x + b), [x, b])
    same(swiglu.bias_swiglu_impl, lambda x, b: gated(x + b, F.silu), [x, b])
    same(lambda x, w: swiglu.weighted_bias_swiglu_impl(x, None, w), lambda x, w: gated(x, F.silu) * w, [x, w])
    same(geglu.bias_geglu_impl, lambda x, b: gated(x + b, tanh), [x, b])
    same(geglu.geglu, lambda x: gated(x, tanh), [x])
    same(geglu.quick_gelu, quick, [x])
    for plus in (0.0, 1.0):
        same(lambda x, p=plus: geglu.quick_geglu(x, p), lambda x, p=plus: gated(x, quick, p), [x])
        same(
            lambda x, b, w, p=plus: geglu.weighted_bias_quick_geglu(x, b, w, p),
            lambda x, b, w, p=plus: gated(x + b, quick, p) * w, [x, b, w],
        )  # fmt: skip
    with pytest.raises(NotImplementedError, match="fp8_input_store"):
        swiglu.bias_swiglu_impl(x, b, True)


def test_megatron_dropout_loss_and_norm() -> None:
    x, b, r = tensors((5, 3, 8), (8,), (5, 3, 8))
    inference = dropout.get_bias_dropout_add(False, True)
    same(lambda x, b, r: inference((x, b), r, 0.5), lambda x, b, r: x + b + r, [x, b, r])
    for function in (dropout.get_bias_dropout_add(True, True), dropout.bias_dropout_add_unfused(True)):
        difference = (function((x + 10, b), r, 0.5) - r).detach()
        kept = difference.abs() > 1e-9
        assert 0.2 < kept.double().mean() < 0.8
        torch.testing.assert_close(difference[kept], (2 * (x + 10 + b)).detach()[kept])
    same(lambda x, b, r: inference((x, b), r, 0.5), lambda x, b, r: x + b + r, [x, b.expand(5, 1, 8).detach(), r])
    low, wide = x.detach().bfloat16(), r.detach().float()
    assert torch.equal(inference((low, None), wide, 0.5), low + wide.bfloat16())
    target = torch.randint(8, (5, 3))
    plain = lambda x: F.cross_entropy(x.flatten(0, 1), target.flatten(), reduction="none").view(5, 3)  # noqa: E731
    same(lambda x: fused_vocab_parallel_cross_entropy(x, target), plain, [x])
    config = types.SimpleNamespace(
        layernorm_zero_centered_gamma=True, sequence_parallel=True, normalization="LayerNorm"
    )
    norm = FusedLayerNorm(config, 8).double()
    assert norm.weight.sequence_parallel
    same(lambda x, w, b: norm(x), lambda x, w, b: F.layer_norm(x, (8,), w + 1, b), [x, norm.weight, norm.bias])


@pytest.mark.parametrize("shape", [8, (2, 4)], ids=str)
@pytest.mark.parametrize("centred", [False, True])
def test_te_norms(shape: int | tuple[int, ...], centred: bool) -> None:
    size = (shape,) if isinstance(shape, int) else shape
    (x,) = tensors((3, *size))
    for cls, plain in ((te.LayerNorm, F.layer_norm), (te.RMSNorm, F.rms_norm)):
        m = cls(shape, zero_centered_gamma=centred, device="cpu", dtype=torch.float64)
        same(lambda x, w, m=m: m(x), lambda x, w, p=plain: p(x, size, w + centred, eps=1e-5), [x, m.weight])


@pytest.mark.parametrize("cls", [te.LayerNorm, te.RMSNorm])
def test_te_norms_have_the_weights_dtype(cls: type[torch.nn.Module]) -> None:
    x = torch.randn(3, 4, 8)
    wide, narrow = cls(8, device="cpu"), cls(8, device="cpu", dtype=torch.bfloat16)
    # not rounded to x's dtype in between
    assert torch.equal(wide(x.bfloat16()), wide(x.bfloat16().float()))
    assert torch.equal(narrow(x), wide(x).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert wide(x).dtype is narrow(x).dtype is torch.bfloat16
        assert wide(x.double()).dtype is torch.float32
    with pytest.raises(ValueError, match=r"inp must end in the dims \[4, 8\], got \[3, 8, 4\]"):
        cls((4, 8), device="cpu")(x.transpose(1, 2))


def test_te_loss() -> None:
    (x,) = tensors((2, 3, 7))
    target = torch.tensor([[1, -100, 3], [0, 6, 6]])
    for reduce in (False, True):
        plain = lambda x, r=reduce: F.cross_entropy(  # noqa: E731
            x.flatten(0, 1), target.flatten(), reduction="mean" if r else "none", label_smoothing=0.1
        )
        ours = lambda x, r=reduce: te.parallel_cross_entropy(x, target, 0.1, r)  # noqa: E731
        same(lambda x, o=ours: o(x).flatten() if o(x).dim() else o(x), plain, [x])
    # 0 there where all tokens are ignored
    loss = te.parallel_cross_entropy(x, torch.full((2, 3), -100), 0.1, True)
    (grad,) = torch.autograd.grad(loss, x)
    assert loss == 0 and not grad.any()


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_te_rope(layout: str, interleaved: bool) -> None:
    embedding = te.RotaryPositionEmbedding(8, rotary_percent=0.5, interleaved=interleaved)
    freqs = embedding(12)
    assert freqs.shape == (12, 1, 1, 4) and freqs.dtype is torch.float32
    torch.testing.assert_close(embedding(5, offset=2), freqs[2:7])
    shapes = {"sbhd": (5, 2, 3, 8), "bshd": (2, 5, 3, 8), "thd": (5, 3, 8)}
    (x,) = tensors(shapes[layout])
    options, positions = {}, torch.arange(5).expand(2, 5)
    if layout == "thd":
        options, positions = {"cu_seqlens": torch.tensor([0, 2, 5], dtype=torch.int32)}, torch.tensor([[0, 1, 0, 1, 2]])
    elif layout == "bshd":
        options, positions = {"start_positions": torch.tensor([0, 4])}, positions + torch.tensor([[0], [4]])

    def plain(x: Tensor) -> Tensor:
        rows = {"sbhd": lambda x: x.transpose(0, 1), "bshd": lambda x: x, "thd": lambda x: x[None]}[layout](x)
        angle = freqs[positions, 0, 0][:, :, None].double()
        part = rows[..., :4]
        if interleaved:
            turned = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
        else:
            turned = torch.cat((-part[..., 2:], part[..., :2]), -1)
        out = torch.cat((part * angle.cos() + turned * angle.sin(), rows[..., 4:]), -1)
        return {"sbhd": lambda x: x.transpose(0, 1), "bshd": lambda x: x, "thd": lambda x: x[0]}[layout](out)

    ours = apply_rotary_pos_emb(x, freqs, layout, interleaved=interleaved, **options)
    torch.testing.assert_close(ours, plain(x), rtol=1e-6, atol=1e-6)
    with pytest.raises(NotImplementedError, match="cp_size"):
        apply_rotary_pos_emb(x, freqs, layout, cp_size=2, **options)


def test_te_interpolated_angles() -> None:
    plain = te.RotaryPositionEmbedding(8)(16)
    # bfloat16 has no 257, nor most of the frequencies
    converted = te.RotaryPositionEmbedding(8).bfloat16()
    assert torch.equal(converted(300), te.RotaryPositionEmbedding(8)(300))
    short = te.RotaryPositionEmbedding(8, seq_len_interpolation_factor=2.0, pretrained_max_position_embeddings=8)
    torch.testing.assert_close(short(16)[::2], plain[:8])
    # one of the two alone interpolates nothing there
    assert torch.equal(te.RotaryPositionEmbedding(8, seq_len_interpolation_factor=2.0)(16), plain)
    assert torch.equal(te.RotaryPositionEmbedding(8, pretrained_max_position_embeddings=4)(16), plain)
    long = te.RotaryPositionEmbedding(8, seq_len_interpolation_factor=2.0, pretrained_max_position_embeddings=4)
    torch.testing.assert_close(long(16)[::4], plain[:4])


def test_te_tracker_and_checkpoint() -> None:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    for again in (("other", 3), ("model-parallel-rng", 4)):
        with pytest.raises(RuntimeError, match="already exists"):
            tracker.add(*again)
    with pytest.raises(RuntimeError, match="there is model-parallel-rng"), tracker.fork("nothing"):
        pass
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with tracker.fork():
        one = torch.rand(4)
    assert torch.equal(torch.rand(2), expected)
    with tracker.fork():
        assert not torch.equal(torch.rand(4), one)
    linear, (x,) = nn.Linear(4, 4).double(), tensors((3, 4))

    def step(x: Tensor) -> Tensor:
        with tracker.fork():
            return F.dropout(linear(x), 0.5)

    states = tracker.get_states()

    def run(x: Tensor, *_: Tensor, recompute: bool) -> Tensor:
        tracker.set_states(dict(states))
        return te.checkpoint(step, x, get_rng_state_tracker=lambda: tracker) if recompute else step(x)

    same(lambda *t: run(*t, recompute=True), lambda *t: run(*t, recompute=False), [x, *linear.parameters()])
    torch.testing.assert_close(te.checkpoint(linear, x), linear(x))
