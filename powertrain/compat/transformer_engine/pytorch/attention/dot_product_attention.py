"""TransformerEngine's DotProductAttention on our attention.

    from powertrain.compat.transformer_engine.pytorch import DotProductAttention

Takes the constructor's and forward's keywords of TransformerEngine 2. On every GPU there is a way for every format,
mask, head dim (values apart from queries: 192/128 and any other), bias and softmax type that it takes at all. Its
switches hold: NVTE_FLASH_ATTN, NVTE_FLASH_ATTN_V2, _V3, _V4, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN (0 forbids the
backends of that kind; our own kernels stay), NVTE_ALLOW_NONDETERMINISTIC_ALGO=0, and NVTE_DEBUG=1 with
NVTE_DEBUG_LEVEL=1 (the choice) or 2 (and the reasons against others), logged as "DotProductAttention". They are another
library's variables, so they are read here, at every call, and not in runtime/settings.py.
"""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.attention.cached import attend_cached, check_cached
from powertrain.compat.transformer_engine.pytorch.attention.inference import InferenceParams
from powertrain.ops.attention import attention, attention_backend, varlen_attention
from powertrain.ops.attention.backend_preferences import current_preference, nvte_forbids
from powertrain.ops.attention.select import verdicts
from powertrain.ops.conversion import unit_stride, unsupported
from powertrain.ops.philox import dropout_seed
from powertrain.runtime import checks, tracing

__all__ = ["DotProductAttention"]

_OP = "DotProductAttention"
_FORMATS = ("sbhd", "bshd", "thd")
_CAUSAL = ("causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
_MASKS = ("no_mask", "padding", "arbitrary", *_CAUSAL)
_BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
_SOFTMAXES = ("vanilla", "off-by-one", "learnable")
_LINEAR = "a linear attention's own library: this is softmax attention"
_SCORES = "core_attention_bias, alibi_slopes, or softcap of powertrain.ops.attention.attention"

# unsupported keywords of forward: allowed value, and the nearest alternative
# a table: a keyword of a later release is an error by its name, not silently swallowed by **kwargs
_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "fp8_output": ((None, False), "the output in the query's dtype"),
    "bf16_backward": ((None, False), "a backward in the query's dtype"),
    "num_splits": ((None, 1), "num_splits of powertrain.ops.attention.decode_attention"),
    **{f"score_mod{name}": ((None,), _SCORES) for name in ("", "_bprop", "_tensors", "_bprop_tensors")},
    **{name: ((None,), _LINEAR) for name in ("g", "beta", "initial_state")},
    **{name: ((None, False), _LINEAR) for name in ("output_final_state", "use_qk_l2norm_in_kernel")},
}

# TransformerEngine logs under the class's name too
_logger = logging.getLogger(_OP)


