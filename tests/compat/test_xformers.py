"""xFormers' memory_efficient_attention: every bias, layout and way, against its own matrix and plain PyTorch."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from powertrain.compat.xformers import ops as xops
from powertrain.compat.xformers.ops import fmha, memory_efficient_attention
from powertrain.compat.xformers.ops.fmha import attn_bias as ab
from tests.compat.plain import attend, band, same, tensors

pytestmark = pytest.mark.usefixtures("on_cpu")

TABLE = torch.tensor([[4, 0, 7], [1, 5, 2], [6, 3, 8]]).int()
Q, K = [3, 1, 4], [5, 2, 4]
EQUAL = [2, 2, 2]


def _blocks(cls: Any, *args: Any, q: list[int] = Q, **options: Any) -> Callable[[], Any]:
    return lambda: cls.from_seqlens(q, *args, **options)


DENSE: dict[str, Any] = {
    "none": None,
    "causal": ab.LowerTriangularMask(),
    "bottom right": ab.LowerTriangularFromBottomRightMask(),
    "bottom right local": ab.LowerTriangularFromBottomRightMask().make_local_attention(2),
    "local": ab.LocalAttentionFromBottomRightMask(1, 2),
}
BLOCKS: dict[str, Callable[[], Any]] = {
    "blocks": _blocks(ab.BlockDiagonalMask, K),
    "same blocks": _blocks(ab.BlockDiagonalMask),
    "causal": lambda: ab.BlockDiagonalMask.from_seqlens(Q, K).make_causal(),
    "bottom right": lambda: ab.BlockDiagonalMask.from_seqlens(Q, K).make_causal_from_bottomright(),
    "local": lambda: ab.BlockDiagonalMask.from_seqlens(Q, K).make_local_attention(2),
    "local bottom right": lambda: ab.BlockDiagonalMask.from_seqlens(Q, K).make_local_attention_from_bottomright(2),
    "padded": _blocks(ab.BlockDiagonalPaddedKeysMask, 6, K),
    "padded causal": _blocks(ab.BlockDiagonalCausalWithOffsetPaddedKeysMask, 6, K),
    "padded local": lambda: ab.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(Q, 6, K, 1, 2),
    "padded causal local": lambda: ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(Q, 6, K, 2),
    "gappy": _blocks(ab.BlockDiagonalGappyKeysMask, [0, 6, 11, 18], K),
    "gappy causal": _blocks(ab.BlockDiagonalCausalWithOffsetGappyKeysMask, [1, 6, 11, 18], K),
    "gappy local": lambda: ab.BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask.from_seqlens_local(
        Q, [1, 6, 11, 18], K, 1, 2
    ),
}
PAGED: dict[str, Callable[[], Any]] = {
    "padded": _blocks(ab.PagedBlockDiagonalPaddedKeysMask, K, TABLE, 2),
    "padded causal": _blocks(ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask, K, TABLE, 2),
    "padded local": lambda: ab.PagedBlockDiagonalCausalLocalPaddedKeysMask.from_seqlens_local(Q, K, TABLE, 2, 2),
    "gappy": _blocks(ab.PagedBlockDiagonalGappyKeysMask, [1, 3, 2], [4, 2, 4], TABLE, 2),
    "gappy causal": _blocks(ab.PagedBlockDiagonalCausalWithOffsetGappyKeysMask, [1, 3, 0], [4, 3, 6], TABLE, 2),
}
ALL = {**{f"block {n}": f for n, f in BLOCKS.items()}, **{f"paged {n}": f for n, f in PAGED.items()}}


def _rows(bias: Any) -> tuple[int, int]:
    keys = TABLE.numel() * 2 if isinstance(bias, ab.PagedBias) else bias.k_seqinfo.seqstart_py[-1]
    return bias.q_seqinfo.seqstart_py[-1], keys


def _by_matrix(bias: Any) -> Callable[..., Tensor]:
    """Plain attention with the bias as its matrix, inputs 4-D or 5-D."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        matrix = None
        if bias is not None:
            matrix = bias.materialize((q.shape[1], k.shape[1]), torch.float64)
        if q.dim() == 4:
            return attend(q, k, v, matrix)[0]
        out = attend(*(x.flatten(2, 3) for x in (q, k, v)), matrix)[0]
        return out.unflatten(2, q.shape[2:4])

    return run


