"""Apex's FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad and FusedAdagrad on `compat.multi_tensor`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from powertrain.compat.multi_tensor import (
    multi_tensor_adagrad,
    multi_tensor_l2norm,
    multi_tensor_lamb,
    multi_tensor_lamb_mp,
    multi_tensor_novograd,
    norms_of,
)
from powertrain.ops.conversion import unsupported
from powertrain.runtime import checks

# tensors of one call there; a hint that our functions do not read
_CHUNK = 65536


class _Optimizer(torch.optim.Optimizer):
    """Steps by groups; a subclass gives the names of its states, shaped as the parameter, and `_update`."""

    states: tuple[str, ...] = ()
    # attributes, besides torch's, that a step reads
    options: tuple[str, ...] = ()

    def __init__(self, params: Any, defaults: dict[str, Any], set_grad_none: bool, amsgrad: bool = False) -> None:
        if amsgrad:
            unsupported(type(self).__name__, "amsgrad", True, "torch.optim.AdamW(amsgrad=True)")
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps defaults, state and groups only
        kept = {name: getattr(self, name) for name in ("set_grad_none", *self.options)}
        return {**super().__getstate__(), **kept}

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
    options = ("adam_w_mode", "use_nvlamb")

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
        # sparse ones raise in step, with a message
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


class FusedMixedPrecisionLamb(torch.optim.Optimizer):
    """`FusedLAMB` with float32 copies of parameters of reduced_precision_dtype, which a step reads and rounds.

    `step(grad_scaler=)` unscales the gradients, and leaves everything as it is where one is not finite; `step` counts
    the others only. lr and step are tensors of a group: nothing waits for the GPU. States of the copied parameters are
    float32, those of others as the parameter. amsgrad is refused.
    The copies are made of the parameters by the first step, and again by the first after `load_state_dict`, as there:
    no state dict has them.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        op = "FusedMixedPrecisionLamb"
        if amsgrad:
            unsupported(op, "amsgrad", True, "torch.optim.AdamW(amsgrad=True)")
        checks.require(max_grad_norm > 0, op, "max_grad_norm", "be positive", max_grad_norm)
        self.adam_w_mode, self.use_nvlamb = int(adam_w_mode), use_nvlamb
        self.reduced_precision_dtype = reduced_precision_dtype
        self._copies: dict[Tensor, Tensor] = {}
        # torch.amp.GradScaler hands itself to step
        self._step_supports_amp_scaling = True
        defaults = {
            "lr": torch.tensor(lr, dtype=torch.float32), "step": torch.tensor([step], dtype=torch.int32),
            "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm,
        }  # fmt: skip
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        names = ("adam_w_mode", "use_nvlamb", "reduced_precision_dtype", "_copies", "_step_supports_amp_scaling")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "step"):
            # of its own: a default would be one tensor of all groups
            value = torch.as_tensor(group[name], dtype=self.defaults[name].dtype)
            group[name] = value.detach().clone().to(group["params"][0].device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._copies = {}
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                # torch casts states to the parameter's dtype
                self.state[p][name] = value.to(p.device, copy=True) if isinstance(value, Tensor) else value
        for group in self.param_groups:
            for name in ("lr", "step"):
                group[name] = torch.as_tensor(group[name]).to(group["params"][0].device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """One step; the closure's value. Raises RuntimeError for a sparse gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # before the gradients are looked at: the copies are made even by a step without gradients
        self._copy_parameters()
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(g.is_sparse for g in grads):
            raise RuntimeError("FusedMixedPrecisionLamb: gradients must be dense, got a sparse one")
        if not grads:
            return loss
        device = grads[0].device
        scale, found_inf = torch.ones(1, device=device), torch.zeros(1, device=device)
        if grad_scaler is not None:
            scale = grad_scaler._get_scale_async().reshape(1).to(device)
            found_inf = grad_scaler._check_inf_per_device(self)[device].reshape(1)
        # where it is set, the update changes nothing
        flag = (found_inf != 0).to(torch.int32)
        # a flag of its own: the norm is computed in any case
        norm, _ = multi_tensor_l2norm(_CHUNK, torch.zeros_like(flag), [grads])
        for group in self.param_groups:
            self._step_group(group, flag, norm, scale, found_inf)
        return loss

    def _copy_parameters(self) -> None:
        """float32 copies of the parameters, by the first step: until then broadcasts of them may come."""
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.dtype is self.reduced_precision_dtype and p not in self._copies:
                self._copies[p] = p.detach().to(torch.float32, copy=True)

    def _step_group(self, group: dict[str, Any], flag: Tensor, norm: Tensor, scale: Tensor, found_inf: Tensor) -> None:
        # on the device, so that a skipped step counts without a wait
        group["step"] += (flag == 0).to(torch.int32)
        beta1, beta2 = group["betas"]
        numbers = (
            group["lr"], beta1, beta2, group["eps"], group["step"], group["bias_correction"], group["weight_decay"],
            group["grad_averaging"], self.adam_w_mode, norm, self.defaults["max_grad_norm"] * scale, self.use_nvlamb,
            found_inf, scale.double().reciprocal().float(),
        )  # fmt: skip
        # apart: only parameters with copies have a fifth list, of the results rounded to their dtype
        for copied in (False, True):
            wanted = [p for p in group["params"] if p.grad is not None and (p in self._copies) == copied]
            sources = [self._copies[p] if copied else p for p in wanted]
            for p, source in zip(wanted, sources, strict=True):
                if not self.state[p]:
                    self.state[p].update({name: torch.zeros_like(source) for name in ("exp_avg", "exp_avg_sq")})
            states = [[self.state[p][name] for p in wanted] for name in ("exp_avg", "exp_avg_sq")]
            lists = [[p.grad for p in wanted], sources, *states, *([wanted] if copied else [])]
            multi_tensor_lamb_mp(_CHUNK, flag, lists, *numbers)


class FusedNovoGrad(_Optimizer):
    """NovoGrad (Ginsburg et al., arXiv:1905.11286) with Apex's arguments: one running gradient norm a tensor.

    norm_type 2 or 0 (the largest magnitude). init_zero: the running norm begins at 0, else at the first gradient's.
    reg_inside_moment: normalization and weight decay before the moment instead of after it. amsgrad is refused.
    The norm is the state exp_avg_sq of its parameter (there a list of the group: such a state dict is refused).
    """

    states = ("exp_avg",)
    options = ("moment_mode",)

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
        # 0 is Apex's name of the largest magnitude
        kind = 2 if group["norm_type"] == 2 else torch.inf
        for g, p in zip(*lists[:2], strict=True):
            if "exp_avg_sq" not in self.state[p]:
                (first,) = norms_of([_widened(g)], kind)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(first) if group["init_zero"] else first
        norms = torch.stack([self.state[p]["exp_avg_sq"] for p in lists[1]])
        beta1, beta2 = group["betas"]
        multi_tensor_novograd(
            _CHUNK, norms, lists, norms, group["lr"], beta1, beta2, group["eps"], group["step"],
            group["bias_correction"], group["weight_decay"], group["grad_averaging"], self.moment_mode,
            group["norm_type"],
        )  # fmt: skip
        for p, norm in zip(lists[1], norms.unbind(), strict=True):
            # a view of the stack would keep all norms alive in each state, and in each saved one
            self.state[p]["exp_avg_sq"] = norm.clone()


class FusedAdagrad(_Optimizer):
    """Adagrad with Apex's arguments; adagrad_w_mode: decoupled weight decay. Gradients are dense."""

    states = ("sum",)
    options = ("adagrad_w_mode",)

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
