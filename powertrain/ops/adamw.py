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
from typing import Any, overload

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.optim.adamw import adamw as _adamw_functional
from torch.optim.optimizer import ParamsT

from powertrain.ops.grad_norm import clip_factor, global_norm
from powertrain.ops.shapes import acc_dtype
from powertrain.ops.tensor_tables import DeviceTable, chunk_table, distances_of, is_dense, tensor_at
from powertrain.runtime import checks
from powertrain.runtime.dispatch import use_kernel
from powertrain.runtime.launch import kernel

# elements of one program: AdamW at 1e9 parameters on an H200 took 6.64 ms with chunks of 1024, 6.76 with 2048 and 6.96
# with 16384
CHUNK = 1024
# rows of the table, `count` long each; but for the sizes, in elements from the row's first tensor
_PARAM, _GRAD, _EXP_AVG, _EXP_AVG_SQ, _STEP, _NUMEL, _MASTER = (tl.constexpr(row) for row in range(7))


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


@triton.jit
def _bias_correction(step, log_beta):
    """1 - beta^step, accurate where beta^step is near 1 (0.999 at step 1 would lose three digits)."""
    t = step * log_beta
    near = -t * (1 + t / 2 * (1 + t / 3 * (1 + t / 4 * (1 + t / 5 * (1 + t / 6 * (1 + t / 7 * (1 + t / 8)))))))
    return tl.where(t > -0.5, near, 1.0 - tl.exp(t))


@kernel(unaligned=("lr_ptr", "found_inf_ptr"))
def _adamw_step_kernel(
    table_ptr,
    step_ptr,
    factors_ptr,
    lr_ptr,
    found_inf_ptr,
    count,
    lr,
    log_beta1,
    log_beta2,
    weight_decay,
    BLOCK: tl.constexpr,
):
    """Count the step of every tensor, and write its factors [3, count]: of m, of sqrt(v), of the decay."""
    tensors = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tensors < count
    steps = step_ptr + tl.load(table_ptr + _STEP * count + tensors, mask=mask, other=0)  # [BLOCK]
    advance = 1.0
    if found_inf_ptr is not None:
        # decided on the device: the host does not wait to learn whether the step is skipped
        advance = tl.where(tl.load(found_inf_ptr) == 0.0, 1.0, 0.0)  # scalar
    step = tl.load(steps, mask=mask, other=1.0) + advance  # [BLOCK]
    tl.store(steps, step, mask=mask)  # [BLOCK]
    rate = lr
    if lr_ptr is not None:
        rate = tl.load(lr_ptr).to(tl.float32)  # scalar
    tl.store(factors_ptr + tensors, rate / _bias_correction(step, log_beta1), mask=mask)  # [BLOCK]
    tl.store(factors_ptr + count + tensors, 1.0 / tl.sqrt(_bias_correction(step, log_beta2)), mask=mask)  # [BLOCK]
    # [BLOCK]
    tl.store(factors_ptr + 2 * count + tensors, rate * weight_decay + tl.zeros([BLOCK], tl.float32), mask=mask)


