"""Rotary position embedding of q and k, or of a packed qkv, in one launch.

    (a, b) is a pair of channels: (c, c + R/2) of the first R channels, or (2c, 2c + 1) if interleaved
    a' = a * cos - b * sin         cos, sin = table[position, c]
    b' = b * cos + a * sin         channels from R on are copied by the same kernel

Backward is the rotation by the negative angle, so nothing is saved but the table and the positions given. Everything is
computed in float32 and rounded once. T tokens of H heads of D channels of e bytes: each direction moves 2*T*H*D*e
bytes, plus rows of the table from cache, and does 3 operations an element. In place the lines that are written are in
the cache already, and channels from R on are not touched.

Source: Su et al., arXiv:2104.09864.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.rope_kernels import (
    POSITIONS,
    Positions,
    as_4d,
    launch_rope,
    unit_of,
)
from powertrain.ops.rope_table import RopeTable
from powertrain.ops.shapes import acc_dtype, broadcasts, empty
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, apart_from_autocast, falls_back, is_traced, use_kernel
from powertrain.runtime.plain_calls import plain
from powertrain.runtime.sharding import placements

Layout = Literal["bshd", "sbhd", "thd"]
Packing = Literal["concat", "grouped"]


def rope_ref(
    q: Tensor,
    k: Tensor | None = None,
    *,
    table: RopeTable,
    layout: Layout = "bshd",
    interleaved: bool = False,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The specification of `rope`, in plain PyTorch: a product of complex numbers."""
    at = _place("rope", q, table, layout, interleaved, offset, position_ids, cu_seqlens)
    cos, sin = _cos_sin(as_4d(q, layout), at)
    pairs = cos.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        acc = acc_dtype(x.dtype)
        turning, rest = as_4d(x, layout)[..., : 2 * pairs].to(acc), x[..., 2 * pairs :]
        a, b = turning.unflatten(-1, (pairs, 2) if interleaved else (2, pairs)).unbind(-1 if interleaved else -2)
        turned = torch.complex(a, b) * torch.complex(cos.to(acc), sin.to(acc))
        turned = torch.stack((turned.real, turned.imag), -1 if interleaved else -2).flatten(-2)
        return torch.cat((turned.view(*rest.shape[:-1], -1).to(x.dtype), rest), -1)

    return rotate(q) if k is None else (rotate(q), rotate(k))


def rope_bwd_ref(dq: Tensor, dk: Tensor | None = None, *, table: RopeTable, **options: Any) -> Any:
    """The specification of the backward of `rope` with the same options: a rotation by the negated angles."""
    return rope_ref(dq, dk, table=table._replace(sin=-table.sin), **options)


