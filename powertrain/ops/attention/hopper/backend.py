"""The Hopper backend: forward in Gluon (hopper/forward.py), for 16 bits on sm_90.

What it does not take, `why_not` says. Numerics, results for rows that see nothing, and what is saved for backward are
those of the universal kernels (triton/backend.py). Backward is the one that select.py decides: its own
(hopper/backward.py), cuDNN's (backends/cudnn_backward.py) or that of the universal kernels.

Memory beyond results: 640 to 896 bytes an SM of descriptors, and 4 a stream; where keys are cut into parts, which makes
at most four tiles an SM, or heads do not fill their tiles, B * S * H * (E + 1) * 4 bytes for each part.
"""

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention.backends import cudnn_backward
from powertrain.ops.attention.decode import combine
from powertrain.ops.attention.hopper.backward import hopper_attention_bwd, why_not_backward, why_not_of, width_of
from powertrain.ops.attention.hopper.forward import _hopper_attention_fwd_kernel
from powertrain.ops.attention.problem import AttentionCall, AttentionProblem, Layout, Reason
from powertrain.ops.attention.triton.backend import (
    _ARGS_SCHEMA,
    _alibi_kind,
    _Args,
    _attention_bwd,
    _attention_bwd_op,
    _attention_fwd,
    _bwd_outputs,
    _fwd_outputs,
    _heads,
    _Operand,
    _operand,
    _setup_context,
    _Shape,
    _shape,
    _slots,
    arguments,
    backward_by,
    bwd_flops,
    fwd_flops,
)
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime import checks, gluon_compat, recording, self_test, tracing
from powertrain.runtime.dispatch import Op
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target

_MAX_HEAD_DIM = 256


class Plan(NamedTuple):
    """The tiles of a pair of head dims, and of so many queries beside so many keys."""

    p_qk: tuple[int, ...]  # pieces of the head dim of queries and keys
    p_v: int
    block_n: int = 128
    stages: int = 2
    consumers: int = 2  # warpgroups, 64 rows each
    store_parts: int = 1  # parts in which results leave
    q_slots: int = 2  # tiles whose queries are in shared memory at a time
    q_held: bool = True  # queries are read from registers
    heads_per_tile: int = 1  # heads that share keys in one tile, a power of 2
    partial: bool = False  # the last tile of a group has fewer: results leave as those of splits
    num_splits: int = 1  # parts of the keys, a tile each

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def leaves_parts(self) -> bool:
        return self.num_splits > 1 or self.partial

    @property
    def queries(self) -> int:
        """Of a tile."""
        return self.block_m // self.heads_per_tile


