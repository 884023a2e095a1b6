"""Apex's and TransformerEngine's fused optimizers on `powertrain.AdamW` and torch.optim.SGD."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import OptState

from powertrain.ops.adamw import AdamW
from powertrain.ops.conversion import unsupported
from powertrain.runtime import checks


class FusedAdam(AdamW):
    """`powertrain.AdamW` with Apex's arguments.

    adam_w_mode=False (weight decay added to the gradient) is the same without weight decay, else refused; so are
    bias_correction=False and amsgrad. set_grad_none: zero_grad frees the gradients. Parameter groups may have their
    own lr, betas, eps and weight_decay. exp_avg and exp_avg_sq are float32 for 16-bit parameters too, as there, unless
    state_dtype says another dtype.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if amsgrad:
            unsupported("FusedAdam", "amsgrad", True, "torch.optim.AdamW(amsgrad=True)")
        # an int there too: it selects a mode in the kernel
        self.adam_w_mode, self.set_grad_none = int(adam_w_mode), set_grad_none
        super().__init__(
            params, lr, betas, eps, weight_decay, capturable=capturable, master_weights=master_weights,
            state_dtype=state_dtype,
        )  # fmt: skip
        self.defaults["bias_correction"] = bias_correction
        # Apex's checkpoints have the key in each group
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)
            self._refuse(group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "adam_w_mode": self.adam_w_mode, "set_grad_none": self.set_grad_none}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._refuse(self.param_groups[-1])

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """As in Apex and TransformerEngine `step(grad_scaler=scaler)` does what `scaler.step` does; other options are
        those of `powertrain.AdamW.step`."""
        # not in the signature, where torch's GradScaler would look for it, and warn
        scaler = options.pop("grad_scaler", None)
        # not super().step, nor scaler.step: torch runs the hooks of a step for each of them
        if scaler is None or not scaler.is_enabled():
            return self._step(closure, **options)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state, scale = scaler._per_optimizer_states[id(self)], scaler._get_scale_async()
        unscaled = state["stage"] is OptState.UNSCALED
        found_inf = scaler._found_inf_per_device(self) if unscaled else scaler._check_inf_per_device(self)
        self.grad_scale = None if unscaled else scale
        self.found_inf = torch.stack([torch.zeros_like(scale), *(t.to(scale.device) for t in found_inf.values())]).sum(
            0
        )
        try:
            self._step(None, **options)
        finally:
            del self.grad_scale, self.found_inf
        state["stage"] = OptState.STEPPED
        return loss

    def _dtype_of(self, p: Tensor) -> torch.dtype:
        # in bfloat16 a running square would not move by its 1 - 0.999
        return self.state_dtype or (p.dtype if p.dtype is torch.float64 else torch.float32)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """State dicts of ours, of torch.optim.AdamW, and of Apex's and TransformerEngine's FusedAdam. Apex keeps its
        master weights elsewhere: they begin as copies of the parameters."""
        for group in state_dict["param_groups"]:
            self._refuse(group)
        super().load_state_dict(_with_own_names(state_dict))

    def _step_of_group(self, index: int, group: dict[str, Any], *options: Tensor | None) -> None:
        # schedulers write weight_decay into a group
        self._refuse(group)
        super()._step_of_group(index, group, *options)

    def _refuse(self, group: dict[str, Any]) -> None:
        if not group.get("bias_correction", True):
            unsupported("FusedAdam", "bias_correction", False, "bias_correction=True with a warm-up")
        if not self.adam_w_mode and group.get("weight_decay"):
            unsupported("FusedAdam", "adam_w_mode", False, "adam_w_mode=True, weight_decay=0, or torch.optim.Adam")

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


def _with_own_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Apex and TransformerEngine count steps in the group, and TransformerEngine's master weights are master_param."""
    states = dict(state_dict["state"])
    for group in state_dict["param_groups"]:
        for name in group["params"]:
            saved = states.get(name)
            if saved and "step" in group and "step" not in saved:
                states[name] = _with_own_names_of(saved, group["step"])
    groups = [{k: v for k, v in group.items() if k != "step"} for group in state_dict["param_groups"]]
    return {**state_dict, "state": states, "param_groups": groups}


def _with_own_names_of(saved: dict[str, Any], step: Tensor | int) -> dict[str, Any]:
    state = {k: v for k, v in saved.items() if k != "master_param"} | {"step": step}
    master = saved.get("master_param")
    if master is None:
        return state
    # with store_param_remainders these are the low 16 bits, which are no values
    if not master.is_floating_point():
        got = f"master_param of {checks.name(master.dtype)}"
        checks.fail("FusedAdam", "state_dict", "have whole master weights (store_param_remainders=False)", got)
    return state | {"master": master}


class FusedSGD(torch.optim.SGD):
    """torch.optim.SGD by its foreach kernels, with Apex's arguments; wd_after_momentum is refused."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        # FusedSGD's default is False, FusedAdam's True, in Apex
        set_grad_none: bool = False,
    ) -> None:
        if wd_after_momentum:
            unsupported("FusedSGD", "wd_after_momentum", True, "weight decay before the momentum, torch.optim.SGD's")
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, foreach=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "set_grad_none": self.set_grad_none}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
