"""TransformerEngine's DotProductAttention against plain PyTorch: formats, masks, biases, softmaxes, switches."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.compat.transformer_engine import DotProductAttention
from powertrain.compat.transformer_engine.pytorch.attention import dot_product_attention as te
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from tests.compat.plain import attend, band, same, tensors

pytestmark = pytest.mark.usefixtures("on_cpu")

MASKS = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
Q, KV = [3, 0, 5], [4, 2, 3]  # lengths of three sequences


def _cu(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _seen(
    mask_type: str, queries: int, keys: int, window: tuple[int, int] | None = None, diagonal: bool | None = None
) -> Tensor:
    left, right = window or (-1, -1)
    top_left = diagonal is False
    if "causal" in mask_type:
        right, top_left = 0, not mask_type.endswith("bottom_right")
    return band(queries, keys, left=left, right=right, top_left=top_left)


def _expected(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[tuple[int, int]], mask_type: str, **options: Any
) -> Tensor:
    """bshd, sequence by sequence; zeros beyond each."""
    window, diagonal = options.pop("window", None), options.pop("diagonal", None)
    bias = options.pop("bias", None)
    outs = []
    for n, (sq, sk) in enumerate(lengths):
        seen = _seen(mask_type, sq, sk, window, diagonal)
        scores = torch.zeros(sq, sk, dtype=q.dtype).masked_fill(~seen, -torch.inf)
        if bias is not None:
            scores = scores + bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])[n, :, :sq, :sk]
        out, _ = attend(q[n : n + 1, :sq], k[n : n + 1, :sk], v[n : n + 1, :sk], scores, **options)
        outs.append(torch.nn.functional.pad(out, (0, 0, 0, 0, 0, q.shape[1] - sq)))
    return torch.cat(outs).flatten(2)


def _dense(layout: str) -> list[Tensor]:
    shapes = [(3, 5, 4, 8), (3, 6, 2, 8), (3, 6, 2, 6)]
    return tensors(*(s if layout == "bshd" else (s[1], s[0], *s[2:]) for s in shapes))


@pytest.mark.parametrize("window", [None, (2, 0), (1, 2)], ids=str)
@pytest.mark.parametrize("mask_type", MASKS)
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_dense(layout: str, mask_type: str, window: tuple[int, int] | None) -> None:
    module = DotProductAttention(4, (8, 6), num_gqa_groups=2, qkv_format=layout, attn_mask_type=mask_type)
    padded = "padding" in mask_type
    cu = {"cu_seqlens_q": _cu(Q), "cu_seqlens_kv": _cu(KV)} if padded else {}
    lengths = list(zip(Q, KV, strict=True)) if padded else [(5, 6)] * 3
    swap = (lambda x: x) if layout == "bshd" else (lambda x: x.transpose(0, 1))
    same(
        lambda *x: module(*x, window_size=window, **cu),
        lambda *x: swap(_expected(*(swap(t) for t in x), lengths, mask_type, window=window)),
        _dense(layout),
    )


@pytest.mark.parametrize("mask_type", MASKS)
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_dense_takes_cu_seqlens_with_every_mask(layout: str, mask_type: str) -> None:
    """As there: of the types with padding they say the lengths, of others nothing; *_padded says nothing."""
    module = DotProductAttention(4, (8, 6), num_gqa_groups=2, qkv_format=layout, attn_mask_type=mask_type)
    cu = {"cu_seqlens_q": _cu(Q), "cu_seqlens_kv": _cu(KV)}
    padded = {"cu_seqlens_q_padded": _cu([5] * 3), "cu_seqlens_kv_padded": _cu([6] * 3)}
    needed = cu if "padding" in mask_type else {}
    same(lambda *x: module(*x, **cu, **padded), lambda *x: module(*x, **needed), _dense(layout))


@pytest.mark.parametrize("sides", ["cu mask", "mask cu", "cu cu", "mask mask"])
@pytest.mark.parametrize("mask_type", [m for m in MASKS if "padding" in m])
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_each_side_has_its_lengths_from_cu_seqlens_or_its_mask(layout: str, mask_type: str, sides: str) -> None:
    """As there: a side's cu_seqlens come before its mask."""
    module = DotProductAttention(
        4, (8, 6), num_gqa_groups=2, qkv_format=layout, attn_mask_type=mask_type, attention_type="cross"
    )
    given: dict[str, Any] = {}
    masks = []
    for side, (name, lengths, size) in zip(sides.split(), (("q", Q, 5), ("kv", KV, 6)), strict=True):
        if side == "cu":
            given[f"cu_seqlens_{name}"] = _cu(lengths)
        wrong = [0] * 3 if side == "cu" else lengths  # not looked at
        masks.append(torch.arange(size)[None, None, None] >= torch.tensor(wrong)[:, None, None, None])
    cu = {"cu_seqlens_q": _cu(Q), "cu_seqlens_kv": _cu(KV)}
    same(lambda *x: module(*x, attention_mask=tuple(masks), **given), lambda *x: module(*x, **cu), _dense(layout))