# rows of nothing but masked keys on the left, more keys than queries on the right
@pytest.mark.parametrize("sizes", [(7, 4), (4, 7)], ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str, sizes: tuple[int, int]) -> None:
    bias = DENSE[name]
    inputs = tensors((2, sizes[0], 3, 8), (2, sizes[1], 3, 8), (2, sizes[1], 3, 5))
    same(lambda *x: memory_efficient_attention(*x, attn_bias=bias), _by_matrix(bias), inputs)
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(*inputs, attn_bias=bias, scale=0.5)
    matrix = None if bias is None else bias.materialize(sizes, torch.float64)
    torch.testing.assert_close((out, lse.double()), attend(*inputs, matrix, 0.5), rtol=1e-6, atol=1e-6)
    assert not out.requires_grad


@pytest.mark.parametrize("name", DENSE)
def test_heads_of_one_and_groups(name: str) -> None:
    bias = DENSE[name]
    q, k, v = tensors((2, 5, 8), (2, 7, 8), (2, 7, 6))
    same(
        lambda *x: memory_efficient_attention(*x, attn_bias=bias),
        lambda *x: _by_matrix(bias)(*(t.unsqueeze(2) for t in x)).squeeze(2),
        [q, k, v],
    )
    same(
        lambda *x: memory_efficient_attention(*x, attn_bias=bias),
        _by_matrix(bias),
        tensors((2, 5, 2, 3, 8), (2, 7, 2, 3, 8), (2, 7, 2, 3, 6)),
    )


EXPANDED = {"heads": (2, 1), "groups": (1, 3), "both": (1, 1), "neither": (2, 3)}


@pytest.mark.parametrize("sizes", EXPANDED.values(), ids=EXPANDED)
@pytest.mark.parametrize("name", ["block bottom right", "block padded causal", "paged gappy causal"])
def test_groups_in_blocks(name: str, sizes: tuple[int, int]) -> None:
    bias = ALL[name]()
    rows, keys = _rows(bias)
    q, k, v = tensors((1, rows, 2, 3, 8), (1, keys, *sizes, 8), (1, keys, *sizes, 6))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return memory_efficient_attention(q, k.expand(1, keys, 2, 3, 8), v.expand(1, keys, 2, 3, 6), bias)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _by_matrix(bias)(q, k.expand(1, keys, 2, 3, 8), v.expand(1, keys, 2, 3, 6))

    same(ours, plain, [q, k, v])
    _, lse = fmha.memory_efficient_attention_partial(q, k.expand(1, keys, 2, 3, 8), v.expand(1, keys, 2, 3, 6), bias)
    flat = (q.flatten(2, 3), k.expand(1, keys, 2, 3, 8).flatten(2, 3), v.expand(1, keys, 2, 3, 6).flatten(2, 3))
    _, expected = attend(*flat, bias.materialize((rows, keys), torch.float64))
    torch.testing.assert_close(lse.double(), expected.unflatten(1, (2, 3)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sizes", EXPANDED.values(), ids=EXPANDED)
def test_groups_dense(sizes: tuple[int, int]) -> None:
    same(
        lambda q, k, v: memory_efficient_attention(q, k.expand(2, 7, 2, 3, 8), v.expand(2, 7, 2, 3, 6)),
        lambda q, k, v: _by_matrix(None)(q, k.expand(2, 7, 2, 3, 8), v.expand(2, 7, 2, 3, 6)),
        tensors((2, 5, 2, 3, 8), (2, 7, *sizes, 8), (2, 7, *sizes, 6)),
    )


def test_one_head_expanded() -> None:
    same(
        lambda q, k, v: memory_efficient_attention(q, k.expand(2, 7, 3, 8), v.expand(2, 7, 3, 6), DENSE["local"]),
        lambda q, k, v: _by_matrix(DENSE["local"])(q, k.expand(2, 7, 3, 8), v.expand(2, 7, 3, 6)),
        tensors((2, 5, 3, 8), (2, 7, 1, 8), (2, 7, 1, 6)),
    )


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 3, 5, 7), (2, 1, 1, 7), (1, 1, 5, 7)], ids=str)
def test_tensor_bias(shape: tuple[int, ...]) -> None:
    inputs = tensors((2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 8), shape)
    same(memory_efficient_attention, lambda q, k, v, b: attend(q, k, v, b)[0], inputs)
    same(
        lambda q, k, v, b: memory_efficient_attention(q, k, v, xops.LowerTriangularMask().add_bias(b)),
        lambda q, k, v, b: attend(q, k, v, b.masked_fill(~band(5, 7, causal=True, top_left=True), -torch.inf))[0],
        inputs,
    )
    both = xops.LowerTriangularMask().add_bias(inputs[3]).add_bias(inputs[3])
    expected = 2 * inputs[3] + ab.LowerTriangularMask().materialize((5, 7), torch.float64)
    torch.testing.assert_close(both.materialize((2, 3, 5, 7), torch.float64), expected.expand(2, 3, 5, 7))


