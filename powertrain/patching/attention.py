"""Attention of Hugging Face models: an implementation beside "sdpa" and "flash_attention_2" in their registry.

Grouped heads, softcap (Gemma 2), sinks (gpt-oss), sliding windows, position biases, packed batches and caches; values
may have a head dim of their own. A mask keeps its short form where it says all: None (causal, a window or full, no
padding), or the [B] lengths of right-padded sequences. Other masks are transformers' own, bool [b, 1, queries, keys],
which our attention could only read element by element; one that is causal or a sliding window, padded or not, is
marked with the arguments that say the same, and with these whole blocks of keys are skipped. Rows of packed sequences,
which transformers finds by positions that start again (without a cache and a padding mask), are marked with where the
sequences begin, and computed as such. A mask that lost its mark (sliced, copied) or never had one is taken as it is.
"""

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.ops.attention import attention, varlen_attention
from powertrain.ops.conversion import known, unit_stride, unsupported
from powertrain.ops.shapes import document_starts
from powertrain.patching.verify import SLACK
from powertrain.runtime import checks
from powertrain.runtime.dispatch import has_kernels
from powertrain.runtime.settings import settings
from powertrain.testing import numerics

KIND = "attention"
NAME = "powertrain"
_OP = "attention"
_MARK = "_powertrain_mask"
_STARTS = "starts"  # of a mark: where the sequences of packed rows begin
_BEYOND_SDPA = frozenset((
    "softcap", "s_aux", "cu_seq_lens_q", "cache", "head_mask", "output_attentions", "sinks", "indices", "block_indices",
))  # fmt: skip
_imported: dict[str, Any] = {}  # by `_transformers`


def _transformers(name: str) -> Any:
    """A module of transformers. Called before a model is compiled: torch 2.11 does not trace the import."""
    if name not in _imported:
        _imported[name] = importlib.import_module(f"transformers.{name}")
    return _imported[name]


def register(name: str = NAME) -> None:
    """Make `attn_implementation=name` a choice of transformers (5; tested with 5.23)."""
    from transformers import AttentionInterface, AttentionMaskInterface, __version__

    # transformers 5 names the length; before it, sdpa_mask took a tensor of cache positions
    if "q_length" not in inspect.signature(_transformers("masking_utils").sdpa_mask).parameters:
        raise ImportError(f"transformers {__version__} is too old for {name!r}: pip install 'transformers>=5.23'")
    _transformers("integrations.sdpa_attention")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Called by transformers in each layer: `our_forward`; on devices without our kernels transformers' function for
    sdpa, where that computes the same. Masks are its own there (`attention_mask`)."""
    # "sdpa" takes such attention as causal, and so do we; without sdpa it is an encoder's (Splinter, MarkupLM)
    if not hasattr(module, "is_causal") and not _supports(type(module).__module__, "sdpa"):
        options.setdefault("is_causal", False)
    if has_kernels(query) or not _is_said_by_sdpa(module, query, key, attention_mask, options):
        return our_forward(module, query, key, value, attention_mask, **options)
    forward = _transformers("integrations.sdpa_attention").sdpa_attention_forward
    result: tuple[Tensor, None] = forward(module, query, key, value, attention_mask, **options)
    return result


def _file_of(name: str) -> Any:
    """The modeling file of a module or config that is defined in the file `name`, or None."""
    return sys.modules.get(name.replace(".configuration_", ".modeling_"))


def _asked_once(function: Callable[..., bool]) -> Callable[..., bool]:
    """`function`, called once for the same arguments; traces take the answer."""
    cached = functools.cache(function)

    # the cache inside: Dynamo warns of one that it traces
    def answer(*args: Any) -> bool:
        return cached(*args)

    constant: Callable[..., bool] = torch.compiler.assume_constant_result(answer)
    return constant


@_asked_once
def _supports(name: str, *kinds: str) -> bool:
    """Whether a model in the file of this module or config takes one of these kinds of attention, or there is no
    model."""
    file = _file_of(name)
    models = [c for c in vars(file).values() if getattr(c, "__module__", "") == file.__name__] if file else []
    said = [getattr(c, f"_supports_{kind}") for c in models for kind in kinds if hasattr(c, f"_supports_{kind}")]
    return any(said) or not said


def _is_said_by_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> bool:
    """Whether transformers' function for sdpa computes this call as `our_forward` does."""
    # most calls name none of them
    if not _BEYOND_SDPA.isdisjoint(options):
        values = [options[name] for name in _BEYOND_SDPA if name in options]
        if not all(value is None or value is False for value in values):
            return False
    heads, kv_heads = query.shape[1], key.shape[1]
    # it repeats key heads as the module says
    if heads != kv_heads and heads != kv_heads * getattr(module, "num_key_value_groups", 1):
        return False
    if mask is not None:
        return mask.dim() == 4
    window = options.get("sliding_window")
    return window is None or key.shape[2] <= window


