"""linear_cross_entropy: blocks, reductions, main_grad, what is kept and handed out, errors."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops import cross_entropy_kernels
from powertrain.ops import linear_cross_entropy as module
from powertrain.ops.cases.cross_entropy import tokens
from powertrain.ops.cases.linear_cross_entropy import plain
from powertrain.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_ref
from powertrain.testing.numerics import check

REDUCTIONS = ["mean", "sum", "none"]


def _tensors(
    device: torch.device, dtype: torch.dtype = torch.float32, T: int = 12, D: int = 24, V: int = 301
) -> dict[str, Tensor | None]:
    made = {"x": torch.randn(T, D, device=device), "weight": torch.randn(V, D, device=device) * D**-0.5}
    tensors = {name: t.to(dtype).requires_grad_() for name, t in made.items()}
    return {**tensors, "target": tokens(T, V, device)}


def _check(tensors: dict[str, Tensor | None], **options: Any) -> None:
    check(*(partial(f, **options) for f in (linear_cross_entropy, plain, linear_cross_entropy_ref)), tensors)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch for 16 rows, or for about 100 columns of the vocabulary; gradients in place by two kernels."""
    monkeypatch.setattr(cross_entropy_kernels, "FUSED_ROW_BYTES", 0)
    monkeypatch.setattr(module, "SCRATCH_BYTES", 16 * 301 * 4)
    monkeypatch.setattr(module, "MIN_ROW_BLOCK", 1)
    monkeypatch.setattr(module, "MIN_ROW_BLOCK_OF_DWEIGHT", 1)
    monkeypatch.setattr(module, "MIN_VOCAB_BLOCK", 8)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_many_blocks(reduction: str, dtype: torch.dtype, device: torch.device) -> None:
    # rows enough that the order of cuBLAS' or MKL's sums does not decide
    _check(_tensors(device, dtype, T=40), reduction=reduction)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_options(reduction: str, device: torch.device) -> None:
    tensors = {**_tensors(device, T=40), "bias": torch.randn(301, device=device, requires_grad=True)}
    _check(tensors, reduction=reduction, label_smoothing=0.1, softcap=4.0)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_main_grad(reduction: str, dtype: torch.dtype, device: torch.device) -> None:
    tensors = _tensors(device, dtype)
    x, weight, target = tensors["x"], tensors["weight"], tensors["target"]
    main_grad = torch.ones(weight.shape, device=device)
    loss = linear_cross_entropy(x, weight, target, reduction=reduction, main_grad=main_grad)
    (3 * loss.sum()).backward()
    assert weight.grad is None
    wide = weight.detach().double().requires_grad_()
    exact = F.cross_entropy(x.detach().double() @ wide.T, target, reduction=reduction).sum()
    (dw,) = torch.autograd.grad(3 * exact, wide)
    # the logits and dlogits are rounded to the dtype, the sum into main_grad is not
    atol = 2 * torch.finfo(dtype).eps * dw.abs().max().item()
    torch.testing.assert_close(main_grad, (1 + dw).float(), rtol=1e-5, atol=atol)


@pytest.mark.kernels
def test_grad_is_the_buffer(device: torch.device) -> None:
    x, weight, target = _tensors(device).values()
    packed: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.data_ptr()) or t, lambda t: t):
        loss = linear_cross_entropy(x, weight, target)
    loss.backward()
    assert weight.grad.data_ptr() in packed and x.grad.data_ptr() in packed


@pytest.mark.kernels
@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_nothing_is_made_for_a_frozen_input(frozen: str, device: torch.device) -> None:
    tensors = _tensors(device)
    tensors[frozen].requires_grad_(False)
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        linear_cross_entropy(**tensors)
    assert tuple(tensors[frozen].shape) not in saved


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_second_backward_says_so(reduction: str, device: torch.device) -> None:
    loss = linear_cross_entropy(**_tensors(device), reduction=reduction)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: a second backward is not possible"):
        loss.backward()


def test_second_backward_of_none(device: torch.device) -> None:
    tensors = _tensors(device)
    loss = linear_cross_entropy(**tensors, reduction="none").sum()
    first = torch.autograd.grad(loss, tensors["weight"], retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, tensors["weight"]), first)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_autocast_casts(reduction: str, device: torch.device) -> None:
    tensors = _tensors(device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = linear_cross_entropy(**tensors, reduction=reduction)
    low = {n: t.detach().bfloat16().requires_grad_() if t.is_floating_point() else t for n, t in tensors.items()}
    expected = linear_cross_entropy(**low, reduction=reduction)
    torch.testing.assert_close(loss, expected)
    dw = torch.autograd.grad(loss.sum(), tensors["weight"])[0]
    torch.testing.assert_close(dw, torch.autograd.grad(expected.sum(), low["weight"])[0].float())


def test_leading_dims_empty_and_none_kept(device: torch.device) -> None:
    x, weight, target = _tensors(device).values()
    loss = linear_cross_entropy(x.view(3, 4, 24), weight, target.view(3, 4), reduction="none")
    torch.testing.assert_close(loss.flatten(), linear_cross_entropy(x, weight, target, reduction="none"))
    for T, dtype in product((0, 4), (torch.float32, torch.float16, torch.bfloat16)):
        x = torch.randn(T, 24, device=device, dtype=dtype, requires_grad=True)
        loss = linear_cross_entropy(x, weight.to(dtype), torch.full((T,), -100, device=device))
        dx, dw = torch.autograd.grad(loss, (x, weight))
        assert loss.isnan() and not dx.any() and not dw.any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.kernels
def test_compile_with_main_grad(reduction: str, device: torch.device) -> None:
    x, weight, target = _tensors(device).values()
    totals = [torch.zeros(weight.shape, device=device) for _ in range(2)]
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    for function, total in zip((linear_cross_entropy, compiled), totals, strict=True):
        function(x, weight, target, reduction=reduction, main_grad=total).sum().backward()
    torch.testing.assert_close(totals[1], totals[0])
    assert totals[0].any()


def test_errors(device: torch.device) -> None:
    x, weight, target = _tensors(device).values()
    with pytest.raises(ValueError, match=r"linear_cross_entropy: weight must have shape \[301, 24\]"):
        linear_cross_entropy(x, weight[:, :8], target)
    with pytest.raises(ValueError, match="weight must have x's dtype float32, got bfloat16"):
        linear_cross_entropy(x, weight.bfloat16(), target)
    with pytest.raises(ValueError, match=r"bias must have shape \[301\]"):
        linear_cross_entropy(x, weight, target, bias=torch.ones(3, device=device))
    with pytest.raises(ValueError, match="main_grad must be float32 and contiguous, got bfloat16"):
        linear_cross_entropy(x, weight, target, main_grad=weight.bfloat16())


@pytest.mark.gpu
def test_peak_memory(device: torch.device) -> None:
    tensors = _tensors(device, torch.bfloat16, T=8192, D=1024, V=65536)
    linear_cross_entropy(**tensors).backward()  # cuBLAS takes its workspace
    for t in (tensors["x"], tensors["weight"]):
        t.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(**tensors).backward()
    gradients = sum(t.grad.numel() * 2 for t in (tensors["x"], tensors["weight"]))
    assert torch.cuda.max_memory_allocated() - before < gradients + (310 << 20)
