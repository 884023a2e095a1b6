"""Apex's FusedMixedPrecisionLamb beside FusedLAMB: copies in float32, loss scaling, steps that are left out."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powertrain.compat.apex import amp_C, optimizers

pytestmark = pytest.mark.usefixtures("on_cpu")
# a power of two: lr is a float32 tensor
LR = 0.125
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"adam_w_mode": False, "weight_decay": 0.25, "bias_correction": False},
    {"weight_decay": 0.0, "use_nvlamb": True, "grad_averaging": False, "betas": (0.8, 0.9), "max_grad_norm": 1e6},
)  # fmt: skip


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    values = [torch.randn(n, dtype=torch.float64) for n in (1, 7, 4)]
    # LAMB's ratio is then 1
    values[2].zero_()
    return [nn.Parameter(v.to(dtype)) for v in values]


def groups(p: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": p[:2]}, {"params": p[2:], "lr": 0.5}]


def copies(p: list[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(x.detach().to(dtype, copy=True)) for x in p]


def give(pairs: Any, scale: float = 1.0) -> None:
    """The same gradient to both parameters of each pair, `scale` times to the first."""
    for p, q in pairs:
        g = torch.randn(p.shape).bfloat16()
        p.grad, q.grad = (g * scale).to(p.dtype), g.to(q.dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_without_copies_it_is_lamb(options: dict[str, Any]) -> None:
    one = parameters(torch.float64)
    two = copies(one, torch.float64)
    mixed = optimizers.FusedMixedPrecisionLamb(groups(one), lr=LR, **options)
    plain = optimizers.FusedLAMB(groups(two), lr=LR, **options)
    for _ in range(3):
        give(zip(one, two, strict=True))
        assert mixed.step(lambda: 3.0) == 3.0
        plain.step()
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-6, atol=1e-9)
    assert [group["step"].item() for group in mixed.param_groups] == [3, 3]


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_copies_take_the_steps(options: dict[str, Any], scale: float) -> None:
    one = parameters(torch.bfloat16)
    two = copies(one, torch.float32)
    mixed = optimizers.FusedMixedPrecisionLamb(
        groups(one), lr=LR, reduced_precision_dtype=torch.bfloat16, **options
    )  # fmt: skip
    plain = optimizers.FusedLAMB(groups(two), lr=LR, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    scaler.scale(torch.ones(()))
    for at in range(4):
        if at == 2:
            give(zip(one, two, strict=True))
            one[1].grad[3] = torch.inf
            before = copy.deepcopy((mixed.state_dict(), [p.detach().clone() for p in one]))
            mixed.step(grad_scaler=scaler)
            assert [group["step"].item() for group in mixed.param_groups] == [2, 2]
            after = (mixed.state_dict(), [p.detach() for p in one])
            for x, y in zip(_tensors(before), _tensors(after), strict=True):
                assert torch.equal(x, y)
        give(zip(one, two, strict=True), scale)
        mixed.step(grad_scaler=None if scale == 1.0 and at < 2 else scaler)
        plain.step()
        for p, q in zip(one, two, strict=True):
            torch.testing.assert_close(p.float(), q.detach().bfloat16().float(), rtol=2**-8, atol=1e-6)
            assert all(mixed.state[p][name].dtype is torch.float32 for name in ("exp_avg", "exp_avg_sq"))
            torch.testing.assert_close(mixed.state[p]["exp_avg_sq"], plain.state[q]["exp_avg_sq"], rtol=1e-5, atol=1e-9)
            # beyond what bfloat16 holds
            torch.testing.assert_close(mixed._copies[p], q.detach(), rtol=1e-5, atol=1e-7)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def test_the_scaler_calls_it() -> None:
    one = parameters(torch.float32)
    two = copies(one, torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    mixed, plain = optimizers.FusedMixedPrecisionLamb(one, lr=LR), optimizers.FusedLAMB(two, lr=LR)
    for p, factor in ((one, 8.0), (two, 1.0)):
        for n, x in enumerate(p):
            x.grad = torch.full_like(x, (n + 1) * factor)
    scaler.scale(torch.ones(()))
    scaler.step(mixed)
    scaler.update()
    plain.step()
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q)


def test_state_dict_goes_on() -> None:
    one = parameters(torch.bfloat16)
    a = optimizers.FusedMixedPrecisionLamb(one, lr=LR, step=4, reduced_precision_dtype=torch.bfloat16)
    two = copies(one, torch.bfloat16)
    b = optimizers.FusedMixedPrecisionLamb(two, lr=LR, reduced_precision_dtype=torch.bfloat16)
    give(zip(one, two, strict=True))
    a.step()
    with torch.no_grad():
        for p, q in zip(one, two, strict=True):
            q.copy_(p)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    assert b.param_groups[0]["step"].item() == 5 and b.param_groups[0]["lr"].item() == LR
    for p, q in zip(one, two, strict=True):
        assert all(
            torch.equal(a.state[p][n], b.state[q][n]) and b.state[q][n].dtype is torch.float32 for n in b.state[q]
        )
    # copies are made of the parameters again
    give(zip(one, two, strict=True))
    a._copies = {}
    a.step()
    b.step()
    assert all(torch.equal(p, q) for p, q in zip(one, two, strict=True))


def test_refusals() -> None:
    one = parameters(torch.float32)
    with pytest.raises(NotImplementedError, match="amsgrad"):
        optimizers.FusedMixedPrecisionLamb(one, amsgrad=True)
    with pytest.raises(ValueError, match="max_grad_norm must be positive, got 0"):
        optimizers.FusedMixedPrecisionLamb(one, max_grad_norm=0)
    optimizer = optimizers.FusedMixedPrecisionLamb(one)
    optimizer.step()
    assert not optimizer.state
    one[0].grad = torch.ones(1).to_sparse()
    with pytest.raises(RuntimeError, match="must be dense"):
        optimizer.step()
    number = torch.ones(1)
    with pytest.raises(ValueError, match="tensor_lists must be 4 or 5 lists, got 1"):
        amp_C.multi_tensor_lamb_mp(
            1, number, [[one[1]]], number, 0.9, 0.9, 1e-6, number, 1, 0.0, 1, 1, number, number, False, number, number
        )
