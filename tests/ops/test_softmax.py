"""scaled_softmax: size classes, masks of every shape, fully masked rows and errors."""

from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.softmax import scaled_softmax, scaled_softmax_ref
from powertrain.ops.softmax_kernels import _plan
from powertrain.runtime.target import Target
from powertrain.testing.numerics import check

INF = float("inf")


def _check(x: Tensor, mask: Tensor | None = None, **options: Any) -> None:
    tensors = {"x": x.requires_grad_(), "mask": mask}
    ref = lambda **t: scaled_softmax_ref(**t, **options)  # noqa: E731
    check(lambda **t: scaled_softmax(**t, **options), ref, ref, tensors)


# 1: one key; 300: several rows a tile; 2050: past a power of two; 32768: the widest block; 32780: looped, ragged
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sk", [1, 300, 2050, 32768, 32780], ids=lambda n: f"K{n}")
def test_sizes(sk: int, is_causal: bool, device: torch.device) -> None:
    _check(torch.randn(2, 3, sk, device=device) * 3, scale=0.7, is_causal=is_causal)


# a block and a tail: 257 the narrowest of 32, 583 and 700 no whole vectors or half ones, 768 + 1 one block again; a
# mask may be of the tail alone
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sk", [257, 583, 700, 769, 1100, 2571, 5156, 17003], ids=lambda n: f"K{n}")
@pytest.mark.kernels
def test_block_and_tail(sk: int, dtype: torch.dtype, device: torch.device) -> None:
    x = (3 * torch.randn(2, 3, sk, device=device)).to(dtype)
    _check(x.detach().clone(), scale=0.7, is_causal=True)
    mask = torch.rand(2, 3, sk, device=device) < 0.4
    mask[0, 0], mask[0, 1, :512], mask[1, 0, 512:] = True, True, True
    for fully_masked in ("zero", "uniform"):
        _check(x.detach().clone(), mask, scale=-0.5, fully_masked=fully_masked)


# the interpreter runs any number of warps; compilers take powers of 2
def test_warps_of_every_width_are_a_power_of_two() -> None:
    target = Target.of(torch.device("meta"))
    for columns in range(1, 33000):
        for queries in (1, 3, 4096):
            warps = _plan(queries, columns, queries, target).num_warps
            assert warps in (1, 2, 4, 8, 16), (queries, columns, warps)


@pytest.mark.parametrize("sq, sk", [(5, 3), (1, 7), (7, 20)])
@pytest.mark.parametrize("fully_masked", ["zero", "uniform"])
def test_aligned(sq: int, sk: int, fully_masked: str, device: torch.device) -> None:
    x = torch.randn(3, 5, sq, sk, device=device)
    _check(x, is_causal=True, fully_masked=fully_masked)
    y = scaled_softmax(x, is_causal=True, fully_masked=fully_masked)
    assert not (y[..., -1, :] == 0).any() and (sq < 2 or not y[..., -2, sk - 1].any())
    if sq > sk:
        assert torch.equal(y[..., 0, :], torch.full_like(y[..., 0, :], 1 / sk if fully_masked == "uniform" else 0.0))


# GPT-NeoX's two, keys only, queries only, heads only, everything, and shapes with fewer dims than x
@pytest.mark.parametrize(
    "shape",
    [(3, 1, 4, 6), (1, 1, 4, 6), (3, 1, 1, 6), (1, 1, 4, 1), (1, 2, 1, 6), (3, 2, 4, 6), (4, 6), (6,), ()],
    ids=str,
)
@pytest.mark.parametrize("fully_masked", ["zero", "uniform"])
def test_masks(shape: tuple[int, ...], fully_masked: str, device: torch.device) -> None:
    mask = torch.rand(shape, device=device) < 0.4
    if mask.dim() > 1:
        mask[..., 0, :] = True
    _check(torch.randn(3, 2, 4, 6, device=device), mask, fully_masked=fully_masked, scale=-0.5)


@pytest.mark.parametrize("lead", [(), (3,), (2, 2, 3)], ids=str)
@pytest.mark.parametrize("fully_masked", ["zero", "uniform"])
def test_leading_dims_mask_and_causal_together(lead: tuple[int, ...], fully_masked: str, device: torch.device) -> None:
    mask = torch.rand(*lead[-1:], 33, 33, device=device) < 0.4
    # rows that the mask and the causal order leave no key only together
    mask[..., 0, 0] = mask[..., 2, :3] = True
    _check(torch.randn(*lead, 33, 33, device=device), mask, is_causal=True, fully_masked=fully_masked)


# scores of -inf alone are no keys either; 583: a block and a tail, 32800: looped
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sk", [9, 583, 32800])
def test_rows_without_keys_get_no_gradient(sk: int, is_causal: bool, device: torch.device) -> None:
    x = torch.randn(2, 3, sk, device=device)
    x[0, 1] = x[1, 0, : sk - 2] = -INF
    _check(x, is_causal=is_causal, fully_masked="uniform")


def test_mask_with_strides(device: torch.device) -> None:
    x = torch.randn(2, 3, 4, 5, device=device)
    _check(x, (torch.rand(2, 5, 4, device=device) < 0.4).mT[:, None])
    _check(torch.randn(2, 2, 2, 3, 4, device=device), torch.rand(2, 1, 2, 3, 4, device=device) < 0.4)