def test_thd_has_defaults_for_the_longest_and_does_not_look_at_a_mask() -> None:
    module = DotProductAttention(4, (8, 6), num_gqa_groups=2, qkv_format="thd", attn_mask_type="padding_causal")
    cu = {"cu_seqlens_q": _cu(Q), "cu_seqlens_kv": _cu(KV)}
    inputs = tensors((sum(Q), 4, 8), (sum(KV), 2, 8), (sum(KV), 2, 6))
    for longest in ({"max_seqlen_q": 64}, {"max_seqlen_kv": 64}, {"max_seqlen_q": 5, "max_seqlen_kv": 4}):
        mask = torch.ones(3, 1, 1, 5, dtype=torch.bool)
        same(lambda *x, o=longest, m=mask: module(*x, attention_mask=m, **cu, **o), lambda *x: module(*x, **cu), inputs)


@pytest.mark.parametrize("mask_type", [m for m in MASKS if "padding" in m])
@pytest.mark.parametrize("apart", [False, True], ids=["close", "apart"])
def test_thd(mask_type: str, apart: bool) -> None:
    module = DotProductAttention(4, (8, 6), num_gqa_groups=2, qkv_format="thd", attn_mask_type=mask_type)
    starts = [[0, 4, 4, 11], [0, 5, 7, 11]] if apart else [_cu(Q).tolist(), _cu(KV).tolist()]
    rows = [[slice(a, a + n) for a, n in zip(s, x, strict=False)] for s, x in zip(starts, (Q, KV), strict=True)]
    options: dict[str, Any] = {"cu_seqlens_q": _cu(Q), "cu_seqlens_kv": _cu(KV), "max_seqlen_q": 5, "max_seqlen_kv": 4}
    if apart:
        cu = [torch.tensor(s).int() for s in starts]
        options |= {"cu_seqlens_q_padded": cu[0], "cu_seqlens_kv_padded": cu[1], "pad_between_seqs": True}

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros(q.shape[0], 24, dtype=q.dtype)
        for n in range(3):
            one = (q[None, rows[0][n]], k[None, rows[1][n]], v[None, rows[1][n]])
            out = out.index_copy(0, torch.arange(len(out))[rows[0][n]], _expected(*one, [(Q[n], KV[n])], mask_type)[0])
        return out

    total = [s[-1] + 1 for s in starts] if apart else [sum(Q), sum(KV)]
    inputs = tensors((total[0], 4, 8), (total[1], 2, 8), (total[1], 2, 6))
    same(lambda *x: module(*x, **options), plain, inputs)


