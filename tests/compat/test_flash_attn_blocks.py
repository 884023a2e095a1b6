"""flash_attn.modules' MHA and blocks beside plain PyTorch with the same parameters, in float64."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powertrain.compat.flash_attn.modules.block import Block, ParallelBlock
from powertrain.compat.flash_attn.modules.mha import MHA, get_alibi_slopes
from powertrain.compat.flash_attn.modules.mlp import Mlp
from powertrain.compat.flash_attn.ops.triton.layer_norm import RMSNorm
from powertrain.compat.flash_attn.utils.generation import InferenceParams
from tests.compat.plain import attend, band, same, tensors

pytestmark = pytest.mark.usefixtures("on_cpu")
E, H, D, B, S = 16, 4, 4, 2, 7


def turned(x: Tensor, size: int, first: int = 0) -> Tensor:
    """RoPE of the first `size` channels, [b, s, h, d]."""
    at = torch.arange(first, first + x.shape[1], dtype=torch.float32)
    angles = torch.outer(at, 1.0 / 10000 ** (torch.arange(0, size, 2) / size))
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
    a, b = x[..., : size // 2], x[..., size // 2 : size]
    return torch.cat((a * cos - b * sin, a * sin + b * cos, x[..., size:]), -1)


def convolved(x: Tensor, conv: nn.Conv1d) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        for k in range(3):
            if t - 2 + k >= 0:
                out[:, t] += x[:, t - 2 + k] * conv.weight[:, 0, k]
    return out + conv.bias


def plain(m: MHA, o: dict[str, Any], x: Tensor, other: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """The module's result from its parameters."""
    if m.cross_attn:
        q, kv = m.Wq(x), m.Wkv(x if other is None else other)
    else:
        qkv = m.Wqkv(x)
        qkv = convolved(qkv, m.dwconv_qkv) if hasattr(m, "dwconv_qkv") else qkv
        q, kv = qkv[..., :E], qkv[..., E:]
    q, kv = (convolved(q, m.dwconv_q), convolved(kv, m.dwconv_kv)) if hasattr(m, "dwconv_q") else (q, kv)
    heads = o.get("num_heads_kv") or H
    q, (k, v) = q.unflatten(-1, (H, D)), kv.unflatten(-1, (2, heads, D)).unbind(-3)
    if o.get("rotary_emb_dim"):
        q, k = turned(q, o["rotary_emb_dim"]), turned(k, o["rotary_emb_dim"])
    left, right = o.get("window_size", (-1, -1))
    seen = band(q.shape[1], k.shape[1], causal=o.get("causal", False), left=left, right=right)[None, None]
    if mask is not None:
        seen = seen & mask[:, None, None]
    bias = seen
    if o.get("use_alibi"):
        distance = (torch.arange(S)[:, None] - torch.arange(S)).abs()
        bias = (-torch.tensor(get_alibi_slopes(H)).double()[:, None, None] * distance).masked_fill(~seen, -torch.inf)
    return m.out_proj(attend(q, k, v, bias, o.get("softmax_scale"))[0].flatten(-2))


CASES = [
    {}, {"causal": True, "rotary_emb_dim": 4}, {"num_heads_kv": 2, "causal": True}, {"use_flash_attn": True},
    {"use_flash_attn": True, "num_heads_kv": 1, "window_size": (2, 0), "softmax_scale": 0.3, "rotary_emb_dim": 2},
    {"use_flash_attn": True, "causal": True, "use_alibi": True, "qkv_proj_bias": False, "out_proj_bias": False},
    {"dwconv": True, "causal": True}, {"dwconv": True, "num_heads_kv": 2}, {"checkpointing": True, "causal": True},
]  # fmt: skip


@pytest.mark.parametrize("options", CASES, ids=str)
def test_self_attention(options: dict[str, Any]) -> None:
    module = MHA(E, H, **options, dtype=torch.float64)
    (x,) = tensors((B, S, E))
    same(lambda x, *_: module(x), lambda x, *_: plain(module, options, x), [x, *module.parameters()])
    assert {"out_proj.weight", "Wqkv.weight"} <= set(module.state_dict())


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("heads", [None, 2], ids=["mha", "gqa"])
def test_padded_keys(heads: int | None, causal: bool) -> None:
    options = {"num_heads_kv": heads, "causal": causal}
    module = MHA(E, H, **options, dtype=torch.float64)
    (x,), mask = tensors((B, S, E)), torch.ones(B, S, dtype=torch.bool)
    if heads is None or not causal:
        mask[0, 5:] = False
        mask[1, 1] = False
    same(
        lambda x, *_: module(x, key_padding_mask=mask), lambda x, *_: plain(module, options, x, mask=mask),
        [x, *module.parameters()],
    )  # fmt: skip


