"""Which backends the user prefers, forbids or names alone: `backend=`, `attention_backend`, POWERTRAIN_ATTENTION.

The nearer of the three wins. "-name" forbids. Names in `backend=` are an exact list: only these compute the forward,
tried in that order (a list of "-name" alone forbids and leaves the rest). Names given to the context or the environment
are preferred: tried first, in that order, before all others. An inner setting may
allow a backend that an outer one forbids. A forbidden backend does not differentiate either.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from types import TracebackType

from powertrain.ops.attention.backend_registry import BACKENDS
from powertrain.ops.attention.problem import AttentionProblem
from powertrain.runtime.settings import settings


@dataclass(frozen=True)
class BackendPreference:
    """Backend preferences: tried first, forbidden, exclusive."""

    first: tuple[str, ...] = ()
    forbidden: frozenset[str] = frozenset()
    only: bool = False  # no forward but those of `first`
    dry_run: bool = False  # `choose` raises DryRun instead of choosing

    @staticmethod
    def parse(names: Iterable[str], who: str, *, only: bool = False) -> "BackendPreference":
        """Names, "-name" to forbid. Raises ValueError for an unknown one."""
        first, forbidden = [], set()
        for name in names:
            # one syntax for argument, context and environment: a string can say "never" too
            plain = name.removeprefix("-")
            if plain not in BACKENDS:
                raise ValueError(f"{who}: backend must be one of {', '.join(BACKENDS)} (or -name), got {name!r}")
            if name.startswith("-"):
                forbidden.add(plain)
            elif plain not in first:
                first.append(plain)
        # a name that is both listed and forbidden in one place is forbidden
        allowed = tuple(name for name in first if name not in forbidden)
        # a list of "-name" alone is no list of names: it only forbids
        return BackendPreference(allowed, frozenset(forbidden), only and bool(first))

    def within(self, outer: "BackendPreference") -> "BackendPreference":
        """This preference inside the scope of `outer`."""
        # the nearer setting wins: naming a backend lifts an outer ban
        forbidden = self.forbidden | (outer.forbidden - set(self.first))
        if self.only:
            return BackendPreference(self.first, forbidden, True)
        # outer preferences follow the inner ones instead of vanishing
        first = self.first + tuple(n for n in outer.first if n not in self.first and n not in self.forbidden)
        return BackendPreference(first, forbidden, outer.only)

    def order(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Forwards in the order in which they are tried."""
        return self.first if self.only else self.backward_order(names)

    # `backend="cudnn"` says who computes the forward; a backward of another backend is allowed with it
    def backward_order(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Backwards in the order in which they are tried: an exact list of forwards does not limit them."""
        first = tuple(n for n in self.first if n in names)
        rest = tuple(n for n in names if n not in first)
        return tuple(n for n in first + rest if n not in self.forbidden)


_NO_PREFERENCE = BackendPreference()
# a context variable and not a global: threads and asyncio tasks have preferences of their own
_current: ContextVar[BackendPreference] = ContextVar("attention_backend")


class attention_backend:
    """`with attention_backend("triton", "-flash"):` prefers and forbids backends within, in this thread or task.

    Names are tried first, in that order; "-name" is never taken; all others follow. The choice is made in forward, and
    backward follows it wherever it runs.
    """

    def __init__(self, *names: str) -> None:
        self._own = BackendPreference.parse(names, "attention_backend")
        # a stack, so that one object may be entered again inside itself
        self._tokens: list[Token[BackendPreference]] = []

    def __enter__(self) -> None:
        self._tokens.append(_current.set(self._own.within(context_preference())))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.reset(self._tokens.pop())


def context_preference() -> BackendPreference:
    """The preference of the enclosing contexts, without environment and call."""
    return _current.get(_NO_PREFERENCE)


def preference_or_none() -> BackendPreference | None:
    """`context_preference`, cheap to hash where no context is."""
    return _current.get(None)


def current_preference(backend: str | Sequence[str] | None) -> BackendPreference:
    """The preference of call, contexts and environment together."""
    around = context_preference().within(BackendPreference.parse(settings().attention, "POWERTRAIN_ATTENTION"))
    if backend is None:
        return around
    return BackendPreference.parse(backend_names(backend), "attention", only=True).within(around)


def backend_names(backend: str | Sequence[str]) -> tuple[str, ...]:
    """`backend=` as a tuple of names. Raises ValueError if it is no name and no list of names."""
    # a string is a sequence too, of letters
    names = (backend,) if isinstance(backend, str) else tuple(backend) if isinstance(backend, (list, tuple)) else ()
    if not names:
        raise ValueError(f"attention: backend must be a name, a list of names or None, got {backend!r}")
    return names


# an exception stops the public function at the choice, without a second path through the checks
class DryRun(Exception):
    """The problem and the preferences of a call that was stopped before its choice: see `dry_run`."""

    def __init__(self, problem: AttentionProblem, preference: BackendPreference) -> None:
        super().__init__("a dry run, not an error")
        self.problem, self.preference = problem, preference


@contextmanager
def dry_run() -> Iterator[None]:
    """Within, a call of attention raises DryRun where it would choose a backend."""
    # set on top of the current preference, so that explanations see what surrounds them
    token = _current.set(replace(context_preference(), dry_run=True))
    try:
        yield
    finally:
        _current.reset(token)


def nvte_forbids(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Backends that TransformerEngine's switches forbid, as names for `attention_backend`: ("-flash", ...).

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
    # TransformerEngine reads "0" as off and anything else as on
    forbidden = [name for switch, names in switches.items() if environment.get(switch) == "0" for name in names]
    # two switches may forbid the same backend
    return tuple(f"-{name}" for name in dict.fromkeys(forbidden))
