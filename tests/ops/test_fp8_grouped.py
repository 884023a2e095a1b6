"""fp8_grouped_gemm: groups of any sizes, bits of one group beside `fp8_linear`'s, rows of none, errors, launches."""

import pytest
import torch
from torch import Tensor

from powertrain.ops.fp8.formulas import dequantized, quantize_ref
from powertrain.ops.fp8.grouped import fp8_grouped_gemm
from powertrain.ops.fp8.quantize import fp8_quantize, same_bits
from powertrain.ops.grouped_gemm import grouped_gemm
from powertrain.runtime.settings import settings

both_recipes = pytest.mark.parametrize("by", ["row", "block"])


def _grads(x: Tensor, weight: Tensor, ends: list[int], **options: object) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    offsets = torch.tensor(ends, dtype=torch.int32, device=x.device)
    y = fp8_grouped_gemm(x, weight, offsets, **options)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(x))
    return [y.detach(), x.grad, weight.grad]


def _values(x: Tensor, by: str, columns: bool = False, **options: object) -> Tensor:
    copies = quantize_ref(x, by, "e4m3", **options)
    return dequantized(copies.columns if columns else copies.rows, x.shape[0 if columns else 1]).double()


# one group; none of 128 rows; more than 128 and parts of blocks at both ends; empty ones; rows of none; one row
def _close(found: Tensor, right: Tensor, device: torch.device) -> bool:
    """Float32 sums; tensor cores keep about 14 bits of each sum of 128, relative to its largest."""
    if device.type == "cpu" or not right.numel():
        return torch.allclose(found, right, rtol=1e-4, atol=1e-4)
    return bool((found - right).abs().max() <= 2**-11 * (right.abs().max() + 1))


@pytest.mark.parametrize("ends", [[40], [7, 30, 40], [3, 150, 290], [0, 5, 5, 20], [0, 0], [1]], ids=str)
@both_recipes
def test_groups_of_any_sizes(by: str, ends: list[int], device: torch.device) -> None:
    """Beside products of the rounded operands in float64: nothing but float32 sums differs."""
    T, N, K = max(ends[-1], 40), 24, 35
    x, weight = torch.randn(T, K), torch.randn(len(ends), N, K)
    x[ends[-1] :] = torch.nan
    y, dx, dw = (t.cpu().double() for t in _grads(x.to(device), weight.to(device), ends, by=by))
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    offsets = torch.tensor(ends, dtype=torch.int32)
    rows = _values(x, "group" if by == "block" else by)
    x_t, dy_t = (_values(t, "group", True, offsets=offsets) for t in (x, dy))
    start = 0
    for e, end in enumerate(ends):
        w, scale = _values(weight[e], by), quantize_ref(weight[e], by, "e4m3").scale_inv
        part, start = slice(start, end), end
        assert _close(y[part], rows[part] @ w.T, device)
        assert _close(dw[e], dy_t[:, part] @ x_t[:, part].T, device)
        if part.start == part.stop:
            continue
        if by == "row":
            right = _values(dy[part], "row", fold=scale) @ (w / scale.double()[:, None])
        else:
            right = _values(dy[part], "group") @ w
        assert _close(dx[part], right, device)
    assert not y[ends[-1] :].any() and not dx[ends[-1] :].any()


@both_recipes
def test_another_groups_rows_change_nothing_but_shared_scales(by: str, device: torch.device) -> None:
    """y and dx of a group are those of the group alone, to the bit; whatever the others hold."""
    x, weight = torch.randn(60, 40, device=device), torch.randn(3, 24, 40, device=device)
    y, dx, _ = _grads(x, weight, [10, 33, 60], by=by)
    other = x.clone()
    other[:10], other[33:] = torch.nan, torch.inf
    found_y, found_dx, _ = _grads(other, weight, [10, 33, 60], by=by)
    assert torch.equal(found_y[10:33], y[10:33]) and torch.equal(found_dx[10:33], dx[10:33])