def test_the_diagonal_of_cross_attention_is_that_of_the_kept_keys() -> None:
    module = MHA(E, H, cross_attn=True, causal=True, dtype=torch.float64)
    x, other = tensors((B, 3, E), (B, S, E))
    mask = torch.arange(S) < torch.tensor([5, 7])[:, None]
    for i, kept in enumerate((5, 7)):
        ours = module(x, other, key_padding_mask=mask)[i]
        expected = plain(module, {"causal": True}, x[i : i + 1], other[i : i + 1, :kept])[0]
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("heads", [None, 2], ids=["mha", "gqa"])
def test_cross_attention(heads: int | None, flash: bool) -> None:
    options = {"num_heads_kv": heads, "cross_attn": True, "use_flash_attn": flash}
    module = MHA(E, H, **options, return_residual=True, dtype=torch.float64)
    x, other = tensors((B, S, E), (B, 5, E))
    inputs = [x, other, *module.parameters()]
    same(lambda x, y, *_: module(x, y)[0], lambda x, y, *_: plain(module, options, x, y), inputs)
    assert module(x, other)[1] is x
    first = plain(module, options, x[:, :1], x)
    torch.testing.assert_close(module(x, mixer_subset=slice(0, 1))[0], first)


@pytest.mark.parametrize("heads", [None, 2], ids=["mha", "gqa"])
def test_sequences_one_after_the_other(heads: int | None) -> None:
    options = {"num_heads_kv": heads, "causal": True, "use_flash_attn": True}
    module = MHA(E, H, **options, dtype=torch.float64)
    (x,) = tensors((S, E))
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    expected = lambda x, *_: torch.cat([plain(module, options, part[None])[0] for part in (x[:3], x[3:])])  # noqa: E731
    same(lambda x, *_: module(x, cu_seqlens=ends, max_seqlen=4), expected, [x, *module.parameters()])


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("heads", [None, 2], ids=["mha", "gqa"])
def test_generation(heads: int | None, flash: bool) -> None:
    options = {"num_heads_kv": heads, "causal": True, "use_flash_attn": flash, "rotary_emb_dim": 4}
    module, x = MHA(E, H, **options, layer_idx=3), torch.randn(B, S, E)
    whole = plain(module, options, x)
    params = InferenceParams(max_seqlen=9, max_batch_size=3)
    with torch.no_grad():
        parts, at = [], 0
        for length in (4, 1, 2):
            params.seqlen_offset = at
            parts.append(module(x[:, at : at + length], inference_params=params))
            at += length
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
        assert params.key_value_memory_dict[3].shape == (3, 9, 2, heads or H, D)
        params.lengths_per_sample = torch.full((B,), S, dtype=torch.int32)
        params.seqlen_offset = S
        last = torch.randn(B, 1, E)
        more = module(last, inference_params=params)
    torch.testing.assert_close(more, plain(module, options, torch.cat((x, last), 1))[:, -1:], rtol=1e-4, atol=1e-5)
    params.reset(5, 2)
    assert (params.max_seqlen, params.seqlen_offset, params.lengths_per_sample.sum()) == (5, 0, 0)


