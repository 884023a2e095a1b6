"""The selector: which backend computes the forward and the backward of a problem, and why the others do not.

backend_order.py has the order in which backends are tried, backend_preferences.py the user's preference. Each backend
lists its unmet requirements: `why_not`, and `backward_why_not` for backwards that need only out and LSE. Some
requirements are known only with the tensors of a call (strides, self-tests on a device). If those are not met, the
universal kernels compute the call, and an event reports it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

from powertrain.ops.attention.backend_order import Order, order_of
from powertrain.ops.attention.backend_preferences import (
    BackendPreference,
    DryRun,
    backend_names,
    context_preference,
    current_preference,
)
from powertrain.ops.attention.backend_registry import BACKENDS, SEPARABLE, Backend, backward_why_not
from powertrain.ops.attention.mask import MaskSpec
from powertrain.ops.attention.problem import AttentionProblem, Lengths, Reason, Use
from powertrain.runtime import dispatch, tracing
from powertrain.runtime.errors import PowertrainError
from powertrain.runtime.settings import Settings, settings
from powertrain.runtime.target import pretended


class Decision(NamedTuple):
    """The backends of the forward and of the backward."""

    backend: Backend
    backward: str | None  # its name; None: no gradient is wanted

    @property
    def name(self) -> str:
        """The forward's name."""
        return self.backend.name

    @property
    def other_backward(self) -> str | None:
        """The backward's name if it is not the forward's own."""
        return None if self.backward == self.backend.name else self.backward


_NO_BACKWARD = Reason("no allowed backend can differentiate its result", "allow triton")


def decide(problem: AttentionProblem, preference: BackendPreference) -> Decision | None:
    """The first forward in the order that supports the problem and has a supported backward; None: there is none."""
    order = order_of(problem, preference.forbidden)
    for name in preference.order(order.names):
        # why_not yields every unmet requirement; the first one is enough to pass a backend over
        if next(BACKENDS[name].why_not(problem), None) is None:
            backward = _backward_behind(name, problem, preference, order)
            # a forward that nothing can differentiate is passed over now, rather than failing in backward
            if backward is not None or not problem.needs_grad:
                return Decision(BACKENDS[name], backward)
    return None


def _backward_behind(
    forward: str, problem: AttentionProblem, preference: BackendPreference, order: Order
) -> str | None:
    if not problem.needs_grad:
        return None
    # the backward of a SEPARABLE forward reads out and LSE only, so several backends may provide it; the others are
    # differentiated by themselves
    return _first_backward(_of_output(problem), preference, order.behind(forward)) if forward in SEPARABLE else forward


def _of_output(problem: AttentionProblem) -> AttentionProblem:
    """The problem without a gradient of the LSE: only the backward knows whether a returned LSE gets one."""
    # whether a returned LSE gets a gradient is known in backward only; a backward that cannot take one hands the call
    # to the universal kernels (backends/cudnn_backward.py)
    return replace(problem, needs_lse_grad=False) if problem.needs_lse_grad else problem


def _first_backward(problem: AttentionProblem, preference: BackendPreference, order: tuple[str, ...]) -> str | None:
    able = (n for n in preference.backward_order(order) if next(backward_why_not(n, problem), None) is None)
    return next(able, None)


def decide_backward(problem: AttentionProblem, preference: BackendPreference) -> str:
    """The backend that computes gradients from any forward's out and LSE. The universal kernels if no allowed one can,
    which is reported."""
    # the caller may be under no_grad, as attention_backward is, but a backward is wanted all the same
    problem = replace(problem, needs_grad=True)
    chosen = _first_backward(problem, preference, order_of(problem, preference.forbidden).backwards)
    if chosen is None:
        # reported and not raised: a preference must not take away the only backward there is
        reason = "no other backward supports this call, although triton is forbidden"
        tracing.event("dispatch", f"attention's backward: triton: {reason}", op="attention", backend="triton")
    return chosen or "triton"


def why_other_backward(problem: AttentionProblem, decision: Decision, preference: BackendPreference) -> str:
    """Why the forward's own backward does not run, and why cuDNN's does not where it was measured faster."""
    problem = _of_output(problem)
    order = preference.backward_order(order_of(problem, preference.forbidden).behind(decision.name))
    before = order[: order.index(decision.backward)] if decision.backward in order else order
    reasons = {n: next(backward_why_not(n, problem), None) for n in before}
    words = [f"{name}: {reason.text}" for name, reason in reasons.items() if reason is not None]
    words += [f"{name} is forbidden" for name in ("hopper", "cudnn") if name in preference.forbidden]
    if decision.backward == "cudnn":
        # both reasons are measurements, not unmet requirements: no why_not would say them
        words = ["it is faster at these head dims"]
        words += ["triton where LSE has a gradient"] if problem.needs_lse else []
    return "; ".join(words)


