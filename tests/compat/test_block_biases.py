"""Block-diagonal biases of xFormers whose keys lie anywhere, on our kernels and without them."""

import pytest
import torch

from powertrain.compat.xformers.ops import fmha
from powertrain.compat.xformers.ops.fmha import attn_bias as ab
from tests.compat.block_biases import KINDS, check_bias


@pytest.mark.parametrize("kind", KINDS)
def test_any_blocks(kind: str, device: torch.device) -> None:
    check_bias(kind, KINDS.index(kind), device, torch.float32, largest=12)


@pytest.mark.parametrize("kind", KINDS)
def test_any_blocks_in_float64(kind: str) -> None:
    for seed in range(40):
        check_bias(kind, seed, torch.device("cpu"), torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 10))
@pytest.mark.parametrize("kind", KINDS)
def test_any_blocks_at_length(kind: str, first: int, device: torch.device) -> None:
    for seed in range(first, first + 10):
        check_bias(kind, seed, device, torch.float32)


def test_two_blocks_over_the_same_keys(device: torch.device) -> None:
    """The smallest case: the first block had lost its keys, for the next one begins where it does."""
    bias = ab.BlockDiagonalGappyKeysMask.from_seqlens([1, 1], [0, 0, 2], [2, 2], device=device)
    q, k, v = (torch.ones(1, 2, 1, 16, device=device, requires_grad=True) for _ in range(3))
    out = fmha.memory_efficient_attention(q, k, v, bias)
    out.sum().backward()
    torch.testing.assert_close(out, torch.ones_like(out))
    assert v.grad is not None
    torch.testing.assert_close(v.grad, torch.ones_like(v))


@pytest.mark.kernels
@pytest.mark.parametrize("kind", ["none", "causal", "blocks", "gappy"])
def test_backward_compiles(kind: str, device: torch.device) -> None:
    """In one graph, and to the same gradients."""
    _compiles(kind, device, torch.float32)


@pytest.mark.parametrize("kind", ["none", "blocks"])
def test_backward_compiles_without_kernels(kind: str) -> None:
    _compiles(kind, torch.device("cpu"), torch.float64)


def _compiles(kind: str, device: torch.device, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    bias = {
        "none": None,
        "causal": ab.LowerTriangularMask(),
        "blocks": ab.BlockDiagonalMask.from_seqlens([3, 5], [4, 6], device=device),
        "gappy": ab.BlockDiagonalGappyKeysMask.from_seqlens([3, 5], [5, 0, 10], [5, 6], device=device),
    }[kind]
    q, k, v = (torch.randn(1, n, 2, 16, device=device, dtype=dtype) for n in (8, 10, 10))
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, bias)

    def backward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return fmha.memory_efficient_attention_backward(*tensors, attn_bias=bias)

    given = (torch.randn_like(out), out, lse, q, k, v)
    compiled = torch.compile(backward, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), backward(*given))
