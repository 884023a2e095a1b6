"""Packed attention under random index structure: offset, empty, gapped, unordered, overlapping and shared sequences."""

import pytest
import torch

from powertrain.ops.attention import attention, varlen_attention
from powertrain.runtime import settings as settings_module
from powertrain.runtime.compile.prebuild import build
from powertrain.runtime.recording import record
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
            patched.setattr("powertrain.ops.attention.backends.reference.is_traced", lambda x: True)
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


@pytest.mark.parametrize("sizes", [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("backend", _OURS)
def test_backward_of_nothing(sizes: tuple[int, int, int], backend: str, device: torch.device) -> None:
    batch, queries, keys = sizes
    shapes = ((batch, n, 2, 16) for n in (queries, keys, keys))
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for shape in shapes)
    bias = torch.zeros(1, 2, queries, keys, device=device, requires_grad=True)
    sinks = torch.zeros(2, device=device, requires_grad=True)
    out, lse = attention(q, k, v, attn_bias=bias, sinks=sinks, return_lse=True, backend=backend)
    (out.sum() + lse.sum()).backward()
    for x in (q, k, v, bias):
        assert x.grad is not None and x.grad.shape == x.shape and not x.grad.any()


@pytest.mark.parametrize("backend", _OURS)
@pytest.mark.parametrize("starts, tokens", [([0], 0), ([0], 4), ([3], 4), ([0, 0], 0), ([2, 2, 2], 4)], ids=str)
def test_no_sequences_keep_the_graph(starts: list[int], tokens: int, backend: str, device: torch.device) -> None:
    q, k, v = (torch.full((tokens, 2, 16), torch.nan, device=device, requires_grad=True) for _ in range(3))
    cu = torch.tensor(starts, dtype=torch.int32, device=device)
    out, lse = varlen_attention(q, k, v, cu, return_lse=True, backend=backend)
    assert out.grad_fn is not None and lse.grad_fn is not None
    assert not out.any() and (lse == -torch.inf).all()
    torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])
    for x in (q, k, v):
        assert x.grad is not None and not x.grad.any()


@pytest.mark.skipif(settings_module.settings().interpret, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("arch", [80, 90])
def test_keys_anywhere_compile(arch: int) -> None:
    """The universal backward over segments."""

    def integers(n: int) -> torch.Tensor:
        return torch.empty(n, dtype=torch.int32, device="meta")

    with record(f"sm_{arch}") as wanted:
        q, k, v = (torch.empty(512, h, 128, dtype=torch.bfloat16, device="meta", requires_grad=True) for h in (8, 2, 2))
        out = varlen_attention(
            q, k, v, integers(5), integers(5), seqused_k=integers(4), is_causal=True, backend="triton"
        )
        out.backward(torch.empty_like(out))
    report = build(wanted.specs)
    assert not report.failures and any(spec.kernel.name == "_attention_dkdv_kernel" for spec in wanted.specs)


def test_shared_keys_sum_their_gradients(device: torch.device) -> None:
    """Two sequences over the same keys: value's gradients are those of both."""
    q, k, v = (torch.zeros(n, 1, 16, device=device, requires_grad=True) for n in (4, 2, 2))
    said = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2, 4], [0, 0, 2], [2, 2])]
    varlen_attention(q, k, v, said[0], said[1], seqused_k=said[2], backend=_OURS[0]).sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(v.grad, torch.full_like(v, 2.0))
