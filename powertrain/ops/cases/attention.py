"""Calls that stand for attention and varlen_attention."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.attention import attention, varlen_attention
from powertrain.ops.attention.backends.reference import attention_ref
from powertrain.ops.attention.mask import MaskSpec, MaskTensors
from powertrain.ops.cases import Case, randn

CAUSAL = MaskSpec(right=0, bottom_right=True)
WINDOW, SOFTCAP = 3, 2.0


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    B, S, H, K, D = shape
    heads = {"query": H, "key": K, "value": K}
    return {name: randn(B, S, n, D, dtype=dtype, device=device) for name, n in heads.items()}


def _inputs_packed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    """Four sequences, one of them empty, and a row behind the last."""
    T, H, K, Dqk, Dv = shape
    starts = torch.tensor([0, T // 4, T // 4, T * 5 // 8, T - 1], dtype=torch.int32, device=device)
    sizes = {"query": (H, Dqk), "key": (K, Dqk), "value": (K, Dv)}
    tensors: dict[str, Tensor | None] = {
        name: randn(T, *size, dtype=dtype, device=device) for name, size in sizes.items()
    }
    return tensors | {"cu_seqlens": starts}


def _inputs_sinks(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    return {**_inputs(shape, dtype, device), "sinks": randn(shape[2], dtype=dtype, device=device)}


def _inputs_bias(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    """One bias for all batches, with a gradient."""
    B, H, S, D = shape
    tensors: dict[str, Tensor | None] = {
        name: randn(B, H, S, D, dtype=dtype, device=device) for name in ("query", "key", "value")
    }
    return tensors | {"attn_bias": randn(H, S, S, dtype=dtype, device=device)}


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return attention(query, key, value, is_causal=True)


def _causal_ref(upcast: bool) -> Any:
    return lambda query, key, value: attention_ref(query, key, value, mask=CAUSAL, upcast=upcast)[0]


def _window(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Any:
    return attention(
        query, key, value, is_causal=True, window_size=(WINDOW, 0), softcap=SOFTCAP, sinks=sinks, return_lse=True
    )


def _window_ref(upcast: bool) -> Any:
    mask = MaskSpec(left=WINDOW, right=0, bottom_right=True, softcap=SOFTCAP, sinks=True)
    return lambda query, key, value, sinks: attention_ref(
        query, key, value, mask=mask, tensors=MaskTensors(sinks=sinks), upcast=upcast
    )


def _bias(query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor) -> Any:
    return attention(query, key, value, attn_bias=attn_bias, layout="bhsd")


def _bias_ref(upcast: bool) -> Any:
    def reference(query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        tensors = MaskTensors(bias=attn_bias[None])
        return attention_ref(q, k, v, mask=MaskSpec(bias="float"), tensors=tensors, upcast=upcast)[0].transpose(1, 2)

    return reference


def _packed(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Any:
    return varlen_attention(query, key, value, cu_seqlens, is_causal=True)


def _packed_ref(upcast: bool) -> Any:
    def reference(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Sequence by sequence."""
        starts = cu_seqlens.tolist()
        spans = [slice(*pair) for pair in pairwise(starts)]
        of_spans = [[x[None, span] for x in (query, key, value)] for span in spans]
        outs = [attention_ref(*tensors, mask=CAUSAL, upcast=upcast)[0][0] for tensors in of_spans]
        behind = query.new_zeros(query.shape[0] - starts[-1], query.shape[1], value.shape[-1])
        return torch.cat([*outs, behind])

    return reference


# scores are computed again from the LSE, in base 2: a few roundings of float32 more than PyTorch's softmax has
SLACK = 12
CASES = [
    Case(
        "attention", "", _causal, _causal_ref(True), _causal_ref(False),
        _inputs, (2, 5, 1, 1, 20), (4, 4096, 16, 16, 128), SLACK,
    ),
    Case(
        "attention", "window-softcap-sinks", _window, _window_ref(True), _window_ref(False),
        _inputs_sinks, (1, 7, 2, 1, 16), (4, 4096, 64, 8, 64), SLACK,
    ),
    Case(
        "attention", "bias", _bias, _bias_ref(True), _bias_ref(False),
        _inputs_bias, (2, 1, 6, 8), (4, 16, 2048, 64), SLACK,
    ),
    Case(
        "varlen_attention", "gqa", _packed, _packed_ref(True), _packed_ref(False),
        _inputs_packed, (9, 2, 1, 24, 16), (16384, 64, 8, 192, 128), SLACK,
    ),
]  # fmt: skip
