"""Apex's FusedLAMB, FusedNovoGrad and FusedAdagrad against their papers' formulas in float64."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.compat.apex import amp_C, optimizers

pytestmark = pytest.mark.usefixtures("on_cpu")
STEPS = 3
# one element, an odd size, and a parameter that is 0 (LAMB's ratio is then 1)
SIZES = (1, 7, 4)


def lamb(o: dict[str, Any]) -> Callable[..., Tensor]:
    """One parameter's step from its state, the gradient already clipped; wd is added as AdamW does, or as Adam."""
    b1, b2 = o.get("betas", (0.9, 0.999))
    wd, decoupled = o.get("weight_decay", 0.01), o.get("adam_w_mode", True)

    def step(p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        g = g if decoupled else g + wd * p
        state["m"] = b1 * state.get("m", 0.0) + (1 - b1 if o.get("grad_averaging", True) else 1.0) * g
        state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g**2
        corrected = o.get("bias_correction", True)
        m, v = (state["m"] / (1 - b1**t), state["v"] / (1 - b2**t)) if corrected else (state["m"], state["v"])
        r = m / (v.sqrt() + 1e-6) + (wd * p if decoupled else 0.0)
        adapts = (wd or o.get("use_nvlamb")) and p.norm() > 0 and r.norm() > 0
        return p - 0.1 * (p.norm() / r.norm() if adapts else 1.0) * r

    return step


def novograd(o: dict[str, Any]) -> Callable[..., Tensor]:
    b1, b2 = o.get("betas", (0.9, 0.999))
    wd, kind = o.get("weight_decay", 0.0), o.get("norm_type", 2)

    def step(p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        norm = g.norm() if kind == 2 else g.abs().max()
        old = state.get("n", torch.zeros_like(norm) if o.get("init_zero") else norm)
        state["n"] = (b2 * old**2 + (1 - b2) * norm**2).sqrt() if kind == 2 else b2 * old + (1 - b2) * norm
        corrected = o.get("bias_correction", True)
        scale = 1 / (state["n"] / ((1 - b2**t) ** 0.5 if corrected else 1.0) + 1e-8)
        inside = o.get("reg_inside_moment", False)
        g = g * scale + wd * p if inside else g
        state["m"] = b1 * state.get("m", 0.0) + (1 - b1 if o.get("grad_averaging", True) else 1.0) * g
        m = state["m"] / (1 - b1**t if corrected else 1.0)
        return p - 0.1 * (m if inside else m * scale + wd * p)

    return step


def adagrad(o: dict[str, Any]) -> Callable[..., Tensor]:
    wd, decoupled = o.get("weight_decay", 0.0), o.get("adagrad_w_mode", False)

    def step(p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        g = g if decoupled else g + wd * p
        state["h"] = state.get("h", 0.0) + g**2
        return p - 0.1 * (g / (state["h"].sqrt() + 1e-10) + (wd * p if decoupled else 0.0))

    return step


CASES = [
    ("FusedLAMB", lamb, {}), ("FusedLAMB", lamb, {"adam_w_mode": False, "weight_decay": 0.3}),
    ("FusedLAMB", lamb, {"weight_decay": 0.0, "bias_correction": False}),
    ("FusedLAMB", lamb, {"weight_decay": 0.0, "use_nvlamb": True, "grad_averaging": False, "betas": (0.8, 0.9)}),
    ("FusedLAMB", lamb, {"max_grad_norm": 1e6}), ("FusedNovoGrad", novograd, {}),
    ("FusedNovoGrad", novograd, {"norm_type": 0, "weight_decay": 0.2, "betas": (0.8, 0.5)}),
    ("FusedNovoGrad", novograd, {"reg_inside_moment": True, "weight_decay": 0.2, "grad_averaging": False}),
    ("FusedNovoGrad", novograd, {"init_zero": True, "bias_correction": False, "betas": (0.9, 0.3)}),
    ("FusedAdagrad", adagrad, {}), ("FusedAdagrad", adagrad, {"weight_decay": 0.3}),
    ("FusedAdagrad", adagrad, {"weight_decay": 0.3, "adagrad_w_mode": True}),
]  # fmt: skip


def parameters(dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    values = [torch.randn(n, dtype=torch.float64) for n in SIZES]
    values[2].zero_()
    return [torch.nn.Parameter(v.to(dtype)) for v in values]


@pytest.mark.parametrize(
    ("name", "formula", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_steps(name: str, formula: Any, options: dict[str, Any]) -> None:
    ours = parameters()
    expected, states, step = [p.detach().clone() for p in ours], [{} for _ in ours], formula(options)
    optimizer = getattr(optimizers, name)([{"params": ours[:2]}, {"params": ours[2:]}], lr=0.1, **options)
    for t in range(1, STEPS + 1):
        grads = [torch.randn(n, dtype=torch.float64) for n in SIZES]
        for p, g in zip(ours, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        for p, g in zip(ours, grads, strict=True):
            torch.testing.assert_close(p.grad, g)
        if name == "FusedLAMB":
            clip = max(float(torch.cat(grads).norm()) / options.get("max_grad_norm", 1.0), 1.0)
            grads = [g / clip for g in grads]
        expected = [step(p, g, s, t) for p, g, s in zip(expected, grads, states, strict=True)]
    for p, e in zip(ours, expected, strict=True):
        torch.testing.assert_close(p.detach(), e)


@pytest.mark.parametrize("name", ["FusedLAMB", "FusedNovoGrad", "FusedAdagrad"])
def test_state_dict_goes_on_with_the_same_bits(name: str) -> None:
    make = getattr(optimizers, name)
    for dtype in (torch.float32, torch.bfloat16):
        one = parameters(dtype)
        two = [torch.nn.Parameter(p.detach().clone()) for p in one]
        a, b = make(one, lr=0.1), make(two, lr=0.1)
        for p in one:
            p.grad = torch.randn_like(p)
        a.step()
        with torch.no_grad():
            for p, q in zip(one, two, strict=True):
                q.copy_(p)
        # torch shares what needs no cast
        b.load_state_dict(copy.deepcopy(a.state_dict()))
        for p, q in zip(one, two, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        assert a.step(lambda: 3.0) == b.step(lambda: 3.0) == 3.0
        for p, q in zip(one, two, strict=True):
            assert torch.equal(p, q) and p.dtype is dtype
        a.zero_grad()
        assert one[0].grad is None


def test_refusals() -> None:
    one = parameters()
    for name in ("FusedLAMB", "FusedNovoGrad"):
        with pytest.raises(NotImplementedError, match="amsgrad"):
            getattr(optimizers, name)(one, amsgrad=True)
    with pytest.raises(ValueError, match="max_grad_norm must be positive, got 0"):
        optimizers.FusedLAMB(one, max_grad_norm=0)
    with pytest.raises(ValueError, match="norm_type must be"):
        optimizers.FusedNovoGrad(one, norm_type=1)
    novo = optimizers.FusedNovoGrad(one)
    theirs = novo.state_dict()
    theirs["param_groups"][0]["exp_avg_sq"] = [torch.zeros(0), torch.zeros(3)]
    with pytest.raises(ValueError, match="state_dict must have the norms"):
        novo.load_state_dict(theirs)
    one[0].grad = torch.ones(1, dtype=torch.float64).to_sparse()
    for name in ("FusedLAMB", "FusedNovoGrad", "FusedAdagrad"):
        with pytest.raises(RuntimeError, match="must be dense"):
            getattr(optimizers, name)(one).step()
    with pytest.raises(ValueError, match="tensor_lists must be 4 lists"):
        flag, norm = torch.zeros(1, dtype=torch.int32), torch.ones(1)
        amp_C.multi_tensor_lamb(1, flag, [[one[0]]], 0.1, 0.9, 0.9, 1e-6, 1, 1, 0.0, 1, 1, norm, 1.0)


def test_a_group_without_gradients_does_nothing() -> None:
    one = parameters()
    for name in ("FusedLAMB", "FusedNovoGrad", "FusedAdagrad"):
        optimizer = getattr(optimizers, name)(one)
        optimizer.step()
        assert not optimizer.state


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("FusedAdam", {"set_grad_none": False}), ("FusedSGD", {"momentum": 0.9}), ("FusedLAMB", {"use_nvlamb": True}),
        ("FusedMixedPrecisionLamb", {"reduced_precision_dtype": torch.bfloat16}), ("FusedNovoGrad", {}),
        ("FusedAdagrad", {"adagrad_w_mode": True}),
    ],
)  # fmt: skip
def test_copies_go_on_with_the_same_bits(name: str, options: dict[str, Any]) -> None:
    one = parameters(torch.bfloat16)
    optimizer = getattr(optimizers, name)(one, lr=0.1, **options)
    for p in one:
        p.grad = torch.randn_like(p)
    optimizer.step()
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for p, *others in zip(one, *(c.param_groups[0]["params"] for c in copies), strict=True):
        p.grad = torch.randn_like(p)
        for q in others:
            q.grad = p.grad.clone()
    for o in (optimizer, *copies):
        o.step()
        o.zero_grad()
        o.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    for p, *others in zip(one, *(c.param_groups[0]["params"] for c in copies), strict=True):
        for q in others:
            assert torch.equal(p, q) and (p.grad is None) == (q.grad is None)


@pytest.mark.parametrize("norm_type", [0, 2])
def test_parameters_without_elements(norm_type: int) -> None:
    one = [torch.nn.Parameter(torch.zeros(0)), torch.nn.Parameter(torch.ones(2, dtype=torch.float64))]
    for p in one:
        p.grad = torch.ones_like(p)
    optimizers.FusedNovoGrad(one, norm_type=norm_type).step()
    # float32 beside float64: the norm of all gradients
    optimizers.FusedLAMB(one).step()
    assert one[1].isfinite().all()
