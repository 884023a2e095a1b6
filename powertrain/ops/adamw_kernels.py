"""Kernels of AdamW, the table of where their tensors are, and the launches; adamw.py has the formulas."""

import itertools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.shapes import cdiv
from powertrain.ops.tensor_tables import DeviceTable, chunk_of_program, chunk_table, distances_of, tensor_at
from powertrain.runtime.launch import kernel

# elements of one program: AdamW at 1e9 parameters on an H200 took 6.64 ms with chunks of 1024, 6.76 with 2048 and 6.96
# with 16384
CHUNK = 1024
# rows of the table, `count` long each; but for the sizes, in elements from the row's first tensor
_PARAM, _GRAD, _EXP_AVG, _EXP_AVG_SQ, _STEP, _NUMEL, _MASTER = (tl.constexpr(row) for row in range(7))


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
    # chunks of all tensors in one launch: hundreds of small launches cost more than the updates
    tensor, start = chunk_of_program(chunks_ptr, CHUNK)
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


class Tensors(NamedTuple):
    """Tensors of the parameters that one launch updates, all in the same order."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    steps: list[Tensor]
    masters: list[Tensor | None]

    def at(self, places: list[int]) -> "Tensors":
        rows: Any = ([row[i] for i in places] for row in self)
        return Tensors(*rows)


class Update:
    """The launches that update some parameters, of one device, of the same dtypes, all with a master or none. Holds no
    tensor of theirs, so that whoever moves the state to the CPU frees its memory."""

    def __init__(self) -> None:
        self._uploaded = DeviceTable()
        self._numbers: list[int] = []
        self._aligned = self._others_aligned = False
        self._table = self._chunks = torch.empty(0)

    def locate(self, tensors: Tensors) -> None:
        """To be called when a tensor lies elsewhere, has another size, or the stream is another."""
        *rows, with_none = tensors
        masters = [master for master in with_none if master is not None]
        numels, device = tuple(p.numel() for p in tensors.params), tensors.params[0].device
        distances, aligned = zip(*(distances_of(row) for row in rows), strict=True)
        of_masters, masters_aligned = distances_of(masters) if masters else ([], True)
        self._numbers = [*itertools.chain(*distances), *numels, *of_masters]
        # steps are read one by one
        of_params, of_grads, *of_states = aligned[:_STEP]
        self._others_aligned = of_params and all(of_states) and masters_aligned
        self._aligned = self._others_aligned and of_grads
        self._chunks = chunk_table(numels, CHUNK, device)
        self._table = self._uploaded.get(self._numbers, device)

    def locate_grads(self, grads: list[Tensor]) -> None:
        """To be called when only gradients lie elsewhere, as they do after `zero_grad()`."""
        distances, aligned = distances_of(grads)
        self._numbers[len(grads) : 2 * len(grads)] = distances
        self._aligned = self._others_aligned and aligned
        self._table = self._uploaded.get(self._numbers, grads[0].device)

    def launch(
        self,
        first: Tensors,  # the first parameter alone is used
        count: int,  # of parameters
        group: dict[str, Any],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        grad_factor: Tensor | None,
    ) -> None:
        rows: Any = first[:_NUMEL]
        p, grad, exp_avg, exp_avg_sq, step = (row[0] for row in rows)
        factors = torch.empty(3, count, dtype=torch.float32, device=p.device)
        lr, (beta1, beta2) = group["lr"], map(float, group["betas"])
        lr_on_device = lr if isinstance(lr, Tensor) and lr.device == p.device else None
        _adamw_step_kernel[(cdiv(count, 128),)](
            self._table, step, factors, lr_on_device, found_inf,
            count, 0.0 if lr_on_device is not None else float(lr), _log(beta1), _log(beta2),
            float(group["weight_decay"]), BLOCK=128, num_warps=4,
        )  # fmt: skip
        _adamw_kernel[(self._chunks.shape[0],)](
            self._chunks, self._table, factors, found_inf, grad_scale, grad_factor,
            p, grad, exp_avg, exp_avg_sq, first.masters[0],
            count, 1 - beta1, beta2, 1 - beta2, group["eps"],
            MAXIMIZE=group["maximize"], ALIGNED=self._aligned, CHUNK=CHUNK, BLOCK=1024, num_warps=4,
        )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
