"""TransformerEngine's TransformerLayer: attention and MLP with their residuals."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.attention.inference import InferenceParams
from powertrain.compat.transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from powertrain.compat.transformer_engine.pytorch.module.base import in_autocast
from powertrain.compat.transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from powertrain.compat.transformer_engine.pytorch.module.norms import LayerNorm, RMSNorm
from powertrain.ops.bias_dropout_add import bias_dropout_add
from powertrain.ops.conversion import unsupported
from powertrain.runtime import checks

__all__ = ["TransformerLayer"]

_OP = "TransformerLayer"


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then that + MLP(norm(that)), with TransformerEngine's names; FP8 under `autocast`.

    Shapes: hidden_states [s, b, hidden_size], or as attn_input_format says ("sbhd", "bshd", "thd"); the result is the
    same. Submodules: self_attention, of a decoder inter_attention, layernorm_mlp, and layernorm with output_layernorm.
    apply_residual_connection_post_layernorm: residuals are the norms' outputs. parallel_attention_mlp:
    x + dropout(attention(x) + MLP(x)). drop_path_rate: a whole sample's branch is dropped, along the first dim.
    Arguments of attention, MLP and parallelism: `MultiheadAttention`, `LayerNormMLP`, `Linear`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str = "cuda",
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        checks.one_of(_OP, "layer_type", layer_type, ("encoder", "decoder"))
        checks.require(0 <= hidden_dropout < 1, _OP, "hidden_dropout", "be in [0, 1)", hidden_dropout)
        checks.require(0 <= drop_path_rate < 1, _OP, "drop_path_rate", "be in [0, 1)", drop_path_rate)
        post = apply_residual_connection_post_layernorm
        if parallel_attention_mlp and (layer_type == "decoder" or post or output_layernorm):
            must = "be False for a decoder, apply_residual_connection_post_layernorm and output_layernorm"
            checks.fail(_OP, "parallel_attention_mlp", must, True)
        if post and output_layernorm:
            # theirs asks the attention for the output of a norm that it has not got
            unsupported(_OP, "apply_residual_connection_post_layernorm", True, "False with output_layernorm")
        self.layer_type, self.layer_number, self.name = layer_type, layer_number, name
        self.self_attn_mask_type, self.window_size = self_attn_mask_type, window_size
        self.bottom_right_diagonal, self.hidden_dropout = bottom_right_diagonal, hidden_dropout
        self.drop_path_rate, self.parallel_attention_mlp = drop_path_rate, parallel_attention_mlp
        self.apply_residual_connection_post_layernorm, self.output_layernorm = post, output_layernorm
        # one dictionary for both attentions and the MLP: the signature has fifty arguments
        common: dict[str, Any] = {
            "tp_group": tp_group, "tp_size": tp_size, "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": get_rng_state_tracker, "sequence_parallel": sequence_parallel,
            "params_dtype": params_dtype, "return_layernorm_output": post, "bias": bias, "device": device,
            "zero_centered_gamma": zero_centered_gamma, "normalization": normalization, "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
        }  # fmt: skip
        attention: dict[str, Any] = {
            **common, "kv_channels": kv_channels, "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon, "layer_number": layer_number, "num_gqa_groups": num_gqa_groups,
            "fuse_qkv_params": fuse_qkv_params, "qkv_weight_interleaved": qkv_weight_interleaved,
            "rotary_pos_interleaved": rotary_pos_interleaved, "qkv_format": attn_input_format,
            "softmax_type": softmax_type, "qk_norm_type": qk_norm_type, "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope,
        }  # fmt: skip
        self.self_attention = MultiheadAttention(
            # the input norm is inside the attention, unless the layer normalizes its output
            hidden_size, num_attention_heads, input_layernorm=not output_layernorm,
            # the bias is added together with dropout and residual, in one kernel
            return_bias=not parallel_attention_mlp, **attention,
        )  # fmt: skip
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size, num_attention_heads, attn_mask_type=enc_dec_attn_mask_type, input_layernorm=True,
                window_size=enc_dec_window_size, bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                attention_type="cross", return_bias=True, **attention,
            )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, return_bias=not parallel_attention_mlp,
            activation=activation, activation_params=activation_params, **common,
        )  # fmt: skip
        if output_layernorm:
            norm = RMSNorm if normalization == "RMSNorm" else LayerNorm
            self.layernorm = norm(
                hidden_size, layernorm_epsilon, zero_centered_gamma=zero_centered_gamma, device=device,
                dtype=params_dtype,
            )  # fmt: skip

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Takes no group, or one of a single rank."""
        self.layernorm_mlp.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: list[int] | None, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Takes no group, or one of a single rank."""
        for attention in self.children():
            if isinstance(attention, MultiheadAttention):
                attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
    ) -> Tensor:
        """The layer's output; arguments of `MultiheadAttention`, those of cross attention begin with enc_dec."""
        x = in_autocast(hidden_states)
        # arguments that both attentions get
        common: dict[str, Any] = {
            "is_first_microbatch": is_first_microbatch, "checkpoint_core_attention": checkpoint_core_attention,
            "inference_params": inference_params, "rotary_pos_emb": rotary_pos_emb,
            "core_attention_bias_type": core_attention_bias_type, "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes, "fast_zero_fill": fast_zero_fill, "pad_between_seqs": pad_between_seqs,
            "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_q_padded": cu_seqlens_q_padded, "max_seqlen_q": max_seqlen_q,
        }  # fmt: skip
        attended = self.self_attention(
            x, attention_mask=attention_mask, cu_seqlens_kv=cu_seqlens_q, cu_seqlens_kv_padded=cu_seqlens_q_padded,
            attn_mask_type=self.self_attn_mask_type if self_attn_mask_type is None else self_attn_mask_type,
            window_size=self.window_size if window_size is None else window_size, max_seqlen_kv=max_seqlen_q,
            bottom_right_diagonal=(
                self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
            ), **common,
        )  # fmt: skip
        if self.parallel_attention_mlp:
            return self._added((attended + self.layernorm_mlp(x, is_first_microbatch), None), x)
        x = self._added(attended, x)
        if self.layer_type == "decoder":
            crossed = self.inter_attention(
                x, attention_mask=enc_dec_attn_mask, encoder_output=encoder_output, cu_seqlens_kv=cu_seqlens_kv,
                cu_seqlens_kv_padded=cu_seqlens_kv_padded, max_seqlen_kv=max_seqlen_kv,
                attn_mask_type=enc_dec_attn_mask_type, window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal, **common,
            )  # fmt: skip
            # cross attention has no drop path, as there
            x = self._added(crossed, x, drop_path=False)
        output = self._added(self.layernorm_mlp(x, is_first_microbatch), x)
        return self.layernorm(output) if self.output_layernorm else output

    def _added(self, branch: tuple[Any, ...], x: Tensor, drop_path: bool = True) -> Tensor:
        """x, or the norm's output where the branch has it, + dropout(branch's output + its bias)."""
        # the residual is the norm's output where the attention returned it
        y, bias, residual = branch if len(branch) == 3 else (*branch, x)
        # an empty bias stands for none
        bias = None if bias is None or not bias.numel() else bias
        if self.drop_path_rate == 0.0 or not drop_path or not self.training:
            return bias_dropout_add(y, bias, residual, self.hidden_dropout, training=self.training)
        y = F.dropout(y if bias is None else y + bias, self.hidden_dropout)
        shape = (y.shape[0], *[1] * (y.dim() - 1))
        # per sample: the first dim, which is the sequence in "sbhd", as there
        kept = torch.rand(shape, dtype=torch.float32, device=y.device) >= self.drop_path_rate
        return residual + y * (kept / (1 - self.drop_path_rate)).to(y.dtype)


__getattr__ = unknown(__name__)
