"""The norm of many gradients and clip_grad_norm_, in three launches for all gradients of a device and dtype.

Magnitudes are summed in float32 per chunk and then over chunks in a fixed order: the same bits every time. The norm and
the factor stay on the device: nothing here waits for the GPU.

Source: semantics of torch.nn.utils.clip_grad_norm_.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from powertrain.ops.shapes import acc_dtype
from powertrain.ops.tensor_tables import DeviceTable, chunk_of_program, chunk_table, distances_of, is_dense, tensor_at
from powertrain.runtime import checks
from powertrain.runtime.dispatch import use_kernel
from powertrain.runtime.launch import kernel
from powertrain.runtime.positional import hinted

CHUNK = 16384  # elements of one program; each leaves a number for one program to add up


@triton.jit
def _add_magnitudes(total, bad, g, NORM: tl.constexpr):
    if NORM == "2":
        total += g * g
    elif NORM == "1":
        total += tl.abs(g)
    else:
        # a maximum does not see nan
        total = tl.maximum(total, tl.abs(g))
        bad += (g != g).to(tl.int32)
    return total, bad


@kernel()
def _norm_partials_kernel(
    chunks_ptr,
    table_ptr,
    partial_ptr,
    grad_ptr,
    count,
    NORM: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each chunk's sum of squares, sum of magnitudes, or largest magnitude."""
    tensor, start = chunk_of_program(chunks_ptr, CHUNK)
    g_ptr = tensor_at(table_ptr + tensor, 0, count, grad_ptr, ALIGNED) + start
    size = tl.minimum(tl.load(table_ptr + count + tensor) - start, CHUNK).to(tl.int32)  # scalar
    total = tl.zeros([BLOCK], tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    whole = size // BLOCK * BLOCK
    for block in range(0, whole, BLOCK):
        g = tl.load(g_ptr + block + tl.arange(0, BLOCK)).to(tl.float32)  # [BLOCK]
        total, bad = _add_magnitudes(total, bad, g, NORM)
    if whole < size:
        offsets = whole + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + offsets, mask=offsets < size, other=0.0).to(tl.float32)  # [BLOCK]
        total, bad = _add_magnitudes(total, bad, g, NORM)
    if NORM == "inf":
        result = tl.where(tl.sum(bad, axis=0) > 0, float("nan"), tl.max(total, axis=0))
    else:
        result = tl.sum(total, axis=0)
    tl.store(partial_ptr + tl.program_id(0), result)  # scalar


