"""FP8: kernels beside the formulas byte for byte, the formulas beside their definition, products, options, errors."""

import math
import random

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from powertrain.ops.fp8.formulas import (
    BY,
    DTYPES,
    FLT_MAX,
    MAX,
    Copies,
    Quantized,
    cast,
    dequantized,
    padded,
    quantize_ref,
    scale_of,
)
from powertrain.ops.fp8.gemm import fp8_gemm, fp8_gemm_ref
from powertrain.ops.fp8.linear import fp8_linear, fp8_linear_ref, quantized_weight
from powertrain.ops.fp8.quantize import fp8_quantize, same_bits, special_values
from powertrain.ops.fp8.transpose import fp8_transpose
from powertrain.runtime.settings import settings
from tests.torch_setup import SLOW_IN_INTERPRETER

FORMS = [("tensor", "tensor"), ("row", "row"), ("group", "block"), ("group", "group"), ("row", "tensor")]


def assert_same_bytes(found: Copies, exact: Copies) -> None:
    for part, ours, right in zip(Copies._fields, found, exact, strict=True):
        if ours.numel():
            assert ours.shape == right.shape, part
            assert same_bits(ours, right), part


def test_scales_by_their_definition() -> None:
    """In Python floats: every exponent, mantissas beside the one where the power of two changes, what has none."""
    for format, most in MAX.items():
        mantissas = (1.0, 1.25, 1.75, 1.75 + 2**-23, 1.75 - 2**-23, 2 - 2**-23)
        amaxes = [m * 2.0**e for e in range(-126, 128) for m in mantissas] + [2.0**-149, 2.0**-127]
        found = scale_of(torch.tensor(amaxes), format, False), scale_of(torch.tensor(amaxes), format, True)
        for amax, scale, power in zip(amaxes, *(t.tolist() for t in found), strict=True):
            right = min(torch.tensor(most / amax, dtype=torch.float64).float().item(), FLT_MAX)
            assert scale == right and power == 2.0 ** math.floor(math.log2(right))
        bad = torch.tensor([0.0, math.inf, math.nan])
        assert scale_of(bad, format, True).tolist() == scale_of(bad, format, False).tolist() == [1.0] * 3


def test_casts_by_their_definition() -> None:
    """Every value of a format, the ties between two, saturation from half a step beyond the largest on, NaN."""
    for format, dtype in DTYPES.items():
        values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        values = values[values.isfinite()].unique().sort().values
        assert torch.equal(cast(values, format).float(), values)
        ties = (values[1:].double() + values[:-1].double()).float() / 2
        bits = values.to(dtype).view(torch.uint8)
        even = torch.where(bits[1:] % 2 == 0, values[1:], values[:-1])
        assert torch.equal(cast(ties, format).float(), even)
        beyond = torch.tensor([MAX[format] * 1.001, 1e38, math.inf])
        assert cast(torch.cat([beyond, -beyond]), format).float().tolist() == [MAX[format]] * 3 + [-MAX[format]] * 3
        assert cast(torch.tensor([math.nan, -math.nan]), format).view(torch.uint8).tolist() == [0x7F, 0x7F]


