"""flash_attn's layers, losses and ops against plain PyTorch in float64, forward and backward.

Flash-attn 3's arguments.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from powertrain.compat import flash_attn_interface as flash3
from powertrain.compat.flash_attn import bert_padding
from powertrain.compat.flash_attn.layers import rotary
from powertrain.compat.flash_attn.losses.cross_entropy import CrossEntropyLoss
from powertrain.compat.flash_attn.ops.layer_norm import DropoutAddLayerNorm, dropout_add_layer_norm_parallel_residual
from powertrain.compat.flash_attn.ops.rms_norm import DropoutAddRMSNorm, RMSNorm, dropout_add_rms_norm, rms_norm
from powertrain.compat.flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn
from powertrain.compat.flash_attn.ops.triton.rotary import apply_rotary
from tests.compat.plain import attend, band, same, tensors

pytestmark = pytest.mark.usefixtures("on_cpu")


def _angles(positions: int, pairs: int) -> tuple[Tensor, Tensor]:
    at = torch.outer(torch.arange(positions).float(), 100.0 ** -(torch.arange(pairs) / pairs))
    return at.cos(), at.sin()


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: Tensor) -> Tensor:
    """Pair by pair; x [b, s, h, d], positions [b, s]."""
    pairs = cos.shape[1]
    out = [x[..., c] for c in range(x.shape[-1])]
    for c in range(pairs):
        i, j = (2 * c, 2 * c + 1) if interleaved else (c, c + pairs)
        co, si = cos[positions, c].to(x.dtype)[..., None], sin[positions, c].to(x.dtype)[..., None]
        out[i], out[j] = x[..., i] * co - x[..., j] * si, x[..., i] * si + x[..., j] * co
    return torch.stack(out, -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, 3, torch.tensor([2, 5])], ids=["0", "3", "tensor"])
@pytest.mark.parametrize("inplace", [False, True])
def test_apply_rotary_emb(interleaved: bool, offset: Any, inplace: bool) -> None:
    (x,) = tensors((2, 4, 3, 10))
    cos, sin = _angles(9, 4)
    positions = torch.arange(4) + (offset[:, None] if isinstance(offset, Tensor) else torch.full((2, 1), offset))
    same(
        lambda x: rotary.apply_rotary_emb(x, cos, sin, interleaved, inplace, offset),
        lambda x: _turned(x, cos, sin, interleaved, positions), [x],
    )  # fmt: skip
    y = x.detach().clone()
    result = rotary.apply_rotary_emb(y, cos, sin, interleaved, inplace, offset)
    assert (result is y) == inplace
    torch.testing.assert_close(apply_rotary(result, cos, sin, offset, None, None, interleaved, False, True), x.detach())
    if isinstance(offset, int):
        one = rotary.apply_rotary_emb_torch(x, cos.double()[offset:][:4], sin.double()[offset:][:4], interleaved)
        torch.testing.assert_close(one, _turned(x, cos, sin, interleaved, positions))


def test_apply_rotary_emb_of_packed_sequences() -> None:
    (x,) = tensors((7, 2, 8))
    cos, sin = _angles(6, 4)
    cu, positions = torch.tensor([0, 4, 4, 7], dtype=torch.int32), torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    same(
        lambda x: rotary.apply_rotary_emb(x, cos, sin, cu_seqlens=cu, max_seqlen=4),
        lambda x: _turned(x[None], cos, sin, False, positions)[0], [x],
    )  # fmt: skip


@pytest.mark.parametrize("heads", [(3, 3), (4, 2)], ids=["equal", "grouped"])
@pytest.mark.parametrize("grad", [False, True])
def test_packed_qkv(heads: tuple[int, int], grad: bool) -> None:
    h, hk = heads
    shape = (2, 5, 3, h, 8) if h == hk else (2, 5, h + 2 * hk, 8)
    (qkv,) = tensors(shape, grad=grad)
    tables = (*_angles(5, 4), *(t * 0.5 for t in _angles(5, 4)))
    at = torch.arange(5).expand(2, 5)

    def expected(x: Tensor) -> Tensor:
        q, k, v = x.unbind(2) if x.dim() == 5 else x.split((h, hk, hk), 2)
        parts = _turned(q, *tables[:2], False, at), _turned(k, *tables[2:], False, at), v
        return torch.stack(parts, 2) if x.dim() == 5 else torch.cat(parts, 2)

    before = qkv.detach().clone()
    options = {} if h == hk else {"num_heads_q": h}
    if grad:
        same(lambda x: rotary.apply_rotary_emb_qkv_(x, *tables, **options), expected, [qkv])
    else:
        assert rotary.apply_rotary_emb_qkv_(qkv, *tables, **options) is qkv
        torch.testing.assert_close(qkv, expected(before))


@pytest.mark.parametrize("form", ["qkv", "grouped", "kv"])
def test_packed_of_another_dtype_than_autocast(form: str) -> None:
    shape = {"qkv": (2, 5, 3, 3, 8), "grouped": (2, 5, 8, 8), "kv": (2, 5, 2, 3, 8)}[form]
    x = torch.randn(shape).half().requires_grad_()
    tables = [t.half() for t in _angles(5, 4)]

    def turned() -> Tensor:
        if form == "kv":
            return rotary.apply_rotary_emb_kv_(x, *tables)
        return rotary.apply_rotary_emb_qkv_(x, *tables, num_heads_q=4 if form == "grouped" else None)

    expected = turned()
    with torch.autocast("cpu", torch.bfloat16):
        found = turned()
    assert found.requires_grad
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("scale_base", [None, 512.0])
@pytest.mark.parametrize("offset", [0, 2, torch.tensor([1, 3])], ids=["0", "2", "tensor"])
def test_rotary_embedding(scale_base: float | None, offset: Any) -> None:
    module = rotary.RotaryEmbedding(8, base=100.0, scale_base=scale_base)
    q, kv = tensors((2, 4, 3, 8), (2, 4, 2, 2, 8))
    new_q, new_kv = module(q, kv, offset, max_seqlen=7)
    positions = torch.arange(4) + (offset[:, None] if isinstance(offset, Tensor) else torch.full((2, 1), offset))
    cos, sin = _angles(7, 4)
    channel = torch.arange(0, 8, 2).float()
    scale = 1.0
    if scale_base is not None:
        scale = ((channel + 3.2) / 11.2) ** ((torch.arange(7).float() - 3) / scale_base)[:, None]
    at = {"interleaved": False, "positions": positions}
    torch.testing.assert_close(new_q, _turned(q, cos * scale, sin * scale, **at), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        new_kv[:, :, 0], _turned(kv[:, :, 0], cos / scale, sin / scale, **at), rtol=1e-6, atol=1e-6
    )
    assert torch.equal(new_kv[:, :, 1], kv[:, :, 1])
    packed = module(torch.stack((q, kv[:, :, 0, :1].expand_as(q), q), 2), seqlen_offset=offset, max_seqlen=7)
    torch.testing.assert_close(packed[:, :, 0], new_q)


@pytest.mark.parametrize("scale_base", [None, 512.0])
def test_rotary_embedding_of_a_converted_module(scale_base: float | None) -> None:
    """Frequencies in bfloat16 would be off by 2^-9 of the angle, which grows with the position: 500 here."""
    module = rotary.RotaryEmbedding(16, scale_base=scale_base)
    (qkv,) = tensors((1, 2, 3, 1, 16))
    options = {"seqlen_offset": 500}
    expected = module(qkv.clone(), **options)
    converted = rotary.RotaryEmbedding(16, scale_base=scale_base).bfloat16()
    torch.testing.assert_close(converted(qkv.clone(), **options), expected)


def test_rotary_embedding_trains_after_inference() -> None:
    module, qkv = rotary.RotaryEmbedding(8), torch.randn(1, 2, 3, 1, 8)
    with torch.inference_mode():
        module(qkv.clone())
    # float32: tables of another dtype are converted, and the copies may be saved
    turned = module(qkv.requires_grad_())
    turned.sum().backward()
    torch.testing.assert_close(turned, rotary.RotaryEmbedding(8)(qkv))


def _norm(h: Tensor, w: Tensor, b: Tensor | None, rms: bool, plus: float = 0.0) -> Tensor:
    h = h if rms else h - h.mean(-1, keepdim=True)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * (w + plus)
    return y if b is None else y + b


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("second", [False, True], ids=["one", "parallel"])
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_norm_functions(rms: bool, second: bool, residual: bool) -> None:
    x, r, x1, w, b, w1, b1 = tensors((3, 4, 16), (3, 4, 16), (3, 4, 16), (16,), (16,), (16,), (16,))
    rowscale = None if second else torch.rand(3, 4, dtype=torch.float64)
    used = [x, w, b, *([r] if residual else []), *([x1, w1, b1] if second else [])]
    function = rms_norm_fn if rms else layer_norm_fn

    def ours(*_: Tensor) -> Tensor:
        y = function(
            x, w, b, r if residual else None, *((x1, w1, b1) if second else (None,) * 3), eps=1e-5, rowscale=rowscale,
            prenorm=True, zero_centered_weight=True,
        )  # fmt: skip
        return torch.cat(y, -1)

    def expected(*_: Tensor) -> Tensor:
        h = x if rowscale is None else x * rowscale[..., None]
        h = h + (r if residual else 0) + (x1 if second else 0)
        ys = [_norm(h, w, b, rms, 1.0), *([_norm(h, w1, b1, rms, 1.0)] if second else []), h]
        return torch.cat(ys, -1)

    same(ours, expected, used)


def test_norm_dtypes() -> None:
    x, w = torch.randn(4, 16, dtype=torch.bfloat16), torch.ones(16)
    y, h = rms_norm_fn(x, w, None, prenorm=True, residual_in_fp32=True)
    assert (y.dtype, h.dtype) == (torch.bfloat16, torch.float32) and torch.equal(h, x.float())
    y, h = layer_norm_fn(x, w, None, x.float(), prenorm=True, out_dtype=torch.float32)
    assert y.dtype is h.dtype is torch.float32
    torch.testing.assert_close(y, _norm(2 * x.float(), w, None, False), rtol=1e-5, atol=1e-5)


def test_dropout_and_modules() -> None:
    x, r = tensors((64, 64), (64, 64))
    w = torch.ones(64, dtype=torch.float64)
    _, h = dropout_add_rms_norm(x, r, w, None, 0.25, 1e-5, prenorm=True, layerscale=2 * w)
    kept = (h - r).abs() > 1e-12
    assert 0.65 < kept.double().mean() < 0.85
    torch.testing.assert_close((h - r)[kept], (2 * x / 0.75)[kept])
    for cls, rms in ((DropoutAddRMSNorm, True), (DropoutAddLayerNorm, False)):
        module = cls(64, prenorm=True, p=0.5, dtype=torch.float64).eval()
        y, h = module(x, r)
        torch.testing.assert_close(h, x + r)
        torch.testing.assert_close(y, _norm(x + r, w, None, rms))
    module = RMSNorm(64, dtype=torch.float64)
    assert set(module.state_dict()) == {"weight"}
    same(module, lambda x: rms_norm(x, w, 1e-5), [x])
    y0, y1 = dropout_add_layer_norm_parallel_residual(x, r, None, w, None, None, None, 0.0, 1e-5)
    torch.testing.assert_close(y0, _norm(x + r, w, None, False))
    assert y1 is None
    with pytest.raises(NotImplementedError, match="return_dropout_mask"):
        dropout_add_rms_norm(x, r, w, None, 0.1, 1e-5, return_dropout_mask=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("scales", [(1.0, 0.0, 0.0), (0.5, 0.1, 0.01)], ids=["plain", "all"])
def test_cross_entropy(reduction: str, scales: tuple[float, float, float]) -> None:
    (logits,) = tensors((6, 11))
    labels = torch.tensor([0, 3, -100, 10, 5, 5])
    scale, smoothing, z = scales
    loss = CrossEntropyLoss(-100, reduction, smoothing, scale, z, return_z_loss=True)

    def z_part(x: Tensor) -> Tensor:
        parts = z * torch.logsumexp(x * scale, -1).square() * (labels != -100)
        return parts if reduction == "none" else parts.sum() / (5 if reduction == "mean" else 1)

    def expected(x: Tensor) -> Tensor:
        plain = F.cross_entropy(x * scale, labels, reduction=reduction, label_smoothing=smoothing)
        return plain + z_part(x)

    same(lambda x: loss(x, labels)[0], expected, [logits])
    torch.testing.assert_close(loss(logits, labels)[1], z_part(logits).detach())


def test_cross_entropy_scales_in_float32() -> None:
    (x,) = tensors((6, 11))
    logits, labels = (50 * x.detach()).bfloat16().requires_grad_(), torch.tensor([0, 3, 10, 10, 5, 5])
    wide = logits.detach().double().requires_grad_()
    loss, expected = CrossEntropyLoss(logit_scale=0.3)(logits, labels), F.cross_entropy(0.3 * wide, labels)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    # rounded once, to bfloat16
    torch.testing.assert_close(logits.grad, wide.grad.bfloat16(), rtol=1e-2, atol=1e-5)


def test_concatenated_sequences() -> None:
    x = torch.arange(12.0).reshape(2, 6, 1)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]])
    rows, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert rows.flatten().tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9] and cu.tolist() == [0, 2, 5, 9] and longest == 4
    assert bert_padding.index_first_axis_residual(x, indices[:1])[1] is x
    with pytest.raises(ValueError, match=r"attention_mask_in_length must have shape \[2, 6\]"):
        bert_padding.unpad_input_for_concatenated_sequences(x, lengths[:, :3])


def test_flash3() -> None:
    q, k, v = tensors((2, 6, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    seen = band(6, 9, causal=True)
    same(lambda *t: flash3.flash_attn_func(*t, None, True), lambda *t: attend(*t, seen)[0], [q, k, v])
    chunked = torch.zeros(6, 9, dtype=torch.bool)
    for i in range(6):
        chunked[i, (i + 3) // 4 * 4 : i + 4] = True
    same(
        lambda *t: flash3.flash_attn_func(*t, causal=True, attention_chunk=4, num_splits=0, pack_gqa=True, sm_margin=8),
        lambda *t: attend(*t, chunked)[0], [q, k, v],
    )  # fmt: skip
    out, lse = flash3.flash_attn_func(q, k, v, return_attn_probs=True)
    halves = [
        flash3.flash_attn_func(q, k[:, part], v[:, part], return_attn_probs=True) for part in (slice(4), slice(4, 9))
    ]
    partial = torch.stack([half[0] for half in halves]), torch.stack([half[1].transpose(1, 2) for half in halves])
    whole = flash3.flash_attn_combine(*partial)
    torch.testing.assert_close(whole, (out, lse.transpose(1, 2)))
    with pytest.raises(ValueError, match=r"out_partial must be \[splits, b, s, h, d\]"):
        flash3.flash_attn_combine(partial[0][0], partial[1][0])
    with pytest.raises(ValueError, match="out must have shape"):
        flash3.flash_attn_combine(*partial, out=whole[0].mT)
    with pytest.raises(ValueError, match="lse_partial must have shape"):
        flash3.flash_attn_combine(partial[0], partial[1].transpose(2, 3))
    cu = torch.tensor([0, 6, 12], dtype=torch.int32)
    packed = [x.detach().flatten(0, 1) for x in (q, q[:, :, :2], q[:, :, :2])]
    used = torch.tensor([6, 3], dtype=torch.int32)
    ours = flash3.flash_attn_varlen_func(*packed, cu, cu, 6, 6, seqused_k=used)
    torch.testing.assert_close(ours[:6], attend(*(x[None, :6] for x in packed))[0][0])
    torch.testing.assert_close(ours[6:], attend(packed[0][None, 6:], *(x[None, 6:9] for x in packed[1:]))[0][0])
    assert flash3.get_scheduler_metadata(2, 6, 6, 4, 4, 8, used) is None
    for name in ("qv", "q_descale"):
        with pytest.raises(NotImplementedError, match=name):
            flash3.flash_attn_func(q, k, v, **{name: q})
