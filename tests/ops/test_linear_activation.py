"""linear_activation: every kind, with and without its options, gradients, the choice of a way, errors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations
from torch.utils.hooks import RemovableHandle

from powertrain.nn.mlp import MLP, GatedMLP
from powertrain.ops.gemm import linear_activation as module
from powertrain.ops.gemm.hopper_activation import Epilogue
from powertrain.ops.gemm.linear_activation import choose, linear_activation, linear_activation_ref
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target
from powertrain.testing.numerics import check

META = torch.device("meta")
H200 = Target.parse("H200")


def _randn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def _tensors(gated: bool, whole: bool, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor | None]:
    made = partial(_randn, device=device, dtype=dtype)
    return {
        "x": made(2, 5, 24),
        "weight": made(40, 24),
        "bias": made(40) if whole else None,
        "up_weight": made(40, 24) if gated else None,
        "up_bias": made(40) if gated and whole else None,
        "residual": made(2, 5, 40) if whole else None,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("whole", [False, True], ids=["", "bias-residual"])
@pytest.mark.parametrize("kind", [None, "gelu", "silu", "swiglu", "geglu"])
def test_values(kind: str | None, whole: bool, dtype: torch.dtype, device: torch.device) -> None:
    tensors = _tensors(kind in ("swiglu", "geglu"), whole, device, dtype)
    ref = partial(linear_activation_ref, kind=kind)
    check(partial(linear_activation, kind=kind), ref, ref, tensors)


def test_the_largest_magnitude_is_raised(device: torch.device) -> None:
    x, weight = _randn(7, 24, device=device), _randn(40, 24, device=device)
    amax = torch.zeros(1, device=device)
    y = linear_activation(x, weight, None, amax=amax)
    assert amax.item() == y.abs().max().item()
    linear_activation(x / 2, weight, None, amax=amax)
    assert amax.item() == y.abs().max().item()


def test_the_choice_is_explained() -> None:
    assert choose(16384, 8192, 2048, gated=True, target=H200).backend == "hopper"
    assert choose(16384, 4096, 1024, gated=True, target=H200).backend == "hopper"
    assert choose(16384, 8192, 2048, target=H200).backend == "hopper"
    short = choose(16384, 8192, 1280, target=H200)
    assert short.backend == "apart" and "K must be at least 2048" in short.why_not["hopper"]
    assert "runs on sm_90 only" in choose(16384, 8192, 4096, target=Target.parse("A100")).why_not["hopper"]


def _epilogue(a: Tensor, b: Tensor, y: Tensor, e: Epilogue) -> None:
    """What the kernel of the self-test computes."""
    assert e.kind == "relu" and e.up is not None and e.residual is not None
    for found, weight in ((e.z, b), (e.up_z, e.up)):
        found.copy_(a.float() @ weight.float().T)
    y.copy_(e.z.float().relu() * e.up_z.float() + e.residual.float())
    e.amax.copy_(y.abs().amax())


def test_the_self_test_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(module, "hopper_epilogue", _epilogue)
    assert module._self_test(device) is None
    for name in ("y", "z", "up_z", "amax"):

        def wrong(a: Tensor, b: Tensor, y: Tensor, e: Epilogue, name: str = name) -> None:
            _epilogue(a, b, y, e)
            found = y if name == "y" else getattr(e, name)
            found.view(-1)[-1] = float("nan")

        monkeypatch.setattr(module, "hopper_epilogue", wrong)
        assert module._self_test(device) == "its self-test gave 1 wrong results of 49153"


@pytest.mark.skipif(settings().interpret, reason="there the kernel is not for use at all")
def test_a_failed_self_test_leaves_it_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_self_tests", {0: "its self-test gave 3 wrong results of 49153"})
    assert module.fails_here(torch.device("cuda", 0)) == "its self-test gave 3 wrong results of 49153"


def _launched(call: Callable[[], Any]) -> set[str]:
    with record("sm_90") as wanted:
        call()
    return {spec.kernel.name for spec in wanted.specs}


@pytest.mark.skipif(settings().interpret, reason="Gluon has no interpreter")
def test_layers_take_one_kernel_where_it_was_measured_faster() -> None:
    x = torch.empty(16384, 4096, device=META, dtype=torch.bfloat16)
    with META:
        layers = [GatedMLP(4096, 14336).bfloat16(), MLP(4096, 16384).bfloat16()]
    for layer in layers:
        names = _launched(partial(layer, x))
        assert "_epilogue_kernel" in names and "_activation_fwd_kernel" not in names


@pytest.mark.skipif(settings().interpret, reason="Gluon has no interpreter")
@pytest.mark.parametrize(("bias", "up_bias"), [(False, False), (True, False), (True, True), (False, True)])
def test_a_bias_of_the_upper_half_alone_is_added_apart(bias: bool, up_bias: bool) -> None:
    """The kernel finds its columns where it finds bias's."""
    x, weight, up = (torch.empty(rows, 4096, device=META, dtype=torch.bfloat16) for rows in (16384, 14336, 14336))
    b = torch.empty(14336, device=META, dtype=torch.bfloat16)
    options: dict[str, Any] = {"bias": b if bias else None, "up_bias": b if up_bias else None}
    names = _launched(partial(linear_activation, x, weight, "swiglu", up_weight=up, **options))
    assert ("_epilogue_kernel" in names) == (bias or not up_bias)