# special: NaN, inf, zeros, denormals, ties, more than one tile; else one element, sides of a group
@pytest.mark.parametrize("shape", [None, (1, 1), (3, 129), (2, 128)], ids=str)
@pytest.mark.parametrize("by", BY)
def test_bytes(by: str, shape: tuple[int, int] | None, device: torch.device) -> None:
    x = special_values() if shape is None else torch.randn(shape)
    for format in DTYPES:
        for power_of_two in (True, False):
            found = fp8_quantize(x.to(device), by, format, power_of_two=power_of_two, measure=True)
            assert_same_bytes(found, quantize_ref(x, by, format, power_of_two=power_of_two))


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(s, marks=pytest.mark.slow) for s in range(4, 60))])
def test_bytes_of_random_calls(seed: int, device: torch.device) -> None:
    """Sizes, exponents, dtypes, strides, copies wanted and scales given at random."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    C = r.choice((1, 16, 17, 127, 128, 129, 300))
    by, format, power_of_two = r.choice(BY), r.choice(list(DTYPES)), r.random() < 0.5
    R = r.choice((1, 2, 15) if by == "row" else (1, 2, 15, 127, 128, 129, 200))
    x = torch.randn(R, C + 3) * torch.exp2(torch.randint(-140, 120, (R, 1)).float() / r.choice((1, 8, 64)))
    x = x.to(r.choice((torch.float32, torch.float16, torch.bfloat16)))[:, :C]
    if r.random() < 0.3:
        x[r.randrange(R), r.randrange(C)] = r.choice((math.inf, -math.inf, math.nan, 0.0, 1e-45))
    options: dict[str, Tensor] = {}
    if by == "tensor" and r.random() < 0.5:
        options["scale"] = torch.tensor([r.choice((0.0, 3.7, 2.0**100))])
    if by == "row" and r.random() < 0.5:
        options["fold"] = torch.rand(C) * 2.0 ** r.randrange(-20, 20)
    rows, columns = r.choice(((True, True), (True, False), (False, True)))
    there = {name: t.to(device) for name, t in options.items()}
    found = fp8_quantize(
        x.to(device), by, format, power_of_two=power_of_two, rows=rows, columns=columns, measure=True, **there
    )
    assert_same_bytes(found, quantize_ref(x, by, format, power_of_two=power_of_two, **options))
    assert found.data.numel() == (R * padded(C) if rows else 0)
    assert found.data_t.numel() == (C * padded(R) if columns else 0)


@pytest.mark.parametrize("shape", [(0, 40), (40, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("by", BY)
def test_empty(by: str, shape: tuple[int, int], device: torch.device) -> None:
    found = fp8_quantize(torch.empty(shape, device=device), by, measure=True)
    assert found.data.shape == (shape[0], padded(shape[1])) and found.data_t.shape == (shape[1], padded(shape[0]))
    assert found.amax.item() == 0
    weight = torch.randn(5, shape[1], device=device)
    b = fp8_quantize(weight, "block" if by == "group" else by).rows
    y = fp8_gemm(found.rows, b, bias=torch.ones(5, device=device), out_dtype=torch.float32)
    assert torch.equal(y, torch.ones(shape[0], 5, device=device))


def test_what_is_dequantized_is_near(device: torch.device) -> None:
    """Half a step of e4m3's 3 bits, or of the smallest value of the element's group."""
    x = torch.randn(20, 300, device=device)
    for by in BY:
        copies = fp8_quantize(x, by)
        pairs = [(copies.rows, x)] if by == "row" else [(copies.rows, x), (copies.columns, x.T)]
        for q, right in pairs:  # by row the other copy has scales along its rows, which no product takes
            error = (dequantized(q, right.shape[1]) - right).abs()
            assert (error <= right.abs() * 2**-4 + right.abs().max() * 2**-16).all()


@pytest.mark.parametrize("signs", ["random", "positive", "cancelling"])
# the products are emulated in both runs; long sums say nothing new of a quantization by the interpreter
@pytest.mark.parametrize("K", [129, *(pytest.param(K, marks=SLOW_IN_INTERPRETER) for K in (4096, 65536))])
def test_errors_of_quantization_and_of_accumulation(K: int, signs: str) -> None:
    """Beside float64, each by itself: emulated sums are below a tenth of what rounding to FP8 changes, so that what is
    learned on a CPU is learned of FP8. GPUs: tests/gpu/test_fp8_on_gpu.py."""
    x, w = (torch.randn(8, K) * torch.exp2(torch.randint(-3, 3, (8, K)).float()) for _ in range(2))
    if signs != "random":
        x, w = x.abs(), w.abs()
    if signs == "cancelling":
        # the second half of each sum takes most of the first away
        half = K // 2
        x[:, half : 2 * half], w[:, half : 2 * half] = -x[:, :half] * 1.01, w[:, :half]
    exact = x.double() @ w.double().T
    for form in FORMS[:4]:
        a, b = (fp8_quantize(t, by).rows for t, by in zip((x, w), form, strict=True))
        rounded = fp8_gemm_ref(a, b)
        quantization = (rounded - exact).norm()
        found = fp8_gemm(a, b, out_dtype=torch.float32, backend="emulated")
        accumulation = (found - rounded).norm()
        assert accumulation < quantization / 10, (form, accumulation / exact.norm(), quantization / exact.norm())
        # elements are rounded by at most 2^-4 each, in independent directions
        assert quantization < 2**-4 * (x.double().abs() @ w.double().abs().T).norm()


# more than one tile and group, one element, parts of a tile
@pytest.mark.parametrize(
    "size", [pytest.param((130, 140, 300), marks=SLOW_IN_INTERPRETER), (1, 1, 1), (3, 130, 129)], ids=str
)
@pytest.mark.parametrize(
    "formats",
    [pytest.param(("e4m3", "e4m3"), id="e4m3"), pytest.param(("e5m2", "e4m3"), id="e5m2", marks=SLOW_IN_INTERPRETER)],
)
@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_products(
    form: tuple[str, str], formats: tuple[str, str], size: tuple[int, int, int], device: torch.device
) -> None:
    """Backends beside float64 of the same FP8 values: products are exact, sums rounded to float32."""
    M, N, K = size
    x, w = (torch.randn(rows, K, device=device) for rows in (M, N))
    a, b = (fp8_quantize(t, by, f).rows for t, by, f in zip((x, w), form, formats, strict=True))
    # about 14 bits of each sum of 128 are kept within tensor cores
    bias, bound = torch.randn(N, device=device), 2**-11 if device.type == "cuda" else 2**-20 * K**0.5
    exact = fp8_gemm_ref(a, b)
    largest = exact.abs().max() + 1
    for backend in (None, "emulated"):
        y = fp8_gemm(a, b, out_dtype=torch.float32, bias=bias, backend=backend)
        assert (y - exact - bias.double()).abs().max() <= bound * largest
        total = torch.ones(M, N, device=device)
        fp8_gemm(a, b, out=total, accumulate=True, backend=backend)
        assert (total - 1 - exact).abs().max() <= bound * largest
        wide = torch.full((M, N + 3), 7.0, device=device, dtype=torch.bfloat16)
        fp8_gemm(a, b, out=wide[:, :N], backend=backend)
        assert (wide[:, N:] == 7).all() and (wide[:, :N] - exact).abs().max() <= 2**-8 * largest


def _tensors(device: torch.device, M: int = 12, N: int = 40, K: int = 33) -> dict[str, Tensor]:
    return {
        "x": torch.randn(M, K, device=device).requires_grad_(),
        "weight": (torch.randn(N, K, device=device) * K**-0.5).requires_grad_(),
    }


def _grads(y: Tensor, tensors: dict[str, Tensor]) -> list[Tensor]:
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.device)
    return [y.detach(), *torch.autograd.grad(y, list(tensors.values()), dy)]


@pytest.mark.parametrize("by", ["tensor", "row", "block"])
def test_a_weights_copies_give_the_same_bits(by: str, device: torch.device) -> None:
    tensors = _tensors(device)
    plain = _grads(fp8_linear(**tensors, by=by), tensors)
    copies = quantized_weight(tensors["weight"].detach(), by)
    shared = _grads(fp8_linear(**tensors, by=by, weight_copies=copies), tensors)
    assert all(torch.equal(a, b) for a, b in zip(plain, shared, strict=True))
    # data alone: backward transposes it, and reads no value of the weight
    rows = fp8_quantize(tensors["weight"], "block" if by == "block" else by, columns=False)
    hidden = torch.full_like(tensors["weight"], torch.nan).requires_grad_()
    tensors |= {"weight": hidden}
    given = _grads(fp8_linear(**tensors, by=by, weight_copies=rows), tensors)
    assert all(torch.equal(a, b) for a, b in zip(plain, given, strict=True))


# one tile, partial ones both ways, one element, none
@pytest.mark.parametrize("shape", [(64, 64), (129, 200), (1, 1), (0, 40), (40, 0)], ids=str)
def test_transposed_bytes(shape: tuple[int, int], device: torch.device) -> None:
    """Those that quantizing gives, NaN and every exponent among them; rows may be further apart than their length."""
    x = (torch.randn(shape) * torch.exp2(torch.randint(-20, 20, shape).float())).masked_fill(
        torch.rand(shape) < 0.05, torch.nan
    )
    for format in DTYPES:
        copies = fp8_quantize(x.to(device), "row", format)
        assert same_bits(fp8_transpose(copies.data, shape[1]), copies.data_t)
        wide = torch.cat([copies.data.view(torch.uint8)] * 2, 1).view(DTYPES[format])[:, : copies.data.shape[1]]
        assert same_bits(fp8_transpose(wide, shape[1]), copies.data_t)


def test_transpose_refuses(device: torch.device) -> None:
    data = torch.zeros(4, 16, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    for call, message in (
        (lambda: fp8_transpose(data.float(), 4), "fp8_transpose: data must be FP8, got float32"),
        (lambda: fp8_transpose(data[0], 4), r"fp8_transpose: data must be \[R, C\], got \[16\]"),
        (lambda: fp8_transpose(data[:, ::2], 4), "fp8_transpose: data must have contiguous rows"),
        (lambda: fp8_transpose(data, 17), r"fp8_transpose: columns must be at most 16 \(of data\), got 17"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("by", ["tensor", "row", "block"])
def test_main_grad(by: str, device: torch.device) -> None:
    tensors = _tensors(device)
    plain = _grads(fp8_linear(**tensors, by=by), tensors)
    total = torch.ones_like(tensors["weight"])
    y = fp8_linear(**tensors, by=by, main_grad=total)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(device)
    y.backward(dy)
    assert tensors["weight"].grad is None and torch.equal(tensors["x"].grad, plain[1])
    torch.testing.assert_close(total - 1, plain[2], rtol=1e-5, atol=1e-5)


def test_delayed_scales_and_amaxes(device: torch.device) -> None:
    """Given scales are used, 0 is the tensor's own; magnitudes are raised, those of dy in backward."""
    tensors = _tensors(device)
    own = _grads(fp8_linear(**tensors), tensors)
    scales, amaxes = torch.zeros(3, device=device), torch.tensor([1e9, 0.0, 0.0], device=device)
    unset = _grads(fp8_linear(**tensors, scales=scales, amaxes=amaxes), tensors)
    assert all(torch.equal(a, b) for a, b in zip(own, unset, strict=True))
    assert amaxes[0].item() == 1e9 and amaxes[1] == tensors["weight"].detach().abs().max() and amaxes[2] > 1
    scales = torch.tensor([8.0, 64.0, 2.0], device=device)
    found = _grads(fp8_linear(**tensors, scales=scales), tensors)
    copies = [
        fp8_quantize(t.detach(), "tensor", scale=s[None]).rows for t, s in zip(tensors.values(), scales, strict=False)
    ]
    exact = fp8_gemm_ref(*copies)
    bound = 2**-11 if device.type == "cuda" else 1e-5  # as in test_products
    assert (found[0] - exact).abs().max() <= bound * exact.abs().max()


