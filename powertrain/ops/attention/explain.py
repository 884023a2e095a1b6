"""Why a backend is chosen and why the others are not, for the GPUs of this machine or any other."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.attention import api, select
from powertrain.ops.attention.backend_order import Order, order_of
from powertrain.ops.attention.backend_preferences import BackendPreference, DryRun, dry_run
from powertrain.ops.attention.backends.versions import Installed, assume, installed, with_cuda
from powertrain.ops.attention.problem import LAYOUTS, AttentionProblem, Layout
from powertrain.ops.attention.select import Verdict
from powertrain.runtime import checks
from powertrain.runtime.positional import hinted
from powertrain.runtime.target import Target


@dataclass(frozen=True)
class Column:
    """One GPU (or the CPU): its problem, and every backend's verdict."""

    name: str
    problem: AttentionProblem
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    backward: str | None = None  # the backend that differentiates the result of `chosen`; None: no gradient
    sources: tuple[str, ...] = ()  # files of the measurements behind the estimated times

    @property
    def chosen(self) -> str | None:
        return next((v.name for v in self.verdicts if v.verdict == "chosen"), None)


@dataclass(frozen=True)
class Explanation:
    """A row per backend, a column per GPU; `str()` is the table with the reasons under it."""

    columns: tuple[Column, ...]

    @property
    def chosen(self) -> str | None:
        """The chosen backend's name, on the first GPU; None: there is none."""
        return self.columns[0].chosen

    @property
    def backward(self) -> str | None:
        """The backend of the backward on the first GPU, mostly `chosen` itself; None: no gradient is wanted."""
        return self.columns[0].backward

    @property
    def by_gpu(self) -> dict[str, str | None]:
        return {column.name: column.chosen for column in self.columns}

    def __str__(self) -> str:
        # columns may list backends in different orders; a row per name in the order of the first
        rows = list(dict.fromkeys(v.name for column in self.columns for v in column.verdicts))
        width = max(len(row) for row in rows) + 2
        lines = [line for column in self.columns for line in _heading(column)]
        lines += ["", " " * width + "  ".join(f"{column.name:12}" for column in self.columns)]
        for row in rows:
            cells = [next((v.verdict for v in c.verdicts if v.name == row), "") for c in self.columns]
            lines.append(f"{row:{width}}" + "  ".join(f"{cell:12}" for cell in cells))
        lines += ["", *_why_not(self.columns, rows), *_sources(self.columns)]
        return "\n".join(line.rstrip() for line in lines).rstrip()


def _heading(column: Column) -> list[str]:
    return [f"{column.name}: {select.describe(column.problem)}", *(f"  {note}" for note in column.notes)]


def _why_not(columns: tuple[Column, ...], rows: list[str]) -> list[str]:
    """Every reason with its fix, by backend."""
    lines = []
    for row in rows:
        reasons = {c.name: [str(r) for v in c.verdicts if v.name == row for r in v.reasons] for c in columns}
        lines += _by_gpu(f"why not {row}:", reasons)
    return lines


def _sources(columns: tuple[Column, ...]) -> list[str]:
    return _by_gpu("estimated from measurements in:", {c.name: c.sources for c in columns})


def _by_gpu(title: str, texts: Mapping[str, Sequence[str]]) -> list[str]:
    """The title and each text once, with the names of its GPUs where it does not hold on all; no text: nothing."""
    names: dict[str, list[str]] = {}
    for gpu, its_texts in texts.items():
        for text in its_texts:
            names.setdefault(text, []).append(gpu)
    lines = [
        f"  {text}" if len(gpus) == len(texts) else f"  [{', '.join(gpus)}] {text}" for text, gpus in names.items()
    ]
    return [title, *lines] if lines else []


