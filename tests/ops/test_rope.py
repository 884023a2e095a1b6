"""rope, rope_qkv and rope_table: layouts, positions, packings, schemes and errors."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from powertrain.ops.rope import rope, rope_qkv, rope_ref
from powertrain.ops.rope_table import (
    NTK,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    MRoPE,
    RopeTable,
    YaRN,
    rope_table,
)
from powertrain.runtime.settings import settings
from powertrain.testing.numerics import check


def _check(q: Tensor, k: Tensor | None, table: RopeTable, **options: Any) -> None:
    def call(function: Any) -> Any:
        return lambda q, k, cos, sin: function(q, k, table=RopeTable(cos, sin, table.axes), **options)

    tensors = {"q": q.requires_grad_(), "k": k if k is None else k.requires_grad_(), "cos": table.cos, "sin": table.sin}
    check(call(rope), call(rope_ref), call(rope_ref), tensors)


# whole head dim, part of it, odd numbers of pairs and heads; 80: three widths of channels that are no power of two
@pytest.mark.parametrize("head_dim, rotary_dim", [(16, 16), (80, 48), (10, 6)])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_rotary_dims(head_dim: int, rotary_dim: int, interleaved: bool, device: torch.device) -> None:
    q, k = (torch.randn(1, 3, heads, head_dim, device=device) for heads in (5, 2))
    _check(q, k, rope_table(rotary_dim, 3, device=device), interleaved=interleaved)


def test_many_heads(device: torch.device) -> None:
    q, k = (torch.randn(1, 2, heads, 256, device=device) for heads in (20, 11))
    _check(q, k, rope_table(256, 2, device=device))


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("offset", [4, torch.tensor([0, 7, 3]), torch.tensor([[5, 0], [1, 1], [2, 9]])], ids=str)
def test_positions(layout: str, offset: int | Tensor, device: torch.device) -> None:
    q, k = (torch.randn(3, 2, heads, 8, device=device) for heads in (2, 1))
    q, k = (x.transpose(0, 1).contiguous() if layout == "sbhd" else x for x in (q, k))
    offset = offset.to(device) if isinstance(offset, Tensor) else offset
    name = "position_ids" if isinstance(offset, Tensor) and offset.dim() == 2 else "offset"
    _check(q, k, rope_table(8, 10, device=device), layout=layout, **{name: offset})


def test_offset_is_the_tail_of_the_whole(device: torch.device) -> None:
    table = rope_table(8, 12, device=device)
    q = torch.randn(2, 12, 3, 8, device=device)
    whole = rope(q, table=table)
    lengths = torch.tensor([11, 6], device=device)
    step = torch.stack([q[0, 11:], q[1, 6:7]])
    torch.testing.assert_close(rope(step, table=table, offset=lengths), torch.stack([whole[0, 11:], whole[1, 6:7]]))
    torch.testing.assert_close(rope(q[:, 9:], table=table, offset=9), whole[:, 9:])
    ids = torch.arange(12, device=device)
    assert torch.equal(rope(q, table=table, position_ids=ids), whole)


# lengths: empty sequences at the front, in the middle and at the end; tokens after the last sequence
@pytest.mark.parametrize("lengths", [[5], [0, 2, 0, 3], [1, 1, 1, 0], [2, 1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
def test_thd(lengths: list[int], dtype: torch.dtype, device: torch.device) -> None:
    table = rope_table(8, 16, device=device)
    x = torch.randn(5, 2, 8, device=device)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=dtype, device=device)
    offsets = torch.arange(len(lengths), device=device) * 3
    apart = [rope(s[None], table=table, offset=3 * i)[0] for i, s in enumerate(x.split([*lengths, 5 - sum(lengths)]))]
    apart[-1] = rope(x[sum(lengths) :, None], table=table)[:, 0]  # position 0
    torch.testing.assert_close(
        rope(x, table=table, layout="thd", cu_seqlens=cu_seqlens, offset=offsets), torch.cat(apart)
    )
    _check(x, None, table, layout="thd", cu_seqlens=cu_seqlens)
    _check(x, None, table, layout="thd", offset=2)
    _check(x, None, table, layout="thd", position_ids=torch.tensor([3, 0, 2, 2, 15], device=device))


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_gradients_are_rounded_once(dtype: torch.dtype, interleaved: bool, device: torch.device) -> None:
    """With the kernel and without: the gradient is the exact one, rounded."""
    table = rope_table(16, 9, device=device)
    x, dy = (torch.randn(2, 9, 3, 24, device=device).to(dtype) for _ in range(2))
    (given,) = torch.autograd.grad(rope(x.requires_grad_(), table=table, interleaved=interleaved), x, dy)
    exact = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(rope_ref(exact, table=table, interleaved=interleaved), exact, dy.double())
    # one rounding, and float32's own where the exact result lies between two numbers
    assert (given != expected.to(dtype)).double().mean() < 2e-3


def test_tokens_ahead_of_the_first_sequence(device: torch.device) -> None:
    x = torch.randn(6, 2, 8, device=device)
    cu_seqlens = torch.tensor([2, 4, 5], device=device)
    turned = rope(x, table=rope_table(8, 16, device=device), layout="thd", cu_seqlens=cu_seqlens, offset=3)
    assert torch.equal(turned[:2], x[:2]) and torch.equal(turned[5:], x[5:]) and not torch.equal(turned[2], x[2])


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("interleaved_axes", [False, True])
def test_mrope(layout: str, interleaved_axes: bool, device: torch.device) -> None:
    table = rope_table(16, 9, scheme=MRoPE((4, 2, 2), interleaved=interleaved_axes), device=device)
    expected = [0, 1, 2, 0, 1, 2, 0, 0] if interleaved_axes else [0, 0, 0, 0, 1, 1, 2, 2]
    assert table.axes.tolist() == expected
    ids = torch.randint(0, 9, (3, 2, 3), device=device)
    q = torch.randn(2, 3, 2, 16, device=device)
    turned = rope(q, table=table, position_ids=ids)
    for pair, axis in enumerate(expected):
        alone = rope(q, table=table._replace(axes=None), position_ids=ids[axis])
        torch.testing.assert_close(turned[..., pair::8], alone[..., pair::8])
    if layout == "sbhd":
        _check(q.transpose(0, 1), None, table, layout=layout, position_ids=ids)
    elif layout == "thd":
        _check(q[0], None, table, layout=layout, position_ids=ids[:, 0])


@pytest.mark.parametrize("packing", ["concat", "grouped"])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(6, 2), (3, 3)])
def test_qkv(packing: str, num_heads: int, num_kv_heads: int, device: torch.device) -> None:
    table = rope_table(6, 2, device=device)
    qkv = torch.randn(2, 2, num_heads + 2 * num_kv_heads, 8, device=device)

    def ours(qkv: Tensor, flat: bool = False) -> Any:
        sizes = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, packing=packing)
        return rope_qkv(qkv.flatten(2) if flat else qkv, table=table, **sizes)

    def plain(qkv: Tensor) -> Any:
        if packing == "grouped":
            parts = qkv.unflatten(2, (num_kv_heads, -1)).split((num_heads // num_kv_heads, 1, 1), 3)
            q, k, v = (t.flatten(2, 3) for t in parts)
        else:
            q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 2)
        return (*rope_ref(q, k, table=table), v)

    check(ours, plain, plain, {"qkv": qkv.requires_grad_()})
    for flat, apart in zip(ours(qkv, flat=True), ours(qkv), strict=True):
        assert torch.equal(flat, apart) and flat.is_contiguous()
    # only one result used: the others' gradients are zeros
    (dqkv,) = torch.autograd.grad(ours(qkv)[2].sum(), qkv)
    assert dqkv.sum() == 2 * 2 * num_kv_heads * 8


def test_slices_of_packed_qkv_and_mixed_dtypes(device: torch.device) -> None:
    packed = torch.randn(2, 3, 4, 3, 8, device=device)
    q, k = (packed[..., i, :].detach() for i in (0, 1))
    _check(q, k, rope_table(8, 3, device=device))
    _check(q.bfloat16(), k, rope_table(8, 3, device=device))


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8)])
def test_empty(shape: tuple[int, ...], device: torch.device) -> None:
    q = torch.randn(shape, device=device, requires_grad=True)
    k = torch.randn(*shape[:2], 1, 8, device=device)
    y, _ = rope(q, k, table=rope_table(8, 3, device=device))
    y.sum().backward()
    assert y.shape == shape and q.grad.shape == shape


@pytest.mark.kernels
def test_saves_only_the_table(device: torch.device) -> None:
    q = torch.randn(1, 3, 2, 8, device=device, requires_grad=True)
    table = rope_table(8, 3, device=device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rope(q, table=table)
    assert {t.data_ptr() for t in saved} == {table.cos.data_ptr(), table.sin.data_ptr()}


@pytest.mark.kernels
def test_unknown_position_is_nan(device: torch.device) -> None:
    q = torch.randn(1, 3, 2, 8, device=device)
    y = rope(q, table=rope_table(8, 3, device=device), position_ids=torch.tensor([0, 3, -1], device=device))
    assert y[0, 0].isfinite().all() and y[0, 1:].isnan().all()


@pytest.mark.kernels
def test_axis_that_position_ids_do_not_have_is_nan(device: torch.device) -> None:
    table = rope_table(16, 9, scheme=MRoPE((4, 2, 2)), device=device)
    # the memory behind the two axes holds positions that the table has
    ids = torch.zeros(3, 1, 5, dtype=torch.int64, device=device)[:2]
    y = rope(torch.randn(1, 5, 2, 16, device=device), table=table, position_ids=ids)
    assert y.unflatten(-1, (2, 8))[..., :6].isfinite().all() and y.unflatten(-1, (2, 8))[..., 6:].isnan().all()


def test_errors(device: torch.device) -> None:
    q, table = torch.randn(2, 3, 4, 8, device=device), rope_table(8, 3, device=device)
    with pytest.raises(ValueError, match=r"rope: k must have shape \[2, 3, 1, 8\] \(that of q, but for the heads\)"):
        rope(q, torch.randn(3, 2, 1, 8, device=device), table=table)
    with pytest.raises(ValueError, match="rope: table must have positions 1 to 3, got 0 to 2"):
        rope(q, table=table, offset=1)
    with pytest.raises(ValueError, match="rope: table must rotate at most the head dim 8, got 10"):
        rope(q, table=rope_table(10, 3, device=device))
    with pytest.raises(ValueError, match="layout must be one of 'bshd', 'sbhd', 'thd', got 'hsbd'"):
        rope(q, table=table, layout="hsbd")
    with pytest.raises(ValueError, match="q must have 3 dims for thd, got 4"):
        rope(q, table=table, layout="thd")
    with pytest.raises(ValueError, match=r"position_ids must have shape \[2, 3\], got \[4, 3\]"):
        rope(q, table=table, position_ids=torch.zeros(4, 3, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="offset must be int32 or int64, got float32"):
        rope(q, table=table, offset=torch.zeros(2, device=device))
    with pytest.raises(ValueError, match=r"offset must have shape \[2\] \(one per sequence\), got \[3\]"):
        rope(q, table=table, offset=torch.zeros(3, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="cu_seqlens must come with layout thd, got 'bshd'"):
        rope(q, table=table, cu_seqlens=torch.zeros(3, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads 3, got 4"):
        rope_qkv(q, table=table, num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"qkv must have 6 heads \(num_heads \+ 2 \* num_kv_heads\), got shape"):
        rope_qkv(q, table=table, num_heads=2)
    with pytest.raises(ValueError, match="rotary_dim must be even and above 0, got 7"):
        rope_table(7, 3)
    for scheme in (Linear(0.0), MRoPE((2, 1, 1), scheme=Linear(0.0))):
        with pytest.raises(ValueError, match=r"rope_table: scheme.factor must be a number above 0 and finite, got 0.0"):
            rope_table(8, 4, scheme=scheme)
    with pytest.raises(ValueError, match=r"scheme.sections, added up, must have shape \[4\] \(rotary_dim / 2\), got"):
        rope_table(8, 3, scheme=MRoPE((1, 2)))


# each scheme beside its paper's formula, pair by pair, in double precision
R, BASE = 64, 10000.0
PLAIN = BASE ** -(np.arange(R // 2) * 2 / R)


def _yarn_pair(c: int, factor: float, length: int) -> float:
    def pair_of(turns: float) -> float:
        return R * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(BASE))

    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), R - 1)
    interpolated = min(max((c - low) / (high - low), 0), 1)
    return PLAIN[c] / factor * interpolated + PLAIN[c] * (1 - interpolated)


def _llama3_pair(f: float) -> float:
    wavelength = 2 * math.pi / f
    if wavelength < 8192 / 4:
        return f
    if wavelength > 8192:
        return f / 8
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * f / 8 + smooth * f


SHORT, LONG = tuple(1 + c / 32 for c in range(32)), tuple(2 + c for c in range(32))
SCHEMES = {
    "none": (None, PLAIN, 1.0),
    "linear": (Linear(4.0), PLAIN / 4, 1.0),
    "ntk": (NTK(4.0), (BASE * 4 ** (64 / 62)) ** -(np.arange(32) / 32), 1.0),
    "dynamic": (DynamicNTK(2.0, 50), (BASE * (2 * 100 / 50 - 1) ** (64 / 62)) ** -(np.arange(32) / 32), 1.0),
    "dynamic-short": (DynamicNTK(2.0, 200), PLAIN, 1.0),
    "yarn": (YaRN(16.0, 4096), [_yarn_pair(c, 16, 4096) for c in range(32)], 0.1 * math.log(16) + 1),
    "yarn-deepseek": (
        YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=0.5),
        [_yarn_pair(c, 40, 4096) for c in range(32)],
        (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1),
    ),
    "llama3": (Llama3(), [_llama3_pair(f) for f in PLAIN], 1.0),
    "longrope-short": (LongRoPE(SHORT, LONG, 128, factor=8.0), PLAIN / SHORT, (1 + math.log(8, 128)) ** 0.5),
    "longrope-long": (LongRoPE(SHORT, LONG, 64, factor=8.0), PLAIN / LONG, (1 + math.log(8, 64)) ** 0.5),
    "mrope": (MRoPE((16, 8, 8), scheme=Linear(2.0)), PLAIN / 2, 1.0),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes(name: str) -> None:
    scheme, inv_freq, attention_factor = SCHEMES[name]
    table = rope_table(R, 100, base=BASE, scheme=scheme)
    angles = np.arange(100)[:, None] * np.asarray(inv_freq)
    np.testing.assert_allclose(table.cos.numpy(), np.cos(angles) * attention_factor, atol=3e-5)
    np.testing.assert_allclose(table.sin.numpy(), np.sin(angles) * attention_factor, atol=3e-5)
    assert table.cos.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.usefixtures("most_gpu_memory")
def test_more_than_2_31_elements(device: torch.device) -> None:
    q = torch.randn(1 << 17, 129, 128, device=device, dtype=torch.bfloat16)
    table = rope_table(128, 1 << 17, device=device)
    tail = rope(q[-2:], table=table, layout="thd", offset=(1 << 17) - 2)
    assert torch.equal(rope(q, table=table, layout="thd")[-2:], tail)


def _inplace(q: Tensor, k: Tensor | None, **options: Any) -> Any:
    """`rope` in place, of copies: the caller's are leaves."""
    copies = [None if x is None else x.clone(memory_format=torch.preserve_format) for x in (q, k)]
    turned = rope(*copies, inplace=True, **options)  # type: ignore[arg-type]
    for copy, made in zip(copies, (turned,) if k is None else turned, strict=False):
        assert torch.equal(copy, made) and (made.requires_grad or made is copy)
    return turned


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("head_dim, rotary_dim", [(16, 16), (80, 48), (10, 6)])
def test_inplace(head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype, device: torch.device) -> None:
    table = rope_table(rotary_dim, 3, device=device)
    q, k = (torch.randn(2, 3, heads, head_dim, device=device).to(dtype).requires_grad_() for heads in (5, 2))

    def call(function: Any) -> Any:
        return lambda q, k, cos, sin: function(q, k, table=RopeTable(cos, sin), interleaved=interleaved)

    check(call(_inplace), call(rope_ref), call(rope_ref), {"q": q, "k": k, "cos": table.cos, "sin": table.sin})
    with torch.no_grad():
        for ours, exact in zip(call(_inplace)(q, k, *table[:2]), call(rope)(q, k, *table[:2]), strict=True):
            assert torch.equal(ours, exact)


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_inplace_into_slices_of_a_packed_qkv(layout: str, device: torch.device) -> None:
    table = rope_table(8, 16, device=device)
    qkv = torch.randn(6, 1, 5, 8, device=device)[:, 0] if layout == "thd" else torch.randn(6, 2, 5, 8, device=device)
    options: dict[str, Any] = {"table": table, "layout": layout}
    if layout == "thd":
        options["cu_seqlens"] = torch.tensor([0, 2, 6], device=device)
    q, k, v = qkv.split((3, 1, 1), -2)
    expected, kept = rope(q.clone(), k.clone(), **options), v.clone()
    rope(q, k, inplace=True, **options)
    for wanted, found in zip((*expected, kept), qkv.split((3, 1, 1), -2), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("frozen", ["q", "k", "neither"])
def test_inplace_gradients_reach_the_projection(frozen: str, device: torch.device) -> None:
    table = rope_table(8, 4, device=device)
    x = torch.randn(2, 4, 6, device=device)
    weight = torch.randn(32, 6, device=device)
    grads = []
    for inplace in (False, True):
        leaf = weight.clone().requires_grad_()
        q, k = (x @ leaf.T).unflatten(-1, (4, 8)).split((3, 1), -2)
        q, k = (t.detach() if frozen == name else t for name, t in (("q", q), ("k", k)))
        q, k = rope(q, k, table=table, inplace=inplace)
        (q.square().sum() + (k**3).sum()).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


def test_inplace_of_a_strided_head_dim(device: torch.device) -> None:
    table = rope_table(8, 4, device=device)
    q = torch.randn(2, 4, 3, 16, device=device)[..., ::2]
    expected = rope(q.clone(), table=table)
    assert rope(q, table=table, inplace=True) is q and torch.equal(q, expected)


def test_inplace_after_an_op_that_saved_its_result_raises_in_backward(device: torch.device) -> None:
    table = rope_table(8, 4, device=device)
    q = torch.randn(1, 4, 2, 8, device=device, requires_grad=True).exp()  # whose backward reads its result
    turned = rope(q, table=table, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        turned.sum().backward()


def test_inplace_compiled(device: torch.device) -> None:
    table = rope_table(8, 4, device=device)
    q = torch.randn(1, 4, 2, 8, device=device)
    expected = rope(q.clone(), table=table)

    def function(q: Tensor) -> Any:
        return rope(q, table=table, inplace=True) * 1

    found = torch.compile(function, fullgraph=True, backend="aot_eager")(q)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(q, expected)


# S of 0: the stride of the batch is 0 in what PyTorch's operators allocate
def test_inplace_of_empty_tensors(device: torch.device) -> None:
    q, k = torch.empty_strided((2, 0, 1, 8), (0, 8, 0, 1), device=device), torch.randn(2, 0, 3, 8, device=device)
    turned = rope(q, k, table=rope_table(8, 4, device=device), inplace=True)
    assert turned[0] is q and turned[1] is k


def test_numbers_of_heads_may_be_symbolic(device: torch.device) -> None:
    table = rope_table(8, 4, device=device)

    def function(qkv: Tensor, heads: int, kv_heads: int) -> Any:
        return rope_qkv(qkv, table=table, num_heads=heads, num_kv_heads=kv_heads)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for heads, kv_heads in ((4, 2), (9, 3)):
        qkv = torch.randn(2, 4, heads + 2 * kv_heads, 8, device=device)
        torch.testing.assert_close(compiled(qkv, heads, kv_heads), function(qkv, heads, kv_heads))


def test_inplace_repeated(device: torch.device) -> None:
    """From the third call on launches are replayed: into that call's tensors, not into the recorded ones."""
    table = rope_table(8, 4, device=device)
    for _ in range(5):
        q = torch.randn(1, 4, 2, 8, device=device)
        expected, version = rope(q.clone(), table=table), q._version
        rope(q, table=table, inplace=True)
        assert torch.equal(q, expected) and q._version > version


def test_inplace_refuses(device: torch.device) -> None:
    table = rope_table(8, 4, device=device)
    leaf = torch.randn(1, 4, 2, 8, device=device, requires_grad=True)
    q = leaf.detach().clone()
    with pytest.raises(ValueError, match="k must be no leaf that requires a gradient"):
        rope(q, leaf, table=table, inplace=True)
    with pytest.raises(ValueError, match="q must have no elements that share memory"):
        rope(q[:, :, :1].expand(1, 4, 3, 8), table=table, inplace=True)
    with pytest.raises(ValueError, match="k must lie in other memory than q"):
        rope(q, q, table=table, inplace=True)
    with pytest.raises(ValueError, match="q must be no leaf that requires a gradient, nor a view of one"):
        rope(leaf[:, :, :1], table=table, inplace=True)


def test_inplace_refuses_slices_that_overlap(device: torch.device) -> None:
    table = rope_table(8, 4, device=device)
    packed = torch.randn(2, 4, 6, 8, device=device)
    for q, k in (
        (packed[:, :, :4], packed[:, :, 3:]), (packed[:, :, 3:], packed[:, :, :4]),
        (packed[:, :, :3], packed[:, :, :3]),
        (packed.view(2, 4, -1)[..., :16].view(2, 4, 2, 8), packed.view(2, 4, -1)[..., 12:28].view(2, 4, 2, 8)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="k must lie in other memory than q"):
            rope(q, k, table=table, inplace=True)
    # heads that take turns, that follow each other, and that lie ahead of the sequence
    across = packed.view(2, 6, 4, 8).transpose(1, 2)
    for q, k in (
        (packed[:, :, 0::2], packed[:, :, 1::2]), (packed[:, :, :4], packed[:, :, 4:]),
        (packed[:, :, 4:], packed[:, :, :4]), (across[:, :, :4], across[:, :, 4:]),
        (across[:, :2, :3], across[:, 2:, :3]), (packed[:1], packed[1:]),
    ):  # fmt: skip
        expected = [t.clone() for t in rope(q, k, table=table)]
        for ours, exact in zip(rope(q, k, table=table, inplace=True), expected, strict=True):
            assert torch.equal(ours, exact)


def test_tables_that_cannot_be_are_refused() -> None:
    for base in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"rope_table: base must be (above 0 and )?finite"):
            rope_table(8, 4, base=base)
    with pytest.raises(ValueError, match=r"rope_table: scheme must be Linear, NTK, .* got {'rope_type': 'linear'}"):
        rope_table(8, 4, scheme={"rope_type": "linear"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rope: table must be one that rope_table made, got a tuple"):
        rope(torch.randn(1, 2, 1, 8), table=tuple(rope_table(8, 4)[:2]))  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", [NTK(2.0), DynamicNTK(2.0, 64)])
def test_ntk_needs_two_pairs(scheme: Any) -> None:
    """Of one pair there is none to keep while the slowest is interpolated."""
    with pytest.raises(ValueError, match="rotary_dim must be 4 or more with NTK scaling, got 2"):
        rope_table(2, 128, scheme=scheme)


def test_tables_under_another_default_device() -> None:
    with torch.device("meta"):
        assert rope_table(8, 16).cos.is_meta
        table = rope_table(8, 16, device="cpu")
    assert torch.equal(table.cos, rope_table(8, 16).cos)


@pytest.mark.kernels
def test_a_table_made_in_inference_mode_trains(device: torch.device) -> None:
    with torch.inference_mode():
        table = rope_table(16, 8, device=device)
    q = torch.randn(1, 8, 2, 16, device=device, requires_grad=True)
    rope(q, table=table).sum().backward()
    assert q.grad is not None


@pytest.mark.skipif(settings().interpret, reason="a kernel gives NaN")
@pytest.mark.parametrize("wrong", [-1, 8])
def test_a_position_that_the_table_lacks_is_named_on_a_cpu(wrong: int) -> None:
    q, ids = torch.randn(1, 2, 1, 16), torch.tensor([[3, wrong]])
    words = rf"rope: positions must be in \[0, 8\), the table's, got {wrong}"
    for scheme, given in ((None, ids), (MRoPE((3, 3, 2)), ids.expand(3, 1, 2))):
        with pytest.raises(IndexError, match=words):
            rope(q, table=rope_table(16, 8, scheme=scheme), position_ids=given)
    with pytest.raises(IndexError, match=words):
        rope(q[:, :1], table=rope_table(16, 8), offset=torch.tensor([wrong]))
