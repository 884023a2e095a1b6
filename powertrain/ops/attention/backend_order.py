"""In which order backends are tried: a fixed order per arch and kind of problem, sorted by time where it was measured.

The fixed orders were chosen by hand. Backends whose time is known near a problem (backend_measurements.py) are sorted
by it within the places that they hold in the fixed order; the others keep their places.

A choice depends on classes of lengths and of the number of sequences, not on the sizes themselves.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from powertrain.ops.attention.backend_measurements import Case, Estimate, Kind, Points, estimates_at, measured, near
from powertrain.ops.attention.backend_registry import BACKENDS, BACKWARDS, SEPARABLE, backward_why_not
from powertrain.ops.attention.problem import AttentionProblem

# cuDNN plans every shape that it has not seen: 42 ms forward, 112 with a backward, where the attention takes 0.02 (one
# H200, lengths 301 to 330). Lengths that change, as those of prompts do, pay that again and again, so it goes first
# only where it gains as much. Training has few shapes, and pays it once in thousands of steps
_PLANNED = {False: 1.25, True: 1.1}  # by whether a gradient is wanted
_PLAIN = Kind("half", ())  # 16 bits, without ALiBi, softcap and determinism


class Order(NamedTuple):
    """In which order forwards and backwards are tried, the reason, the estimates that decided, and their sources."""

    names: tuple[str, ...]
    backwards: tuple[str, ...]
    reason: str
    estimates: Mapping[str, Estimate]
    sources: tuple[str, ...] = ()  # files of the measurements behind the estimates

    def behind(self, forward: str) -> tuple[str, ...]:
        """Backwards of this forward: unless they were measured, its own first."""
        return self.backwards if self.estimates else (forward, *(n for n in self.backwards if n != forward))


class FixedOrder(NamedTuple):
    """The order of some problems where nothing was measured."""

    named: tuple[str, ...]
    why: str
    archs: tuple[int, int] = (0, 999)  # first and last
    applies: Callable[[AttentionProblem], bool] = lambda problem: True

    @property
    def names(self) -> tuple[str, ...]:
        """All backends: those that cannot run there follow."""
        # backends that cannot run there are kept at the end, for explanations list every backend
        return self.named + tuple(name for name in BACKENDS if name not in self.named)


def _fills_tiles(p: AttentionProblem) -> bool:
    """Head dims with which the Hopper kernels are no slower for the columns that they pad.

    Of 16, 24, 32, 40 and 48 columns, causal and full, 256 to 8192 queries, they took 0.72 to 1.08 times cuDNN's time
    forward and backward (one H200; benchmarks/results/2026-11-23_h200_sizes.md, 2026-11-24_h200_attention_choice.md);
    mixed head dims were not measured.
    """
    dims = p.head_dim_qk, p.head_dim_v
    return (min(dims) >= 16 and max(dims) <= 64) or min(dims) > 64


def _is_192_128(p: AttentionProblem) -> bool:
    return (p.head_dim_qk, p.head_dim_v) == (192, 128)


_REST = ("chunked", "reference")
_LAST = ("triton", "flash", "flash-attn-2", "efficient", *_REST)
_BY_HAND = "chosen by hand from measurements of similar problems on one H200"
# benchmarks/results/2026-11-24_h200_attention_choice.md
_MOSTLY_HOPPER = "hopper was within 3 % of the fastest in 475 of 534 random problems on an H100 and an H200"
_PADDED = f"{_BY_HAND}; the hopper backend pads these head dims"
# A100: cuDNN at 0.82 of flash-2's speed, A10G 0.93, L40S 1.00, RTX PRO 6000 0.88: huggingface/transformers#48163
_PUBLISHED = "from published times of cuDNN and flash-2 (huggingface/transformers#48163), not from own measurements"

# the first that applies; backends that a row does not name cannot run there, and follow so that they are explained
FIXED_ORDERS = (
    # on the CPU triton means the interpreter, which is for tests; why_not refuses it otherwise
    FixedOrder(("triton", "cpu", *_REST), "triton runs on the CPU only with POWERTRAIN_INTERPRET=1", (0, 0)),
    FixedOrder(
        # PyTorch's memory-efficient kernels have sm_75 variants for tensor cores; Triton compiles a 64x64x32 float16
        # product to 1024 FMAs
        ("efficient", "triton", *_REST),
        "Triton's tl.dot does not use the tensor cores of sm_75",
        (75, 79),
    ),
    FixedOrder(
        ("triton", "efficient", *_REST),
        "the order measured on an H200 for float32 with TF32",
        applies=lambda p: p.dtype is torch.float32 and p.tf32,
    ),
    FixedOrder(
        ("efficient", "triton", *_REST),
        "the order measured on an H200 for float32 without TF32",
        applies=lambda p: p.dtype is torch.float32,
    ),
    # of cuDNN's time (2026-11-28): biases forward .42 to 1.01, with backward .79 to .88, 326 tokens 1.15; masks that
    # all heads share from 1412 tokens on .40 to 1.23, .67 to .98, 478 tokens 1.27 and 1.37; padding .31 to .95, .47 to
    # .98. With a gradient of the bias cuDNN has none
    FixedOrder(
        ("triton", "cudnn", "flash-attn-2", "efficient", *_REST),
        _BY_HAND,
        (90, 99),
        lambda p: p.mask.bias != "none" and not p.mask.bias_grad,
    ),
    # ms forward and backward, 8 x 512 x 12 D64, 4 x 2048 x 16 D128 causal and 2 x 4096 x 32/8: cuDNN .128 .83 2.79,
    # flash .148 1.18 4.00, triton .197 1.24 4.24
    FixedOrder(
        ("cudnn", "flash", "triton", "flash-attn-2", "efficient", *_REST),
        _BY_HAND,
        (90, 99),
        lambda p: p.dropout and p.needs_grad,
    ),
    # forward alone, causal: cuDNN .0563 to .554 ms, flash 1.03 to 1.19 times as long at head dims 64 to 192, less than
    # its plan of a new shape repays, but for .82 at 96 and .61 at 256
    FixedOrder(
        ("flash", "cudnn", "triton", "flash-attn-2", "efficient", *_REST), _BY_HAND, (90, 99), lambda p: p.dropout
    ),
    # ALiBi in the Hopper forward at head dim 64: 1.92 ms where the universal kernels took 1.43 (docs/log/gemm.md)
    FixedOrder(
        ("triton", "hopper", "flash-attn-2", *_REST),
        _BY_HAND,
        (90, 99),
        lambda p: (
            p.mask.alibi and not p.needs_grad and p.lengths.size == "long" and (p.head_dim_qk, p.head_dim_v) == (64, 64)
        ),
    ),
    FixedOrder(
        ("flash", "cudnn", "flash-attn-3", "flash-attn-4", "hopper", "triton", "flash-attn-2", "efficient", *_REST),
        _PADDED,
        (90, 99),
        lambda p: not _fills_tiles(p) and p.lengths.size == "decode",
    ),
    FixedOrder(
        ("cudnn", "flash-attn-3", "flash-attn-4", "hopper", *_LAST),
        _PADDED,
        (90, 99),
        lambda p: (
            not _fills_tiles(p)
            and (p.lengths.size == "short" or (p.lengths.size == "medium" and not p.needs_grad and p.head_dim_v <= 128))
        ),
    ),
    # forward and backward of head dims 136 to 192, over 1024 queries: FlashAttention-3 took 0.78 of hopper's time
    FixedOrder(
        ("flash-attn-3", "hopper", "cudnn", "triton", "flash-attn-4", "flash", "flash-attn-2", "efficient", *_REST),
        _BY_HAND,
        (90, 99),
        lambda p: p.needs_grad and p.head_dim_v > 128 and p.lengths.size in ("medium", "long"),
    ),
    FixedOrder(
        ("flash-attn-4", "flash-attn-3", "cudnn", "hopper", *_LAST), _PADDED, (90, 99), lambda p: not _fills_tiles(p)
    ),
    # the Hopper backward reads its stack with softcap; FlashAttention-3 was not timed with it
    FixedOrder(
        ("flash-attn-3", "hopper", "flash-attn-4", "cudnn", *_LAST),
        _BY_HAND,
        (90, 99),
        lambda p: p.mask.softcap > 0 and p.lengths.size != "short" and (p.needs_grad or not 64 < p.head_dim_v <= 128),
    ),
    FixedOrder(("hopper", "flash-attn-3", "flash-attn-4", "cudnn", *_LAST), _MOSTLY_HOPPER, (90, 99)),
    # flash-2 is ahead of cuDNN below sm_90 in the published numbers
    FixedOrder(("flash-attn-2", "flash", "triton", "cudnn", "efficient", *_REST), _PUBLISHED, (80, 89)),
    FixedOrder(("flash-attn-4", "cudnn", *_LAST), _PUBLISHED, (100, 119)),
    FixedOrder(("flash-attn-2", "flash", "triton", "flash-attn-4", "cudnn", "efficient", *_REST), _PUBLISHED),
)


def fixed_order(problem: AttentionProblem) -> FixedOrder:
    """The fixed order of a problem."""
    return next(o for o in FIXED_ORDERS if o.archs[0] <= problem.arch <= o.archs[1] and o.applies(problem))


def order_of(problem: AttentionProblem, forbidden: frozenset[str] = frozenset()) -> Order:
    """The order for a problem, all backends in it. `forbidden` backends differentiate nothing."""
    fixed = fixed_order(problem)
    # the backwards are ordered by the same rule as the forwards
    names, backwards = fixed.names, _fixed_backwards(problem, fixed.names)
    kind, points = points_for(problem)
    if points is None:
        return Order(names, backwards, f"fixed; {fixed.why}", {})
    case = case_for(problem)
    estimates = _with_backward(estimates_at(points, case), problem, backwards, forbidden)
    costs = {name: estimate.cost(problem.needs_grad) for name, estimate in estimates.items()}
    # a backend that the fixed order puts among those that cannot run stays there, whatever was measured
    known_costs = {name: cost for name, cost in costs.items() if cost is not None and name in fixed.named}
    # one measured backend gives nothing to compare with
    if len(known_costs) < 2:
        return Order(names, backwards, f"fixed; {fixed.why}", {})
    planned = _PLANNED[problem.needs_grad]
    nearest, sources = near(points, case)
    reason = f"estimated times; nearest measured: {nearest}{'' if kind == _PLAIN else f' {kind}'}"
    if "cudnn" in known_costs:
        reason += f"; cuDNN's time x {planned:g} (it plans every new shape)"
    return Order(by_cost(names, known_costs, planned), backwards, reason, estimates, sources)


def by_cost(names: tuple[str, ...], costs: Mapping[str, float], planned: float) -> tuple[str, ...]:
    """Names with those that have a cost in the order of it, in the places that they have together. cuDNN's counts
    `planned` times."""
    costs = {name: cost * (planned if name == "cudnn" else 1) for name, cost in costs.items()}
    # of equal costs the first in the fixed order is first: sorted is stable
    measured_names = iter(sorted((name for name in names if name in costs), key=lambda name: costs[name]))
    # unmeasured backends keep their places between the measured ones
    return tuple(next(measured_names) if name in costs else name for name in names)


def _fixed_backwards(p: AttentionProblem, names: tuple[str, ...]) -> tuple[str, ...]:
    """Backwards that take any forward's results, in the fixed order: cuDNN's behind ours where hopper comes first, but
    for 192/128, causal, over 1024 queries. ms of one H200, hopper and cuDNN: B2 S8192 16/16 3.96, 3.62; B1 S4096
    128/128 4.26, 3.87; B2 S4096 64/8 4.33, 3.94; B8 S1000 16/16 .414, .404; B1 S904 8/8 .061, .069; full B4 S3000 16/16
    2.26, 2.55."""
    in_order = tuple(name for name in names if name in BACKWARDS)
    if in_order.index("hopper") > in_order.index("cudnn"):
        return in_order
    if _is_192_128(p) and p.mask.is_causal and p.lengths.size in ("medium", "long"):
        return "cudnn", "hopper", "triton"
    return "hopper", "triton", "cudnn"


def points_for(p: AttentionProblem) -> tuple[Kind | None, Points | None]:
    """Measurements of a problem's kind; (kind, None) if there are none."""
    m = p.mask
    # features that no table has: their times differ from the plain kernel's by unknown factors
    others = m.bias != "none" or m.chunk or m.prefix or m.documents or p.dropout
    if p.target is None or p.lengths.empty or others:
        return None, None
    half = p.dtype in (torch.float16, torch.bfloat16)
    if not half and p.dtype is not torch.float32:
        return None, None
    # determinism matters to a backward only, so a forward uses the ordinary table
    flags = {"alibi": m.alibi, "deterministic": p.deterministic and p.needs_grad, "softcap": m.softcap > 0}
    features = tuple(sorted(name for name, given in flags.items() if given))
    kind = Kind("half" if half else "tf32" if p.tf32 else "float32", features)
    return kind, measured(p.target.arch, p.target.name).get(kind)


def case_for(p: AttentionProblem) -> Case:
    """A problem as it is compared with measured ones."""
    m, lengths = p.mask, p.lengths
    # keys that a query sees, itself included; a window to the right alone is none to the kernels' time
    window = m.left + 1 + max(0, m.right) if m.left >= 0 else 0
    return Case(
        m.is_causal, window, p.layout == "thd", lengths.sequences, lengths.queries, lengths.keys, p.num_heads,
        p.num_kv_heads, p.head_dim_qk, p.head_dim_v,
    )  # fmt: skip


def _with_backward(
    alone: Mapping[str, Estimate], problem: AttentionProblem, backwards: tuple[str, ...], forbidden: frozenset[str]
) -> dict[str, Estimate]:
    """A forward that several backwards may follow is estimated with the first of them that can."""
    if not problem.needs_grad:
        return dict(alone)
    able = (n for n in backwards if n not in forbidden and not any(backward_why_not(n, problem)))
    behind = alone.get(next(able, ""), Estimate(None, None)).backward
    return {n: e._replace(backward=behind) if n in SEPARABLE else e for n, e in alone.items()}
