"""sum_parts and poison, what ends a product over ranks: plain, through the interpreter, on a GPU."""

import pytest
import torch
from torch import Tensor

from powertrain.parallel.transport.kernels import poison, sum_parts, sum_parts_ref

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3, 8), (4, 5, 100), (3, 130, 33), (2, 0, 8)])
@pytest.mark.parametrize("bias", [False, True])
def test_adds_in_the_order_of_the_parts(
    shape: tuple[int, int, int], bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    parts = torch.randn(*shape, device=device).to(dtype)
    b = torch.randn(shape[2], device=device).to(dtype) if bias else None
    assert torch.equal(sum_parts(parts, b), sum_parts_ref(parts, b))  # the same additions, so the same bits


def test_parts_may_lie_apart(device: torch.device) -> None:
    """As in a receive buffer, whose parts start at multiples of 256 bytes."""
    memory = torch.randn(3 * 1024, device=device)
    parts = memory.as_strided((3, 5, 100), (1024, 100, 1))
    assert torch.equal(sum_parts(parts), sum_parts_ref(parts))


def test_float64_on_the_cpu() -> None:
    parts = torch.randn(3, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(sum_parts(parts), parts.sum(0))


@pytest.mark.parametrize(
    "parts, bias, said",
    [
        (torch.ones(2, 3), None, r"sum_parts: parts must be \[W, M, N\], got \[2, 3\]"),
        (torch.ones(2, 3, 4).transpose(1, 2), None, "sum_parts: parts must be contiguous in its last two dims"),
        (torch.ones(2, 3, 4), torch.ones(3), r"sum_parts: bias must have shape \[4\]"),
        (torch.ones(2, 3, 4, dtype=torch.int32), None, "sum_parts: parts must be float32, float16 or bfloat16"),
    ],
)
def test_wrong_arguments_are_named(parts: Tensor, bias: Tensor | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sum_parts(parts, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 4097, 300_000])
def test_poison(numel: int, dtype: torch.dtype, device: torch.device) -> None:
    """Nothing changes while the word is 0; everything is NaN once it is not."""
    x = torch.randn(numel, device=device).to(dtype)
    before, error = x.clone(), torch.zeros(1, dtype=torch.int32, device=device)
    poison(x, error)
    assert torch.equal(x, before)
    error.fill_(1)
    poison(x, error)
    assert x.isnan().all()


def test_poison_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="poison: x must be contiguous"):
        poison(torch.ones(3, 4).T, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"poison: error must have shape \[1\]"):
        poison(torch.ones(3), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="poison: error must be int32, got int64"):
        poison(torch.ones(3), torch.zeros(1, dtype=torch.int64))
