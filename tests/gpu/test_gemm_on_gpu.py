"""The Hopper GEMM where it runs: values of every layout and hook, flags that come late, graphs, the self-test."""

import time

import pytest
import torch
from torch import Tensor

from powertrain.ops.gemm import gemm as module
from powertrain.ops.gemm import linear_activation as linear_module
from powertrain.ops.gemm.gemm import LAYOUTS, choose, gemm, gemm_ref
from powertrain.ops.gemm.hopper import Gathered, hopper_gemm
from powertrain.ops.gemm.hopper_activation import Epilogue, hopper_epilogue
from powertrain.ops.gemm.linear_activation import choose as choose_linear
from powertrain.ops.gemm.linear_activation import linear_activation, linear_activation_ref
from powertrain.ops.gemm.row_invariant import row_invariant_linear_
from powertrain.runtime import recording
from powertrain.runtime.dispatch import disable
from powertrain.testing.numerics import check
from tests.gpu.arch import ON_SM90
from tests.ops.gemm_launches import operands

pytestmark = ON_SM90
CUDA = torch.device("cuda", 0)
ROWS = (300, 0, 400, 600)  # of four chunks: none of whole tiles, one empty
SIZE = (sum(ROWS), 520, 328)


def _plain(a: Tensor, b: Tensor, layout: str, bias: Tensor | None) -> Tensor:
    a, b = a.T if layout == "tn" else a, b.T if layout == "nt" else b
    return a @ b if bias is None else torch.addmm(bias, a, b)


