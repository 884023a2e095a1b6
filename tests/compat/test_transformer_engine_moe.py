"""TransformerEngine's permutation of tokens and its operations, against loops and formulas in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from powertrain.compat.transformer_engine import pytorch as te
from powertrain.compat.transformer_engine.pytorch import ops
from powertrain.compat.transformer_engine.pytorch.ops import basic
from tests.compat.plain import same, tensors

pytestmark = pytest.mark.usefixtures("on_cpu")
T, E, H = 7, 4, 3


def mask(seed: int) -> Tensor:
    """Token 2 goes nowhere, expert 3 gets nothing."""
    chosen = torch.rand(T, E, generator=torch.Generator().manual_seed(seed)) < 0.5
    chosen[2], chosen[:, 3] = False, False
    return chosen


def pairs(chosen: Tensor) -> list[tuple[int, int]]:
    return [(t, e) for e in range(E) for t in range(T) if chosen[t, e]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drop", [0, 2])
def test_by_a_mask(seed: int, drop: int) -> None:
    x, probs = tensors((T, H), (T, E))
    chosen = mask(seed)
    count = len(pairs(chosen)) - drop
    kept = pairs(chosen)[:count]
    many = -1 if drop == 0 else count
    for routing in (chosen, chosen.int()):
        same(lambda x, m=routing: te.moe_permute(x, m, many)[0], lambda x: torch.stack([x[t] for t, _ in kept]), [x])
    rows, permuted, ids = te.moe_permute_with_probs(x, probs, chosen, many)
    torch.testing.assert_close(permuted, torch.stack([probs[t, e] for t, e in kept]))
    (values,) = tensors((count, H))

    def merged(values: Tensor, probs: Tensor) -> Tensor:
        out = [torch.zeros(H, dtype=torch.float64) for _ in range(T)]
        for row, (t, e) in zip(values, kept, strict=True):
            out[t] = out[t] + row * probs[t, e]
        return torch.stack(out)

    same(lambda v, p: te.moe_unpermute(v, ids, p), merged, [values, probs])
    ones = torch.ones(T, E, dtype=torch.float64)
    restored = lambda v: te.moe_unpermute(v, ids, restore_shape=x.shape)  # noqa: E731
    same(restored, lambda v: merged(v, ones), [values])
    assert rows.shape == (count, H) and te.moe_unpermute(values.bfloat16(), ids, probs).dtype is torch.bfloat16


@pytest.mark.parametrize("top_k", [1, 2])
def test_by_indices(top_k: int) -> None:
    x, probs = tensors((T, H), (T, top_k))
    experts = torch.stack([torch.randperm(E)[:top_k] for _ in range(T)]).int()
    order = sorted((int(experts[t, k]), t, k) for t in range(T) for k in range(top_k))
    rows, ids = te.moe_permute(x, experts, map_type="index")
    torch.testing.assert_close(rows, torch.stack([x[t] for _, t, _ in order]))
    back = te.moe_unpermute(rows, ids, probs, map_type="index")
    torch.testing.assert_close(back, x * probs.sum(-1, keepdim=True))
    torch.testing.assert_close(te.moe_unpermute(rows, ids, restore_shape=x.shape, map_type="index"), x * top_k)


def test_chunks_in_another_order() -> None:
    x, probs = tensors((9, H), (9,))
    sizes, order = torch.tensor([3, 0, 4, 2]), torch.tensor([2, 0, 3, 1])
    parts = lambda x: torch.cat([x.split(sizes.tolist())[i] for i in order])  # noqa: E731
    same(lambda x: te.moe_sort_chunks_by_index(x, sizes, order), parts, [x])
    rows, permuted = te.moe_sort_chunks_by_index_with_probs(x, probs, sizes.int(), order.int())
    torch.testing.assert_close((rows, permuted), (parts(x), parts(probs)))


def test_errors() -> None:
    x, chosen = torch.randn(T, H), mask(0)
    with pytest.raises(ValueError, match="map_type must be one of 'mask', 'index', got 'rows'"):
        te.moe_permute(x, chosen, map_type="rows")
    with pytest.raises(ValueError, match=r"routing_map must have shape \[7, experts\], got \[3, 4\]"):
        te.moe_permute(x, chosen[:3])
    with pytest.raises(ValueError, match="restore_shape must be given"):
        te.moe_unpermute(x, torch.arange(T))
    with pytest.raises(NotImplementedError, match="pad_offsets"):
        te.moe_unpermute(x, torch.arange(T), restore_shape=x.shape, pad_offsets=torch.arange(E))


PLAIN = {
    "GELU": lambda x: F.gelu(x, approximate="tanh"), "QGELU": lambda x: x * torch.sigmoid(1.702 * x), "ReLU": F.relu,
    "SReLU": lambda x: F.relu(x) ** 2, "SiLU": F.silu, "GLU": torch.sigmoid,
}  # fmt: skip
GATES = {"GEGLU": "GELU", "QGEGLU": "QGELU", "ReGLU": "ReLU", "SReGLU": "SReLU", "SwiGLU": "SiLU", "GLU": "GLU"}


@pytest.mark.parametrize("name", sorted({*PLAIN, *GATES}))
def test_activations(name: str) -> None:
    (x,) = tensors((2, 5, 8))
    if name in GATES:
        same(getattr(basic, name)(), lambda x: PLAIN[GATES[name]](x[..., :4]) * x[..., 4:], [x])
    else:
        same(getattr(ops, name)(), PLAIN[name], [x])
    with pytest.raises(NotImplementedError, match="cache_quantized_input"):
        getattr(basic, name)(cache_quantized_input=True)


def test_sequence_of_operations() -> None:
    (x,) = tensors((4, 6))
    model = ops.Sequential(
        basic.L2Normalization(eps=1e-3), ops.Linear(6, 8), basic.Bias(8), basic.SwiGLU(), basic.Reshape((2, -1)),
        basic.ConstantScale(0.5), basic.Dropout(0.0), basic.Identity(), basic.BasicLinear(8, 3),
        basic.RMSNorm(3, device="cpu"),
    ).double()  # fmt: skip
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    first, bias, last, norm = model[1], model[2], model[8], model[9]

    def plain(x: Tensor) -> Tensor:
        h = F.linear(x / (x.square().sum(-1, keepdim=True) + 1e-3).sqrt(), first.weight, first.bias) + bias.bias
        h = (F.silu(h[..., :4]) * h[..., 4:]).reshape(2, 8) / 2
        return F.rms_norm(F.linear(h, last.weight), (3,), norm.weight, 1e-5)

    same(model, plain, [x])
    for make in (basic.Linear, basic.BasicLinear):
        with pytest.raises(NotImplementedError, match="parallelize_linears"):
            make(4, 4, tensor_parallel_mode="column")
