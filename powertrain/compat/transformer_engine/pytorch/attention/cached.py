"""Attention of DotProductAttention over the caches of an InferenceParams.

The first tokens of sequences attend to one another, as in training. Later ones are decode_attention's queries, which
stand at the end of a sequence: where sequences bring different numbers of tokens, each one's tokens are moved to the
end of its row, and the results back.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from powertrain.compat.transformer_engine.pytorch.attention.inference import InferenceParams
from powertrain.compat.transformer_engine.pytorch.attention.kv_cache import Tokens, batch_of, is_capturing, new_tokens
from powertrain.ops.attention.decode import decode_attention
from powertrain.ops.conversion import unsupported
from powertrain.runtime import checks

_OP = "DotProductAttention"


class _NoGradient(torch.autograd.Function):
    """The result of attention over a cache, whose backward raises: the cache holds no graph."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise NotImplementedError(
            f"{_OP}: inference_params has no gradients; call the model without it to train, or under torch.no_grad()"
        )


def check_cached(
    mask_type: str, bottom_right_diagonal: bool | None, window: tuple[int, int], bias: Any, drops: bool, layer: Any
) -> None:
    """Arguments that a cache does not go with, by name; drops: whether dropout acts."""
    checks.require(not drops, _OP, "inference_params", "be None in training with dropout", "given")
    # a cache has a place for each number: without one, layers would share it
    checks.require(layer is not None, _OP, "layer_number", "be given for inference_params", None)
    checks.require("padding" in mask_type, _OP, "attn_mask_type", "have padding for inference_params", repr(mask_type))
    if bias is not None:
        unsupported(_OP, "core_attention_bias with inference_params", list(bias.shape), "alibi_slopes")
    if bottom_right_diagonal is False and mask_type == "padding" and window != (-1, -1):
        unsupported(_OP, "bottom_right_diagonal with inference_params", False, "True: windows end at the last token")


def attend_cached(
    qkv: tuple[Tensor, Tensor, Tensor],
    layout: str,
    layer: int | None,
    params: InferenceParams,
    max_seqlen_q: int | None,
    options: dict[str, Any],
    run: Callable[..., Tensor],
) -> Tensor:
    """New keys and values join a layer's cache, then the queries see all of it: [..., heads, value dim].

    options are those of our attention, but for lengths and layout; `run(q, k, v, options)` computes it without a cache,
    for a step that finds every sequence empty.
    """
    q, k, v = qkv
    assert layer is not None
    with torch.no_grad():
        keys, values, cu_q, cu_kv, _, _ = params.step(layer, k, v, layout)
        capturing = is_capturing(q)
        batch = batch_of(q, layout, params.max_batch_size if capturing else params.batch_size)
        if not capturing and not any(params.sequences_pre_step.values()):
            out = run(
                q, k, v, {**options, "causal_align": "bottom_right", **_lengths(layout, cu_q[: batch + 1], params)}
            )
        else:
            size = batch, _row_length(q, layout, params, max_seqlen_q)
            fills = not capturing and params.is_even and size == (params.batch_size, params.longest)
            fills = fills and q.shape[:-2].numel() == size[0] * size[1]
            tokens = None if fills else new_tokens(q, layout, cu_q, batch)
            rows = _rows(q, layout, size, tokens, cu_q)
            attended = decode_attention(
                rows, keys, values, cu_kv.diff()[:batch], window_size=options["window_size"],
                is_causal=options["window_size"][1] == 0, scale=options["scale"], sinks=options["sinks"],
                alibi_slopes=options["alibi_slopes"],
                page_table=params.cache_manager.page_table[:batch] if params.is_paged else None,
            )  # fmt: skip
            assert isinstance(attended, Tensor)
            out = _tokens(attended, q, layout, tokens, cu_q)
    # every input, so that the result requires a gradient where one of them does
    return _NoGradient.apply(out, q, k, v) if torch.is_grad_enabled() else out


def _lengths(layout: str, cu_seqlens: Tensor, params: InferenceParams) -> dict[str, Any]:
    """Of a first step, whose keys are the new ones: arguments of attention or varlen_attention."""
    if layout == "thd":
        longest = params.longest
        ends = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        return {**ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return {"layout": layout, "seqused_q": cu_seqlens.diff(), "seqused_k": cu_seqlens.diff()}


def _row_length(q: Tensor, layout: str, params: InferenceParams, given: int | None) -> int:
    """Queries of a row: the most new tokens of a sequence, or a bound of them that holds for later replays."""
    if layout != "thd":
        return q.shape[layout.index("s")]
    if given is not None:
        checks.require(given >= params.longest, _OP, "max_seqlen_q", f"be at least {params.longest}", given)
        return given
    return params.longest if not is_capturing(q) else params.max_ctx_len or params.max_sequence_length


def _rows(q: Tensor, layout: str, size: tuple[int, int], tokens: Tokens | None, cu_q: Tensor) -> Tensor:
    """The queries as [batch, length, h, d], each sequence's at the end of its row; tokens: None if they fill it."""
    if tokens is None:
        return q.unflatten(0, size) if layout == "thd" else q.transpose(0, 1) if layout == "sbhd" else q
    slots = size[0] * size[1]
    # one row more, for padding
    rows = q.new_zeros(slots + 1, *q.shape[-2:])
    rows[torch.where(tokens.counts, _places(tokens, size[1], cu_q), slots)] = q.reshape(-1, *q.shape[-2:])
    return rows[:-1].unflatten(0, size)


def _tokens(out: Tensor, q: Tensor, layout: str, tokens: Tokens | None, cu_q: Tensor) -> Tensor:
    """The results [batch, length, h, dv] in q's format, 0 for padding: the inverse of `_rows`."""
    if tokens is None:
        return out.flatten(0, 1) if layout == "thd" else out.transpose(0, 1) if layout == "sbhd" else out
    places = torch.where(tokens.counts, _places(tokens, out.shape[1], cu_q), 0)
    found = out.flatten(0, 1)[places].masked_fill(~tokens.counts[:, None, None], 0.0)
    return found.view(*q.shape[:-2], *out.shape[-2:])


def _places(tokens: Tokens, length: int, cu_q: Tensor) -> Tensor:
    """Where each new token stands in rows of `length`, its sequence's last one at the end."""
    counts = cu_q.diff()[tokens.sequence]
    return tokens.sequence * length + (length - counts) + tokens.offset
