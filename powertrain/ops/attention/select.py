"""Which backend serves a problem, in an order measured per arch and size class, and why the others do not.

Three places say what may run, the nearer one first: `backend=` of a call, `with attention_backend(...)`, and the
environment variable POWERTRAIN_ATTENTION. "-name" forbids. Names in `backend=` are an exact list: only these are tried,
in that order (a list of "-name" alone forbids and leaves the rest). Names given to the context or the environment are
preferred: tried first, in that order, before all others. A nearer place may allow again what a farther one forbade.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from powertrain.ops.attention.backends import flash_attn, sdpa
from powertrain.ops.attention.backends.reference import run_reference
from powertrain.ops.attention.mask import MaskSpec
from powertrain.ops.attention.problem import AttentionCall, AttentionProblem, Lengths, Reason
from powertrain.runtime import dispatch, tracing
from powertrain.runtime.errors import PowertrainError
from powertrain.runtime.settings import Settings, settings
from powertrain.runtime.target import pretended


class Backend(Protocol):
    """One way to compute attention."""

    name: str
    draws_keep: bool  # dropout is that of `attention_keep`, from the call's seed

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        """Every need of this backend that the problem does not meet."""

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """(out, lse), differentiable; lse may be None unless the call wants it."""


class _Lazy:
    """A backend of ours whose module has `why_not(problem)` and `run(call)`, imported when it is first asked."""

    def __init__(self, name: str, module: str, draws_keep: bool = True) -> None:
        self.name, self._module, self.draws_keep = name, module, draws_keep
        self._loaded: Any = None  # Dynamo cannot trace an import, so `run` does not make it

    def _load(self) -> Any:
        if self._loaded is None:
            self._loaded = importlib.import_module(self._module)
        return self._loaded

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        if self.name in ("hopper", "triton"):
            name = "varlen_attention" if problem.layout == "thd" else "attention"
            if dispatch._is_disabled("attention") or dispatch._is_disabled(name):
                yield Reason(f'switched off by powertrain.disable("{name}") or POWERTRAIN_DISABLE', "leave that out")
            if problem.target is None and not settings().interpret:
                yield Reason("our kernels run on GPUs", "use chunked or cpu, or move the tensors to a GPU")
                return  # no need to import Triton for that
        yield from self._load().why_not(problem)

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        result: tuple[Tensor, Tensor | None] = self._loaded.run(call)
        return result


class Reference:
    """The specification itself: takes everything, with the whole score matrix in memory."""

    name = "reference"
    draws_keep = True

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        return iter(())

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return run_reference(call)


_ALL: tuple[Backend, ...] = (
    _Lazy("triton", "powertrain.ops.attention.triton.backend"),
    _Lazy("hopper", "powertrain.ops.attention.hopper.backend", draws_keep=False),
    sdpa.Cudnn(),
    sdpa.Flash(),
    sdpa.Efficient(),
    flash_attn.FlashAttention4(),
    flash_attn.FlashAttention3(),
    flash_attn.FlashAttention2(),
    sdpa.Cpu(),
    _Lazy("chunked", "powertrain.ops.attention.backends.chunked"),
    Reference(),
)
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in _ALL}


class Order(NamedTuple):
    """In which order backends are tried, for some problems, and how that is known."""

    names: tuple[str, ...]
    known: str
    archs: tuple[int, int] = (0, 999)  # first and last
    applies: Callable[[AttentionProblem], bool] = lambda problem: True


_REST = ("chunked", "reference")
_H200 = "measured 2026-11-21 on one H200 (torch 2.11, cuDNN 9.19, flash-attn-4 4.0.0b36)"
_H200_FA3 = "measured 2026-11-21 on one H200 (torch 2.11, cuDNN 9.19, xformers 0.0.34's FlashAttention-3)"
# A100: cuDNN at 0.82 of flash-2's speed, A10G 0.93, L40S 1.00, RTX PRO 6000 0.88: huggingface/transformers#48163
_PUBLISHED = "not measured here: published numbers (cuDNN against flash-2: huggingface/transformers#48163)"


def _fills_tiles(p: AttentionProblem) -> bool:
    """With these head dims little of what the Hopper kernels multiply is padding: they were measured with such."""
    dims = p.head_dim_qk, p.head_dim_v
    return dims == (64, 64) or min(dims) >= 96


def _is_few_beside_long(p: AttentionProblem) -> bool:
    """Few queries at the end of long keys, whose tiles the Hopper forward packs and cuts: what was measured of that."""
    repeats = p.num_heads // max(1, p.num_kv_heads)
    packs = repeats & (repeats - 1) == 0 and not p.mask.alibi
    at_end = p.mask.right == 0 and p.mask.bottom_right
    few = p.lengths.few and p.lengths.size in ("decode", "short")
    return not p.needs_grad and few and at_end and packs and _fills_tiles(p)


# the first that applies; backends that a row does not name cannot run there, and follow so that they are explained
ORDERS = (
    Order(("triton", "cpu", *_REST), "triton runs on the CPU only when asked to be interpreted", (0, 0)),
    Order(
        ("efficient", "triton", *_REST),
        "Triton's tl.dot reaches no tensor core on sm_75 (a 64x64x32 float16 product compiles to 1024 FMAs)",
        (75, 79),
    ),
    # B2 S2048 H16 D128, ms forward: triton .37 with TF32, 5.4 without; efficient .91 either way, in three TF32 products
    Order(
        ("triton", "efficient", *_REST),
        f"float32 where TF32 is allowed, {_H200}",
        applies=lambda p: p.dtype is torch.float32 and p.tf32,
    ),
    Order(
        ("efficient", "triton", *_REST),
        f"float32 at full precision, {_H200}",
        applies=lambda p: p.dtype is torch.float32,
    ),
    # forward alone, ms, causal, 32768 keys, D128: B8 H32/8, 1 query hopper .25 flash .25 flash-attn-3 .36 triton 1.07;
    # 16 .26 1.52 .35 1.07; 64 .40 1.53 .39 1.07; H64/8, 16 .26 3.02 .35 2.10; H32, 1 .95 - .97 1.17; B1 H32/8, 1 .05
    # .06 .35 .83; 64 .07 .14 .34 .83; 256 .21 .43 .34 .82; 1000 .73 1.52 .72 1.04; 8192 keys, H64/8 D64, B8, 16 .06
    # .47 .10 .22; 128 .30 .46 .29 .36; H16/8 D256, 16 .14 .23 .18 .29
    Order(
        ("hopper", "flash-attn-3", "flash-attn-4", "cudnn", "triton", "flash", "flash-attn-2", "efficient", *_REST),
        _H200_FA3,
        (90, 90),
        _is_few_beside_long,
    ),
    # ms, B8 H32/8 D128, 8192 keys: 1 query cudnn .07 flash .07 flash-attn-4 .14 triton .41; 16 cudnn .21 flash .39
    Order(
        ("cudnn", "flash", "flash-attn-3", "flash-attn-4", "triton", "flash-attn-2", "efficient", *_REST),
        _H200,
        (90, 99),
        lambda p: p.lengths.size == "decode",
    ),
    # forward + backward of 16k tokens in graphs, causal: H16 D128 S512 hopper .09 + .37, cudnn .10 + .40; S1024 .13 +
    # .49, .15 + .53; H32 D64 S512 .15 + .41, .13 + .51; S1024 .20 + .56, .20 + .69; H16 D192/128 S512 .67, .68
    Order(
        ("hopper", "cudnn", "flash-attn-3", "flash-attn-4", "triton", "flash", "flash-attn-2", "efficient", *_REST),
        _H200,
        (90, 90),
        lambda p: p.lengths.size == "short" and (p.needs_grad or p.head_dim_qk > 64) and _fills_tiles(p),
    ),
    # forward + backward, causal: B16 S512 H16 D128 cudnn .06 + .23, flash-attn-4 .09 + .29, flash .10 + .30;
    # B8 S1024 H16 D128 forward cudnn .09 triton .12 flash .16
    Order(
        ("cudnn", "flash-attn-3", "flash-attn-4", "hopper", "triton", "flash", "flash-attn-2", "efficient", *_REST),
        _H200,
        (90, 99),
        lambda p: p.lengths.size == "short",
    ),
    # forward + backward: B2 S8192 H16 D192/128 causal hopper .91 + 3.61 (cuDNN's), flash-attn-4 .94 + 3.76, cudnn
    # 1.12 + 3.59; full hopper 1.80 + 9.03 (triton's), triton 2.79 + 8.83, cudnn 2.03 + 11.59; packed H16 D128, 16k
    # tokens, 132 to 8097 each: hopper .56 + 1.66, triton .79 + 2.50; 100 to 8k each, backward: hopper 1.90,
    # flash-attn-3 1.93, H32/8 3.77, 3.94
    Order(
        ("hopper", "flash-attn-3", "flash-attn-4", "cudnn", "triton", "flash", "flash-attn-2", "efficient", *_REST),
        _H200_FA3,
        (90, 90),
        lambda p: (
            p.needs_grad
            and ((p.head_dim_qk, p.head_dim_v) == (192, 128) or (p.layout == "thd" and p.head_dim_v <= 128))
            and _fills_tiles(p)
        ),
    ),
    # forward + backward, B2 S8192 causal: H8 D256 flash-attn-3 .70 + 2.84, hopper .72 + 3.08, cudnn .86 + 3.26, triton
    # 1.02 + 4.47; full backward 5.69, 6.10, 7.49; D224 hopper 3.90, cudnn 4.10, triton 6.45; D160 hopper .61 + 2.47
    # (triton's), triton 3.29, cudnn 3.63
    Order(
        ("flash-attn-3", "hopper", "cudnn", "triton", "flash-attn-4", "flash", "flash-attn-2", "efficient", *_REST),
        _H200_FA3,
        (90, 99),
        lambda p: p.needs_grad and p.head_dim_v > 128,
    ),
    # forward + backward, causal: B2 S8192 H16 D128 flash-attn-3 .76 + 2.18, hopper .75 + 2.21, flash-attn-4 .84 +
    # 2.46, cudnn .90 + 2.55; full 5.71, 5.85, cudnn 6.31; B8 S2048 .22 + .71, .22 + .74, flash-attn-4 .29 + .72, cudnn
    # .26 + .82; H32/8 D128 5.99, 6.02, cudnn 6.86; H32 D64 S8192 1.00 + 2.41, 1.06 + 2.60, 1.05 + 2.78, 1.20 + 3.23;
    # H16 D96 hopper .73 + 2.13, cudnn .90 + 2.47; H16 D128 with ALiBi hopper 3.54, triton 4.53; window 1024 1.12, 1.36;
    # softcap 4.73, 4.89
    Order(
        ("flash-attn-3", "hopper", "flash-attn-4", "cudnn", "triton", "flash", "flash-attn-2", "efficient", *_REST),
        _H200_FA3,
        (90, 90),
        lambda p: p.needs_grad and _fills_tiles(p),
    ),
    # forward alone, B2 S8192 H32 D64 causal with ALiBi: triton 1.43, hopper 1.92; S1024 .31, .29
    Order(
        ("triton", "hopper", "flash-attn-2", *_REST),
        _H200_FA3,
        (90, 90),
        lambda p: (
            not p.needs_grad and p.mask.alibi and p.lengths.size == "long" and (p.head_dim_qk, p.head_dim_v) == (64, 64)
        ),
    ),
    # forward alone, TFLOP/s, causal: B2 S8192 H16 D128 hopper 734, flash-attn-3 724, cudnn 613; B1 S16384 749, 742,
    # 631; full 732, 725, 674; H32/8 741, 733, 635; packed 685, 650; B8 S2048 621, 619, 524; D192/128 763, 751, 612;
    # H16 D96 hopper .73 ms, cudnn .90
    Order(
        ("hopper", "flash-attn-3", "flash-attn-4", "cudnn", "triton", "flash", "flash-attn-2", "efficient", *_REST),
        _H200_FA3,
        (90, 90),
        lambda p: not p.needs_grad and _fills_tiles(p) and 64 < p.head_dim_v <= 128,
    ),
    # the same: H32 D64 S8192 flash-attn-3 550, hopper 522, cudnn 458; S2048 432, 434, 400; H8 D256 772, 767, 635;
    # D224 hopper .71 ms, cudnn .86; D160 .61, .67
    Order(
        ("flash-attn-3", "hopper", "flash-attn-4", "cudnn", "triton", "flash", "flash-attn-2", "efficient", *_REST),
        _H200_FA3,
        (90, 90),
        lambda p: not p.needs_grad and _fills_tiles(p),
    ),
    # B8 S2048 forward alone: H16 D128 cudnn .272 flash-attn-4 .287, H32 D64 .354 .390
    Order(
        ("cudnn", "flash-attn-3", "flash-attn-4", "hopper", "triton", "flash", "flash-attn-2", "efficient", *_REST),
        _H200,
        (90, 99),
        lambda p: not p.needs_grad and p.lengths.size == "medium" and p.head_dim_v <= 128,
    ),
    # B2 S8192 H16: D128 flash-attn-4 .84 + 2.46, cudnn .89 + 2.78, flash 1.72 + 4.88; D192/128 flash-attn-4 .94 + 3.76,
    # cudnn 1.11 + 3.88; H32 D64 flash-attn-4 1.05 + 2.78, cudnn 1.20 + 3.48; B8 S2048 H16 D128 .29 + .96, .27 + 1.06
    Order(
        ("flash-attn-4", "flash-attn-3", "cudnn", "hopper", "triton", "flash", "flash-attn-2", "efficient", *_REST),
        _H200,
        (90, 99),
    ),
    Order(("flash-attn-2", "flash", "triton", "cudnn", "efficient", *_REST), _PUBLISHED, (80, 89)),
    Order(("flash-attn-4", "cudnn", "triton", "flash", "flash-attn-2", "efficient", *_REST), _PUBLISHED, (100, 119)),
    Order(("flash-attn-2", "flash", "triton", "flash-attn-4", "cudnn", "efficient", *_REST), _PUBLISHED),
)


def order_of(problem: AttentionProblem) -> Order:
    """The order for a problem, all backends in it."""
    for order in ORDERS:
        if order.archs[0] <= problem.arch <= order.archs[1] and order.applies(problem):
            rest = tuple(name for name in BACKENDS if name not in order.names)
            return order._replace(names=order.names + rest)
    raise AssertionError(f"no order for sm_{problem.arch}")


@dataclass(frozen=True)
class Wish:
    """What somebody said about backends: which first, which never, and whether only the first ones."""

    first: tuple[str, ...] = ()
    forbidden: frozenset[str] = frozenset()
    only: bool = False
    asking: bool = False  # `choose` is to say what it was asked, by raising Asked

    @staticmethod
    def parse(names: Iterable[str], who: str, *, only: bool = False) -> "Wish":
        """Names, "-name" to forbid. Raises ValueError for one that is not known."""
        first, forbidden = [], set()
        for name in names:
            plain = name.removeprefix("-")
            if plain not in BACKENDS:
                raise ValueError(f"{who}: backend must be one of {', '.join(BACKENDS)} (or -name), got {name!r}")
            if name.startswith("-"):
                forbidden.add(plain)
            elif plain not in first:
                first.append(plain)
        return Wish(tuple(n for n in first if n not in forbidden), frozenset(forbidden), only and bool(first))

    def within(self, outer: "Wish") -> "Wish":
        """This wish where `outer` holds around it."""
        if self.only:
            return self
        first = self.first + tuple(n for n in outer.first if n not in self.first and n not in self.forbidden)
        return Wish(first, self.forbidden | (outer.forbidden - set(self.first)), outer.only)

    def order(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Names in the order they are tried in."""
        rest = () if self.only else tuple(n for n in names if n not in self.first)
        return tuple(n for n in self.first + rest if n not in self.forbidden)


