"""The Hopper backward above head dim 256: weights in chunks, the same bits, and rows of no sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import attention, varlen_attention
from powertrain.ops.attention.hopper import backend, backward_d512, backward_plans
from tests.gpu.arch import ON_SM90

pytestmark = ON_SM90
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _at_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of head dim 256."""
    monkeypatch.setattr(backward_plans, "_prefers_weights", lambda operands: True)


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window_size": (200, 40)},
    "softcap": {"is_causal": True, "softcap": 5.0},
}
STARTS = [0, 300, 300, 411, 1000]


def _leaves(rows: int, head_dim: int) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    shapes = (rows, 6, head_dim), (rows, 2, head_dim), (rows, 2, head_dim)
    leaves = [torch.randn(shape, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    return leaves, torch.randn(shapes[0], device=CUDA, dtype=torch.bfloat16)


def _grads(leaves: list[Tensor], dout: Tensor, packed: bool, name: str, **mask: Any) -> tuple[Tensor, ...]:
    if packed:
        starts = torch.tensor(STARTS, dtype=torch.int32, device=CUDA)
        out = varlen_attention(*leaves, starts, max_seqlen_q=589, backend=name, **mask)
        return torch.autograd.grad(out, leaves, dout)
    q, k, v = (x.unflatten(0, (2, -1)) for x in leaves)
    return torch.autograd.grad(attention(q, k, v, backend=name, **mask).flatten(0, 1), leaves, dout)


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise AssertionError("the universal backward was called")

    monkeypatch.setattr(backend, "attention_backward", refuse)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("head_dim", [256, 320, 512])
@pytest.mark.parametrize("tiles", [1, 30, 10**6])  # of weights at a time: a part of a head, some heads, all
@pytest.mark.parametrize("mask", list(MASKS))
def test_chunks(mask: str, tiles: int, head_dim: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_d512, "MEMORY", tiles * 4 * 128 * 128)
    leaves, dout = _leaves(1000, head_dim)
    found = _grads(leaves, dout, packed, "hopper", **MASKS[mask])
    wide = [x.detach().float().requires_grad_() for x in leaves]
    for ours, exact in zip(found, _grads(wide, dout.float(), packed, "reference", **MASKS[mask]), strict=True):
        torch.testing.assert_close(ours.float(), exact, rtol=2**-6, atol=2**-6 * exact.abs().max().item())
    again = _grads(leaves, dout, packed, "hopper", **MASKS[mask])
    assert all(map(torch.equal, found, again))


@pytest.mark.usefixtures("no_fallback")
def test_nothing_leaks() -> None:
    """NaN in rows of no sequence, of inputs and gradients: results are 0 there, and elsewhere what zeros give."""
    used = torch.tensor([300, 0], dtype=torch.int32, device=CUDA)

    def results(behind: float) -> tuple[Tensor, ...]:
        leaves, dout = _leaves(800, 512)
        with torch.no_grad():
            for x in (*leaves, dout):
                x[300:] = behind
        q, k, v = (x.unflatten(0, (2, -1)) for x in leaves)
        out = attention(q, k, v, seqused_q=used, seqused_k=used, is_causal=True, backend="hopper")
        return torch.autograd.grad(out, leaves, dout.unflatten(0, (2, -1)))

    found = results(float("nan"))
    assert not any(x[300:].any() for x in found)
    assert all(map(torch.equal, found, results(0.0)))