def test_tensor_bias_of_other_layouts() -> None:
    same(
        memory_efficient_attention,
        lambda q, k, v, b: attend(*(x.unsqueeze(2) for x in (q, k, v)), b.unsqueeze(1))[0].squeeze(2),
        tensors((2, 5, 8), (2, 7, 8), (2, 7, 8), (2, 5, 7)),
    )
    same(
        memory_efficient_attention,
        lambda q, k, v, b: attend(*(x.flatten(2, 3) for x in (q, k, v)), b.flatten(1, 2))[0].unflatten(2, (2, 3)),
        tensors((2, 5, 2, 3, 8), (2, 7, 2, 3, 8), (2, 7, 2, 3, 8), (2, 2, 3, 5, 7)),
    )


@pytest.mark.parametrize("name", ALL)
def test_blocks(name: str) -> None:
    bias = ALL[name]()
    rows, keys = _rows(bias)
    inputs = tensors((1, rows, 4, 8), (1, keys, 2, 8), (1, keys, 2, 6))
    same(lambda *x: memory_efficient_attention(*x, attn_bias=bias.to("cpu")), _by_matrix(bias), inputs)
    out, lse = fmha.memory_efficient_attention_partial(*inputs, attn_bias=bias)
    matrix = bias.materialize((rows, keys), torch.float64)
    torch.testing.assert_close((out, lse.double()), attend(*inputs, matrix), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ALL if "padded" in name or "paged" in name])
def test_decoding(name: str) -> None:
    """As many queries for each sequence, and no gradients: the way of a KV cache."""
    bias = copy.deepcopy(ALL[name]())
    bias.q_seqinfo = ab._SeqLenInfo.from_seqlens(EQUAL)
    rows, keys = _rows(bias)
    inputs = tensors((1, rows, 4, 8), (1, keys, 2, 8), (1, keys, 2, 6), grad=False)
    assert fmha._decodes(*(x[0] for x in inputs), bias, fmha._Options(0.0, None, None, False))
    out, lse = fmha.memory_efficient_attention_partial(*inputs, attn_bias=bias)
    matrix = bias.materialize((rows, keys), torch.float64)
    torch.testing.assert_close((out, lse.double()), attend(*inputs, matrix), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(memory_efficient_attention(*inputs, bias), out)


@pytest.mark.parametrize("name", BLOCKS)
def test_padding_does_not_leak(name: str) -> None:
    bias = BLOCKS[name]()
    rows, keys = _rows(bias)
    q, k, v = tensors((1, rows, 2, 8), (1, keys, 2, 8), (1, keys, 2, 8), grad=False)
    unseen = (bias.materialize((rows, keys)) == -torch.inf).all(0)
    used = torch.zeros(keys, dtype=torch.bool)
    for start, end in bias.k_seqinfo.intervals():
        used[start:end] = True
    k[:, ~used], v[:, ~used] = torch.nan, torch.nan
    assert unseen[~used].all()
    assert memory_efficient_attention(q, k.requires_grad_(), v, bias).isfinite().all()


def _see(q_starts: list[int], k_spans: list[tuple[int, int]], keys: int, **options: Any) -> Tensor:
    """The matrix from first principles: blocks of `band`."""
    seen = torch.zeros(q_starts[-1], keys, dtype=torch.bool)
    for n, (start, end) in enumerate(k_spans):
        rows = slice(q_starts[n], q_starts[n + 1])
        seen[rows, start:end] = band(rows.stop - rows.start, end - start, **options)
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


def test_matrices() -> None:
    starts = [0, 3, 4, 8]
    one = lambda k: [(0, k[0]), (k[0], k[0] + k[1]), (k[0] + k[1], sum(k))]  # noqa: E731
    padded = [(0, 5), (6, 8), (12, 16)]
    expected = {
        "blocks": _see(starts, one(K), 11),
        "same blocks": _see(starts, one(Q), 8),
        "causal": _see(starts, one(K), 11, causal=True, top_left=True),
        "bottom right": _see(starts, one(K), 11, causal=True),
        "local": _see(starts, one(K), 11, causal=True, left=1, top_left=True),
        "local bottom right": _see(starts, one(K), 11, causal=True, left=1),
        "padded": _see(starts, padded, 18),
        "padded causal": _see(starts, padded, 18, causal=True),
        "padded local": _see(starts, padded, 18, left=1, right=2),
        "padded causal local": _see(starts, padded, 18, left=1, causal=True),
        "gappy": _see(starts, [(0, 5), (6, 8), (11, 15)], 18),
        "gappy causal": _see(starts, [(1, 6), (6, 8), (11, 15)], 18, causal=True),
        "gappy local": _see(starts, [(1, 6), (6, 8), (11, 15)], 18, left=1, right=2),
    }
    assert expected.keys() == BLOCKS.keys()
    for name, matrix in expected.items():
        assert torch.equal(BLOCKS[name]().materialize((2, *matrix.shape))[1], matrix), name
    for name, options in {"causal": {"top_left": True}, "bottom right": {}, "bottom right local": {"left": 1}}.items():
        seen = band(4, 6, causal=True, **options)
        assert torch.equal(DENSE[name].materialize((4, 6)) == 0, seen), name
    assert torch.equal(DENSE["local"].materialize((3, 4, 6))[0] == 0, band(4, 6, left=1, right=2))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7)), min_size=1, max_size=4),
    kind=st.sampled_from(["blocks", "causal", "padded", "padded causal", "padded local", "paged", "paged causal"]),
    seed=st.integers(0, 2**20),
)
def test_any_lengths(lengths: list[tuple[int, int]], kind: str, seed: int) -> None:
    """Whatever the lengths, zero included, the result is that of the matrix, forward and backward."""
    torch.manual_seed(seed)
    q_lengths, k_lengths = [list(one) for one in zip(*lengths, strict=True)]
    table = torch.randperm(3 * len(lengths)).reshape(len(lengths), 3).int()
    bias: Any = {
        "blocks": lambda: ab.BlockDiagonalMask.from_seqlens(q_lengths, k_lengths),
        "causal": lambda: ab.BlockDiagonalCausalMask.from_seqlens(q_lengths, k_lengths),
        "padded": lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens(q_lengths, 7, k_lengths),
        "padded causal": lambda: ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(q_lengths, 7, k_lengths),
        "padded local": lambda: ab.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(
            q_lengths, 7, k_lengths, 0, 2
        ),
        "paged": lambda: ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens(q_lengths, k_lengths, table, 3),
        "paged causal": lambda: ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            q_lengths, k_lengths, table, 3
        ),
    }[kind]()
    keys = table.numel() * 3 if "paged" in kind else bias.k_seqinfo.seqstart_py[-1]
    inputs = tensors((1, sum(q_lengths), 2, 4), (1, keys, 1, 4), (1, keys, 1, 4))
    same(lambda *x: memory_efficient_attention(*x, attn_bias=bias), _by_matrix(bias), inputs)


