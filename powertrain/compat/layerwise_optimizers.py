"""Apex's FusedLAMB, FusedNovoGrad and FusedAdagrad on the functions of `compat.multi_tensor`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from powertrain.compat.multi_tensor import (
    multi_tensor_adagrad,
    multi_tensor_l2norm,
    multi_tensor_lamb,
    multi_tensor_novograd,
)
from powertrain.ops.conversion import unsupported
from powertrain.runtime import checks

# tensors of one call there; a hint that our functions do not read
_CHUNK = 65536


class _Optimizer(torch.optim.Optimizer):
    """Steps by groups; a subclass gives the names of its states, shaped as the parameter, and `_update`."""

    states: tuple[str, ...] = ()

    def __init__(self, params: Any, defaults: dict[str, Any], set_grad_none: bool, amsgrad: bool = False) -> None:
        if amsgrad:
            unsupported(type(self).__name__, "amsgrad", True, "torch.optim.AdamW(amsgrad=True)")
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; the closure's value. Raises RuntimeError for a sparse gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._before_step()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                if p.grad.is_sparse:
                    raise RuntimeError(f"{type(self).__name__}: gradients must be dense, got a sparse one")
                if not self.state[p]:
                    self.state[p].update({name: torch.zeros_like(p) for name in self.states})
            if parameters:
                lists = [[p.grad for p in parameters], parameters]
                self._update(group, lists + [[self.state[p][name] for p in parameters] for name in self.states])
        return loss

    def _before_step(self) -> None:
        """Before the groups, each time."""

    def _update(self, group: dict[str, Any], lists: list[list[Tensor]]) -> None:
        raise NotImplementedError


class FusedLAMB(_Optimizer):
    """LAMB (You et al., arXiv:1904.00962) with Apex's arguments: states in the parameters' dtype, float32 arithmetic.

    The gradients of all groups together are scaled down to norm max_grad_norm where theirs is larger.
    use_nvlamb: the step of parameters without weight decay too is scaled by |parameters| / |update|.
    adam_w_mode=False: weight decay is added to the gradient. Dtypes: any of floating point (there float32 and
    float16). Gradients stay as they are (there a step overwrites them). amsgrad is refused.
    """

    states = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        checks.require(max_grad_norm > 0, "FusedLAMB", "max_grad_norm", "be positive", max_grad_norm)
        self.adam_w_mode, self.use_nvlamb = int(adam_w_mode), use_nvlamb
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm,
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none, amsgrad)

    def _before_step(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        dense = [g for g in grads if not g.is_sparse]
        flag = torch.zeros(1, dtype=torch.int32, device=dense[0].device if dense else "cpu")
        self._norm = multi_tensor_l2norm(_CHUNK, flag, [dense])[0]

    def _update(self, group: dict[str, Any], lists: list[list[Tensor]]) -> None:
        group["step"] = group.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        multi_tensor_lamb(
            _CHUNK, self._norm, lists, group["lr"], beta1, beta2, group["eps"], group["step"],
            group["bias_correction"], group["weight_decay"], group["grad_averaging"], self.adam_w_mode, self._norm,
            self.defaults["max_grad_norm"], self.use_nvlamb,
        )  # fmt: skip


class FusedNovoGrad(_Optimizer):
    """NovoGrad (Ginsburg et al., arXiv:1905.11286) with Apex's arguments: one running gradient norm a tensor.

    norm_type 2 or 0 (the largest magnitude). init_zero: the running norm begins at 0, else at the first gradient's.
    reg_inside_moment: normalization and weight decay before the moment instead of after it. amsgrad is refused.
    The norm is the state exp_avg_sq of its parameter (there a list of the group: such a state dict is refused).
    """

    states = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        checks.one_of("FusedNovoGrad", "norm_type", norm_type, (0, 2))
        self.moment_mode = int(not reg_inside_moment)
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "grad_averaging": grad_averaging, "norm_type": norm_type, "init_zero": init_zero,
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none, amsgrad)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if any("exp_avg_sq" in group for group in state_dict["param_groups"]):
            must = "have the norms in the parameters' states, as state_dict() here gives them"
            checks.fail("FusedNovoGrad", "state_dict", must, "exp_avg_sq in a group, Apex's own")
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for p in group["params"]:
                # torch casts states to the parameter's dtype; a running norm is float32 beside half precision
                if "exp_avg_sq" in self.state.get(p, {}):
                    self.state[p]["exp_avg_sq"] = _widened(self.state[p]["exp_avg_sq"])

    def _update(self, group: dict[str, Any], lists: list[list[Tensor]]) -> None:
        group["step"] = group.get("step", 0) + 1
        kind = 2 if group["norm_type"] == 2 else torch.inf
        for g, p in zip(*lists[:2], strict=True):
            if "exp_avg_sq" not in self.state[p]:
                first = torch.linalg.vector_norm(_widened(g), kind)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(first) if group["init_zero"] else first
        norms = torch.stack([self.state[p]["exp_avg_sq"] for p in lists[1]])
        beta1, beta2 = group["betas"]
        multi_tensor_novograd(
            _CHUNK, norms, lists, norms, group["lr"], beta1, beta2, group["eps"], group["step"],
            group["bias_correction"], group["weight_decay"], group["grad_averaging"], self.moment_mode,
            group["norm_type"],
        )  # fmt: skip
        for p, norm in zip(lists[1], norms.unbind(), strict=True):
            self.state[p]["exp_avg_sq"] = norm.clone()


class FusedAdagrad(_Optimizer):
    """Adagrad with Apex's arguments; adagrad_w_mode: decoupled weight decay. Gradients are dense."""

    states = ("sum",)

    def __init__(
        self, params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:  # fmt: skip
        self.adagrad_w_mode = int(adagrad_w_mode)
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, set_grad_none)

    def _update(self, group: dict[str, Any], lists: list[list[Tensor]]) -> None:
        flag = torch.zeros(1, dtype=torch.int32, device=lists[0][0].device)
        multi_tensor_adagrad(_CHUNK, flag, lists, group["lr"], group["eps"], self.adagrad_w_mode, group["weight_decay"])


def _widened(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()