class Verdict(NamedTuple):
    """The outcome of a selection for one backend."""

    name: str
    verdict: str  # "chosen", "supported", "forbidden" (supported, but not allowed) or "no"
    reasons: tuple[Reason, ...]


def verdicts(problem: AttentionProblem, preference: BackendPreference) -> list[Verdict]:
    """A verdict for every backend: first those that may be tried, in order, then the others."""
    order = order_of(problem, preference.forbidden)
    tried = preference.order(order.names)
    results, chosen = [], False
    # forbidden backends are listed last with their reasons, so that the message can tell whether allowing one would
    # help
    for name in (*tried, *(n for n in order.names if n not in tried)):
        reasons = tuple(BACKENDS[name].why_not(problem))
        # a backend that computes this forward, but whose result nothing allowed differentiates, is no use to a training
        # step
        if not reasons and problem.needs_grad and _backward_behind(name, problem, preference, order) is None:
            reasons = (_NO_BACKWARD,)
        verdict = "no" if reasons else "supported" if name in tried else "forbidden"
        if verdict == "supported" and not chosen:
            verdict, chosen = "chosen", True
        results.append(Verdict(name, verdict, reasons))
    able = [v.name for v in results if v.verdict != "no"]
    return [v._replace(reasons=tuple(_possible(reason, able) for reason in v.reasons)) for v in results]


def _possible(reason: Reason, able: list[str]) -> Reason:
    """The reason, whose advice names only backends that support the problem: the first of these if it named none."""
    changes: list[str | Use] = []
    for change in reason.changes:
        if isinstance(change, Use):
            kept = tuple(name for name in change.names if name in able) or tuple(able[:1])
            changes += [change._replace(names=kept)] if kept else []
        else:
            changes.append(change)
    return Reason(reason.text, *changes) if changes else reason


class NoBackendError(PowertrainError):
    """No allowed backend supports the problem. The message has the whole table and the smallest change."""

    def __init__(self, problem: AttentionProblem, results: list[Verdict]) -> None:
        self.problem, self.verdicts = problem, results
        lines = [f"attention: no allowed backend supports this call: {describe(problem)}"]
        for name, verdict, reasons in results:
            if verdict == "forbidden":
                lines.append(
                    f"  {name:13} supported, but forbidden by backend=, attention_backend or POWERTRAIN_ATTENTION"
                )
            lines += [f"  {name if first else '':13} {reason}" for first, reason in _firsts(reasons)]
        super().__init__("\n".join([*lines, f"smallest change: {smallest_change(results)}"]))


def _firsts(reasons: tuple[Reason, ...]) -> Iterator[tuple[bool, Reason]]:
    return ((n == 0, reason) for n, reason in enumerate(reasons))


def smallest_change(results: list[Verdict]) -> str:
    """The smallest change with which a backend supports the problem."""
    able = [v.name for v in results if v.verdict == "forbidden"]
    if able:
        return f'allow "{able[0]}"'
    # no forbidden backend would serve either: the fewest unmet requirements are the shortest list of changes
    nearest = min(results, key=lambda v: len(v.reasons))
    return f"for {nearest.name}: {'; '.join(reason.fix for reason in nearest.reasons)}"


_FEATURES = {"prefix": "prefix", "documents": "documents", "alibi": "ALiBi", "sinks": "sinks"}


def describe(p: AttentionProblem) -> str:
    """A problem in a line. Lengths are rounded to classes, as in `Lengths`."""
    dims = str(p.head_dim_qk) if p.head_dim_qk == p.head_dim_v else f"{p.head_dim_qk} (value {p.head_dim_v})"
    heads = f"heads {p.num_heads}" + (f", KV heads {p.num_kv_heads}" if p.is_grouped else "")
    m = p.mask
    mask = [] if not m.is_causal else ["causal (bottom right)" if m.bottom_right else "causal (top left)"]
    mask += [f"window ({m.left}, {m.right})"] if m.has_window else []
    mask += [f"chunks of {m.chunk}"] if m.chunk else []
    mask += [f"softcap {m.softcap:g}"] if m.softcap else []
    mask += [f"{m.bias} bias{' with gradient' if m.bias_grad else ''}"] if m.bias != "none" else []
    # the values of prefix, documents, slopes and sinks are tensors, on which no choice depends
    mask += [name for field, name in _FEATURES.items() if getattr(m, field)]
    facts = {
        "padded": p.has_key_lengths,
        "dropout": p.dropout,
        "returns LSE": p.needs_lse,
        "deterministic": p.deterministic,
        "not aligned to 16 bytes": not p.aligned,
        "no elements": p.lengths.empty,
        "torch.compile": p.compiling,
    }
    lengths = p.lengths
    keys = f" and {lengths.keys} keys" if lengths.keys != lengths.queries else ""
    parts = [p.where, str(p.dtype).removeprefix("torch."), p.layout, heads, f"head dim {dims}", *mask]
    parts += [
        "forward and backward" if p.needs_grad else "forward",
        f"batch of about {lengths.sequences} x {lengths.queries} queries{keys}",
    ]
    return ", ".join(parts + [fact for fact, holds in facts.items() if holds])


