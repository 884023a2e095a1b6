"""AdamW over all parameters in a few launches.

    p     = p - lr * weight_decay * p
    m     = m + (1 - β1) (g - m);    v = β2 v + (1 - β2) g²
    p     = p - lr / (1 - β1^t) * m / (sqrt(v / (1 - β2^t)) + eps)

Everything is computed in float32, whatever the dtypes of parameter, gradient and state. With float32 throughout a
parameter moves 28 bytes a step (16 read, 12 written).

One kernel serves many tensors: the host uploads a table of where they are, when it has changed, and a table that cuts
them into chunks, when their sizes are new; a program looks its chunk up and works on it. Step counts, learning rate
corrections, found_inf and the factor that clips stay on the device: nothing here waits for the GPU. Clipping is one
read of the gradients for their norm; the update multiplies them by the factor as it reads them.

Sources: Loshchilov and Hutter, arXiv:1711.05101; semantics of torch.optim.AdamW(fused=True).
"""

import itertools
import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim.adamw import adamw as _adamw_functional
from torch.optim.optimizer import ParamsT

from powertrain.ops.adamw_kernels import Tensors, Update
from powertrain.ops.grad_norm import clip_factor, global_norm
from powertrain.ops.shapes import acc_dtype
from powertrain.ops.tensor_tables import is_dense, upload_stream
from powertrain.runtime import checks
from powertrain.runtime.deferred_signals import deferred_signals
from powertrain.runtime.dispatch import use_kernel
from powertrain.runtime.positional import hinted


def adamw_ref(
    p: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    master: Tensor | None = None,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
) -> None:
    """The specification of one update, in place, in plain PyTorch."""
    acc = acc_dtype(p.dtype)
    value, g, m, v = (t.to(acc) for t in (p if master is None else master, grad, exp_avg, exp_avg_sq))
    g = -g if maximize else g
    step += 1
    value = value - lr * weight_decay * value
    m = m + (1 - betas[0]) * (g - m)
    v = betas[1] * v + (1 - betas[1]) * g * g
    t = step.double()
    size, root = (lr / (1 - betas[0] ** t)).to(acc), torch.sqrt(1 - betas[1] ** t).to(acc)
    value = value - size * m / (v.sqrt() / root + eps)
    for target, source in ((p, value), (exp_avg, m), (exp_avg_sq, v), (master, value)):
        if target is not None:
            target.copy_(source)


def _check_state_dict(state_dict: dict[str, Any]) -> None:
    if any(group.get("amsgrad") for group in state_dict["param_groups"]):
        raise NotImplementedError(
            "AdamW: state_dict must be without amsgrad, which is not implemented; use torch.optim.AdamW"
        )
    for saved in state_dict["state"].values():
        good = not saved or {"step", "exp_avg", "exp_avg_sq"} <= saved.keys()
        checks.require(good, "AdamW", "state_dict", "have step, exp_avg and exp_avg_sq", f"{sorted(saved)}")


# parameter, gradient, state
_Entry = tuple[Tensor, Tensor, dict[str, Tensor]]


class _Located(NamedTuple):
    """State cached from the last step of a group of plain tensors, valid while their addresses do not change."""

    facts: list[Any]  # all that its launches depend on but where gradients are
    addresses: list[int]  # of the gradients
    updates: list[tuple[Update, list[int]]]  # each with the positions of its parameters in the group


# options of torch.optim.AdamW that have one value here; torch takes them in a group too
_FIXED = {"amsgrad": False, "differentiable": False, "decoupled_weight_decay": True}