_NO_WISH = Wish()
_wish: ContextVar[Wish] = ContextVar("attention_backend")


class attention_backend:
    """`with attention_backend("triton", "-flash"):` prefers and forbids backends within, in this thread or task.

    Names are tried first, in that order; "-name" is never taken; all others follow. The choice is made in forward, and
    backward follows it wherever it runs.
    """

    def __init__(self, *names: str) -> None:
        self._own = Wish.parse(names, "attention_backend")
        self._tokens: list[Token[Wish]] = []

    def __enter__(self) -> None:
        self._tokens.append(_wish.set(self._own.within(_wish.get(_NO_WISH))))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _wish.reset(self._tokens.pop())


def wish_of(backend: str | Sequence[str] | None) -> Wish:
    """What the call, the context and the environment say together."""
    around = _wish.get(_NO_WISH).within(Wish.parse(settings().attention, "POWERTRAIN_ATTENTION"))
    if backend is None:
        return around
    return Wish.parse(_names(backend), "attention", only=True).within(around)


def _names(backend: str | Sequence[str]) -> tuple[str, ...]:
    names = (backend,) if isinstance(backend, str) else tuple(backend) if isinstance(backend, (list, tuple)) else ()
    if not names:
        raise ValueError(f"attention: backend must be a name, a list of names or None, got {backend!r}")
    return names


