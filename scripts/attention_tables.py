"""`python scripts/attention_tables.py`: write the tables of docs/attention.md, from the code that they are about.

A table stands between the lines `<!-- made: NAME -->` and `<!-- end -->`; NAME is a function of this file.
tests/test_docs.py fails where a table is not what the code says.
"""

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from powertrain.compat.transformer_engine.pytorch.attention import dot_product_attention as transformer_engine
from powertrain.compat.xformers.ops.fmha import attn_bias
from powertrain.ops.attention.backend_order import Order, order_of
from powertrain.ops.attention.backend_registry import _ALL
from powertrain.ops.attention.backends import flash_attn, sdpa
from powertrain.ops.attention.backends.requirements import Limits
from powertrain.ops.attention.backends.versions import Installed, assume
from powertrain.ops.attention.mask import MaskSpec
from powertrain.ops.attention.problem import AttentionProblem, Lengths
from powertrain.runtime import checks
from powertrain.runtime.target import Target

BACKENDS = {backend.name: backend for backend in _ALL}  # without what a test may have added
PAGE = Path(__file__).resolve().parent.parent / "docs" / "attention.md"
ARCHS = (75, 80, 86, 89, 90, 100, 103, 120)
EVERYTHING = Installed(
    (2, 11), True, 91900, (("flash-attn", "2.8.3"), ("flash-attn-3", "3.0.0"), ("flash-attn-4", "4.0.0"))
)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: str) -> str:
    return f"`{text}`"


def transformer_engine_masks() -> str:
    """attn_mask_type to our arguments, by the function that lowers it."""
    rows = []
    for name in transformer_engine._MASKS:
        ours = transformer_engine._positions(name, None, None)
        words = ["is_causal=True", f'causal_align="{ours["causal_align"]}"'] if ours["window_size"][1] == 0 else []
        words += ["seqused_q, seqused_k, or cu_seqlens_q, cu_seqlens_k"] if "padding" in name else []
        words += ["attn_bias (bool, True: seen; there True: masked out)"] if name == "arbitrary" else []
        rows.append((code(name), ", ".join(words) or "nothing"))
    return table(("`attn_mask_type`", "here"), rows)


class _Symbol(int):
    """A number that is written as it was computed."""

    def __new__(cls, text: str) -> "_Symbol":
        number = super().__new__(cls, 100)
        number.text = text
        return number

    text: str

    def __sub__(self, other: int) -> "_Symbol":
        return _Symbol(f"{self} - {other}")

    def __str__(self) -> str:
        return self.text


def xformers_masks() -> str:
    """Every attn_bias class, by its band."""
    rows = []
    for name, kind in vars(attn_bias).items():
        if not inspect.isclass(kind) or not issubclass(kind, attn_bias.AttentionBias) or name.startswith("_"):
            continue
        if kind in (attn_bias.AttentionBias, attn_bias.BlockBias, attn_bias.PagedBias):  # bases
            continue
        bias = object.__new__(kind)
        numbers = {"_window_size": "n", "window_left": "left", "window_right": "right"}
        vars(bias).update({field: _Symbol(letter) for field, letter in numbers.items()})
        rows.append((code(name), _band(bias.band), _storage(kind)))
    return table(("class", "in a sequence", "sequences"), rows)


def _band(band: attn_bias.Band) -> str:
    left, right, bottom_right = band
    corner = "bottom right" if bottom_right else "top left"
    if isinstance(left, _Symbol) or isinstance(right, _Symbol):
        return f"window ({left}, {right}), {corner}"
    return f"causal, {corner}" if right == 0 else "all keys"


def _storage(kind: type) -> str:
    words = [
        word for base, word in (("Gappy", "keys anywhere"), ("PaddedKeys", "padded keys")) if base in kind.__name__
    ]
    words += ["in pages"] if issubclass(kind, attn_bias.PagedBias) else []
    packed = issubclass(kind, attn_bias.BlockBias)
    words += ["a float bias added"] if kind.HOLDS_DENSE_TENSOR else []  # type: ignore[attr-defined]
    return ", ".join(words) or ("packed" if packed else "a batch")


def limits() -> str:
    """What each backend takes at the most; the known faults below take from it."""
    rows = []
    for name, backend in BACKENDS.items():
        found = getattr(backend, "limits", None)
        rows.append((code(name), *(_taken(found) if isinstance(found, Limits) else _ours(name))))
    return table(("backend", "GPUs", "dtypes", "head dims", "layouts", "masks and dropout", "backward"), rows)


