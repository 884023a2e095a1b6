"""torch.nn.functional.scaled_dot_product_attention on our attention.

    from powertrain.compat.sdpa import scaled_dot_product_attention

Differs from PyTorch's: a query that sees no key gives 0 (as PyTorch does since 2.5), head dims go to 512 with a value
dim of their own in every backend, and float32 products follow PyTorch's TF32 settings.
"""

from torch import Size, Tensor, broadcast_shapes

from powertrain.ops.attention import attention
from powertrain.ops.conversion import unit_stride
from powertrain.runtime import checks

_OP = "scaled_dot_product_attention"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with PyTorch's arguments and meaning.

    Shapes: L queries, S keys, E and Ev head dims, any leading dims, the last of them heads.
        query      [..., Hq, L, E]
        key        [..., H, S, E]   H = Hq (or broadcastable), with enable_gqa any divisor of it
        value      [..., H, S, Ev]
        attn_mask  broadcastable to [..., Hq, L, S]: bool (True takes part) or a floating point bias, with its gradient
        is_causal  aligned top left, as in PyTorch: query i sees keys 0 to i, whatever L and S are
    Returns [..., Hq, L, Ev] in query's dtype.
    Dropout is applied whenever dropout_p > 0, as in PyTorch: pass 0.0 in evaluation.
    Raises ValueError naming the argument, the expected value and the given one.
    Source: the documentation of torch.nn.functional.scaled_dot_product_attention.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        checks.require(x.dim() >= 2, _OP, name, "have at least 2 dims", list(x.shape))
    if attn_mask is not None:
        # as PyTorch refuses both together
        checks.require(not is_causal, _OP, "is_causal", "be False where attn_mask is given", True)
        checks.require(attn_mask.dim() >= 2, _OP, "attn_mask", "have at least 2 dims", list(attn_mask.shape))
    lead, kv_lead = _leading(query, key, value, enable_gqa)
    q, k, v = (_as_bhsd(x, to) for x, to in ((query, lead), (key, kv_lead), (value, kv_lead)))
    out = attention(
        *unit_stride(q, k, v), attn_bias=_mask(attn_mask, lead, query.shape[-2], key.shape[-2]), is_causal=is_causal,
        causal_align="top_left", scale=scale, dropout_p=dropout_p, layout="bhsd",
    )  # fmt: skip
    # leading dims come back as the caller had them
    return out.reshape(*lead, *out.shape[-2:])


def _leading(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Size, Size]:
    """The leading dims (heads last) of query and result, and those of key and value."""
    shapes = [x.shape[:-2] for x in (query, key, value)]
    if not enable_gqa:
        both = _broadcast(shapes)
        # without enable_gqa heads broadcast like any other dim
        return both, both
    for name, shape in zip(("query", "key", "value"), shapes, strict=True):
        checks.require(len(shape) >= 1, _OP, name, "have at least 3 dims with enable_gqa", len(shape) + 2)
    if shapes[1][-1] != shapes[2][-1]:
        checks.fail(_OP, "value", f"have key's {shapes[1][-1]} heads", shapes[2][-1])
    batch = _broadcast([shape[:-1] for shape in shapes])
    return Size((*batch, shapes[0][-1])), Size((*batch, shapes[1][-1]))


def _broadcast(shapes: list[Size]) -> Size:
    try:
        return broadcast_shapes(*shapes)
    except RuntimeError:
        got = ", ".join(str(list(shape)) for shape in shapes)
        checks.fail(_OP, "query, key and value", "have leading dims that broadcast (or enable_gqa=True)", got)


def _as_bhsd(x: Tensor, lead: Size) -> Tensor:
    """[..., n, d] as [batch, heads, n, d]; a copy only where several batch dims are broadcast."""
    heads = lead[-1] if lead else 1
    batch = lead[:-1].numel() if lead else 1
    # expand is a view; reshape copies only if two broadcast dims must become one
    return x.expand(*lead, *x.shape[-2:]).reshape(batch, heads, *x.shape[-2:])


def _mask(mask: Tensor | None, lead: Size, queries: int, keys: int) -> Tensor | None:
    """A mask that broadcasts to [..., L, S] as [batch or 1, heads or 1, L or 1, S or 1]."""
    if mask is None:
        return None
    full = (*lead, queries, keys)
    fits = mask.dim() <= len(full) and all(n in (1, m) for n, m in zip(mask.shape[::-1], full[::-1], strict=False))
    checks.require(fits, _OP, "attn_mask", f"broadcast to {list(full)}", list(mask.shape))
    # up to 4 dims our attention broadcasts by itself
    if mask.dim() <= 4 and len(full) <= 4:
        return mask
    mask = mask[(None,) * (len(full) - mask.dim())]
    if mask.shape[:-3].numel() == 1:
        # one mask for the whole batch is not expanded
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*lead[:-1], *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
