"""grouped_gemm: group sizes, tails, layouts, what rows of none may hold, errors."""

import pytest
import torch
from torch import Tensor

from powertrain.ops import grouped_gemm as module
from powertrain.ops.cases.grouped_gemm import _plain
from powertrain.ops.grouped_gemm import grouped_gemm, grouped_gemm_ref
from powertrain.runtime.dispatch import disable
from powertrain.runtime.target import Target
from powertrain.testing.numerics import check


def _tensors(
    device: torch.device, ends: list[int], T: int, N: int, K: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor | None]:
    x, weight = torch.randn(T, K, device=device), torch.randn(len(ends), N, K, device=device) * K**-0.5
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    return {"x": x.to(dtype).requires_grad_(), "weight": weight.to(dtype).requires_grad_(), "offsets": offsets}


def _check(tensors: dict[str, Tensor | None]) -> None:
    check(grouped_gemm, _plain, grouped_gemm_ref, tensors)


# one group, empty ones first and last; every group empty; one row each; more groups than rows; two tiles of rows
@pytest.mark.parametrize(
    "ends, T",
    [([0, 5, 5], 5), ([0, 0], 3), ([1, 2, 3], 3), ([0, 1, 1, 1, 2, 2, 2], 2), ([70, 140], 140)],
    ids=["ends-empty", "all-empty", "one-row", "more-groups", "two-tiles"],
)
def test_group_sizes(ends: list[int], T: int, device: torch.device) -> None:
    _check(_tensors(device, ends, T, 24, 40))


# 64 and 128: descriptors for the transposed weight too; 72: a last block that reaches past the group's weight
@pytest.mark.parametrize("N, K", [(64, 128), (72, 40)])
def test_sixteen_bits(N: int, K: int, device: torch.device) -> None:
    _check(_tensors(device, [3, 20, 33], 37, N, K, torch.bfloat16))


def test_other_groups_and_rows_of_none_may_hold_nan(device: torch.device) -> None:
    tensors = _tensors(device, [3, 5, 9], 12, 72, 64, torch.bfloat16)
    x, weight, offsets = (tensors[name].detach() for name in ("x", "weight", "offsets"))
    x[3:5], x[9:], weight[1] = (float("nan"),) * 3
    x.requires_grad_(), weight.requires_grad_()
    y = grouped_gemm(x, weight, offsets)
    y.backward(torch.ones_like(y))
    kept = torch.tensor([0, 1, 2, 5, 6, 7, 8], device=device)
    assert y[kept].isfinite().all() and x.grad[kept].isfinite().all() and weight.grad[[0, 2]].isfinite().all()
    assert y[3:5].isnan().all() and weight.grad[1].isnan().all()
    assert not y[9:].any() and not x.grad[9:].any()


def test_transposed_weight_and_gradient(device: torch.device) -> None:
    """A weight kept as [E, K, N], and a gradient that is a transposed view."""
    tensors = _tensors(device, [2, 7], 8, 16, 24)
    _check({**tensors, "weight": tensors["weight"].detach().mT.contiguous().mT.requires_grad_()})
    x, weight, offsets = tensors.values()
    y = grouped_gemm(x, weight, offsets)
    dy = torch.randn(16, 8, device=device)
    (dx,) = torch.autograd.grad(y, x, dy.T)
    torch.testing.assert_close(dx, torch.autograd.grad(grouped_gemm(x, weight, offsets), x, dy.T.contiguous())[0])