@pytest.mark.parametrize("fully_masked", ["zero", "uniform"])
def test_looped_mask(fully_masked: str, device: torch.device) -> None:
    mask = torch.rand(1, 1, 3, 32800, device=device) < 0.4
    mask[..., 1, :] = True
    mask[..., 2, :32768] = True  # all but the last block's lanes
    _check(torch.randn(1, 2, 3, 32800, device=device), mask, fully_masked=fully_masked)


@pytest.mark.parametrize("scale", [0.0, 1e-37])
def test_small_scales_of_large_numbers(scale: float, device: torch.device) -> None:
    x = torch.tensor([[1e37, -1e38, 2e37, 1e38, 0.0]], device=device)
    mask = torch.tensor([[False, False, False, False, True]], device=device)
    expected = torch.softmax(x[:, :4].double() * scale, -1).float()
    torch.testing.assert_close(scaled_softmax(x, mask=mask, scale=scale), torch.nn.functional.pad(expected, (0, 1)))


@pytest.mark.parametrize("scale", [0.0, -2.0, 1e-3])
@pytest.mark.parametrize("sk", [9, 32800])
def test_scale(sk: int, scale: float, device: torch.device) -> None:
    _check(torch.randn(4, sk, device=device), scale=scale, is_causal=True)


@pytest.mark.parametrize("sk", [9, 583, 32800])
def test_infinities_and_nan(sk: int, device: torch.device) -> None:
    x = torch.randn(5, sk, device=device)
    x[0], x[1, 2:], x[2, 3] = -INF, -INF, float("nan")
    x[3] = 1e30 * torch.arange(sk, device=device)
    x[4] = torch.finfo(torch.float32).min  # as models add it to mask out
    y = scaled_softmax(x)
    assert not y[0].any() and y[2].isnan().all() and not y[1, 2:].any()
    torch.testing.assert_close(y[[1, 3, 4]], torch.softmax(x[[1, 3, 4]], -1))


@pytest.mark.kernels
@pytest.mark.parametrize("sk", [8, 583, 32800])
def test_causal_reads_nothing_above_the_diagonal(sk: int, device: torch.device) -> None:
    x = torch.randn(2, 3, sk, device=device)
    above = torch.arange(sk, device=device) > torch.arange(3, device=device)[:, None] + sk - 3
    poisoned = x.masked_fill(above, float("nan")).requires_grad_()
    y = scaled_softmax(poisoned, is_causal=True)
    torch.testing.assert_close(y, scaled_softmax_ref(x, is_causal=True))
    (dx,) = torch.autograd.grad(y, poisoned, torch.ones_like(y).masked_fill(above, float("nan")))
    assert dx.isfinite().all() and not dx[:, above].any()


@pytest.mark.kernels
def test_saves_only_the_output(device: torch.device) -> None:
    x, mask = torch.randn(1, 1, 3, 8, device=device, requires_grad=True), torch.zeros(3, 8, dtype=torch.bool)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        y = scaled_softmax(x, mask=mask.to(device), scale=0.5)
    assert saved == [y.data_ptr()]


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4), (2, 4, 0), (0,)])
def test_empty(shape: tuple[int, ...], device: torch.device) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    y = scaled_softmax(x, is_causal=len(shape) > 1)
    y.sum().backward()
    assert y.shape == shape and x.grad.shape == shape


def test_errors(device: torch.device) -> None:
    x = torch.randn(2, 3, 4, device=device)
    with pytest.raises(ValueError, match="mask must be bool, got float32"):
        scaled_softmax(x, mask=x)
    with pytest.raises(ValueError, match=r"mask must broadcast to x's shape \[2, 3, 4\], got \[2, 4\]"):
        scaled_softmax(x, mask=torch.zeros(2, 4, dtype=torch.bool, device=device))
    with pytest.raises(ValueError, match="x must have at least 2 dims, got 1"):
        scaled_softmax(x[0, 0], is_causal=True)
    with pytest.raises(ValueError, match="fully_masked must be one of 'zero', 'uniform', got 'nan'"):
        scaled_softmax(x, fully_masked="nan")


@pytest.mark.gpu
@pytest.mark.usefixtures("most_gpu_memory")
def test_more_than_2_31_elements(device: torch.device) -> None:
    x = torch.randn(1025, 1024, 2048, device=device, dtype=torch.bfloat16).requires_grad_()
    y = scaled_softmax(x, is_causal=True)
    y.backward(x.detach())
    tail = x.detach()[-1:].clone().requires_grad_()
    expected = scaled_softmax(tail, is_causal=True)
    expected.backward(tail.detach())
    assert torch.equal(y[-1:], expected) and torch.equal(x.grad[-1:], tail.grad)


def test_no_queries_with_a_mask_and_many_dims(device: torch.device) -> None:
    x = torch.randn(2, 3, 4, 0, 7, device=device, requires_grad=True)
    y = scaled_softmax(x, mask=torch.ones(1, 1, 4, 1, 1, dtype=torch.bool, device=device))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert y.shape == dx.shape == x.shape