def our_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    output_attentions: bool = False,
    cache: Any = None,
    head_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **model_arguments: Any,
) -> tuple[Tensor, None]:
    """A layer's attention by our op: (out [b, queries, h, dv], None).

    Shapes: query [b, h, queries, d], key [b, kv heads, keys, d], value [b, kv heads, keys, dv]; attention_mask [b|1,
    h|1, queries, keys], bool (True sees) or added, or [b] lengths of the sequences; position_bias the same, added, with
    its gradient; s_aux [h]. Without a mask, or with lengths that `our_mask` has not marked, is_causal (else the
    module's) counts from the top left, and sliding_window holds; one query sees every key within it. cu_seq_lens_q,
    [n + 1], are sequences packed in a batch of 1, which see themselves only. indices [b, queries, k], beside a mask,
    are the keys that each query may see. A model's other keyword arguments pass through here, as transformers has it,
    and say nothing about attention.
    """
    _refuse(output_attentions, cache, head_mask, sinks, block_indices)
    if indices is not None:
        attention_mask = _among(indices, attention_mask)
    queries = query.shape[2]
    # `**model_arguments` takes the rest: transformers 5 passes whatever the model's forward was given
    marks = getattr(attention_mask, _MARK, None)
    if marks is not None and _STARTS in marks and position_bias is not None:
        # positions in a row are not those in its sequences, so that the mask is read as it is
        marks = None
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "softcap": softcap or 0.0, "sinks": s_aux}
    if attention_mask is not None and marks is not None:
        options |= _marks_of(attention_mask, marks, key.shape[2])
        attention_mask = None
    elif attention_mask is None or attention_mask.dim() == 1:
        options |= _without_mask(module, attention_mask, queries, sliding_window, is_causal)
        attention_mask = None
    starts = options.pop(_STARTS, None)
    bias = _combined(attention_mask, position_bias)
    # the head dim of a sliced projection may have another stride
    query, key, value = unit_stride(query, key, value)
    if starts is not None:
        return _packed_in_rows(query, key, value, starts, options), None
    # packed sequences by their lengths: the mask of transformers for them would be read element by element
    if cu_seq_lens_q is not None:
        lengths = (cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k)
        if bias is None and marks is None:
            return _packed(query, key, value, lengths, known(max_length_q), known(max_length_k), options), None
        sizes = (queries, key.shape[2])
        options["document_ids"] = tuple(_documents(*of) for of in zip(lengths, sizes, strict=True))
    # results in [b, queries, h, dv], which transformers wants contiguous
    return attention(*(x.transpose(1, 2) for x in (query, key, value)), attn_bias=bias, **options), None


def _refuse(
    output_attentions: bool, cache: Any, head_mask: Tensor | None, sinks: Tensor | None, block_indices: Tensor | None
) -> None:
    # the probabilities that eager attention returns are never in memory here
    if output_attentions:
        unsupported(_OP, "output_attentions", True, 'attn_implementation="eager"')
    if cache is not None:
        # a cache of continuous batching is paged by its own kernel's rules
        unsupported(_OP, "cache", type(cache).__name__, 'generate() without continuous batching, or "sdpa" with it')
    if head_mask is not None:
        unsupported(_OP, "head_mask", list(head_mask.shape), "scaling the heads' outputs, which is the same")
    # Inkling 2's: one for each query; those of gpt-oss, one a head, come as s_aux
    if sinks is not None:
        unsupported(_OP, "sinks", list(sinks.shape), 'attn_implementation="eager"')
    # MiniMax-M3's: the size of a block, and which are always seen, are known to its indexer alone
    if block_indices is not None:
        unsupported(_OP, "block_indices", list(block_indices.shape), 'attn_implementation="sdpa"')


