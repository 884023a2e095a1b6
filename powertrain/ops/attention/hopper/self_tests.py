"""The small problem on which the Hopper kernels are tried before their first result on a device is used.

It has the mask, the packing and the head dims of the call that asks, so that the kernel that is tried is the one that
the call needs: a first call compiles one forward and one backward.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from powertrain.ops.attention.hopper.backward import launch_backward
from powertrain.ops.attention.hopper.backward_plans import Plan as BackwardPlan
from powertrain.ops.attention.hopper.backward_plans import Schedule, schedule_of
from powertrain.ops.attention.hopper.plans import Plan
from powertrain.ops.attention.operands import BackwardCall, OpArguments, Operands

_QUERIES = 192  # times heads: more than one tile, the last one half empty
_WINDOW = 100  # at most, of a call with a window


class SmallProblem(NamedTuple):
    """One sequence of 192 pairs of query and head, at most, and its results in float32."""

    inputs: list[Tensor]  # dout, query, key, value
    args: OpArguments
    out: Tensor  # [queries * heads, d_v]
    lse: Tensor  # [heads, queries]
    grads: list[Tensor]  # of query, key, value, in rows

    @classmethod
    def like(cls, call: Operands, heads: int = 1) -> "SmallProblem":
        """`heads` query heads share the one key head."""
        device, args = call.q.tensor.device, call.args
        # the caller's own are left as they are
        draws = torch.Generator(device).manual_seed(0)
        queries, rows = _QUERIES // heads, _keys_like(call)
        keys = queries if _shares_lengths(args) else rows
        shapes = (queries, heads, call.d_v), (queries, heads, call.d_qk), (rows, 1, call.d_qk), (rows, 1, call.d_v)
        inputs = [torch.randn(*shape, device=device, generator=draws).to(call.q.tensor.dtype) for shape in shapes]
        dout, q, k, v = (x.flatten(0, 1).float() for x in inputs)
        k, v = k[:keys], v[:keys]
        scale = call.d_qk**-0.5
        small = _arguments(args, queries, keys, heads, device)._replace(scale=scale)
        # heads of one token are neighbours, as packed heads lie in a tile
        row, column = torch.arange(queries * heads, device=device), torch.arange(keys, device=device)
        distance = column - (row // heads + (keys - queries if args.bottom_right else 0))[:, None]
        raw = _product(q, k.T) * scale
        tanh = torch.tanh(raw / args.softcap) if args.softcap > 0 else torch.zeros_like(raw)
        scores = args.softcap * tanh if args.softcap > 0 else raw
        if small.slopes is not None:
            scores = scores - small.slopes.flatten()[row % heads][:, None] * distance.abs()
        hidden = ((small.right >= 0) & (distance > small.right)) | ((small.left >= 0) & (distance < -small.left))
        scores = scores.masked_fill(hidden, -torch.inf)
        # a sink is one more score without a value
        sink = scores.new_full((len(row), 1), -torch.inf) if small.sinks is None else small.sinks[row % heads][:, None]
        lse = torch.cat([scores, sink.float()], 1).logsumexp(1, keepdim=True)
        # a row that sees nothing, as behind the last key of a window, gives 0 and an LSE of -inf
        p = (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
        out = _product(p, v)
        ds = p * (_product(dout, v.T) - (dout * out).sum(1, keepdim=True)) * (1 - tanh * tanh) * scale
        # rows behind the last key, where there are any, have no gradients
        unused = (0, 0, 0, rows - keys)
        grads = [_product(ds, k), *(pad(x, unused) for x in (_product(ds.T, q), _product(p.T, dout)))]
        if small.layout != "thd":
            inputs = [x[None] for x in inputs]
        return cls(inputs, small, out, lse.view(queries, heads).T, grads)


def _shares_lengths(args: OpArguments) -> bool:
    """Starts or lengths of queries and keys are one tensor, in the small problem too."""
    pairs = (args.query_starts, args.key_starts), (args.query_used, args.key_used)
    return any(of_queries is not None and of_queries is of_keys for of_queries, of_keys in pairs)


def _keys_like(call: Operands) -> int:
    """Rows of the keys: as many as queries where a tile's diagonal goes from corner to corner in the call too; without
    a mask two blocks of 128, of which the last has as many as the call's: half of it may be all there is."""
    if _shares_lengths(call.args):
        return _QUERIES if call.keys == call.queries else _QUERIES + 32
    if call.args.left < 0 and call.args.right < 0:
        return 128 + (call.keys % 128 or 128)
    if (call.keys - call.queries) % 128 == 0:
        return _QUERIES
    return _QUERIES - 32 if call.keys < call.queries and not call.args.bottom_right else _QUERIES + 32


