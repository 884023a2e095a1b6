"""Limits of other libraries' kernels as data, from which the unmet requirements of a problem follow."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from powertrain.ops.attention.backends.versions import Installed, installed
from powertrain.ops.attention.problem import AttentionProblem, Layout, Reason, Use, use
from powertrain.runtime import checks

HALF = (torch.float16, torch.bfloat16)


def ours(problem: AttentionProblem) -> str:
    """Our backend for problems that other backends do not support."""
    return "chunked" if problem.target is None else "triton"


@dataclass(frozen=True)
class Limits:
    """The problems that a backend supports. The defaults are the most restrictive."""

    # the defaults are the narrowest: a backend lists the features it supports, so a forgotten field refuses
    name: str  # in reasons
    dtypes: tuple[torch.dtype, ...] = HALF
    archs: tuple[int, int] = (80, 121)  # first and last; (0, 0): the CPU
    head_dim: int = 256
    head_dim_multiple: int = 8
    head_dims_differ: bool = False
    layouts: tuple[Layout, ...] = ("bshd", "bhsd", "sbhd")
    grouped: bool = True
    bottom_right: bool = True  # also if the numbers of queries and keys differ
    top_left: bool = False  # likewise
    window: bool = False
    alibi: bool = False
    softcap: bool = False
    sinks: bool = False
    bias: bool = False
    dropout: bool = False
    grad: bool = True
    deterministic: bool = False  # backward
    aligned: bool = True  # needs addresses and strides that are multiples of 16 bytes
    empty: bool = False
    large: bool = False  # more than 65535 sequences, or 2^31 elements
    compiles: bool = True  # torch.compile can trace it

    def why_not(self, p: AttentionProblem) -> Iterator[Reason]:
        """Every unmet requirement of this backend."""
        yield from self._where(p)
        yield from self._shape(p)
        yield from self._mask(p)
        yield from self._run(p)

    def _where(self, p: AttentionProblem) -> Iterator[Reason]:
        first, last = self.archs
        if not first <= p.arch <= last:
            if first == 0:
                yield Reason(f"{self.name} runs on the CPU only, got {p.where}", use(ours(p)))
            elif p.target is None:
                yield Reason(f"{self.name} runs on a GPU only, got the CPU", use("cpu", "chunked"), "move to a GPU")
            else:
                span = f"sm_{first} to sm_{last}" if last > first else f"sm_{first}"
                yield Reason(f"{self.name} runs on {span}, got {p.where}", use(ours(p)))
        if p.dtype not in self.dtypes:
            takes = " or ".join(checks.name(dtype) for dtype in self.dtypes)
            other = "reference" if p.dtype is torch.float64 else "triton"
            yield Reason(f"{self.name} takes {takes}, got {checks.name(p.dtype)}", use(other), "convert to one")
        if p.layout not in self.layouts:
            others = {
                "bmghk": ("merge groups and heads where they are not expanded: x.flatten(2, 3)",),
                "thd": ("sequences of one length as a batch (bshd)",),
            }.get(p.layout, ())
            yield Reason(f"{self.name} takes layouts {', '.join(self.layouts)}, got {p.layout}", use(ours(p)), *others)

    def _shape(self, p: AttentionProblem) -> Iterator[Reason]:
        d, dv, multiple = p.head_dim_qk, p.head_dim_v, self.head_dim_multiple
        if max(d, dv) > self.head_dim:
            which, got = ("head_dim_qk", d) if d >= dv else ("head_dim_v", dv)
            text = f"{self.name} takes {which} up to {self.head_dim}, got {got}"
            yield Reason(text, use(ours(p)), f"a head dim of {self.head_dim}")
        if d % multiple or dv % multiple:
            text = f"{self.name} takes head dims that are multiples of {multiple}, got {d} and {dv}"
            yield Reason(text, use(ours(p)), f"head dims of {-d % multiple + d} and {-dv % multiple + dv}")
        if d != dv and not self.head_dims_differ:
            yield Reason(f"{self.name} takes equal head dims, got {d} for query and key, {dv} for value", use(ours(p)))
        if p.is_grouped and not self.grouped:
            yield Reason(
                f"{self.name} takes as many KV heads as query heads, got {p.num_kv_heads} and {p.num_heads}",
                use(ours(p)),
            )
        if p.lengths.empty and not self.empty:
            yield Reason(f"{self.name} takes no empty tensors", use(ours(p)))
        if p.lengths.large and not self.large:
            text = f"{self.name} is not used for more than 65535 sequences or tensors of 2^31 elements"
            yield Reason(text, use(ours(p)), "split the batch")
        if not p.aligned and self.aligned:
            text = f"{self.name} takes addresses and strides that are multiples of 16 bytes"
            yield Reason(text, use(ours(p)), ".contiguous() tensors with head dims that are multiples of 8")
        if p.has_key_lengths:
            yield Reason(f"{self.name} takes no padded sequences (a length per sequence)", use(ours(p)))

    def _mask(self, p: AttentionProblem) -> Iterator[Reason]:
        m = p.mask
        # with equal lengths both alignments are the same mask
        if m.is_positional and not p.lengths.equal and not (self.bottom_right if m.bottom_right else self.top_left):
            corner = "bottom right" if m.bottom_right else "top left"
            text = f"{self.name} does not align masks {corner} where the numbers of queries and keys may differ"
            yield Reason(text, use(ours(p)), "as many queries as keys", "the other causal_align")
        given = {
            "sliding windows": m.has_window and not self.window,
            "chunks": m.chunk > 0,
            "prefixes": m.prefix,
            "documents": m.documents,
            "ALiBi slopes": m.alibi and not self.alibi,
            "softcap": m.softcap > 0 and not self.softcap,
            "sinks": m.sinks and not self.sinks,
            "dense masks": m.bias == "bool" and not self.bias,
            "dense biases": m.bias == "float" and not self.bias,
        }
        for feature, unmet in given.items():
            if unmet:
                yield Reason(f"{self.name} has no {feature}", use(ours(p)))
        if m.bias_grad:
            yield Reason(f"{self.name} gives no gradient of a dense bias", use(ours(p)), "a bias without gradient")

    def _run(self, p: AttentionProblem) -> Iterator[Reason]:
        if p.dropout and not self.dropout:
            yield Reason(f"{self.name} has no dropout", use(ours(p)), "dropout_p=0")
        if p.dropout and p.dropout_seeded:
            yield Reason(f"{self.name} draws dropout from a seed of its own", use(ours(p)), "no dropout_seed")
        if p.needs_grad and not self.grad:
            yield Reason(f"{self.name} has no backward on {p.where}", use(ours(p)), "torch.no_grad()")
        # other libraries return the LSE as a statistic, without gradient
        if p.needs_lse_grad:
            text = f"{self.name}'s LSE cannot be differentiated"
            yield Reason(text, use(ours(p)), "return_lse without gradients")
        if p.deterministic and p.needs_grad and not self.deterministic:
            yield Reason(f"{self.name}'s backward is not deterministic", use(ours(p)), "deterministic=False")
        if p.compiling and not self.compiles:
            yield Reason(f"{self.name} cannot be traced by torch.compile", use(ours(p)), "call it outside")


@dataclass(frozen=True)
class KnownBad:
    """A defect of a release of another library, avoided by not choosing it."""

    text: str
    changes: tuple[str | Use, ...]
    # a source is required, so that the entry can be removed when the defect is fixed
    source: str  # bug report, or the library's own check
    applies: Callable[[AttentionProblem, Installed], bool]

    def reason(self) -> Reason:
        return Reason(f"{self.text} ({self.source})", *self.changes)


def known_bad(entries: tuple[KnownBad, ...], problem: AttentionProblem) -> Iterator[Reason]:
    """A reason for each defect that affects the problem."""
    here = installed()
    for entry in entries:
        if entry.applies(problem, here):
            yield entry.reason()