def test_errors() -> None:
    for options, text in (
        ({"num_heads": 3}, "embed_dim must be a multiple of num_heads 3, got 16"),
        ({"num_heads_kv": 3}, "num_heads_kv must divide num_heads 4, got 3"),
        ({"use_alibi": True}, "use_flash_attn must be True with use_alibi"),
        ({"cross_attn": True, "rotary_emb_dim": 4}, "rotary_emb_dim must be 0 with cross_attn"),
        ({"cross_attn": True, "dwconv": True}, "dwconv must be False for cross_attn"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            MHA(E, options.pop("num_heads", H), **options)
    x, mask = torch.randn(B, S, E), torch.ones(B, S, dtype=torch.bool)
    ends = torch.tensor([0, 7], dtype=torch.int32)
    for module, given, text in (
        (MHA(E, H), {"x_kv": x}, "x_kv and mixer_subset must be None without cross_attn"),
        (MHA(E, H, use_flash_attn=True), {"key_padding_mask": mask}, "key_padding_mask must be None with use_flash"),
        (MHA(E, H, use_flash_attn=True), {"cu_seqlens": ends}, "max_seqlen must be given with cu_seqlens"),
        (MHA(E, H), {"cu_seqlens": ends, "max_seqlen": 7}, "cu_seqlens must be None but with use_flash_attn"),
        (MHA(E, H), {"inference_params": InferenceParams(9, 2)}, "layer_idx must be given for inference_params"),
        (MHA(E, H, layer_idx=0), {"inference_params": InferenceParams(3, 2)}, "x must have at most 3 tokens, got 7"),
        (MHA(E, H), {"key_padding_mask": mask[:, :3]}, "key_padding_mask must have shape"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            module(x, **given)


NORMS = {"layer": partial(nn.LayerNorm, dtype=torch.float64), "rms": partial(RMSNorm, dtype=torch.float64)}


def norm(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, RMSNorm):
        return F.rms_norm(x, (E,), module.weight, module.eps)
    return F.layer_norm(x, (E,), module.weight, module.bias, module.eps)


def made(cls: Any, kind: str, **options: Any) -> Any:
    mixer = partial(MHA, num_heads=H, causal=True, dtype=torch.float64)
    mlp = partial(Mlp, hidden_features=24, dtype=torch.float64)
    block = cls(E, mixer, options.pop("mlp_cls", mlp), NORMS[kind], **options)
    for p in block.parameters():
        p.data.normal_(0, 0.5)
    return block


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("prenorm", [True, False], ids=["pre", "post"])
def test_block(prenorm: bool, kind: str, fused: bool) -> None:
    block = made(Block, kind, prenorm=prenorm, fused_dropout_add_ln=fused)
    x, residual = tensors((B, S, E), (B, S, E))

    def pre(x: Tensor, residual: Tensor, *_: Tensor) -> Tensor:
        h = x + residual
        h = h + block.mixer(norm(block.norm1, h))
        return torch.cat((block.mlp(norm(block.norm2, h)), h))

    def post(x: Tensor, *_: Tensor) -> Tensor:
        x = norm(block.norm1, x + block.mixer(x))
        return norm(block.norm2, x + block.mlp(x))

    if prenorm:
        ours = lambda x, r, *_: torch.cat(block(x, r))  # noqa: E731
        same(ours, pre, [x, residual, *block.parameters()])
        torch.testing.assert_close(block(x)[1], pre(x, torch.zeros_like(x))[B:])
    else:
        same(lambda x, *_: block(x), post, [x, *block.parameters()])
        with pytest.raises(ValueError, match="residual must be None without prenorm"):
            block(x, residual)


def test_block_without_mlp_subsets_and_marks() -> None:
    block = made(Block, "layer", mlp_cls=nn.Identity, sequence_parallel=True, mark_shared_params=True)
    (x,) = tensors((B, S, E))
    y, h = block(x)
    torch.testing.assert_close(y, block.mixer(norm(block.norm1, x)))
    torch.testing.assert_close(h, x)
    assert not hasattr(block, "norm2") and block.norm1.weight._sequence_parallel and block.norm1.weight._shared_params
    crossed = Block(E, partial(MHA, num_heads=H, cross_attn=True))
    y, h = crossed(x.float(), mixer_subset=slice(0, 2))
    assert y.shape == h.shape == (B, 2, E)
    assert crossed.allocate_inference_cache(3, 5).shape == (3, 5, 2, H, D)
    wide = Block(E, partial(MHA, num_heads=H), residual_in_fp32=True).bfloat16()
    y, h = wide(x.bfloat16())
    assert y.dtype is torch.bfloat16 and h.dtype is torch.float32
    with pytest.raises(ValueError, match="residual_in_fp32 must be False without prenorm"):
        Block(E, prenorm=False, residual_in_fp32=True)
    with pytest.raises(ValueError, match="norm_cls must make LayerNorm or RMSNorm"):
        Block(E, partial(MHA, num_heads=H), norm_cls=lambda _: nn.Identity(), fused_dropout_add_ln=True)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_dropped_paths(fused: bool) -> None:
    x = torch.randn(64, 2, E, dtype=torch.float64)
    block = made(Block, "layer", drop_path1=0.5, fused_dropout_add_ln=fused)
    zero = torch.zeros(64, dtype=torch.bool)
    with torch.no_grad():
        # the sum before the mixer is 0 for a dropped sequence, twice the input for another
        dropped = block.train()._before(x, None, 1)[1]
    for i in range(64):
        zero[i] = not dropped[i].any()
        assert zero[i] or torch.allclose(dropped[i], 2 * x[i])
    assert 10 < zero.sum() < 54
    torch.testing.assert_close(block.eval()._before(x, None, 1)[1], x)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_parallel_block(tied: bool, fused: bool) -> None:
    block = made(ParallelBlock, "layer", tied_norm=tied, fused_dropout_add_ln=fused)
    x, other, residual = tensors(*[(B, S, E)] * 3)

    def plain(x: Tensor, other: Tensor, residual: Tensor, *_: Tensor) -> Tensor:
        h = x + other + residual
        second = block.norm1 if tied else block.norm2
        return torch.cat((block.mixer(norm(block.norm1, h)), block.mlp(norm(second, h)), h))

    ours = lambda x, other, r, *_: torch.cat(block(x, other, r))  # noqa: E731
    same(ours, plain, [x, other, residual, *block.parameters()])
    torch.testing.assert_close(block(x)[2], x)