def _arguments(args: OpArguments, queries: int, keys: int, heads: int, device: torch.device) -> OpArguments:
    """Those of the call for one sequence: what is None stays None."""
    starts = torch.tensor([0, queries], dtype=torch.int32, device=device)
    # where queries and keys of the call share one tensor, so do these
    key_starts = starts if args.key_starts is args.query_starts else starts.new_tensor([0, keys])
    used, key_used = starts[1:], key_starts[1:] if args.key_starts is not None else starts.new_tensor([keys])
    if args.key_used is args.query_used:
        key_used = used
    return args._replace(
        layout="bshd" if args.query_starts is None else "thd",
        left=min(args.left, _WINDOW), right=min(args.right, _WINDOW),
        slopes=None if args.slopes is None else torch.full((heads,), 0.125, dtype=torch.float32, device=device),
        sinks=None if args.sinks is None else torch.full((heads,), 0.5, dtype=args.sinks.dtype, device=device),
        query_starts=None if args.query_starts is None else starts,
        key_starts=None if args.key_starts is None else key_starts,
        query_used=None if args.query_used is None else used,
        key_used=None if args.key_used is None else key_used,
    )  # fmt: skip


Forward = Callable[[Operands, Plan], tuple[Tensor, Tensor]]


def forward_defect(call: Operands, plan: Plan, forward: Forward) -> str | None:
    """The defect that this forward plan shows on the small problem, or None."""
    small = SmallProblem.like(call, plan.heads_per_tile - plan.partial)
    _, query, key, value = small.inputs
    return _wrong(list(forward(Operands.of(query, key, value, small.args), plan)), [small.out, small.lse])


def backward_defect(call: Operands, plan: BackwardPlan, schedule: Schedule | None) -> str | None:
    """The defect that this backward plan shows on the small problem, or None.

    The small problem is scheduled as the call is where that selects another kernel: whether query heads of a KV head
    are split, and whether packed sequences are taken by length."""
    is_split = schedule is not None and schedule.num_splits > 1
    small = SmallProblem.like(call, 2 if is_split else 1)
    dout, query, key, value = small.inputs
    # the exact results and not the kernel's: the backward is judged alone
    out = small.out.to(query.dtype).view(dout.shape)
    lse = (small.lse if small.args.layout == "thd" else small.lse[None]).contiguous()
    alone = BackwardCall(dout, None, query, key, value, out, lse, [True] * 3 + [False], small.args)
    operands = alone.operands()
    if schedule is not None:
        longest_first = schedule.longest_first
        schedule = schedule_of(operands, plan)._replace(num_splits=1 + is_split, longest_first=longest_first)
    grads = launch_backward(alone, operands, plan, schedule)
    return _wrong(list(grads[:3]), small.grads)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` without cuBLAS, which torch.use_deterministic_algorithms lets work only with its own settings."""
    return (a[:, :, None] * b[None]).sum(1)


def _wrong(results: list[Tensor], exact: list[Tensor]) -> str | None:
    pairs = zip(results, exact, strict=True)
    count = sum(_count_wrong(a.reshape(b.shape), b) for a, b in pairs)
    return f"its self-test gave {count} wrong results of {sum(x.numel() for x in exact)}" if count else None


def _count_wrong(a: Tensor, exact: Tensor) -> int:
    # -inf, the LSE of a row that sees nothing, is right where it is equal and has no part in the bound
    bound = 2**-6 * exact.abs().masked_fill(exact == -torch.inf, 0.0).max()
    return int((~((a == exact) | ((a - exact).abs() <= bound))).sum())
