"""attention beside every backend that is installed; what features, groups and packing cost; memory; host time.

FLOPs: forward 2 * pairs * (dqk + dv) per head, pairs being those that the mask lets see; backward 2.5 times that, 2.6
at 192/128. Forward is timed without gradients, backward alone. Nothing is printed for a variant that errs more than
twice as much as plain PyTorch on a slice of the very tensors.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import peers
from powertrain.ops.attention import attention, select, varlen_attention
from powertrain.ops.attention.arguments import MaskArguments, lower_mask
from powertrain.ops.attention.backend_registry import BACKENDS
from powertrain.ops.attention.backends.reference import attention_ref
from powertrain.ops.attention.problem import Sizes
from powertrain.ops.attention.select import NoBackendError
from powertrain.runtime.errors import CompileError
from powertrain.testing.bench import Timing, host_us, measure, table

Results = list[Tensor]  # out, dq, dk, dv


class Case(NamedTuple):
    batch: int
    length: int
    heads: int
    kv_heads: int
    d_qk: int
    d_v: int
    causal: bool = True

    @property
    def label(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        dims = f"{self.d_qk}" if self.d_qk == self.d_v else f"{self.d_qk}/{self.d_v}"
        return f"B{self.batch} S{self.length} H{heads} D{dims} {'causal' if self.causal else 'full'}"

    @property
    def flops(self) -> float:
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 2 * self.batch * self.heads * pairs * (self.d_qk + self.d_v)

    @property
    def backward(self) -> float:
        return 2.5 if self.d_qk == self.d_v else 2.6


CASES = [
    Case(8, 2048, 16, 16, 128, 128),
    Case(2, 8192, 16, 16, 128, 128),
    Case(1, 16384, 16, 16, 128, 128),
    Case(2, 8192, 16, 16, 128, 128, False),
    Case(2, 8192, 32, 8, 128, 128),
    Case(8, 2048, 32, 32, 64, 64),
    Case(2, 8192, 32, 32, 64, 64),
    Case(1, 16384, 32, 32, 64, 64),
    Case(2, 8192, 16, 16, 192, 128),
    Case(2, 8192, 8, 8, 256, 256),
]
# grouped heads and odd lengths in backward, and head dims beside 64, 128 and 256
GROUPED = [
    Case(3, 3000, 28, 4, 128, 128),
    Case(4, 2048, 32, 8, 128, 128),
    Case(1, 2048, 32, 8, 128, 128),
    Case(1, 4096, 28, 4, 128, 128),
    Case(8, 1000, 32, 8, 128, 128),
]
HEAD_DIMS = [
    *(Case(2, 8192, 16, 16, d, d, causal) for d in (72, 80) for causal in (True, False)),
    *(Case(4, 3000, 16, 16, d, d) for d in (96, 112, 136, 160, 192, 512)),
    # backwards by tiles of 96 keys: of unequal head dims, and of heads that share keys
    Case(4, 3000, 16, 16, 192, 128, False),
    Case(3, 5550, 12, 1, 192, 192, False),
]
DOCUMENTS = (132, 8097, 1024, 3331, 3800)  # tokens of packed sequences
PEERS = ("hopper", "triton", "cudnn", "flash", "flash-attn-4", "flash-attn-3", "flash-attn-2")


def _leaves(case: Case, device: str = "cuda") -> list[Tensor]:
    sizes = ((case.heads, case.d_qk), (case.kv_heads, case.d_qk), (case.kv_heads, case.d_v))
    made = (torch.randn(case.batch, case.length, *size, device=device, dtype=torch.bfloat16) for size in sizes)
    return [x.requires_grad_() for x in made]


def launch_cases(cases: list[Case]) -> None:
    """Our own backends, forward and backward, on meta tensors: for `ahead.build`."""
    for case in cases:
        leaves = _leaves(case, "meta")
        for name in ("hopper", "triton"):
            with suppress(NoBackendError):
                out = attention(*leaves, is_causal=case.causal, backend=name)
                torch.autograd.grad(out, leaves, torch.empty_like(out))


def launch() -> None:
    """Those of CASES; what features and packing need compiles when it is timed."""
    launch_cases(CASES)


def _first(case: Case, results: Results) -> Results:
    """Those of the first kv head of the first batch entry."""
    heads = case.heads // case.kv_heads
    return [x[:1, :, : heads if n < 2 else 1] for n, x in enumerate(results)]


def _slice_ref(case: Case, leaves: list[Tensor], dout: Tensor, options: dict[str, Any], upcast: bool) -> Results:
    repeats = case.heads // case.kv_heads
    q, k, v = (x.detach()[:1, :, :n].requires_grad_() for x, n in zip(leaves, (repeats, 1, 1), strict=True))
    own = {name: _of_heads(name, x, repeats) for name, x in options.items()}
    out = _specified(q, k, v, case.causal, own, upcast)
    return [out, *torch.autograd.grad(out, [q, k, v], dout[:1, :, :repeats])]


def _of_heads(name: str, option: Any, heads: int) -> Any:
    if name == "attn_bias":
        return option[:, :heads]
    return option[:heads] if isinstance(option, Tensor) else option  # ALiBi's slopes, sinks


def _specified(q: Tensor, k: Tensor, v: Tensor, causal: bool, options: dict[str, Any], upcast: bool) -> Tensor:
    sizes = Sizes(1, q.shape[2], k.shape[2], q.shape[1], k.shape[1])
    mask, tensors = lower_mask("attention", sizes, MaskArguments(is_causal=causal, **options))
    return attention_ref(q, k, v, mask=mask, tensors=tensors, upcast=upcast)[0]


class Judge:
    """Twice plain PyTorch's error and one rounding, on a slice."""

    def __init__(self, case: Case, leaves: list[Tensor], dout: Tensor, options: dict[str, Any]) -> None:
        self.case = case
        self.exact = [x.detach() for x in _slice_ref(case, [x.float() for x in leaves], dout.float(), options, True)]
        plain = _slice_ref(case, leaves, dout, options, False)
        self.allowed = [
            2 * (a - b).abs().max() + torch.finfo(torch.bfloat16).eps * b.abs().max()
            for a, b in zip(plain, self.exact, strict=True)
        ]

    def accepts(self, results: Results) -> bool:
        found = zip(_first(self.case, results), self.exact, self.allowed, strict=True)
        return all(bool((a - b).abs().max() <= allowed) for a, b, allowed in found)


