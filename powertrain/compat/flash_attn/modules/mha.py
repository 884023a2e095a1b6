"""flash_attn.modules.mha: attention of packed projections, padded or as sequences one after the other."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from powertrain.compat.flash_attn.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from powertrain.compat.flash_attn.layers.rotary import RotaryEmbedding
from powertrain.compat.flash_attn.modules.attention import CrossAttention, SelfAttention
from powertrain.compat.flash_attn.utils.generation import InferenceParams
from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["MHA", "CrossAttention", "FlashCrossAttention", "FlashSelfAttention", "SelfAttention", "get_alibi_slopes"]


class _FlashAttention(nn.Module):
    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.causal, self.softmax_scale, self.window_size = causal, softmax_scale, window_size
        self.drop, self.deterministic = nn.Dropout(attention_dropout), deterministic
        # moves with the module and stays out of the state dict, as theirs
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def _options(self, causal: bool | None) -> dict[str, Any]:
        return {
            "softmax_scale": self.softmax_scale, "causal": self.causal if causal is None else causal,
            "alibi_slopes": self.alibi_slopes, "window_size": self.window_size, "deterministic": self.deterministic,
        }  # fmt: skip


class FlashSelfAttention(_FlashAttention):
    """Of qkv [B, S, 3, H, D], or [total, 3, H, D] with cu_seqlens [B + 1] and max_seqlen."""

    def forward(
        self, qkv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        # the dropout module is a holder of p, as in flash-attn, so that code may change it
        p, options = self.drop.p if self.training else 0.0, self._options(causal)
        if cu_seqlens is None:
            result = flash_attn_qkvpacked_func(qkv, p, **options)
        else:
            _require("FlashSelfAttention", max_seqlen=max_seqlen)
            assert max_seqlen is not None
            result = flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, p, **options)
        assert isinstance(result, Tensor)
        return result


class FlashCrossAttention(_FlashAttention):
    """Of q [B, Sq, H, D] and kv [B, Sk, 2, Hk, D], or sequences one after the other with both cu_seqlens."""

    # there alibi_slopes come before window_size, in FlashSelfAttention after it
    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0,
        alibi_slopes: Tensor | None = None, window_size: tuple[int, int] = (-1, -1), deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None, cu_seqlens_k: Tensor | None = None, max_seqlen_k: int | None = None,
    ) -> Tensor:  # fmt: skip
        p, options = self.drop.p if self.training else 0.0, self._options(causal)
        if cu_seqlens is None:
            result = flash_attn_kvpacked_func(q, kv, p, **options)
        else:
            _require("FlashCrossAttention", max_seqlen=max_seqlen, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k)
            assert max_seqlen is not None and cu_seqlens_k is not None and max_seqlen_k is not None
            result = flash_attn_varlen_kvpacked_func(
                q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, p, **options
            )
        assert isinstance(result, Tensor)
        return result


def _require(op: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        checks.require(value is not None, op, name, "be given with cu_seqlens", None)


class MHA(nn.Module):
    """Multi-head attention with flash-attn's arguments and parameters: Wqkv, or Wq and Wkv, and out_proj.

    x [B, S, E], or [total, E] with cu_seqlens and max_seqlen. num_heads_kv: fewer heads of keys and values. cross_attn:
    keys and values of x_kv, queries of mixer_subset of x. dwconv: a causal convolution of three tokens over the
    projections. rotary_emb_*: those of `RotaryEmbedding`. use_flash_attn decides which arguments a call takes, as
    there: cu_seqlens with it, key_padding_mask [B, S] (True counts) without; our kernels serve both. checkpointing:
    attention again in backward. return_residual: (output, x). fused_bias_fc is a hint.
    inference_params: keys and values of earlier calls, of the layer layer_idx. Raises ValueError naming the argument.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_dim, self.num_heads, self.cross_attn, self.causal = embed_dim, num_heads, cross_attn, causal
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        self.layer_idx, self.dwconv, self.rotary_emb_dim = layer_idx, dwconv, rotary_emb_dim
        self.use_flash_attn, self.return_residual, self.checkpointing = use_flash_attn, return_residual, checkpointing
        self._check(use_alibi, window_size)
        self.head_dim = embed_dim // num_heads
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base, device
            )
        kv_dim = 2 * self.head_dim * self.num_heads_kv
        sizes = {"Wq": embed_dim, "Wkv": kv_dim} if cross_attn else {"Wqkv": embed_dim + kv_dim}
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(embed_dim, size, bias=qkv_proj_bias, **place))
        if dwconv:
            packed = self.num_heads_kv == num_heads
            widths = {"dwconv_qkv": embed_dim + kv_dim} if packed else {"dwconv_q": embed_dim, "dwconv_kv": kv_dim}
            for name, size in widths.items():
                self.add_module(name, nn.Conv1d(size, size, kernel_size=3, padding=2, groups=size, **place))
        common: dict[str, Any] = {
            "causal": causal, "softmax_scale": softmax_scale, "attention_dropout": dropout
        }  # fmt: skip
        if use_flash_attn:
            slopes = None
            if use_alibi:
                slopes = torch.tensor(get_alibi_slopes(num_heads), dtype=torch.float32, device=device)
            more: dict[str, Any] = {"alibi_slopes": slopes, "window_size": window_size}
            self.inner_attn: nn.Module = FlashSelfAttention(**common, **more)
            self.inner_cross_attn: nn.Module = FlashCrossAttention(**common, **more)
        else:
            self.inner_attn, self.inner_cross_attn = SelfAttention(**common), CrossAttention(**common)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **place)

    def _check(self, use_alibi: bool, window_size: tuple[int, int]) -> None:
        heads, size = self.num_heads, self.embed_dim
        checks.require(size % heads == 0, "MHA", "embed_dim", f"be a multiple of num_heads {heads}", size)
        fits = heads % self.num_heads_kv == 0
        checks.require(fits, "MHA", "num_heads_kv", f"divide num_heads {heads}", self.num_heads_kv)
        plain = self.use_flash_attn or (not use_alibi and tuple(window_size) == (-1, -1))
        checks.require(plain, "MHA", "use_flash_attn", "be True with use_alibi or window_size", False)
        turns = self.rotary_emb_dim == 0 or not self.cross_attn
        checks.require(turns, "MHA", "rotary_emb_dim", "be 0 with cross_attn", self.rotary_emb_dim)
        packed = not self.dwconv or not self.cross_attn or self.num_heads_kv != heads
        checks.require(packed, "MHA", "dwconv", "be False for cross_attn with as many heads of keys", True)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> Tensor:
        """An empty cache [batch_size, max_seqlen, 2, num_heads_kv, head_dim]."""
        shape = batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim
        weight = self.out_proj.weight
        return torch.empty(shape, dtype=weight.dtype if dtype is None else dtype, device=weight.device)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Any = None,
        inference_params: InferenceParams | None = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Of x's shape, but for mixer_subset."""
        self._check_call(x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params)
        q, kv = self._project(x, x_kv, mixer_subset)
        offset: int | Tensor = 0
        if inference_params is not None:
            lengths = inference_params.lengths_per_sample
            offset = inference_params.seqlen_offset if lengths is None else lengths[: x.shape[0]]
        if self.rotary_emb_dim > 0:
            longest = None if inference_params is None else inference_params.max_seqlen
            q, kv = self.rotary_emb(q, kv, seqlen_offset=offset, max_seqlen=longest)
        if inference_params is not None:
            context = self._attend_cached(q, kv, inference_params, offset)
        else:
            options: dict[str, Any] = {"key_padding_mask": key_padding_mask}
            if self.use_flash_attn:
                options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
            context = self._attend(q, kv, {**options, **kwargs})
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _check_call(
        self, x_kv: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None,
        subset: Any, params: InferenceParams | None,
    ) -> None:  # fmt: skip
        alone = self.cross_attn or (x_kv is None and subset is None)
        checks.require(alone, "MHA", "x_kv and mixer_subset", "be None without cross_attn", "a value")
        checks.require(
            mask is None or not self.use_flash_attn, "MHA", "key_padding_mask", "be None with use_flash_attn", "a mask"
        )
        if cu_seqlens is not None:
            checks.require(max_seqlen is not None, "MHA", "max_seqlen", "be given with cu_seqlens", None)
            dense = self.use_flash_attn and not self.dwconv and self.rotary_emb_dim == 0
            must = "be None but with use_flash_attn and without dwconv and rotary_emb_dim"
            checks.require(dense, "MHA", "cu_seqlens", must, list(cu_seqlens.shape))
        if params is not None:
            checks.require(cu_seqlens is None and mask is None, "MHA", "inference_params", "be given alone", "more")
            checks.require(not self.dwconv, "MHA", "inference_params", "be None with dwconv", "a value")
            checks.require(self.layer_idx is not None, "MHA", "layer_idx", "be given for inference_params", None)

    def _project(self, x: Tensor, x_kv: Tensor | None, subset: Any) -> tuple[Tensor, Tensor]:
        """q [..., H, D] and kv [..., 2, Hk, D]."""
        if self.cross_attn:
            q = self.get_submodule("Wq")(x if subset is None else x[:, subset])
            kv = self.get_submodule("Wkv")(x if x_kv is None else x_kv)
        else:
            qkv = self.get_submodule("Wqkv")(x)
            if self.dwconv and self.num_heads_kv == self.num_heads:
                qkv = self._convolved(qkv, "dwconv_qkv")
            q, kv = qkv[..., : self.embed_dim], qkv[..., self.embed_dim :]
        if self.dwconv and self.num_heads_kv != self.num_heads:
            q, kv = self._convolved(q, "dwconv_q"), self._convolved(kv, "dwconv_kv")
        return q.unflatten(-1, (-1, self.head_dim)), kv.unflatten(-1, (2, -1, self.head_dim))

    def _convolved(self, x: Tensor, name: str) -> Tensor:
        """Of three tokens, the last of which is the position's own."""
        y: Tensor = self.get_submodule(name)(x.transpose(1, 2))[..., :-2]
        return y.transpose(1, 2).contiguous()

    def _attend(self, q: Tensor, kv: Tensor, options: dict[str, Any]) -> Tensor:
        if self.cross_attn or self.num_heads_kv != self.num_heads:
            module: nn.Module = self.inner_cross_attn
            tensors: tuple[Tensor, ...] = q, kv
            if options.get("cu_seqlens") is not None and not self.cross_attn:
                own = {"cu_seqlens_k": options["cu_seqlens"], "max_seqlen_k": options["max_seqlen"]}
                options = {**own, **options}
        else:
            module, tensors = self.inner_attn, (torch.cat((q.unsqueeze(-3), kv), -3),)
        if self.checkpointing:
            again: Tensor = checkpoint(module, *tensors, use_reentrant=False, **options)
            return again
        context: Tensor = module(*tensors, **options)
        return context

    def _attend_cached(self, q: Tensor, kv: Tensor, params: InferenceParams, offset: int | Tensor) -> Tensor:
        """Keys and values join the cache, then all of it is attended to."""
        assert self.layer_idx is not None
        caches, batch = params.key_value_memory_dict, kv.shape[0]
        if self.layer_idx not in caches:
            caches[self.layer_idx] = self.allocate_inference_cache(params.max_batch_size, params.max_seqlen, kv.dtype)
        first = params.batch_size_offset
        cache = caches[self.layer_idx][first : first + batch]
        checks.require(len(cache) == batch, "MHA", "x", f"have at most {len(cache)} sequences", batch)
        inner: Any = self.inner_cross_attn
        if params.seqlen_offset == 0:
            longest = cache.shape[1]
            checks.require(kv.shape[1] <= longest, "MHA", "x", f"have at most {longest} tokens", kv.shape[1])
            cache[:, : kv.shape[1]] = kv
            context: Tensor = inner(q, kv)
            return context
        result = flash_attn_with_kvcache(
            q, cache[:, :, 0], cache[:, :, 1], kv[:, :, 0], kv[:, :, 1], cache_seqlens=offset,
            softmax_scale=inner.softmax_scale, causal=inner.causal, alibi_slopes=getattr(inner, "alibi_slopes", None),
            window_size=getattr(inner, "window_size", (-1, -1)),
        )  # fmt: skip
        assert isinstance(result, Tensor)
        return result


def get_alibi_slopes(nheads: int) -> list[float]:
    """2^(-8 i / n), i from 1 to n, for a power of two; else those of the next lower one, and every second of twice it.

    Source: Press et al., arXiv:2108.12409.
    """
    # Press et al.: powers of two have an exact geometric series
    lower = 2 ** math.floor(math.log2(nheads))
    slopes = [2 ** (-8 * i / lower) for i in range(1, lower + 1)]
    # the heads beyond take every second slope of the series for twice as many
    between = [2 ** (-4 * i / lower) for i in range(1, 2 * lower + 1, 2)]
    return slopes + between[: nheads - lower]


__getattr__ = unknown(__name__)