# one tile of one block; nothing a multiple of a tile; more tiles than SMs
@pytest.mark.parametrize("size", [(128, 256, 64), (1000, 520, 328), (4000, 2600, 648)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_values(layout: str, size: tuple[int, int, int], dtype: torch.dtype, with_bias: bool) -> None:
    a, b = operands(layout, *size, dtype, CUDA)
    bias = torch.randn(size[1], device=CUDA).to(dtype) if with_bias else None
    check(
        lambda a, b, bias: gemm(a, b, layout=layout, bias=bias, backend="hopper"),
        lambda a, b, bias: _plain(a, b, layout, bias),
        lambda a, b, bias: gemm_ref(a, b, layout=layout, bias=bias),
        {"a": a, "b": b, "bias": bias},
    )


@pytest.mark.parametrize("backend", ["hopper", "cublas"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_results(layout: str, backend: str) -> None:
    a, b = operands(layout, 1000, 2600, 328, torch.bfloat16, CUDA)
    exact = gemm_ref(a.double(), b.double(), layout=layout)
    total = torch.randn(1000, 2600, device=CUDA)
    before = total.double()
    bound = 32 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert (gemm(a, b, layout=layout, out=torch.empty_like(total), backend=backend) - exact).abs().max() <= bound
    gemm(a, b, layout=layout, out=total, accumulate=True, backend=backend)
    assert (total - (before + exact)).abs().max() <= bound


def test_twice_gives_the_same_bits() -> None:
    a, b = operands("tn", 1000, 2600, 4096, torch.bfloat16, CUDA)
    totals = [torch.ones(1000, 2600, device=CUDA) for _ in range(2)]
    for total in totals:
        gemm(a, b, layout="tn", out=total, accumulate=True, backend="hopper")
    assert torch.equal(*totals)


def test_writes_its_own_rows_and_columns_only() -> None:
    a, b = operands("nt", 200, 264, 64, torch.bfloat16, CUDA)
    wide = torch.zeros(202, 280, device=CUDA, dtype=torch.bfloat16)
    gemm(a, b, out=wide[1:201, 8:272], backend="hopper")
    assert torch.equal(wide[1:201, 8:272], gemm(a, b, backend="hopper"))
    wide[1:201, 8:272] = 0
    assert not wide.any()


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=CUDA)


def _bounds() -> Tensor:
    return _int32(0, *torch.tensor(ROWS).cumsum(0).tolist())


ORDER = (2, 3, 0, 1)


@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_gathered_rows_are_read_where_they_are(layout: str) -> None:
    a, b = operands(layout, *SIZE, torch.bfloat16, CUDA)
    expected = gemm(a, b, layout=layout, backend="hopper")
    local, buffer = a[300:700].clone(), a.clone()
    buffer[300:700] = float("nan")
    flags = torch.full((4, 32), 5, dtype=torch.int32, device=CUDA)[:, 0]
    flags[2] = 0  # the local one's is never looked at
    out = torch.empty_like(expected)
    chunks = Gathered(_bounds(), _int32(*ORDER), flags, local, (2, 3), ready=5)
    hopper_gemm(buffer, b, out, layout=layout, gathered=chunks)
    assert torch.equal(out, expected)


def test_flags_that_come_late_are_waited_for() -> None:
    """Chunks and flags by copy engines, from pinned memory, while the GEMM holds every SM."""
    M, N, K = 8192, 2560, 1024
    a, b = operands("nt", M, N, K, torch.bfloat16, CUDA)
    expected = gemm(a, b, backend="hopper")
    there, ready = a.cpu().pin_memory(), torch.ones(1, dtype=torch.int32).pin_memory()
    bounds, flags = _int32(0, 2048, 4096, 6144, 8192), _int32(0, 0, 0, 0)
    buffer, out = torch.full_like(a, float("nan")), torch.empty_like(expected)
    chunks = Gathered(bounds, _int32(1, 2, 3, 0), flags, a[2048:4096].clone(), (1, 2))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    hopper_gemm(buffer, b, out, gathered=chunks)
    with torch.cuda.stream(side):
        for chunk in (2, 3, 0):
            time.sleep(0.002)
            rows = slice(2048 * chunk, 2048 * (chunk + 1))
            buffer[rows].copy_(there[rows], non_blocking=True)
            flags[chunk : chunk + 1].copy_(ready, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_graph_replays_read_rows_and_bounds_anew() -> None:
    a, b = operands("nt", *SIZE, torch.bfloat16, CUDA)
    out, bounds = torch.empty(SIZE[:2], dtype=torch.bfloat16, device=CUDA), _bounds()
    chunks = Gathered(bounds, _int32(*ORDER), _int32(1, 1, 1, 1))
    hopper_gemm(a, b, out, gathered=chunks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hopper_gemm(a, b, out, gathered=chunks)
    for cuts in ((0, 300, 700, 900), (0, 8, 8, 1000), (0, 0, 0, 0)):
        bounds[:4] = _int32(*cuts)
        a.normal_()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, gemm(a, b, backend="hopper"))


def test_fewer_sms() -> None:
    a, b = operands("nt", *SIZE, torch.bfloat16, CUDA)
    expected = gemm(a, b, backend="hopper")
    chunks = Gathered(_bounds(), _int32(*ORDER), _int32(1, 1, 1, 1))
    for num_sms, gathered in ((3, None), (2, chunks)):  # 33 tiles on few CTAs, which walk through all chunks
        out = torch.full_like(expected, float("nan"))
        hopper_gemm(a, b, out, num_sms=num_sms, gathered=gathered)
        assert torch.equal(out, expected)


def test_self_test_passes_and_runs_once() -> None:
    module._self_tests.clear()
    assert module.fails_here(CUDA) is None
    assert module._self_tests == {0: None}


def test_a_wrong_kernel_is_found_and_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def wrong(a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.mm(a.float(), b.float().T, out=out)
        out[3, 4] += 1

    monkeypatch.setattr(module.hopper, "hopper_gemm", wrong)
    monkeypatch.setattr(module, "_self_tests", {})
    a, b = operands("nt", 8192, 8192, 2048, torch.bfloat16, CUDA)
    assert choose(8192, 8192, 2048).backend == "hopper"
    assert torch.equal(gemm(a, b), a @ b.T)
    gemm(a, b)
    assert capfd.readouterr().err.count("its self-test gave 1 wrong results of 32768") == 1


def test_the_epilogues_self_test_passes_and_runs_once() -> None:
    linear_module._self_tests.clear()
    assert linear_module.fails_here(CUDA) is None
    assert linear_module._self_tests == {0: None}


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), -3e38])
def test_the_largest_magnitude_of_all(bad: float) -> None:
    """NaN is the largest, as where the product and what follows it are apart."""
    x, weight = operands("nt", 300, 520, 64, torch.bfloat16, CUDA)
    residual = torch.zeros(300, 520, device=CUDA, dtype=torch.bfloat16)
    residual[299, 517] = bad
    y, amax = torch.empty_like(residual), torch.zeros(1, device=CUDA)
    hopper_epilogue(x, weight, y, Epilogue("", residual=residual, amax=amax))
    torch.testing.assert_close(amax, y.abs().amax().float()[None], rtol=0, atol=0, equal_nan=True)
    apart = torch.zeros(1, device=CUDA)
    linear_activation(x, weight, None, residual=residual, amax=apart)
    torch.testing.assert_close(amax, apart, rtol=0, atol=0, equal_nan=True)


KINDS = ("silu", "gelu", "gelu_tanh", "relu", "")
GLU = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}


@pytest.mark.parametrize("size", [(128, 128, 64), (1000, 520, 328), (4000, 2600, 648)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("kind", KINDS)
def test_epilogues(kind: str, gated: bool, dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    """Beside a residual every bit of the product and the activation apart, and nothing is left unwritten."""
    if gated and not kind:
        pytest.skip("a gate has an activation")
    (M, N, K), nan = size, float("nan")
    (x, weight), (_, up) = (operands("nt", M, N, K, dtype, CUDA) for _ in range(2))
    bias, up_bias = (torch.randn(N, device=CUDA).to(dtype) for _ in range(2))
    residual, amax = torch.randn(M, N, device=CUDA).to(dtype), torch.zeros(1, device=CUDA)
    y, z, up_z = (torch.full((M, N), nan, device=CUDA, dtype=dtype) for _ in range(3))
    gate = {"up": up, "up_bias": up_bias, "up_z": up_z} if gated else {}
    hopper_epilogue(x, weight, y, Epilogue(kind, bias=bias, z=z, **gate))
    assert torch.equal(z, gemm(x, weight, bias=bias, backend="hopper"))
    assert not gated or torch.equal(up_z, gemm(x, up, bias=up_bias, backend="hopper"))
    options = {"bias": bias, **({"up_weight": up, "up_bias": up_bias} if gated else {})}
    way = (GLU[kind] if gated else kind) or None
    assert torch.equal(y, linear_activation(x, weight, way, **options))  # too small a size to be taken in one
    hopper_epilogue(x, weight, z, Epilogue(kind, bias=bias, residual=residual, amax=amax, **gate))
    exact, sizes = y.float() + residual.float(), y.float().abs() + residual.float().abs()
    assert ((z.float() - exact).abs() <= torch.finfo(dtype).eps * sizes).all()  # rounded once, y twice
    assert amax.item() == z.float().abs().max().item()


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_a_linear_activation_with_gradients(gated: bool) -> None:
    M, N, K, way = 4096, 8192, 4096, "swiglu" if gated else "gelu"
    assert choose_linear(M, N, K, gated=gated).backend == "hopper"
    (x, weight), (_, up) = (operands("nt", M, N, K, torch.bfloat16, CUDA) for _ in range(2))
    tensors = {"x": x, "weight": weight, "bias": torch.randn(N, device=CUDA).bfloat16()}
    tensors |= {"up_weight": up} if gated else {}
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    dy = torch.randn(M, N, device=CUDA).bfloat16()

    def grads() -> list[Tensor]:
        y = linear_activation(kind=way, **tensors)
        return [y.detach(), *torch.autograd.grad(y, list(tensors.values()), dy)]

    found = grads()
    with disable("linear_activation"):
        apart = grads()
    assert torch.equal(found[0], apart[0])
    exact = linear_activation_ref(
        kind=way, **{name: t.detach().float().requires_grad_() for name, t in tensors.items()}
    )
    for ours, theirs in zip(found, apart, strict=True):
        assert (ours.float() - theirs.float()).norm() <= 1e-2 * theirs.float().norm()
    assert (found[0].float() - exact).norm() <= 1e-2 * exact.norm()


def test_a_graph_of_a_linear_activation() -> None:
    x, weight = operands("nt", 4096, 8192, 4096, torch.bfloat16, CUDA)
    up = torch.randn_like(weight)
    with torch.no_grad():
        linear_activation(x, weight, "swiglu", up_weight=up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = linear_activation(x, weight, "swiglu", up_weight=up)
        x.normal_()
        graph.replay()
        assert torch.equal(y, linear_activation(x, weight, "swiglu", up_weight=up))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("size", [(4096, 4096), (520, 328), (8, 8), (14336, 1000)], ids=str)
def test_rows_have_their_bits_anywhere(size: tuple[int, int], with_bias: bool, dtype: torch.dtype) -> None:
    """row_invariant_linear_ by the Hopper GEMM: alone, among many, at another place of a tile."""
    N, K = size
    generator = torch.Generator(CUDA).manual_seed(N)
    x = torch.randn(1000, K, device=CUDA, generator=generator).to(dtype)
    weight = torch.randn(N, K, device=CUDA, generator=generator).to(dtype)
    bias = torch.randn(N, device=CUDA, generator=generator).to(dtype) if with_bias else None

    def product(rows: Tensor) -> Tensor:
        with recording.record() as made:
            row_invariant_linear_(rows, weight, bias, rows.new_empty(len(rows), N))
        assert {spec.kernel.name for spec in made.specs} == {"_gemm_kernel"}
        return row_invariant_linear_(rows, weight, bias, rows.new_empty(len(rows), N))

    whole = product(x)
    exact = gemm_ref(x.double(), weight.double(), bias=None if bias is None else bias.double())
    assert (whole - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()
    for first, count in ((0, 1), (999, 1), (3, 64), (77, 200), (129, 700)):
        assert torch.equal(product(x[first : first + count]), whole[first : first + count])
    apart = x.new_zeros(3, K + 3)
    apart[1, :K] = x[500]
    assert torch.equal(product(apart[1:2, :K]), whole[500:501])  # another stride
    order = torch.randperm(1000, device=CUDA, generator=generator)
    assert torch.equal(product(x[order]), whole[order])