@both_recipes
def test_empty(by: str, device: torch.device) -> None:
    for T, E, N, K in ((0, 2, 3, 4), (5, 0, 3, 4), (5, 2, 0, 4), (5, 2, 3, 0)):
        x, weight = torch.randn(T, K, device=device), torch.randn(E, N, K, device=device)
        y, dx, dw = _grads(x, weight, [0] * E, by=by)
        assert y.shape == (T, N) and not y.any() and not dx.any() and not dw.any()
        assert dx.shape == x.shape and dw.shape == weight.shape


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_bytes_by_group_of_rows(format: str, device: torch.device) -> None:
    """Rows of no group are zeros, also in the scales they share; each row takes its group's factors."""
    x, fold = torch.randn(150, 40), torch.rand(3, 40) + 0.5
    x[130:] = torch.nan
    offsets = torch.tensor([3, 3, 130], dtype=torch.int32)
    for by, options in (("row", {"fold": fold}), ("row", {}), ("group", {})):
        right = quantize_ref(x, by, format, offsets=offsets, **options)
        there = {name: t.to(device) for name, t in options.items()}
        found = fp8_quantize(x.to(device), by, format, offsets=offsets.to(device), columns=by == "group", **there)
        for part in ("data", "scale_inv", *(("data_t", "scale_inv_t") if by == "group" else ())):
            assert same_bits(getattr(found, part), getattr(right, part)), (by, part)
        assert not found.data[130:].view(torch.uint8).any()


def test_formats_and_scales(device: torch.device) -> None:
    """Of gradients, and powers of two: as near as e5m2's two bits and e4m3's three allow."""
    x, weight = torch.randn(40, 48, device=device), torch.randn(2, 32, 48, device=device)
    x_, weight_ = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = grouped_gemm(x_, weight_, torch.tensor([17, 40], dtype=torch.int32, device=device))
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(device))
    exact = [y.detach(), x_.grad, weight_.grad]
    for options, limit in (({}, 0.05), ({"grad_format": "e5m2"}, 0.09), ({"power_of_two": False}, 0.05)):
        for by in ("row", "block"):
            errors = [
                (a - b).norm() / b.norm()
                for a, b in zip(_grads(x, weight, [17, 40], by=by, **options), exact, strict=True)
            ]
            assert all(0.01 < error < limit for error in errors), errors


def test_errors(device: torch.device) -> None:
    x, weight = torch.zeros(4, 3, device=device), torch.zeros(2, 5, 3, device=device)
    offsets = torch.tensor([2, 4], dtype=torch.int32, device=device)
    for call, message in (
        (lambda: fp8_grouped_gemm(x[0], weight, offsets), r"fp8_grouped_gemm: x must be \[T, K\], got \[3\]"),
        (lambda: fp8_grouped_gemm(x, weight[0], offsets), r"weight must be \[E, N, K\], got \[5, 3\]"),
        (lambda: fp8_grouped_gemm(x, weight.half(), offsets), "weight must have x's dtype float32, got float16"),
        (lambda: fp8_grouped_gemm(x, weight, offsets.long()), "offsets must be int32, got int64"),
        (lambda: fp8_grouped_gemm(x, weight, offsets[:1]), r"offsets must have shape \[2\]"),
        (lambda: fp8_grouped_gemm(x, weight, offsets, by="tensor"), "by must be one of 'row', 'block', got 'tensor'"),
        (lambda: fp8_grouped_gemm(x, weight, offsets, grad_format="e3m4"), "grad_format must be one of"),
        (lambda: fp8_quantize(x, "tensor", offsets=offsets), "fp8_quantize: by must be one of 'row', 'group'"),
        (lambda: fp8_quantize(x, "row", offsets=offsets), "columns must be False with offsets by row, got True"),
        (lambda: fp8_quantize(x, "group", offsets=offsets.float()), "offsets must be int32, got float32"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    if device.type == "cpu" and not settings().interpret:
        with pytest.raises(ValueError, match="offsets must ascend from 0 to at most 4"):
            fp8_grouped_gemm(x, weight, torch.tensor([3, 9], dtype=torch.int32))


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
def test_what_a_gpu_would_launch() -> None:
    from powertrain.runtime.recording import record

    def kernels(arch: str, by: str, K: int = 64) -> list[str]:
        x = torch.empty(512, K, dtype=torch.bfloat16, device="meta", requires_grad=True)
        weight = torch.empty(4, 128, K, dtype=torch.bfloat16, device="meta", requires_grad=True)
        with record(arch) as wanted:
            fp8_grouped_gemm(x, weight, torch.empty(4, dtype=torch.int32, device="meta"), by=by).sum().backward()
        return [spec.kernel.name for spec in wanted.specs]

    # by row y and dx are torch's on sm_90, where its rows are whole 16 bytes
    assert "_fp8_grouped_kernel" not in kernels("sm_90", "row") and "_fp8_grouped_kernel" in kernels("sm_90", "row", 60)
    assert {"_fp8_grouped_kernel", "_fp8_grouped_wgrad_kernel"} <= set(kernels("sm_90", "block"))
    assert "_fp8_grouped_kernel" in kernels("sm_89", "row")
    assert not any("fp8" in name for name in kernels("sm_80", "block"))
