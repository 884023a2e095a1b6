"""Operands: strides and heads of every layout, made once a call; how far `query` travels to the first launch."""

import random
import sys
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from powertrain.ops.attention import attention, attention_backend, varlen_attention
from powertrain.ops.attention.operands import OpArguments, Operand, Operands, expanded_dim, one_head
from powertrain.ops.attention.problem import Layout
from powertrain.runtime.launch import Kernel
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings

LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def _args(layout: Layout, starts: Tensor | None) -> OpArguments:
    tensors: list[Tensor | None] = [None] * 11
    tensors[6] = tensors[7] = starts
    return OpArguments(*tensors, layout, 1.0, 0.0, 0.0, -1, -1, 0, False)  # type: ignore[arg-type]


def _tensors(layout: Layout, draws: random.Random, b: int, sq: int, sk: int) -> tuple[Tensor, Tensor]:
    """Query and key of random heads, in random memory order, their elements numbered; key heads may be expanded."""
    kv, repeats, d = draws.choice((1, 2, 3)), draws.choice((1, 2, 3)), draws.choice((1, 4))

    def numbered(*shape: int) -> Tensor:
        order = [*draws.sample(range(len(shape) - 1), len(shape) - 1), len(shape) - 1]
        flat = torch.arange(torch.Size(shape).numel()).view([shape[n] for n in order])
        return flat.permute([order.index(n) for n in range(len(shape))])

    expands = draws.random() < 0.5
    if layout == "bmghk":
        q, k = numbered(b, sq, kv, repeats, d), numbered(b, sk, kv, repeats, d)
        dim = draws.choice((2, 3))
        return q, k.narrow(dim, 0, 1).expand(k.shape) if expands else k
    order = {"bshd": "bsh", "bhsd": "bhs", "sbhd": "sbh", "thd": "sh"}[layout]
    q = numbered(*({"b": b, "s": sq, "h": kv * repeats}[letter] for letter in order), d)
    k = numbered(*({"b": b, "s": sk, "h": kv}[letter] for letter in order), d)
    if expands:
        dim = order.index("h")
        k = k.narrow(dim, 0, 1).expand(*(q.shape[n] if n == dim else k.shape[n] for n in range(k.dim())))
    return q, k


def _element(x: Tensor, layout: Layout, b: int, s: int, head: int) -> int:
    """The first channel, `head` counted as the caller counts."""
    if layout == "bmghk":
        return int(x[b, s].flatten(0, 1)[head, 0])
    return int({"bshd": lambda: x[b, s, head], "bhsd": lambda: x[b, head, s], "sbhd": lambda: x[s, b, head],
                "thd": lambda: x[s, head]}[layout]()[0])  # fmt: skip


def _read(operand: Operand, *index: int) -> int:
    """The element at (batch, position, kv head, query head of it) in memory."""
    strides = (operand.b, operand.s, operand.h, operand.r)
    offset = operand.tensor.storage_offset() + sum(i * s for i, s in zip(index, strides, strict=True))
    return int(operand.tensor.as_strided((1,), (1,), offset))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_reach_the_elements_of_the_layout(layout: Layout) -> None:
    """In every order of dims in memory, with heads that share keys, and with keys that the caller expanded."""
    draws = random.Random(7)
    for _ in range(60):
        b, sq, sk = draws.choice((1, 2)), draws.choice((1, 3)), draws.choice((1, 2, 5))
        q, k = _tensors(layout, draws, b, sq, sk)
        starts = torch.zeros(3, dtype=torch.int32) if layout == "thd" else None
        o = Operands.of(q, k, k, _args(layout, starts))
        storage = 1 if layout == "thd" else b
        assert (o.batch, o.storage, o.queries, o.keys) == (2 if layout == "thd" else b, storage, sq, sk)
        assert o.is_packed == (layout == "thd") and o.d_qk == q.shape[-1]
        kv_heads = k.shape[{"bshd": 2, "bhsd": 1, "sbhd": 2, "thd": 1}[layout]] if layout != "bmghk" else None
        heads = o.heads.kv * o.heads.q_per_kv
        assert o.num_heads == storage * heads
        read = set()
        for n in range(storage):
            for h in range(o.heads.kv):
                for r in range(o.heads.q_per_kv):
                    head = h * o.heads.kv_step + r * o.heads.q_step
                    read.add((n, head))
                    key_head = head if kv_heads is None else head // (heads // kv_heads)
                    assert _read(o.q, n, sq - 1, h, r) == _element(q, layout, n, sq - 1, head)
                    for s in range(sk):
                        assert _read(o.k, n, s, h, r) == _element(k, layout, n, s, key_head), (q.stride(), k.stride())
        assert len(read) == storage * heads  # each head once
        dim = expanded_dim(k, layout, o.heads)
        assert dim is None or (k.stride(dim) == 0 or k.shape[dim] == 1)
        assert torch.equal(one_head(k, layout, o.heads).expand(k.shape), k)