@hinted
def explain_attention(
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    arch: str | Sequence[str] = (),
    dtype: torch.dtype = torch.bfloat16,
    layout: Layout = "bshd",
    head_dim_qk: int = 128,
    head_dim_v: int | None = None,
    num_heads: int = 16,
    num_kv_heads: int | None = None,
    batch: int = 2,
    queries: int = 4096,
    keys: int | None = None,
    needs_grad: bool = True,
    software: Installed | None = None,
    **arguments: Any,
) -> Explanation:
    """Which backend computes an attention call, and why the others do not. Needs no GPU and computes nothing.

    query, key, value  tensors of a call; or none of them, and sizes instead: dtype to needs_grad
    arch               GPUs to answer for, "A100" or "sm_80", or "cpu"; default: the tensors' device, else the CPU
    software           versions to answer for; default: the installed ones (cuDNN 9.19 where PyTorch has no CUDA)
    arguments          those of `attention`, or of `varlen_attention` for layout thd; a tensor (attn_bias,
                       alibi_slopes, sinks, seqused_k ...) may be given as True, attn_bias also as "bool" or "float"
    Raises ValueError as the call itself would.
    """
    # without tensors the same code runs on tensors of device meta
    if query is None or key is None or value is None:
        head_dim_v = head_dim_qk if head_dim_v is None else head_dim_v
        query, key, value, arguments = _stand_ins(
            dtype, layout, head_dim_qk, head_dim_v, num_heads, num_kv_heads, batch, queries,
            queries if keys is None else keys, needs_grad, arguments,
        )  # fmt: skip
        names = ["cpu"]
    else:
        names = [str(query.device)]
    names = [arch] if isinstance(arch, str) else list(arch) or names
    columns = []
    for name in names:
        # an answer about a GPU from a machine without CUDA assumes the wheel's cuDNN instead of none
        given = software or (installed() if name == "cpu" else with_cuda(installed()))
        with ExitStack() as stack:
            # archs of this machine's GPUs are facts of this process, not of the GPU that was named
            stack.enter_context(assume(replace(given, archs=()) if arch else given))
            problem, preference = ask(query, key, value, layout, arguments)
            if name == "cpu" or arch:
                # the problem was found on the tensors' device; only its target is exchanged
                problem = replace(problem, target=None if name == "cpu" else Target.parse(name))
            columns.append(_column(name, problem, preference, given))
    return Explanation(tuple(columns))


def ask(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, arguments: dict[str, Any]
) -> tuple[AttentionProblem, BackendPreference]:
    """The problem that a call poses, found by calling and stopping where a backend would be chosen."""
    # the call itself, checks included, so that an explanation cannot differ from what the call does
    with dry_run():
        try:
            if layout == "thd" or "cu_seqlens_q" in arguments:
                api.varlen_attention(query, key, value, **arguments)
            else:
                api.attention(query, key, value, layout=layout, **arguments)
        except DryRun as stopped:
            return stopped.problem, stopped.preference
    raise AssertionError("attention chose no backend")


def _column(name: str, problem: AttentionProblem, preference: BackendPreference, given: Installed) -> Column:
    results = tuple(select.verdicts(problem, preference))
    order = order_of(problem, preference.forbidden)
    notes = [f"order: {order.reason}", *_estimates(order, problem)]
    if problem.target is not None:
        notes.append(f"with {given}")
    decision = select.decide(problem, preference)
    if decision is None:
        notes.append(f"no allowed backend supports the call; smallest change: {select.smallest_change(list(results))}")
        return Column(name, problem, results, tuple(notes), sources=order.sources)
    # a backend may have a note besides its limits: flash-attn-4 compiles at its first call
    if note := getattr(decision.backend, "note", None):
        notes.append(f"{decision.name}: {note}")
    if decision.other_backward is not None:
        why = select.why_other_backward(problem, decision, preference)
        notes.append(f"forward by {decision.name}, backward by {decision.backward}: {why}")
    return Column(name, problem, results, tuple(notes), decision.backward, order.sources)


