"""xFormers' operators as names: `op=` takes them, and each stands for backends of ours."""

from types import SimpleNamespace
from typing import ClassVar

from powertrain.runtime import checks


class AttentionOpBase:
    """An operator: a name of xFormers', and the backends it stands for, best first."""

    NAME: ClassVar[str]
    BACKENDS: ClassVar[tuple[str, ...]]


class AttentionFwOpBase(AttentionOpBase):
    """A forward operator."""


class AttentionBwOpBase(AttentionOpBase):
    """A backward operator: with us the backend of the forward, which it must name too."""


AttentionOp = tuple[type[AttentionFwOpBase] | None, type[AttentionBwOpBase] | None]


def _family(name: str, *backends: str) -> SimpleNamespace:
    ops = {"FwOp": (AttentionFwOpBase, f"{name}F"), "BwOp": (AttentionBwOpBase, f"{name}B")}
    return SimpleNamespace(
        **{op: type(op, (base,), {"NAME": full, "BACKENDS": backends}) for op, (base, full) in ops.items()}
    )


cutlass = _family("cutlass", "efficient")
flash = _family("fa2", "flash-attn-2", "flash")
flash3 = _family("fa3", "flash-attn-3")
triton_splitk = _family("triton_splitK", "triton")

ALL_FW_OPS = tuple(family.FwOp for family in (flash3, flash, cutlass, triton_splitk))
ALL_BW_OPS = tuple(family.BwOp for family in (flash3, flash, cutlass))
MemoryEfficientAttentionCutlassOp = (cutlass.FwOp, cutlass.BwOp)
MemoryEfficientAttentionFlashAttentionOp = (flash.FwOp, flash.BwOp)


def backends_of(op: AttentionOp | type[AttentionOpBase] | None) -> tuple[str, ...] | None:
    """`op` as a value of `backend=`; None: the best available."""
    named = [one for one in (op if isinstance(op, tuple) else (op,)) if one is not None]
    for one in named:
        if not (isinstance(one, type) and issubclass(one, AttentionOpBase)):
            names = ", ".join(f"fmha.{name}" for name in ("cutlass", "flash", "flash3", "triton_splitk"))
            checks.fail("memory_efficient_attention", "op", f"be (FwOp, BwOp) of one of {names}, or None", one)
    backends = {one.BACKENDS for one in named}
    # a pair of two operators would need a forward whose state another backward reads
    if len(backends) > 1:
        got = " and ".join(one.NAME for one in named)
        checks.fail("memory_efficient_attention", "op", "name one operator forward and backward (or None for one)", got)
    return backends.pop() if backends else None
