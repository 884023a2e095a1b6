"""megatron.core.fusions.fused_bias_swiglu.

cpu_offload_input is a hint; fp8_input_store rounds the saved tensors in Megatron, so it is refused.
"""

from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.ops import activations
from powertrain.ops.conversion import unsupported
from powertrain.runtime import checks

__all__ = ["bias_swiglu", "bias_swiglu_impl", "swiglu", "weighted_bias_swiglu_impl", "weighted_swiglu"]


def swiglu(y: Tensor) -> Tensor:
    """silu of the first half of the last dim, times the second."""
    return activations.swiglu(y)


def bias_swiglu(y: Tensor, bias: Tensor | None) -> Tensor:
    """`swiglu` of y + bias."""
    return activations.swiglu(y, bias=bias)


def weighted_swiglu(y: Tensor, weights: Tensor) -> Tensor:
    """`swiglu` times weights [tokens, 1], in y's dtype."""
    return (activations.swiglu(y) * weights).to(y.dtype)


def bias_swiglu_impl(
    input: Tensor, bias: Tensor | None, fp8_input_store: bool = False, cpu_offload_input: bool = False
) -> Tensor:
    """`bias_swiglu` of two or three dims."""
    # FP8 storage would round the activations that backward reads
    _no_fp8("bias_swiglu_impl", fp8_input_store)
    return bias_swiglu(input, bias)


def weighted_bias_swiglu_impl(
    input: Tensor, bias: Tensor | None, weights: Tensor, fp8_input_store: bool = False
) -> Tensor:
    """`weighted_swiglu` of two or three dims; weights [tokens, 1]; a bias is refused, as there."""
    op = "weighted_bias_swiglu_impl"
    _no_fp8(op, fp8_input_store)
    checks.require(input.dim() in (2, 3), op, "input", "have two or three dims", list(input.shape))
    if bias is not None:
        # the same refusal as Megatron's assertion
        raise NotImplementedError("weighted_bias_swiglu_impl: a bias is not supported for weighted swiglu")
    y = weighted_swiglu(input.flatten(0, -2), weights.flatten(0, -2))
    return y.view(*input.shape[:-1], y.shape[-1])


def _no_fp8(op: str, fp8_input_store: bool) -> None:
    if fp8_input_store:
        unsupported(op, "fp8_input_store", True, "fp8_input_store=False")


__getattr__ = unknown(__name__)
