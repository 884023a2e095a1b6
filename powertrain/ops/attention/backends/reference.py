"""Attention in plain PyTorch with the whole score matrix: the specification, and the backend that takes everything.

    s = mask(scale * q k^T)          [b, h, queries, keys], mask.py says how
    p = exp(s - lse)                 lse = log(sum_j exp(s) + exp(sink)), natural logarithm
    o = dropout(p) v

O(queries * keys) memory per sequence.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention.layouts import from_bshd, to_bshd
from powertrain.ops.attention.mask import MaskSpec, MaskTensors
from powertrain.ops.attention.problem import AttentionCall
from powertrain.ops.philox import halves, philox, threshold
from powertrain.ops.shapes import acc_dtype
from powertrain.runtime import checks
from powertrain.runtime.dispatch import is_traced, without_autocast


def attention_keep(
    seed: Tensor, batch: Tensor, num_heads: int, rows: Tensor, cols: Tensor, p: float
) -> Tensor:  # [batch, heads, rows, cols]
    """The weights that dropout keeps, bool. Word col % 4 of the counter (col // 4, row, batch * heads + head, low word
    of seed[1]) under the key seed[0]; rows and columns count within their sequence, so tiles, packing and backend do
    not matter."""
    return _keep(seed, batch[:, None, None, None], num_heads, rows[None, None, :, None], cols[None, None, None, :], p)


def _keep(seed: Tensor, batch: Tensor, num_heads: int, rows: Tensor, cols: Tensor, p: float) -> Tensor:
    """`attention_keep` of 4-D tensors that broadcast."""
    stream = batch * num_heads + torch.arange(num_heads, device=seed.device)[None, :, None, None]
    words = torch.stack(torch.broadcast_tensors(*philox(seed[0], (cols // 4, rows, stream, halves(seed[1])[0]))))
    drawn = words.gather(0, (cols % 4).expand(words.shape[1:])[None])[0]
    return drawn >> 1 >= threshold(p)


def attention_ref(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: MaskSpec | None = None,
    tensors: MaskTensors | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    upcast: bool = True,
    batch: Tensor | None = None,
    rows: tuple[int, int] | None = None,
    num_queries: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The specification: q [b, sq, h, dqk], k [b, sk, kv heads, dqk], v [b, sk, kv heads, dv] to (o, lse [b, h, sq]).

    `upcast=False` computes in the tensors' own dtype, as one would write it: the judge's "plain". `batch` numbers the
    sequences for dropout. `rows`: the queries are these of `num_queries`, whose mask tensors are given whole.
    """
    mask, tensors = mask or MaskSpec(), tensors or MaskTensors()
    dtype = acc_dtype(query.dtype) if upcast else query.dtype
    num_queries = query.shape[1] if num_queries is None else num_queries
    rows = (0, query.shape[1]) if rows is None else rows
    visible, added = mask.materialize(
        num_queries, key.shape[1], tensors, rows=rows, device=query.device, dtype=acc_dtype(dtype)
    )
    keep = None
    if dropout_p > 0:
        assert dropout_seed is not None
        i, j = torch.arange(*rows, device=query.device), torch.arange(key.shape[1], device=query.device)
        batch = torch.arange(query.shape[0], device=query.device) if batch is None else batch
        keep = attention_keep(dropout_seed, batch, query.shape[2], i, j, dropout_p)
    return _attend(query, key, value, visible, added, keep, dropout_p, mask, tensors, scale, dtype)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,  # bool [b|1, h|1, queries, keys]
    added: Tensor | None,  # to the capped scores; broadcasts to the same
    keep: Tensor | None,  # bool, the same
    dropout_p: float,
    mask: MaskSpec,
    tensors: MaskTensors,
    scale: float | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The formulas, in `dtype`."""
    if query.device.type != "meta" and torch.is_autocast_enabled(query.device.type):
        with without_autocast(query.device):
            return _attend(query, key, value, visible, added, keep, dropout_p, mask, tensors, scale, dtype)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (query, key, value))
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = (q @ k.mT) * scale
    if mask.softcap:
        s = mask.softcap * torch.tanh(s / mask.softcap)
    if added is not None:
        s = s + added.to(dtype)
        # a row of them alone would have a NaN gradient through its LSE
        visible = visible & (added != -torch.inf)
    s = s.masked_fill(~visible, -torch.inf)
    sink = None
    if tensors.sinks is not None:
        sink = tensors.sinks.to(dtype)[None, :, None, None].expand(*s.shape[:-1], 1)
    lse = torch.logsumexp((s if sink is None else torch.cat([s, sink], -1)).to(acc_dtype(dtype)), -1, keepdim=True)
    # a score of NaN is seen: it makes the row NaN
    seen = (s != -torch.inf).any(-1, keepdim=True)
    # a row that sees nothing: its scores become finite first, so that no gradient is NaN
    p = torch.exp(s.masked_fill(~seen, 0.0) - lse.masked_fill(~seen, 0.0).to(dtype)).masked_fill(~seen, 0.0)
    if keep is not None:
        p = torch.where(keep, p / (1 - dropout_p), 0.0)
    out = p @ v
    return out.transpose(1, 2).to(query.dtype), lse.squeeze(-1)


def sequences(call: AttentionCall) -> list[tuple[Tensor, Tensor, Tensor, MaskTensors, int]]:
    """The sequences of a call as (q [n, sq, h, d], k, v, their mask tensors, the first one's number): one entry for a
    dense batch, one per sequence where lengths differ. Reads the lengths on the host."""
    varlen, tensors = call.varlen, call.tensors
    if call.layout != "thd":
        q, k, v = (to_bshd(x, call.layout) for x in (call.query, call.key, call.value))
        # an empty batch has no entry whose rows could count
        if q.shape[0] == 0 or (varlen.query_used is None and varlen.key_used is None):
            return [(q, k, v, tensors, 0)]
        lengths = zip(_used("seqused_q", varlen.query_used, q), _used("seqused_k", varlen.key_used, k), strict=True)
        return [
            (q[n : n + 1, :sq], k[n : n + 1, :sk], v[n : n + 1, :sk], tensors.of_batch(n).cut(sq, sk), n)
            for n, (sq, sk) in enumerate(lengths)
        ]
    assert varlen.query_starts is not None and varlen.key_starts is not None
    queries = _spans("q", call.query, varlen.query_starts, varlen.query_used)
    keys = _spans("k", call.key, varlen.key_starts, varlen.key_used)
    for (_, end), (first, _) in pairwise(queries):
        if first < end:
            must = "have each sequence begin behind the one before it"
            checks.fail("varlen_attention", "cu_seqlens_q", must, f"row {first} behind the end {end}")
    return [
        (call.query[None, a:b], call.key[None, c:d], call.value[None, c:d], tensors.of_batch(n), n)
        for n, ((a, b), (c, d)) in enumerate(zip(queries, keys, strict=True))
    ]


def _used(name: str, lengths: Tensor | None, x: Tensor) -> list[int]:
    """How many rows of each entry of x [b, s, h, d] count."""
    batch, stored = x.shape[:2]
    used = [stored] * batch if lengths is None else lengths.tolist()
    for n in used:
        if not 0 <= n <= stored:
            checks.fail("attention", name, f"be from 0 to {stored}", n)
    return used


def _spans(side: str, x: Tensor, starts: Tensor, used: Tensor | None) -> list[tuple[int, int]]:
    """The first row of each sequence of x [t, h, d], and the end."""
    lengths = starts.diff().tolist() if used is None else used.tolist()
    spans = [(first, first + n) for first, n in zip(starts.tolist(), lengths, strict=False)]
    # slices of Python take any numbers; a kernel would read other memory
    for first, end in spans:
        if not 0 <= first <= end <= x.shape[0]:
            must = f"place every sequence in the {x.shape[0]} rows (with padded starts and seqused_{side}, if given)"
            checks.fail("varlen_attention", f"cu_seqlens_{side}", must, f"one from row {first} to row {end}")
    return spans


def assemble(call: AttentionCall, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The results of `sequences(call)`, each (o [n, sq, h, dv], lse [n, h, sq]), in the call's layout; zeros, and
    an LSE of -inf, where no sequence lies."""
    if call.layout != "thd":
        q = to_bshd(call.query, call.layout)
        pads = [q.shape[1] - o.shape[1] for o, _ in parts]
        out = torch.cat([torch.nn.functional.pad(o, (0, 0, 0, 0, 0, n)) for (o, _), n in zip(parts, pads, strict=True)])
        lse = torch.cat(
            [torch.nn.functional.pad(t, (0, n), value=-torch.inf) for (_, t), n in zip(parts, pads, strict=True)]
        )
        if call.layout == "bmghk":
            lse = lse.unflatten(1, call.query.shape[2:4])
        return from_bshd(out, call.layout, call.query), lse
    if not parts:
        return _of_no_sequences(call)
    assert call.varlen.query_starts is not None
    tokens, heads, dv = call.query.shape[0], call.query.shape[1], call.value.shape[-1]
    outs, lses, end = [], [], 0
    for start, (o, lse) in zip(call.varlen.query_starts.tolist(), parts, strict=False):
        outs += [o.new_zeros(start - end, heads, dv), o[0]]
        lses += [lse.new_full((heads, start - end), -torch.inf), lse[0]]
        end = start + o.shape[1]
    q = call.query
    outs.append(q.new_zeros(tokens - end, heads, dv))
    lses.append(torch.full((heads, tokens - end), -torch.inf, dtype=acc_dtype(q.dtype), device=q.device))
    return torch.cat(outs), torch.cat(lses, 1)


def _of_no_sequences(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The results of a thd call without sequences, differentiable by its inputs."""
    nothing = sum(x[:0].sum() for x in (call.query, call.key, call.value))
    shape = call.query.shape[0], call.query.shape[1], call.value.shape[-1]
    out = call.query.new_zeros(shape) + nothing
    return out, out.new_full((shape[1], shape[0]), -torch.inf, dtype=acc_dtype(out.dtype)) + nothing


def run_reference(call: AttentionCall, upcast: bool = True) -> tuple[Tensor, Tensor]:
    """(o, lse) of a call by `attention_ref`, sequence by sequence; differentiated by PyTorch.

    Lengths are read on the host. Where nobody can (torch.compile, fake tensors) all sequences are computed at once, and
    those that do not belong together masked: O(all queries * all keys) memory."""
    if call.varlen.query_starts is not None and call.varlen.query_starts.shape[0] == 1:
        return _of_no_sequences(call)
    if call.has_lengths and (is_traced(call.query) or call.query.is_meta):
        return _run_at_once(call, upcast)
    parts = []
    for q, k, v, tensors, first in sequences(call):
        batch = torch.arange(first, first + q.shape[0], device=q.device)
        parts.append(
            attention_ref(
                q, k, v, mask=call.mask, tensors=tensors, scale=call.scale, dropout_p=call.dropout_p,
                dropout_seed=call.dropout_seed, batch=batch, upcast=upcast,
            )
        )  # fmt: skip
    return assemble(call, parts)


class _Side(NamedTuple):
    """The sequences along the queries of a call; [b, n] of dense layouts, [1, n] of thd."""

    sequence: Tensor  # its number
    position: Tensor  # in its sequence
    inside: Tensor  # bool: within its length
    lengths: Tensor  # [batch]


def _lengths(x: Tensor, starts: Tensor | None, used: Tensor | None, like: Tensor) -> Tensor:
    """[batch], as `like`: of the sequences along dim 1 of x."""
    if used is not None:
        return used
    return torch.full_like(like, x.shape[1]) if starts is None else starts.diff()


def _side(x: Tensor, starts: Tensor | None, used: Tensor | None) -> _Side:
    at = torch.arange(x.shape[1], device=x.device)[None]
    if starts is None:
        sequence = torch.arange(x.shape[0], device=x.device)[:, None]
        lengths = _lengths(x, None, used, sequence[:, 0])
        return _Side(sequence, at, at < lengths[:, None], lengths)
    lengths = _lengths(x, starts, used, starts)
    sequence = torch.searchsorted(starts[1:].contiguous(), at.to(starts.dtype), right=True)
    exists = sequence < lengths.shape[0]
    sequence = sequence.clamp(max=lengths.shape[0] - 1)
    position = at - starts[sequence]
    return _Side(sequence, position, exists & (position >= 0) & (position < lengths[sequence]), lengths)


def _run_at_once(call: AttentionCall, upcast: bool) -> tuple[Tensor, Tensor]:
    mask, tensors, varlen = call.mask, call.tensors, call.varlen
    packed = call.layout == "thd"
    q, k, v = (x[None] if packed else to_bshd(x, call.layout) for x in (call.query, call.key, call.value))
    rows = _side(q, varlen.query_starts, varlen.query_used)
    i, number = rows.position[:, :, None], rows.sequence[:, :, None]
    lengths = _lengths(k, varlen.key_starts, varlen.key_used, rows.lengths)
    j = torch.arange(k.shape[1], device=k.device)[None, None]
    # counted in the sequence of each query, for a key may be in several
    if varlen.key_starts is not None:
        j = j - varlen.key_starts[number]
    p = i + (lengths - rows.lengths)[number] if mask.bottom_right else i
    visible = mask.sees(p, j)
    if tensors.prefix is not None:
        visible = visible | (j < tensors.prefix[number])
    held = rows.inside[:, :, None] & (j >= 0) & (j < lengths[number])
    visible = visible & held
    # rows outside may be NaN, and 0 times NaN is NaN
    q = q.masked_fill(~rows.inside[:, :, None, None], 0.0)
    k, v = (x.masked_fill(~held.any(1)[:, :, None, None], 0.0) for x in (k, v))
    visible, added = mask.add(visible[:, None], (p - j)[:, None], tensors, rows.sequence, acc_dtype(q.dtype))
    keep = None
    if call.dropout_p > 0:
        assert call.dropout_seed is not None
        keep = _keep(call.dropout_seed, number[:, None], q.shape[2], i[:, None], j[:, None], call.dropout_p)
    dtype = acc_dtype(q.dtype) if upcast else q.dtype
    out, lse = _attend(q, k, v, visible, added, keep, call.dropout_p, mask, tensors, call.scale, dtype)
    out = out.masked_fill(~rows.inside[:, :, None, None], 0.0)
    lse = lse.masked_fill(~rows.inside[:, None], -torch.inf)
    if packed:
        return out[0], lse[0]
    if call.layout == "bmghk":
        lse = lse.unflatten(1, call.query.shape[2:4])
    return from_bshd(out, call.layout, call.query), lse
