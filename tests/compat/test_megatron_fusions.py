"""Megatron's routing maps, weighted activations and softmax with an offset against loops and plain PyTorch."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from powertrain.compat.megatron.core.fusions.fused_bias_geglu import weighted_bias_quick_geglu_impl
from powertrain.compat.megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from powertrain.compat.megatron.core.fusions.fused_indices_converter import fused_indices_to_multihot
from powertrain.compat.megatron.core.fusions.fused_mla_yarn_rope_apply import (
    fused_apply_mla_rope_for_kv,
    fused_apply_mla_rope_for_q,
)
from powertrain.compat.megatron.core.fusions.fused_pad_routing_map import fused_pad_routing_map
from powertrain.compat.megatron.core.fusions.fused_softmax import SoftmaxOne
from powertrain.compat.megatron.core.fusions.fused_weighted_squared_relu import (
    weighted_squared_relu_back,
    weighted_squared_relu_impl,
)
from tests.compat.plain import same, tensors


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4)], ids=str)
def test_weighted_squared_relu(shape: tuple[int, ...]) -> None:
    x, w = tensors(shape, (torch.Size(shape[:-1]).numel(), 1))
    same(weighted_squared_relu_impl, lambda x, w: F.relu(x) ** 2 * w.reshape(*shape[:-1], 1), [x, w])
    rows, g = x.detach().reshape(-1, 4).requires_grad_(), torch.randn(len(w), 4).double()
    expected = torch.autograd.grad(F.relu(rows) ** 2 * w, (rows, w), g)
    torch.testing.assert_close(weighted_squared_relu_back(g, rows, w), expected)
    with pytest.raises(ValueError, match="input must have two or three dims"):
        weighted_squared_relu_impl(torch.ones(4), torch.ones(1))


# a batch of one broadcasts against the weights of all tokens
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (3, 1, 8), (0, 8), (0, 2, 8)], ids=str)
def test_weighted_swiglu(shape: tuple[int, ...]) -> None:
    x, w = tensors(shape, (torch.Size(shape[:-1]).numel(), 1))

    def plain(x: Tensor, w: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up * w.reshape(*shape[:-1], 1)

    same(lambda x, w: weighted_bias_swiglu_impl(x, None, w), plain, [x, w])
    assert weighted_bias_quick_geglu_impl(x, None, w).shape == (*shape[:-1], 4)
    with pytest.raises(ValueError, match="input must have two or three dims"):
        weighted_bias_swiglu_impl(torch.ones(4), None, torch.ones(1))


@pytest.mark.parametrize("clamp", [None, 0.5])
@pytest.mark.parametrize("bias", [False, True])
def test_weighted_quick_geglu(bias: bool, clamp: float | None) -> None:
    x, w, b = tensors((2, 3, 8), (6, 1), (8,))

    def plain(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        gate, up = x.chunk(2, -1)
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        gate, up = (gate, up) if b is None else (gate + b[:4], up + b[4:])
        return gate * torch.sigmoid(1.702 * gate) * (up + 1) * w.reshape(2, 3, 1)

    ours = lambda x, w, b: weighted_bias_quick_geglu_impl(x, b, w, False, 1.0, clamp)  # noqa: E731
    same(ours, plain, [x, w, b if bias else None])
    with pytest.raises(NotImplementedError, match="fp8_input_store"):
        weighted_bias_quick_geglu_impl(x, None, w, True)


def test_padded_routing_map() -> None:
    # the last expert has no free token left for its third multiple
    rows = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 0, 1], [0, 1, 1], [0, 0, 1]])
    padded = fused_pad_routing_map(rows.bool(), 4)
    expected = rows.clone().T
    for expert in expected:
        for token in range(5):
            if expert.sum() % 4 and not expert[token]:
                expert[token] = 1
    assert padded.dtype is torch.int32 and torch.equal(padded, expected.T.int())
    assert padded.sum(0).tolist() == [4, 4, 5]
    assert fused_pad_routing_map(rows[:0], 4).shape == (0, 3)
    with pytest.raises(ValueError, match="pad_multiple must be positive, got 0"):
        fused_pad_routing_map(rows, 0)


def test_indices_to_multihot() -> None:
    indices = torch.tensor([[0, 2], [-1, 1], [-1, -1]])
    (probs,) = tensors((3, 2))
    seen, _ = fused_indices_to_multihot(indices, probs, 3)
    assert seen.tolist() == [[True, False, True], [False, True, False], [False] * 3]

    def plain(probs: Tensor) -> Tensor:
        table = [[0.0] * 3 for _ in range(3)]
        rows = [[probs.new_zeros(()) for _ in row] for row in table]
        for token in range(3):
            for slot in range(2):
                if indices[token, slot] >= 0:
                    rows[token][int(indices[token, slot])] = probs[token, slot]
        return torch.stack([torch.stack(row) for row in rows])

    same(lambda p: fused_indices_to_multihot(indices, p, 3)[1], plain, [probs])
    with pytest.raises(ValueError, match="probs_indices must have shape"):
        fused_indices_to_multihot(indices, probs[:, :1], 3)


def test_softmax_with_an_offset() -> None:
    x, sink = tensors((2, 3, 4, 5), (3,))

    def plain(x: Tensor, sink: Tensor) -> Tensor:
        column = sink.reshape(1, -1, 1, 1).expand(2, -1, 4, 1)
        return torch.softmax(torch.cat((x, column), -1), -1)[..., :-1]

    same(lambda x, sink: SoftmaxOne(-1, sink)(x), plain, [x, sink])
    same(SoftmaxOne(), lambda x: plain(x, torch.ones(3).double()), [x])
    with pytest.raises(ValueError, match="dim must be"):
        SoftmaxOne(1)


@pytest.mark.parametrize("packed", [False, True])
def test_rotary_positions_of_latent_attention(packed: bool) -> None:
    """Pairs are neighbours in the input and half a row apart in the result."""
    emb, nope, v_dim, heads = 6, 4, 3, 2
    leading = (5,) if packed else (4, 3)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32) if packed else None
    positions = [0, 1, 0, 1, 2] if packed else list(range(4))
    q, kv, k_pos = tensors((*leading, heads, nope + emb), (*leading, heads, nope + v_dim), (*leading, 1, emb))
    # float32, as Megatron makes them, with YaRN's factor in them
    angle = torch.randn(5, 1, 1, emb // 2)
    cos, sin = (torch.cat((x, x), -1) * 1.25 for x in (angle.cos(), angle.sin()))

    def turned(x: Tensor) -> Tensor:
        rows = []
        for row, at in zip(x.unbind(0), positions, strict=True):
            a, b = row[..., ::2], row[..., 1::2]
            c, s = (t[at].flatten()[: emb // 2].double() for t in (cos, sin))
            rows.append(torch.cat((a * c - b * s, b * c + a * s), -1))
        return torch.stack(rows)

    same(
        lambda q: fused_apply_mla_rope_for_q(q, cos, sin, nope, emb, ends),
        lambda q: torch.cat((q[..., :nope], turned(q[..., nope:])), -1), [q],
    )  # fmt: skip

    def ours(kv: Tensor, k_pos: Tensor) -> Tensor:
        key, value = fused_apply_mla_rope_for_kv(kv, k_pos, cos, sin, emb, nope, v_dim, ends)
        assert key.shape == (*leading, heads, nope + emb) and value.is_contiguous()
        return torch.cat((key, value), -1)

    def plain(kv: Tensor, k_pos: Tensor) -> Tensor:
        shared = turned(k_pos).expand(*leading, heads, emb)
        return torch.cat((kv[..., :nope], shared, kv[..., nope:]), -1)

    same(ours, plain, [kv, k_pos])


def test_rotary_positions_of_latent_attention_refuse() -> None:
    t, table = torch.zeros(2, 1, 1, 6), torch.zeros(2, 1, 1, 4)
    with pytest.raises(ValueError, match="t must have 4 dims, the last of them 7"):
        fused_apply_mla_rope_for_q(t, table, table, 3, 4)
    with pytest.raises(ValueError, match=r"k_pos_emb must have shape \[2, 1, 1, 4\]"):
        fused_apply_mla_rope_for_kv(t, t, table, table, 4, 2, 4)
    with pytest.raises(NotImplementedError, match="cp_size = 2"):
        fused_apply_mla_rope_for_q(t, table, table, 2, 4, cp_size=2)
    with pytest.raises(NotImplementedError, match="rotary_interleaved = True"):
        fused_apply_mla_rope_for_q(t, table, table, 2, 4, rotary_interleaved=True)


def test_of_another_dtype_than_autocast() -> None:
    t, table, rows = torch.randn(5, 2, 3, 12).half(), torch.randn(5, 1, 1, 8).half(), torch.randn(6, 8).half()

    def results() -> tuple[Tensor, ...]:
        geglu = weighted_bias_quick_geglu_impl(rows, None, torch.ones(6, 1), False, 0.0, 1.0)
        keys, values = fused_apply_mla_rope_for_kv(t, t[:, :, :1, :8], table, table, 8, 8, 4)
        return fused_apply_mla_rope_for_q(t, table, table, 4, 8), keys, values, geglu

    expected = results()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(results(), expected)