@pytest.mark.skipif(settings().interpret, reason="nothing is recorded under the interpreter")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flops_of_every_layout(layout: Layout) -> None:
    """Forward and backward: 2 * pairs * (d + d), and five products."""
    b, sq, sk, h, d, meta = 2, 6, 5, 4, 8, torch.device("meta")
    order = {"bshd": "bsh", "bhsd": "bhs", "sbhd": "sbh", "thd": "th", "bmghk": "bsgh"}[layout]

    def tensor(length: int) -> Tensor:
        sizes = {"b": b, "s": length, "t": b * length, "h": h if layout != "bmghk" else h // 2, "g": 2}
        return torch.empty(
            [sizes[letter] for letter in order] + [d], device=meta, dtype=torch.bfloat16
        ).requires_grad_()

    q, k, v = tensor(sq), tensor(sk), tensor(sk)
    with record("sm_80"), FlopCounterMode(display=False) as counter:
        if layout == "thd":
            starts = [torch.empty(b + 1, dtype=torch.int32, device=meta) for _ in range(2)]
            out = varlen_attention(q, k, v, *starts, backend="triton")
        else:
            out = attention(q, k, v, layout=layout, backend="triton")
        out.backward(torch.empty_like(out))
    assert counter.get_total_flops() == 2 * b * h * sq * sk * (2 * d + 5 * d)


class _Walk:
    """Functions of ours that receive the query, alone or in a tuple or call, until the first kernel is launched."""

    def __init__(self, query: Tensor) -> None:
        self.query, self.files, self.returns, self.launched = query, [], [], False  # type: ignore[var-annotated]

    def _holds(self, x: Any, depth: int) -> bool:
        if x is self.query or depth == 0:
            return x is self.query
        parts = x if isinstance(x, tuple) else [getattr(x, n, None) for n in getattr(x, "__dataclass_fields__", ())]
        return any(self._holds(part, depth - 1) for part in parts)

    def __call__(self, frame: Any, event: str, value: Any) -> None:
        code = frame.f_code
        file = code.co_filename.rpartition("/powertrain/")[2]
        if self.launched or file == code.co_filename or event not in ("call", "return"):
            return
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)
        given = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
        if file == "runtime/checks.py" or not any(self._holds(x, 2) for x in given):
            return
        if event == "call" and file not in self.files:
            self.files.append(file)
        # from one file to another, of the query or the call; what is asked of the operands are numbers
        of_query = any(self._holds(x, 1) for x in given if not isinstance(x, Operands))
        caller = frame.f_back.f_code.co_filename
        if event == "return" and of_query and file.startswith("ops") and caller != code.co_filename:
            if value is not None and not self.launched:
                self.returns.append(code.co_qualname if sys.version_info >= (3, 11) else code.co_name)


@pytest.mark.skipif(settings().interpret, reason="Gluon has no interpreter")
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_query_goes_straight_to_the_launch(backend: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most ten files, and three functions that hand something made of it back to another file; two more of each
    where its tensor map is made."""
    meta = torch.device("meta")
    q, k, v = (torch.empty(2, 512, 4, 64, dtype=torch.bfloat16, device=meta) for _ in range(3))
    call: Callable[[], Any] = lambda: attention(q, k, v, is_causal=True)  # noqa: E731
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        starts = torch.empty(3, dtype=torch.int32, device=meta)
        call = lambda: varlen_attention(q, k, v, starts, is_causal=True)  # noqa: E731
    walk = _Walk(q)
    with record("sm_90"), attention_backend(backend):
        call()  # the choice is made and kept

        def getitem(kernel: Kernel, grid: Any) -> Any:
            walk.launched = True
            return lambda *args, **options: None

        monkeypatch.setattr(Kernel, "__getitem__", getitem)
        sys.setprofile(walk)
        try:
            call()
        finally:
            sys.setprofile(None)
    maps = 2 if backend == "hopper" else 0
    assert walk.launched and len(walk.files) <= 10 + maps, walk.files
    assert len(walk.returns) <= 3 + maps, walk.returns


@pytest.mark.parametrize("strides", [(1, 1, 20, 1), (5, 1, 1, 1), (1, 2, 20, 1)])
def test_heads_that_overlap(strides: tuple[int, ...], device: torch.device) -> None:
    """Windows of a signal (unfold): memory like theirs may have its last dim anywhere, and was taken for contiguous."""
    torch.manual_seed(0)
    windows = torch.randn(60, device=device).as_strided((2, 5, 1, 20), strides)
    other = torch.randn(2, 5, 1, 20, device=device)
    for place in range(3):
        pairs = []
        for x in (windows, windows.contiguous()):
            x = x.detach().requires_grad_()
            out = attention(*[x if n == place else other for n in range(3)])
            pairs.append((out, *torch.autograd.grad(out.square().sum(), x)))
        for ours, exact in zip(*pairs, strict=True):
            torch.testing.assert_close(ours, exact)
