"""FP8 where it runs: bytes of every quantization, products of every form by every backend, graphs, the self-test."""

import random

import pytest
import torch
from torch import Tensor, nn

from powertrain.ops.fp8 import quantize as module
from powertrain.ops.fp8.formulas import BY, DTYPES, Copies, dequantized, quantize_ref
from powertrain.ops.fp8.gemm import fp8_gemm, fp8_gemm_ref, why_not_torch
from powertrain.ops.fp8.hopper_gemm import Plan, fails_here, hopper_fp8_gemm
from powertrain.ops.fp8.hopper_gemm import why_not as why_not_hopper
from powertrain.ops.fp8.quantize import fp8_quantize, same_bits, special_values
from powertrain.quant import Block, Row, quantize_model, update_scales
from powertrain.quant import Tensor as TensorRecipe
from powertrain.runtime.errors import WarmUpFirst
from tests.cuda_graph import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="FP8 needs sm_89"
    ),
]
CUDA = torch.device("cuda", 0)
FORMS = [("tensor", "tensor"), ("row", "row"), ("group", "block"), ("group", "group")]
RECIPES = [TensorRecipe(), TensorRecipe(scale="delayed", history=3), Row(), Block()]


def _assert_same_bytes(found: Copies, exact: Copies) -> None:
    for part, ours, right in zip(Copies._fields, found, exact, strict=True):
        assert not ours.numel() or same_bits(ours, right), part