class Asked(Exception):
    """What a call wanted to know, instead of an answer: see `asking`."""

    def __init__(self, problem: AttentionProblem, wish: Wish) -> None:
        super().__init__("a question, not an error")
        self.problem, self.wish = problem, wish


@contextmanager
def asking() -> Iterator[None]:
    """Within, a call of attention stops where a backend would be chosen, and raises Asked."""
    token = _wish.set(replace(_wish.get(_NO_WISH), asking=True))
    try:
        yield
    finally:
        _wish.reset(token)


def nvte_forbids(environment: Mapping[str, str]) -> tuple[str, ...]:
    """What TransformerEngine's switches forbid, as names for `attention_backend`: ("-flash", ...).

    NVTE_FLASH_ATTN=0 every flash attention (NVTE_FLASH_ATTN_V2, _V3 and _V4 one each), NVTE_FUSED_ATTN=0 cuDNN,
    NVTE_UNFUSED_ATTN=0 the reference.
    """
    switches = {
        "NVTE_FLASH_ATTN": ("flash", "flash-attn-2", "flash-attn-3", "flash-attn-4"),
        "NVTE_FLASH_ATTN_V2": ("flash", "flash-attn-2"),
        "NVTE_FLASH_ATTN_V3": ("flash-attn-3",),
        "NVTE_FLASH_ATTN_V4": ("flash-attn-4",),
        "NVTE_FUSED_ATTN": ("cudnn",),
        "NVTE_UNFUSED_ATTN": ("reference",),
    }
    forbidden = [name for switch, names in switches.items() if environment.get(switch) == "0" for name in names]
    return tuple(f"-{name}" for name in dict.fromkeys(forbidden))


