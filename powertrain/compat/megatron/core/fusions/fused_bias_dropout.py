"""megatron.core.fusions.fused_bias_dropout on `powertrain.bias_dropout_add`."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.ops.bias_dropout_add import bias_dropout_add

__all__ = [
    "bias_dropout_add_fused_inference",
    "bias_dropout_add_fused_train",
    "bias_dropout_add_unfused",
    "get_bias_dropout_add",
]

WithBias = tuple[Tensor, Tensor | None]


def _bias_dropout_add(training: bool, x_with_bias: WithBias, residual: Tensor, prob: float) -> Tensor:
    x, bias = x_with_bias
    if bias is not None and bias.dim() != 1:
        # theirs broadcasts, and older callers expand the bias; the kernel has one for each channel
        x, bias = x + bias, None
    # the result has x's dtype there, which pipeline stages exchange
    return bias_dropout_add(x, bias, residual.to(x.dtype), prob, training=training)


def bias_dropout_add_unfused(training: bool) -> Callable[[WithBias, Tensor, float], Tensor]:
    """A function (x_with_bias, residual, prob); fused here too."""
    return partial(_bias_dropout_add, training)


def bias_dropout_add_fused_train(x_with_bias: WithBias, residual: Tensor, prob: float) -> Tensor:
    """residual + dropout(x + bias); the bias broadcasts to x, or is None; in x's dtype."""
    return _bias_dropout_add(True, x_with_bias, residual, prob)


def bias_dropout_add_fused_inference(x_with_bias: WithBias, residual: Tensor, prob: float) -> Tensor:
    """residual + x + bias."""
    return _bias_dropout_add(False, x_with_bias, residual, prob)


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[[WithBias, Tensor, float], Tensor]:
    """The function for training, or for inference."""
    # inference and training differ in dropout only
    return bias_dropout_add_fused_train if training else bias_dropout_add_fused_inference


__getattr__ = unknown(__name__)