@triton.jit
def _update_block(
    p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, grad_scale_ptr, grad_factor_ptr, offsets, mask,
    step_size, root, decay, one_minus_beta1, beta2, one_minus_beta2, eps, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    g = tl.load(g_ptr + offsets, mask=mask).to(tl.float32)  # [BLOCK]
    m = tl.load(m_ptr + offsets, mask=mask).to(tl.float32)  # [BLOCK]
    v = tl.load(v_ptr + offsets, mask=mask).to(tl.float32)  # [BLOCK]
    if w_ptr is not None:
        p = tl.load(w_ptr + offsets, mask=mask)  # [BLOCK]
    else:
        p = tl.load(p_ptr + offsets, mask=mask).to(tl.float32)  # [BLOCK]
    if grad_scale_ptr is not None:
        g /= tl.load(grad_scale_ptr)  # scalar
        # as torch's fused optimizers: the caller finds unscaled gradients
        tl.store(g_ptr + offsets, g.to(g_ptr.dtype.element_ty), mask=mask)  # [BLOCK]
    if grad_factor_ptr is not None:
        # not stored: clipping that rewrites the gradients moves 4 to 8 bytes more a parameter
        g *= tl.load(grad_factor_ptr)  # scalar
    if MAXIMIZE:
        g = -g
    p -= decay * p
    m += one_minus_beta1 * (g - m)
    v = beta2 * v + one_minus_beta2 * g * g
    p -= step_size * m / (tl.sqrt(v) * root + eps)
    tl.store(m_ptr + offsets, m.to(m_ptr.dtype.element_ty), mask=mask)  # [BLOCK]
    tl.store(v_ptr + offsets, v.to(v_ptr.dtype.element_ty), mask=mask)  # [BLOCK]
    tl.store(p_ptr + offsets, p.to(p_ptr.dtype.element_ty), mask=mask)  # [BLOCK]
    if w_ptr is not None:
        tl.store(w_ptr + offsets, p, mask=mask)  # [BLOCK]


@kernel(unaligned=("found_inf_ptr", "grad_scale_ptr", "grad_factor_ptr"))
def _adamw_kernel(
    chunks_ptr,
    table_ptr,
    factors_ptr,
    found_inf_ptr,
    grad_scale_ptr,
    grad_factor_ptr,
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    master_ptr,
    count,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # param_ptr … master_ptr are the first tensors of their rows
    chunk = tl.program_id(0)
    tensor = tl.load(chunks_ptr + 2 * chunk)  # scalar
    # chunks of all tensors in one launch: hundreds of small launches cost more than the updates
    start = tl.load(chunks_ptr + 2 * chunk + 1).to(tl.int64) * CHUNK  # scalar
    table_ptr += tensor
    p_ptr = tensor_at(table_ptr, _PARAM, count, param_ptr, ALIGNED) + start
    g_ptr = tensor_at(table_ptr, _GRAD, count, grad_ptr, ALIGNED) + start
    m_ptr = tensor_at(table_ptr, _EXP_AVG, count, exp_avg_ptr, ALIGNED) + start
    v_ptr = tensor_at(table_ptr, _EXP_AVG_SQ, count, exp_avg_sq_ptr, ALIGNED) + start
    w_ptr = None
    if master_ptr is not None:
        w_ptr = tensor_at(table_ptr, _MASTER, count, master_ptr, ALIGNED) + start
    size = tl.minimum(tl.load(table_ptr + _NUMEL * count) - start, CHUNK).to(tl.int32)  # scalar
    if found_inf_ptr is not None:
        # a skipped step touches no parameter; an update by 0 would still read and write all of them
        size = tl.where(tl.load(found_inf_ptr) == 0.0, size, 0)  # scalar
    step_size = tl.load(factors_ptr + tensor)  # scalar
    root = tl.load(factors_ptr + count + tensor)  # scalar
    decay = tl.load(factors_ptr + 2 * count + tensor)  # scalar

    # whole blocks without a mask, which would keep the compiler from 16-byte vectors
    whole = size // BLOCK * BLOCK
    lanes = tl.arange(0, BLOCK)
    for block in range(0, whole, BLOCK):
        _update_block(
            p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, grad_scale_ptr, grad_factor_ptr, block + lanes, None,
            step_size, root, decay, one_minus_beta1, beta2, one_minus_beta2, eps, MAXIMIZE,
        )  # fmt: skip
    if whole < size:
        _update_block(
            p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, grad_scale_ptr, grad_factor_ptr, whole + lanes, whole + lanes < size,
            step_size, root, decay, one_minus_beta1, beta2, one_minus_beta2, eps, MAXIMIZE,
        )  # fmt: skip


# parameter, gradient, state
_Entry = tuple[Tensor, Tensor, dict[str, Tensor]]


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW in a few launches for all parameters.

    params, lr, betas, eps, weight_decay, maximize   as in torch.optim.AdamW; lr may be a tensor on the device
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
        if amsgrad or differentiable:
            raise NotImplementedError("AdamW: amsgrad and differentiable are not implemented; use torch.optim.AdamW")
        if state_dtype is not None:
            checks.one_of("AdamW", "state_dtype", state_dtype, (torch.float32, torch.bfloat16, torch.float16))
        self.master_weights = master_weights
        self.state_dtype = state_dtype
        self._tables: dict[Any, DeviceTable] = {}
        self.grad_norm: Tensor | None = None
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, capturable=capturable)
        # GradScaler then leaves unscaling, and skipping a bad step, to us
        self._step_supports_amp_scaling = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_tables", {})
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
        if any(group.get("amsgrad") for group in state_dict["param_groups"]):
            raise NotImplementedError(
                "AdamW: state_dict must be without amsgrad, which is not implemented; use torch.optim.AdamW"
            )
        super().load_state_dict(state_dict)
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
            for key, bucket in self._buckets(group).items():
                device, dense = key[:2]
                scale, inf, factor = (None if t is None else t.to(device) for t in (grad_scale, found_inf, grad_factor))
                if dense and use_kernel("adamw", bucket[0][0]):
                    table = self._tables.setdefault((index, key), DeviceTable())
                    _update(bucket, group, table, scale, inf, factor)
                else:
                    _update_torch(bucket, group, scale, inf, factor)
        return loss

    def _clip_factor(self, max_norm: float, grad_scale: Tensor | None) -> Tensor:
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        norm = global_norm(grad for grad in map(_gradient, params) if grad is not None)
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


def _update(
    bucket: list[_Entry],
    group: dict[str, Any],
    table: DeviceTable,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    grad_factor: Tensor | None,
) -> None:
    params, grads, states = zip(*bucket, strict=True)
    p, grad, state = bucket[0]
    device, count = p.device, len(bucket)
    rows = [params, grads, *([s[k] for s in states] for k in ("exp_avg", "exp_avg_sq", "step"))]
    numels = tuple(t.numel() for t in params)
    distances, aligned = zip(*(distances_of(row) for row in rows), strict=True)
    masters, masters_aligned = distances_of([s["master"] for s in states]) if "master" in state else ([], True)
    numbers = table.get([*itertools.chain(*distances), *numels, *masters], device)
    chunks = chunk_table(numels, CHUNK, device)
    factors = torch.empty(3, count, dtype=torch.float32, device=device)
    lr, (beta1, beta2) = group["lr"], group["betas"]
    lr_on_device = lr if isinstance(lr, Tensor) and lr.device == device else None
    _adamw_step_kernel[(triton.cdiv(count, 128),)](
        numbers, state["step"], factors, lr_on_device, found_inf,
        count, 0.0 if lr_on_device is not None else float(lr), _log(beta1), _log(beta2), float(group["weight_decay"]),
        BLOCK=128, num_warps=4,
    )  # fmt: skip
    _adamw_kernel[(chunks.shape[0],)](
        chunks, numbers, factors, found_inf, grad_scale, grad_factor,
        p, grad, state["exp_avg"], state["exp_avg_sq"], state.get("master"),
        count, 1 - beta1, beta2, 1 - beta2, group["eps"],
        MAXIMIZE=group["maximize"], ALIGNED=all(aligned[:_STEP]) and masters_aligned,
        CHUNK=CHUNK, BLOCK=1024, num_warps=4,
    )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _update_torch(
    bucket: list[_Entry],
    group: dict[str, Any],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    grad_factor: Tensor | None,
) -> None:
    params, grads, states = zip(*bucket, strict=True)
    (beta1, beta2), state = group["betas"], states[0]
    options = {name: group[name] for name in ("lr", "eps", "weight_decay", "maximize")}
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