def test_make_paged() -> None:
    padded = ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(Q, 6, K)
    paged = padded.make_paged(TABLE, 2, ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask)
    assert torch.equal(paged.materialize((8, 18)), PAGED["padded causal"]().materialize((8, 18)))
    local = ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(Q, 6, K, 2)
    paged = local.make_paged(TABLE, 2, ab.PagedBlockDiagonalCausalLocalPaddedKeysMask)
    assert torch.equal(paged.materialize((8, 18)), PAGED["padded local"]().materialize((8, 18)))
    gappy = ab.BlockDiagonalGappyKeysMask.from_seqlens(Q, [1, 9, 14, 18], [4, 2, 4])
    paged = gappy.make_paged(TABLE, 2, 6, ab.PagedBlockDiagonalGappyKeysMask)
    assert torch.equal(paged.materialize((8, 18)), PAGED["gappy"]().materialize((8, 18)))
    with pytest.raises(ValueError, match="notional_padding must be a multiple of page_size 2, got 5"):
        gappy.make_paged(TABLE, 2, 5, ab.PagedBlockDiagonalGappyKeysMask)


def test_tensor_lists() -> None:
    parts = tensors((2, 3, 4), (1, 5, 4), (3, 2, 4))
    bias, row = ab.BlockDiagonalMask.from_tensor_list(parts)
    assert row.shape == (1, 17, 4) and bias.q_seqinfo.seqstart.tolist() == [0, 3, 6, 11, 13, 15, 17]
    assert all(torch.equal(a, b) for a, b in zip(bias.split(row), parts, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(bias.to("cpu").split(row), parts, strict=True))
    keys = tensors((2, 1, 4), (1, 2, 4), (3, 3, 4))
    bias, q, k, v = ab.BlockDiagonalMask.from_tensor_lists_qkv(parts, keys, keys)
    assert v is not None and torch.equal(k, v) and torch.equal(q, row)
    assert all(torch.equal(a, b) for a, b in zip(bias.split_kv(k), keys, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(bias.make_causal().split_queries(q), parts, strict=True))
    with pytest.raises(ValueError, match="tensor must go to split_queries or split_kv"):
        bias.split(q)
    with pytest.raises(ValueError, match=r"x must have shape \[1, 17, ...\], got \[1, 3, 4\]"):
        bias.split_queries(q[:, :3])


def test_lengths_in_place() -> None:
    bias = ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(Q, 6, [5, 5, 5])
    q, k, v = tensors((1, 8, 2, 8), (1, 18, 2, 8), (1, 18, 2, 8))
    bias.k_seqinfo.from_seqlens_padded_inplace(K)
    expected = BLOCKS["padded causal"]()
    assert torch.equal(memory_efficient_attention(q, k, v, bias), memory_efficient_attention(q, k, v, expected))
    blocks = ab.BlockDiagonalMask.from_seqlens([4, 4, 4])
    blocks.q_seqinfo.from_seqlens_inplace([2, 3, 4])
    assert blocks.q_seqinfo.seqstart.tolist() == [0, 2, 5, 9]
    assert (blocks.q_seqinfo.min_seqlen, blocks.q_seqinfo.max_seqlen) == (2, 4)
    with pytest.raises(ValueError, match="seqlens must be 3 lengths of at most 4, got"):
        blocks.q_seqinfo.from_seqlens_inplace([2, 3, 5])


@pytest.mark.parametrize("dims", [4, 5])
def test_partial_and_merge(dims: int) -> None:
    heads = (3,) if dims == 4 else (2, 3)
    q, k, v = tensors((2, 5, *heads, 8), (2, 9, *heads, 8), (2, 9, *heads, 6))

    def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [fmha.memory_efficient_attention_partial(q, k[:, s], v[:, s]) for s in (slice(0, 4), slice(4, 9))]
        out, lse = fmha.merge_attentions(*zip(*parts, strict=True))
        assert lse is not None and lse.shape == (2, *heads, 5)
        return out

    for one, other in zip(
        *[torch.autograd.grad(f(q, k, v).sum(), [q, k, v]) for f in (merged, memory_efficient_attention)], strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(merged(q, k, v), memory_efficient_attention(q, k, v), rtol=1e-6, atol=1e-6)
    parts = [fmha.memory_efficient_attention_partial(q, k[:, s], v[:, s]) for s in (slice(0, 4), slice(4, 9))]
    out, lse = fmha.merge_attentions(
        torch.stack([o for o, _ in parts]), torch.stack([s for _, s in parts]), write_lse=False,
        output_dtype=torch.float32,
    )  # fmt: skip
    assert lse is None and out.dtype is torch.float32


@pytest.mark.parametrize("name", ["causal", "bottom right", "none"])
@pytest.mark.parametrize("dims", [3, 4, 5])
def test_backward(name: str, dims: int) -> None:
    heads: tuple[int, ...] = {3: (), 4: (3,), 5: (2, 3)}[dims]
    q, k, v = tensors((2, 7, *heads, 8), (2, 4, *heads, 8), (2, 4, *heads, 6))
    bias = DENSE[name]
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, bias)
    grad = torch.randn_like(out)
    ours = fmha.memory_efficient_attention_backward(grad, out, lse, q, k, v, bias)
    expected = torch.autograd.grad(memory_efficient_attention(q, k, v, bias), [q, k, v], grad)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_what_raises_there_raises_here() -> None:
    """ValueError, where xFormers' own is one."""
    q, k, v = tensors((2, 5, 3, 8), (2, 9, 3, 8), (2, 9, 3, 8), grad=False)
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v)
    backward = fmha.memory_efficient_attention_backward
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: backward(out[:, :4], out, lse, q, k, v), r"grad must have shape \[2, 5, 3, 8\]"),
        (lambda: backward(out, out[0], lse, q, k, v), "output must have shape"),
        (lambda: backward(out, out, lse.mT, q, k, v), r"lse must have shape \[2, 3, 5\]"),
        (lambda: memory_efficient_attention(q, k.float(), v), "key must have query's dtype"),
        (lambda: memory_efficient_attention(q, k[:1], v), "key"),
        (lambda: memory_efficient_attention(q, k, v[:, :8]), "value"),
        (lambda: memory_efficient_attention(q, k, v, p=1.5), "dropout_p must be"),
        (lambda: memory_efficient_attention(q, k, v, op=fmha.MemoryEfficientAttentionCutlassOp), "efficient"),
        (lambda: memory_efficient_attention(q, k, v, torch.zeros(2, 3, 5, 8)), "attn_bias must broadcast"),
        (lambda: fmha.merge_attentions([out, out[:, :4]], [lse, lse]), r"outs\[1\] must have shape"),
        (lambda: fmha.merge_attentions([out], [lse, lse]), "lse_split must be 1 parts"),
        (lambda: fmha.merge_attentions(None, [lse]), "attn_split must be a tensor or a sequence of tensors, got None"),
        (lambda: fmha.merge_attentions([out], [lse[0]]), r"lses\[0\] must have shape"),
        (lambda: ab.BlockDiagonalGappyKeysMask.from_seqlens([1], [0, 4], [5]), "lie in its 4 rows"),
        (lambda: ab.BlockDiagonalGappyKeysMask.from_seqlens([1], [3], [2]), "must have 0 lengths"),
        (
            lambda: ab.PagedBlockDiagonalGappyKeysMask.from_seqlens(Q, [1, 3, 2], [4, 4, 4], TABLE, 2),
            "block 1 must lie in its 6 rows, got rows 3 to 7",
        ),
        (
            lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens(Q, 8, [7, 2, 4]).make_paged(
                TABLE, 2, ab.PagedBlockDiagonalPaddedKeysMask
            ),
            "kv_seqlen must be 3 lengths of at most 6",
        ),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_backward_refuses_other_kinds() -> None:
    """Of a complex gradient the imaginary part was left out, and integers were taken for numbers of the result."""
    q, k, v = (x.detach() for x in tensors((2, 5, 3, 8), (2, 9, 3, 8), (2, 9, 3, 8)))
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v)
    right = {"grad": out, "output": out, "lse": lse, "query": q, "key": k, "value": v}
    for name, x in right.items():
        for wrong, got in ((x.to(torch.complex64), "complex64"), (x.int(), "int32")):
            with pytest.raises(ValueError, match=f"{name} must be floating point, of 16 bits or more, got {got}"):
                fmha.memory_efficient_attention_backward(**{**right, name: wrong})
        with pytest.raises(ValueError, match=f"{name} must be a tensor, got 3"):
            fmha.memory_efficient_attention_backward(**{**right, name: 3})
    with pytest.raises(ValueError, match="lse must be on query's device cpu, got meta"):
        fmha.memory_efficient_attention_backward(**{**right, "lse": lse.to("meta")})