class Verdict(NamedTuple):
    """What a selection says of one backend."""

    name: str
    verdict: str  # "chosen", "would do", "forbidden" (it would do otherwise) or "no"
    reasons: tuple[Reason, ...]


def verdicts(problem: AttentionProblem, wish: Wish) -> list[Verdict]:
    """Every backend, those that may be tried first, in order."""
    known = order_of(problem).names
    tried = wish.order(known)
    found, chosen = [], False
    for name in (*tried, *(n for n in known if n not in tried)):
        reasons = tuple(BACKENDS[name].why_not(problem))
        verdict = "no" if reasons else "would do" if name in tried else "forbidden"
        if verdict == "would do" and not chosen:
            verdict, chosen = "chosen", True
        found.append(Verdict(name, verdict, reasons))
    return found


class NoBackendError(PowertrainError):
    """No backend that may run takes the problem. The message has the whole table and the smallest change."""

    def __init__(self, problem: AttentionProblem, found: list[Verdict]) -> None:
        self.problem, self.verdicts = problem, found
        lines = [f"attention: no backend that is allowed takes this problem: {describe(problem)}"]
        for name, verdict, reasons in found:
            if verdict == "forbidden":
                lines.append(
                    f"  {name:13} would do, but backend=, attention_backend or POWERTRAIN_ATTENTION forbids it"
                )
            lines += [f"  {name if first else '':13} {reason}" for first, reason in _firsts(reasons)]
        super().__init__("\n".join([*lines, f"smallest change: {smallest_change(found)}"]))


