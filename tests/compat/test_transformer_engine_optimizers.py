"""TransformerEngine's FusedAdam beside torch.optim.AdamW: its order of arguments and the dtypes of its states."""

import copy
from typing import Any

import pytest
import torch

from powertrain.compat.transformer_engine.pytorch.optimizers import FusedAdam

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_arguments_by_position(decay: float) -> None:
    p, q = (torch.nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64)) for _ in range(2))
    # the third is betas, not Apex' bias_correction
    ours, plain = (cls([x], 0.1, (0.5, 0.7), 1e-3, decay) for cls, x in ((FusedAdam, p), (torch.optim.AdamW, q)))
    for _ in range(3):
        p.grad = torch.randn(7, dtype=torch.float64)
        q.grad = p.grad.clone()
        ours.step()
        plain.step()
    torch.testing.assert_close(p, q)
    assert ours.state[p]["exp_avg"].dtype is torch.float64
    ours.zero_grad()
    assert p.grad is None


@pytest.mark.parametrize(("master", "states"), [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)])
def test_states_have_their_own_dtype(master: bool, states: torch.dtype) -> None:
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = FusedAdam([p], master_weights=master, exp_avg_dtype=states, exp_avg_sq_dtype=states)
    p.grad = torch.full_like(p, 0.3)
    optimizer.step()
    for found in (optimizer, copy.deepcopy(optimizer)):
        (state,) = found.state.values()
        assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is states
        assert ("master" in state) == master


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exp_avg_dtype": torch.float16}, "exp_avg_dtype = torch.float16"),
        ({"exp_avg_sq_dtype": torch.uint8}, "exp_avg_sq_dtype = torch.uint8"),
        ({"exp_avg_dtype": torch.bfloat16}, "exp_avg_sq_dtype = torch.float32"),
        ({"master_weights": True, "master_weight_dtype": torch.float16}, "master_weight_dtype"),
        ({"use_decoupled_grad": True}, "use_decoupled_grad"),
        ({"amsgrad": True}, "amsgrad"),
        ({"bias_correction": False}, "bias_correction"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        FusedAdam([torch.nn.Parameter(torch.ones(2))], **options)


@pytest.mark.parametrize("step", [5, torch.tensor([5], dtype=torch.int)], ids=["number", "tensor"])
def test_checkpoints_of_theirs(step: Any) -> None:
    """They count steps in the group, and their master weights have another name; such checkpoints were refused."""
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = FusedAdam([p], master_weights=True)
    saved = {
        "exp_avg": torch.full((2,), 2.0),
        "exp_avg_sq": torch.full((2,), 3.0),
        "master_param": torch.tensor([0.7, 1]),
    }
    group = {**optimizer.state_dict()["param_groups"][0], "step": step}
    optimizer.load_state_dict({"state": {0: saved}, "param_groups": [group]})
    state = optimizer.state[p]
    assert state["step"] == 5 and "master_param" in saved
    for ours, theirs in (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"), ("master", "master_param")):
        assert torch.equal(state[ours], saved[theirs])
    remainders = saved | {"master_param": torch.ones(2, dtype=torch.int16)}
    with pytest.raises(ValueError, match=r"have whole master weights .*, got master_param of int16"):
        optimizer.load_state_dict({"state": {0: remainders}, "param_groups": [group]})


@pytest.mark.parametrize("unscales", [False, True])
def test_step_takes_a_grad_scaler(unscales: bool) -> None:
    """`step(grad_scaler=scaler)`, as TransformerEngine and Apex have it, was a TypeError."""
    p, q = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    ours, plain = FusedAdam([p], 0.1), torch.optim.AdamW([q], 0.1, weight_decay=0.0)
    seen: list[str] = []
    ours.register_step_post_hook(lambda *_: seen.append("hook"))
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for factor in (1.0, float("inf"), 2.0, 3.0):
        for parameter, optimizer, scaler in ((p, ours, scalers[0]), (q, plain, scalers[1])):
            optimizer.zero_grad()
            scaler.scale((parameter * factor).sum()).backward()
            if unscales:
                scaler.unscale_(optimizer)
        assert ours.step(lambda: 7.0, grad_scaler=scalers[0]) == 7.0
        scalers[1].step(plain)
        for scaler in scalers:
            scaler.update()
        torch.testing.assert_close(p, q)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 8.0
    assert seen == ["hook"] * 4
    ours.step(grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    plain.step()
    torch.testing.assert_close(p, q)
