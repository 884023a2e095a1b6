"""FP8 products over ranks beside `fp8_linear` of what each would have after gathering: for threads and processes."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.fp8.formulas import scale_of
from powertrain.ops.fp8.linear import fp8_linear
from powertrain.parallel.cost_model import Product
from powertrain.parallel.fp8_gather import fp8_all_gather_gemm
from powertrain.parallel.fp8_scatter import fp8_gemm_reduce_scatter
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.base import Choice
from powertrain.quant import Block, Row
from powertrain.quant import Tensor as TensorRecipe
from powertrain.quant.recipe import Recipe, grad_format

RECIPES: dict[str, Recipe] = {
    "tensor": TensorRecipe(),
    "tensor_of_any_scale": TensorRecipe(power_of_two=False, format="e4m3"),
    "row": Row(),
    "row_hybrid": Row(format="hybrid", power_of_two=False),
    "block": Block(),
}
K = 144  # a whole group of 128 and a partial one
WIDTHS = (128, 21)  # features out on a rank: a whole block, and no whole 16


def force(overlap: Overlap, way: Any) -> None:
    """Every product in sequence, or chunk by chunk."""
    overlap.planner.choices.clear()
    overlap.planner._chosen = lambda product: Choice(way, "tried")  # type: ignore[method-assign]


@cache
def operands(rows: int, ranks: int) -> dict[str, Tensor]:
    """Of all ranks, the same on each. FP8 rounds these whole numbers, but their products' float32 sums are exact in
    any order; magnitudes differ from row to row."""
    g = torch.Generator().manual_seed(rows)

    def whole_numbers(*shape: int) -> Tensor:
        # largest magnitudes of 4 to 252: no scale is 1
        scales = torch.exp2(torch.randint(0, 3, (shape[0], 1), generator=g).float()) / 64
        return (torch.randint(-63, 64, shape, generator=g) * scales).bfloat16()

    made = {
        "x": whole_numbers(rows, K),
        "wide_x": whole_numbers(rows, ranks * K),
        "row_dy": whole_numbers(rows, WIDTHS[0]),
    }
    for i, width in enumerate(WIDTHS):
        made |= {
            f"w{i}": whole_numbers(ranks * width, K),
            f"b{i}": whole_numbers(ranks * width, 1)[:, 0],
            f"dy{i}": whole_numbers(rows, ranks * width),
        }
    return made | {"row_w": whole_numbers(WIDTHS[0], ranks * K), "row_b": whole_numbers(WIDTHS[0], 1)[:, 0]}


def whole_linear(
    x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor, recipe: Recipe, of: tuple[Tensor, Tensor, Tensor]
) -> list[Tensor]:
    """y, dx, dw, db of `fp8_linear`; by tensor with the scales of the whole tensors `of`."""
    leaves = [t.clone().requires_grad_() for t in ((x, w) if b is None else (x, w, b))]
    scales = None
    if recipe.by == "tensor":
        formats = ("e4m3", "e4m3", grad_format(recipe))
        parts = zip(of, formats, strict=True)
        scales = torch.cat([scale_of(t.float().abs().max()[None], f, recipe.power_of_two) for t, f in parts])
    y = fp8_linear(
        *leaves, by=recipe.by, grad_format=grad_format(recipe), power_of_two=recipe.power_of_two, scales=scales
    )
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def added(parts: list[Tensor]) -> Tensor:
    """As transports add the ranks' parts."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


@cache
def gathered(rows: int, ranks: int, recipe: Recipe) -> list[list[list[Tensor]]]:
    """By weight and rank: the same of every way, and on threads of every rank."""
    t = operands(rows, ranks)
    found = []
    for i, width in enumerate(WIDTHS):
        w, b, dy = t[f"w{i}"], t[f"b{i}"], t[f"dy{i}"]
        parts = [slice(r * width, (r + 1) * width) for r in range(ranks)]
        of = (t["x"], w, dy)
        found.append([whole_linear(t["x"], w[p], b[p], dy[:, p].contiguous(), recipe, of) for p in parts])
    return found


@cache
def gathered_by_one(rows: int, ranks: int, recipe: Recipe) -> list[Tensor]:
    t = operands(rows, ranks)
    return whole_linear(t["x"], t["w0"], t["b0"], t["dy0"], recipe, (t["x"], t["w0"], t["dy0"]))