def _firsts(reasons: tuple[Reason, ...]) -> Iterator[tuple[bool, Reason]]:
    return ((n == 0, reason) for n, reason in enumerate(reasons))


def smallest_change(found: list[Verdict]) -> str:
    """The one step that gives a problem a backend."""
    able = [v.name for v in found if v.verdict == "forbidden"]
    if able:
        return f'allow "{able[0]}"'
    nearest = min(found, key=lambda v: len(v.reasons))
    return f"for {nearest.name}: {'; '.join(reason.fix for reason in nearest.reasons)}"


def describe(p: AttentionProblem) -> str:
    """A problem in a line: its facts that are not the usual ones."""
    dims = str(p.head_dim_qk) if p.head_dim_qk == p.head_dim_v else f"{p.head_dim_qk}/{p.head_dim_v}"
    heads = str(p.num_heads) if not p.is_grouped else f"{p.num_heads}/{p.num_kv_heads}"
    m = p.mask
    mask = [] if not m.is_causal else ["causal, " + ("bottom right" if m.bottom_right else "top left")]
    mask += [f"window ({m.left}, {m.right})"] if m.has_window else []
    mask += [f"chunk {m.chunk}"] if m.chunk else []
    mask += [f"softcap {m.softcap:g}"] if m.softcap else []
    mask += [f"{m.bias} bias{' with gradient' if m.bias_grad else ''}"] if m.bias != "none" else []
    mask += [word for word in ("prefix", "documents", "alibi", "sinks") if getattr(m, word)]
    facts = {
        "padded": p.has_key_lengths,
        "dropout": p.dropout,
        "LSE": p.needs_lse,
        "deterministic": p.deterministic,
        "misaligned": not p.aligned,
        "empty": p.lengths.empty,
        "torch.compile": p.compiling,
    }
    words = [p.where, str(p.dtype).removeprefix("torch."), p.layout, f"heads {heads}", f"head dim {dims}", *mask]
    words += ["forward and backward" if p.needs_grad else "forward", p.lengths.size]
    return ", ".join(words + [word for word, holds in facts.items() if holds])


