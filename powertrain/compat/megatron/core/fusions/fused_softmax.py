"""Megatron-LM's and GPT-NeoX's FusedScaleMaskSoftmax on `powertrain.scaled_softmax`.

    from powertrain.compat.megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax   # Megatron-LM
    from powertrain.compat.megatron import NeoXFusedScaleMaskSoftmax    # GPT-NeoX

No limit on shapes, so no silent change of path: fusion on is the kernel, fusion off is plain PyTorch with mask_func. In
the kernel a row whose keys are all masked out gives zeros (Megatron-LM, Apex) or 1 / keys (GPT-NeoX), as there; a mask
beside causal order counts too, where their kernel does not look at it; and everything is computed in float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.ops.conversion import unsupported
from powertrain.ops.softmax import FullyMasked, scaled_softmax
from powertrain.runtime import checks

__all__ = ["FusedScaleMaskSoftmax", "NeoXFusedScaleMaskSoftmax", "SoftmaxOne"]

MaskFunction = Callable[[Tensor, Tensor], Tensor]
_MASKS = ("padding", "causal", "no_mask", "padding_causal", "arbitrary", "causal_bottom_right")
_FUSIONS = ("upper_triang", "general", "none")


class SoftmaxOne(nn.Module):
    """exp(x) / (exp(offset) + sum of exp(x)) over the last dim of x [batch, heads, queries, keys], by PyTorch.

    denominator_offset: the score of a key without value, of each head [heads] or one for all; dim is None or -1.
    """

    def __init__(self, dim: int | None = None, denominator_offset: Tensor | float = 1.0) -> None:
        super().__init__()
        checks.one_of("SoftmaxOne", "dim", dim, (None, -1))
        self.dim, self.denominator_offset = dim, denominator_offset

    def forward(self, x: Tensor) -> Tensor:
        sink = torch.as_tensor(self.denominator_offset, dtype=x.dtype, device=x.device)
        if sink.dim() > 0:
            sink = sink.reshape(-1, 1, 1)
        total = torch.logaddexp(torch.logsumexp(x, -1, keepdim=True), sink)
        return (x - total).exp()


class FusedScaleMaskSoftmax(nn.Module):
    """Softmax of scaled and masked scores, with Megatron-LM's constructor.

    input [b, np, sq, sk], mask bool, broadcastable to it, True where masked out. attn_mask_type is Megatron's enum or
    its name: "causal", "padding_causal" and "causal_bottom_right" hide keys after the query too (aligned bottom right,
    for sq == sk the same). window_size (left, right) hides keys outside of it. input_in_fp16 and input_in_bf16 say
    which dtype the input has; the result has it too.
    """

    op = "FusedScaleMaskSoftmax"
    # Megatron's kernel writes zeros for a fully masked row, GPT-NeoX's leaves a uniform one
    fully_masked: FullyMasked = "zero"

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: Any,
        scaled_masked_softmax_fusion: bool,
        mask_func: MaskFunction | None,
        softmax_in_fp32: bool,
        scale: float | None,
        window_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        # the enum or its name: Megatron is not imported
        name = getattr(attn_mask_type, "name", attn_mask_type)
        checks.one_of(self.op, "attn_mask_type", name, _MASKS)
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        self.is_causal = "causal" in name
        self._set(input_in_fp16, input_in_bf16, scaled_masked_softmax_fusion, mask_func, softmax_in_fp32, scale)

    def _set(
        self,
        in_fp16: bool,
        in_bf16: bool,
        fused: bool,
        mask_func: MaskFunction | None,
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        checks.require(not (in_fp16 and in_bf16), self.op, "input_in_fp16", "be False with input_in_bf16", True)
        # as Megatron asserts: a scale is applied in float32 only
        if scale is not None and not softmax_in_fp32:
            checks.fail(self.op, "softmax_in_fp32", "be True where scores are scaled", softmax_in_fp32)
        self.input_in_fp16, self.input_in_bf16 = in_fp16, in_bf16
        self.dtype = torch.float16 if in_fp16 else torch.bfloat16 if in_bf16 else None
        self.fused, self.mask_func = fused, mask_func
        self.softmax_in_fp32, self.scale = softmax_in_fp32, scale

    def forward(self, input: Tensor, mask: Tensor | None = None, softmax_offset: Tensor | None = None) -> Tensor:
        """Probabilities, in the input's shape and dtype."""
        checks.require(input.dim() == 4, self.op, "input", "have 4 dims", list(input.shape))
        if self.dtype is not None and input.dtype is not self.dtype:
            checks.fail(
                self.op, "input", f"be {checks.name(self.dtype)}, as the constructor says", checks.name(input.dtype)
            )
        if softmax_offset is not None:
            nearest = "sinks= of powertrain.ops.attention.attention, without scores in memory"
            unsupported(self.op, "softmax_offset", list(softmax_offset.shape), nearest)
        # a window becomes part of the mask, which the kernel reads
        mask = self._with_window(input, mask)
        if self.fused:
            return scaled_softmax(
                input, scale=1.0 if self.scale is None else self.scale, mask=mask,
                is_causal=bool(self.is_causal), fully_masked=self.fully_masked,
            )  # fmt: skip
        return self._plain(input, mask)

    def _with_window(self, input: Tensor, mask: Tensor | None) -> Tensor | None:
        if self.window_size is None:
            return mask
        left, right = self.window_size
        # aligned bottom right
        ahead = _ahead(input)
        outside = torch.zeros_like(ahead, dtype=torch.bool)
        outside = outside | (ahead < -left) if left >= 0 else outside
        outside = outside | (ahead > right) if right >= 0 else outside
        return outside if mask is None else outside | mask

    def _plain(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """As their path in PyTorch: mask_func sees the scaled scores."""
        # Megatron upcasts only if asked
        x = input.float() if self.softmax_in_fp32 and input.dtype in (torch.float16, torch.bfloat16) else input
        x = x if self.scale is None else x * self.scale
        if self.is_causal:
            above = _ahead(input) > 0
            mask = above if mask is None else mask | above
        if mask is not None:
            x = self._mask(x, mask)
        return torch.softmax(x, -1).to(input.dtype)

    def _mask(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.mask_func is None:
            # without fusion the masking function decides the fill value (-10000 in Megatron)
            checks.fail(self.op, "mask_func", "be given for a mask without fusion", None)
        return self.mask_func(x, mask)


class NeoXFusedScaleMaskSoftmax(FusedScaleMaskSoftmax):
    """The same with GPT-NeoX's constructor: fusion_type is its enum, or "upper_triang", "general" or "none"."""

    op = "NeoXFusedScaleMaskSoftmax"
    fully_masked: FullyMasked = "uniform"

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        fusion_type: Any,
        mask_func: MaskFunction | None,
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        # the constructor differs, so the parent's is skipped
        nn.Module.__init__(self)
        name = getattr(fusion_type, "name", fusion_type)
        checks.one_of(self.op, "fusion_type", name, _FUSIONS)
        self.fusion_type, self.window_size = fusion_type, None
        self.is_causal = name == "upper_triang"
        self._set(input_in_fp16, input_in_bf16, name != "none", mask_func, softmax_in_fp32, scale)


def _ahead(x: Tensor) -> Tensor:
    """[sq, sk]: how far each key is after the query, the last of both at one position."""
    sq, sk = x.shape[-2:]
    # positions count from the last key, so decoding with a cache is right
    query = torch.arange(sq, device=x.device)[:, None] + sk - sq
    return torch.arange(sk, device=x.device) - query


__getattr__ = unknown(__name__)