def test_deepseek_v3_training() -> None:
    """thd, 192/128, padding_causal: the case for which TransformerEngine 2.3 finds no backend on an A100."""
    module = DotProductAttention(
        4, (192, 128), qkv_format="thd", attn_mask_type="padding_causal", softmax_scale=0.07, layer_number=3
    )
    inputs = tensors((40, 4, 192), (40, 4, 192), (40, 4, 128))
    cu = _cu([29, 11])

    def one(rows: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = [(rows.stop - rows.start,) * 2]
        return _expected(q[None, rows], k[None, rows], v[None, rows], lengths, "causal", scale=0.07)[0]

    same(
        lambda *x: module(*x, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=29, max_seqlen_kv=29),
        lambda *x: torch.cat([one(slice(0, 29), *x), one(slice(29, 40), *x)]),
        inputs,
    )


@pytest.mark.skipif(settings().interpret, reason="the interpreter runs kernels, it records none")
def test_deepseek_v3_on_an_a100_with_two_switches_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call for which TransformerEngine says that no backend is available has kernels, forward and backward."""
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    module = DotProductAttention(64, (192, 128), qkv_format="thd", attn_mask_type="padding_causal")
    q, k, v = (torch.empty(1000, 64, d, device="meta", dtype=torch.bfloat16) for d in (192, 192, 128))
    cu = torch.empty(3, device="meta", dtype=torch.int32)
    with record("sm_80") as wanted:
        out = module(
            q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), cu_seqlens_q=cu, cu_seqlens_kv=cu,
            max_seqlen_q=588, max_seqlen_kv=588,
        )  # fmt: skip
        forward = len(wanted)
        grads = torch.autograd.grad(out, [q, k, v], torch.empty_like(out))
    assert out.shape == (1000, 64 * 128) and [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert 0 < forward < len(wanted)


@pytest.mark.parametrize("mask_type", [m for m in MASKS if "padding" in m])
def test_padding_masks(mask_type: str) -> None:
    module = DotProductAttention(4, (8, 6), num_gqa_groups=2, qkv_format="bshd", attention_type="cross")
    masks = tuple((torch.arange(s) >= torch.tensor(x)[:, None])[:, None, None] for s, x in ((5, Q), (6, KV)))
    same(
        lambda *x: module(*x, attention_mask=masks, attn_mask_type=mask_type),
        lambda *x: _expected(*x, list(zip(Q, KV, strict=True)), mask_type),
        _dense("bshd"),
    )


@pytest.mark.parametrize("mask_type", ["padding", "padding_causal"])
def test_padding_anywhere(mask_type: str) -> None:
    """On the left and in the middle; one mask for queries and keys."""
    module = DotProductAttention(2, 8, qkv_format="bshd", attn_mask_type=mask_type)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 0, 0, 1]]).bool()
    seen = ~mask[:, None, None] & ~mask[:, None, :, None] & _seen(mask_type, 5, 5)
    same(
        lambda *x: module(*x, attention_mask=mask[:, None, None]),
        lambda *x: attend(*x, seen)[0].flatten(2),
        tensors((2, 5, 2, 8), (2, 5, 2, 8), (2, 5, 2, 8)),
    )


@pytest.mark.parametrize("kind", ["no_bias", "pre_scale_bias", "post_scale_bias"])
def test_arbitrary(kind: str) -> None:
    module = DotProductAttention(4, (8, 6), num_gqa_groups=2, qkv_format="bshd", attn_mask_type="arbitrary")
    mask = torch.rand(3, 1, 5, 6) < 0.4
    (bias,) = tensors((1, 4, 5, 6))
    given = None if kind == "no_bias" else bias
    factor = {"no_bias": 0.0, "pre_scale_bias": 8**-0.5, "post_scale_bias": 1.0}[kind]
    same(
        lambda q, k, v, b: module(
            q,
            k,
            v,
            attention_mask=mask,
            core_attention_bias_type=kind,
            core_attention_bias=None if given is None else b,
        ),
        lambda q, k, v, b: attend(q, k, v, (b * factor).masked_fill(mask, -torch.inf))[0].flatten(2),
        [*_dense("bshd"), bias if given is not None else bias.detach()],
    )


@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "padding"])
@pytest.mark.parametrize("shape", [(1, 4, 5, 6), (3, 4, 5, 6), (3, 1, 5, 6), (1, 1, 5, 6), (1, 1, 1, 6)], ids=str)
def test_bias(mask_type: str, shape: tuple[int, ...]) -> None:
    module = DotProductAttention(4, (8, 6), num_gqa_groups=2, qkv_format="bshd", attn_mask_type=mask_type)
    lengths = list(zip(Q, KV, strict=True)) if mask_type == "padding" else [(5, 6)] * 3
    cu = {"cu_seqlens_q": _cu(Q), "cu_seqlens_kv": _cu(KV)} if mask_type == "padding" else {}
    same(
        lambda q, k, v, b: module(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=b, **cu),
        lambda q, k, v, b: _expected(q, k, v, lengths, mask_type, bias=b),
        [*_dense("bshd"), *tensors(shape)],
    )


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("mask_type", ["causal", "causal_bottom_right", "no_mask"])
def test_alibi(mask_type: str, heads: int) -> None:
    module = DotProductAttention(heads, 8, qkv_format="bshd", attn_mask_type=mask_type)
    inputs = tensors((2, 5, heads, 8), (2, 7, heads, 8), (2, 7, heads, 8))
    known = {4: [1 / 4, 1 / 16, 1 / 64, 1 / 256], 6: [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]}[heads]
    offset = 0 if mask_type == "causal" else 2
    distance = (torch.arange(5)[:, None] + offset - torch.arange(7)).abs()
    for slopes in (None, torch.rand(heads), torch.rand(2, heads)):
        values = torch.tensor(known) if slopes is None else slopes
        bias = -values.double().reshape(-1, heads, 1, 1) * distance
        same(
            lambda *x, s=slopes: module(*x, core_attention_bias_type="alibi", alibi_slopes=s),
            lambda *x, b=bias: _expected(*x, [(5, 7)] * 2, mask_type, bias=b),
            inputs,
        )


def test_softmax_types() -> None:
    inputs = _dense("bshd")
    module = DotProductAttention(4, (8, 6), 2, qkv_format="bshd", softmax_type="off-by-one")
    zeros = torch.zeros(4, dtype=torch.float64)
    same(module, lambda *x: _expected(*x, [(5, 6)] * 3, "causal", sinks=zeros), inputs)
    assert not module.state_dict()
    module = DotProductAttention(4, (8, 6), 2, qkv_format="bshd", softmax_type="learnable").double()
    (sinks,) = tensors((4,))
    same(
        lambda q, k, v, s: torch.func.functional_call(module, {"softmax_offset": s}, (q, k, v)),
        lambda q, k, v, s: _expected(q, k, v, [(5, 6)] * 3, "causal", sinks=s),
        [*inputs, sinks],
    )
    assert list(module.state_dict()) == ["softmax_offset"]


def test_checkpoints_of_transformer_engine_load() -> None:
    module = torch.nn.Sequential(DotProductAttention(4, 8, softmax_type="learnable"))
    state = {"0.softmax_offset": torch.ones(4), "0._extra_state": torch.ones(3), "0.fused_attention._extra_state": None}
    module.load_state_dict(state)
    assert torch.equal(module[0].softmax_offset, torch.ones(4))


def test_packed_inputs() -> None:
    module = DotProductAttention(2, 8, qkv_format="bshd")
    expected = lambda q, k, v: _expected(q, k, v, [(5, 5)] * 2, "causal")  # noqa: E731
    for dim, shape in ((-3, (2, 5, 3, 2, 8)), (-2, (2, 5, 2, 3, 8))):
        same(
            lambda x, d=dim: module(qkv_layer=x, qkv_interleave_dim=d),
            lambda x, d=dim: expected(*x.unbind(d)),
            tensors(shape),
        )
    same(
        lambda q, kv: module(q, kv_layer=kv),
        lambda q, kv: expected(q, *kv.unbind(-3)),
        tensors((2, 5, 2, 8), (2, 5, 2, 2, 8)),
    )


def test_window_from_the_top_left() -> None:
    module = DotProductAttention(4, (8, 6), 2, qkv_format="bshd", attn_mask_type="no_mask", window_size=(1, 1))
    same(
        lambda *x: module(*x, bottom_right_diagonal=False),
        lambda *x: _expected(*x, [(5, 6)] * 3, "no_mask", window=(1, 1), diagonal=False),
        _dense("bshd"),
    )


class _Tracker:
    """A random number tracker as Megatron's."""

    def __init__(self) -> None:
        self.state = torch.Generator().manual_seed(7).get_state()

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(outside)


@pytest.mark.parametrize("again", [False, True], ids=["saved", "recomputed"])
def test_dropout(again: bool) -> None:
    tracker = _Tracker()
    module = DotProductAttention(2, (8, 1), None, 0.25, "bshd", "no_mask", get_rng_state_tracker=lambda: tracker)
    q, k = tensors((1, 64, 2, 8), (1, 256, 2, 8))
    v = torch.ones(1, 256, 2, 1, dtype=torch.float64, requires_grad=True)
    before, state = torch.get_rng_state(), tracker.state
    out = module(q, k, v, checkpoint_core_attention=again)
    assert torch.equal(torch.get_rng_state(), before) and not torch.equal(tracker.state, state)
    assert abs(out.mean().item() - 1) < 0.05 and out.std() > 0.01
    after = tracker.state
    (dv,) = torch.autograd.grad(out.sum(), v)
    # the sum of what was kept, by keys and by queries: the same elements in both
    torch.testing.assert_close(dv.sum(), out.sum())
    assert torch.equal(tracker.state, after)
    assert torch.equal(module.eval()(q, k, v), module(q, k, v)) and (module(q, k, v) - 1).abs().max() < 1e-9


@pytest.mark.parametrize("mask_type", ["causal", "padding"])
def test_recomputation(mask_type: str) -> None:
    module = DotProductAttention(4, (8, 6), 2, qkv_format="bshd", attn_mask_type=mask_type)
    cu = {"cu_seqlens_q": _cu(Q), "cu_seqlens_kv": _cu(KV)} if mask_type == "padding" else {}
    same(
        lambda *x: module(*x, checkpoint_core_attention=True, fast_zero_fill=False, **cu),
        lambda *x: module(*x, **cu),
        _dense("bshd"),
    )


def test_the_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    module = DotProductAttention(4, (8, 6), 2, qkv_format="bshd", attn_mask_type="no_mask", window_size=(3, 2))
    inputs = [x.detach() for x in _dense("bshd")]
    expected = module(*inputs)
    forbidden: list[tuple[str, ...]] = []
    inner = te.attention_backend
    monkeypatch.setattr(te, "attention_backend", lambda *names: forbidden.append(names) or inner(*names))
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "1")
    torch.testing.assert_close(module(*inputs), expected)
    assert forbidden == [("-flash", "-flash-attn-2", "-flash-attn-3", "-flash-attn-4")]
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_DEBUG", "1")
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", "2")
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("DotProductAttention"), "handle", records.append)
    module(*inputs)
    said = "\n".join(record.getMessage() for record in records)
    assert "attention by " in said and "cudnn: " in said and "-cudnn" not in said
    assert "-cudnn" in forbidden[-1] or "cudnn" in str(forbidden[-1])
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert te._deterministic() is True


