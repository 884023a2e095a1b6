"""flash-attn's functions against plain PyTorch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from powertrain.compat import flash_attn as fa
from powertrain.compat import flash_attn_interface as fa3
from powertrain.compat.flash_attn import flash_attn_interface as fa_interface
from tests.compat.plain import attend, band, same, tensors

CU_Q, CU_K = torch.tensor([0, 3, 3, 8]), torch.tensor([0, 4, 6, 9])  # a sequence without queries, one with fewer keys


def _alibi(slopes: Tensor, queries: int, keys: int) -> Tensor:
    position = torch.arange(queries, dtype=torch.float64)[:, None] + keys - queries
    slopes = slopes.double()[:, None, None] if slopes.dim() == 1 else slopes.double()[:, :, None, None]
    return -slopes * (position - torch.arange(keys, dtype=torch.float64)).abs()


def _expected(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """What flash-attn documents for these options."""
    left, right = options.get("window_size", (-1, -1))
    sq, sk = q.shape[1], k.shape[1]
    bias: Tensor = torch.zeros(sq, sk, dtype=q.dtype).masked_fill(
        ~band(sq, sk, causal=options.get("causal", False), left=left, right=right), -torch.inf
    )
    if options.get("alibi_slopes") is not None:
        bias = bias + _alibi(options["alibi_slopes"], sq, sk)
    return attend(q, k, v, bias, options.get("softmax_scale"), options.get("softcap", 0.0))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "softmax_scale": 0.4},
    {"window_size": (2, 1)},
    {"causal": True, "window_size": (3, -1), "softcap": 1.5},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.3]), "causal": True},
    {"alibi_slopes": torch.rand(2, 4)},
    {"deterministic": True},
]


# fewer queries than keys, and more: rows of nothing but masked keys
@pytest.mark.parametrize("sizes", [(5, 7), (7, 4)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_func(options: dict[str, Any], sizes: tuple[int, int]) -> None:
    inputs = tensors((2, sizes[0], 4, 8), (2, sizes[1], 2, 8), (2, sizes[1], 2, 6))
    same(lambda *x: fa.flash_attn_func(*x, **options), lambda *x: _expected(*x, **options)[0], inputs)
    out, lse, s_dmask = fa.flash_attn_func(*inputs, **options, return_attn_probs=True)
    expected = _expected(*inputs, **options)
    torch.testing.assert_close((out, lse.double()), expected, rtol=1e-6, atol=1e-6)
    assert s_dmask is None and lse.shape == (2, 4, sizes[0])


def _varlen_expected(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    parts = []
    for n in range(3):
        one = {**options}
        if options.get("alibi_slopes") is not None and options["alibi_slopes"].dim() == 2:
            one["alibi_slopes"] = options["alibi_slopes"][n]
        rows, cols = slice(*CU_Q[n : n + 2].tolist()), slice(*CU_K[n : n + 2].tolist())
        parts.append(_expected(q[None, rows], k[None, cols], v[None, cols], **one))
    return torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], -1)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_varlen_func(options: dict[str, Any]) -> None:
    if "alibi_slopes" in options and options["alibi_slopes"].dim() == 2:
        options = {"alibi_slopes": torch.rand(3, 4)}
    inputs = tensors((8, 4, 8), (9, 2, 8), (9, 2, 6))
    lengths = (CU_Q.int(), CU_K.int(), 5, 4)
    same(
        lambda *x: fa.flash_attn_varlen_func(*x, *lengths, **options),
        lambda *x: _varlen_expected(*x, **options)[0],
        inputs,
    )
    out, lse, _ = fa.flash_attn_varlen_func(*inputs, *lengths, **options, return_attn_probs=True)
    torch.testing.assert_close((out, lse.double()), _varlen_expected(*inputs, **options), rtol=1e-6, atol=1e-6)


def test_packed_forms() -> None:
    (qkv,) = tensors((2, 5, 3, 2, 8))
    same(
        lambda x: fa.flash_attn_qkvpacked_func(x, causal=True),
        lambda x: _expected(*x.unbind(2), causal=True)[0],
        [qkv],
    )
    q, kv = tensors((2, 5, 4, 8), (2, 7, 2, 2, 8))
    same(
        lambda q, kv: fa.flash_attn_kvpacked_func(q, kv, window_size=(1, 2)),
        lambda q, kv: _expected(q, *kv.unbind(2), window_size=(1, 2))[0],
        [q, kv],
    )
    q, kv = tensors((8, 4, 8), (9, 2, 2, 8))
    same(
        lambda q, kv: fa.flash_attn_varlen_kvpacked_func(q, kv, CU_Q.int(), CU_K.int(), 5, 4, causal=True),
        lambda q, kv: _varlen_expected(q, *kv.unbind(1), causal=True)[0],
        [q, kv],
    )
    (qkv,) = tensors((8, 3, 2, 8))
    cu = torch.tensor([0, 3, 8]).int()
    same(
        lambda x: fa.flash_attn_varlen_qkvpacked_func(x, cu, 5, softcap=2.0),
        lambda x: torch.cat(
            [_expected(*x[None, rows].unbind(2), softcap=2.0)[0][0] for rows in (slice(0, 3), slice(3, 8))]
        ),
        [qkv],
    )


def test_dropout_keeps_the_mean() -> None:
    q, k = tensors((1, 64, 2, 8), (1, 256, 2, 8))
    out = fa.flash_attn_func(q, k, torch.ones(1, 256, 2, 1, dtype=torch.float64), dropout_p=0.25)
    assert abs(out.mean().item() - 1) < 0.05 and out.std() > 0.01


@pytest.mark.parametrize("page_size", [1, 3])
def test_varlen_over_pages(page_size: int) -> None:
    lengths, pages = [4, 2, 3], 12
    table = torch.randperm(pages).reshape(3, 4).int()
    table[1, 2:] = -1  # pages that nobody owns
    k, v = tensors((pages, page_size, 2, 8), (pages, page_size, 2, 8))

    def rows(cache: Tensor) -> Tensor:
        parts = [cache[table[n].clamp(min=0).long()].flatten(0, 1)[: min(lengths[n], 4)] for n in range(3)]
        return torch.cat(parts)

    (q,) = tensors((8, 4, 8))
    same(
        lambda q, k, v: fa.flash_attn_varlen_func(
            q, k, v, CU_Q.int(), CU_K.int(), 5, 4, causal=True, block_table=table
        ),
        lambda q, k, v: _varlen_expected(q, rows(k), rows(v), causal=True)[0],
        [q, k, v],
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, first: int, step: int, interleaved: bool) -> Tensor:
    """x [s, h, d] turned by the angles of positions first, first + step, ..."""
    at = first + step * torch.arange(x.shape[0])
    c, s = cos[at][:, None], sin[at][:, None]
    r = cos.shape[1] * 2
    pairs = x[..., :r].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    a, b = pairs.unbind(-1 if interleaved else -2)
    turned = torch.stack([a * c - b * s, a * s + b * c], -1 if interleaved else -2).flatten(-2)
    return torch.cat([turned, x[..., r:]], -1)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("rotary", [None, True, False], ids=["unturned", "interleaved", "halves"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_with_kvcache(causal: bool, rotary: bool | None, paged: bool) -> None:
    torch.manual_seed(1)
    lengths, index = torch.tensor([5, 2]).int(), torch.tensor([2, 0]).int()
    q, k, v = tensors((2, 3, 4, 8), (2, 3, 2, 8), (2, 3, 2, 8), grad=False)
    cache_k, cache_v = tensors((3, 12, 2, 8), (3, 12, 2, 8), grad=False)
    angle = torch.rand(16, 3, dtype=torch.float32).double()
    cos, sin = angle.cos().float().double(), angle.sin().float().double()
    outs, lses, expected_k = [], [], cache_k.clone()
    for n in range(2):
        row, length = int(index[n]), int(lengths[n])
        one_q, one_k = q[n], k[n]
        if rotary is not None:
            one_q = _rotated(one_q, cos, sin, length, int(causal), rotary)
            one_k = _rotated(one_k, cos, sin, length, 1, rotary)
        expected_k[row, length : length + 3] = one_k
        full_v = torch.cat([cache_v[row, :length], v[n]])[None]
        out, lse = _expected(one_q[None], expected_k[row, None, : length + 3], full_v, causal=causal, softcap=2.0)
        outs.append(out)
        lses.append(lse)
    options: dict[str, Any] = {"cache_batch_idx": index}
    given_k, given_v = cache_k, cache_v
    if paged:
        table = torch.stack([torch.arange(3) + 3 * int(row) for row in index]).int()
        options = {"block_table": table}
        given_k, given_v = (x.unflatten(1, (3, 4)).flatten(0, 1) for x in (cache_k, cache_v))
    if rotary is not None:
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary}
    out, lse = fa.flash_attn_with_kvcache(
        q, given_k, given_v, k, v, cache_seqlens=lengths, causal=causal, softcap=2.0, return_softmax_lse=True, **options
    )
    torch.testing.assert_close(out, torch.cat(outs), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), torch.cat(lses), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(given_k.reshape(expected_k.shape), expected_k, rtol=1e-6, atol=1e-6)


def test_kvcache_of_inputs_that_require_gradients() -> None:
    """It has no backward, so it takes them and gives a result that requires none."""
    q, k, v, new_k, new_v = tensors((2, 1, 2, 8), (2, 6, 2, 8), (2, 6, 2, 8), (2, 1, 2, 8), (2, 1, 2, 8))
    out = fa.flash_attn_with_kvcache(q, k, v, new_k, new_v, cache_seqlens=3)
    assert not out.requires_grad and torch.equal(k[:, 3:4], new_k)
    keys, values = (x.detach()[:, :4] for x in (k, v))
    torch.testing.assert_close(out, _expected(q.detach(), keys, values)[0])


def test_windows_of_numpy_and_tensors() -> None:
    q, k, v = tensors((2, 5, 2, 8), (2, 5, 2, 8), (2, 5, 2, 8))
    expected = fa.flash_attn_func(q, k, v, window_size=(2, 1))
    for window in ((np.int64(2), np.int32(1)), np.array([2, 1]), torch.tensor([2, 1]), (torch.tensor(2), 1)):
        assert torch.equal(fa.flash_attn_func(q, k, v, window_size=window), expected)  # type: ignore[arg-type]
        with torch.no_grad():
            fa.flash_attn_with_kvcache(q, k, v, window_size=window)  # type: ignore[arg-type]
    for wrong in ((2.0, 1), (2,), torch.tensor([2.0, 1.0]), (-2, 0), 3):
        with pytest.raises(ValueError, match="window_size must be two integers of at least -1"):
            fa.flash_attn_func(q, k, v, window_size=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True])
def test_a_chunk_of_a_prompt_beside_single_tokens(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of different lengths over pages: read where they are, and copied together first."""
    q, k, v = tensors((9, 4, 8), (8, 4, 2, 8), (8, 4, 2, 8), grad=False)
    table, starts = torch.tensor([[0, 5], [2, 3], [7, 1]]).int(), torch.tensor([0, 1, 8, 9]).int()
    ends = torch.tensor([0, 6, 14, 18]).int()
    options = {"causal": causal, "block_table": table, "window_size": (5, -1), "return_attn_probs": True}
    found = [fa.flash_attn_varlen_func(q, k, v, starts, ends, 7, 8, **options)[:2]]
    cached = fa3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=ends.diff(), page_table=table, cu_seqlens_q=starts, max_seqlen_q=7, causal=causal,
        window_size=(5, -1), return_softmax_lse=True,
    )  # fmt: skip
    monkeypatch.setattr(fa_interface, "reads_pages", lambda *sizes: False)
    copied = fa.flash_attn_varlen_func(q, k, v, starts, ends, 7, 8, **options)[:2]
    for out, lse in (*found, cached):
        torch.testing.assert_close(out, copied[0])
        torch.testing.assert_close(lse, copied[1])


