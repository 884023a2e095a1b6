"""FP8 products over ranks that are threads: the bits of gathering, then quantizing; bytes that travel; errors."""

from typing import Any

import pytest
import torch

from powertrain.parallel.fp8_gather import fp8_all_gather_gemm
from powertrain.parallel.fp8_parts import whole_scales
from powertrain.parallel.fp8_scatter import fp8_gemm_reduce_scatter
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.simulated import World
from powertrain.quant import Block, Row, Tensor
from tests.parallel.fp8_products import K, check, force


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_bits_are_those_of_gathering_first(size: int) -> None:
    World(size).run(check)


def _gathers(overlap: Overlap, recipe: Any, rows: int) -> list[int]:
    """Bytes of a rank's part of each gather: of a column-parallel layer, then of a row-parallel one."""
    force(overlap, "chunked")
    sent: list[int] = []
    transport, gather = overlap.transport, overlap.transport.gather

    def noted(shard: torch.Tensor, counts: Any, *, keep: bool) -> Any:
        sent.append(shard.nbytes)
        return gather(shard, counts, keep=keep)

    transport.gather = noted  # type: ignore[method-assign]
    x, w = (torch.randn(n, K).bfloat16().requires_grad_() for n in (rows, 32))
    (y,) = fp8_all_gather_gemm(x, [w], overlap, recipe)
    y.float().sum().backward()
    wide = torch.randn(2 * rows, K).bfloat16().requires_grad_()
    fp8_gemm_reduce_scatter(wide, w, overlap, recipe).float().sum().backward()
    return sent


@pytest.mark.parametrize(
    ("recipe", "rows", "bytes_"),
    [
        # x, xᵀ for dW, dy: one byte an element, two where it travels as it is; scales behind
        (Tensor(), 128, [128 * K, 128 * K, 128 * 32]),
        (Row(), 128, [128 * K + 4 * 128, 128 * K + 4 * K, 2 * 128 * 32]),
        (Block(), 128, [128 * K + 8 * 128, 128 * K + 4 * K, 2 * 128 * 32]),
        # no whole groups of tokens
        (Block(), 20, [20 * K + 8 * 20, 2 * 20 * K, 2 * 20 * 32]),
    ],
    ids=["tensor", "row", "block", "block20"],
)
def test_rows_travel_in_one_byte_an_element(recipe: Any, rows: int, bytes_: list[int]) -> None:
    # amaxes by tensor go by the transport's own gather of 16 bytes
    for sent in World(2).run(lambda overlap: _gathers(overlap, recipe, rows)):
        assert [n for n in sent if n > 16] == bytes_


@pytest.mark.parametrize("recipe", [Tensor(), Row(), Block()], ids=str)
def test_main_grad_and_frozen_weights(recipe: Any) -> None:
    def one(overlap: Overlap) -> None:
        x = torch.randn(16, K).bfloat16().requires_grad_()
        first, second = (torch.randn(32, K).bfloat16().requires_grad_() for _ in range(2))
        frozen = torch.randn(32, K).bfloat16()
        dys = [torch.randn(32, 32).bfloat16() for _ in range(2)]
        ys = fp8_all_gather_gemm(x, [first, frozen], overlap, recipe)
        plain = torch.autograd.grad(ys, [x, first], dys)
        second.data.copy_(first.data)
        second.main_grad = torch.ones(32, K)
        ys = fp8_all_gather_gemm(x, [second, frozen], overlap, recipe)
        x.grad = None
        torch.autograd.backward(ys, dys)
        assert second.grad is None and torch.equal(x.grad, plain[0])
        # not rounded to bfloat16, as dW is
        torch.testing.assert_close(second.main_grad - 1, plain[1].float(), rtol=2**-8, atol=2**-12)
        # without gradients nothing is kept; of a frozen x no gradient is made
        with torch.no_grad():
            assert torch.equal(fp8_all_gather_gemm(x, [first], overlap, recipe)[0], ys[0])
        y = fp8_gemm_reduce_scatter(x.detach(), second, overlap, recipe)
        y.backward(torch.ones_like(y))
        assert second.grad is None

    World(2).run(one)


@pytest.mark.parametrize("function", [fp8_all_gather_gemm, fp8_gemm_reduce_scatter])
def test_recipes_that_do_not_serve_are_named(function: Any) -> None:
    def one(overlap: Overlap, recipe: Any) -> None:
        weight = torch.zeros(4, K)
        function(torch.zeros(2, K), [weight] if function is fp8_all_gather_gemm else weight, overlap, recipe)

    for recipe, got in ((Tensor(scale="delayed"), "tensor-delayed"), ("row", "'row'")):
        with pytest.raises(ValueError, match=f"{function.__name__}: recipe must be Tensor.* got {got}"):
            World(1).run(lambda overlap, recipe=recipe: one(overlap, recipe))


def test_scales_by_tensor_are_those_of_all_ranks() -> None:
    """A rank that has nothing of a tensor, NaN and infinity on one of them."""

    def one(overlap: Overlap) -> list[float]:
        plain = torch.full((3,), overlap.rank + 1.0)
        with_nan = torch.tensor([1.0, float("nan") if overlap.rank else 2.0]).bfloat16()
        on_one = torch.tensor([7.0]) if overlap.rank else torch.empty(0)
        tensors = [plain, with_nan, on_one, torch.full((2,), float("inf"))]
        return [s.item() for s in whole_scales(overlap, tensors, ["e4m3"] * 3 + ["e5m2"], False)]

    assert World(2).run(one) == [[224.0, 1.0, 64.0, 1.0]] * 2