@cache
def scattered(rows: int, ranks: int, recipe: Recipe) -> list[list[Tensor]]:
    """By rank."""
    t = operands(rows, ranks)
    of = (t["wide_x"], t["row_w"], t["row_dy"])
    parts = [slice(r * K, (r + 1) * K) for r in range(ranks)]
    return [whole_linear(t["wide_x"][:, p], t["row_w"][:, p], None, t["row_dy"], recipe, of) for p in parts]


def check_gather(overlap: Overlap, recipe: Recipe, counts: list[int]) -> None:
    rank, size, t = overlap.rank, overlap.size, operands(sum(counts), overlap.size)
    start = sum(counts[:rank])
    mine = slice(start, start + counts[rank])
    x = t["x"][mine].clone().requires_grad_()
    weights, biases, dys = [], [], []
    for i, width in enumerate(WIDTHS):
        part = slice(rank * width, (rank + 1) * width)
        weights.append(t[f"w{i}"][part].clone().requires_grad_())
        biases.append(t[f"b{i}"][part].clone().requires_grad_())
        dys.append(t[f"dy{i}"][:, part].contiguous())
    found = gathered(sum(counts), size, recipe)
    expected = [of_ranks[rank] for of_ranks in found]
    ys = fp8_all_gather_gemm(x, weights, overlap, recipe, biases=biases, rows=counts)
    grads = torch.autograd.grad(ys, [x, *weights, *biases], dys)
    dx = added([one[1] + other[1] for one, other in zip(*found, strict=True)]).bfloat16()
    for i in range(len(WIDTHS)):
        y, _, dw, db = expected[i]
        for name, got, right in (("y", ys[i], y), ("dw", grads[1 + i], dw), ("db", grads[3 + i], db)):
            assert torch.equal(got, right), f"{name}{i} by {recipe}, rows {counts}"
    assert torch.equal(grads[0], dx[mine]), f"dx by {recipe}, rows {counts}"
    # and of a layer that one rank has whole; by block where no block is two ranks'
    N = WIDTHS[0]
    part = slice(rank * N, (rank + 1) * N)
    y, _, dw, _ = gathered_by_one(sum(counts), size, recipe)
    assert torch.equal(ys[0], y[:, part]) and torch.equal(grads[1], dw[part]), f"{recipe}, rows {counts}"


def check_scatter(overlap: Overlap, recipe: Recipe, counts: list[int]) -> None:
    rank, size, t = overlap.rank, overlap.size, operands(sum(counts), overlap.size)
    start = sum(counts[:rank])
    mine = slice(start, start + counts[rank])
    found = scattered(sum(counts), size, recipe)
    if size == 1:  # its product adds the bias before it is rounded
        return
    x, w, b = (
        part.clone().requires_grad_()
        for part in (*(t[name][:, rank * K : (rank + 1) * K] for name in ("wide_x", "row_w")), t["row_b"])
    )
    y = fp8_gemm_reduce_scatter(x, w, overlap, recipe, bias=b, rows=counts)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), t["row_dy"][mine])
    right = added([one[0] for one in found])
    if overlap.planner.choose(Product("scatter", sum(counts), WIDTHS[0], K, x.dtype)).way == "sequential":
        right = right.bfloat16()  # a collective rounds its sums
    assert torch.equal(y, (right + t["row_b"]).bfloat16()[mine]), f"y by {recipe}, rows {counts}"
    assert torch.equal(dx, found[rank][1]) and torch.equal(dw, found[rank][2]), f"gradients by {recipe}, rows {counts}"
    torch.testing.assert_close(db.float(), t["row_dy"].float().sum(0), rtol=2**-8, atol=0)


def cases(size: int) -> list[list[int]]:
    """Rows of each rank: of whole groups of 128, of parts of them, none on a rank."""
    return [[128] * (size - 1) + [40], [3 + 2 * rank for rank in range(size)], [9] * (size - 1) + [0]][: size + 1]


def check(overlap: Overlap) -> None:
    for way in ("chunked", "sequential"):
        force(overlap, way)
        for recipe in RECIPES.values():
            for counts in cases(overlap.size):
                check_gather(overlap, recipe, counts)
                check_scatter(overlap, recipe, counts)