def test_more_than_there_are_pages_for() -> None:
    q, k, v = tensors((2, 1, 2, 8), (4, 4, 2, 8), (4, 4, 2, 8), grad=False)
    table, cu = torch.tensor([[0, 1], [2, 3]]).int(), torch.tensor([0, 1, 2]).int()
    with pytest.raises(ValueError, match="cache_seqlens must be at most 8, the size of the cache, got 9"):
        fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=9, block_table=table)
    with pytest.raises(ValueError, match="cache_seqlens must be at most 8, the cache's capacity, got 9"):
        fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor([3, 9]).int(), block_table=table)
    # keys beyond it were left out
    with pytest.raises(
        ValueError, match="cache_seqlens must be at most 6, the size of the cache, less 2 new keys, got 7"
    ):
        fa.flash_attn_with_kvcache(q, k.clone(), v.clone(), k[:2, :2], v[:2, :2], cache_seqlens=7, block_table=table)
    with pytest.raises(ValueError, match="max_seqlen_k must be at most 8, the pages of block_table, got 9"):
        fa.flash_attn_varlen_func(q[:, 0], k, v, cu, cu * 9, 1, 9, block_table=table)


@pytest.mark.parametrize("grad", [False, True])
def test_wrong_pages(grad: bool) -> None:
    """Values in pages of another size than the keys', and pages that are not there, were read as others."""
    q, k, v = tensors((2, 2, 8), (4, 4, 2, 8), (4, 4, 2, 8), grad=grad)
    table, cu = torch.tensor([[0, 1], [2, 3]]).int(), torch.tensor([0, 1, 2]).int()
    right = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu * 7, "max_seqlen_q": 1, "max_seqlen_k": 7}
    for wrong, message in [
        ({"v": v.reshape(2, 8, 2, 8)}, r"v must have shape \[4, 4, 2, 8\] \(as k, but for the head dim\), got \[2, 8"),
        ({"block_table": table + 1}, r"(block|page)_table must be in \[0, 4\), got 4"),
        ({"block_table": table - 1}, r"(block|page)_table must be in \[0, 4\), got -1"),
        (
            {"block_table": table.float()},
            "block_table.dtype must be one of torch.int32, torch.int64, got torch.float32",
        ),
        ({"block_table": table[0]}, r"block_table must be \[batch, pages of a sequence\], got \[2\]"),
        ({"max_seqlen_k": -1}, "max_seqlen_k must be an integer of at least 0, got -1"),
        ({"max_seqlen_k": 7.5}, "max_seqlen_k must be an integer of at least 0, got 7.5"),
        ({"cu_seqlens_k": cu[0]}, r"cu_seqlens_k must have 1 dim, got \[\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            fa.flash_attn_varlen_func(**{**right, "block_table": table, **wrong})
    wild = table.masked_fill(torch.tensor([[False, True], [False, True]]), 99)
    short = {**right, "cu_seqlens_k": cu * 4}
    torch.testing.assert_close(
        fa.flash_attn_varlen_func(**short, block_table=wild), fa.flash_attn_varlen_func(**short, block_table=table)
    )


@pytest.mark.parametrize("most", [4, 3, torch.tensor(4)], ids=str)
def test_pages_of_longer_sequences_than_said(most: Any) -> None:
    """Where pages are copied together the rows of the next sequence were taken for those beyond max_seqlen_k."""
    q, k, v = tensors((2, 2, 8), (4, 4, 2, 8), (4, 4, 2, 8))
    table, cu, ends = (torch.tensor(x).int() for x in ([[0, 1], [2, 3]], [0, 1, 2], [0, 7, 10]))
    with pytest.raises(ValueError, match=r"cu_seqlens_k \(up to max_seqlen_k\) must be in \[0, .\), got 7"):
        fa.flash_attn_varlen_func(q, k, v, cu, ends, 1, most, block_table=table)


def test_what_has_other_dims_or_is_not_dense_is_named() -> None:
    """It was an IndexError, or PyTorch's about strides and memory formats."""
    q, k, v = tensors((2, 1, 2, 8), (2, 6, 2, 8), (2, 6, 2, 8), grad=False)
    for wrong in ({"k_cache": k[0, 0, 0, 0]}, {"k": q[0, 0, 0], "v": q}, {"k": q, "v": q[0]}, {"v_cache": v[0]}):
        name = next(n for n, x in wrong.items() if x.dim() != 4)
        with pytest.raises(ValueError, match=f"flash_attn_with_kvcache: {name} must be a tensor of 4 dims, got a"):
            fa.flash_attn_with_kvcache(**{"q": q, "k_cache": k, "v_cache": v, **wrong})
    for starts, message in ([0, 1], "be a tensor, got"), (torch.tensor(3), "be a tensor of 1 dims, got a int64"):
        with pytest.raises(ValueError, match=f"cu_seqlens_q must {message}"):
            fa.flash_attn_with_kvcache(q[0], k, v, cu_seqlens_q=starts)
    with pytest.raises(ValueError, match=r"cu_seqlens_q must have shape \[1\] .*, got \[0\]"):
        fa.flash_attn_with_kvcache(q[0], k, v, cu_seqlens_q=torch.tensor([], dtype=torch.int32))
    with pytest.raises(ValueError, match="query must be a dense tensor, got a tensor of layout sparse_coo"):
        fa.flash_attn_with_kvcache(q.to_sparse(), k, v)
    with pytest.raises(ValueError, match="query must be a dense tensor, got a tensor of layout nested"):
        fa.flash_attn_func(torch.nested.nested_tensor([q[0], q[1]], layout=torch.jagged), k, v)


@pytest.mark.parametrize("grad", [False, True])
def test_a_cache_without_pages(grad: bool) -> None:
    """Of sequences without keys: on a CPU it was an IndexError."""
    q, k, v = tensors((2, 2, 8), (0, 4, 2, 8), (0, 4, 2, 8), grad=grad)
    table, cu = torch.zeros(2, 3).int(), torch.tensor([0, 1, 2]).int()
    out = fa.flash_attn_varlen_func(q, k, v, cu, cu * 0, 1, 4, block_table=table)
    assert torch.equal(out, torch.zeros_like(q))
    assert not grad or all(x is not None for x in torch.autograd.grad(out.sum(), (q, k, v)))
    assert not fa.flash_attn_with_kvcache(q[:, None], k, v, cache_seqlens=0, block_table=table).any()


def test_kvcache_lengths() -> None:
    q, k, v = tensors((2, 1, 2, 8), (2, 6, 2, 8), (2, 6, 2, 8), grad=False)
    whole = _expected(q, k, v)[0]
    torch.testing.assert_close(fa.flash_attn_with_kvcache(q, k, v), whole)
    torch.testing.assert_close(
        fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=4), _expected(q, k[:, :4], v[:, :4])[0]
    )
    left = torch.tensor([1, 0]).int()
    out = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=5, cache_leftpad=left, num_splits=2, window_size=(2, 0))
    assert torch.allclose(out[:1], _expected(q[:1], k[:1, 1:5], v[:1, 1:5], window_size=(2, 0))[0])