def _replace_forward(layer: nn.Module) -> None:
    layer.forward = layer.forward


SEES: list[Callable[[nn.Module], Any]] = [
    lambda layer: layer.register_forward_hook(lambda *_: None),
    lambda layer: layer.register_forward_pre_hook(lambda *_: None),
    lambda layer: layer.register_full_backward_hook(lambda *_: None),
    lambda layer: layer.register_full_backward_pre_hook(lambda *_: None),
    lambda layer: register_module_forward_hook(lambda *_: None),
    _replace_forward,
    lambda layer: parametrizations.weight_norm(layer),
]


@pytest.mark.skipif(settings().interpret, reason="Gluon has no interpreter")
@pytest.mark.parametrize("sees", SEES, ids=["after", "before", "backward", "before-backward", "all", "forward", "norm"])
def test_layers_that_somebody_sees_are_called(sees: Callable[[nn.Module], Any]) -> None:
    x = torch.empty(16384, 4096, device=META, dtype=torch.bfloat16)
    with META:
        layers = [GatedMLP(4096, 14336).bfloat16(), MLP(4096, 16384).bfloat16()]
    for layer in layers:
        handle = sees(next(iter(layer.children())))
        try:
            assert "_epilogue_kernel" not in _launched(partial(layer, x))
        finally:
            if isinstance(handle, RemovableHandle):
                handle.remove()


def test_hooks_on_a_layers_gradients_run() -> None:
    layer, seen = MLP(8, 16), []
    layer.up.register_full_backward_hook(lambda *_: seen.append("up"))
    layer(torch.randn(3, 8, requires_grad=True)).sum().backward()
    assert seen == ["up"]


def _error(**changes: Any) -> str:
    given: dict[str, Any] = {"x": torch.zeros(3, 8), "weight": torch.zeros(6, 8), "kind": "gelu"} | changes
    with pytest.raises(ValueError) as raised:
        linear_activation(**given)
    return str(raised.value)


def test_errors_name_the_argument() -> None:
    assert "kind must be one of" in _error(kind="swiglu")
    assert "kind must be one of" in _error(kind="gelu", up_weight=torch.zeros(6, 8))
    assert "x must" in _error(x=torch.zeros(3, 7))
    assert "weight must be [N, K]" in _error(weight=torch.zeros(8))
    assert "up_weight must" in _error(kind="swiglu", up_weight=torch.zeros(5, 8))
    assert "bias must" in _error(bias=torch.zeros(8))
    assert "up_bias must be None" in _error(up_bias=torch.zeros(6))
    assert "residual must" in _error(residual=torch.zeros(3, 8))
    assert "amax must" in _error(amax=torch.zeros(2))
    assert "residual must have x's dtype float32, got float64" in _error(residual=torch.zeros(3, 6).double())
    assert "weight must have x's dtype float32, got bfloat16" in _error(weight=torch.zeros(6, 8).bfloat16())
    assert "amax must be float32" in _error(amax=torch.zeros(1, dtype=torch.float64))