class DotProductAttention(nn.Module):
    """softmax(scale * q k^T + bias) v with TransformerEngine's names.

    Shapes: s length, b batch, h heads of this rank, g key heads of this rank (h a multiple), t tokens of all sequences.
        query_layer  "sbhd" [s, b, h, d], "bshd" [b, s, h, d] or "thd" [t, h, d]; key_layer and value_layer with g
                     heads, the value with a dim of its own; or qkv_layer / kv_layer with 3 or 2 of them in one
    Returns the query's leading dims and [h * value dim]: [s, b, h * dv], [b, s, h * dv] or [t, h * dv].

    attn_mask_type  "no_mask", "causal" (top left), "causal_bottom_right", "arbitrary", "padding" and "padding_" with
        either causal; "causal,padding" and the like mean "padding_causal". "thd" takes only those with padding.
    attention_mask  bool, True where masked out. "arbitrary": broadcasts to [b, h, sq, skv]. With padding: [b, 1, 1, s],
        for cross attention a pair of them, any pattern; where positions count from the bottom right, padding is
        at the end. As there, it is not looked at for other types, nor where cu_seqlens_q and _kv are given; where one
        of them is, in a dense format, the other side's lengths are the mask's.
    cu_seqlens_q, cu_seqlens_kv  [b + 1] int32; "thd": where sequences begin, unless cu_seqlens_*_padded says so;
        others: their lengths, with padding at the end. As there, not looked at in dense formats for types without
        padding, nor cu_seqlens_*_padded for any type
    window_size  (left, right) keys around a query's position; counts from the top left for "causal" and
        "padding_causal", else from the bottom right (bottom_right_diagonal=False: from the top left too)
    softmax_type  "off-by-one" is a sink of score 0, "learnable" one per head, the parameter softmax_offset [h]
    fast_zero_fill  is a hint there; here outputs beyond a sequence are zero either way

    inference_params  keys and values join the cache of layer_number; the queries, at the end of their sequence, see all
        of it. Needs a mask type with padding, "padding_causal" counting from the bottom right; lengths are the cache's,
        attention_mask and cu_seqlens_* are not looked at. A backward raises

    Dropout is applied in training, under get_rng_state_tracker's fork unless sequence_parallel; with
    checkpoint_core_attention the same elements are dropped again in the recomputation.
    Raises ValueError, or NotImplementedError naming the argument and the nearest thing (context parallelism, FP8,
    score_mod, return_max_logit).
    Source: the documentation of transformer_engine.pytorch.DotProductAttention, and its forward's rules for lengths.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        checks.one_of(_OP, "qkv_format", qkv_format, _FORMATS)
        checks.one_of(_OP, "attention_type", attention_type, ("self", "cross"))
        checks.one_of(_OP, "softmax_type", softmax_type, _SOFTMAXES)
        checks.require(0 <= attention_dropout < 1, _OP, "attention_dropout", "be in [0, 1)", attention_dropout)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if groups < 1 or num_attention_heads % groups:
            checks.fail(_OP, "num_gqa_groups", f"divide num_attention_heads {num_attention_heads}", groups)
        if return_max_logit:
            unsupported(
                _OP, "return_max_logit", True,
                "attention(return_lse=True): a row's greatest score is at most its LSE, and at least that minus "
                "log(keys)",
            )  # fmt: skip
        self.qkv_format, self.attn_mask_type, self.window_size = qkv_format, _mask_type(attn_mask_type), window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.attention_dropout, self.attention_type = attention_dropout, attention_type
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.layer_number, self.name = layer_number or 1, name
        self.cache_number = layer_number
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = (
            (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        )
        self.softmax_scale = self.hidden_size_per_attention_head_k**-0.5 if softmax_scale is None else softmax_scale
        # the group's size wins: Megatron passes tp_size and sets the group later
        self.tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        self.set_tensor_parallel_group(tp_group)
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        # with sequence parallelism each rank has tokens of its own, so equal generators draw different elements anyway
        self.rng_states_tracker = None if sequence_parallel or not get_rng_state_tracker else get_rng_state_tracker()
        self.softmax_type = softmax_type
        self.softmax_offset: Tensor | None = None
        if softmax_type == "learnable":
            device = "cuda" if torch.cuda.is_available() else None  # where TransformerEngine puts it
            self.softmax_offset = nn.Parameter(torch.zeros(num_attention_heads // self.tp_size, device=device))

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """The group that shares the heads; nothing is sent here."""
        self.tp_group = tp_group

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: list[int] | None, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Takes no group, or one of a single rank."""
        checks.one_of(_OP, "cp_comm_type", cp_comm_type, ("p2p", "all_gather", "a2a", "a2a+p2p"))
        members = cp_group if isinstance(cp_group, list | tuple) else [] if cp_group is None else [cp_group]
        # the check needs a process group and is made only if one was given
        if any(torch.distributed.get_world_size(group) > 1 for group in members):
            unsupported(
                _OP, "cp_group", cp_group,
                "attention(return_lse=True) on each part of the keys and merge_attentions, of powertrain.ops.attention",
            )  # fmt: skip
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # checkpoints of TransformerEngine carry FP8 state, in two places over its versions; there is none here
        for key in ("_extra_state", "fused_attention._extra_state"):
            # popped, so that strict loading does not report them as unexpected
            state_dict.pop(prefix + key, None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        **unsupported_keywords: Any,
    ) -> Tensor:
        """Attention; the class documents the arguments."""
        # keywords that this version does not take are refused with the nearest alternative
        _refuse(unsupported_keywords)
        q, k, v = _unpack(query_layer, key_layer, value_layer, qkv_layer, kv_layer, qkv_interleave_dim)
        layout = self.qkv_format if qkv_format is None else qkv_format
        checks.one_of(_OP, "qkv_format", layout, _FORMATS)
        self._check(q, k, v, layout)
        mask_type = self.attn_mask_type if attn_mask_type is None else _mask_type(attn_mask_type)
        window = self.window_size if window_size is None else window_size
        diagonal = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        options = _positions(mask_type, window, diagonal)
        # read at every call: the module may be built before the user sets the variables
        options |= {"scale": self.softmax_scale, "deterministic": _deterministic(), "sinks": self._sinks(q)}
        bias = _bias(core_attention_bias_type, core_attention_bias, alibi_slopes, self.softmax_scale, q)
        # ALiBi is an argument of its own in ours, a kind of bias there
        options["alibi_slopes"] = bias.pop("alibi_slopes", None)
        if inference_params is not None:
            drops, layer = self.training and self.attention_dropout > 0, self.cache_number
            check_cached(mask_type, diagonal, options["window_size"], core_attention_bias, drops, layer)
            qkv, run = unit_stride(q, k, v), partial(self._run, again=False)
            return attend_cached(qkv, layout, layer, inference_params, max_seqlen_q, options, run).flatten(-2)
        lengths = (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        if layout == "thd":
            options |= _packed(mask_type, lengths, max_seqlen_q, max_seqlen_kv, pad_between_seqs, bias)
        else:
            sizes = (q.shape[layout.index("s")], k.shape[layout.index("s")])
            _check_dense(layout, sizes, max_seqlen_q, max_seqlen_kv, pad_between_seqs)
            options |= {"layout": layout, **bias}
            options |= _masked(mask_type, attention_mask, cu_seqlens_q, cu_seqlens_kv, options)
        # TransformerEngine returns heads and value dim merged
        return self._run(q, k, v, options, checkpoint_core_attention).flatten(-2)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, layout: str) -> None:
        """Check shapes against the constructor's arguments."""
        heads, groups = self.num_attention_heads // self.tp_size, self.num_gqa_groups // self.tp_size
        dim, dim_v = self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v
        expected = {"query_layer": (q, heads, dim), "key_layer": (k, groups, dim), "value_layer": (v, groups, dim_v)}
        for name, (x, n, d) in expected.items():
            if x.dim() != len(layout) or tuple(x.shape[-2:]) != (n, d):
                checks.fail(_OP, name, f"have {len(layout)} dims ({layout}) that end in [{n}, {d}]", list(x.shape))

    def _sinks(self, q: Tensor) -> Tensor | None:
        if self.softmax_type == "off-by-one":
            # softmax with 1 + sum in its divisor is a sink of score 0
            # float32: the sink is a score, and scores are float32
            return q.new_zeros(q.shape[-2], dtype=torch.float32)
        return self.softmax_offset

    def _run(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], again: bool) -> Tensor:
        """The call, under the switches and the random numbers it shall have, recomputed in backward if `again`."""
        call = attention if "layout" in options else varlen_attention
        p = self.attention_dropout if self.training else 0.0
        numbers: AbstractContextManager[Any] = nullcontext()
        if p > 0 and self.rng_states_tracker is not None:
            # tensor-parallel ranks drop different elements: each has a generator of its own
            numbers = self.rng_states_tracker.fork()

        def run(q: Tensor, k: Tensor, v: Tensor, **seed: Any) -> Tensor:
            # in the recomputation too
            with _switches():
                out: Tensor = call(q, k, v, dropout_p=p, **options, **seed)
            return out

        # TransformerEngine's unfused projections give transposed views
        q, k, v = unit_stride(q, k, v)
        with numbers:
            if not again:
                return run(q, k, v)
            # drawn outside, so that the recomputation drops the same and the tracker moves on once
            seed = dropout_seed(q.device) if p > 0 else None
            # non-reentrant: the inputs may need no gradient; the random state is not restored, because the seed is an
            # argument
            out: Tensor = checkpoint(run, q, k, v, dropout_seed=seed, use_reentrant=False, preserve_rng_state=False)
            return out


