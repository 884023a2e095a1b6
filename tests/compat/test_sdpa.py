"""scaled_dot_product_attention against PyTorch's own."""

import pytest
import torch
from torch.nn import functional

from powertrain.compat.sdpa import scaled_dot_product_attention
from tests.compat.plain import same, tensors


# no batch, heads only, the usual, several batch dims; more queries than keys and the other way; values of another dim
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (2, 2, 1, 3)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", [(5, 7), (7, 5), (1, 4)], ids=str)
def test_leading_dims(lead: tuple[int, ...], is_causal: bool, sizes: tuple[int, int]) -> None:
    inputs = tensors((*lead, sizes[0], 8), (*lead, sizes[1], 8), (*lead, sizes[1], 5))
    same(
        lambda *x: scaled_dot_product_attention(*x, is_causal=is_causal, scale=0.3),
        lambda *x: functional.scaled_dot_product_attention(*x, is_causal=is_causal, scale=0.3),
        inputs,
    )


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 1, 5, 7), (3, 1, 7), (5, 7), (1, 7), (2, 3, 5, 1)], ids=str)
@pytest.mark.parametrize("kind", ["float", "bool"])
def test_masks(shape: tuple[int, ...], kind: str) -> None:
    inputs = tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    mask = torch.rand(shape) < 0.7 if kind == "bool" else torch.randn(shape, dtype=torch.float64, requires_grad=True)
    if kind == "bool":
        mask[..., -1] = True  # no query without a key: there, PyTorch's versions differ
    same(scaled_dot_product_attention, functional.scaled_dot_product_attention, [*inputs, mask])


@pytest.mark.parametrize("shape", [(2, 1, 2, 3, 5, 7), (2, 3, 5, 7), (2, 2, 1, 5, 7)], ids=str)
def test_masks_of_many_dims(shape: tuple[int, ...]) -> None:
    lead = (2, 2, 2, 3)
    (mask,) = tensors(shape)
    same(
        scaled_dot_product_attention, functional.scaled_dot_product_attention,
        [*tensors((*lead, 5, 8), (*lead, 7, 8), (*lead, 7, 8)), mask],
    )  # fmt: skip


def test_gqa_and_broadcast_batches() -> None:
    same(
        lambda *x: scaled_dot_product_attention(*x, enable_gqa=True),
        lambda *x: functional.scaled_dot_product_attention(*x, enable_gqa=True),
        tensors((2, 6, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    )
    same(
        scaled_dot_product_attention,
        functional.scaled_dot_product_attention,
        tensors((2, 3, 5, 8), (1, 3, 7, 8), (2, 1, 7, 8)),
    )


def test_strides_and_dtypes() -> None:
    q, k, v = (x.transpose(-1, -2) for x in tensors((2, 3, 8, 5), (2, 3, 8, 7), (2, 3, 8, 7)))
    same(scaled_dot_product_attention, functional.scaled_dot_product_attention, [q, k, v])
    q, k, v = tensors((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8), dtype=torch.bfloat16)
    assert scaled_dot_product_attention(q, k, v).dtype is torch.bfloat16


def test_a_query_without_a_key() -> None:
    q, k, v = tensors((1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 3, 4))
    out = scaled_dot_product_attention(q, k, v, torch.tensor([[True, False, True], [False] * 3]))
    assert not out[..., 1, :].any()
    out.sum().backward()
    assert k.grad is not None and k.grad.isfinite().all()


def test_dropout_is_applied() -> None:
    q, k = tensors((1, 1, 64, 8), (1, 1, 256, 8))
    ones = torch.ones(1, 1, 256, 1, dtype=torch.float64)
    out = scaled_dot_product_attention(q, k, ones, dropout_p=0.25)
    assert abs(out.mean().item() - 1) < 0.05 and out.std() > 0.01


def test_errors() -> None:
    q, k, v = tensors((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    with pytest.raises(ValueError, match="is_causal must be False where attn_mask is given, got True"):
        scaled_dot_product_attention(q, q, q, torch.ones(5, 5, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match=r"query, key and value must have leading dims that broadcast .*enable_gqa"):
        scaled_dot_product_attention(q, k, v)
    with pytest.raises(ValueError, match=r"attn_mask must broadcast to \[2, 4, 5, 5\], got \[3, 5\]"):
        scaled_dot_product_attention(q, q, q, torch.ones(3, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="query must have at least 2 dims"):
        scaled_dot_product_attention(q[0, 0, 0], k, v)
    with pytest.raises(ValueError, match="value must have key's 2 heads, got 4"):
        scaled_dot_product_attention(q, k, q, enable_gqa=True)