# making a decision asks the backends of an order one after another, a look-up hashes a tuple; keys hold no lengths, so
# training with varying lengths does not fill the table
_decisions: dict[Any, Any] = {}
# compared by identity: settings() returns the same object until the environment is read again
_settings: Settings | None = None  # those the decisions were made under


def choose(facts: Any, problem: Callable[[], AttentionProblem], backend: str | Sequence[str] | None = None) -> Decision:
    """The decision for a problem, cached by its facts (the device among them) and everything else it depends on.

    Raises NoBackendError with the whole table, and ValueError for an unknown name of a backend.
    """
    # the usual cases, None and one name, are hashable already; a list is not
    named = backend if backend is None or type(backend) is str else backend_names(backend)
    key = _key(facts, named)
    decision: Decision | None = _decisions.get(key)
    if decision is None:
        decision = _decisions[key] = _choose(problem, backend)
    return decision


def choose_backward(facts: Any, problem: Callable[[], AttentionProblem], has_lse_grad: bool) -> str:
    """`decide_backward` by context and environment, cached in the same way."""
    key = _key(facts, ("backward", has_lse_grad))
    name: str | None = _decisions.get(key)
    if name is None:
        # `problem` is a function because it is needed on a miss only
        asked = replace(problem(), needs_lse_grad=has_lse_grad)
        name = _decisions[key] = decide_backward(asked, current_preference(None))
    return name


def _key(facts: Any, question: Any) -> tuple[Any, ...]:
    """The key of the cache: all that a decision depends on. Decisions made under other settings are dropped."""
    global _settings
    now = settings()
    if now is not _settings:
        _decisions.clear()
        _settings = now
    # all that `decide` reads besides the problem, so that a `with` block or a disabled op never gets a decision of
    # another context
    return facts, question, context_preference(), dispatch.disabled_ops, pretended.recorded, pretended.emulated


def _choose(problem: Callable[[], AttentionProblem], backend: str | Sequence[str] | None) -> Decision:
    preference, asked = current_preference(backend), problem()
    # explain_attention runs the public function with tensors up to this point and catches the problem, so that it
    # prints facts of the real call
    if context_preference().dry_run:
        raise DryRun(asked, preference)
    decision = decide(asked, preference)
    if decision is None:
        raise NoBackendError(asked, verdicts(asked, preference))
    by = "" if decision.other_backward is None else f", backward by {decision.backward}"
    tracing.event(
        "attention", f"attention by {decision.name}{by}: {describe(asked)}", backend=decision.name, problem=asked,
        backward=decision.backward,
    )  # fmt: skip
    return decision


F = TypeVar("F", bound=Callable[..., Any])


def constant_to_dynamo(function: F) -> F:
    """As torch.compiler.assume_constant_result, which would import all of torch._dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_to_dynamo
def names_traced(problem: Callable[..., AttentionProblem], backend: Any, *facts: Any) -> tuple[str, str | None]:
    """The names of the forward and, if it is another backend, of the backward, decided while torch.compile traces and
    valid as long as the trace.

    `facts` are those of `choose`, with the fields of mask and lengths in their place: Dynamo takes constants only.
    """
    full = full_facts(facts)
    decision = choose(full, lambda: problem(*full), backend)
    return decision.name, decision.other_backward


def full_facts(facts: tuple[Any, ...]) -> tuple[Any, ...]:
    """The facts of `choose` from those of `names_traced`."""
    # four facts come ahead of the mask: dtype, both head dims, device (the fields of api.Facts)
    at, after = 4, 4 + len(fields(MaskSpec))
    lengths = facts[-len(fields(Lengths)) :]
    return (*facts[:at], MaskSpec(*facts[at:after]), *facts[after : -len(lengths)], lengths)