@pytest.mark.parametrize("grad", [False, True])
def test_pages_that_are_not_there(grad: bool) -> None:
    """The nearest page's keys were taken for theirs."""
    q, k, v = (x.detach().requires_grad_(grad) for x in tensors((1, 2, 2, 8), (1, 8, 2, 8), (1, 8, 2, 8)))
    bias = ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1, 1], [3, 4], torch.tensor([[0, 1], [2, 4]]).int(), 2)
    with pytest.raises(ValueError, match=r"(block_tables|page_table) must be in \[0, 4\), got 4"):
        memory_efficient_attention(q, k, v, bias)


def test_backward_of_a_part() -> None:
    """With the LSE and result of all keys, a part gives its share of the gradients (ring attention)."""
    q, k, v = tensors((2, 5, 3, 8), (2, 9, 3, 8), (2, 9, 3, 8))
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(memory_efficient_attention(q, k, v), [q, k, v], grad)
    parts = [
        fmha.memory_efficient_attention_backward(grad, out, lse, q, k[:, s], v[:, s])
        for s in (slice(0, 4), slice(4, 9))
    ]
    dq = parts[0][0] + parts[1][0]
    dk, dv = (torch.cat([p[n] for p in parts], 1) for n in (1, 2))
    torch.testing.assert_close((dq, dk, dv), expected, rtol=1e-6, atol=1e-6)
    with torch.inference_mode():
        inside = fmha.memory_efficient_attention_backward(grad * 1, out, lse, q * 1, k[:, :4] * 1, v[:, :4])
    torch.testing.assert_close(inside, parts[0])
    # the part of the gradient that goes by the LSE was left out there
    compiled = torch.compile(fmha.memory_efficient_attention_backward, backend="aot_eager")
    small = [x.detach().float() for x in (grad, out, lse, q, k[:, :4], v[:, :4])]
    found = compiled(*small)
    torch.testing.assert_close(found, tuple(x.float() for x in parts[0]), rtol=1e-4, atol=1e-4)