_decisions: dict[Any, Backend] = {}
_seen: Settings | None = None  # what the decisions were made under


def choose(facts: Any, problem: Callable[[], AttentionProblem], backend: str | Sequence[str] | None = None) -> Backend:
    """The backend for a problem, remembered under its facts (which name the device) and all that steers the choice.

    Raises NoBackendError with the whole table, and ValueError for a backend of no known name.
    """
    global _seen
    now = settings()
    if now is not _seen:
        _decisions.clear()
        _seen = now
    named = backend if backend is None or type(backend) is str else _names(backend)
    key = (facts, named, _wish.get(_NO_WISH), dispatch._disabled, pretended.recorded, pretended.emulated)
    found = _decisions.get(key)
    if found is None:
        wish = wish_of(backend)
        if _wish.get(_NO_WISH).asking:
            raise Asked(problem(), wish)
        found = _decisions[key] = _decide(problem(), wish)
    return found


F = TypeVar("F", bound=Callable[..., Any])


def constant_to_dynamo(function: F) -> F:
    """What torch.compiler.assume_constant_result does, which would import all of torch._dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_to_dynamo
def allows_tf32() -> bool:
    """torch.set_float32_matmul_precision allows products of float32 in TF32."""
    return bool(torch.get_float32_matmul_precision() != "highest")


@constant_to_dynamo
def name_traced(problem: Callable[..., AttentionProblem], backend: Any, *facts: Any) -> str:
    """The name of the backend when torch.compile traces: decided then, and kept for as long as the trace is.

    Facts are those of `choose`, with the fields of mask and lengths in their place: Dynamo takes plain constants only.
    """
    full = full_facts(facts)
    return choose(full, lambda: problem(*full), backend).name


def full_facts(facts: tuple[Any, ...]) -> tuple[Any, ...]:
    """The facts of `choose` from those of `name_traced`."""
    at, after = 4, 4 + len(fields(MaskSpec))
    lengths = facts[-len(fields(Lengths)) :]
    return (*facts[:at], MaskSpec(*facts[at:after]), *facts[after : -len(lengths)], lengths)


def _decide(problem: AttentionProblem, wish: Wish) -> Backend:
    for name in wish.order(order_of(problem).names):
        if next(iter(BACKENDS[name].why_not(problem)), None) is None:
            tracing.event("attention", f"attention by {name}: {describe(problem)}", backend=name, problem=problem)
            return BACKENDS[name]
    raise NoBackendError(problem, verdicts(problem, wish))
