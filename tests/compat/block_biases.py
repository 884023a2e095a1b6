"""Random block-diagonal biases of xFormers: every class of keys, in any order, over each other, shared, empty.

`check_bias` holds `memory_efficient_attention`, its LSE and its two backwards against the bias's own matrix in float64.
Rows of no block hold NaN.
"""

import random
from typing import Any

import torch
from torch import Tensor

from powertrain.compat.xformers.ops import fmha
from powertrain.compat.xformers.ops.fmha import attn_bias as ab
from tests.compat.plain import attend

KINDS = ("gappy", "padded", "paged gappy", "paged padded", "blocks")
_CLASSES: dict[str, tuple[Any, ...]] = {
    "gappy": (
        ab.BlockDiagonalGappyKeysMask,
        ab.BlockDiagonalCausalWithOffsetGappyKeysMask,
        ab.BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask,
    ),
    "padded": (
        ab.BlockDiagonalPaddedKeysMask,
        ab.BlockDiagonalCausalWithOffsetPaddedKeysMask,
        ab.BlockDiagonalLocalAttentionPaddedKeysMask,
    ),
    "paged gappy": (ab.PagedBlockDiagonalGappyKeysMask, ab.PagedBlockDiagonalCausalWithOffsetGappyKeysMask),
    "paged padded": (ab.PagedBlockDiagonalPaddedKeysMask, ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask),
    "blocks": (ab.BlockDiagonalMask,),
}


def draw_bias(kind: str, seed: int, device: torch.device, largest: int = 24) -> tuple[Any, int]:
    """(a bias, rows of keys); every other one has as many queries, and few of them, in each block."""
    rng = random.Random(f"{kind} {seed}")
    blocks = rng.randint(1, 4)
    queries = [rng.randint(0, largest) for _ in range(blocks)]
    if seed % 2:
        queries = [rng.randint(1, 3)] * blocks
    lengths = [rng.choice((0, 1, rng.randint(1, largest))) for _ in range(blocks)]
    cls: Any = rng.choice(_CLASSES[kind])
    local = "Local" in cls.__name__
    make, window = (cls.from_seqlens_local, (5, 2)) if local else (cls.from_seqlens, ())
    if kind == "blocks":
        return cls.from_seqlens(queries, lengths, device=device), sum(lengths)
    if kind == "padded":
        return make(queries, largest + 3, lengths, *window, device=device), blocks * (largest + 3)
    if kind == "gappy":
        rows = rng.randint(largest, blocks * largest)
        starts = [rng.choice((0, rng.randint(0, rows - n))) for n in lengths]
        return make(queries, [*starts, rows], lengths, *window, device=device), rows
    page, pages = 4, blocks * (largest // 4 + 1)
    room = largest // page + 1  # pages of a block, of which blocks may share some
    table = torch.tensor([rng.sample(range(pages), room) for _ in range(blocks)], dtype=torch.int32, device=device)
    if kind == "paged padded":
        return make(queries, lengths, table, page, device=device), pages * page
    starts = [rng.randint(0, room * page - n) for n in lengths]
    return make(queries, starts, lengths, table, page, device=device), pages * page


def _normal(rows: int, heads: tuple[int, ...], d: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(1, rows, *heads, d, device=device).to(dtype)


def _outside(bias: Any, rows: int, device: torch.device) -> Tensor:
    """Which rows of keys are of no block, bool [rows]."""
    outside = torch.ones(rows, dtype=torch.bool, device=device)
    for first, end in bias.k_seqinfo.intervals():
        outside[first:end] = False
    return outside


def check_bias(kind: str, seed: int, device: torch.device, dtype: torch.dtype, d: int = 16, largest: int = 24) -> None:
    torch.manual_seed(seed)
    bias, key_rows = draw_bias(kind, seed, device, largest)
    grouped = seed % 3 == 0
    heads = (2, 3) if grouped else (2,)
    rows = bias.q_seqinfo.seqstart_py[-1]
    q, k, v = (_normal(n, heads, d, device, dtype) for n in (rows, key_rows, key_rows))
    matrix = bias.materialize((rows, key_rows), torch.float64, device)
    if grouped:  # heads of a group share keys, which are expanded and not copied
        k, v = (x[:, :, :, :1].expand(-1, -1, -1, heads[1], -1) for x in (k, v))
    exact = [x.double().flatten(2, -2).detach().requires_grad_() for x in (q, k, v)]
    out, lse = attend(*exact, matrix)
    if kind in ("gappy", "padded") and not grouped:
        k, v = (x.masked_fill(_outside(bias, key_rows, device)[None, :, None, None], torch.nan) for x in (k, v))
    what = f"{kind} seed {seed} {dtype}: {bias}"
    with torch.no_grad():  # few queries: decoding
        few = fmha.memory_efficient_attention_partial(q, k, v, bias)
    _same("out", few[0].flatten(2, -2), out, dtype, what)
    _same("lse", few[1].flatten(1, -2), lse, dtype, what)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, exact, grad)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    found = fmha.memory_efficient_attention(*leaves, bias)
    given = grad.to(dtype).view_as(found)
    grads = torch.autograd.grad(found, leaves, given)
    again = fmha.memory_efficient_attention_backward(
        given, out.detach().to(dtype).view_as(found), lse.detach().float().view(few[1].shape), q, k, v, bias
    )
    _same("out of training", found.flatten(2, -2), out, dtype, what)
    for way, all_three in (("autograd", grads), ("backward", again)):
        for name, x, y in zip(("dq", "dk", "dv"), all_three, expected, strict=True):
            if grouped and name != "dq":  # how a shared head's gradient is spread over the copies is not said
                x, y = x.sum(3), y.unflatten(2, heads).sum(3)
            _same(f"{name} of {way}", x.reshape(y.shape), y, dtype, what)


def _same(name: str, x: Tensor, y: Tensor, dtype: torch.dtype, what: str) -> None:
    x, y = x.detach().double(), y.detach()
    assert torch.equal(x.isfinite(), y.isfinite()), f"{name} not finite where it should be: {what}"
    tolerance = {torch.float64: 1e-6, torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    x, y = x[y.isfinite()], y[y.isfinite()]
    if y.numel():
        error = ((x - y).abs().max() / y.abs().max().clamp(min=1)).item()
        assert error <= tolerance, f"{name} off by {error:.1e}: {what}"
