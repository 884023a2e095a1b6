"""gemm: layouts, outputs, bias, accumulation, the choice of a backend, errors."""

import pytest
import torch
from torch import Tensor

from powertrain.ops.gemm import gemm as module
from powertrain.ops.gemm.gemm import LAYOUTS, choose, gemm, gemm_ref
from powertrain.ops.gemm.hopper import Gathered, hopper_gemm, why_not
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target
from powertrain.testing.numerics import check
from tests.ops.gemm_launches import operands

META = torch.device("meta")
H200 = Target.parse("H200")


def _plain(a: Tensor, b: Tensor, layout: str, bias: Tensor | None = None) -> Tensor:
    c = {"nt": lambda: a @ b.T, "nn": lambda: a @ b, "tn": lambda: a.T @ b}[layout]()
    return c if bias is None else c + bias


# odd: nothing is a multiple of anything; even: rows of whole 16 bytes
@pytest.mark.parametrize("size", [(5, 7, 3), (48, 24, 40)], ids=["odd", "even"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_values(
    layout: str, size: tuple[int, int, int], dtype: torch.dtype, with_bias: bool, device: torch.device
) -> None:
    a, b = operands(layout, *size, dtype, device)
    bias = torch.randn(size[1], device=device).to(dtype) if with_bias else None
    check(
        lambda a, b, bias: gemm(a, b, layout=layout, bias=bias),
        lambda a, b, bias: _plain(a, b, layout, bias),
        lambda a, b, bias: gemm_ref(a, b, layout=layout, bias=bias),
        {"a": a, "b": b, "bias": bias},
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_out_of_sixteen_bits(layout: str, device: torch.device) -> None:
    """Rounded to 16 bits nowhere: as near float64 as float32's own product of the same values."""
    a, b = operands(layout, 33, 24, 40, torch.bfloat16, device)
    bias = torch.randn(24, device=device).bfloat16()
    exact = gemm_ref(a.double(), b.double(), layout=layout)
    total = torch.randn(33, 24, device=device)
    before = total.double()
    bound = 4 * torch.finfo(torch.float32).eps * exact.abs().max()
    out = torch.empty(33, 24, device=device)
    assert gemm(a, b, layout=layout, out=out) is out
    assert (out - exact).abs().max() <= bound
    assert gemm(a, b, layout=layout, out=total, accumulate=True) is total
    assert (total - (before + exact)).abs().max() <= bound
    with_bias = gemm(a, b, layout=layout, out=out, bias=bias)
    assert (with_bias - (exact + bias)).abs().max() <= bound


def test_accumulates_in_its_own_dtype(device: torch.device) -> None:
    a, b = operands("tn", 8, 16, 24, torch.float32, device)
    total = torch.randn(8, 16, device=device)
    expected = total.double() + gemm_ref(a.double(), b.double(), layout="tn")
    torch.testing.assert_close(gemm(a, b, layout="tn", out=total, accumulate=True), expected.float())


def test_strided_operands_and_result(device: torch.device) -> None:
    a, b = operands("nt", 6, 10, 8, torch.float32, device)
    wide = torch.zeros(6, 13, device=device)
    gemm(a.T.contiguous().T, b.T.contiguous().T, out=wide[:, 2:12])
    torch.testing.assert_close(wide[:, 2:12], a @ b.T)
    assert not wide[:, :2].any() and not wide[:, 12:].any()


def test_nothing_to_do(device: torch.device) -> None:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=device)

    assert gemm(empty(0, 4), empty(3, 4)).shape == (0, 3)
    assert not gemm(empty(2, 0), empty(3, 0)).any()  # no products: zeros


def test_fullgraph_compile(device: torch.device) -> None:
    a, b = operands("nt", 6, 10, 8, torch.float32, device)
    torch._dynamo.reset()

    def step(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
        gemm(a, b, layout="tn", out=total, accumulate=True)
        return gemm(a, b.T, layout="nn") + 1

    b = b[:6].contiguous()
    a = a[:, :8].contiguous()
    totals = [torch.zeros(8, 8, device=device) for _ in range(2)]
    with torch.no_grad():
        expected = step(a, b, totals[0])
        actual = torch.compile(step, fullgraph=True, backend="aot_eager")(a, b, totals[1])
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(totals[1], totals[0])


def test_gradients_are_refused_not_dropped(device: torch.device) -> None:
    a, b = operands("nt", 4, 4, 4, torch.float32, device)
    with pytest.raises(NotImplementedError, match="gemm: no gradient is defined"):
        gemm(a.requires_grad_(), b)
    with torch.no_grad():
        gemm(a, b)


_A, _B = torch.zeros(4, 8), torch.zeros(6, 8)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: gemm(_A, _B, layout="tt"), "gemm: layout must be one of 'nt', 'nn', 'tn', got 'tt'"),
        (lambda: gemm(_A[0], _B), r"gemm: a must have two dims, got \[8\]"),
        (lambda: gemm(_A, _B[:, :7]), r"gemm: b must have shape \[6, 8\]"),
        (lambda: gemm(_A, _B, layout="tn"), r"gemm: b must have shape \[4, 8\]"),
        (lambda: gemm(_A, _B.double()), "gemm: b must have a's dtype float32, got float64"),
        (lambda: gemm(_A.int(), _B.int()), "gemm: a must be float32, float16 or bfloat16, got int32"),
        (lambda: gemm(_A, _B, bias=torch.zeros(8)), r"gemm: bias must have shape \[6\]"),
        (lambda: gemm(_A, _B, out=torch.zeros(6, 4)), r"gemm: out must have shape \[4, 6\]"),
        (lambda: gemm(_A, _B, out=torch.zeros(4, 6).half()), "gemm: out must be float32 or float32, got float16"),
        (lambda: gemm(_A, _B, accumulate=True), "gemm: out must be given with accumulate"),
        (
            lambda: gemm(_A, _B, out=torch.zeros(4, 6), accumulate=True, bias=torch.zeros(6)),
            "gemm: bias must be None with accumulate",
        ),
        (lambda: gemm(_A, _B, backend="mkl"), "gemm: backend must be one of 'hopper', 'cublas', got 'mkl'"),
        (lambda: gemm(_A, _B, backend="hopper"), "gemm: backend must be another than 'hopper' off sm_90, got cpu"),
    ],
)
def test_errors(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


# M, N, K as measured: see the numbers in ops/gemm/gemm.py
@pytest.mark.parametrize(
    "size, backend, why",
    [
        ((8192, 8192, 8192), "hopper", ""),
        ((8192, 8192, 2048), "hopper", ""),
        ((2048, 14336, 8192), "hopper", ""),
        ((8192, 4096, 1024), "cublas", "K must be at least 2048"),
        ((2048, 8192, 2048), "cublas", "its tiles are 4 waves"),
        ((2048, 17152, 4096), "cublas", "less than 95%"),
        ((16384, 2560, 8192), "cublas", "N must be at least 4096, is 2560"),
        ((16384, 6144, 4096), "cublas", "it was measured at 0.98 to 0.996"),
    ],
)
def test_choice_by_size(size: tuple[int, int, int], backend: str, why: str) -> None:
    choice = choose(*size, target=H200)
    assert choice.backend == backend
    assert why in str(choice)


def test_choice_by_gpu_and_dtype() -> None:
    size = (8192, 8192, 8192)
    assert "runs on sm_90 only, got sm_80" in str(choose(*size, target=Target.parse("A100")))
    assert "not float32" in str(choose(*size, dtype=torch.float32, target=H200))
    assert "16 bits" in str(choose(*size, accumulate=True, target=H200))
    assert choose(*size, out_dtype=torch.float32, accumulate=True, target=H200).backend == "hopper"


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
def test_what_a_gpu_would_launch() -> None:
    """Meta tensors foretell the kernel on sm_90, and none where cuBLAS serves."""

    def kernels(arch: str, K: int = 4096) -> list[str]:
        a, b = operands("nt", 8192, 8192, K, torch.bfloat16, META)
        with record(arch) as wanted:
            gemm(a, b)
        return [spec.kernel.name for spec in wanted.specs]

    assert kernels("sm_90") == ["_gemm_kernel"]
    assert kernels("sm_90", K=4097) == []  # rows of no whole 16 bytes
    assert kernels("sm_80") == kernels("sm_100") == []


@pytest.mark.skipif(settings().interpret, reason="there the kernel is not for use at all")
def test_a_failed_self_test_leaves_it_to_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_self_tests", {0: "its self-test gave 3 wrong results of 32768"})
    assert module.fails_here(torch.device("cuda", 0)) == "its self-test gave 3 wrong results of 32768"


@pytest.mark.parametrize(
    "a, message",
    [
        (torch.zeros(8, 12, dtype=torch.bfloat16)[:, :8], "a's rows must be contiguous and 16-byte aligned"),
        (torch.zeros(8, 8, dtype=torch.bfloat16).T[:, :4], "a's rows must be contiguous"),
        (torch.zeros(65, dtype=torch.bfloat16)[1:].view(8, 8), "a must start at a multiple of 16 bytes"),
        (torch.zeros(8, 8), "a must be bfloat16 or float16, is float32"),
    ],
)
def test_memory_the_kernel_cannot_read(a: Tensor, message: str) -> None:
    assert message in str(why_not(a, torch.zeros(8, 8, dtype=torch.bfloat16), None))


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_hooks_are_checked_by_name() -> None:
    a, b = operands("nt", 16, 16, 16, torch.bfloat16, torch.device("cpu"))
    out = torch.empty_like(a)
    good = Gathered(_int32(0, 8, 16), _int32(0, 1), _int32(1, 1))
    place = torch.zeros(2, dtype=torch.int64)
    cases = [
        (lambda: hopper_gemm(a, b, out, layout="tn", gathered=good), "gathered must be None for layout tn"),
        (lambda: hopper_gemm(a, b, out, gathered=good._replace(bounds=_int32(0, 16))), r"bounds must have shape \[3\]"),
        (lambda: hopper_gemm(a, b, out, gathered=good._replace(flags=place)), "flags must be int32, got int64"),
        (lambda: hopper_gemm(a, b, out, gathered=good._replace(local=a[:, :8])), "local must have 16 columns"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=f"hopper_gemm: {message}"):
            call()
