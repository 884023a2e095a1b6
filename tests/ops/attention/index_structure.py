"""Random index structure of packed attention: where sequences begin and end, in every way that callers may say it.

`check(draw(way, seed), ...)` runs one call, forward and backward, and holds it against the reference in float64. Rows
of no sequence hold NaN, in the gradient of the output too, so that whoever reads them is found.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.attention import varlen_attention
from powertrain.ops.attention.partial_backward import attention_backward

# one cu_seqlens for both; one each; storage with room behind each sequence, said by cu_seqlens_*_padded or by seqused;
# keys anywhere: in any order, over each other, shared
WAYS = ("self", "packed", "padded", "used", "anywhere")
MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"is_causal": True},
    {"is_causal": True, "causal_align": "top_left"},
    {"window_size": (5, 3)},
    {"is_causal": True, "window_size": (7, 0), "softcap": 5.0},
)


@dataclass(frozen=True)
class Structure:
    """Rows [start, length] of the sequences of queries and keys, and the arguments that say so."""

    queries: list[tuple[int, int]]
    keys: list[tuple[int, int]]
    query_rows: int
    key_rows: int
    said: dict[str, list[int]] = field(repr=False)
    mask: dict[str, Any]


def _ascending(rng: random.Random, lengths: list[int], room: bool) -> tuple[list[int], int]:
    """(starts, and where the last one's storage ends; rows in all)."""
    starts = [rng.choice((0, 0, 1, rng.randint(1, 40)))]
    for n in lengths:
        starts.append(starts[-1] + n + (rng.choice((0, 1, rng.randint(1, 20))) if room else 0))
    return starts, starts[-1] + rng.choice((0, 0, rng.randint(1, 40)))


def _cumulated(lengths: list[int]) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def draw(way: str, seed: int, largest: int = 40, batch: int = 4) -> Structure:
    """A structure of up to `batch` sequences (seldom none) of up to `largest` rows."""
    rng = random.Random(f"{way} {seed}")
    count = rng.choice((0, 1, *range(1, batch + 1)))
    lengths = [[rng.choice((0, 1, rng.randint(1, largest), largest)) for _ in range(count)] for _ in range(2)]
    if way == "self":
        lengths[1] = lengths[0]
    (q_starts, q_rows), (k_starts, k_rows) = (_ascending(rng, n, way not in ("self", "packed")) for n in lengths)
    if way == "self":
        k_starts, k_rows = q_starts, q_rows
    if way == "anywhere":
        k_rows = rng.randint(1, count * largest + 1)
        k_starts = [rng.choice((0, rng.randrange(k_rows), *k_starts[:1])) % k_rows for _ in range(count)] + [k_rows]
        lengths[1] = [min(n, k_rows - start) for start, n in zip(k_starts, lengths[1], strict=False)]
    said = {"cu_seqlens_q": q_starts}
    if way != "self":
        said["cu_seqlens_k"] = k_starts
    if way in ("used", "anywhere"):
        said |= {"seqused_q": lengths[0], "seqused_k": lengths[1]}
    if way == "padded":
        said = {
            "cu_seqlens_q": _cumulated(lengths[0]), "cu_seqlens_k": _cumulated(lengths[1]),
            "cu_seqlens_q_padded": q_starts, "cu_seqlens_k_padded": k_starts,
        }  # fmt: skip
    spans = [list(zip(starts, n, strict=False)) for starts, n in zip((q_starts, k_starts), lengths, strict=True)]
    return Structure(spans[0], spans[1], q_rows, k_rows, said, rng.choice(MASKS))


def _rows(spans: list[tuple[int, int]], rows: int, device: torch.device) -> Tensor:
    """Which rows are of a sequence, bool [rows]."""
    inside = torch.zeros(rows, dtype=torch.bool, device=device)
    for start, length in spans:
        inside[start : start + length] = True
    return inside


def tensors(
    s: Structure, heads: tuple[int, int], dims: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """([query, key, value], gradient of the output), NaN outside the sequences."""
    inside_q, inside_k = _rows(s.queries, s.query_rows, device), _rows(s.keys, s.key_rows, device)
    shapes = ((inside_q, heads[0], dims[0]), (inside_k, heads[1], dims[0]), (inside_k, heads[1], dims[1]))
    made = [
        torch.randn(len(inside), h, d, device=device).masked_fill(~inside[:, None, None], torch.nan).to(dtype)
        for inside, h, d in (*shapes, (inside_q, heads[0], dims[1]))
    ]
    return made[:3], made[3]


def run(s: Structure, given: list[Tensor], dout: Tensor, backend: str, **options: Any) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in given]
    said = {name: torch.tensor(x, dtype=torch.int32, device=dout.device) for name, x in s.said.items()}
    out, lse = varlen_attention(*leaves, **said, **s.mask, **options, return_lse=True, backend=backend)
    grads = torch.autograd.grad(out, leaves, dout)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads), strict=True))


def check(
    s: Structure,
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (16, 16),
    seed: int = 0,
    **options: Any,
) -> None:
    """Out, LSE and gradients of `backend` against the reference in float64; and `attention_backward`'s."""
    torch.manual_seed(seed)
    given, dout = tensors(s, heads, dims, device, dtype)
    found = run(s, given, dout, backend, **options)
    exact = run(s, [x.double() for x in given], dout.double(), "reference")
    compare(s, found, exact, dtype, f"{backend} {dtype} {heads} {dims} seed {seed}")


def compare(s: Structure, found: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype, what: str) -> None:
    """Errors within a few roundings of the largest number; exactly 0 in rows of no sequence, and -inf where it is."""
    what = f"{what}: {s} {s.said}"
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for name, x in found.items():
        y = exact[name]
        assert torch.equal(x.isfinite(), y.isfinite()), f"{name}: not finite where it should be; {what}"
        if name != "lse":
            is_key = name in ("dk", "dv")
            inside = _rows(s.keys if is_key else s.queries, s.key_rows if is_key else s.query_rows, x.device)
            assert not x[~inside].any(), f"{name}: not 0 where no sequence is; {what}"
        x, y = x[y.isfinite()].double(), y[y.isfinite()]
        if y.numel():
            error = ((x - y).abs().max() / y.abs().max().clamp(min=1)).item()
            assert error <= tolerance * (1 if name in ("out", "lse") else 2), f"{name}: error {error:.2e}; {what}"


def check_backward(s: Structure, device: torch.device, dtype: torch.dtype, seed: int = 0, **sizes: Any) -> None:
    """`attention_backward` of the reference's out and LSE."""
    torch.manual_seed(seed)
    given, dout = tensors(s, sizes.get("heads", (2, 1)), sizes.get("dims", (16, 16)), device, dtype)
    exact = run(s, [x.double() for x in given], dout.double(), "reference")
    said = {name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in s.said.items()}
    grads = attention_backward(
        dout, *given, exact["out"].to(dtype), exact["lse"].float(), layout="thd", **said, **s.mask
    )
    compare(s, dict(zip(("dq", "dk", "dv"), grads, strict=True)), exact, dtype, f"attention_backward, seed {seed}")