Variant = tuple[Callable[..., Tensor], dict[str, Any]]


def _time(
    case: Case, variants: dict[str, Variant], leaves: list[Tensor], judge: Callable[[str], Judge | None], dout: Tensor
) -> tuple[dict[str, Timing], dict[str, Timing], list[str]]:
    """Forward, backward, and what is said of variants that are wrong."""
    forward, backward, said = {}, {}, []
    for name, (function, options) in variants.items():
        try:
            out = function(*leaves, **options)
        except NoBackendError:
            continue
        except CompileError as error:
            said.append(f"{case.label} | {name}: {error}")
            continue
        grads = torch.autograd.grad(out, leaves, dout.view_as(out), retain_graph=True)
        of_case = judge(name)
        if of_case is not None and not of_case.accepts([out.detach(), *grads]):
            said.append(f"{case.label} | {name}: WRONG, not timed")
            continue
        forward[name] = lambda f=function, o=options: f(*(x.detach() for x in leaves), **o)
        backward[name] = lambda out=out: torch.autograd.grad(out, leaves, dout.view_as(out), retain_graph=True)
    with torch.no_grad():
        forwards = measure(forward, seconds=0.12)
    return forwards, measure(backward, seconds=0.15), said


def _against_peers(case: Case) -> Iterator[str]:
    leaves = _leaves(case)
    dout = torch.randn(case.batch, case.length, case.heads, case.d_v, device="cuda", dtype=torch.bfloat16)
    names: dict[str, str | None] = {"selector": None} | {name: name for name in PEERS if name in BACKENDS}
    variants = {n: (attention, {"is_causal": case.causal, "backend": backend}) for n, backend in names.items()}
    # FlashAttention-3 raises above 256
    if peers.flash_3() is not None and max(case.d_qk, case.d_v) <= 256:
        variants["flash-attn-3"] = (_flash_3, {"is_causal": case.causal})
    judge = Judge(case, leaves, dout, {})
    forward, backward, said = _time(case, variants, leaves, lambda name: judge, dout)
    yield "\n".join([
        *said,
        table(f"{case.label} fwd", forward, flops=case.flops),
        table(f"{case.label} bwd", backward, flops=case.backward * case.flops),
        *(
            f"{case.label} {way} | selector / best backend: {times['selector'].ms / _best(times):.3f}"
            for way, times in (("fwd", forward), ("bwd", backward)) if len(times) > 1 and "selector" in times
        ),
    ])  # fmt: skip


