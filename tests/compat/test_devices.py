"""Every drop-in in bfloat16 where the kernels run: a GPU, or Triton's interpreter, or plain PyTorch on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from powertrain.compat import flash_attn, huggingface, sdpa
from powertrain.compat.megatron import FusedScaleMaskSoftmax
from powertrain.compat.transformer_engine import DotProductAttention
from powertrain.compat.xformers.ops import fmha, memory_efficient_attention
from powertrain.testing.numerics import check
from tests.compat.plain import attend, band

S = 41  # ragged in every tile


def _tensors(device: torch.device, *shapes: tuple[int, ...]) -> dict[str, Tensor]:
    made = [torch.randn(*s, device=device, dtype=torch.bfloat16) for s in shapes]
    return {name: x.requires_grad_() for name, x in zip("qkv", made, strict=True)}


def _causal(device: torch.device, *, cut: int = 0) -> Tensor:
    """Causal from the top left; rows and keys before and after `cut` do not see each other."""
    seen = band(S, S, causal=True)
    seen[cut:, :cut] = False
    return seen.to(device)


def _judge(ours: Callable[..., Tensor], plain: Callable[..., Tensor], tensors: dict[str, Tensor]) -> None:
    check(ours, plain, plain, tensors)


def test_dense(device: torch.device) -> None:
    seen = _causal(device)
    tensors = _tensors(device, (2, S, 4, 32), (2, S, 2, 32), (2, S, 2, 16))
    plain = lambda q, k, v: attend(q, k, v, seen)[0]  # noqa: E731
    te = DotProductAttention(4, (32, 16), 2, qkv_format="bshd")
    layer = torch.nn.Module()
    for ours in (
        lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True),
        lambda q, k, v: memory_efficient_attention(q, k, v, fmha.LowerTriangularMask()),
        lambda q, k, v: te(q, k, v).unflatten(-1, (4, 16)),
        lambda q, k, v: huggingface.attention_forward(layer, *(x.transpose(1, 2) for x in (q, k, v)), None)[0],
        lambda q, k, v: sdpa.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
        ).transpose(1, 2),
    ):
        _judge(ours, plain, tensors)


def test_packed(device: torch.device) -> None:
    seen = _causal(device, cut=29)
    cu = torch.tensor([0, 29, S], dtype=torch.int32, device=device)
    tensors = _tensors(device, (S, 4, 32), (S, 2, 32), (S, 2, 16))
    bias = fmha.BlockDiagonalMask.from_seqlens([29, S - 29], device=device).make_causal()
    te = DotProductAttention(4, (32, 16), 2, qkv_format="thd", attn_mask_type="padding_causal")
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 29, "max_seqlen_kv": 29}
    for ours in (
        lambda q, k, v: flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 29, 29, causal=True),
        lambda q, k, v: memory_efficient_attention(q[None], k[None], v[None], bias)[0],
        lambda q, k, v: te(q, k, v, **lengths).unflatten(-1, (4, 16)),
    ):
        _judge(ours, lambda q, k, v: attend(q[None], k[None], v[None], seen)[0][0], tensors)


@pytest.mark.parametrize("expanded", ["heads", "groups"])
def test_groups(expanded: str, device: torch.device) -> None:
    sizes = (2, 1) if expanded == "heads" else (1, 3)
    seen = _causal(device)
    tensors = _tensors(device, (1, S, 2, 3, 32), (1, S, *sizes, 32), (1, S, *sizes, 16))
    full = lambda x: x.expand(1, S, 2, 3, x.shape[-1])  # noqa: E731
    for bias in (
        fmha.LowerTriangularMask(),
        fmha.BlockDiagonalMask.from_seqlens([S], device=device).make_causal(),
    ):
        _judge(
            lambda q, k, v, b=bias: memory_efficient_attention(q, full(k), full(v), b),
            lambda q, k, v: attend(*(x.flatten(2, 3) for x in (q, full(k), full(v))), seen)[0].unflatten(2, (2, 3)),
            tensors,
        )


def test_decoding(device: torch.device) -> None:
    tensors = {name: x.detach() for name, x in _tensors(device, (2, 1, 4, 32), (2, S, 2, 32), (2, S, 2, 16)).items()}
    lengths = torch.tensor([S, 33], dtype=torch.int32, device=device)
    seen = (torch.arange(S, device=device) < lengths[:, None])[:, None, None]
    bias = fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1, 1], S, [S, 33], device=device)
    for ours in (
        lambda q, k, v: flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True),
        lambda q, k, v: memory_efficient_attention(*(x.flatten(0, 1)[None] for x in (q, k, v)), bias)[0].unflatten(
            0, (2, 1)
        ),
    ):
        check(ours, *[lambda q, k, v: attend(q, k, v, seen)[0]] * 2, tensors, backward=False)


def test_softmax(device: torch.device) -> None:
    module = FusedScaleMaskSoftmax(False, True, "causal", True, None, True, 0.5)
    x = torch.randn(2, 2, S, S, device=device, dtype=torch.bfloat16, requires_grad=True)
    hidden = ~_causal(device)
    plain = lambda x: torch.softmax((x * 0.5).masked_fill(hidden, -torch.inf), -1)  # noqa: E731
    check(module, lambda input: plain(input), lambda input: plain(input), {"input": x})
