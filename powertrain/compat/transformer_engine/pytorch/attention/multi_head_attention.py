"""TransformerEngine's MultiheadAttention: its projections around our attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
from powertrain.compat.transformer_engine.pytorch.attention.inference import InferenceParams
from powertrain.compat.transformer_engine.pytorch.attention.kv_cache import batch_of, new_tokens
from powertrain.compat.transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb, table_of
from powertrain.compat.transformer_engine.pytorch.module.base import results
from powertrain.compat.transformer_engine.pytorch.module.linear import LayerNormLinear, Linear
from powertrain.compat.transformer_engine.pytorch.module.norms import LayerNorm, RMSNorm
from powertrain.compat.transformer_engine.pytorch.ops.basic import L2Normalization
from powertrain.ops.conversion import unsupported
from powertrain.ops.rope import rope
from powertrain.runtime import checks

__all__ = ["MultiheadAttention"]

_OP = "MultiheadAttention"


class MultiheadAttention(nn.Module):
    """Projections, rotary embedding, attention, projection, with TransformerEngine's names; FP8 under `autocast`.

    Shapes: hidden_states [s, b, hidden_size] "sbhd", [b, s, hidden_size] "bshd" or [tokens, hidden_size] "thd".
    Submodules: layernorm_qkv or qkv; of cross attention layernorm_query or query_layer, and key_value; q_norm and
    k_norm with qk_norm_type; core_attention; proj. Without fuse_qkv_params their weights are query_weight, key_weight
    and value_weight. With it one weight, whose rows are, for each group of heads, its queries, key and value
    (qkv_weight_interleaved), or all queries, all keys, all values.
    Results: the output, then proj's bias with return_bias, then the norm's output with return_layernorm_output and
    input_layernorm. The attention itself is never FP8. Arguments of attention: `DotProductAttention`; of parallelism:
    `Linear`. inference_params: of self attention, with layer_number; rotary_pos_emb then has the angles of every
    position. seq_length and micro_batch_size are hints.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str = "cuda",
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        checks.one_of(_OP, "attention_type", attention_type, ("self", "cross"))
        checks.require(num_attention_heads > 0, _OP, "num_attention_heads", "be positive", num_attention_heads)
        self.heads, self.groups = num_attention_heads, num_gqa_groups or num_attention_heads
        if self.heads % self.groups:
            checks.fail(_OP, "num_gqa_groups", f"divide num_attention_heads {self.heads}", self.groups)
        self.head_dim = kv_channels or hidden_size // num_attention_heads
        self.qkv_format, self.attention_type, self.name = qkv_format, attention_type, name
        self.layer_number = layer_number
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        self.bottom_right_diagonal, self.return_bias = bottom_right_diagonal, return_bias
        self.input_layernorm, self.return_layernorm_output = input_layernorm, return_layernorm_output
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.rotary_pos_interleaved, self.qk_norm_before_rope = rotary_pos_interleaved, qk_norm_before_rope
        self.q_norm, self.k_norm = _qk_norms(qk_norm_type, self.head_dim, qk_norm_eps, device, params_dtype)
        linear: dict[str, Any] = {
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation, "tp_group": tp_group, "tp_size": tp_size, "bias": bias,
            "get_rng_state_tracker": get_rng_state_tracker, "params_dtype": params_dtype, "device": device,
        }  # fmt: skip
        normed: dict[str, Any] = {
            # the norm of the input is part of the first projection's module there
            "eps": layernorm_epsilon, "normalization": normalization, "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
        }  # fmt: skip
        q_size, kv_size = self.heads * self.head_dim, self.groups * self.head_dim
        sizes = {"query": q_size, "key": kv_size, "value": kv_size}

        def projection(parts: tuple[str, ...], with_norm: bool, split: bool) -> nn.Module:
            options = dict(linear, init_method=init_method)
            options["parameters_split"] = {part: sizes[part] for part in parts} if split else None
            options |= normed if with_norm else {}
            return (LayerNormLinear if with_norm else Linear)(
                hidden_size, sum(sizes[part] for part in parts), **options
            )

        split = not fuse_qkv_params
        if attention_type == "self":
            self.add_module(
                "layernorm_qkv" if input_layernorm else "qkv", projection(tuple(sizes), input_layernorm, split)
            )
        else:
            # without a norm theirs is never split
            query = projection(("query",), input_layernorm, split and input_layernorm)
            self.add_module("layernorm_query" if input_layernorm else "query_layer", query)
            self.key_value = projection(("key", "value"), False, split)
        self.core_attention = DotProductAttention(
            num_attention_heads, self.head_dim, num_gqa_groups=self.groups, attention_dropout=attention_dropout,
            qkv_format=qkv_format, get_rng_state_tracker=get_rng_state_tracker, layer_number=layer_number,
            sequence_parallel=sequence_parallel, attention_type=attention_type, softmax_type=softmax_type,
        )  # fmt: skip
        # attention's output has the query heads' size, also where key heads are fewer
        self.proj = Linear(q_size, hidden_size, init_method=output_layer_init_method, return_bias=return_bias, **linear)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Takes no group, or one of a single rank."""
        self.proj.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: list[int] | None, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Takes no group, or one of a single rank."""
        self.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> Any:
        """Attention of hidden_states to themselves, or to encoder_output; the class documents the results."""
        if inference_params is not None:
            self._prepare_cache(inference_params)
        q, k, v, normed = self._queries_keys_values(hidden_states, encoder_output, is_first_microbatch)
        # before or after rotary: both exist in published models
        if self.q_norm is not None and self.k_norm is not None and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary_pos_emb is not None:
            pair = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            starts = (cu_seqlens_q, cu_seqlens_kv)
            # with padding between sequences, positions count from the padded starts
            if pad_between_seqs:
                starts = (cu_seqlens_q_padded, cu_seqlens_kv_padded)
            if inference_params is not None:
                q, k = (self._turned_cached(x, freqs, inference_params) for x, freqs in zip((q, k), pair, strict=True))
            else:
                q, k = (self._turned(x, freqs, start) for x, freqs, start in zip((q, k), pair, starts, strict=True))
        if self.q_norm is not None and self.k_norm is not None and not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        diagonal = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        context = self.core_attention(
            q, k, v, attention_mask=attention_mask, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded, cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv, bottom_right_diagonal=diagonal,
            attn_mask_type=self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            window_size=self.window_size if window_size is None else window_size,
            checkpoint_core_attention=checkpoint_core_attention, core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes, fast_zero_fill=fast_zero_fill,
            inference_params=inference_params, pad_between_seqs=pad_between_seqs,
        )  # fmt: skip
        projected = self.proj(context, is_first_microbatch=is_first_microbatch)
        output, bias = projected if self.return_bias else (projected, None)
        # the tuple has only the results that were asked for
        return results(output, (self.return_bias, bias), (normed is not None, normed))

    def _queries_keys_values(
        self, x: Tensor, encoder_output: Tensor | None, first: bool | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """[..., heads, head_dim] each, and the norm's output where it is asked for."""
        is_self = self.attention_type == "self"
        own = ("layernorm_qkv" if self.input_layernorm else "qkv") if is_self else self._query_name()
        projected, normed = self.get_submodule(own)(x, is_first_microbatch=first), None
        # the norm's output is kept for a residual that starts behind the norm
        if self.input_layernorm and self.return_layernorm_output:
            projected, normed = projected
        if is_self:
            return *self._cut(projected, self.heads // self.groups), normed
        if encoder_output is None:
            checks.fail(_OP, "encoder_output", "be given for attention_type 'cross'", None)
        # cross attention: queries come from another projection
        _, k, v = self._cut(self.key_value(encoder_output, is_first_microbatch=first), 0)
        return projected.unflatten(-1, (self.heads, self.head_dim)), k, v, normed

    def _query_name(self) -> str:
        return "layernorm_query" if self.input_layernorm else "query_layer"

    def _cut(self, x: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of one projection; `queries` of each group of heads."""
        if self.qkv_weight_interleaved:
            # one group of heads after another: queries of the group, its key, its value
            x, dim = x.unflatten(-1, (self.groups, queries + 2, self.head_dim)), -2
        else:
            # all queries, then all keys, then all values
            x, dim = x.unflatten(-1, (queries + 2, self.groups, self.head_dim)), -3
        q, k, v = x.split((queries, 1, 1), dim)
        return q.flatten(-3, -2), k.flatten(-3, -2), v.flatten(-3, -2)

    def _turned(self, x: Tensor, freqs: Tensor, starts: Tensor | None) -> Tensor:
        # dense formats have equal starts, so cu_seqlens are lengths there
        starts = starts if self.qkv_format == "thd" else None
        return apply_rotary_pos_emb(
            x, freqs, self.qkv_format, cu_seqlens=starts, interleaved=self.rotary_pos_interleaved
        )

    def _prepare_cache(self, params: InferenceParams) -> None:
        """Make this layer's cache, if it is not there yet."""
        if self.attention_type == "cross":
            unsupported(_OP, "inference_params with attention_type", "cross", "keys of the encoder, without a cache")
        checks.require(self.layer_number is not None, _OP, "layer_number", "be given for inference_params", None)
        assert self.layer_number is not None
        if self.layer_number not in params.cache_manager.cache:
            params.allocate_memory(self.layer_number)

    def _turned_cached(self, x: Tensor, freqs: Tensor, params: InferenceParams) -> Tensor:
        """x turned by its tokens' positions in their sequences."""
        batch = batch_of(x, self.qkv_format, params.max_batch_size)
        tokens = new_tokens(x, self.qkv_format, params.cu_seqlens_q, batch)
        # padding may lie beyond the last position that there are angles for
        position = torch.where(tokens.counts, params.get_seqlens_pre_step()[tokens.sequence] + tokens.offset, 0)
        if self.qkv_format != "thd":
            position = position.view(x.shape[:2])
            # batch first, in every format
            position = position.T if self.qkv_format == "sbhd" else position
        turned = rope(
            x, table=table_of(freqs, self.rotary_pos_interleaved), layout=self.qkv_format,  # type: ignore[arg-type]
            interleaved=self.rotary_pos_interleaved, position_ids=position,
        )  # fmt: skip
        assert isinstance(turned, Tensor)
        return turned


def _qk_norms(
    kind: str | None, size: int, eps: float, device: torch.device | str, dtype: torch.dtype | None
) -> tuple[nn.Module | None, nn.Module | None]:
    checks.one_of(_OP, "qk_norm_type", kind, (None, "L2Normalization", "RMSNorm", "LayerNorm"))
    if kind is None:
        return None, None
    if kind == "L2Normalization":
        norm = L2Normalization(eps=eps)
        # one module for both: it has no parameters
        return norm, norm
    made = RMSNorm if kind == "RMSNorm" else LayerNorm
    return made(size, eps, device=device, dtype=dtype), made(size, eps, device=device, dtype=dtype)


__getattr__ = unknown(__name__)