def test_padding() -> None:
    (x,) = tensors((3, 5, 2, 4))
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    tokens, indices, cu_seqlens, longest, used = fa.unpad_input(x, mask)
    assert tokens.shape == (7, 2, 4) and cu_seqlens.tolist() == [0, 3, 3, 7] and longest == 4
    assert used.tolist() == [3, 0, 4] and cu_seqlens.dtype is used.dtype is torch.int32
    back = fa.pad_input(tokens, indices, 3, 5)
    assert torch.equal(back, x * mask[..., None, None])
    (grad,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(grad, mask[..., None, None].expand_as(x).double())
    unused = torch.tensor([[0, 0, 0, 1, 0], [0] * 5, [1, 0, 0, 0, 0]])
    *_, cu_seqlens, longest, used = fa.unpad_input(x, mask, unused)
    assert cu_seqlens.tolist() == [0, 4, 4, 9] and longest == 5 and used.tolist() == [3, 0, 4]
    assert torch.equal(fa.index_first_axis(x.flatten(0, 1), indices), tokens)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[3, 5\] .*got \[3, 4\]"):
        fa.unpad_input(x, mask[:, :4])
    with pytest.raises(ValueError, match=r"unused_mask must have shape \[3, 5\] .*got \[1, 5\]"):
        fa.unpad_input(x, mask, unused[:1])


def test_errors() -> None:
    q, k, v = tensors((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8), grad=False)
    with pytest.raises(NotImplementedError, match=r"return_attn_probs with dropout_p = 0.1 .*nearest: .*dropout_seed"):
        fa.flash_attn_func(q, k, v, dropout_p=0.1, return_attn_probs=True)
    with pytest.raises(ValueError, match="qkv must have 5 dims, the third from last of size 3, got"):
        fa.flash_attn_qkvpacked_func(q)
    with pytest.raises(ValueError, match="v must be given with k"):
        fa.flash_attn_with_kvcache(q, k, v, k=k)
    with pytest.raises(ValueError, match="rotary_sin must be given with rotary_cos"):
        fa.flash_attn_with_kvcache(q, k, v, rotary_cos=torch.ones(9, 2))
    with pytest.raises(ValueError, match="key_new must be given with rotary"):
        fa.flash_attn_with_kvcache(q, k, v, rotary_cos=torch.ones(9, 2), rotary_sin=torch.ones(9, 2))


@pytest.mark.parametrize("wrong", ["a name", [1, 2], None, 3, np.zeros(3)], ids=str)
def test_what_is_no_tensor_is_named(wrong: object) -> None:
    """An AttributeError of 'stride' or 'dim' was all that was said."""
    q, k, v = tensors((2, 5, 2, 8), (2, 5, 2, 8), (2, 5, 2, 8), grad=False)
    cu = torch.tensor([0, 5, 10]).int()
    for n, name in enumerate("qkv"):
        three = [wrong if n == place else x for place, x in enumerate((q, k, v))]
        packed = [x if x is wrong else x.flatten(0, 1) for x in three]
        for call in (
            lambda three=three: fa.flash_attn_func(*three),
            lambda packed=packed: fa.flash_attn_varlen_func(*packed, cu, cu, 5, 5),
        ):
            with pytest.raises((TypeError, ValueError), match=f"flash_attn_.*func: {name} must be a tensor, got"):
                call()
    with pytest.raises((TypeError, ValueError), match="qkv must be a tensor, got"):
        fa.flash_attn_qkvpacked_func(wrong)  # type: ignore[arg-type]
    for name in ("q", "k_cache"):
        with pytest.raises((TypeError, ValueError), match=f"{name} must be a tensor, got"):
            fa.flash_attn_with_kvcache(**{"q": q, "k_cache": k, "v_cache": v, name: wrong})  # type: ignore[arg-type]


def test_kvcache_refuses_other_kinds() -> None:
    """The imaginary part of complex cosines was left out without a word."""
    q, k, v = tensors((2, 1, 2, 8), (2, 5, 2, 8), (2, 5, 2, 8), grad=False)
    table = torch.ones(9, 4)
    options = {"k": k[:, :1], "v": v[:, :1], "rotary_cos": table, "rotary_sin": table, "cache_seqlens": 2}
    with pytest.raises(ValueError, match="rotary_cos must be floating point, of 16 bits or more, got complex64"):
        fa.flash_attn_with_kvcache(q, k, v, **{**options, "rotary_cos": torch.polar(table, table)})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cache_seqlens must be an int, a tensor or None, got \[2, 2\]"):
        fa.flash_attn_with_kvcache(q, k, v, **{**options, "cache_seqlens": [2, 2]})  # type: ignore[arg-type]
    torch.testing.assert_close(
        fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=np.int64(4)),  # type: ignore[arg-type]
        fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=4),
    )


