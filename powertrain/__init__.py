"""Powertrain: Transformer training and inference in PyTorch, accelerated in pure Python."""

from powertrain.runtime.lazy_exports import resolve

__version__ = "0.1.0"

# Public name -> the module that defines it. Resolved on first use, so that `import powertrain` imports neither torch
# nor triton, opens no CUDA context and changes no global state.
_PUBLIC = {
    "rms_norm": "powertrain.ops.norm",
    "layer_norm": "powertrain.ops.norm",
    "rope": "powertrain.ops.rope",
    "rope_qkv": "powertrain.ops.rope",
    "rope_table": "powertrain.ops.rope_table",
    "scaled_softmax": "powertrain.ops.softmax",
    "activation": "powertrain.ops.activations",
    "gated_activation": "powertrain.ops.activations",
    "linear_activation": "powertrain.ops.gemm.linear_activation",
    "swiglu": "powertrain.ops.activations",
    "geglu": "powertrain.ops.activations",
    "gelu": "powertrain.ops.activations",
    "attention": "powertrain.ops.attention",
    "varlen_attention": "powertrain.ops.attention",
    "attention_backend": "powertrain.ops.attention.backend_preferences",
    "attention_backward": "powertrain.ops.attention.partial_backward",
    "explain_attention": "powertrain.ops.attention.explain",
    "decode_attention": "powertrain.ops.attention.decode",
    "DecodeSchedule": "powertrain.ops.attention.step_schedule",
    "explain_decode_attention": "powertrain.ops.attention.explain_decode",
    "merge_attentions": "powertrain.ops.attention.merge",
    "bias_dropout_add": "powertrain.ops.bias_dropout_add",
    "cross_entropy": "powertrain.ops.cross_entropy",
    "linear_cross_entropy": "powertrain.ops.linear_cross_entropy",
    "fp8_grouped_gemm": "powertrain.ops.fp8.grouped",
    "fp8_linear": "powertrain.ops.fp8.linear",
    "linear_log_probs": "powertrain.ops.linear_log_probs",
    "lora_linear": "powertrain.ops.lora_linear",
    "lora": "powertrain.nn.lora",
    "grouped_gemm": "powertrain.ops.grouped_gemm",
    "moe_route": "powertrain.ops.moe",
    "moe_permute": "powertrain.ops.moe",
    "moe_unpermute": "powertrain.ops.moe",
    "moe_load_balancing_loss": "powertrain.ops.moe",
    "moe_update_bias_": "powertrain.ops.moe",
    "AdamW": "powertrain.ops.adamw",
    "clip_grad_norm_": "powertrain.ops.grad_norm",
    "parallelize": "powertrain.models.parallelize",
    "parallelize_linears": "powertrain.nn.tensor_parallel.parallelize_linears",
    "patch": "powertrain.patching.patch",
    "unpatch": "powertrain.patching.patch",
    "batch_invariant": "powertrain.ops.batch_invariance",
    "disable": "powertrain.runtime.dispatch",
    "Target": "powertrain.runtime.target",
    "record": "powertrain.runtime.recording",
    "register_ops": "powertrain.ops.registration",
    "trace": "powertrain.runtime.tracing",
}

_PACKAGES = ("compat", "losses", "nn", "parallel")

__all__ = ["__version__", *_PACKAGES, *_PUBLIC]


def __getattr__(name: str) -> object:
    return resolve(__name__, name, _PUBLIC | {package: f"{__name__}.{package}" for package in _PACKAGES})


def __dir__() -> list[str]:
    return sorted(__all__)
