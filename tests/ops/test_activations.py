"""activation and gated_activation: every kind, packing, option, size class and error."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops import activation_kernels, flat_elements
from powertrain.ops.activations import (
    activation,
    activation_ref,
    gated_activation,
    gated_activation_ref,
    geglu,
    gelu,
    quick_gelu,
    reglu,
    relu_squared,
    swiglu,
)
from powertrain.testing.numerics import check

KINDS = ["gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu_squared"]
GATED = ["swiglu", "geglu", "geglu_tanh", "quick_geglu", "reglu", "relu_squared_glu", "clamped_swiglu"]


def _randn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(shape, device=device)).to(dtype).requires_grad_()


def _check(op: Any, ref: Any, tensors: dict[str, Tensor | None], **options: Any) -> None:
    # the specification in the same dtype is what plain PyTorch would do
    check(partial(op, **options), partial(ref, **options), partial(ref, **options), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    tensors = {"x": _randn(5, 70, device=device, dtype=dtype), "bias": _randn(70, device=device, dtype=dtype)}
    _check(activation, activation_ref, tensors, kind=kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", GATED)
def test_gated_kinds(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    # clamped at 2, so that many elements are
    _check(gated_activation, gated_activation_ref, {"x": _randn(5, 66, device=device, dtype=dtype)}, kind=kind, limit=2)


@pytest.mark.parametrize("two", [False, True], ids=["packed", "two"])
@pytest.mark.parametrize("order", ["gate_first", "up_first"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_packings(two: bool, order: str, bias: bool, device: torch.device) -> None:
    tensors = {
        "x": _randn(3, 2, 24 if two else 48, device=device),
        "up": _randn(3, 2, 24, device=device) if two else None,
        "bias": _randn(48, device=device) if bias else None,
    }
    _check(gated_activation, gated_activation_ref, tensors, kind="swiglu", order=order)


# 1: a column; 2049: one over a block; 40 rows of 3: several rows a block
@pytest.mark.parametrize("M, N", [(3, 1), (2, 2049), (40, 3)], ids=lambda n: str(n))
@pytest.mark.parametrize("are_few", [False, True], ids=["many", "few"])
def test_sizes(M: int, N: int, are_few: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_kernels, "_FEW", 8192 if are_few else 0)
    _check(gated_activation, gated_activation_ref, {"x": _randn(M, 2 * N, device=device)}, kind="geglu")
    tensors = {"x": _randn(M, N, device=device), "bias": _randn(N, device=device)}
    _check(activation, activation_ref, tensors, kind="silu")


# no multiple of 16, of 8, of 4, of 2: a launch for whole vectors and one for the rest
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("N", [1720, 1724, 1726, 1727])
@pytest.mark.kernels
def test_dense_memory_of_odd_rows(N: int, dtype: torch.dtype, device: torch.device, monkeypatch: Any) -> None:
    monkeypatch.setattr(activation_kernels, "_MANY", 8192)
    parts = activation_kernels._in_rows(torch.empty(5, N), None)
    assert [part[0].shape for part in parts] == [(1, 5 * N // 16 * 16), (1, 5 * N % 16)] and parts[1][1] is None
    assert [part[0].shape for part in activation_kernels._in_rows(torch.empty(16, N))] == [(1, 16 * N)]
    _check(activation, activation_ref, {"x": _randn(5, N, device=device, dtype=dtype)}, kind="gelu")
    two = {"x": _randn(5, N, device=device, dtype=dtype), "up": _randn(5, N, device=device, dtype=dtype)}
    _check(gated_activation, gated_activation_ref, two, kind="swiglu")
    # the halves of a packed one lie apart: rows
    _check(gated_activation, gated_activation_ref, {"x": _randn(5, 2 * N, device=device, dtype=dtype)}, kind="geglu")
    # gradients of one of two inputs, and a dy that is not dense
    gate, up = two["x"].detach(), two["up"]
    (dup,) = torch.autograd.grad(swiglu(gate, up).sum(), up)
    torch.testing.assert_close(dup.float(), F.silu(gate.float()), rtol=1.6e-2, atol=1e-2)


# 9: the narrowest; 341: three rows a block, twice eight rows and five; 1727: one block and part of another
@pytest.mark.parametrize("M, N", [(120, 9), (21, 341), (3, 1727)], ids=lambda n: str(n))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.kernels
def test_odd_rows_taken_flat(
    M: int, N: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_kernels, "_FEW_OF_ODD_ROWS", 0)
    monkeypatch.setattr(flat_elements, "_MANY", 0)
    assert flat_elements.goes_by_eights(M, N, 2)
    flat: list[bool] = []
    goes = activation_kernels.goes_flat
    monkeypatch.setattr(activation_kernels, "goes_flat", lambda *sizes: flat.append(goes(*sizes)) or flat[-1])
    x, wide = _randn(M, N, device=device, dtype=dtype), _randn(M, 2 * N, device=device, dtype=dtype)
    bias = _randn(N, device=device, dtype=dtype)
    _check(activation, activation_ref, {"x": x, "bias": bias}, kind="gelu")
    _check(gated_activation, gated_activation_ref, {"x": wide}, kind="swiglu")
    both = _randn(2 * N, device=device, dtype=dtype)
    _check(gated_activation, gated_activation_ref, {"x": wide, "bias": both}, kind="geglu", order="up_first")
    strided, one_row = wide.detach()[:, 1 : N + 1], _randn(1, N, device=device, dtype=dtype).detach().expand(M, N)
    for up in (strided, one_row):
        _check(gated_activation, gated_activation_ref, {"x": x, "up": up, "bias": None}, kind="reglu")
    assert any(flat)


def test_mixed_dtypes(device: torch.device) -> None:
    x, up, bias = _randn(4, 24, device=device, dtype=torch.bfloat16), _randn(4, 24, device=device), None
    _check(gated_activation, gated_activation_ref, {"x": x, "up": up, "bias": bias}, kind="swiglu")
    _check(activation, activation_ref, {"x": x, "bias": _randn(24, device=device)}, kind="gelu")


def test_same_as_torch(device: torch.device) -> None:
    x = torch.randn(4, 32, device=device)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(gelu(x), F.gelu(x))
    torch.testing.assert_close(gelu(x, approximate="tanh"), F.gelu(x, approximate="tanh"))
    torch.testing.assert_close(quick_gelu(x), x * torch.sigmoid(1.702 * x))
    torch.testing.assert_close(relu_squared(x), F.relu(x) ** 2)
    torch.testing.assert_close(swiglu(x), F.silu(gate) * up)
    torch.testing.assert_close(swiglu(x, order="up_first"), F.silu(up) * gate)
    torch.testing.assert_close(geglu(gate, up), F.gelu(gate) * up)
    torch.testing.assert_close(geglu(x, approximate="tanh"), F.gelu(gate, approximate="tanh") * up)
    torch.testing.assert_close(reglu(x), F.relu(gate) * up)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_values(kind: str, device: torch.device) -> None:
    x = torch.tensor([0.0, -0.0, 1e4, -1e4, 120.0, -120.0, float("nan")], device=device).requires_grad_()
    y = activation(x, kind)
    y.sum().backward()
    expected = x.detach().clone().requires_grad_()
    activation_ref(expected, kind).sum().backward()
    torch.testing.assert_close(y, activation_ref(x, kind), equal_nan=True)
    torch.testing.assert_close(x.grad[:-1], expected.grad[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_values_beyond_those_of_models(kind: str, device: torch.device) -> None:
    """A diverging training computes them. A sigmoid above 0 times such a number is large again, so it must be 0."""
    x = torch.tensor([3e38, -3e38, 1e19, -1e19, 6e10, -6e10, 90.0, -90.0], device=device)
    if kind in ("gelu", "gelu_tanh", "relu_squared"):
        # a square, or a cube, overflows, in PyTorch's backward of gelu too
        x = x[2:]
    _check_extreme(activation, activation_ref, x, kind=kind)
    x = torch.full((2,), float("nan"), device=device, requires_grad=True)
    y = activation(x, kind)
    y.sum().backward()
    assert y.isnan().all() and (kind == "relu" or x.grad.isnan().all())


@pytest.mark.parametrize("kind", ["swiglu", "quick_geglu", "clamped_swiglu"])
def test_gates_beyond_those_of_models(kind: str, device: torch.device) -> None:
    x = torch.tensor([[-1e37, 1.0], [-1e19, -2.0], [-90.0, 3.0]], device=device)
    _check_extreme(gated_activation, gated_activation_ref, x, kind=kind)


def _check_extreme(op: Any, ref: Any, x: Tensor, **options: Any) -> None:
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    results, expected = op(ours, **options), ref(exact, **options)
    results.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(results, expected.float())
    torch.testing.assert_close(ours.grad, exact.grad.float())


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)])
def test_empty(shape: tuple[int, ...], device: torch.device) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    bias = torch.randn(shape[-1], device=device, requires_grad=True)
    y = gated_activation(x, "swiglu", bias=bias)
    y.sum().backward()
    assert y.shape == (*shape[:-1], shape[-1] // 2) and x.grad.shape == shape and not bias.grad.any()


def test_autocast_keeps_the_dtype(device: torch.device) -> None:
    with torch.autocast(device.type, torch.bfloat16):
        assert swiglu(torch.randn(2, 8, device=device)).dtype == torch.float32


@pytest.mark.kernels
def test_compile_traces_plain_pytorch(device: torch.device) -> None:
    graphs = []
    compiled = torch.compile(swiglu, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    compiled(torch.randn(2, 8, device=device))
    assert "powertrain" not in graphs[0].code


def test_errors(device: torch.device) -> None:
    x = torch.randn(2, 7, device=device)
    with pytest.raises(ValueError, match=r"activation: kind must be one of 'gelu', .*, got 'tanh'"):
        activation(x, "tanh")
    with pytest.raises(ValueError, match=r"activation: bias must have shape \[7\]"):
        activation(x, "gelu", torch.ones(8, device=device))
    with pytest.raises(ValueError, match=r"x must have an even last dim \(gate and up\), got \[2, 7\]"):
        swiglu(x)
    with pytest.raises(ValueError, match="gated_activation: up must have shape"):
        swiglu(x, torch.ones(2, 8, device=device))
    with pytest.raises(ValueError, match=r"bias must have shape \[14\] \(gate and up\), got \[7\]"):
        swiglu(x, x, bias=torch.ones(7, device=device))
    with pytest.raises(ValueError, match="order must be one of 'gate_first', 'up_first', got 'gate'"):
        swiglu(x, x, order="gate")


@pytest.mark.gpu
@pytest.mark.usefixtures("most_gpu_memory")
def test_more_than_2_31_elements(device: torch.device) -> None:
    x = torch.randn(131073, 16384, device=device, dtype=torch.bfloat16).requires_grad_()
    y = swiglu(x)
    y.backward(torch.ones_like(y))
    tail = x.detach()[-2:].clone().requires_grad_()
    expected = swiglu(tail)
    expected.backward(torch.ones_like(expected))
    assert torch.equal(y[-2:], expected) and torch.equal(x.grad[-2:], tail.grad)