def _mask_type(name: str) -> str:
    # an encoder's output in its place: both stand behind the mask in signatures
    checks.require(isinstance(name, str), _OP, "attn_mask_type", "be the name of a mask", type(name).__name__)
    # "causal,padding" and "padding,causal" are the old spellings
    plain = name.replace(",", "_")
    plain = "padding_causal" if plain == "causal_padding" else plain
    checks.one_of(_OP, "attn_mask_type", plain, _MASKS)
    return plain


def _refuse(keywords: dict[str, Any]) -> None:
    for name, value in keywords.items():
        if name not in _UNSUPPORTED:
            raise TypeError(f"{_OP}: got an unexpected keyword argument {name!r}")
        neutral, nearest = _UNSUPPORTED[name]
        # None and False are the neutral values of newer keywords, so callers may pass them on
        if not any(value is one or (type(value) is int and value == one) for one in neutral):
            unsupported(_OP, name, value if not isinstance(value, Tensor) else list(value.shape), nearest)


def _unpack(
    q: Tensor | None, k: Tensor | None, v: Tensor | None, qkv: Tensor | None, kv: Tensor | None, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, of which two or three may come in one tensor."""
    checks.one_of(_OP, "qkv_interleave_dim", dim, (-3, -2))
    given = [name for name, x in (("query_layer", q), ("key_layer", k), ("value_layer", v)) if x is not None]
    # the three ways of giving q, k and v exclude each other
    given += [name for name, x in (("qkv_layer", qkv), ("kv_layer", kv)) if x is not None]
    if given not in (["query_layer", "key_layer", "value_layer"], ["qkv_layer"], ["query_layer", "kv_layer"]):
        must = "query_layer, key_layer and value_layer, query_layer and kv_layer, or qkv_layer"
        checks.fail(_OP, "arguments", f"be {must}", ", ".join(given) or "none of them")
    for name, x, parts in (("qkv_layer", qkv, 3), ("kv_layer", kv, 2)):
        if x is not None and (x.dim() < 4 or x.shape[dim] != parts):
            checks.fail(_OP, name, f"have size {parts} in dim {dim} (qkv_interleave_dim)", list(x.shape))
    if qkv is not None:
        # views: nothing is copied for packed projections
        q, k, v = qkv.unbind(dim)
    elif kv is not None:
        k, v = kv.unbind(dim)
    assert q is not None and k is not None and v is not None
    return q, k, v


def _positions(mask_type: str, window: tuple[int, int] | None, diagonal: bool | None) -> dict[str, Any]:
    """Window and alignment, in our words."""
    left, right = (-1, -1) if window is None else window
    if left < -1 or right < -1:
        checks.fail(_OP, "window_size", "be two numbers of at least -1", window)
    if mask_type in _CAUSAL:
        # a causal mask has no right side, whatever window_size says there
        right = 0
        # "causal" alone is top left in TransformerEngine, unlike flash-attn
        diagonal = mask_type.endswith("bottom_right")
    elif (left, right) == (-1, 0):
        # there, the window is dropped with a warning
        checks.fail(_OP, "window_size", f"not be causal for attn_mask_type {mask_type!r} (use 'causal')", window)
    # windows without a causal mask count from the bottom right there unless told otherwise
    return {"window_size": (left, right), "causal_align": "top_left" if diagonal is False else "bottom_right"}


def _bias(kind: str, bias: Tensor | None, slopes: Tensor | None, scale: float, q: Tensor) -> dict[str, Any]:
    """The bias as ours; one before scaling is scaled."""
    checks.one_of(_OP, "core_attention_bias_type", kind, _BIASES)
    wants = kind.endswith("scale_bias")
    if wants != (bias is not None):
        must = "be given" if wants else "be None"
        got = "None" if bias is None else "a tensor"
        checks.fail(_OP, "core_attention_bias", f"{must} for core_attention_bias_type {kind!r}", got)
    if slopes is not None and kind != "alibi":
        checks.fail(_OP, "alibi_slopes", f"be None for core_attention_bias_type {kind!r}", "a tensor")
    if kind == "alibi":
        return {"alibi_slopes": _default_slopes(q) if slopes is None else slopes}
    if bias is None:
        return {}
    # "pre_scale" is added before the scores are multiplied by the scale
    return {"attn_bias": bias * scale if kind == "pre_scale_bias" else bias}


def _default_slopes(q: Tensor) -> Tensor:
    """ALiBi's own: a geometric sequence for a power of two of heads, then every other one of the next power's."""
    heads = q.shape[-2]
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * n / power) for n in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * n / power) for n in range(1, 2 * (heads - power), 2)]
    # non_blocking: the slopes are a few numbers and must not wait for the stream
    return torch.tensor(slopes, dtype=torch.float32, device="cpu").to(q.device, non_blocking=True)


def _packed(
    mask_type: str,
    lengths: tuple[Tensor | None, ...],
    max_q: int | None,
    max_kv: int | None,
    pad_between: bool | None,
    bias: dict[str, Any],
) -> dict[str, Any]:
    """Arguments of varlen_attention for "thd"."""
    cu_q, cu_kv, cu_q_padded, cu_kv_padded = lengths
    checks.require("padding" in mask_type, _OP, "attn_mask_type", "have padding for qkv_format 'thd'", repr(mask_type))
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv)):
        checks.require(x is not None, _OP, name, "be given for qkv_format 'thd'", None)
    padded = cu_q_padded is not None or cu_kv_padded is not None
    # padding between sequences can only be located by the padded offsets
    if pad_between and not padded:
        checks.fail(_OP, "cu_seqlens_q_padded", "be given with pad_between_seqs, as cu_seqlens_kv_padded", None)
    # a dense bias has [sq, skv] per batch entry, and packed rows have no batch
    if bias:
        unsupported(
            _OP, "core_attention_bias with qkv_format", "thd", "qkv_format 'bshd' with padding, or alibi_slopes"
        )
    return {
        "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_kv, "max_seqlen_q": max_q, "max_seqlen_k": max_kv,
        "cu_seqlens_q_padded": cu_q_padded, "cu_seqlens_k_padded": cu_kv_padded,
    }  # fmt: skip


def _check_dense(
    layout: str,
    sizes: tuple[int, int],
    max_q: int | None,
    max_kv: int | None,
    pad_between: bool | None,
) -> None:
    """Arguments that say nothing new in a dense format say nothing wrong either."""
    for name, given, size in (("max_seqlen_q", max_q, sizes[0]), ("max_seqlen_kv", max_kv, sizes[1])):
        if given is not None and given != size:
            # a wrong maximum would be a wrong kernel launch there; here it is a sign of a mixed-up call
            checks.fail(_OP, name, f"be {size}, the 's' of qkv_format {layout!r}", given)
    checks.require(not pad_between, _OP, "pad_between_seqs", f"be False for qkv_format {layout!r}", pad_between)


def _masked(
    mask_type: str,
    mask: Tensor | tuple[Tensor, Tensor] | None,
    cu_q: Tensor | None,
    cu_kv: Tensor | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The mask of a dense format as arguments of ours."""
    if "padding" not in mask_type:
        # as in TransformerEngine, a mask is not looked at for types that do not name it
        return _arbitrary(mask, options.get("attn_bias")) if mask_type == "arbitrary" else {}
    cu_seqlens = (cu_q, cu_kv)
    if mask is None:
        for name, cu in zip(("cu_seqlens_q", "cu_seqlens_kv"), cu_seqlens, strict=True):
            checks.require(cu is not None, _OP, f"attention_mask or {name}", f"be given for {mask_type!r}", None)
    masks = mask if isinstance(mask, tuple) else (mask, mask)
    # True means masked out there and kept here
    kept = [None if x is None else ~x.flatten(1) for x in masks]
    # a side without one takes its mask's
    if cu_q is not None or cu_kv is not None:
        lengths = [x.sum(1) if cu is None else cu.diff() for cu, x in zip(cu_seqlens, kept, strict=True)]  # type: ignore[union-attr]
        return {"seqused_q": lengths[0], "seqused_k": lengths[1]}
    positional = options["window_size"] != (-1, -1) or options["alibi_slopes"] is not None
    # counted from the end of each sequence, so positions need its length; a mask of documents has none
    if positional and options["causal_align"] == "bottom_right":
        return {"seqused_q": kept[0].sum(1), "seqused_k": kept[1].sum(1)}  # type: ignore[union-attr]
    # as documents: 0 for every token and -1 for padding, which is masked, wherever it is
    queries, keys = (x.to(torch.int32) - 1 for x in kept if x is not None)
    return {"document_ids": (queries, keys)}


def _arbitrary(mask: Tensor | tuple[Tensor, Tensor] | None, bias: Tensor | None) -> dict[str, Any]:
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        got = checks.name(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        checks.fail(_OP, "attention_mask", "be a bool tensor for 'arbitrary', True where masked out", got)
    return {"attn_bias": ~mask if bias is None else bias.masked_fill(mask, -torch.inf)}


def _deterministic() -> bool | None:
    """True, or the setting of torch.use_deterministic_algorithms."""
    # TransformerEngine reads "0" as forbidden
    return True if os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0" else None


class _switches:
    """The NVTE_ variables around a call: forbidden backends and log level."""

    def __enter__(self) -> None:
        # the environment is read around each call, as there
        forbidden = nvte_forbids(os.environ)
        self._backends = attention_backend(*forbidden) if forbidden else None
        if self._backends is not None:
            self._backends.__enter__()
        self._level = int(os.environ.get("NVTE_DEBUG_LEVEL", "0")) if os.environ.get("NVTE_DEBUG") == "1" else 0
        # events are appended to one list: those behind this length are this call's
        self._seen = len(tracing.trace()) if self._level else 0

    def __exit__(self, *error: Any) -> None:
        if self._level:
            self._log()
        if self._backends is not None:
            self._backends.__exit__(*error)

    def _log(self) -> None:
        """Decisions made in this call; cached ones are not reported."""
        for event in tracing.trace()[self._seen :]:
            if event.kind != "attention":
                continue
            # the level that is shown without any set-up: it was asked for
            _logger.warning(event.text)
            if self._level > 1:
                for name, verdict, reasons in verdicts(event.facts["problem"], current_preference(None)):
                    _logger.warning(f"{name}: {verdict}{''.join(f'; {reason}' for reason in reasons)}")


__getattr__ = unknown(__name__)