def _flash_3(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    out: Tensor = peers.Flash3.apply(q, k, v, q.shape[-1] ** -0.5, is_causal, -1)  # type: ignore[no-untyped-call]
    return out


def _best(times: dict[str, Timing]) -> float:
    return min(timing.ms for name, timing in times.items() if name != "selector")


def _features(case: Case, every: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Our kernels, each feature beside the plain mask."""
    leaves = _leaves(case)
    dout = torch.randn_like(leaves[0])
    variants = {
        name: (attention, {"is_causal": case.causal, "backend": "triton", **options}) for name, options in every.items()
    }
    found = _time(case, variants, leaves, lambda name: Judge(case, leaves, dout, every[name]), dout)
    yield _beside("plain", f"triton {case.label}", found)


def _beside(base: str, label: str, found: tuple[dict[str, Timing], dict[str, Timing], list[str]]) -> str:
    """Times over those of `base`."""
    forward, backward, lines = found
    for name in forward:
        cells = [f"{times[name].ms:7.3f} ms ({times[name].ms / times[base].ms:5.2f}x)" for times in (forward, backward)]
        lines.append(f"{label} | {name:14} | fwd {' | bwd '.join(cells)}")
    return "\n".join(lines)


def _of_every_feature(case: Case) -> dict[str, dict[str, Any]]:
    h, s = case.heads, case.length
    return {
        "plain": {},
        "alibi": {"alibi_slopes": torch.rand(h, device="cuda")},
        "sinks": {"sinks": torch.randn(h, device="cuda")},
        "softcap 30": {"softcap": 30.0},
        "bias per head": {"attn_bias": torch.randn(1, h, s, s, device="cuda", dtype=torch.bfloat16)},
    }


def _packed(case: Case) -> Iterator[str]:
    """The same work as rows of packed sequences."""
    leaves = [x.detach().flatten(0, 1).requires_grad_() for x in _leaves(case)]
    starts = torch.arange(0, case.batch * case.length + 1, case.length, dtype=torch.int32, device="cuda")
    dout = torch.randn_like(leaves[0])

    def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        q, k, v = (x.unflatten(0, (case.batch, case.length)) for x in (q, k, v))
        return attention(q, k, v, **options).flatten(0, 1)

    def packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return varlen_attention(q, k, v, starts, max_seqlen_q=case.length, **options)

    options = {"is_causal": case.causal, "backend": "triton"}
    same = [f(*leaves, **options) for f in (dense, packed)]
    assert torch.equal(*same), "packed and dense differ"
    found = _time(case, {"dense": (dense, options), "packed": (packed, options)}, leaves, lambda name: None, dout)
    yield _beside("dense", f"triton {case.label}", found)


def _of_documents(heads: int, kv_heads: int) -> Iterator[str]:
    """Documents of 100 to 8000 tokens in one row, causal."""
    total = sum(DOCUMENTS)
    starts = torch.tensor([0, *itertools.accumulate(DOCUMENTS)], dtype=torch.int32, device="cuda")
    shapes = ((total, heads, 128), (total, kv_heads, 128), (total, kv_heads, 128))
    leaves = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    dout = torch.randn_like(leaves[0])
    options = {"max_seqlen_q": max(DOCUMENTS), "is_causal": True}

    def packed(q: Tensor, k: Tensor, v: Tensor, **chosen: Any) -> Tensor:
        return varlen_attention(q, k, v, starts, **options, **chosen)

    case = Case(1, total, heads, kv_heads, 128, 128)
    variants: dict[str, Variant] = {"selector": (packed, {})}
    variants |= {name: (packed, {"backend": name}) for name in PEERS if name in BACKENDS}
    forward, backward, said = _time(case, variants, leaves, lambda name: None, dout)
    label = f"{len(DOCUMENTS)} documents, {total} tokens, H{heads}/{kv_heads} D128 causal"
    flops = 2 * heads * 256 * sum(n * (n + 1) / 2 for n in DOCUMENTS)
    yield "\n".join([
        *said, table(f"{label} fwd", forward, flops=flops), table(f"{label} bwd", backward, flops=2.5 * flops),
    ])  # fmt: skip


def _memory() -> Iterator[str]:
    """Bytes beyond inputs and results."""
    for length in (4096, 16384):
        case = Case(1, length, 16, 16, 128, 128)
        leaves = _leaves(case)
        out = attention(*leaves, is_causal=True, backend="triton")
        dout = torch.randn_like(out)
        spent = []
        for step in (
            lambda leaves=leaves: attention(*leaves, is_causal=True, backend="triton"),
            lambda out=out, leaves=leaves, dout=dout: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        ):
            step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            kept = step()
            torch.cuda.synchronize()
            spent.append(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
            assert torch.cuda.memory_allocated() >= before
            del kept
        yield f"triton {case.label} | bytes beyond inputs and results: forward {spent[0]}, backward {spent[1]}"


def _host() -> Iterator[str]:
    q = torch.randn(1, 64, 8, 128, device="cuda", dtype=torch.bfloat16)
    leaf = q.clone().requires_grad_()
    seen: list[Any] = []
    choose = select.choose

    def noted(*arguments: Any) -> Any:
        seen[:] = arguments
        return choose(*arguments)

    select.choose = noted
    try:
        attention(q, q, q, is_causal=True)
    finally:
        select.choose = choose
    yield f"host | looking up a selection made before | {host_us(lambda: choose(*seen)):6.1f} us"
    for backend in (None, "triton"):
        name = backend or "selector"
        forward = host_us(lambda b=backend: attention(q, q, q, is_causal=True, backend=b))
        both = host_us(
            lambda b=backend: torch.autograd.grad(attention(leaf, leaf, leaf, is_causal=True, backend=b), leaf, q)
        )
        yield f"host | B1 S64 H8 D128, {name:12} | forward {forward:6.1f} us, forward + backward {both:6.1f} us"


def against_peers(cases: list[Case]) -> Iterator[str]:
    """The rows of these cases alone."""
    for case in cases:
        yield from _against_peers(case)


def run() -> Iterator[str]:
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(600):  # about a second: clocks fall as the chip warms
        x @ x
    yield from against_peers(CASES)
    for case in (CASES[1], CASES[6]):
        yield from _features(case, _of_every_feature(case))
    yield from _features(CASES[2], {"plain": {}, "window 1024": {"window_size": (1023, 0)}})
    for case in (CASES[1], CASES[4], CASES[6]):
        yield from _packed(case)
    for heads, kv_heads in ((16, 16), (32, 8)):
        yield from _of_documents(heads, kv_heads)
    yield from _memory()
    yield from _host()