def _estimates(order: Order, problem: AttentionProblem) -> list[str]:
    """A line of estimated milliseconds of the measured backends, the fastest first."""
    costs = {name: estimate.cost(problem.needs_grad) for name, estimate in order.estimates.items()}
    known = sorted((cost, name) for name, cost in costs.items() if cost is not None)
    estimated = []
    for _, name in known:
        passes = order.estimates[name][: 2 if problem.needs_grad else 1]
        estimated.append(f"{name} {' + '.join(f'{ms:.3f}' for ms in passes if ms is not None)}")
    unit = "ms, forward + backward" if problem.needs_grad else "ms, forward"
    return [f"estimated {unit}: {', '.join(estimated)}"] if estimated else []


# a letter per dim: b batch, h heads, q queries, k keys, c batch + 1
_SHAPES = {
    "prefix_lengths": "b", "seqused_q": "b", "seqused_k": "b",
    "alibi_slopes": "h", "sinks": "h", "document_ids": "bq", "attn_bias": "11qk", "cu_seqlens_q_padded": "c",
    "cu_seqlens_k_padded": "c", "dropout_seed": "2",
}  # fmt: skip


def _stand_ins(
    dtype: torch.dtype, layout: Layout, head_dim_qk: int, head_dim_v: int, heads: int, kv_heads: int | None, batch: int,
    queries: int, keys: int, needs_grad: bool, arguments: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:  # fmt: skip
    """Tensors without memory (`meta`) for a call of these facts, and its arguments with those that were True filled."""
    checks.one_of("explain_attention", "layout", layout, LAYOUTS)
    kv_heads = heads if kv_heads is None else kv_heads
    # whose heads share the keys
    counts = {"head_dim_qk": head_dim_qk, "head_dim_v": head_dim_v, "num_heads": heads, "num_kv_heads": kv_heads,
              "batch": batch, "queries": queries, "keys": keys}  # fmt: skip
    for name, count in counts.items():
        least = 0 if name in ("batch", "queries", "keys") else 1
        checks.require(count >= least, "explain_attention", name, f"be at least {least}", count)
    groups = kv_heads if layout == "bmghk" else 1
    if groups < 1 or heads % groups:
        checks.fail("explain_attention", "num_heads", f"be a multiple of num_kv_heads {groups}", heads)
    order = {"bhsd": "bhs", "sbhd": "sbh", "thd": "th", "bmghk": "bsgh"}.get(layout, "bsh")

    def tensor(length: int, heads: int, dim: int) -> Tensor:
        sizes = {"b": batch, "h": heads // groups, "s": length, "t": batch * length, "g": groups}
        shape = [*(sizes[letter] for letter in order), dim]
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=needs_grad)

    # the 5-D layout has as many key heads as query heads, expanded in the group
    kv_heads = heads if layout == "bmghk" else kv_heads
    sizes = {"b": batch, "h": heads, "q": queries, "k": keys, "1": 1, "2": 2, "c": batch + 1}
    filled = dict(arguments)
    for name, given in arguments.items():
        if name in _SHAPES and (given is True or isinstance(given, str)):
            kind = {"attn_bias": torch.bool if given == "bool" else dtype, "alibi_slopes": torch.float32}.get(
                name, torch.float32 if name == "sinks" else torch.int64 if name == "dropout_seed" else torch.int32
            )
            filled[name] = torch.empty([sizes[letter] for letter in _SHAPES[name]], dtype=kind, device="meta")
    if layout == "thd":
        starts = torch.empty(batch + 1, dtype=torch.int32, device="meta")
        filled.setdefault("cu_seqlens_q", starts)
        if keys != queries:
            filled.setdefault("cu_seqlens_k", torch.empty_like(starts))
        # flash-2 launches by them, and a real call has them at hand
        filled.setdefault("max_seqlen_q", queries)
        filled.setdefault("max_seqlen_k", keys)
    return (
        tensor(queries, heads, head_dim_qk), tensor(keys, kv_heads, head_dim_qk), tensor(keys, kv_heads, head_dim_v),
        filled,
    )  # fmt: skip