def test_kvcache_takes_columns_of_tables(device: torch.device) -> None:
    """flash-attn makes its whole numbers and new tokens contiguous itself."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    cache, q, new = randn(4, 12, 2, 16), randn(3, 1, 4, 16), randn(3, 1, 2, 16)
    table = torch.tensor([[4, 3], [7, 0], [2, 1]], dtype=torch.int32, device=device)
    pages = torch.tensor([[0, 3, 1], [2, 0, 3]], dtype=torch.int32, device=device).t()

    def call(strided: bool, **given: torch.Tensor) -> torch.Tensor:
        whole = {n: x if strided else x.contiguous() for n, x in given.items()}
        k_cache, v_cache = cache.clone(), cache.clone()
        return fa_interface.flash_attn_with_kvcache(
            k_cache=k_cache, v_cache=v_cache, causal=True, cache_seqlens=whole.pop("lengths"), **whole
        )

    dense = dict(q=q, k=new, v=new, lengths=table[:, 0], cache_batch_idx=table[:, 1])
    assert torch.equal(call(True, **dense), call(False, **dense))
    paged = dict(q=q.transpose(2, 3).contiguous().transpose(2, 3), lengths=table[:, 0], block_table=pages)
    assert torch.equal(call(True, **paged), call(False, **paged))