def _marks_of(mask: Tensor, marks: dict[str, Any], keys: int) -> dict[str, Any]:
    """Keywords of `attention` that a marked mask, or lengths, stands for."""
    if mask.dim() == 1:
        return {**marks, "seqused_k": mask}
    # MiniMax makes the masks of decoding for the one key of its linear attention; "sdpa" spreads them over all keys.
    # Gradient checkpointing takes the cache from prefix tuning, whose masks have columns for it
    is_for_them = mask.shape[-1] == keys or "document_ids" not in marks
    how = "pad no prompts of a model that makes other masks"
    if mask.shape[-1] > keys:
        how = "gradient checkpointing leaves out the keys of a cache, as prefix tuning has them"
    columns = f"have a column for each of {keys} keys ({how})"
    checks.require(is_for_them, _OP, "attention_mask", columns, list(mask.shape))
    return marks


def _among(indices: Tensor, mask: Tensor | None) -> Tensor:
    """The mask where only the keys of these indices are seen. DeepSeek-V3.2 and its kin put them into the masks of
    "eager" and "sdpa" by themselves, and leave them to others."""
    if mask is None or mask.dim() != 4:
        checks.fail(_OP, "attention_mask", "be [b, h, q, k] beside indices", None if mask is None else list(mask.shape))
    shape = (*indices.shape[:2], mask.shape[-1])
    hidden = torch.ones(shape, dtype=torch.bool, device=mask.device).scatter(-1, indices.long(), False)[:, None]
    return mask & ~hidden if mask.dtype is torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def _without_mask(
    module: nn.Module, lengths: Tensor | None, queries: int, sliding_window: int | None, is_causal: bool | None
) -> dict[str, Any]:
    """Keywords of `attention` for a layer that gets no mask, or lengths [b] of its sequences."""
    # one query stands behind all keys, which it sees all
    causal = queries > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    # the module's words stand for a missing mask: `attention_mask` returned None only where they suffice
    options = _window(sliding_window, causal, queries)
    return options if lengths is None else {**options, "seqused_k": lengths}


def _window(sliding_window: int | None, causal: bool, queries: int) -> dict[str, Any]:
    """Meaning of a missing mask: as many keys as queries, or a single query."""
    # theirs counts the query's own key, ours those before it
    left = -1 if sliding_window is None else sliding_window - 1
    # a single query is a decoding step: it sees all keys, or those of the window
    right = 0 if causal or (queries == 1 and sliding_window is not None) else left
    return {"window_size": (left, right), "causal_align": "bottom_right" if queries == 1 else "top_left"}


def _combined(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if bias is None or mask is None:
        return mask if bias is None else bias
    # a bool mask cannot be added: a hidden key gets -inf
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else bias + mask


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[Tensor, Tensor],
    max_queries: int | None,
    max_keys: int | None,
    options: dict[str, Any],
) -> Tensor:
    """A batch of 1 as the sequences in it."""
    # transformers flattens packed sequences to one row
    checks.require(query.shape[0] == 1, _OP, "query", "have a batch of 1 with cu_seq_lens_q", query.shape[0])
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out: Tensor = varlen_attention(q, k, v, *lengths, max_queries, max_keys, **options)
    return out[None]


def _packed_in_rows(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, options: dict[str, Any]) -> Tensor:
    """Rows that are full of sequences, whose starts are counted over all rows."""
    queries = query.shape[2]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out: Tensor = varlen_attention(q, k, v, starts, max_seqlen_q=queries, **options)
    return out.unflatten(0, (-1, queries))


def _documents(ends: Tensor, size: int) -> Tensor:
    """[1, size]: which of the sequences each row is in."""
    rows = torch.arange(size, device=ends.device, dtype=ends.dtype)
    # right=True: row `ends[n]` is the first of sequence n, ends being cumulative lengths that begin with 0
    return torch.searchsorted(ends, rows, right=True)[None]


def attention_mask(*sizes: Any, device: torch.device | str = "cpu", **options: Any) -> Tensor | None:
    """Called by transformers for each kind of layer: `our_mask`; on devices without our kernels its mask for sdpa,
    unmarked. Encoder-decoders without sdpa, and models of eager attention alone, get its eager masks."""
    config_class = type(options.get("config"))
    # encoder-decoders: their decoders' attention may call itself not causal, since a mask says the rest, and other code
    # of theirs adds masks to scores: BigBirdPegasus, Pegasus-X, NLLB-MoE. Decoders alone lack sdpa for a softcap or
    # sinks, which we have, but those that are eager alone may add keys and their masks in each layer: DeepSeek-V4
    kinds = ("sdpa",) if getattr(config_class, "is_encoder_decoder", False) else ("sdpa", "flash_attn", "flex_attn")
    if not _supports(config_class.__module__, *kinds):
        added: Tensor | None = _transformers("masking_utils").eager_mask(*sizes, device=device, **options)
        return added
    if _has_kernels_on(device):
        return our_mask(*sizes, device=device, **options)
    mask: Tensor | None = _transformers("masking_utils").sdpa_mask(*sizes, device=device, **options)
    return mask