def test_errors() -> None:
    q, k, v = (x.detach() for x in _dense("bshd"))
    module = DotProductAttention(4, (8, 6), 2, qkv_format="bshd", attn_mask_type="causal,padding")
    assert module.attn_mask_type == "padding_causal"
    cu = {"cu_seqlens_q": _cu(Q), "cu_seqlens_kv": _cu(KV)}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "attention_mask or cu_seqlens_q must be given for 'padding_causal', got None"),
        ({"attn_mask_type": torch.ones(2)}, "attn_mask_type must be the name of a mask, got Tensor"),
        ({"attn_mask_type": "band"}, "attn_mask_type must be one of 'no_mask', .*, got 'band'"),
        ({"cu_seqlens_q": _cu(Q)}, "attention_mask or cu_seqlens_kv must be given for 'padding_causal', got None"),
        ({**cu, "max_seqlen_q": 4}, "max_seqlen_q must be 5, the 's' of qkv_format 'bshd', got 4"),
        ({**cu, "pad_between_seqs": True}, "pad_between_seqs must be False for qkv_format 'bshd', got True"),
        ({**cu, "window_size": (-2, 0)}, "window_size must be two numbers of at least -1"),
        ({"attn_mask_type": "no_mask", "window_size": (-1, 0)}, "window_size must not be causal .*use 'causal'"),
        ({"attn_mask_type": "arbitrary"}, "attention_mask must be a bool tensor for 'arbitrary', .* got NoneType"),
        ({"attn_mask_type": "arbitrary", "attention_mask": torch.ones(5, 6)}, "attention_mask must .* got float32"),
        ({**cu, "core_attention_bias_type": "post_scale_bias"}, "core_attention_bias must be given for"),
        ({**cu, "core_attention_bias": torch.ones(1)}, "core_attention_bias must be None for core_attention_bias_type"),
        ({**cu, "alibi_slopes": torch.ones(4)}, "alibi_slopes must be None for core_attention_bias_type 'no_bias'"),
        ({**cu, "kv_layer": k}, "arguments must be query_layer, key_layer and value_layer, .* got"),
        ({"qkv_format": "thd"}, r"query_layer must have 3 dims \(thd\) that end in \[4, 8\], got \[3, 5, 4, 8\]"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            module(q, k, v, **options)
    for options, message in [
        ({"num_splits": 4}, "num_splits = 4 is not supported; nearest: num_splits of"),
        ({"fp8_output": True}, "fp8_output = True is not supported"),
        ({"score_mod": max}, "score_mod = .* nearest: core_attention_bias"),
        ({"g": torch.ones(3)}, r"g = \[3\] is not supported"),
    ]:
        with pytest.raises(NotImplementedError, match=message):
            module(q, k, v, **cu, **options)
    module(q, k, v, **cu, inference_params=None, num_splits=1, fp8_output=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'score'"):
        module(q, k, v, **cu, score=1)
    with pytest.raises(ValueError, match=r"qkv_layer must have size 3 in dim -3 \(qkv_interleave_dim\)"):
        module(qkv_layer=q)


def test_errors_of_thd() -> None:
    q, k, v = tensors((8, 4, 8), (9, 2, 8), (9, 2, 6), grad=False)
    module = DotProductAttention(4, (8, 6), 2, qkv_format="thd", attn_mask_type="padding")
    cu = {"cu_seqlens_q": _cu(Q), "cu_seqlens_kv": _cu(KV)}
    for options, message in [
        ({"cu_seqlens_q": _cu(Q)}, "cu_seqlens_kv must be given for qkv_format 'thd', got None"),
        ({**cu, "attn_mask_type": "causal"}, "attn_mask_type must have padding for qkv_format 'thd', got 'causal'"),
        ({**cu, "pad_between_seqs": True}, "cu_seqlens_q_padded must be given with pad_between_seqs"),
    ]:
        with pytest.raises(ValueError, match=message):
            module(q, k, v, **options)
    with pytest.raises(NotImplementedError, match=r"core_attention_bias with qkv_format = 'thd' .* nearest: .*'bshd'"):
        module(q, k, v, **cu, core_attention_bias_type="post_scale_bias", core_attention_bias=torch.ones(1, 4, 5, 4))


def test_errors_of_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in [
        ({"qkv_format": "bhsd"}, "qkv_format must be one of 'sbhd', 'bshd', 'thd', got 'bhsd'"),
        ({"num_gqa_groups": 3}, "num_gqa_groups must divide num_attention_heads 4, got 3"),
        ({"softmax_type": "one"}, "softmax_type must be one of"),
        ({"attention_type": "both"}, "attention_type must be one of 'self', 'cross', got 'both'"),
        ({"attention_dropout": 1.0}, r"attention_dropout must be in \[0, 1\), got 1.0"),
        ({"cp_comm_type": "ring"}, "cp_comm_type must be one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            DotProductAttention(4, 8, **options)
    with pytest.raises(NotImplementedError, match=r"return_max_logit = True .* nearest: attention\(return_lse=True\)"):
        DotProductAttention(4, 8, return_max_logit=True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group)
    with pytest.raises(NotImplementedError, match=r"cp_group = 2 is not supported; nearest: .*merge_attentions"):
        DotProductAttention(4, 8, cp_group=2)
    assert DotProductAttention(4, 8, cp_group=1, tp_group=2).tp_size == 2


def test_tensor_parallel() -> None:
    module = DotProductAttention(8, 8, num_gqa_groups=4, tp_size=2, sequence_parallel=True, softmax_type="learnable")
    assert module.softmax_offset.shape == (4,)
    q, k, v = tensors((5, 2, 4, 8), (5, 2, 2, 8), (5, 2, 2, 8))
    assert module.double()(q, k, v).shape == (5, 2, 32)
    with pytest.raises(ValueError, match=r"key_layer must have 4 dims \(sbhd\) that end in \[2, 8\]"):
        module(q, q, v)
