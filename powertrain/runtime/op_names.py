"""Names of ops, as `powertrain.disable` and POWERTRAIN_DISABLE take them."""

import difflib
from collections.abc import Iterable

OPS = (
    "activation", "adamw", "attention", "bias_dropout_add", "clip_grad_norm_", "cross_entropy", "decode_attention",
    "fp8_gated_activation", "fp8_grouped_gemm", "fp8_linear", "gated_activation", "gemm", "grouped_gemm", "layer_norm",
    "linear_activation", "linear_cross_entropy", "linear_log_probs", "lora_linear", "merge_attentions", "moe_permute",
    "moe_route", "moe_unpermute", "poison", "rms_norm", "rope", "rope_qkv", "scaled_softmax", "sum_parts",
    "varlen_attention",
)  # fmt: skip
# functions and classes that are called otherwise than their op
_FUNCTIONS = {"AdamW": "adamw", "swiglu": "gated_activation", "geglu": "gated_activation", "gelu": "activation"}


def op_names(given: Iterable[str]) -> tuple[str, ...]:
    """The ops of these names, functions' names among them; "all" stands for every op. ValueError for another name."""
    names = []
    for name in given:
        op = _FUNCTIONS.get(name, name)
        if op != "all" and op not in OPS:
            near = difflib.get_close_matches(name, [*OPS, *_FUNCTIONS, "all"], 1)
            meant = f"; did you mean {near[0]!r}?" if near else f": {', '.join(OPS)}, or all"
            raise ValueError(f"must name ops, got {name!r}{meant}")
        names.append(op)
    return tuple(names)