def _has_kernels_on(device: torch.device | str) -> bool:
    """`has_kernels` of a mask that is not made yet."""
    return torch.device(device).type != "cpu" or settings().interpret


def our_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **options: Any,
) -> Tensor | None:
    """The mask of a kind of layer: None, lengths [b] int32, or transformers' mask for sdpa, marked where arguments say
    the same.

    attention_mask [b, keys so far] is True for tokens; mask_function(batch, head, query, key) is True for visible keys.
    """
    masking_utils = _transformers("masking_utils")
    _check_padding(attention_mask)
    # transformers' own default
    mask_function = masking_utils.causal_mask_function if mask_function is None else mask_function
    # a cache or an offset makes queries and keys differ, where the module's words would be ambiguous
    whole = isinstance(q_offset, int) and q_offset == 0 and kv_offset == 0 and q_length == kv_length
    skip = allow_is_causal_skip or allow_is_bidirectional_skip
    # lengths that this function gave to a model whose inner model asks again (PaliGemma): the inner one's modules may
    # say another thing than the outer's mask, so that it is made here
    if attention_mask is not None and attention_mask.dim() == 1:
        attention_mask = torch.arange(kv_length, device=attention_mask.device) < attention_mask[:, None]
        skip = False
    # a window to both sides is never said by modules
    names_window = allow_is_causal_skip and _names_window(options.get("config"))
    if skip and whole and not use_vmap and _is_said_by_modules(mask_function, local_size, kv_length, names_window):
        is_short, short = _short_form(attention_mask, kv_length)
        if is_short:
            return short if short is None else _marked(short, mask_function, local_size)
    # also where arguments would do: other code of the model may read the mask
    mask: Tensor | None = masking_utils.sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
        allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        use_vmap=use_vmap, **options,
    )  # fmt: skip
    # a trace can read no values, and Dynamo no closures
    if mask is None or use_vmap or isinstance(q_offset, Tensor) or torch.compiler.is_compiling():
        return mask
    packed = _packed_rows(mask_function)
    # as use_vmap: a function of the caller's, or one about blocks of images
    if packed is None and not allow_is_causal_skip:
        return mask
    window = _known(mask_function if packed is None else packed[1], local_size, masking_utils.causal_mask_function)
    ends_meet, starts_meet = q_offset + q_length == kv_offset + kv_length, q_offset == kv_offset == 0
    # only the two alignments that our arguments can express
    if window is None or not (ends_meet or starts_meet) or (packed and not _agrees(mask, packed[0], window)):
        return mask
    # their helper knows how the padding mask lies in the cache
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    marks = _padding_marks(padding, batch_size, q_length, kv_length, kv_offset)
    if packed is not None:
        # whole rows are packed, without a cache and padding
        marks[_STARTS] = document_starts(packed[0])
    # on the tensor, which passes through every layer of a model unchanged
    setattr(mask, _MARK, {**marks, "window_size": window, "causal_align": "bottom_right" if ends_meet else "top_left"})
    return mask


def _check_padding(mask: Tensor | None) -> None:
    """It is [b, keys], or lengths [b] of ours. Of three dims, which "sdpa" fails for too, lengths would be nonsense."""
    if mask is not None and mask.dim() != 2 and not (mask.dim() == 1 and mask.dtype is torch.int32):
        checks.fail(_OP, "attention_mask", "be [b, keys] or [b, h|1, queries, keys]", list(mask.shape))


def _padding_marks(
    padding: Tensor | None, batch_size: int, q_length: int, kv_length: int, kv_offset: int
) -> dict[str, Any]:
    """Keywords of `attention` that hide the keys whose entry of padding is False."""
    if padding is None:
        return {}
    # 0 for a token, -1 for none: such a key is in no query's document
    keys = padding[:, kv_offset : kv_offset + kv_length].to(torch.int32) - 1
    return {"document_ids": (keys.new_zeros(batch_size, q_length), keys.expand(batch_size, -1))}


