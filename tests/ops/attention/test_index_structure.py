"""Packed attention under random index structure: offset, empty, gapped, unordered, overlapping and shared sequences."""

import pytest
import torch

from powertrain.ops.attention import varlen_attention
from powertrain.runtime import settings as settings_module
from tests.ops.attention.index_structure import WAYS, check, check_backward, compare, draw, run, tensors

_SIZES = (((2, 1), (16, 16)), ((2, 2), (24, 16)), ((3, 1), (16, 40)))
_OURS = ("triton",) if settings_module.settings().interpret else ("chunked", "reference")


def _sweep(way: str, device: torch.device, seeds: range, *largest: int) -> None:
    for seed in seeds:
        heads, dims = _SIZES[seed % len(_SIZES)]
        structure = draw(way, seed, *largest)
        for backend in _OURS:
            check(structure, backend, device, torch.float32, heads=heads, dims=dims, seed=seed)
        check_backward(structure, device, torch.float32, seed, heads=heads, dims=dims)


@pytest.mark.parametrize("way", WAYS)
def test_any_structure(way: str, device: torch.device) -> None:
    _sweep(way, device, range(2), 18, 3)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 120, 20))
@pytest.mark.parametrize("way", WAYS)
def test_any_structure_at_length(way: str, first: int, device: torch.device) -> None:
    _sweep(way, device, range(first, first + 20))


@pytest.mark.parametrize("way", WAYS)
def test_any_structure_traced(way: str) -> None:
    """All sequences at once, as torch.compile computes the reference."""
    for seed in range(12):
        s = draw(way, seed)
        given, dout = tensors(s, (2, 1), (16, 16), torch.device("cpu"), torch.float32)
        exact = run(s, [x.double() for x in given], dout.double(), "reference")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("powertrain.ops.attention.reference.is_traced", lambda x: True)
            found = run(s, given, dout, "reference")
        compare(s, found, exact, torch.float32, f"traced, seed {seed}")


def test_rows_ahead_of_the_first_sequence(device: torch.device) -> None:
    """The smallest case: they were what was in memory."""
    starts = torch.tensor([3, 5], dtype=torch.int32, device=device)
    q, k, v = (torch.full((6, 1, 16), 0.5, device=device, requires_grad=True) for _ in range(3))
    out, lse = varlen_attention(q, k, v, starts, return_lse=True, backend=_OURS[0])
    out.sum().backward()
    assert not out[:3].any() and not out[5:].any() and (out[3:5] == 0.5).all()
    assert (lse[:, :3] == -torch.inf).all() and (lse[:, 5:] == -torch.inf).all()
    for x in (q, k, v):
        assert x.grad is not None and not x.grad[:3].any() and not x.grad[5:].any()


def test_shared_keys_sum_their_gradients(device: torch.device) -> None:
    """Two sequences over the same keys: value's gradients are those of both."""
    q, k, v = (torch.zeros(n, 1, 16, device=device, requires_grad=True) for n in (4, 2, 2))
    said = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2, 4], [0, 0, 2], [2, 2])]
    varlen_attention(q, k, v, said[0], said[1], seqused_k=said[2], backend=_OURS[0]).sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(v.grad, torch.full_like(v, 2.0))