def _taken(given: Limits) -> tuple[str, ...]:
    first, last = given.archs
    span = "the CPU" if last == 0 else f"sm_{first}" if first == last else f"sm_{first} to sm_{last}"
    dims = f"to {given.head_dim}" + (f", multiples of {given.head_dim_multiple}" if given.head_dim_multiple > 1 else "")
    dims += ", v apart" if given.head_dims_differ else ""
    masks = {
        "bottom right": given.bottom_right, "top left": given.top_left, "windows": given.window, "ALiBi": given.alibi,
        "softcap": given.softcap, "sinks": given.sinks, "dense masks without gradient": given.bias,
        "dropout": given.dropout,
    }  # fmt: skip
    return (
        span,
        ", ".join(_short(dtype) for dtype in given.dtypes),
        dims,
        ", ".join(given.layouts),
        ", ".join(["causal", *(word for word, takes in masks.items() if takes)]),
        "deterministic if asked" if given.deterministic else "not deterministic",
    )


def _short(dtype: torch.dtype) -> str:
    return checks.name(dtype).replace("bfloat", "bf").replace("float", "fp")


def _ours(name: str) -> tuple[str, ...]:
    if name == "hopper":
        layouts, masks = "bshd, bhsd, sbhd, thd", "causal, bottom right, top left, windows, ALiBi, softcap, sinks"
        return (
            "sm_90",
            "fp16, bf16",
            "to 256, or both of 257 to 512 (backward: both the same); v apart and a multiple of 8",
            layouts,
            masks,
            "deterministic if asked",
        )
    where, dtypes = ("all", "fp16, bf16, fp32") if name == "triton" else ("all, and the CPU", "these and fp64")
    return where, dtypes, "to 512, v apart", "all", "all", "deterministic"


def head_dims() -> str:
    """The widest head dim each backend trains and infers with per arch, asked of its `why_not`."""
    names = [name for name in BACKENDS if name not in ("cpu", "chunked", "reference")]
    rows = [(f"sm_{arch}", *(_widest(name, arch) for name in names)) for arch in ARCHS]
    return table(("", *map(code, names)), rows)


def _widest(name: str, arch: int) -> str:
    dtype = torch.float16 if arch < 80 else torch.bfloat16

    def takes(d: int, dv: int, needs_grad: bool) -> bool:
        mask = MaskSpec(right=0, bottom_right=True)
        problem = AttentionProblem(dtype, d, dv, Target.parse(f"sm_{arch}"), mask, needs_grad=needs_grad)
        return not list(BACKENDS[name].why_not(problem))

    cells = []
    with assume(EVERYTHING):
        for needs_grad in (True, False):
            equal = [d for d in range(16, 513, 16) if takes(d, d, needs_grad)]
            gaps = [d for d in range(16, max(equal, default=0), 16) if d not in equal]
            words = [_spans(equal)] if gaps else [str(max(equal))] if equal else []
            words += ["192/128"] if takes(192, 128, needs_grad) else []
            cells.append(", ".join(words) or "-")
    return cells[0] if cells[0] == cells[1] else f"{cells[0]}; inference {cells[1]}"


def _spans(dims: list[int]) -> str:
    """ "16-192, 256": multiples of 16, runs of them as their ends."""
    runs: list[list[int]] = []
    for d in dims:
        if runs and d == runs[-1][-1] + 16:
            runs[-1].append(d)
        else:
            runs.append([d])
    if len(runs) > 2:
        return f"multiples of {dims[1] - dims[0]} to {dims[-1]}"
    return ", ".join(f"{'' if run[0] == 16 else f'{run[0]}-' if len(run) > 1 else ''}{run[-1]}" for run in runs)


def known_faults() -> str:
    """What is avoided by not choosing a backend."""
    lists = (sdpa.CUDNN_BAD, sdpa.FLASH_BAD, sdpa.CPU_BAD, flash_attn.FLASH4_BAD)
    rows = [(bad.text, bad.reason().fix, _link(bad.source)) for entries in lists for bad in entries]
    return table(("fault", "what to do", "source"), rows)


def _link(source: str) -> str:
    found = re.fullmatch(r"https://github.com/([\w.-]+)/([\w.-]+)/issues/(\d+)", source)
    return f"[{found[1]}/{found[2]}#{found[3]}]({source})" if found else source