def test_dropout() -> None:
    q, k = tensors((1, 64, 2, 8), (1, 256, 2, 8))
    ones = torch.ones(1, 256, 2, 1, dtype=torch.float64)
    out = memory_efficient_attention(q, k, ones, p=0.25)
    assert abs(out.mean().item() - 1) < 0.05 and out.std() > 0.01
    for function in (
        fmha.memory_efficient_attention_partial,
        fmha.memory_efficient_attention_forward_requires_grad,
    ):
        with pytest.raises(
            NotImplementedError, match=r"p = 0.25 is not supported; nearest: memory_efficient_attention"
        ):
            function(q, k, ones, p=0.25)


def test_output_dtype() -> None:
    q, k, v = tensors((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8), dtype=torch.bfloat16)
    assert memory_efficient_attention(q, k, v, output_dtype=torch.float32).dtype is torch.float32
    assert fmha.memory_efficient_attention_forward(q, k, v).dtype is torch.bfloat16


def test_operators() -> None:
    q, k, v = tensors((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8))
    assert fmha.backends_of(xops.MemoryEfficientAttentionCutlassOp) == ("efficient",)
    assert fmha.backends_of((None, fmha.flash.BwOp)) == ("flash-attn-2", "flash")
    assert fmha.backends_of(fmha.triton_splitk.FwOp) == ("triton",)
    # it is a CUDA kernel
    with pytest.raises(ValueError, match="efficient attention runs on a GPU only"):
        memory_efficient_attention(q, k, v, op=xops.MemoryEfficientAttentionCutlassOp)
    with pytest.raises(ValueError, match=r"op must name one operator forward and backward .* got cutlassF and fa2B"):
        memory_efficient_attention(q, k, v, op=(fmha.cutlass.FwOp, fmha.flash.BwOp))
    with pytest.raises(ValueError, match=r"op must be \(FwOp, BwOp\) of one of fmha.cutlass, .* got cutlass"):
        memory_efficient_attention(q, k, v, op="cutlass")  # type: ignore[arg-type]


