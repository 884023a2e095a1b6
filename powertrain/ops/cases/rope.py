"""Calls that stand for rope and rope_qkv."""

from typing import Any

import torch
from torch import Tensor

from powertrain.ops.cases import Case, randn
from powertrain.ops.rope import rope, rope_qkv, rope_ref
from powertrain.ops.rope_table import RopeTable, rope_table


def _table(rotary_dim: int, max_seqlen: int, device: torch.device) -> dict[str, Tensor | None]:
    table = rope_table(rotary_dim, max_seqlen, device=device)
    return {"cos": table.cos, "sin": table.sin}


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    B, S, H, K, D = shape
    q, k = (randn(B, S, heads, D, dtype=dtype, device=device) for heads in (H, K))
    return {"q": q, "k": k, **_table(D, S, device)}


def _inputs_partial(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    S, D = shape[1], shape[4]
    return {**_inputs(shape, dtype, device), **_table(D // 4 * 2, S, device)}


def _inputs_thd(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    B, S, H, K, D = shape
    q, k = (randn(B * S, heads, D, dtype=dtype, device=device) for heads in (H, K))
    cu_seqlens = torch.tensor([0, S // 2, S // 2, B * S - 1], dtype=torch.int32, device=device)
    return {"q": q, "k": k, **_table(D, B * S, device), "cu_seqlens": cu_seqlens}


def _inputs_qkv(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    B, S, H, K, D = shape
    return {"qkv": randn(B, S, H + 2 * K, D, dtype=dtype, device=device), **_table(D, S, device)}


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    return rope(q, k, table=RopeTable(cos, sin), **options)


def _reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    return rope_ref(q, k, table=RopeTable(cos, sin), **options)


def _plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    """As models write it: cos and sin in the dtype of q."""
    return rope_ref(q, k, table=RopeTable(cos.to(q.dtype), sin.to(q.dtype)), **options)


def _thd(function: Any) -> Any:
    return lambda **tensors: function(**tensors, layout="thd")


def _interleaved(function: Any) -> Any:
    return lambda **tensors: function(**tensors, interleaved=True)


def _rope_qkv(qkv: Tensor, cos: Tensor, sin: Tensor) -> Any:
    # two heads of q for each of k
    num_kv_heads = qkv.shape[2] // 4
    return rope_qkv(
        qkv, table=RopeTable(cos, sin), num_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads, packing="grouped"
    )


def _reference_qkv(qkv: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k, v = qkv.unflatten(2, (-1, 4)).split((2, 1, 1), -2)
    return (*_reference(q.flatten(2, 3), k.squeeze(3), cos, sin), v.squeeze(3))


TINY, FULL = (2, 5, 3, 1, 12), (4, 4096, 32, 8, 128)
TINY_QKV, FULL_QKV = (2, 5, 4, 2, 8), (4, 4096, 16, 8, 128)
PARTIAL = (_interleaved(_rope), _interleaved(_reference), _interleaved(_plain), _inputs_partial)
CASES = [
    Case("rope", "", _rope, _reference, _plain, _inputs, TINY, FULL),
    Case("rope", "partial-interleaved", *PARTIAL, TINY, FULL),
    Case("rope", "thd", _thd(_rope), _thd(_reference), _thd(_plain), _inputs_thd, TINY, FULL),
    Case("rope_qkv", "grouped", _rope_qkv, _reference_qkv, _reference_qkv, _inputs_qkv, TINY_QKV, FULL_QKV),
]
