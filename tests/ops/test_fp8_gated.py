"""fp8_gated_activation: bytes, values and gradients beside the formulas, memory, recomputation, errors."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from powertrain.ops.activations import GATED, gated_activation
from powertrain.ops.fp8 import gated
from powertrain.ops.fp8.gated import fp8_gated_activation, fp8_gated_activation_ref
from powertrain.ops.fp8.quantize import fp8_quantize, same_bits, special_values
from tests.torch_setup import HAS_GPU, INTERPRET


def _both(function: Any, gate: Tensor, up: Tensor, dy: Tensor, kind: str) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (gate, up)]
    y = function(*leaves, kind)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


# one element, a partial group, a partial tile of rows; leading dims
@pytest.mark.parametrize("shape", [(1, 1), (17, 130), (2, 3, 48)], ids=str)
@pytest.mark.parametrize("kind", GATED)
def test_values_and_gradients_are_the_formulas(kind: str, shape: tuple[int, ...], device: torch.device) -> None:
    gate, up, dy = (torch.randn(shape) * 3 for _ in range(3))
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [t.to(dtype) for t in (gate, up, dy)]
        found = _both(fp8_gated_activation, *(t.to(device) for t in tensors), kind)
        right = _both(fp8_gated_activation_ref, *(t.to(dtype) for t in tensors), kind)
        for ours, exact in zip(found, right, strict=True):
            assert ours.dtype is dtype and ours.shape == shape
            # exp and erf of the kernel are others than PyTorch's; the last bit of 16 bits may round otherwise
            bound = 32 * torch.finfo(torch.float32).eps * exact.float().abs().max().item()
            rtol = torch.finfo(dtype).eps if dtype is torch.bfloat16 else 0.0
            torch.testing.assert_close(ours.cpu(), exact, rtol=rtol, atol=bound)


def test_what_is_kept_are_the_quantizers_bytes(device: torch.device) -> None:
    gate = special_values()[:40].to(device)
    up = gate.flip(0).contiguous()
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fp8_gated_activation(gate.requires_grad_(), up)
    data = [t for t in kept if t.dtype is torch.float8_e4m3fn]
    for found, x in zip(data, (gate, up), strict=True):
        assert same_bits(found, fp8_quantize(x, "group", columns=False).data)
    if HAS_GPU or INTERPRET:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert gated._self_test(device, dtype) is None


def test_it_saves_half_of_the_bytes(device: torch.device) -> None:
    gate, up = (torch.randn(64, 256, device=device).bfloat16().requires_grad_() for _ in range(2))
    sizes = []
    for function in (gated_activation, fp8_gated_activation):
        kept: dict[int, int] = {}
        with saved_tensors_hooks(lambda t, kept=kept: kept.update({t.data_ptr(): t.nbytes}) or t, lambda t: t):
            if function is gated_activation:
                gated_activation(gate, "swiglu", up=up)
            else:
                fp8_gated_activation(gate, up)
        sizes.append(sum(kept.values()))
    assert sizes[1] == 2 * 64 * 256 + 2 * 4 * 64 * 2 and sizes[0] >= 4 * 64 * 256


def test_the_repeat_has_the_same_bits(device: torch.device) -> None:
    gate, up, dy = (torch.randn(20, 200, device=device).bfloat16() for _ in range(3))
    plain = _both(fp8_gated_activation, gate, up, dy, "swiglu")
    again = _both(lambda *a: checkpoint(fp8_gated_activation, *a, use_reentrant=False), gate, up, dy, "swiglu")
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    with torch.no_grad():
        assert torch.equal(fp8_gated_activation(gate, up), plain[0])


def test_compiled() -> None:
    gate, up, dy = (torch.randn(5, 40) for _ in range(3))
    compiled = torch.compile(fp8_gated_activation, fullgraph=True, backend="aot_eager")
    for a, b in zip(
        _both(fp8_gated_activation, gate, up, dy, "swiglu"), _both(compiled, gate, up, dy, "swiglu"), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0)], ids=str)
def test_empty(shape: tuple[int, int], device: torch.device) -> None:
    found = _both(fp8_gated_activation, *(torch.empty(shape, device=device) for _ in range(3)), "geglu")
    assert all(t.shape == shape for t in found)


def test_errors_name_the_argument() -> None:
    x = torch.zeros(2, 4)
    for args, said in (
        ((x, x, "silu"), "kind must be one of"),
        ((x, x[:1]), r"up must have shape \[2, 4\] \(shape of gate\), got \[1, 4\]"),
        ((x, x.bfloat16()), "up must have gate's dtype float32, got bfloat16"),
        ((x.long(), x), "gate must be"),
        ((torch.tensor(1.0), x), "gate must have at least one dim"),
    ):
        with pytest.raises(ValueError, match=f"^fp8_gated_activation: {said}"):
            fp8_gated_activation(*args)


def test_the_graph_of_a_gradient_is_refused(device: torch.device) -> None:
    """What is saved is rounded: no graph would lead from the gradients to gate and up."""
    gate, up = (torch.randn(2, 32, device=device, requires_grad=True) for _ in range(2))
    with pytest.raises(NotImplementedError, match="fp8_gated_activation: create_graph=True and double backward"):
        torch.autograd.grad(fp8_gated_activation(gate, up).sum(), gate, create_graph=True)