def _packed_rows(function: Any) -> tuple[Tensor, Any] | None:
    """Parts of a mask function of packed rows: each token's sequence [b, queries], and the mask within a sequence.

    transformers finds such rows by positions that start again, and joins two functions. Their variables have no other
    name; `_agrees` compares the result with the mask that the functions make.
    """
    parts = _cells(function).get("mask_functions", ()) if getattr(function, "__name__", "") == "and_mask" else ()
    ids = [cells["packed_sequence_mask"] for part in parts if "packed_sequence_mask" in (cells := _cells(part))]
    others = [part for part in parts if "packed_sequence_mask" not in _cells(part)]
    if len(parts) != 2 or len(ids) != 1 or not isinstance(ids[0], Tensor) or ids[0].dim() != 2:
        return None
    # transformers 5.23 counts positions from each sequence's beginning, which leaves distances as they are; 5.17 not
    return ids[0], _cells(others[0]).get("mask_function", others[0])


def _cells(function: Any) -> dict[str, Any]:
    """The variables that a function closes over, by name; nothing of functions that are not transformers' own."""
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or closure is None or function.__module__ != "transformers.masking_utils":
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, closure, strict=True)}


def _agrees(mask: Tensor, ids: Tensor, window: tuple[int, int]) -> bool:
    """Whether 4096 elements of a mask [b, 1, queries, keys], at random and near the diagonal, are those of this window
    in packed rows."""
    generator, (rows, length) = torch.Generator().manual_seed(0), ids.shape
    if mask.shape[-2:] != (length, length) or mask.dtype is not torch.bool:
        return False
    row, q, k, near = (
        torch.randint(n, (4096,), generator=generator, device="cpu") for n in (rows, length, length, 2 * window[0] + 9)
    )
    k = torch.where(torch.arange(4096, device="cpu") % 2 == 0, k, (q + 4 - near).clamp(0, length - 1))
    left = length if window[0] < 0 else window[0]
    seen = (q - k >= 0) & (q - k <= left)
    row, q, k, seen = (x.to(ids.device) for x in (row, q, k, seen))
    wanted = seen & (ids[row, q] == ids[row, k])
    return bool((mask.expand(rows, 1, length, length)[row, 0, q, k] == wanted).all())


def _short_form(padding: Tensor | None, keys: int) -> tuple[bool, Tensor | None]:
    """(True, None) without padding, (True, lengths [b]) with padding on the right only, else (False, None)."""
    if padding is None:
        return True, None
    # reading values would break the graph
    if torch.compiler.is_compiling() or padding.shape[-1] != keys:
        return False, None
    lengths = padding.sum(-1, dtype=torch.int32)
    # one read by the host for all layers: padding on the right leaves no step up
    # left padding shifts positions, which lengths cannot express
    is_padded, has_step = torch.stack([(lengths < keys).any(), padding.int().diff(dim=-1).gt(0).any()]).tolist()
    return not has_step, lengths if is_padded and not has_step else None


def _marked(lengths: Tensor, function: Any, local_size: int | None) -> Tensor:
    """Lengths with the arguments that say the rest of the mask, where these are known: a module's words may be
    others. Moonshine's say that attention is not causal wherever there is a mask."""
    masks = _transformers("masking_utils")
    window = _known(function, local_size, masks.causal_mask_function)
    if function is masks.bidirectional_mask_function:
        window = (-1, -1)
    if window is not None:
        setattr(lengths, _MARK, {"window_size": window, "causal_align": "top_left"})
    return lengths


def _is_said_by_modules(function: Any, local_size: int | None, keys: int, names_window: bool) -> bool:
    """No local attention, or a causal sliding window of `local_size` keys which modules name again in their call."""
    # a window as long as the keys hides nothing
    if local_size is None or keys <= local_size:
        return True
    return names_window and _known(function, local_size, None) is not None


def _names_window(config: Any) -> bool:
    """Whether the modules of a model with this config give its window to the function that computes attention."""
    # SmolLM3's do not where this is off, whatever its layer_types, and so its masks, say
    return config is None or (
        getattr(config, "use_sliding_window", True) and _file_names_window(type(config).__module__)
    )


@_asked_once
def _file_names_window(name: str) -> bool:
    """Whether a model in the file of this config gives a window to the function that computes attention; PhiMoE's have
    it in their masks alone."""
    file = _file_of(name)
    return file is not None and re.search(r"\bsliding_window=(?!None)", inspect.getsource(file)) is not None