def _rope_outputs(q: Tensor, k: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return q_out, empty(q) if k is None else torch.empty_like(k, memory_format=torch.contiguous_format)


def _rope_fwd(q: Tensor, k: Tensor | None, *positions: Any) -> tuple[Tensor, Tensor]:
    q_out, k_out = outputs = _rope_outputs(q, k)
    at, inverse = Positions(*positions[:-1]), positions[-1]
    q_pair = as_4d(unit_of(q), at.layout).unsqueeze(2), as_4d(q_out, at.layout).unsqueeze(2)
    k_pair = (None, None) if k is None else (as_4d(unit_of(k), at.layout), as_4d(k_out, at.layout))
    launch_rope((q_pair[0], k_pair[0], None), (q_pair[1], k_pair[1], None), at, inverse)
    return outputs


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    at = Positions(*inputs[-10:-1])
    ctx.save_for_backward(*at[:6])
    ctx.options, ctx.inverse = at[6:], inputs[-1]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    need_q, need_k = (need and d is not None for need, d in zip(ctx.needs_input_grad, (dq, dk), strict=False))
    positions = (*ctx.saved_tensors, *ctx.options, not ctx.inverse)
    if need_q:
        dq, dk = _rope_op(dq, dk if need_k else None, *positions)
    elif need_k:
        dk, _ = _rope_op(dk, None, *positions)
    return (dq if need_q else None, dk if need_k else None, *([None] * 10))


def _sharding(q: Any, k: Any, layout: str, **positions: Any) -> Any:
    """Shards by heads, or by the sequences of a batch if all have the same positions."""
    R, _P, S = placements()
    for at in [R, *map(S, [q.ndim - 2, *_batch_dims(layout, **positions)])]:
        yield [at, R if k is None else at], {"q": at, "k": at}


def _batch_dims(layout: str, position_ids: Any, offsets: Any, **_: Any) -> list[int]:
    return [layout.index("b")] if layout != "thd" and position_ids is None and offsets is None else []


_rope_op = Op(
    f"rope(Tensor q, Tensor? k, {POSITIONS}, bool inverse) -> (Tensor, Tensor)",
    _rope_fwd,
    _rope_outputs,
    backward=_backward,
    setup_context=_setup_context,
    sharding=_sharding,
)


def _rope_inplace_fwd(q: Tensor, k: Tensor | None, *positions: Any) -> None:
    at, inverse = Positions(*positions[:-1]), positions[-1]
    both = as_4d(q, at.layout).unsqueeze(2), None if k is None else as_4d(k, at.layout), None
    launch_rope(both, both, at, inverse, in_place=True)


_rope_inplace_op = Op(
    f"rope_(Tensor(a!) q, Tensor(b!)? k, {POSITIONS}, bool inverse) -> ()", _rope_inplace_fwd, lambda *_: None
)


class _RopeInPlace(torch.autograd.Function):
    """Rotates q and k in their memory; the results share it, and gradients flow to the unrotated q and k.

    Not `mark_dirty`: for a view, which q and k are as a rule, autograd would copy the base's gradient three times.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor | None, *positions: Any) -> tuple[Tensor, Tensor | None]:
        _rope_inplace_op(q, k, *positions)
        _setup_context(ctx, (q, k, *positions), None)
        return q.detach(), None if k is None else k.detach()

    backward = staticmethod(_backward)


def unpack(qkv: Tensor, num_heads: int, num_kv_heads: int, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Views of packed qkv [..., H + 2 * K, D]: q [..., groups, heads of a group, D], k and v [..., K, D]."""
    if grouped:
        q, k, v = qkv.unflatten(-2, (num_kv_heads, -1)).split((num_heads // num_kv_heads, 1, 1), -2)
        return q, k.squeeze(-2), v.squeeze(-2)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), -2)
    return q.unsqueeze(-3), k, v


def _rope_qkv_outputs(
    qkv: Tensor, num_heads: int, num_kv_heads: int, grouped: bool, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    lead, head_dim = qkv.shape[:-2], qkv.shape[-1]
    q, k, v = (qkv.new_empty((*lead, heads, head_dim)) for heads in (num_heads, num_kv_heads, num_kv_heads))
    return q, k, v


def _rope_qkv_fwd(
    qkv: Tensor, num_heads: int, num_kv_heads: int, grouped: bool, *positions: Any
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = _rope_qkv_outputs(qkv, num_heads, num_kv_heads, grouped)
    at = Positions(*positions)
    q, k, v = unpack(as_4d(unit_of(qkv), at.layout), num_heads, num_kv_heads, grouped)
    q_out, k_out, v_out = (as_4d(t, at.layout) for t in outputs)
    launch_rope((q, k, v), (q_out.unflatten(2, q.shape[2:4]), k_out, v_out), at, False)
    return outputs


def _rope_qkv_bwd_outputs(dq: Tensor, dk: Tensor, dv: Tensor, grouped: bool, *_: Any) -> Tensor:
    return dq.new_empty((*dq.shape[:-2], dq.shape[-2] + 2 * dk.shape[-2], dq.shape[-1]))


def _rope_qkv_bwd(dq: Tensor, dk: Tensor, dv: Tensor, grouped: bool, *positions: Any) -> Tensor:
    dqkv = _rope_qkv_bwd_outputs(dq, dk, dv, grouped)
    at = Positions(*positions)
    q_out, k_out, v_out = unpack(as_4d(dqkv, at.layout), dq.shape[-2], dk.shape[-2], grouped)
    dq, dk, dv = (as_4d(unit_of(t), at.layout) for t in (dq, dk, dv))
    # the kernel has one set of strides for both
    if dk.stride() != dv.stride():
        dk, dv = dk.contiguous(), dv.contiguous()
    launch_rope((dq.unflatten(2, q_out.shape[2:4]), dk, dv), (q_out, k_out, v_out), at, True)
    return dqkv


def _setup_qkv_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    at = Positions(*inputs[4:])
    ctx.save_for_backward(*at[:6])
    ctx.options, ctx.grouped, ctx.like = at[6:], inputs[3], [(t.shape, t.dtype, t.device) for t in output]
    ctx.set_materialize_grads(False)


def _qkv_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    dqkv = None
    if any(d is not None for d in grads):
        grads = tuple(
            torch.zeros(shape, dtype=dtype, device=device) if d is None else d
            for d, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
        )
        dqkv = _rope_qkv_bwd_op(*grads, ctx.grouped, *ctx.saved_tensors, *ctx.options)
    return (dqkv, *([None] * 12))


def _qkv_sharding(**arguments: Any) -> Any:
    R, _P, S = placements()
    for at in [R, *map(S, _batch_dims(**arguments))]:
        yield [at] * 3, {"qkv": at}


def _qkv_bwd_sharding(**arguments: Any) -> Any:
    R, _P, S = placements()
    for at in [R, *map(S, _batch_dims(**arguments))]:
        yield [at], {"dq": at, "dk": at, "dv": at}


_rope_qkv_op = Op(
    f"rope_qkv(Tensor qkv, SymInt num_heads, SymInt num_kv_heads, bool grouped, {POSITIONS}) "
    "-> (Tensor, Tensor, Tensor)",
    _rope_qkv_fwd,
    _rope_qkv_outputs,
    backward=_qkv_backward,
    setup_context=_setup_qkv_context,
    sharding=_qkv_sharding,
)
_rope_qkv_bwd_op = Op(
    f"rope_qkv_bwd(Tensor dq, Tensor dk, Tensor dv, bool grouped, {POSITIONS}) -> Tensor",
    _rope_qkv_bwd,
    _rope_qkv_bwd_outputs,
    sharding=_qkv_bwd_sharding,
)


@falls_back("rope")
def rope(
    q: Tensor,
    k: Tensor | None = None,
    *,
    table: RopeTable,
    layout: Layout = "bshd",
    interleaved: bool = False,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    inplace: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q and k turned by their positions, in one launch.

    Shapes: B batch, S sequence, T tokens of all sequences, H and K heads, D head dim, R rotary dim (even, at most D).
        q             [B, S, H, D] "bshd", [S, B, H, D] "sbhd" or [T, H, D] "thd"; float32, float16 or bfloat16 (float64
                      on the CPU); any strides, such as slices of a packed qkv
        k             the same with K heads, or None; its dtype may differ
        table         from `rope_table`; channels from R on pass unchanged
        interleaved   pairs are channels (2c, 2c + 1), as in GPT-J, instead of (c, c + R/2), as in Llama and GPT-NeoX
        offset        added to every position: an int, or [B] int32 or int64 (a KV cache's lengths), on q's device
        position_ids  [B, S], [S] or, for thd, [T]: the positions themselves, for all layouts batch first; [A, B, S] or
                      [A, T] for the A axes of M-RoPE
        cu_seqlens    [num_seqs + 1] int32 or int64, for thd: where sequences begin; positions restart there. Tokens
                      ahead of the first and after the last one get position 0
        inplace       write the rotation into q and k
    Returns q's rotation, contiguous, or (q's, k's); dtypes as given. With inplace it returns q (and k) themselves, or,
        where autograd records the call, new tensors that share their memory. Use only these results afterwards:
        autograd still takes q and k for the unrotated tensors. The backward of an earlier op that saved q or k raises,
        as after any in-place op. So does a use of v after `q, k, v = qkv.split(...)` (or chunk, unbind); views made by
        indexing are not affected.
    Numerics: float32, rounded once. A position the table does not have, or an axis that position_ids do not have, gives
        NaN on a GPU (no host synchronisation to find it) and IndexError on the CPU; an int offset that the table does
        not have is a ValueError on both. Deterministic.
    Memory: saves the table and the positions given, neither q nor k. With inplace none is allocated (without a kernel,
        under torch.compile, of DTensors, and with a stride along D other than 1: rotated, then copied).
    Raises ValueError naming the argument, the expected value and the given one; with inplace also for a leaf that
        requires a gradient or a view of one, and for elements that share memory (expanded tensors; q and k of the same
        strides that overlap). Double backward and vmap are not implemented and say so.
    Source: Su et al., arXiv:2104.09864.
    """
    checks.floating("rope", q=q, k=k)
    checks.same_device("rope", "q", q, k=k)
    at = _place("rope", q, table, layout, interleaved, offset, position_ids, cu_seqlens)
    checks.floating("rope", **{"table.cos": table.cos, "table.sin": table.sin})
    if k is not None:
        expected = (*q.shape[:-2], k.shape[-2] if k.dim() > 1 else 0, q.shape[-1])
        checks.shape("rope", "k", k, expected, "that of q, but for the heads")
    if inplace:
        return _rope_inplace(q, k, at)
    if not use_kernel("rope", q):
        options = at[6:]

        def turn(
            q: Tensor, k: Tensor | None, ids: Tensor | None, cos: Tensor, sin: Tensor, axes: Tensor | None,
            offsets: Tensor | None, starts: Tensor | None,
        ) -> Any:  # fmt: skip
            ids = None if ids is None else _per_token("rope", ids, q, layout, axes)
            turned = _rope_torch((q, k), Positions(cos, sin, axes, ids, offsets, starts, *options))
            return turned[0] if k is None else turned

        tensors = q, k, position_ids, at.cos, at.sin, at.axes, at.offsets, at.cu_seqlens
        return plain(apart_from_autocast(turn, q.device), *tensors)
    q_out, k_out = _rope_op(q, k, *at, False)
    return q_out if k is None else (q_out, k_out)


def _rope_inplace(q: Tensor, k: Tensor | None, at: Positions) -> Tensor | tuple[Tensor, Tensor]:
    tensors = [x for x in (q, k) if x is not None]
    results: Any = (q, k)
    for name, x in zip("qk", tensors, strict=False):
        _check_writable(name, x)
    checks.require(k is None or _apart(q, k), "rope", "k", "lie in other memory than q for inplace", "the same")
    records = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if use_kernel("rope", q) and all(_is_direct(x) for x in tensors):
        if records:
            results = _RopeInPlace.apply(q, k, *at, False)
        else:
            _rope_inplace_op(q, k, *at, False)
        for x in tensors:
            # a kernel's writes are not seen by autograd, which would use what an op before has saved
            if not x.is_inference():
                torch.autograd.graph.increment_version(x)
    else:
        turn = apart_from_autocast(lambda q, k: _rope_torch((q, k), at), q.device)
        turned = _rope_op(q, k, *at, False) if use_kernel("rope", q) else turn(q, k)
        with torch.no_grad():
            for x, y in zip(tensors, turned, strict=False):
                x.detach().copy_(y)
        results = turned if records else results
    return results[0] if k is None else (results[0], results[1])


def _is_direct(x: Tensor) -> bool:
    return not is_traced(x) and not x.is_neg() and (x.stride(-1) == 1 or x.shape[-1] == 1)


def _apart(q: Tensor, k: Tensor) -> bool:
    """Whether no element is in both, as far as the heads of one token show where both are slices of one tensor."""
    if q is k or is_traced(q) or q.is_meta or not (q.numel() and k.numel()):
        return q is not k
    if q.dtype != k.dtype or q.stride() != k.stride() or q.stride(-1) != 1 or not q.stride(-2):
        return q.data_ptr() != k.data_ptr()
    # k's head 0 begins `elements` behind q's head number `head`
    head, elements = divmod((k.data_ptr() - q.data_ptr()) // q.element_size(), q.stride(-2))
    shared = [head] * (elements < q.shape[-1]) + [head + 1] * (q.stride(-2) - elements < q.shape[-1])
    return not any(-k.shape[-2] < n < q.shape[-2] for n in shared)


def _check_writable(name: str, x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        root = x if is_traced(x) or x._base is None else x._base
        if root.is_leaf:
            checks.fail("rope", name, "be no leaf that requires a gradient, nor a view of one, for inplace", "one")
    # symbols have no order that Dynamo could sort by; there the rotation is copied, and PyTorch refuses such a target.
    # Strides of an empty tensor, which may be 0, reach no element
    if is_traced(x) or not x.numel():
        return
    # sizes and strides, smallest stride first: each must step over all that the smaller ones reach
    reach = 0
    for stride, size in sorted((abs(stride), size) for stride, size in zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            checks.require(
                stride > reach,
                "rope",
                name,
                "have no elements that share memory for inplace",
                f"strides {list(x.stride())}",
            )
            reach += (size - 1) * stride


@falls_back("rope_qkv")
def rope_qkv(
    qkv: Tensor,
    *,
    table: RopeTable,
    num_heads: int,
    num_kv_heads: int | None = None,
    packing: Packing = "concat",
    layout: Layout = "bshd",
    interleaved: bool = False,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a packed projection, q and k turned by their positions, in one launch.

    Shapes: as for `rope`, with H = num_heads and K = num_kv_heads (None: H).
        qkv       [B, S, H + 2 * K, D] (or sbhd, thd); heads may also be flattened with D into the last dim
        packing   "concat": all heads of q, then of k, then of v; "grouped" (GPT-NeoX, Megatron): for each kv head its
                  H / K heads of q, then k, then v
    Returns q [..., H, D], k and v [..., K, D], contiguous. Backward writes the gradient of qkv in one launch: no
        concatenation, no zeros.
    Numerics, memory, errors and source: those of `rope`.
    """
    num_kv_heads, given = num_heads if num_kv_heads is None else num_kv_heads, qkv
    checks.floating("rope_qkv", qkv=qkv)
    checks.one_of("rope_qkv", "packing", packing, ("concat", "grouped"))
    # texts with numbers of heads only where they are wrong: torch.compile has no text of a symbolic one
    if not (num_kv_heads > 0 and num_heads % num_kv_heads == 0):
        checks.fail("rope_qkv", "num_heads", f"be a multiple of num_kv_heads {num_kv_heads}", num_heads)
    all_heads = num_heads + 2 * num_kv_heads
    if qkv.dim() == (2 if layout == "thd" else 3) and qkv.shape[-1] % all_heads == 0:
        qkv = qkv.unflatten(-1, (all_heads, -1))
    at = _place("rope_qkv", qkv, table, layout, interleaved, offset, position_ids, cu_seqlens)
    checks.floating("rope_qkv", **{"table.cos": table.cos, "table.sin": table.sin})
    if qkv.shape[-2] != all_heads:
        must = f"have {all_heads} heads (num_heads + 2 * num_kv_heads)"
        checks.fail("rope_qkv", "qkv", must, f"shape {list(qkv.shape)}")
    grouped = packing == "grouped"
    if use_kernel("rope_qkv", qkv):
        return _rope_qkv_op(qkv, num_heads, num_kv_heads, grouped, *at)
    options, dims = at[6:], qkv.dim()

    def turn(
        qkv: Tensor, ids: Tensor | None, cos: Tensor, sin: Tensor, axes: Tensor | None, offsets: Tensor | None,
        starts: Tensor | None,
    ) -> Any:  # fmt: skip
        qkv = qkv if qkv.dim() == dims else qkv.unflatten(-1, (all_heads, -1))
        ids = None if ids is None else _per_token("rope_qkv", ids, qkv, layout, axes)
        q, k, v = unpack(qkv, num_heads, num_kv_heads, grouped)
        q, k = _rope_torch((q.flatten(-3, -2), k), Positions(cos, sin, axes, ids, offsets, starts, *options))
        return q, k, v.clone(memory_format=torch.contiguous_format)

    tensors = given, position_ids, at.cos, at.sin, at.axes, at.offsets, at.cu_seqlens
    return plain(apart_from_autocast(turn, qkv.device), *tensors)


def _place(
    op: str,
    x: Tensor,
    table: RopeTable,
    layout: Layout,
    interleaved: bool,
    offset: int | Tensor,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Positions:
    """Check the arguments for token positions, and convert them to the form that the ops take."""
    if not isinstance(table, RopeTable):
        checks.fail(op, "table", "be one that rope_table made", checks.described(table))
    cos, sin, axes = table
    for part, values in (("table.cos", cos), ("table.sin", sin)):
        checks.tensor(op, part, values)
    checks.require(cos.dim() == 2, op, "table.cos", "have shape [positions, rotary_dim / 2]", list(cos.shape))
    checks.one_of(op, "layout", layout, ("bshd", "sbhd", "thd"))
    dims = 3 if layout == "thd" else 4
    checks.require(x.dim() == dims, op, "q" if op == "rope" else "qkv", f"have {dims} dims for {layout}", x.dim())
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > x.shape[-1]:
        checks.fail(op, "table", f"rotate at most the head dim {x.shape[-1]}", rotary_dim)
    checks.shape(op, "table.sin", sin, cos.shape, "shape of table.cos")
    offsets = offset if isinstance(offset, Tensor) else None
    checks.same_device(
        op, "q", x, **{"table.cos": cos, "table.sin": sin, "table.axes": axes}, position_ids=position_ids,
        offset=offsets, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    _check_positions(op, x, table, layout, offset, position_ids, cu_seqlens)
    if position_ids is not None:
        position_ids = _per_token(op, position_ids, x, layout, axes)
    number = 0 if isinstance(offset, Tensor) else offset
    return Positions(
        cos.contiguous(), sin.contiguous(), axes, position_ids, None if offsets is None else offsets.contiguous(),
        None if cu_seqlens is None else cu_seqlens.contiguous(), number, layout, interleaved,
    )  # fmt: skip


def _check_positions(
    op: str,
    x: Tensor,
    table: RopeTable,
    layout: Layout,
    offset: int | Tensor,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    integers = {"position_ids": position_ids, "cu_seqlens": cu_seqlens}
    if isinstance(offset, Tensor):
        integers["offset"] = offset
    for name, tensor in integers.items():
        if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
            checks.fail(op, name, "be int32 or int64", checks.name(tensor.dtype))
    if cu_seqlens is not None:
        checks.require(layout == "thd", op, "cu_seqlens", "come with layout thd", repr(layout))
        fits = cu_seqlens.dim() == 1 and cu_seqlens.shape[0] > 0
        checks.require(fits, op, "cu_seqlens", "have shape [num_seqs + 1]", list(cu_seqlens.shape))
    if position_ids is not None:
        given = cu_seqlens is not None or isinstance(offset, Tensor) or offset != 0
        checks.require(not given, op, "position_ids", "come without offset and cu_seqlens", "both")
    elif isinstance(offset, Tensor):
        if layout == "thd":
            checks.require(cu_seqlens is not None, op, "offset", "be an int for thd without cu_seqlens", "a tensor")
        dim = 0 if layout == "bshd" else 1
        batch = x.shape[dim] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        checks.shape(op, "offset", offset, (batch,), "one per sequence")
    elif cu_seqlens is None:
        seqlen, held = x.shape[0 if layout in ("sbhd", "thd") else 1], table.cos.shape[0]
        if not 0 <= offset <= held - seqlen:
            checks.fail(op, "table", f"have positions {offset} to {offset + seqlen - 1}", f"0 to {held - 1}")


def _per_token(op: str, position_ids: Tensor, x: Tensor, layout: Layout, axes: Tensor | None) -> Tensor:
    """position_ids as [axes or 1, outer, inner] of x: a view."""
    batch, seqlen = {"bshd": (0, 1), "sbhd": (1, 0), "thd": (None, 0)}[layout]
    tokens = (1 if batch is None else x.shape[batch], x.shape[seqlen])
    ids = position_ids if axes is not None else position_ids[None]
    # the same for every sequence
    ids = ids.unsqueeze(1) if ids.dim() == 2 else ids
    if ids.dim() != 3 or not broadcasts(ids.shape[1:], tokens):
        must = [*(["A"] if axes is not None else []), *tokens[batch is None :]]
        checks.fail(op, "position_ids", f"have shape [{', '.join(map(str, must))}]", list(position_ids.shape))
    ids = ids.expand(-1, *tokens)
    return ids.mT if layout == "sbhd" else ids


def _rope_torch(tensors: tuple[Tensor, Tensor | None], at: Positions) -> tuple[Tensor, ...]:
    cos, sin = _cos_sin(as_4d(tensors[0], at.layout), at)
    return tuple(_rotate_torch(x, cos, sin, at.interleaved) for x in tensors if x is not None)


def _rotate_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    dtype, acc, pairs = x.dtype, acc_dtype(x.dtype), cos.shape[-1]
    if cos.dim() > x.dim():
        cos, sin = cos[0], sin[0]
    if cos.dtype is not acc:
        cos, sin = cos.to(acc), sin.to(acc)
    rest: tuple[Tensor, ...] = ()
    if 2 * pairs < x.shape[-1]:
        # split, since the backward of a slice fills a tensor of x's size with zeros
        x, *rest = x.split((2 * pairs, x.shape[-1] - 2 * pairs), -1)
    # once, so that gradients are summed ahead of rounding
    turning = x if dtype is acc else x.to(acc)
    a, b = turning.unflatten(-1, (pairs, 2)).unbind(-1) if interleaved else turning.chunk(2, -1)
    a, b = a * cos - b * sin, b * cos + a * sin
    if dtype is not acc:
        a, b = a.to(dtype), b.to(dtype)
    parts = [torch.stack((a, b), -1).flatten(-2)] if interleaved else [a, b]
    return torch.cat((*parts, *rest), -1)


def _cos_sin(x: Tensor, at: Positions) -> tuple[Tensor, Tensor]:
    """cos and sin of every token of x [outer, inner, H, D]: [outer, inner, 1, pairs], or what broadcasts to it."""
    if at.position_ids is None and at.offsets is None and at.cu_seqlens is None:
        # rows of the table one behind the other; that it has them was checked
        rows = slice(at.offset, at.offset + x.shape[0 if at.layout == "sbhd" else 1])
        place = (rows, None, None) if at.layout == "sbhd" else (rows, None)
        return at.cos[place], at.sin[place]
    if at.position_ids is None:
        position = _positions(x, at).unsqueeze(-1)
    elif at.axes is None:
        position = at.position_ids[0].unsqueeze(-1)
    else:
        position = at.position_ids.movedim(0, -1)[..., at.axes.long()]
        _check_in_table(position, at.cos.shape[0])
        pair = torch.arange(at.cos.shape[1], device=x.device)
        return at.cos[position, pair].unsqueeze(-2), at.sin[position, pair].unsqueeze(-2)
    try:
        return F.embedding(position, at.cos), F.embedding(position, at.sin)
    except IndexError:
        # PyTorch names neither the argument nor the position; asking ahead takes as long as the look-up
        _check_in_table(position, at.cos.shape[0])
        raise


def _check_in_table(position: Tensor, count: int) -> None:
    """Raise IndexError for one on the CPU that a table of `count` positions does not have; of a GPU's the host would
    have to wait."""
    if position.device.type != "cpu" or type(position) is not Tensor or torch.compiler.is_compiling():
        return
    if position.numel():
        low, high = (int(x) for x in position.aminmax())
        if low < 0 or high >= count:
            raise IndexError(f"rope: positions must be in [0, {count}), the table's, got {low if low < 0 else high}")


def _positions(x: Tensor, at: Positions) -> Tensor:
    """The position [outer, inner] of every token of x, where no position_ids are given."""
    index = torch.arange(x.shape[0 if at.layout == "sbhd" else 1], device=x.device)
    if at.cu_seqlens is not None:
        sequence = torch.searchsorted(at.cu_seqlens.to(index.dtype), index, right=True) - 1
        shift = at.offset if at.offsets is None else F.pad(at.offsets, (0, 1))[sequence]
        position = index - at.cu_seqlens[sequence] + shift
        return torch.where((sequence >= 0) & (sequence < at.cu_seqlens.shape[0] - 1), position, 0)[None]
    if at.layout == "sbhd":
        return (index[:, None] + (at.offset if at.offsets is None else at.offsets)).expand(x.shape[:2])
    return (index + (at.offset if at.offsets is None else at.offsets[:, None])).expand(x.shape[:2])