CAUSAL = {"mask": MaskSpec(right=0, bottom_right=True)}
FULL = {"mask": MaskSpec()}
NARROW = {"head_dim_qk": 64, "head_dim_v": 64}
# sequences x queries; 16 heads
KINDS: dict[str, dict[str, Any]] = {
    "float32, TF32 allowed": {"dtype": torch.float32, "tf32": True},
    "float32": {"dtype": torch.float32},
    "8 x 16, 8192 keys, forward alone": {"sizes": (16, 8192, 8), "needs_grad": False},
    "8 x 16, 8192 keys": {"sizes": (16, 8192, 8)},
    "8 x 16, forward alone": {"sizes": (16, 16, 8), "needs_grad": False},
    "8 x 16": {"sizes": (16, 16, 8)},
    "512 x 64, head dim 64, full, forward alone": {"sizes": (64, 64, 512), **NARROW, **FULL, "needs_grad": False},
    "1 x 384, forward alone": {"sizes": (384, 384, 1), "needs_grad": False},
    "1 x 384": {"sizes": (384, 384, 1)},
    "32 x 512, forward alone": {"sizes": (512, 512, 32), "needs_grad": False},
    "32 x 512": {"sizes": (512, 512, 32)},
    "8 x 2048, forward alone": {"sizes": (2048, 2048, 8), "needs_grad": False},
    "8 x 2048": {"sizes": (2048, 2048, 8)},
    "2 x 8192, forward alone": {"needs_grad": False},
    "2 x 8192": {},
    "2 x 8192, full": FULL,
    "2 x 8192, head dim 64": NARROW,
    "2 x 8192, head dim 64, ALiBi, forward alone": {
        **NARROW,
        "needs_grad": False,
        "mask": MaskSpec(right=0, alibi=True),
    },
    "2 x 8192, head dim 80": {"head_dim_qk": 80, "head_dim_v": 80},
    "2 x 8192, head dim 192": {"head_dim_qk": 192, "head_dim_v": 192},
    "2 x 8192, head dim 256": {"head_dim_qk": 256, "head_dim_v": 256},
    "2 x 8192, head dims 192 and 128": {"head_dim_qk": 192},
    "8 x 512, packed": {"layout": "thd", "sizes": (512, 512, 8)},
    "64 x 24, packed": {"layout": "thd", "sizes": (24, 24, 64)},
}


def orders() -> str:
    """In which order backends are tried, and how that is known."""
    groups: dict[tuple[str, str], tuple[list[str], list[str]]] = {}  # (order, known): its GPUs, its kinds of problems
    for place in ("cpu", *(f"sm_{arch}" for arch in ARCHS)):
        for kind, facts in KINDS.items():
            order = _order(None if place == "cpu" else Target.parse(place), facts)
            tried = ", ".join(name for name in order.names[: order.names.index("chunked")])
            places, kinds = groups.setdefault((tried, _known(order)), ([], []))
            places += [] if place in places else [place]
            kinds += [] if kind in kinds else [kind]
    rows = []
    for (names, known), (places, kinds) in groups.items():
        where = places[0] if len(places) == 1 else f"{places[0]} to {places[-1]}"
        halves = [kind for kind in KINDS if not kind.startswith("float32")]
        what = "all" if len(kinds) == len(KINDS) else "fp16, bf16" if kinds == halves else "; ".join(kinds)
        rows.append((where, what, names, known))
    return table(("GPU", "problems", "order", "known by"), rows)


def _known(order: Order) -> str:
    """Whether it was measured; which backends were."""
    measured = ", ".join(name for name, estimate in order.estimates.items() if estimate.forward is not None)
    return f"measured: {measured}" if measured else order.reason


def _order(target: Target | None, changed: dict[str, Any]) -> Order:
    facts: dict[str, Any] = {"dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128} | CAUSAL | changed
    queries, keys, sequences = facts.pop("sizes", (8192, 8192, 2))
    lengths = Lengths(queries, keys, sequences, queries == keys)
    # a forward is estimated with the backward that runs behind it there
    with assume(EVERYTHING):
        return order_of(AttentionProblem(target=target, lengths=lengths, **facts))


def estimates() -> str:
    """The estimated times of sm_90, the fastest first."""
    rows = []
    for kind, facts in KINDS.items():
        order, needs_grad = _order(Target.parse("sm_90"), facts), facts.get("needs_grad", True)
        costs = {name: cost for name, e in order.estimates.items() if (cost := e.cost(needs_grad)) is not None}
        cells = [f"{name} {costs[name]:.3g}" for name in sorted(costs, key=lambda name: costs[name])]
        if cells:
            rows.append((kind, "; ".join(cells)))
    return table(("problems", "ms"), rows)


def updated(page: str) -> str:
    """The page with its tables as the code has them now."""

    def made(found: re.Match[str]) -> str:
        return f"{found[1]}{globals()[found[2]]()}\n<!-- end -->"

    return re.sub(r"(<!-- made: (\w+) -->\n).*?<!-- end -->", made, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