def _known(function: Any, local_size: int | None, causal: Any) -> tuple[int, int] | None:
    """(left, right) of a mask that is causal, or causal within a window; None for any other."""
    # identity with their function: an equal one of the caller's may close over anything
    if function is causal:
        return (-1, 0)
    if local_size is None or local_size < 2:
        return None
    # key by key at the window's edges: chunks of that size differ from a window in the second
    w, index = local_size, _Index if torch.compiler.is_compiling() else functools.partial(torch.tensor, device="cpu")
    pairs = ((w, 0), (w, 1), (w, w), (w, w + 1))
    try:
        seen = [bool(function(index(0), index(0), index(q), index(k))) for q, k in pairs]
    except Exception:  # it asks for more than indices
        return None
    return (w - 1, 0) if seen == [False, True, True, False] else None


class _Index:
    """An index, or whether it is seen, that a causal window's function takes as a tensor. A trace can read its value,
    where a tensor's would break the graph."""

    device = None

    def __init__(self, value: int) -> None:
        self.value = value

    def new_ones(self, *sizes: Any, **options: Any) -> "_Index":
        return _Index(True)

    def to(self, device: None) -> "_Index":
        return self

    def __sub__(self, other: int) -> "_Index":
        return _Index(self.value - other)

    # as bool: of symbols that are only compared, torch 2.13 cannot make `&`
    def __le__(self, other: "_Index") -> "_Index":
        return _Index(bool(self.value <= other.value))

    def __gt__(self, other: "_Index") -> "_Index":
        return _Index(bool(self.value > other.value))

    def __and__(self, other: "_Index") -> "_Index":
        return _Index(self.value & other.value)

    def __bool__(self) -> bool:
        return bool(self.value)


def find(module: nn.Module, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> str | None:
    """Why `our_forward` cannot stand for this module's own attention, or None: both run on random q, k and v."""
    # eager attention is the specification in each model's file: sdpa and flash paths are chosen elsewhere
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        return "its class has no eager_attention_forward to compare with"
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator(device).manual_seed(0)
    shapes = {"query": num_heads, "key": num_kv_heads, "value": num_kv_heads}
    tensors = {
        name: torch.randn((2, h, 9, head_dim), generator=generator, device=device).to(dtype).requires_grad_()
        for name, h in shapes.items()
    }
    # the defaults that transformers' attention functions have; a tensor is applied to the queries (TimesFM 2.5)
    scaling = getattr(module, "scaling", None)
    scaling = scaling if isinstance(scaling, float | int) and scaling else head_dim**-0.5
    causal = bool(getattr(module, "is_causal", True))
    # 9 keys: a partial tile, and enough rows for a causal mask to matter
    mask = torch.zeros(9, 9, device=device, dtype=torch.float32)
    if causal:
        mask = torch.full_like(mask, -1e30).triu(1)
    options = {"scaling": scaling, **_extras(module, device, dtype)}

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return our_forward(module, query, key, value, None, is_causal=causal, **options)[0]

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return eager(module, query, key, value, mask.to(query.dtype).expand(2, 1, 9, 9), **options)[0]

    try:
        # eager attention twice: in float64 as the reference, in the model's dtype as the error that is allowed
        found = numerics.errors(ours, plain, plain, tensors, slack=SLACK)
    except Exception as error:  # theirs takes other arguments than the registry's functions
        return f"its eager attention takes other arguments: {str(error).splitlines()[0][:80]}"
    bad = [f"{e.name} by {e.ours:.2g}, allowed {e.allowed:.2g}" for e in found if not e.ok]
    return f"its attention computes another function: {'; '.join(bad[:2])}" if bad else None


def _extras(module: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Softcap and sinks as this module hands them on."""
    extras: dict[str, Any] = {}
    # the attribute names under which models keep the softcap that reaches their attention function
    for name in ("attn_logit_softcapping", "logit_cap", "softcap"):
        if isinstance(getattr(module, name, None), float):
            extras["softcap"] = getattr(module, name)
    # gpt-oss keeps its sinks on the attention module
    if isinstance(sinks := getattr(module, "sinks", None), Tensor) and sinks.ndim == 1 and not sinks.is_meta:
        extras["s_aux"] = sinks.detach().to(device)
    return extras