def _check_group(group: dict[str, Any]) -> None:
    for name, only in _FIXED.items():
        if (value := group.get(name, only)) != only:
            raise NotImplementedError(f"AdamW: {name}={value} is not implemented; use torch.optim.AdamW")
    for name in ("lr", "betas", "eps", "weight_decay"):
        value = group.get(name, 0.0)
        # a tensor on a GPU is not read for a check
        numbers = [x for x in (value if name == "betas" and value else (value,)) if isinstance(x, Real)]
        checks.require(all(map(math.isfinite, numbers)), "AdamW", name, "be finite", value)
    devices = [x.device for x in group.get("betas") or () if isinstance(x, Tensor)]
    # kernels take them as numbers, which would wait for the GPU in each step
    on_host = all(device.type == "cpu" for device in devices)
    checks.require(on_host, "AdamW", "betas", "be numbers, or tensors on the CPU", f"tensors on {devices}")


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW in a few launches for all parameters.

    params, lr, betas, eps, weight_decay, maximize   as in torch.optim.AdamW; lr may be a tensor on the device, betas on
                     the CPU
    foreach, fused, capturable   accepted for compatibility: every step is fused and can be captured in a CUDA graph
                     (after one step has made the state)
    master_weights   keep a float32 copy of 16-bit parameters in the state and update that
    state_dtype      of exp_avg and exp_avg_sq, e.g. torch.bfloat16; default: the parameter's, float32 with a master

    State per parameter: step (float32, on the parameter's device), exp_avg, exp_avg_sq, and master; state dicts go to
    and from torch.optim.AdamW. Loading keeps state_dtype and the master's float32 (torch casts both to p's).
    Works with torch.amp.GradScaler as torch's fused optimizers do: grad_scale and found_inf are taken on the device.
    Clips by itself: `step(max_norm=1.0)` does what clip_grad_norm_ and step do, without the pass that rewrites the
    gradients, and leaves their norm in `grad_norm`.
    Numerics: float32 inside, whatever the dtypes; float64 on the CPU is plain PyTorch.
    Raises ValueError where torch.optim.AdamW does, NotImplementedError for amsgrad and differentiable.
    """

    @hinted
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if state_dtype is not None:
            checks.one_of("AdamW", "state_dtype", state_dtype, (torch.float32, torch.bfloat16, torch.float16))
        _check_group(
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            | {"amsgrad": amsgrad, "differentiable": differentiable}
        )
        self.master_weights = master_weights
        self.state_dtype = state_dtype
        self._updates: dict[Any, Update] = {}
        self._located: dict[int, _Located] = {}
        self.grad_norm: Tensor | None = None
        with deferred_signals():  # torch's first optimizer imports its compiler
            super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, capturable=capturable)
        # GradScaler then leaves unscaling, and skipping a bad step, to us
        self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check_group(param_group)  # torch checks those of the constructor alone, and takes infinity
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_updates", {})
        self.__dict__.setdefault("_located", {})
        self.__dict__.setdefault("grad_norm", None)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("master_weights", "state_dtype", "_step_supports_amp_scaling")}
        return {**super().__getstate__(), **kept}

    def _has_master(self, p: Tensor) -> bool:
        return self.master_weights and p.dtype in (torch.float16, torch.bfloat16)

    def _dtype_of(self, p: Tensor) -> torch.dtype:
        return self.state_dtype or (torch.float32 if self._has_master(p) else p.dtype)

    def _new_state(self, p: Tensor) -> dict[str, Tensor]:
        _refuse_complex(p)
        state = self.state[p]
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        state["exp_avg"] = torch.zeros_like(p, dtype=self._dtype_of(p))
        state["exp_avg_sq"] = torch.zeros_like(p, dtype=self._dtype_of(p))
        if self._has_master(p):
            state["master"] = p.detach().to(torch.float32, copy=True)
        return state

    def init_state(self) -> None:
        """Make the state of every parameter that has none, as the first step would: a checkpoint is loaded into it."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] or self._new_state(p)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # hooks of ours come after the user's pre-hooks, which may give another state dict, and ahead of the post-hooks
        loaded: list[dict[str, Any]] = []

        def before(_: Any, given: dict[str, Any]) -> None:
            _check_state_dict(given)
            loaded.append(given)

        hooks = [
            self.register_load_state_dict_pre_hook(before),
            self.register_load_state_dict_post_hook(lambda _: self._take_states(loaded[0]), prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _take_states(self, state_dict: dict[str, Any]) -> None:
        """From a state dict as it was saved: torch has cast its tensors to the parameters' dtypes."""
        ids = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for name, p in zip(ids, params, strict=True):
            saved = state_dict["state"].get(name)
            if saved:
                self.state[p] = self._loaded(p, saved)

    def _loaded(self, p: Tensor, saved: dict[str, Any]) -> dict[str, Tensor]:
        """A parameter's saved state in our dtypes and in the parameter's memory layout."""

        def like(value: Tensor, dtype: torch.dtype) -> Tensor:
            return torch.empty_like(p, dtype=dtype).copy_(value)

        # a copy: the caller's state dict must not change with later steps
        step = torch.as_tensor(saved["step"], dtype=torch.float32).to(p.device, copy=True).reshape(())
        state = {"step": step, **{k: like(saved[k], self._dtype_of(p)) for k in ("exp_avg", "exp_avg_sq")}}
        if self._has_master(p):
            state["master"] = like(saved.get("master", p.detach()), torch.float32)
        return state

    @overload
    def step(
        self, closure: None = None, *, max_norm: float | None = None, grad_factor: Tensor | None = None
    ) -> None: ...
    @overload
    def step(
        self, closure: Callable[[], float], *, max_norm: float | None = None, grad_factor: Tensor | None = None
    ) -> float: ...
    # the kernels read addresses, which tensors of a trace have not
    @_disable_dynamo
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        max_norm: float | None = None,
        grad_factor: Tensor | None = None,
    ) -> float | None:
        """One update of every parameter that has a gradient. Returns the result of `closure`.

        max_norm      update by gradients scaled down to this 2-norm, taken over all parameters of this optimizer (over
                      all shards of DTensors): min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_. The
                      norm before clipping, after a GradScaler's unscaling, is then in `grad_norm`: float32 [], on the
                      device
        grad_factor   float32 [], on the device: update by gradients times this, for a norm that is taken over more than
                      this optimizer's parameters
        Both leave the gradients as they are (but for a GradScaler's unscaling) and need no host synchronisation. With
        DTensors every rank must call this with gradients of the same meshes: max_norm sums over their groups.
        Numerics: those of scaling the gradients first, without the rounding to their dtype.
        """
        return self._step(closure, max_norm=max_norm, grad_factor=grad_factor)

    def _step(
        self,
        closure: Callable[[], float] | None,
        *,
        max_norm: float | None = None,
        grad_factor: Tensor | None = None,
    ) -> float | None:
        checks.require(
            max_norm is None or grad_factor is None, "AdamW.step", "grad_factor", "come without max_norm", "both"
        )
        if max_norm is not None:
            checks.require(max_norm > 0, "AdamW.step", "max_norm", "be above 0", max_norm)
        if grad_factor is not None:
            checks.tensor("AdamW.step", "grad_factor", grad_factor)
            # the kernel reads an address, which a DTensor has not
            plain = not hasattr(grad_factor, "_local_tensor")
            checks.require(plain, "AdamW.step", "grad_factor", "be a plain tensor (full_tensor())", "a DTensor")
            checks.require(
                grad_factor.numel() == 1, "AdamW.step", "grad_factor", "have one element", list(grad_factor.shape)
            )
            # [1] times a parameter of no dims would be [1]
            grad_factor = grad_factor.reshape(())
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if max_norm is not None:
            grad_factor = self._clip_factor(max_norm, grad_scale)
        for index, group in enumerate(self.param_groups):
            self._step_of_group(index, group, grad_scale, found_inf, grad_factor)
        return loss

    def _step_of_group(self, index: int, group: dict[str, Any], *options: Tensor | None) -> None:
        """options: grad_scale, found_inf, grad_factor."""
        tensors = self._plain_tensors(group)
        # a backward of a graph made before the step then says so, as after torch's steps; kernels write unseen.
        # 0.06 us a parameter
        increment_version([p for p in group["params"] if p.grad is not None] if tensors is None else tensors.params)
        if tensors is not None and use_kernel("adamw", tensors.params[0]):
            for update, places in self._located_updates(index, tensors):
                first = tensors.at(places[:1])
                here = [None if t is None else t.to(first.params[0].device) for t in options]
                update.launch(first, len(places), group, *here)
            return
        for key, bucket in self._buckets(group).items():
            device, dense = key[:2]
            here = [None if t is None else t.to(device) for t in options]
            if dense and use_kernel("adamw", bucket[0][0]):
                update, tensors = self._updates.setdefault((index, key), Update()), _tensors_of(bucket)
                update.locate(tensors)
                update.launch(tensors, len(bucket), group, *here)
            else:
                _update_torch(bucket, group, *here)

    def _plain_tensors(self, group: dict[str, Any]) -> Tensors | None:
        """The tensors of a step, if all have a state and are plain and contiguous. Each line costs 0.05 to 0.2 us a
        parameter; `_buckets`, which takes all others, 3 us."""
        pairs = [(p, grad) for p in group["params"] if (grad := p.grad) is not None]
        states: Any = [self.state.get(p) for p, _ in pairs]
        if not pairs or not all(states):
            return None
        params, grads = [p for p, _ in pairs], [grad for _, grad in pairs]
        plain = {*map(type, params), *map(type, grads)} <= {Tensor, Parameter}
        if not plain or {grad.layout for grad in grads} != {torch.strided}:
            return None
        if not (all(map(Tensor.is_contiguous, params)) and all(map(Tensor.is_contiguous, grads))):
            return None
        return Tensors(params, grads, *_state_rows(states))

    def _located_updates(self, index: int, tensors: Tensors) -> list[tuple[Update, list[int]]]:
        params, grads, *states = tensors
        rows: Any = (params, *states)
        others = [t for t in itertools.chain(*rows) if t is not None]
        facts: list[Any] = [upload_stream(params[0].device), *map(Tensor.data_ptr, others), *map(Tensor.numel, params)]
        facts += [t.dtype for t in itertools.chain(others, grads)]
        addresses = list(map(Tensor.data_ptr, grads))
        found = self._located.get(index)
        if found is not None and found.facts == facts:
            if found.addresses != addresses:
                for update, places in found.updates:
                    update.locate_grads([grads[i] for i in places])
                self._located[index] = found._replace(addresses=addresses)
            return found.updates
        return self._locate(index, tensors, facts, addresses)

    def _locate(
        self, index: int, tensors: Tensors, facts: list[Any], addresses: list[int]
    ) -> list[tuple[Update, list[int]]]:
        by_dtypes: dict[Any, list[int]] = {}
        for place, (p, grad, exp_avg, _, _, master) in enumerate(zip(*tensors, strict=True)):
            _refuse_complex(p)
            key = p.device, p.dtype, grad.dtype, exp_avg.dtype, master is None
            by_dtypes.setdefault(key, []).append(place)
        updates = []
        for key, places in by_dtypes.items():
            update = self._updates.setdefault((index, key), Update())
            update.locate(tensors.at(places))
            updates.append((update, places))
        self._located.pop(index, None)
        # facts have the stream of one device
        if len({device for device, *_ in by_dtypes}) == 1:
            self._located[index] = _Located(facts, addresses, updates)
        return updates

    def _clip_factor(self, max_norm: float, grad_scale: Tensor | None) -> Tensor:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        grads: Any = [p.grad for p in params]
        if {grad.layout for grad in grads} != {torch.strided} or any(map(Tensor.is_complex, params)):
            grads = list(map(_gradient, params))
        norm = global_norm(grads)
        self.grad_norm = norm if grad_scale is None else norm / grad_scale.to(norm.device)
        return clip_factor(self.grad_norm, max_norm)

    def _buckets(self, group: dict[str, Any]) -> dict[Any, list[_Entry]]:
        """The parameters with a gradient by device, layout and dtypes: a launch each. Some 3 us a parameter."""
        buckets: dict[Any, list[_Entry]] = {}
        for p in group["params"]:
            grad: Any = _gradient(p)
            if grad is None:
                continue
            state = self.state[p] or self._new_state(p)
            if hasattr(p, "_local_tensor"):
                p, grad = p._local_tensor, grad._local_tensor
                state = {name: getattr(t, "_local_tensor", t) for name, t in state.items()}
            dense = is_dense(p)
            if not (p.is_contiguous() and grad.is_contiguous()) and grad.stride() != p.stride():
                grad = torch.empty_like(p, dtype=grad.dtype).copy_(grad)
            key = (p.device, dense, p.dtype, grad.dtype, state["exp_avg"].dtype, "master" in state)
            buckets.setdefault(key, []).append((p, grad, state))
        return buckets


def _gradient(p: Tensor) -> Tensor | None:
    if p.grad is not None:
        if p.grad.layout is not torch.strided:
            raise NotImplementedError("AdamW: sparse gradients are not implemented; use torch.optim.SparseAdam")
        _refuse_complex(p)
    return p.grad


def _refuse_complex(p: Tensor) -> None:
    if p.is_complex():
        raise NotImplementedError("AdamW: complex parameters are not implemented; use torch.optim.AdamW")


def _tensors_of(bucket: list[_Entry]) -> Tensors:
    params, grads, states = (list(column) for column in zip(*bucket, strict=True))
    return Tensors(params, grads, *_state_rows(states))


def _state_rows(states: list[dict[str, Tensor]]) -> Any:
    return *([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq", "step")), [s.get("master") for s in states]


def _update_torch(
    bucket: list[_Entry],
    group: dict[str, Any],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    grad_factor: Tensor | None,
) -> None:
    params, grads, states = zip(*bucket, strict=True)
    (beta1, beta2), state = map(float, group["betas"]), states[0]
    options = {name: group[name] for name in ("lr", "eps", "weight_decay", "maximize")}
    # [1] times a parameter of no dims would be [1]
    options["lr"] = options["lr"].reshape(()) if isinstance(options["lr"], Tensor) else options["lr"]
    if (
        is_dense(params[0])
        and grad_factor is None
        and "master" not in state
        and len({t.dtype for t in (params[0], grads[0], state["exp_avg"])}) == 1
    ):
        _adamw_functional(
            list(params), list(grads), [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [],
            [s["step"] for s in states], foreach=False, fused=True, grad_scale=grad_scale, found_inf=found_inf,
            amsgrad=False, beta1=beta1, beta2=beta2, **options,
        )  # fmt: skip
        return
    if found_inf is not None and found_inf.item():
        return
    for p, grad, s in bucket:
        if grad_scale is not None:
            grad.div_(grad_scale)
        if grad_factor is not None:
            # ahead of any rounding: fp16's scaled gradients, divided in fp16, would lose their small ones
            grad = grad.to(acc_dtype(grad.dtype)) * grad_factor
        adamw_ref(p, grad, s["exp_avg"], s["exp_avg_sq"], s["step"], s.get("master"), betas=(beta1, beta2), **options)