def plan_for(d_qk: int, d_v: int, queries: int) -> Plan:
    """For head dims, padded with zeros, which TMA fills in, and so many queries a sequence.

    TFLOP/s, bf16, one H200, causal, H32 D64: 2 consumers 475, 3 consumers 532 (S8192); 405, 384 (S2048)."""
    p_qk: tuple[int, ...] = (64,) if d_qk <= 64 else (128,) if d_qk <= 128 else (128, 64) if d_qk <= 192 else (256,)
    p_v = 64 if d_v <= 64 else 128 if d_v <= 128 else 256
    if d_qk <= 64 and d_v <= 64:
        if queries > 4096:
            return Plan(p_qk, p_v, consumers=3, q_slots=1, q_held=False)
        return Plan(p_qk, p_v, stages=4)
    if d_qk <= 128 and d_v <= 128:
        return Plan(p_qk, p_v)
    if d_qk <= 192 and d_v <= 128:
        return Plan(p_qk, p_v, store_parts=2, q_slots=1, q_held=False)
    return Plan(p_qk, p_v, block_n=64, store_parts=p_v // 64, q_slots=1, q_held=False)


@functools.lru_cache(maxsize=1024)
def heads_per_tile_for(repeats: int, queries: int, block_m: int) -> int:
    """How many of `repeats` heads that share keys stand in one tile: as many as may, where that makes fewer tiles.
    The last tile of a group may have fewer.

    ms, bf16, one H200, B8 D128, 32768 keys, alone and packed: H32/8, 16 queries .67 .35, 64 .70 .40, 96 .73 .73; H64/8,
    16 queries 1.30 .36, 64 1.39 .78."""

    def tiles(pack: int) -> int:
        return cdiv(repeats, pack) * cdiv(queries * pack, block_m)

    packs = [pack for pack in (16, 8, 4, 2, 1) if pack < 2 * repeats]
    pack = min(packs, key=lambda pack: (tiles(pack), repeats % pack > 0))
    return pack if 8 * tiles(pack) <= 7 * tiles(1) else 1


@functools.lru_cache(maxsize=1024)
def num_splits_for(tiles: int, blocks: int, result_bytes: int, sms: int) -> int:
    """Into how many parts the keys of so many tiles, `blocks` each, are cut to fill the SMs; `result_bytes`: of all
    results in float32.

    Reckoned in the time of a block, 1.3 us: a tile costs two beside its own, a second kernel four, and what is written
    and read again its bytes. Cut where that saves a tenth. ms, bf16, one H200, B1 H32/8 D128, 32768 keys, packed,
    whole, in as many parts as this says, twice and half of that: 16 queries .337, 16 .051, .056 .061; 64 .345, 8 .067,
    .072 .104; 128 .338, 4 .115, .121 .191; B8, 16 queries .348, 2 .258, .262."""

    def cost(cuts: int) -> float:
        beside = 4 + 2 * cuts * result_bytes / 5e6 if cuts > 1 else 0
        return cdiv(tiles * cuts, sms) * (cdiv(blocks, cuts) + 2) + beside

    most = min(blocks // 2, 4 * sms // max(1, tiles))
    cuts = min(range(1, max(1, most) + 1), key=cost)
    return cuts if 10 * cost(cuts) <= 9 * cost(1) else 1


def group_for(keys_bytes: int, repeats: int, causal: bool) -> int:
    """Heads whose tiles are taken in turn. TFLOP/s, bf16, one H200, H16 D128: causal S2048 (1 MiB of keys and values a
    head) 2 604, 4 613, 8 621, 16 620; S8192 732, 733, 728, 716; full S8192 1 725, 2 723, 8 710."""
    if not causal:
        return repeats
    return min(8, max(4, next_power_of_2(16 * 2**20 * repeats // max(1, keys_bytes) + 1) // 2))


def why_not(problem: AttentionProblem) -> Iterator[Reason]:
    """Every need of this kernel that the problem does not meet."""
    mask = problem.mask
    if problem.arch != 90:
        yield Reason(f"it is made for sm_90, this is {problem.where}", "use triton")
    if settings().interpret:
        yield Reason("Gluon has no interpreter", "unset POWERTRAIN_INTERPRET")
    elif missing := gluon_compat.trouble():
        yield Reason(missing, "use Triton 3.6 or later, or triton")
    if problem.dtype not in (torch.bfloat16, torch.float16):
        yield Reason(f"it takes bfloat16 and float16, not {checks.name(problem.dtype)}", "use triton")
    for name, dim in (("head_dim_qk", problem.head_dim_qk), ("head_dim_v", problem.head_dim_v)):
        if dim > _MAX_HEAD_DIM:
            yield Reason(f"it takes {name} up to {_MAX_HEAD_DIM}, got {dim}", "use triton")
    if problem.head_dim_v % 8:
        yield Reason(f"it takes head_dim_v in multiples of 8, got {problem.head_dim_v}", "use triton, or pad value")
    if not problem.aligned:
        yield Reason("TMA wants addresses and strides of whole 16 bytes", "use triton, or .contiguous()")
    if problem.layout == "bmghk":
        yield Reason("it takes no layout bmghk", "use triton, or bshd")
    if problem.lengths.empty:
        yield Reason("it takes no empty tensors", "use triton")
    for name, wanted in (
        ("bias", mask.bias != "none"),
        ("documents", mask.documents),
        ("prefix", mask.prefix),
        ("chunk", mask.chunk > 0),
        ("dropout", problem.dropout),
    ):
        if wanted:
            yield Reason(f"it has no {name}", "use triton")


# what was found on each device, of each plan, and of each padded head dim in any order and in turn
_self_tests: dict[Plan, dict[int | None, str | None]] = {}
_backward_self_tests: dict[tuple[int, bool], dict[int | None, str | None]] = {}


def fails_here(device: torch.device, plan: Plan) -> str | None:
    """Why the kernel must not be used on this sm_90 device with this plan, or None: it is tried once on a small
    problem."""
    plan = plan._replace(num_splits=min(plan.num_splits, 2))  # how many there are is the same to it
    found, what = _self_tests.setdefault(plan, {}), f"attention at head dims {sum(plan.p_qk)} and {plan.p_v}"
    return self_test.failure(found, device, lambda on: _forward_self_test(on, plan), f"{what}: triton serves")


def backward_fails_here(device: torch.device, width: int, deterministic: bool) -> str | None:
    """The same of the backward, whose tiles depend on what head dims are padded to."""
    found = _backward_self_tests.setdefault((width, deterministic), {})
    what = f"attention's backward{', deterministic,' if deterministic else ''} at head dim {width}"
    return self_test.failure(
        found, device, lambda on: _backward_self_test(on, width, deterministic), f"{what}: triton serves"
    )


class _Small(NamedTuple):
    """A causal problem of 192 keys and at most as many pairs of query and head, and its results in float32."""

    inputs: list[Tensor]  # dout, query, key, value
    args: _Args
    out: Tensor
    lse: Tensor
    grads: list[Tensor]


def _small(device: torch.device, d_qk: int, d_v: int, heads: int = 1) -> _Small:
    draws = torch.Generator(device).manual_seed(0)  # the caller's own are left as they are
    queries, keys = 192 // heads, 192
    shapes = (queries, heads, d_v), (queries, heads, d_qk), (keys, 1, d_qk), (keys, 1, d_v)
    inputs = [torch.randn(1, *shape, device=device, generator=draws).to(torch.bfloat16) for shape in shapes]
    dout, q, k, v = (x.flatten(0, 2).float() for x in inputs)
    scale = d_qk**-0.5
    row, column = torch.arange(queries * heads, device=device), torch.arange(keys, device=device)
    hidden = column > (row // heads + keys - queries)[:, None]
    scores = (_product(q, k.T) * scale).masked_fill(hidden, -torch.inf)
    p = scores.softmax(1)
    out = _product(p, v)
    ds = p * (_product(dout, v.T) - (dout * out).sum(1, keepdim=True)) * scale
    args = _Args(*(None,) * 11, "bshd", scale, 0.0, 0.0, -1, 0, 0, True)
    lse = scores.logsumexp(1).view(queries, heads).T
    return _Small(inputs, args, out, lse, [_product(ds, k), _product(ds.T, q), _product(p.T, dout)])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` without cuBLAS, which torch.use_deterministic_algorithms lets work only with its own settings."""
    return (a[:, :, None] * b[None]).sum(1)


def _wrong(found: list[Tensor], exact: list[Tensor]) -> str | None:
    pairs = zip(found, exact, strict=True)
    count = sum(int((~((a.view(b.shape) - b).abs() <= 2**-6 * b.abs().max())).sum()) for a, b in pairs)
    return f"its self-test gave {count} wrong results of {sum(x.numel() for x in exact)}" if count else None


def _forward_self_test(device: torch.device, plan: Plan) -> str | None:
    small = _small(device, sum(plan.p_qk), plan.p_v, plan.heads_per_tile - plan.partial)
    _, query, key, value = small.inputs
    return _wrong(list(_launch(query, key, value, small.args, plan)), [small.out, small.lse])


def _backward_self_test(device: torch.device, width: int, deterministic: bool) -> str | None:
    small = _small(device, width, width)
    args = small.args._replace(deterministic=deterministic)
    out, lse = small.out.to(torch.bfloat16).view(1, 192, 1, width), small.lse.view(1, 1, 192)
    dout, query, key, value = small.inputs
    grads = hopper_attention_bwd(dout, None, query, key, value, out, lse, [True] * 3 + [False], *args)
    return _wrong(list(grads[:3]), small.grads)


def _fits(args: _Args, *operands: _Operand) -> str | None:
    """Why these tensors are not for TMA, or None: what a problem does not say."""
    if not args.scale > 0:
        return f"the scale must be positive, is {args.scale}"
    for tensor, *strides in operands:
        elements = 16 // tensor.element_size()
        if not tensor.is_meta and tensor.data_ptr() % 16:
            return "an address is not a multiple of 16"
        if any(stride % elements for stride in strides):
            return f"strides must be multiples of 16 bytes, are {tuple(tensor.stride())}"
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            return f"a tensor is expanded, strides {tuple(tensor.stride())}"
        if not tensor.numel():
            return "a tensor is empty"
    return None


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rest = rest[:-1]  # the last is the backward's name
    args = _Args(*rest)
    heads = _heads(query, key, value, args.layout)
    k, v = _operand(key, args.layout, heads, True), _operand(value, args.layout, heads, True)
    if heads.shared:  # copies that the caller expanded are not read
        k, v = (x._replace(tensor=_one_head(x.tensor, args.layout, heads.kv)) for x in (k, v))
    plan = _plan_of(query, key, value, args)
    reason = _fits(args, _operand(query, args.layout, heads), k, v)
    if reason is None and _is_real(query):
        reason = fails_here(query.device, plan)
    if reason:
        _say("attention", reason)
        return _attention_fwd(query, key, value, *rest)
    return _launch(query, key, value, args, plan)


def _plan_of(query: Tensor, key: Tensor, value: Tensor, args: _Args) -> Plan:
    heads, shape = _heads(query, key, value, args.layout), _shape(query, key, args.layout, args.query_starts)
    sequences = 1 if args.query_starts is None else max(1, shape.batch)
    # of packed sequences on average
    queries, keys = max(1, shape.queries // sequences), max(1, shape.keys // sequences)
    plan = plan_for(query.shape[-1], value.shape[-1], queries)
    if 4 * queries > keys:
        return plan
    if args.slopes is None:  # one for a tile
        pack = heads_per_tile_for(heads.repeats, queries, plan.block_m)
        plan = plan._replace(heads_per_tile=pack, partial=heads.repeats % pack > 0)
    tiles = shape.batch * heads.kv * cdiv(heads.repeats, plan.heads_per_tile) * cdiv(queries, plan.queries)
    first = keys - queries if args.bottom_right else 0  # the position of the first query
    begin = max(0, first - args.left) if args.left >= 0 else 0
    end = min(keys, first + queries + args.right) if args.right >= 0 else keys
    seen = max(1, end - begin)
    result_bytes = shape.batch * queries * heads.kv * heads.repeats * value.shape[-1] * 4
    return plan._replace(
        num_splits=num_splits_for(tiles, cdiv(seen, plan.block_n), result_bytes, Target.of(query.device).num_sms)
    )


def _is_real(x: Tensor) -> bool:
    return recording.state.recording is None and not x.is_meta


def _say(what: str, reason: str) -> None:
    if tracing.first((what, reason)):
        tracing.event("dispatch", f"{what}: triton for hopper: {reason}", op="attention", backend="triton")


_HEAD_DIM: dict[Layout, int] = {"bshd": 2, "bhsd": 1, "sbhd": 2, "thd": 1}


def _one_head(x: Tensor, layout: Layout, heads: int) -> Tensor:
    dim = _HEAD_DIM[layout]
    return x if x.shape[dim] == heads else x.narrow(dim, 0, heads)


def _launch(query: Tensor, key: Tensor, value: Tensor, args: _Args, plan: Plan) -> tuple[Tensor, Tensor]:
    out, lse = _fwd_outputs(query, key, value, *args)
    target = Target.of(query.device)
    heads, shape = _heads(query, key, value, args.layout), _shape(query, key, args.layout, args.query_starts)
    q, o = _operand(query, args.layout, heads), _operand(out, args.layout, heads)
    k, v = _operand(key, args.layout, heads, True), _operand(value, args.layout, heads, True)
    d_qk, d_v = query.shape[-1], value.shape[-1]
    aligned = _is_aligned(args, shape, plan)
    if aligned and args.query_starts is not None:
        plan = plan._replace(q_held=False)  # H16 D128, 16k tokens, documents of 132 to 8097: 700 for 672 TFLOP/s
    blocks = _slots(shape, shape.queries, args.query_starts, plan.queries)
    storage = shape.batch if args.query_starts is None else 1
    tiles = blocks * heads.kv * cdiv(heads.repeats, plan.heads_per_tile) * plan.num_splits * storage
    slopes = args.slopes
    into, into_lse = out, lse
    strides: tuple[int, ...] = o.b, o.s, o.r
    if plan.leaves_parts:
        into = query.new_empty(
            (plan.num_splits, storage, shape.queries, heads.kv * heads.repeats, d_v), dtype=torch.float32
        )
        into_lse, strides = lse.new_empty((plan.num_splits, *lse.shape)), into.stride()[1:4]
    _hopper_attention_fwd_kernel[(min(target.num_sms, tiles),)](
        query, key, value, into, into_lse, slopes, args.sinks,
        args.query_starts, args.key_starts, args.query_used, args.key_used, _counter(query),
        shape.batch, shape.queries, shape.keys, heads.kv, heads.repeats, blocks,
        group_for(shape.keys * (d_qk + d_v) * key.element_size(), heads.repeats, args.right >= 0), tiles,
        q.b, q.s, q.r, k.b, k.s, k.h, v.b, v.s, v.h, *strides,
        slopes.shape[1] if slopes is not None and slopes.dim() == 2 else 0,
        args.scale, args.softcap, args.left, args.right,
        LEFT=args.left >= 0, RIGHT=args.right >= 0, BOTTOM_RIGHT=args.bottom_right, CAP=args.softcap > 0,
        ALIBI=_alibi_kind(args), D=(d_qk, d_v), P_QK=plan.p_qk, P_V=plan.p_v,
        BLOCK_N=plan.block_n, STAGES=plan.stages, CONSUMERS=plan.consumers, STORE_PARTS=plan.store_parts,
        Q_SLOTS=plan.q_slots, Q_HELD=plan.q_held, HEADS_PER_TILE=plan.heads_per_tile, SPLIT_KV=plan.leaves_parts,
        ALIGNED=aligned, num_warps=4,
    )  # fmt: skip
    if plan.leaves_parts:
        combine(into, into_lse, None, out, lse, (o.b, o.s, o.r))
    return out, lse


def _is_aligned(args: _Args, shape: _Shape, plan: Plan) -> bool:
    """Whether each tile has one block with hidden scores, whose diagonal goes from corner to corner."""
    if plan.heads_per_tile > 1 or plan.num_splits > 1:
        return False
    if args.left >= 0 or args.right != 0 or (plan.block_m, plan.block_n) != (128, 128):
        return False
    if args.query_starts is not args.key_starts or args.query_used is not args.key_used:
        return False
    if args.query_starts is not None or args.query_used is not None:  # as many keys as queries
        return shape.keys == shape.queries
    return (shape.keys - shape.queries) % 128 == 0 if args.bottom_right else shape.keys >= shape.queries


_counters: dict[tuple[int, int], Tensor] = {}  # by device and stream


def _counter(x: Tensor) -> Tensor:
    """An int32 that is 0, which the launch leaves 0: one for each stream, whose launches follow one another."""
    if x.is_meta or torch.cuda.is_current_stream_capturing():  # the graph's own: its replays may run on any stream
        return torch.zeros(1, dtype=torch.int32, device=x.device)
    where = x.get_device(), torch._C._cuda_getCurrentRawStream(x.get_device())
    found = _counters.get(where)
    if found is None:
        found = _counters[where] = _zero_to_keep(x.device)
    return found


def _zero_to_keep(device: torch.device) -> Tensor:
    """By another thread, on its stream: what this thread allocates while torch.compile warms up for CUDA graphs is in
    the graphs' memory, where nothing may be kept."""
    with ThreadPoolExecutor(1) as thread:
        zero = thread.submit(lambda: torch.zeros(1, dtype=torch.int32, device=device)).result()
    torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
    return zero


def _attention_hopper_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    need: list[bool],
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = dout, dlse, query, key, value, out, lse, need
    args = _Args(*rest)
    reason = why_not_backward(query, key, value, args)
    if reason is None and _is_real(query):
        width = width_of(max(query.shape[-1], value.shape[-1]))
        reason = backward_fails_here(query.device, width, args.deterministic)
    if reason:
        _say("attention's backward", reason)
        return _attention_bwd(*given, *rest)
    return hopper_attention_bwd(*given, *rest)


def _outputs(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fwd_outputs(query, key, value, *rest[:-1])


def _setup_context_here(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _setup_context(ctx, inputs[:-1], output)
    ctx.backward_op = _BACKWARD_OPS[inputs[-1]]


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    return backward_by(ctx.backward_op, ctx, dout, dlse)


_attention_hopper_op = Op(
    f"attention_hopper(Tensor query, Tensor key, Tensor value, {_ARGS_SCHEMA}, str backward) -> (Tensor, Tensor)",
    _attention,
    _outputs,
    backward=_backward,
    setup_context=_setup_context_here,
    flops=fwd_flops,
)
_attention_hopper_bwd_op = Op(
    "attention_hopper_bwd(Tensor dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"bool[] need, {_ARGS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    _attention_hopper_bwd,
    _bwd_outputs,
    flops=bwd_flops,
)


_BACKWARD_OPS = {
    "hopper": _attention_hopper_bwd_op,
    "cudnn": cudnn_backward.backward_op,
    "triton": _attention_bwd_op,
}
backward_op = _attention_hopper_bwd_op


def backward_why_not(problem: AttentionProblem) -> Iterator[Reason]:
    """Every need of this backward that the problem does not meet."""
    yield from why_not(problem)
    if reason := why_not_of(problem.head_dim_qk, problem.head_dim_v, problem.has_unordered_keys):
        yield Reason(reason, "use triton")


def run(call: AttentionCall, backward: str = "hopper") -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable by the backward of that name."""
    return _attention_hopper_op(call.query, call.key, call.value, *arguments(call), backward)