def test_errors() -> None:
    q, k, v = tensors((1, 8, 2, 8), (1, 11, 2, 8), (1, 11, 2, 8))
    bias = ab.BlockDiagonalMask.from_seqlens(Q, K)
    for bad, message in [
        (torch.ones(8, 11, dtype=torch.bool), "attn_bias must be floating point: 0 where .* got bool"),
        (torch.ones(8, 11), r"attn_bias must have 4 dims, as query, got \[8, 11\]"),
        ("causal", "attn_bias must be a tensor, a class of fmha.attn_bias or None, got str"),
        (ab.AttentionBias(), "AttentionBias is no bias of its own"),
        (ab.BlockDiagonalMask.from_seqlens([3, 4], [5, 6]), "query must have 7 rows, as BlockDiagonalMask says, got 8"),
        (ab.BlockDiagonalMask.from_seqlens(Q, [5, 2, 5]), "key must have 12 rows, as BlockDiagonalMask says, got 11"),
        (ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens(Q, K, TABLE, 2), "key must have pages of 2 rows, got 11"),
        (bias.to("meta"), "attn_bias must be on cpu .*, got meta"),
    ]:
        with pytest.raises((ValueError, NotImplementedError), match=message):
            memory_efficient_attention(q, k, v, bad)
    with pytest.raises(ValueError, match=r"query must have a batch of 1 for BlockDiagonalMask, got \[2, 4, 2, 8\]"):
        memory_efficient_attention(*(x.reshape(2, -1, 2, 8) for x in (q, q, q)), bias)
    with pytest.raises(ValueError, match="key must have query's 4 dims"):
        memory_efficient_attention(q, k[0], v)
    with pytest.raises(ValueError, match="query must have 3, 4 or 5 dims"):
        memory_efficient_attention(q[0, 0], k, v)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ab.LocalAttentionFromBottomRightMask(-1, 0), "window_left must be at least 0, got -1"),
        (lambda: ab.LowerTriangularFromBottomRightLocalAttentionMask(0), "_window_size must be at least 1, got 0"),
        (
            lambda: ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local([1], 4, [2], 0),
            "_window_size must be at least 1, got 0",
        ),
        (lambda: ab.BlockDiagonalMask.from_seqlens([1, 2], [3]), "kv_seqlen must have as many blocks as queries, 2"),
        (
            lambda: ab.BlockDiagonalMask.from_seqlens([3], [2]).make_causal_from_bottomright(),
            "kv_seqlen must be at least 3 in block 0, got 2",
        ),
        (
            lambda: ab.BlockDiagonalMask.from_seqlens([5], [2]).make_local_attention(2),
            "_window_size must let every one of block 0's 5 queries see one of its 2 keys, got 2",
        ),
        (
            lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens([1], 3, [4]),
            "kv_seqlen must be 1 lengths of at most 3, got",
        ),
        (
            lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens([1], 3, [2], causal_diagonal=1),  # type: ignore[arg-type]
            "causal_diagonal must be None",
        ),
        (lambda: ab.BlockDiagonalGappyKeysMask.from_seqlens([1], [0], [2]), "kv_seqlen must have 0 lengths"),
    ],
)
def test_errors_of_biases(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 3), (2, 3)], ids=str)
def test_biases_broadcast_to_groups_and_heads(sizes: tuple[int, int]) -> None:
    q, k, v = (torch.randn(2, n, 2, 3, 8, dtype=torch.float64, requires_grad=True) for n in (4, 5, 5))
    bias = torch.randn(2, *sizes, 4, 5, dtype=torch.float64, requires_grad=True)
    whole = bias.expand(2, 2, 3, 4, 5).contiguous()
    ours, expected = (xops.memory_efficient_attention(q, k, v, b) for b in (bias, whole))
    grad = torch.randn_like(expected)
    found, wanted = (torch.autograd.grad(out, (q, k, v, bias), grad) for out in (ours, expected))
    torch.testing.assert_close((ours, *found), (expected, *wanted))
    causal = [xops.LowerTriangularMask().add_bias(b) for b in (bias, whole)]
    one, other = (xops.memory_efficient_attention(q, k, v, b) for b in causal)
    torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match="attn_bias must broadcast to query's 2 groups and 3 heads"):
        xops.memory_efficient_attention(q, k, v, whole.transpose(1, 2))


