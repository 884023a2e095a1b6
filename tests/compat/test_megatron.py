"""FusedScaleMaskSoftmax of Megatron-LM and GPT-NeoX against what their documentation and paths in PyTorch compute."""

import enum
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.compat.megatron import FusedScaleMaskSoftmax, NeoXFusedScaleMaskSoftmax
from tests.compat.plain import band, same, tensors


class AttnMaskType(enum.Enum):
    padding = 1
    causal = 2


class SoftmaxFusionTypes(enum.Enum):
    upper_triang = 1
    general = 2
    none = 3


def _fill(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, -10000.0)


def _expected(x: Tensor, seen: Tensor, scale: float = 1.0, empty: float = 0.0) -> Tensor:
    z = (x * scale).masked_fill(~seen, -torch.inf)
    blind = (~seen.expand_as(x)).all(-1, keepdim=True)
    return torch.softmax(z.masked_fill(blind, 0.0), -1).masked_fill(blind, empty)


def _megatron(**options: Any) -> FusedScaleMaskSoftmax:
    settings = {
        "input_in_fp16": False, "input_in_bf16": False, "attn_mask_type": "padding",
        "scaled_masked_softmax_fusion": True, "mask_func": _fill, "softmax_in_fp32": True, "scale": 0.5,
    }  # fmt: skip
    return FusedScaleMaskSoftmax(**{**settings, **options})


# 17 keys: what their kernels refuse; rows of the first batch entry see nothing
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("kind", [AttnMaskType.padding, AttnMaskType.causal, "padding_causal"], ids=str)
def test_megatron(kind: Any, fused: bool) -> None:
    (x,) = tensors((2, 3, 17, 17))
    mask = torch.rand(2, 1, 17, 17) < 0.3
    mask[..., 0] = False
    if fused:
        mask[0, :, :3] = True
    seen = ~mask if kind is AttnMaskType.padding else ~mask & band(17, 17, causal=True)
    module = _megatron(attn_mask_type=kind, scaled_masked_softmax_fusion=fused)
    same(lambda x: module(x, mask), lambda x: _expected(x, seen, 0.5), [x])


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_no_mask_and_windows(fused: bool) -> None:
    (x,) = tensors((2, 3, 4, 6))
    module = _megatron(attn_mask_type="no_mask", scaled_masked_softmax_fusion=fused, scale=None)
    same(lambda x: module(x, None), lambda x: torch.softmax(x, -1), [x])
    for window in ((1, 0), (2, 1), (-1, 1)):
        module = _megatron(attn_mask_type="no_mask", scaled_masked_softmax_fusion=fused, window_size=window)
        seen = band(4, 6, left=window[0], right=window[1])
        same(lambda x, m=module: m(x), lambda x, s=seen: _expected(x, s, 0.5), [x])


@pytest.mark.parametrize("fusion", [*SoftmaxFusionTypes, "general"], ids=str)
def test_neox(fusion: Any) -> None:
    (x,) = tensors((2, 3, 5, 5))
    mask = torch.rand(2, 1, 5, 5) < 0.3
    mask[..., 0] = False
    if fusion in (SoftmaxFusionTypes.general, "general"):
        mask[0, :, 2] = True  # gives 1 / 5, as -10000 for every key does
    seen = ~mask & band(5, 5, causal=True) if fusion is SoftmaxFusionTypes.upper_triang else ~mask
    module = NeoXFusedScaleMaskSoftmax(False, False, fusion, _fill, True, 0.7)
    same(lambda x: module(x, mask), lambda x: _expected(x, seen, 0.7, empty=0.2), [x])


def test_fully_masked_without_fusion_is_uniform() -> None:
    (x,) = tensors((1, 1, 2, 4), grad=False)
    out = _megatron(scaled_masked_softmax_fusion=False)(x, torch.ones(1, 1, 2, 4, dtype=torch.bool))
    torch.testing.assert_close(out, torch.full_like(out, 0.25))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_dtypes(dtype: torch.dtype, fused: bool) -> None:
    (x,) = tensors((1, 2, 4, 4), dtype=dtype)
    module = _megatron(
        input_in_fp16=dtype is torch.float16, input_in_bf16=dtype is torch.bfloat16, attn_mask_type="causal",
        scaled_masked_softmax_fusion=fused,
    )  # fmt: skip
    expected = _expected(x.double(), band(4, 4, causal=True), 0.5)
    out = module(x)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    with pytest.raises(ValueError, match=r"input must be \w+, as the constructor says, got float32"):
        module(x.float())


def test_errors() -> None:
    (x,) = tensors((1, 2, 4, 4))
    with pytest.raises(ValueError, match="softmax_in_fp32 must be True where scores are scaled, got False"):
        _megatron(softmax_in_fp32=False)
    with pytest.raises(ValueError, match="input_in_fp16 must be False with input_in_bf16, got True"):
        _megatron(input_in_fp16=True, input_in_bf16=True)
    with pytest.raises(ValueError, match=r"attn_mask_type must be one of 'padding', .*, got 'band'"):
        _megatron(attn_mask_type="band")
    with pytest.raises(ValueError, match="fusion_type must be one of 'upper_triang', 'general', 'none', got 'all'"):
        NeoXFusedScaleMaskSoftmax(False, False, "all", _fill, True, None)
    with pytest.raises(NotImplementedError, match=r"softmax_offset = \[2\] is not supported; nearest: sinks="):
        _megatron()(x, softmax_offset=torch.zeros(2))
    with pytest.raises(ValueError, match="input must have 4 dims"):
        _megatron()(x[0])
    with pytest.raises(ValueError, match=r"mask_func must be given for a mask without fusion, got None"):
        _megatron(mask_func=None, scaled_masked_softmax_fusion=False, attn_mask_type="causal")(x)
