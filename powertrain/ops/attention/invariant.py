"""Attention inside `batch_invariant`: sequence by sequence, with tiles counted from each sequence's beginning.

Dense rows and documents become packed sequences, with the same strides whatever the batch. The universal kernels choose
tiles for these by head dims, dtype and GPU alone, and loop over a sequence's keys from its first tile on. Keys after a
query are masked, which adds exact zeros. Without kernels each query is a call of its own.
"""

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from powertrain.ops.attention.backend_registry import BACKENDS
from powertrain.ops.attention.layouts import from_bshd, to_bshd
from powertrain.ops.attention.mask import MaskTensors
from powertrain.ops.attention.problem import AttentionCall, Sizes, Varlen
from powertrain.ops.batch_invariance import refuse_invariant
from powertrain.runtime import checks
from powertrain.runtime.dispatch import use_kernel


def run_invariant(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out, lse) of causal self-attention, differentiable. A query's bits depend only on its sequence's keys up to it.

    Raises NotImplementedError for other calls, ValueError for document_ids that do not ascend along a row.
    """
    _check(call)
    # one form for all layouts: a row's strides and tile must not depend on the batch around it
    packed = _packed(call)
    # there is no float64 kernel
    takes_kernel = call.query.dtype is not torch.float64 and use_kernel("attention", call.query)
    out, lse = _by_kernel(packed) if takes_kernel else _by_queries(packed)
    if call.layout == "thd":
        return out, lse
    B, S = call.sizes.batch, call.sizes.queries
    return from_bshd(out.unflatten(0, (B, S)), call.layout, call.query), lse.unflatten(1, (B, S)).transpose(0, 1)


def _check(call: AttentionCall) -> None:
    mask, varlen = call.mask, call.varlen
    same = call.sizes.queries == call.sizes.keys and varlen.query_starts is varlen.key_starts
    has_lengths = varlen.query_used is not None or varlen.key_used is not None
    # each of these would make tiles depend on other rows, or was not tested for equal bits
    for is_there, what in (
        (not mask.is_causal or not same, "attention that is not causal self-attention"),
        (call.layout == "bmghk", "attention of layout bmghk"),
        (has_lengths, "attention with seqused or padded cu_seqlens"),
        (mask.bias != "none", "attention with attn_bias"),
        (mask.prefix, "attention with prefix_lengths"),
        (mask.chunk > 0, "attention with chunk_size"),
        (mask.sinks, "attention with sinks"),
        (call.tensors.alibi_slopes is not None and call.tensors.alibi_slopes.dim() != 1, "alibi_slopes of a batch"),
        (call.dropout_p > 0, "attention with dropout"),
    ):
        if is_there:
            refuse_invariant(what, "compute this outside of it")


def _packed(call: AttentionCall) -> AttentionCall:
    if call.layout == "thd":
        # tiles and loads may be chosen by strides and alignment, so these are made the same
        query, key, value = (x.contiguous() for x in (call.query, call.key, call.value))
        return replace(call, query=query, key=key, value=value)
    B, heads, kv_heads, S, _ = call.sizes
    query, key, value = (to_bshd(x, call.layout).flatten(0, 1).contiguous() for x in (call.query, call.key, call.value))
    starts = _starts(call.tensors, B, S, query.device)
    return replace(
        call, query=query, key=key, value=value, layout="thd",
        sizes=Sizes(starts.shape[0] - 1, heads, kv_heads, B * S, B * S),
        varlen=Varlen(starts, starts), mask=replace(call.mask, documents=False),
        tensors=call.tensors._replace(query_documents=None, key_documents=None),
    )  # fmt: skip


def _starts(tensors: MaskTensors, B: int, S: int, device: torch.device) -> Tensor:
    """[N + 1] int32: where sequences begin in the flat rows. The host waits for the number of documents."""
    ids = tensors.query_documents
    if ids is None:
        return torch.arange(B + 1, dtype=torch.int32, device=device) * S
    # ids that come back later in a row would be two sequences here and one document in the mask
    if ids.numel() and not (((ids >= 0).all() & (ids.diff(dim=1) >= 0).all()) or ids.device.type == "meta"):
        checks.fail("attention", "document_ids", "ascend from 0 along each row in batch_invariant", "others")
    begins = torch.ones_like(ids, dtype=torch.bool)
    # a row's first position begins a sequence even if the row above ended in the same id
    begins[:, 1:] = ids.diff(dim=1) != 0
    first = begins.flatten().nonzero()[:, 0].int()
    return torch.cat([first, first.new_tensor([B * S])])


def _by_kernel(call: AttentionCall) -> tuple[Tensor, Tensor]:
    # here, since the import of Triton takes long and a CPU does not need it
    from powertrain.ops.attention.triton import backend

    return backend.run(call)


def _by_queries(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Plain PyTorch: a call for each query of the packed sequences, on memory with the same alignment."""
    assert call.varlen.query_starts is not None
    starts = call.varlen.query_starts.tolist()
    outs, lses = [], []
    done = 0
    for start, stop in itertools.pairwise(starts):
        for end in range(start + 1, stop + 1):
            query, key, value = (
                # a clone begins at an aligned address whatever the row: CPU kernels may vectorize by alignment
                x[a:end].clone()[None]
                for x, a in ((call.query, end - 1), (call.key, start), (call.value, start))
            )
            one = replace(
                call, query=query, key=key, value=value, layout="bshd",
                sizes=Sizes(1, call.sizes.heads, call.sizes.kv_heads, 1, end - start),
                varlen=Varlen(max_queries=1, max_keys=end - start), mask=replace(call.mask, bottom_right=True),
            )  # fmt: skip
            out, lse = BACKENDS["reference"].run(one)
            assert lse is not None
            outs.append(out[0])
            lses.append(lse[0])
        done = stop
    # rows of no sequence would have to be filled in, which the loop above does not
    if not outs or starts[0] or done != call.sizes.queries:
        refuse_invariant("attention with rows of no sequence", "leave them out of query, key and value")
    return torch.cat(outs), torch.cat(lses, dim=1)
