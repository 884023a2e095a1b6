"""How our ops work on DTensors: which shards of their arguments give which shards of their results.

A rule gets an op's arguments, DTensors as their specs, and gives for one mesh axis the placements of (results,
tensor arguments) that it can do without the others; PyTorch redistributes what comes otherwise. It is told to PyTorch
when a DTensor is first met: importing torch.distributed.tensor takes its time. Plain tensors beside DTensors (tables,
seeds) are taken to be the same on every rank.

Tokens may be spread along any leading dim, features where an op goes element by element. A mean over tokens, and
dropout, whose elements are counted from the first row, want the whole tensor. Attention takes plain tensors.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Rule = Callable[..., Iterator[tuple[list[Any], list[Any]]]]
_told: set[str] = set()


def _placements() -> tuple[Any, Any, Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    return Replicate(), Partial(), Shard


def _leading(spec: Any, *, last: bool = False) -> Iterator[int]:
    """The dims that may be spread: all but the last one, or that too.

    What is kept for each row has one dim: only rows spread along the first dim keep their order in it, and it can only
    be told so of a mesh of one axis.
    """
    yield from range(min(spec.ndim - (not last), spec.ndim if spec.mesh.ndim == 1 else 1))


def _own_dim(spec: Any) -> list[int]:
    """For backward: the dim, but the first, along which a saved tensor is spread; it must stay there."""
    return [p.dim for p in spec.placements if p.is_shard() and 0 < p.dim < spec.ndim - 1]


def _norm_fwd(x: Any, residual: Any, weight: Any, bias: Any, eps: float, is_layer: bool, *_: Any) -> Any:
    R, _P, S = _placements()
    for at in [R, *map(S, _leading(x))]:
        rows = R if at is R else S(0)
        results = [at, R if residual is None else at, rows if is_layer else R, rows]
        yield results, [at, residual and at, weight and R, bias and R, *[None] * 4]


def _norm_bwd(
    dy: Any, dh: Any, h: Any, weight: Any, bias: Any, mean: Any, rstd: Any, is_layer: bool, centered: bool,
    dtype: torch.dtype, need_dx: bool, need_dw: bool, need_db: bool,
) -> Any:  # fmt: skip
    R, P, S = _placements()
    kept = [S(dim) for dim in _own_dim(h)]
    for at in kept or [R, S(0)]:
        rows, total = (R, R) if at is R else (S(0), P)
        dx = at if need_dx else R
        dresidual = at if need_dx and h.tensor_meta.dtype != dtype else R
        results = [dx, dresidual, total if need_dw and weight else R, total if need_db and bias else R]
        # what a norm without mean, or bias, saved is an empty tensor
        tensors = [at, dh and at, at, weight and R, bias and R, mean and (rows if is_layer else R), rows]
        yield results, [*tensors, *[None] * 6]


def _activation_fwd(x: Any, up: Any, bias: Any, kind: str, order: str, gated: bool, *_: Any) -> Any:
    R, _P, S = _placements()
    is_packed = gated and up is None
    for at in [R, *map(S, _leading(x, last=not is_packed and bias is None))]:
        yield [at], [at, up and at, bias and R, *[None] * 5]


def _activation_bwd(dy: Any, x: Any, up: Any, bias: Any, kind: str, order: str, gated: bool, *rest: Any) -> Any:
    R, P, S = _placements()
    *_, need_dx, need_dup, need_dbias = rest
    is_packed = gated and up is None
    for at in [R, *map(S, _leading(x, last=not is_packed and bias is None))]:
        dbias = P if at is not R and need_dbias and bias else R
        results = [at if need_dx else R, at if need_dup and up else R, dbias]
        yield results, [at, at, up and at, bias and R, *[None] * 8]


def _bias_dropout_add(x: Any, bias: Any, residual: Any, seed: Any, p: float) -> Any:
    R, _P, S = _placements()
    for at in [R, *map(S, _leading(x) if seed is None else ())]:
        yield [at], [at, bias and R, residual and at, seed and R, None]


def _bias_dropout_add_bwd(dy: Any, seed: Any, *_: Any) -> Any:
    R, _P, _S = _placements()
    yield [R, R], [R, R, *[None] * 5]


def _rope(q: Any, k: Any, *args: Any) -> Any:
    """Spread by heads; by sequences of a batch where positions are the same in all."""
    R, _P, S = _placements()
    tables, layout = args[:6], args[7]
    dims = [q.ndim - 2] + ([layout.index("b")] if layout != "thd" and tables[3] is None and tables[4] is None else [])
    for at in [R, *map(S, dims)]:
        yield [at, R if k is None else at], [at, k and at, *(t and R for t in tables), *[None] * 4]


def _rope_qkv(qkv: Any, num_heads: int, num_kv_heads: int, grouped: bool, *args: Any) -> Any:
    R, _P, S = _placements()
    for at in [R, *map(S, _batch(args))]:
        yield [at] * 3, [at, None, None, None, *(t and R for t in args[:6]), *[None] * 3]


def _rope_qkv_bwd(dq: Any, dk: Any, dv: Any, grouped: bool, *args: Any) -> Any:
    R, _P, S = _placements()
    for at in [R, *map(S, _batch(args))]:
        yield [at], [at, at, at, None, *(t and R for t in args[:6]), *[None] * 3]


def _batch(args: tuple[Any, ...]) -> list[int]:
    *tables, _offset, layout, _interleaved = args
    return [layout.index("b")] if layout != "thd" and tables[3] is None and tables[4] is None else []


def _softmax(x: Any, mask: Any, *_: Any) -> Any:
    yield from _softmaxes(1, x, mask, 3)


def _softmax_bwd(dy: Any, y: Any, mask: Any, *_: Any) -> Any:
    yield from _softmaxes(2, y, mask, 2)


def _softmaxes(same: int, x: Any, mask: Any, others: int) -> Any:
    """Spread by batch or heads: the dims before the two that the causal mask is about."""
    R, _P, S = _placements()
    for at in [R, *map(S, range(min(x.ndim - 2, 2)))]:
        is_cut = mask is not None and at is not R and mask.ndim == x.ndim and mask.shape[at.dim] > 1
        yield [at], [*[at] * same, mask and (at if is_cut else R), *[None] * others]


def _cross_entropy_fwd(logits: Any, target: Any, ignore: int, reduction: str, *rest: Any) -> Any:
    R, P, S = _placements()
    with_grad = rest[-1]
    yield [R] * 4, [R, R, *[None] * 6]
    if reduction != "mean":
        loss = S(0) if reduction == "none" else P
        yield [loss, S(0), R, S(0) if with_grad else R], [S(0), S(0), *[None] * 6]


def _cross_entropy_bwd(dloss: Any, logits: Any, target: Any, lse: Any, scale: Any, *_: Any) -> Any:
    R, _P, S = _placements()
    for at in (R, S(0)) if scale is None else (R,):
        yield [at], [at if dloss.ndim else R, at, at, at, scale and R, *[None] * 4]


RULES: dict[str, Rule] = {
    "norm_fwd": _norm_fwd,
    "norm_bwd": _norm_bwd,
    "activation_fwd": _activation_fwd,
    "activation_bwd": _activation_bwd,
    "bias_dropout_add": _bias_dropout_add,
    "bias_dropout_add_bwd": _bias_dropout_add_bwd,
    "rope": _rope,
    "rope_qkv": _rope_qkv,
    "rope_qkv_bwd": _rope_qkv_bwd,
    "scaled_softmax": _softmax,
    "scaled_softmax_bwd": _softmax_bwd,
    "cross_entropy_fwd": _cross_entropy_fwd,
    "cross_entropy_bwd": _cross_entropy_bwd,
}


def tell(name: str, packet: Any) -> None:
    """Tell PyTorch the op's rule, once, if DTensors are in use at all."""
    if name in _told or name not in RULES or "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    _told.add(name)
    op = packet.default
    register_sharding(op)(lambda *args: list(RULES[name](*args)))
    # what PyTorch remembers of a call must depend on all that is no tensor: by itself it looks at numbers only
    tensors = [str(argument.type).endswith(("Tensor", "Tensor]")) for argument in op._schema.arguments]
    info = RuntimeSchemaInfo(tensors.index(False) if False in tensors else len(tensors), needs_pytree=True)
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = info


def as_dtensors(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with plain tensors replicated over the mesh of those that are DTensors, if there are any."""
    if "torch.distributed.tensor" not in sys.modules:
        return args
    from torch.distributed.tensor import DTensor, Replicate

    mesh = next((arg.device_mesh for arg in args if isinstance(arg, DTensor)), None)
    if mesh is None:
        return args
    same = [Replicate()] * mesh.ndim
    return tuple(
        DTensor.from_local(arg, mesh, same, run_check=False)
        if isinstance(arg, Tensor) and not isinstance(arg, DTensor)
        else arg
        for arg in args
    )