def test_a_window_over_padded_keys() -> None:
    bias = ab.BlockDiagonalPaddedKeysMask.from_seqlens([2, 1], 6, [5, 3]).make_local_attention(1, 0)
    expected = ab.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local([2, 1], 6, [5, 3], 1, 0)
    assert type(bias) is type(expected)
    assert torch.equal(bias.materialize((3, 12)), expected.materialize((3, 12)))


def test_wrong_blocks_are_named() -> None:
    """Lengths of 1.5 were cut to 1, tables of floats and values of two batches taken; others were PyTorch's errors."""
    q, k, v = tensors((1, 3, 2, 8), (1, 8, 2, 8), (1, 8, 2, 8), grad=False)
    paged = ab.PagedBlockDiagonalPaddedKeysMask
    right: dict[str, Any] = {
        "q_seqlen": [2, 1], "kv_seqlen": [3, 2], "page_size": 2, "block_tables": torch.tensor([[0, 1], [2, 3]]),
    }  # fmt: skip
    table = right["block_tables"]
    for wrong, message in [
        ({"kv_seqlen": [1.5, 2]}, r"kv_seqlen must be a sequence of integers of at least 0, got \[1.5, 2\]"),
        ({"q_seqlen": 3}, "q_seqlen must be a sequence of integers of at least 0, got 3"),
        ({"block_tables": table.float()}, "block_tables must be int32 or int64, got float32"),
        ({"block_tables": table[0]}, r"block_tables must have shape \[2, pages\]"),
        ({"block_tables": [[0, 1], [2, 3]]}, "block_tables must be a tensor"),
        ({"page_size": 2.0}, "page_size must be an integer of at least 1, got 2.0"),
    ]:
        with pytest.raises(ValueError, match=f"PagedBlockDiagonalPaddedKeysMask: {message}"):
            paged.from_seqlens(**{**right, **wrong})
    bias = paged.from_seqlens(**right)
    for change, message in [
        ({"value": v.repeat(2, 1, 1, 1)}, r"value must have shape \[1, 8, 2, 8\] \(as key"),
        ({"value": v[:, :6]}, "value must have shape"),
        ({"key": k.to("meta")}, "key must be on query's device cpu, got meta"),
        ({"key": k.to_sparse()}, "key must be a dense tensor, got one of layout torch.sparse_coo"),
        ({"attn_bias": bias.to("meta")}, "attn_bias must be on cpu"),
    ]:
        with pytest.raises(ValueError, match=f"memory_efficient_attention: {message}"):
            memory_efficient_attention(**{"query": q, "key": k, "value": v, "attn_bias": bias, **change})
    # numbers of NumPy and of tensors are integers
    lengths = torch.tensor([3, 2])
    same = paged.from_seqlens(**{**right, "kv_seqlen": lengths, "q_seqlen": np.array([2, 1])})
    assert torch.equal(memory_efficient_attention(q, k, v, same), memory_efficient_attention(q, k, v, bias))