@pytest.mark.parametrize("T, N, K", [(0, 8, 16), (4, 0, 16), (4, 8, 0)])
def test_empty(T: int, N: int, K: int, device: torch.device) -> None:
    x = torch.randn(T, K, device=device, requires_grad=True)
    weight = torch.randn(2, N, K, device=device, requires_grad=True)
    y = grouped_gemm(x, weight, torch.tensor([T // 2, T], dtype=torch.int32, device=device))
    y.backward(torch.ones_like(y))
    assert y.shape == (T, N) and not y.any() and not x.grad.any() and not weight.grad.any()


def test_float64_on_the_cpu() -> None:
    tensors = _tensors(torch.device("cpu"), [2, 7], 8, 5, 6, torch.float64)
    torch.testing.assert_close(grouped_gemm(**tensors), grouped_gemm_ref(**tensors))


def test_errors(device: torch.device) -> None:
    x, weight, offsets = _tensors(device, [2, 4], 4, 8, 16).values()
    with pytest.raises(ValueError, match=r"grouped_gemm: x must be \[T, K\], got \[2, 2, 16\]"):
        grouped_gemm(x.view(2, 2, 16), weight, offsets)
    with pytest.raises(ValueError, match=r"weight must have shape \[2, 8, 16\] \(\[E, N, last dim of x\]\), got"):
        grouped_gemm(x, weight[..., :8], offsets)
    with pytest.raises(ValueError, match=r"offsets must have shape \[2\] \(first dim of weight\), got \[1\]"):
        grouped_gemm(x, weight, offsets[:1])
    with pytest.raises(ValueError, match="offsets must be int32, got int64"):
        grouped_gemm(x, weight, offsets.long())
    with pytest.raises(ValueError, match="weight must have x's dtype float32, got bfloat16"):
        grouped_gemm(x, weight.bfloat16(), offsets)


@pytest.mark.parametrize("ends", [[3, 2], [2, 5], [-1, 2]], ids=["descending", "past-the-end", "negative"])
def test_offsets_are_checked_where_they_can_be_read(ends: list[int]) -> None:
    tensors = _tensors(torch.device("cpu"), ends, 4, 8, 16, torch.float64)
    with pytest.raises(
        ValueError, match=r"grouped_gemm: offsets must ascend from 0 to at most 4 \(rows of x\), got \["
    ):
        grouped_gemm(**tensors)


@pytest.mark.gpu
def test_pytorchs_kernel_and_ours_agree(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("PyTorch's kernel was measured on sm_90")
    tensors = _tensors(device, [300, 300, 1000, 1500], 1600, 256, 512, torch.bfloat16)
    for archs in ((), (90,)):
        monkeypatch.setattr(module, "_TORCH_PRODUCT", archs)
        monkeypatch.setattr(module, "_TORCH_WGRAD", archs)
        _check(tensors)


@pytest.mark.gpu
@pytest.mark.usefixtures("most_gpu_memory")
def test_more_than_2_31_elements(device: torch.device) -> None:
    T, K = 2**17 + 64, 2**14 + 64
    x = torch.randn(T, K, device=device, dtype=torch.bfloat16)
    weight = torch.randn(2, 64, K, device=device, dtype=torch.bfloat16)
    y = grouped_gemm(x, weight, torch.tensor([T - 32, T], dtype=torch.int32, device=device))
    torch.testing.assert_close(y[-32:], x[-32:] @ weight[1].T, rtol=2e-2, atol=1.0)


def test_torch_func_takes_plain_pytorch_where_no_kernel_serves(device: torch.device) -> None:
    x, weight = torch.randn(5, 8, device=device), torch.randn(2, 4, 8, device=device)
    offsets = torch.tensor([2, 5], dtype=torch.int32, device=device)
    leaf = weight.clone().requires_grad_()
    with disable("grouped_gemm"):
        ours = torch.func.grad(lambda w: grouped_gemm(x, w, offsets).square().sum())(weight)
        (exact,) = torch.autograd.grad(grouped_gemm(x, leaf, offsets).square().sum(), leaf)
        torch.testing.assert_close(ours, exact)
        batched = torch.vmap(lambda x: grouped_gemm(x, weight, offsets))(torch.stack([x, 2 * x]))
        torch.testing.assert_close(batched[1], 2 * batched[0])
        # of vmap(grad(f)), offsets that differ are inside grad's tensors
        per_sample = torch.vmap(torch.func.grad(lambda w, at: grouped_gemm(x, w, at).sum()), (None, 0))
        with pytest.raises(NotImplementedError, match="groups that differ take one call each"):
            per_sample(weight, torch.stack([offsets, offsets]))


@pytest.mark.parametrize(
    "sizes, columns",
    [
        ((2, 8, 4096, 14336), 64),  # one tile an SM
        ((4, 60, 2816, 2048), 128),  # 176 tiles of 64 columns would be two rounds
        ((8, 16, 5120, 8192), 64),  # several rounds of either
        ((16, 8, 28672, 4096), 0),  # as many usual tiles as keep all SMs loading
        ((32, 256, 2048, 1024), 0),
        ((64, 8, 1024, 4096), 0),
    ],
)
def test_few_rows_have_small_tiles_where_usual_ones_leave_sms_idle(sizes: tuple[int, ...], columns: int) -> None:
    assert module._few_columns(*sizes, Target.parse("sm_90")) == columns
