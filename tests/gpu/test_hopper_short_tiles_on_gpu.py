"""Last tiles of so few rows, or keys, that one consumer of the Hopper kernels has none; many tiles a CTA."""

from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import attention, varlen_attention
from powertrain.ops.attention.hopper import plans
from tests.gpu.arch import ON_SM90

pytestmark = ON_SM90
CUDA = torch.device("cuda")
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window_size": (100, 0)},
    "left": {"window_size": (70, -1)},
}
# 1, 22, 64 and 65 rows of a last tile of 128, one and several blocks of keys
LENGTHS = (1, 22, 64, 65, 129, 150, 192, 193, 257, 320, 513)


def _close(found: list[Tensor], expected: list[Tensor], what: object) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        # with one key dq and dk are 0 but for rounding: 2^-10 an element is the least that counts
        least = 2**-10 * theirs.numel() ** 0.5
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=least)
        assert error < 0.01, (what, float(error))


def _run(call: Any, leaves: list[Tensor], dout: Tensor, **options: Any) -> list[Tensor]:
    out = call(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _leaves(rows: tuple[int, ...], heads: tuple[int, int], head_dim: int) -> tuple[list[Tensor], Tensor]:
    shapes = [(*rows, n, head_dim) for n in (heads[0], heads[1], heads[1])]
    leaves = [torch.randn(shape, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    return leaves, torch.randn_like(leaves[0])


@pytest.mark.parametrize("heads", [(6, 6), (8, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 160, 192, 256])
@pytest.mark.parametrize("mask", list(MASKS))
def test_batches(mask: str, head_dim: int, heads: tuple[int, int]) -> None:
    for n, length in enumerate(LENGTHS):
        torch.manual_seed(n)
        leaves, dout = _leaves((70, length), heads, head_dim)
        found, expected = (_run(attention, leaves, dout, backend=b, **MASKS[mask]) for b in ("hopper", "triton"))
        _close(found, expected, length)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("heads", [(6, 6), (8, 2), (7, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mask", list(MASKS))
def test_packed(mask: str, head_dim: int, heads: tuple[int, int], deterministic: bool) -> None:
    torch.manual_seed(0)
    lengths = torch.cat([torch.tensor(LENGTHS), torch.randint(0, 400, (80,))])
    lengths = lengths[torch.randperm(len(lengths))]
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().to(CUDA)
    leaves, dout = _leaves((int(lengths.sum()),), heads, head_dim)
    options = {"cu_seqlens_q": starts, "max_seqlen_q": 513, "deterministic": deterministic, **MASKS[mask]}
    found, expected = (_run(varlen_attention, leaves, dout, backend=b, **options) for b in ("hopper", "triton"))
    _close(found, expected, lengths)
    if deterministic:
        again = _run(varlen_attention, leaves, dout, backend="hopper", **options)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_long_sequences_of_three_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head dim 64: one or two of three consumers have no rows."""
    monkeypatch.setattr(plans, "_three_consumers_are_faster", lambda operands, queries: True)
    for length in (4097, 4160, 4161, 4224, 4225):
        leaves, dout = _leaves((1, length), (4, 4), 64)
        found, expected = (_run(attention, leaves, dout, backend=b) for b in ("hopper", "triton"))
        _close(found, expected, length)