def test_nan_scale_gives_nan(device: torch.device) -> None:
    y = fp8_linear(torch.ones(4, 16, device=device), torch.ones(8, 16, device=device),
                   scales=torch.full((3,), math.nan, device=device))  # fmt: skip
    assert y.isnan().all()


def test_outliers_hurt_their_own_scale_alone(device: torch.device) -> None:
    """One huge element: the finer the scales, the fewer results lose their digits."""
    x, weight = torch.randn(32, 256, device=device), torch.randn(16, 256, device=device)
    x[3, 5] = 1e6
    exact = fp8_linear_ref(x.double(), weight.double())
    far = torch.ones(32, dtype=torch.bool, device=device)
    far[3] = False
    worst = []
    for by in ("tensor", "row", "block"):
        error = (fp8_linear(x, weight, by=by) - exact)[far].norm() / exact[far].norm()
        worst.append(error.item())
    assert worst[0] > 0.5 and max(worst[1:]) < 0.06


_X, _W = torch.zeros(4, 8), torch.zeros(3, 8)
_Q = Quantized(torch.zeros(4, 16, dtype=torch.float8_e4m3fn), torch.ones(1))
_BLOCKS = Quantized(torch.zeros(256, 256, dtype=torch.float8_e4m3fn), torch.ones(2, 2))
_ODD = Quantized(torch.zeros(8, 20, dtype=torch.float8_e4m3fn), torch.ones(1))


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: fp8_linear(_X, _W[:, :7]),
            "fp8_linear: weight must have shape [3, 8] ([N, last dim of x]), got [3, 7]",
        ),
        (lambda: fp8_linear(_X, _W.half()), "fp8_linear: weight must have x's dtype float32, got float16"),
        (lambda: fp8_linear(_X, _W, by="column"), "fp8_linear: by must be one of 'tensor', 'row', 'block'"),
        (lambda: fp8_linear(_X, _W, grad_format="e3m4"), "grad_format must be one of 'e4m3', 'e5m2', got 'e3m4'"),
        (lambda: fp8_linear(_X, _W, by="row", scales=torch.ones(3)), "by must be one of 'tensor', got 'row'"),
        (lambda: fp8_linear(_X, _W, scales=torch.ones(2)), "scales must have shape [3] (of x, weight and dy)"),
        (lambda: fp8_linear(_X, _W, main_grad=torch.zeros(3, 8).half()), "main_grad must be float32, got float16"),
        (lambda: fp8_quantize(_X[0], "row"), "fp8_quantize: x must be [R, C], got [8]"),
        (lambda: fp8_quantize(_X.int(), "row"), "fp8_quantize: x must be float32, float16 or bfloat16, got int32"),
        (lambda: fp8_quantize(_X, "row", scale=torch.ones(4)), "rows must be False with scales of rows, got True"),
        (lambda: fp8_quantize(_X, "block", scale=torch.ones(1)), "by must be one of 'tensor', 'row', got 'block'"),
        (lambda: fp8_quantize(_X, "group", fold=torch.ones(8)), "by must be one of 'row', got 'group'"),
        (lambda: fp8_gemm(_Q, _Q._replace(data=_X)), "fp8_gemm: b must be FP8, got float32"),
        (lambda: fp8_gemm(_Q, _Q._replace(scale_inv=torch.ones(7))), "b's scale_inv must have a shape among"),
        (lambda: fp8_gemm(_Q, _Q, backend="cublas"), "backend must be one of 'hopper', 'torch', 'triton', 'emulated'"),
        # without the reasons: a Triton without Gluon has another one
        (
            lambda: fp8_gemm(_BLOCKS, _BLOCKS, backend="hopper"),
            "backend must be one that supports these operands, got hopper:",
        ),
        (lambda: fp8_gemm(_ODD, _ODD, backend="hopper"), "backend must be one that supports these operands, got"),
        (lambda: fp8_gemm(_Q, _Q, accumulate=True), "out must be given with accumulate, got None"),
        (lambda: fp8_gemm(_Q, _Q, out=torch.zeros(4, 5)), "out must have shape [4, 4]"),
    ],
    ids=range(19),
)
def test_errors(call: object, message: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
def test_what_a_gpu_would_launch() -> None:
    """FP8 kernels on GPUs that have its products; none where they are emulated."""
    from powertrain.runtime.recording import record

    def kernels(arch: str, by: str) -> set[str]:
        x, w = (torch.empty(512, 512, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(2))
        with record(arch) as wanted:
            fp8_linear(x, w, by=by).sum().backward()
        return {spec.kernel.name for spec in wanted.specs}

    assert kernels("sm_80", "tensor") == set()
    assert kernels("sm_90", "tensor") == {"_amax_kernel", "_quantize_tile_kernel"}  # products by torch._scaled_mm
    assert "_fp8_gemm_kernel" in kernels("sm_120", "block")
    assert {"_quantize_row_kernel", "_quantize_tile_kernel"} <= kernels("sm_90", "row")


@pytest.mark.parametrize("by", ["tensor", "row", "block"])
def test_flops_of_three_products_are_counted(by: str, device: torch.device) -> None:
    tensors = _tensors(device, 16, 32, 48)
    with FlopCounterMode(display=False) as counter:
        fp8_linear(**tensors, by=by).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 16 * 32 * 48


def test_main_grad_has_whole_rows(device: torch.device) -> None:
    x, weight = torch.randn(4, 32, device=device), torch.randn(16, 32, device=device, requires_grad=True)
    with pytest.raises(ValueError, match=r"fp8_linear: main_grad must have contiguous rows, got strides \(1, 16\)"):
        fp8_linear(x, weight, main_grad=torch.zeros(32, 16, device=device).t())