# one element, one short of a group, one more, a row longer than a block of the kernel
@pytest.mark.parametrize("shape", [(144, 272), (1, 1), (127, 129), (130, 20000)], ids=str)
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("format", list(DTYPES))
@pytest.mark.parametrize("by", BY)
def test_bytes(by: str, format: str, power_of_two: bool, shape: tuple[int, int]) -> None:
    x = special_values() if shape == (144, 272) else torch.randn(shape).bfloat16()
    found = fp8_quantize(x.to(CUDA), by, format, power_of_two=power_of_two, measure=True)
    _assert_same_bytes(found, quantize_ref(x, by, format, power_of_two=power_of_two))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bytes_of_all_16_bit_patterns(dtype: torch.dtype) -> None:
    """Every bfloat16 and float16, and float32 of random bits, by a scale of 1."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (256, 256), generator=generator, dtype=torch.int32)
    if dtype is not torch.float32:
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(256, 256)
    x, one = bits.view(dtype), torch.ones(1)
    for format in DTYPES:
        found = fp8_quantize(x.to(CUDA), "tensor", format, scale=one.to(CUDA))
        _assert_same_bytes(found, quantize_ref(x, "tensor", format, scale=one))


def test_folded_and_given_scales() -> None:
    x, fold, scale = torch.randn(150, 200).bfloat16(), torch.rand(200) + 0.5, torch.rand(150) + 0.5
    _assert_same_bytes(fp8_quantize(x.to(CUDA), "row", fold=fold.to(CUDA)), quantize_ref(x, "row", "e4m3", fold=fold))
    found = fp8_quantize(x.to(CUDA), "row", scale=scale.to(CUDA), rows=False)
    assert same_bits(found.data_t, quantize_ref(x, "row", "e4m3", scale=scale).data_t)


@pytest.mark.parametrize("size", [(256, 384, 512), (128, 256, 128), (100, 72, 300), (1, 3, 5)], ids=str)
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3")], ids="-".join)
@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_products(form: tuple[str, str], formats: tuple[str, str], size: tuple[int, int, int]) -> None:
    M, N, K = size
    x, w = (torch.randn(rows, K, device=CUDA).bfloat16() for rows in (M, N))
    a, b = (fp8_quantize(t, by, f).rows for t, by, f in zip((x, w), form, formats, strict=True))
    exact = fp8_gemm_ref(a, b)
    bound = exact.abs().max()
    bias = torch.randn(N, device=CUDA).bfloat16()
    hopper = ("hopper",) if why_not_hopper(a, b, torch.bfloat16) is None else ()
    for backend in (None, "triton", "emulated", *hopper):
        y = fp8_gemm(a, b, backend=backend)
        assert (y - exact).abs().max() <= 2**-7 * bound
        assert torch.equal(y, fp8_gemm(a, b, backend=backend))
        biased = fp8_gemm(a, b, bias=bias, backend=backend)
        assert (biased - (exact + bias.double())).abs().max() <= 2**-6 * (bound + bias.abs().max())
        total = torch.ones(M, N, device=CUDA)
        if backend == "hopper" and N % 4:
            continue  # float32 rows that TMA cannot address
        fp8_gemm(a, b, out=total, accumulate=True, backend=backend)
        assert (total - 1 - exact).abs().max() <= 2**-11 * (bound + 1)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="made for sm_90")
@pytest.mark.parametrize("seed", range(12))
def test_products_of_random_sizes_on_hopper(seed: int) -> None:
    """Many tiles and few, sides that are no multiples of a tile, views, scales of one form beside another."""
    assert fails_here(CUDA) is None
    r = random.Random(seed)
    M, N, K = r.randint(1, 3000), 16 * r.randint(1, 300), 16 * r.randint(1, 300)
    form = r.choice([*FORMS, ("tensor", "row"), ("row", "group"), ("group", "tensor"), ("row", "block")])
    a, b = (
        fp8_quantize(torch.randn(rows, K, device=CUDA).bfloat16(), by, power_of_two=r.random() < 0.5).rows
        for rows, by in zip((M, N), form, strict=True)
    )
    if r.random() < 0.5:  # rows of a larger tensor
        wide = torch.zeros(M, a.data.shape[1] + 64, dtype=torch.uint8, device=CUDA)
        wide[:, : a.data.shape[1]] = a.data.view(torch.uint8)
        a = a._replace(data=wide.view(a.data.dtype)[:, : a.data.shape[1]])
    exact = fp8_gemm_ref(a, b)
    for plan in (None, Plan(), Plan(128, 4)):
        for out in (torch.empty(M, N, device=CUDA, dtype=torch.float16), torch.ones(M, N, device=CUDA)):
            accumulate = out.dtype is torch.float32
            found = out.clone()
            hopper_fp8_gemm(a, b, found, accumulate=accumulate, plan=plan)
            error = (found.double() - (1 if accumulate else 0) - exact).norm() / exact.norm()
            assert error <= 4e-4, (M, N, K, form, plan, out.dtype)
            again = out.clone()
            hopper_fp8_gemm(a, b, again, accumulate=accumulate, plan=plan)
            assert torch.equal(found, again)


# about 14 bits are kept within the tensor cores, all of float32 when sums are promoted: of positive values alone each
# promoted sum is rounded down (6e-4 in all at K 65536 on one H200, by cuBLAS's split accumulation too)
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_accumulation(form: tuple[str, str], positive: bool) -> None:
    M, N, K = 256, 256, 65536
    x, w = (torch.randn(rows, K, device=CUDA).bfloat16() for rows in (M, N))
    x, w = (x.abs(), w.abs()) if positive else (x, w)
    a, b = (fp8_quantize(t, by).rows for t, by in zip((x, w), form, strict=True))
    exact = x.double() @ w.double().T
    rounded = fp8_gemm_ref(a, b)
    quantization = (rounded - exact).norm()
    for backend in (None, "triton", *(("hopper",) if torch.cuda.get_device_capability() == (9, 0) else ())):
        accumulation = (fp8_gemm(a, b, out_dtype=torch.float32, backend=backend) - rounded).norm()
        print(f"{form} {backend}: quantization {quantization / exact.norm():.3g}, {accumulation / exact.norm():.3g}")
        assert accumulation <= (1e-3 * exact.norm() if positive else quantization / 10)


def _grads(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    y = model(x)
    y.float().square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_eager_compiled_and_graph_have_the_same_bits(recipe: object) -> None:
    model = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024, bias=False)).to(CUDA).bfloat16()
    x = torch.randn(512, 1024, device=CUDA).bfloat16()
    exact = _grads(model, x)
    assert len(quantize_model(model, recipe).quantized) == 2
    eager = _grads(model, x)
    for ours, right in zip(eager, exact, strict=True):
        assert (ours - right).norm() <= 0.12 * right.norm()
    update_scales(model)
    eager = _grads(model, x)
    torch._dynamo.reset()
    compiled = _grads(torch.compile(model, fullgraph=True, backend="aot_eager"), x)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
    static = x.clone()
    graph, grads = captured(lambda: _grads(model, static))
    for weight in model.parameters():
        weight.data.mul_(2)  # a replay quantizes the weights of then
    graph.replay()
    again = [t.clone() for t in grads]
    assert all(torch.equal(a, b) for a, b in zip(again, _grads(model, x), strict=True))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_inductor(recipe: object) -> None:
    model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024)).to(CUDA).bfloat16()
    x = torch.randn(256, 1024, device=CUDA).bfloat16()
    quantize_model(model, recipe)
    eager = _grads(model, x)
    torch._dynamo.reset()
    for ours, right in zip(_grads(torch.compile(model, fullgraph=True), x), eager, strict=True):
        assert (ours - right).norm() <= 1e-2 * right.norm()


def test_self_test_passes_and_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch, capfd: object) -> None:
    module._self_tests.clear()
    assert module._self_test(CUDA, torch.bfloat16) is module._self_test(CUDA, torch.float16) is None
    right = module.launch

    def wrong(x: Tensor, *args: object) -> None:
        right(x, *args)
        args[-1].data.view(torch.uint8)[3, 4] ^= 1  # the results are the last argument

    x = torch.randn(64, 64, device=CUDA).bfloat16()
    monkeypatch.setattr(module, "launch", wrong)
    found = fp8_quantize(x, "tensor")
    assert "data by tensor in e4m3 differs" in str(module._self_tests[torch.bfloat16][0])
    _assert_same_bytes(found, quantize_ref(x.cpu(), "tensor", "e4m3"))
    module._self_tests.clear()


def test_which_forms_pytorch_has() -> None:
    """Printed, for docs/log/fp8.md: nothing is required of PyTorch."""
    x = torch.randn(512, 512, device=CUDA).bfloat16()
    for form in FORMS:
        a, b = (fp8_quantize(x, by).rows for by in form)
        print(form, {str(d): why_not_torch(a, b, d, False) for d in (torch.bfloat16, torch.float32)})
    assert dequantized(fp8_quantize(x, "row").rows).shape == x.shape


def test_a_capture_before_the_self_test_is_refused() -> None:
    """Plain PyTorch, captured unnoticed, would be replayed for good."""
    x = torch.randn(64, 64, device=CUDA).bfloat16()
    module._self_tests.clear()
    with pytest.raises(WarmUpFirst, match="fp8_quantize of bfloat16"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fp8_quantize(x, "tensor")
    module._self_tests.clear()