# the factor lies behind the norm, at no multiple of 16 bytes
@kernel(unaligned=("factor_ptr",))
def _norm_total_kernel(partial_ptr, total_ptr, factor_ptr, count, max_norm, NORM: tl.constexpr, BLOCK: tl.constexpr):
    """The norm, and the factor that brings it down to max_norm. One program."""
    total = tl.zeros([BLOCK], tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    for block in range(0, count, BLOCK):
        offsets = block + tl.arange(0, BLOCK)
        part = tl.load(partial_ptr + offsets, mask=offsets < count, other=0.0)  # [BLOCK]
        if NORM == "inf":
            total = tl.maximum(total, part)
            bad += (part != part).to(tl.int32)
        else:
            total += part
    if NORM == "inf":
        norm = tl.where(tl.sum(bad, axis=0) > 0, float("nan"), tl.max(total, axis=0))
    elif NORM == "2":
        norm = tl.sqrt_rn(tl.sum(total, axis=0))
    else:
        norm = tl.sum(total, axis=0)
    tl.store(total_ptr, norm)  # scalar
    factor = max_norm / (norm + 1e-6)
    tl.store(factor_ptr, tl.where(factor > 1.0, 1.0, factor))  # scalar


# the factor lies behind the norm, at no multiple of 16 bytes
@kernel(unaligned=("factor_ptr",))
def _scale_tensors_kernel(
    chunks_ptr,
    table_ptr,
    factor_ptr,
    grad_ptr,
    count,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients times the factor, which touches no memory if it is 1."""
    factor = tl.load(factor_ptr)  # scalar
    if factor != 1.0:
        tensor, start = chunk_of_program(chunks_ptr, CHUNK)
        g_ptr = tensor_at(table_ptr + tensor, 0, count, grad_ptr, ALIGNED) + start
        size = tl.minimum(tl.load(table_ptr + count + tensor) - start, CHUNK).to(tl.int32)  # scalar
        whole = size // BLOCK * BLOCK
        for block in range(0, whole, BLOCK):
            here = g_ptr + block + tl.arange(0, BLOCK)
            tl.store(here, (tl.load(here).to(tl.float32) * factor).to(grad_ptr.dtype.element_ty))  # [BLOCK]
        if whole < size:
            here, mask = g_ptr + whole + tl.arange(0, BLOCK), whole + tl.arange(0, BLOCK) < size
            g = tl.load(here, mask=mask).to(tl.float32)  # [BLOCK]
            tl.store(here, (g * factor).to(grad_ptr.dtype.element_ty), mask=mask)  # [BLOCK]


# tables of clip_grad_norm_: where the gradients are, then their sizes
_clip_tables: dict[Any, DeviceTable] = {}


@hinted
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients of `parameters` in place so that their norm, taken together, is at most `max_norm`.

    As torch.nn.utils.clip_grad_norm_, in three launches for all gradients of a device and dtype. The norm is taken
    and returned in float32, of float64 gradients (on the CPU) in float64; gradients whose norm is within max_norm are
    not touched.
    Other norms than 1, 2 and inf are plain PyTorch; gradients on several devices and DTensors go to torch's own.
    Raises RuntimeError for a norm that is not finite if `error_if_nonfinite` (which waits for the GPU).
    """
    # a tensor on a GPU is not read for a check
    if not isinstance(max_norm, Tensor):
        checks.require(max_norm >= 0, "clip_grad_norm_", "max_norm", "be at least 0", max_norm)
    checks.require(norm_type == norm_type, "clip_grad_norm_", "norm_type", "be a number", norm_type)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    one_kernel = norm_type in (1, 2, math.inf) and _one_kernel(grads)
    if not one_kernel:
        for g in grads:
            dense = g.layout is torch.strided
            checks.require(dense, "clip_grad_norm_", "gradients", "be dense tensors", f"one of layout {g.layout}")
        # torch takes no norm of order inf of an empty tensor; no norm depends on one
        parameters = [p for p in parameters if p.grad is not None and p.grad.numel()]
        if grads and not parameters:
            return torch.zeros((), dtype=torch.float32, device=grads[0].device)
        grads = [g for g in grads if g.numel()]
    if not one_kernel and _are_of_16_bits(grads):
        total = _norm_in_float32(grads, norm_type)
        if error_if_nonfinite:
            _require_finite(total, norm_type)
        for g in grads:
            g.mul_(clip_factor(total, max_norm))
        return total
    if not one_kernel:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    total, factor, launches = _total_norm(grads, norm_type, max_norm)
    if error_if_nonfinite:
        _require_finite(total, norm_type)
    for a in launches:
        _scale_tensors_kernel[(a["chunks"].shape[0],)](
            a["chunks"], a["table"], factor, a["grad"], a["count"],
            ALIGNED=a["aligned"], CHUNK=CHUNK, BLOCK=4096, num_warps=8,
        )  # fmt: skip
    increment_version(grads)
    return total


@torch.no_grad()
def grad_norm(grads: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all `grads` taken together, float32 []: clip_grad_norm_ without the clipping.

    Plain tensors; `global_norm` takes DTensors. No gradients: 0. No host synchronisation.
    """
    if not grads:
        return torch.zeros((), dtype=torch.float32)
    if _one_kernel(grads):
        return _total_norm(grads, 2, math.inf)[0]
    return _norm_in_float32(grads, 2)


def _norm_in_float32(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """From the start: of bfloat16 gradients torch's own get_total_norm is a bfloat16, of float16 ones it overflows."""
    norms = (torch.linalg.vector_norm(g, norm_type, dtype=acc_dtype(g.dtype)) for g in grads)
    return torch.linalg.vector_norm(torch.stack([n.to(grads[0].device, torch.float32) for n in norms]), norm_type)


def _are_of_16_bits(grads: Sequence[Tensor]) -> bool:
    """Some are, and all are dense tensors of one device."""
    return _are_plain(grads) and any(g.dtype in (torch.float16, torch.bfloat16) for g in grads)


def _are_plain(grads: Sequence[Tensor]) -> bool:
    """Strided tensors of one device, and of no subclass."""
    # sets and maps: checks one by one took 3 us a gradient
    return (
        {*map(type, grads)} == {Tensor}
        and {g.layout for g in grads} == {torch.strided}
        and len({*map(Tensor.get_device, grads)}) == 1  # -1 for the CPU and for meta
        and len({grads[0].device.type, grads[-1].device.type}) == 1
    )


def _require_finite(total: Tensor, norm_type: float) -> None:
    if not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients must be finite, got {total.item()}; "
            "set error_if_nonfinite=False to scale by it anyway"
        )


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that clips gradients of this norm to `max_norm`: a number on norm's device."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def global_norm(grads: Iterable[Tensor], stages: dist.ProcessGroup | None = None) -> Tensor:
    """The 2-norm of all gradients, whatever meshes they are sharded over, float32 []; the same on every rank.

    stages   ranks of a pipeline, each with the gradients of other parameters
    """
    grads = list(grads)
    if stages is None and grads and {*map(type, grads)} == {Tensor}:
        return grad_norm(grads)
    local: dict[Any, list[Tensor]] = {}
    for grad in grads:
        local.setdefault(_sharded_over(grad), []).append(getattr(grad, "_local_tensor", grad))
    squares = []
    for groups, tensors in local.items():
        # squares add over shards, norms do not; replicated gradients are counted once
        square = grad_norm([t for t in tensors if t.numel()]).to(tensors[0].device).square()
        for group in groups:
            # one number a mesh; gradients stay where they are
            dist.all_reduce(square, group=group)
        squares.append(square)
    if not squares:
        return torch.zeros((), dtype=torch.float32)
    total = torch.stack(squares).sum() if len(squares) > 1 else squares[0]
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def _sharded_over(grad: Any) -> tuple[Any, ...]:
    """The process groups over which a gradient's parts lie."""
    if not hasattr(grad, "_local_tensor"):
        return ()
    mesh = grad.device_mesh
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(grad.placements) if not placement.is_replicate())


def _one_kernel(grads: Sequence[Tensor]) -> bool:
    # the kernels read addresses, which tensors of a trace have not
    if torch.compiler.is_compiling() or not _are_plain(grads):
        return False
    one_of_each = {g.dtype: g for g in grads}
    takes = (g.is_floating_point() and use_kernel("clip_grad_norm_", g) for g in one_of_each.values())
    return all(takes) and (all(map(Tensor.is_contiguous, grads)) or all(map(is_dense, grads)))


def _total_norm(
    grads: Sequence[Tensor], norm_type: float, max_norm: float
) -> tuple[Tensor, Tensor, list[dict[str, Any]]]:
    """The norm, the factor that clips it to max_norm, and the arguments of the launches."""
    norm = "inf" if norm_type == math.inf else str(int(norm_type))
    device = grads[0].device
    groups: dict[torch.dtype, list[Tensor]] = {}
    for g in grads:
        if g.numel():
            groups.setdefault(g.dtype, []).append(g)
    launches = [_clip_arguments(group, device) for group in groups.values()]
    partial = torch.empty(sum(a["chunks"].shape[0] for a in launches), dtype=torch.float32, device=device)
    total, factor = torch.empty(2, dtype=torch.float32, device=device)
    offset = 0
    for a in launches:
        size = a["chunks"].shape[0]
        _norm_partials_kernel[(size,)](
            a["chunks"], a["table"], partial[offset:], a["grad"], a["count"],
            NORM=norm, ALIGNED=a["aligned"], CHUNK=CHUNK, BLOCK=4096, num_warps=8,
        )  # fmt: skip
        offset += size
    _norm_total_kernel[(1,)](partial, total, factor, offset, float(max_norm), NORM=norm, BLOCK=4096, num_warps=8)
    return total, factor, launches


def _clip_arguments(grads: list[Tensor], device: torch.device) -> dict[str, Any]:
    distances, aligned = distances_of(grads)
    numels = tuple(map(Tensor.numel, grads))
    table = _clip_tables.setdefault((device, grads[0].dtype), DeviceTable())
    return dict(
        chunks=chunk_table(numels, CHUNK, device),
        table=table.get([*distances, *numels], device),
        grad=grads[0],
        count=len(grads),
        aligned=aligned,
    )
