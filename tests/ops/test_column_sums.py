"""Sums over rows: every way they are launched, against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from powertrain.ops import column_sums as module
from powertrain.ops import flat_elements
from powertrain.ops.activations import activation
from powertrain.ops.bias_dropout_add import bias_dropout_add
from powertrain.ops.column_sums import PartialSums, column_sums
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings


def _close(out: Tensor, x: Tensor) -> None:
    """Within float32's rounding of sums in any order, and the rounding of `out`."""
    exact = x.double().sum(0)
    bound = (x.shape[0] + 2) * 2**-24 * x.double().abs().sum(0) + torch.finfo(out.dtype).eps * exact.abs()
    assert (out.double() - exact).abs().le(bound).all()


def _x(M: int, N: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(M, N, device=device).to(dtype)


# few rows are summed by one launch, in tiles by size; more by two. Eights: odd rows, of which the last are alone
@pytest.mark.parametrize(
    "M, N",
    [(1, 3), (7, 40), (200, 16), (600, 5), (600, 1040), (100, 1032), (20, 1032), (2, 8200), (40, 768), (0, 9), (5, 0)],
)
@pytest.mark.parametrize("few", [1024, 0], ids=["one", "two"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.kernels
def test_sizes(
    M: int, N: int, few: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FEW", few)
    x, out = _x(M, N, dtype, device), torch.full((N,), torch.nan, dtype=dtype, device=device)
    column_sums(x, out)
    _close(out, x)


@pytest.mark.parametrize("M, N", [(83, 9), (64, 33), (6, 341)])
@pytest.mark.kernels
def test_odd_rows_as_eights(M: int, N: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEW", 0)
    monkeypatch.setattr(flat_elements, "_MANY", 0)
    x, out = _x(M, N, torch.bfloat16, device), torch.full((N,), torch.nan, device=device)
    column_sums(x, out)
    _close(out, x)


@pytest.mark.kernels
def test_rows_of_a_wider_tensor_and_an_expanded_row(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = _x(50, 100, torch.float32, device)
    for few in (1024, 0):
        monkeypatch.setattr(module, "_FEW", few)
        for x in (wide[:, 3:80], wide[::2], wide[:1].expand(50, 100)):
            out = torch.full((x.shape[1],), torch.nan, device=device)
            column_sums(x, out)
            _close(out, x)


@pytest.mark.kernels
def test_partial_sums_of_two_outputs_and_two_launches(device: torch.device) -> None:
    outs = [torch.full((37,), torch.nan, dtype=dtype, device=device) for dtype in (torch.float16, torch.float32)]
    sums = PartialSums(outs, 5, 2)
    assert [[len(part) for part in parts] for parts in sums.launches] == [[5, 5], [2, 2]]
    for parts in sums.launches:
        for part in parts:
            part.normal_()
    sums.add_up()
    for i, out in enumerate(outs):
        _close(out, torch.cat([parts[i] for parts in sums.launches]))


def test_one_program_writes_the_output_itself(device: torch.device) -> None:
    out = torch.empty(4, dtype=torch.bfloat16, device=device)
    ((nothing, partial),) = PartialSums([None, out], 1).launches
    assert nothing is None and partial.data_ptr() == out.data_ptr() and partial.dtype == out.dtype
    assert PartialSums([None, None], 3, 1).launches == [(None, None)] * 2
    PartialSums([None, None], 3).add_up()


@pytest.mark.skipif(settings().interpret, reason="on a CPU the interpreter's launches are not recorded")
@pytest.mark.parametrize(
    "function, kernel, few",
    [
        (lambda x, bias: activation(x, "gelu", bias), "_activation_bwd_kernel", 256),
        (lambda x, bias: bias_dropout_add(x, bias, None, 0.1), "_bias_dropout_add_bwd_kernel", 64),
    ],
    ids=["gelu", "dropout"],
)
def test_the_backward_of_few_rows_is_one_launch(function: Callable[..., Tensor], kernel: str, few: int) -> None:
    for rows in (few, few + 1):
        x, bias = (torch.empty(*shape, device="meta", requires_grad=True) for shape in ((rows, 512), (512,)))
        with record("H200"):
            out = function(x, bias)
        with record("H200") as wanted:
            torch.autograd.grad(out, (x, bias), torch.empty_like(out))
        names = [spec.kernel.name for spec in wanted.specs]
        assert names == ([kernel] if rows == few else [kernel, "_column_sums_kernel"])
