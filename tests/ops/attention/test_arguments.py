"""Arguments of attention and varlen_attention: an error names the one, what it must be and what it was."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from powertrain.ops.attention import attention, attention_backward, decode_attention, varlen_attention
from powertrain.ops.attention.arguments import MaskArguments, lower_mask
from powertrain.ops.attention.problem import Sizes
from powertrain.runtime.settings import settings

B, S, H, K, D = 2, 8, 4, 2, 16  # batch, sequence, heads, key heads, head dim
INT = torch.int32


def _dense(**changed: Any) -> dict[str, Any]:
    sizes = {"query": (B, S, H, D), "key": (B, S, K, D), "value": (B, S, K, D)}
    return {name: torch.randn(size) for name, size in sizes.items()} | changed


def _packed(**changed: Any) -> dict[str, Any]:
    sizes = {"query": (S, H, D), "key": (S, K, D), "value": (S, K, D)}
    starts = torch.tensor([0, 3, 8], dtype=INT)
    return {name: torch.randn(size) for name, size in sizes.items()} | {"cu_seqlens_q": starts} | changed


def _meta(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


DENSE: list[tuple[dict[str, Any], str, str, str]] = [
    # changed arguments, the argument, what it must be, what it was
    ({"query": None}, "query", "be a tensor", "None"),
    ({"query": torch.randn(B, S, D)}, "query", "have 4 dims (bshd)", "[2, 8, 16]"),
    ({"query": torch.ones(B, S, H, D, dtype=INT)}, "query", "be float16, bfloat16, float32 or float64", "int32"),
    ({"key": torch.randn(B, S, K, D).bfloat16()}, "key", "have query's dtype float32", "bfloat16"),
    ({"key": _meta(B, S, K, D)}, "key", "be on query's device cpu", "meta"),
    ({"key": torch.randn(3, S, K, D), "value": torch.randn(3, S, K, D)}, "key", "have query's batch of 2", "3"),
    ({"key": torch.randn(B, S, 3, D), "value": torch.randn(B, S, 3, D)}, "query", "a multiple of key's 3 heads", "4"),
    ({"key": torch.randn(B, S, K, 8)}, "key", "have shape [2, 8, 2, 16] (head dim of query)", "[2, 8, 2, 8]"),
    ({"value": torch.randn(B, 7, K, D)}, "value", "have shape [2, 8, 2, 16] (as key", "[2, 7, 2, 16]"),
    ({"query": torch.randn(B, S, H, 513)}, "query", "have a head dim of 1 to 512", "513"),
    ({"query": torch.randn(B, S, D, H).transpose(2, 3)}, "query", "have a last dim of stride 1", "stride 4"),
    ({"query": torch.randn(B, S, H, D).to_sparse()}, "query", "be a dense tensor", "a tensor of layout sparse_coo"),
    ({"layout": "bsdh"}, "layout", "be one of 'bshd', 'bhsd', 'sbhd', 'bmghk'", "'bsdh'"),
    ({"layout": "thd"}, "layout", "be one of", "'thd' (use varlen_attention)"),
    ({"layout": "bmghk"}, "query", "have 5 dims (bmghk)", "[2, 8, 4, 16]"),
    ({"backend": "flashy"}, "backend", "be one of triton, hopper, cudnn", "'flashy'"),
    ({"backend": []}, "backend", "be a name, a list of names or None", "[]"),
    ({"attn_bias": torch.randn(B, 3, S, S)}, "attn_bias", "broadcast to [2, 4, 8, 8]", "[2, 3, 8, 8]"),
    ({"attn_bias": torch.randn(S)}, "attn_bias", "have 2 to 4 dims", "[8]"),
    ({"attn_bias": torch.ones(S, S, dtype=INT)}, "attn_bias", "be bool or floating point", "int32"),
    ({"attn_bias": _meta(S, S)}, "attn_bias", "be on query's device cpu", "meta"),
    ({"attn_bias": "causal"}, "attn_bias", "be a tensor", "'causal'"),
    ({"causal_align": "right"}, "causal_align", "be one of 'top_left', 'bottom_right'", "'right'"),
    ({"window_size": (-2, 0)}, "window_size", "be two integers of at least -1", "(-2, 0)"),
    ({"window_size": 5}, "window_size", "be two integers of at least -1", "5"),
    ({"chunk_size": -1}, "chunk_size", "be an integer of at least 0", "-1"),
    ({"softcap": -1.0}, "softcap", "be a finite number of at least 0", "-1.0"),
    ({"softcap": float("nan")}, "softcap", "be finite", "nan"),
    ({"scale": torch.tensor(0.1)}, "scale", "be a finite number, known to the host", "tensor(0.1000)"),
    ({"scale": float("nan")}, "scale", "be finite", "nan"),
    ({"dropout_p": 1.0}, "dropout_p", "be a number in [0, 1)", "1.0"),
    ({"dropout_p": 0.1, "dropout_seed": 3}, "dropout_seed", "be a tensor of shape [2] (seed and operation)", "3"),
    ({"dropout_p": 0.1, "dropout_seed": torch.ones(2, dtype=INT)}, "dropout_seed", "be int64", "int32"),
    ({"prefix_lengths": torch.ones(3, dtype=INT)}, "prefix_lengths", "have shape [2] (batch)", "[3]"),
    ({"prefix_lengths": torch.ones(B)}, "prefix_lengths", "be int32 or int64", "float32"),
    ({"document_ids": torch.ones(S, dtype=INT)}, "document_ids", "have shape [2, 8] (batch, queries)", "[8]"),
    ({"document_ids": (torch.ones(B, S, dtype=INT),)}, "document_ids", "be a tensor or a pair", "1 of them"),
    ({"alibi_slopes": torch.ones(3)}, "alibi_slopes", "have shape [4] (heads, or batch and heads)", "[3]"),
    ({"alibi_slopes": torch.ones(H, dtype=INT)}, "alibi_slopes", "be floating point", "int32"),
    ({"alibi_slopes": torch.ones(H).requires_grad_()}, "alibi_slopes", "not require a gradient", "one that does"),
    ({"sinks": torch.ones(3)}, "sinks", "have shape [4] (heads)", "[3]"),
    ({"sinks": _meta(H)}, "sinks", "be on query's device cpu", "meta"),
    ({"seqused_k": [8, 8]}, "seqused_k", "be a tensor of shape [2] (batch)", "[8, 8]"),
    ({"seqused_k": _meta(B, dtype=INT)}, "seqused_k", "be on query's device cpu", "meta"),
    ({"seqused_q": torch.ones(B)}, "seqused_q", "be int32 or int64", "float32"),
]

PACKED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"query": torch.randn(1, S, H, D)}, "query", "have 3 dims (thd)", "[1, 8, 4, 16]"),
    ({"cu_seqlens_q": [0, 3, 8]}, "cu_seqlens_q", "be a tensor", "[0, 3, 8]"),
    ({"cu_seqlens_q": torch.ones(2, 3, dtype=INT)}, "cu_seqlens_q", "have shape [batch + 1]", "[2, 3]"),
    ({"cu_seqlens_q": torch.tensor([0.0, 8.0])}, "cu_seqlens_q", "be int32 or int64", "float32"),
    ({"cu_seqlens_q": _meta(3, dtype=INT)}, "cu_seqlens_q", "be on query's device cpu", "meta"),
    ({"cu_seqlens_k": torch.ones(4, dtype=INT)}, "cu_seqlens_k", "have shape [3] (as cu_seqlens_q)", "[4]"),
    ({"cu_seqlens_q_padded": torch.ones(4, dtype=INT)}, "cu_seqlens_q_padded", "have shape [3]", "[4]"),
    ({"seqused_k": torch.ones(3, dtype=INT)}, "seqused_k", "have shape [2] (batch)", "[3]"),
    ({"max_seqlen_q": torch.tensor(5)}, "max_seqlen_q", "be an integer of at least 0, known to the host", "tensor(5)"),
    ({"max_seqlen_k": -1}, "max_seqlen_k", "be an integer of at least 0", "-1"),
]


def _id(case: tuple[dict[str, Any], str, str, str]) -> str:
    return f"{case[1]}-{case[3]}"


def _fails(function: Callable[..., Any], arguments: dict[str, Any], argument: str, must: str, got: str) -> None:
    with pytest.raises(ValueError) as raised:
        function(**arguments)
    message = str(raised.value)
    assert message.startswith(f"{function.__name__}: {argument} must "), message
    assert argument in message and must in message and message.endswith(f"got {got}"), message


@pytest.mark.parametrize("case", DENSE, ids=_id)
def test_errors(case: tuple[dict[str, Any], str, str, str]) -> None:
    changed, *expected = case
    _fails(attention, _dense(**changed), *expected)


@pytest.mark.parametrize("backend", [None, "chunked", "reference"])
def test_slopes_beside_float64_are_not_rounded(backend: str | None) -> None:
    """Rounded to float32 one times a distance of thousands was off by 1e-4."""
    zeros, slopes = torch.zeros(1, 4096, 1, 8, dtype=torch.float64), torch.full((1,), 0.1, dtype=torch.float64)
    _, lse = attention(zeros[:, :1], zeros, zeros, alibi_slopes=slopes, return_lse=True, backend=backend)
    bias = -0.1 * torch.arange(4096, dtype=torch.float64).flip(0)
    assert abs(float(lse) - float(bias.logsumexp(0))) < 1e-12


def test_a_window_wider_than_int32_counts_is_every_key() -> None:
    q = torch.randn(1, 9, 1, 8)
    wide = attention(q, q, q, window_size=(2**40, 2**31 - 1), backend="reference")
    assert torch.equal(wide, attention(q, q, q, backend="reference"))
    mask, _ = lower_mask("attention", Sizes(1, 9, 9, 1, 1), MaskArguments(window_size=(2**40, -1)), torch.float32)
    assert (mask.left, mask.right) == (2**30, -1)


@pytest.mark.parametrize("case", PACKED, ids=_id)
def test_errors_of_packed_sequences(case: tuple[dict[str, Any], str, str, str]) -> None:
    changed, *expected = case
    _fails(varlen_attention, _packed(**changed), *expected)


# plain PyTorch reads them: slices of Python would take any numbers, kernels read other memory
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_lengths_are_checked_where_the_host_reads_them(backend: str) -> None:
    for name, lengths in itertools.product(("seqused_q", "seqused_k"), ([S + 1, 2], [-1, 2])):
        with pytest.raises(ValueError, match=rf"attention: {name} must be from 0 to {S}, got {lengths[0]}$"):
            attention(**_dense(**{name: torch.tensor(lengths)}), backend=backend)
    good = torch.tensor([0, 3, S])
    for wrong in ([0, 3, S + 1], [-1, 3, S], [0, 5, 3]):
        for side, cu_seqlens in (("q", (wrong, good)), ("k", (good, wrong))):
            starts = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), map(torch.as_tensor, cu_seqlens), strict=True))
            with pytest.raises(ValueError, match=f"varlen_attention: cu_seqlens_{side} must place every sequence in"):
                varlen_attention(**_packed(**starts), backend=backend)
    with pytest.raises(ValueError, match=r"cu_seqlens_k must place .* seqused_k, if given"):
        varlen_attention(**_packed(cu_seqlens_k=good, seqused_k=torch.tensor([3, S])), backend=backend)
    padded = torch.tensor([0, 2, S])
    with pytest.raises(ValueError, match="cu_seqlens_q must have each sequence begin behind the one before it"):
        varlen_attention(**_packed(cu_seqlens_q=good, cu_seqlens_q_padded=padded), backend=backend)


def _strided(x: Tensor) -> Tensor:
    """The same values, every second element of memory."""
    return torch.stack([x, torch.full_like(x, 99)], -1).flatten(-2)[..., ::2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_small_tensors_may_have_strides(dtype: torch.dtype) -> None:
    """Kernels read them without: an ALiBi slope may be expanded, cu_seqlens a column of a table, of either dtype."""
    starts, lengths = torch.tensor([0, 3, 8], dtype=dtype), torch.tensor([5, 8], dtype=dtype)
    packed: dict[str, Any] = {
        "alibi_slopes": torch.rand(1, 1).expand(B, H),
        "sinks": torch.randn(H),
        "seqused_k": starts.diff() - 1,
    }
    dense: dict[str, Any] = {
        "seqused_k": lengths,
        "prefix_lengths": lengths - 4,
        "document_ids": torch.arange(B * S).view(B, S) // 5,
    }
    for function, arguments in (
        (varlen_attention, _packed(cu_seqlens_q=starts, **packed)),
        (attention, _dense(**dense)),
    ):
        strided: dict[str, Any] = {
            n: x if n in ("query", "key", "value") else _strided(x) for n, x in arguments.items()
        }
        reference = function(**arguments, backend="reference")
        torch.testing.assert_close(function(**strided), reference)


@pytest.mark.skipif(settings().interpret, reason="as on a GPU, values are not read")
@pytest.mark.parametrize("name", ["seqused_k", "prefix_lengths", "document_ids", "cu_seqlens_q", "cache_seqlens"])
def test_numbers_beyond_int32_are_refused(name: str) -> None:
    """They were taken modulo 2^32: 2^32 + 3 keys as 3."""
    x, wrong = torch.randn(1, 8, 2, 16), torch.tensor([2**32 + 3])
    with pytest.raises(ValueError, match=rf"{name} must be in \[-2147483648, 2147483648\), got {2**32 + 3}"):
        if name == "cu_seqlens_q":
            varlen_attention(x[0], x[0], x[0], torch.tensor([0, 2**32 + 3]))
        elif name == "cache_seqlens":
            decode_attention(x[:, :1], x, x, wrong)
        else:
            attention(x, x, x, **{name: wrong.expand(1, 8) if name == "document_ids" else wrong})  # type: ignore[misc]


def test_int64_numbers_are_not_read_in_a_trace() -> None:
    x, starts = torch.randn(6, 2, 8), torch.tensor([0, 2, 6])
    traced = make_fx(lambda x, starts: varlen_attention(x, x, x, starts), tracing_mode="real")(x, starts)
    torch.testing.assert_close(traced(x, starts), varlen_attention(x, x, x, starts))


def test_scales_may_be_numbers_of_numpy() -> None:
    q = torch.randn(1, 4, 2, 8)
    assert torch.equal(attention(q, q, q, scale=np.float32(0.25)), attention(q, q, q, scale=0.25))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_scales_of_0_or_less(scale: float, is_causal: bool, device: torch.device) -> None:
    q, k, v = (torch.randn(2, 37, 4, 32, device=device, requires_grad=True) for _ in range(3))
    grad = torch.randn_like(v)
    options: dict[str, Any] = {"scale": scale, "is_causal": is_causal, "return_lse": True}
    out, lse = attention(q, k, v, **options)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = attention(*exact, **options, backend="reference")
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-4, atol=1e-4)
    expected_grads = torch.autograd.grad(expected, exact, grad.double())
    of_part = attention_backward(grad, q, k, v, out, lse, scale=scale, is_causal=is_causal)
    for grads in (torch.autograd.grad(out, (q, k, v), grad), of_part):
        torch.testing.assert_close([x.double() for x in grads], [*expected_grads], rtol=1e-4, atol=1e-4)
