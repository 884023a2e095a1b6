"""Every kernel of attention and varlen_attention, launched on meta tensors for `record()` to see."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.attention import attention, varlen_attention

META = torch.device("meta")
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512))
FEATURES = ("causal", "packed", "documents", "prefix", "dropout", "long bias", "softcap")
B, S, H, K = 2, 512, 8, 2


def _integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def launch(feature: str, head_dims: tuple[int, int], dtype: torch.dtype, backend: str = "triton") -> None:
    """Forward and backward with one feature."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META, requires_grad=True)

    d_qk, d_v = head_dims
    options: dict[str, Any] = {"backend": backend}
    if feature == "packed":
        q, k, v = empty(B * S, H, d_qk), empty(B * S, K, d_qk), empty(B * S, K, d_v)
        out = varlen_attention(q, k, v, _integers(B + 1), is_causal=True, **options)
    else:
        # the scores of a long one are too many for its gradient to store them
        length = {"odd bias": S - 1, "long bias": 8 * S}.get(feature, S)
        if feature in ("bias", "long bias"):
            options["attn_bias"] = empty(H, length, length)
        elif feature == "odd bias":
            options["attn_bias"] = empty(B, H, S - 1, S - 1)
        elif feature in ("mask", "padding"):
            options["attn_bias"] = torch.empty(B, 1, S if feature == "mask" else 1, S, dtype=torch.bool, device=META)
        else:
            options["is_causal"] = True
        if feature == "documents":
            options["document_ids"] = _integers(B, S)
        elif feature == "prefix":
            options["prefix_lengths"] = _integers(B)
        elif feature == "dropout":
            options |= {"dropout_p": 0.1, "dropout_seed": _integers(2, dtype=torch.int64)}
        elif feature == "softcap":
            options |= {"softcap": 30.0, "window_size": (100, 0), "sinks": empty(H)}
        out = attention(empty(B, length, H, d_qk), empty(B, length, K, d_qk), empty(B, length, K, d_v), **options)
    out.backward(torch.empty_like(out))


def launch_masks(dtype: torch.dtype) -> None:
    """Dense masks and biases of their own; head dims do not matter to how they are read."""
    for feature in ("mask", "padding", "bias", "odd bias"):
        launch(feature, (64, 64), dtype)


@contextmanager
def any_order(allowed: bool = True) -> Iterator[None]:
    """Sums in no fixed order are allowed inside, which the tests' settings do not."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not allowed)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def launch_hopper_attention(dtype: torch.dtype) -> None:
    """Every plan of the Hopper forward with each kind of mask, and its backward where it has one; on sm_90, 16 bits."""
    with any_order():
        for head_dims in ((64, 64), (128, 128), (256, 256)):
            for feature in ("causal", "packed", "softcap"):
                launch(feature, head_dims, dtype, "hopper")
        for head_dims in ((80, 80), (160, 160), (192, 192)):  # in two pieces of columns
            launch("causal", head_dims, dtype, "hopper")
        for feature in ("causal", "packed"):  # tiles of 96 keys serve unequal ones alone
            launch(feature, (192, 128), dtype, "hopper")
        for feature, head_dims in (("causal", (512, 512)), ("packed", (384, 384)), ("softcap", (320, 448))):
            launch(feature, head_dims, dtype, "hopper")
        # heads that are not split: tiles of 128, 64, 96 keys
        for head_dim, batch, length in ((128, B, S), (256, B, S), (192, 8, 1024)):
            x = torch.empty(batch, length, 16, head_dim, dtype=dtype, device=META, requires_grad=True)
            attention(x, x, x, is_causal=True, backend="hopper").backward(torch.empty_like(x))
    with any_order(False):
        for head_dims in ((64, 64), (128, 128), (256, 256)):
            launch("causal", head_dims, dtype, "hopper")
    for head_dims, length in (((64, 64), 8192), ((192, 128), S), ((256, 256), S)):
        q, k, v = (torch.empty(B, length, H, d, dtype=dtype, device=META) for d in (*head_dims[:1] * 2, head_dims[1]))
        attention(q, k, v, is_causal=True, backend="hopper")
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        varlen_attention(*flat, _integers(B + 1), is_causal=True, backend="hopper")
    for head_dim, batch in ((64, 1), (128, 1), (128, 16), (256, 1)):  # of 16, enough tiles: keys are not cut
        q = torch.empty(batch, 64, 32, head_dim, dtype=dtype, device=META)
        k = torch.empty(batch, 4096, 8, head_dim, dtype=dtype, device=META)
        attention(q, k, k, is_causal=True, backend="hopper")
        starts = _integers(batch + 1), _integers(batch + 1)
        flat = [x.flatten(0, 1) for x in (q, k, k)]
        varlen_attention(*flat, *starts, max_seqlen_q=64, is_causal=True, backend="hopper")


def launch_attention_kernels(dtype: torch.dtype) -> None:
    """Kernels that the catalog of ops does not launch: of wide heads, documents, prefixes, dropout."""
    for head_dims in ((256, 256), (512, 512)):
        launch("causal", head_dims, dtype)
    for feature in ("documents", "dropout"):
        launch(feature, (64, 64), dtype)
    launch("prefix", (128, 128), dtype)


def launch_all_features(dtype: torch.dtype) -> None:
    for head_dims in HEAD_DIMS:
        for feature in FEATURES:
            launch(feature, head_dims, dtype)
