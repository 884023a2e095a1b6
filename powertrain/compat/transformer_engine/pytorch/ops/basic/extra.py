"""Operations with a second input or output tensor: sums, copies, and activations scaled row by row."""

from torch import Tensor, nn

from powertrain.compat.transformer_engine.pytorch.glu import halves_of_blocks
from powertrain.compat.transformer_engine.pytorch.module.base import in_autocast
from powertrain.compat.transformer_engine.pytorch.ops.basic.activation import clamped, situ
from powertrain.ops.activations import activation, gated_activation
from powertrain.ops.conversion import unsupported
from powertrain.runtime import checks


class AddExtraInput(nn.Module):
    """input + extra input. The sum is a new tensor; in_place changes nothing (there it overwrites the extra input)."""

    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()

    def forward(self, input: Tensor, extra: Tensor) -> Tensor:
        return input + extra


class MakeExtraOutput(nn.Module):
    """(input, input); backward adds both gradients. in_place, a hint there where to add them, changes nothing."""

    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return input, input


class _Scaled(nn.Module):
    """An activation of [..., N], or of gates and ups [..., 2N], times scales [...]."""

    num_extra_inputs = 1

    def forward(self, input: Tensor, scales: Tensor) -> Tensor:
        op = type(self).__name__
        checks.shape(op, "scales", scales, input.shape[:-1], "shape of the input without its last dim")
        y = self._activation(in_autocast(input))
        return y * scales.unsqueeze(-1).to(y.dtype)

    def _activation(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _ScaledGLU(_Scaled):
    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        if activation_recompute_in_mlp:
            unsupported(type(self).__name__, "activation_recompute_in_mlp", True, "False")
        self.glu_interleave_size = glu_interleave_size

    def _halves(self, x: Tensor) -> Tensor:
        return halves_of_blocks(type(self).__name__, x, self.glu_interleave_size)


class ScaledSwiGLU(_ScaledGLU):
    """silu(gate) * up * scales; x [..., 2N] the gate first, or in blocks of glu_interleave_size."""

    def _activation(self, x: Tensor) -> Tensor:
        return gated_activation(self._halves(x), "swiglu")


class ScaledSiTUGLU(_ScaledGLU):
    """beta1 tanh(gate / beta1) sigmoid(gate) * beta2 tanh(up / beta2) * scales, by PyTorch in float32."""

    def __init__(
        self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False, beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:  # fmt: skip
        super().__init__(glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp)
        self.beta1, self.beta2 = beta1, beta2

    def _activation(self, x: Tensor) -> Tensor:
        return situ(type(self).__name__, self._halves(x), self.beta1, self.beta2)


class ScaledClampedQGeGLU(_ScaledGLU):
    """`ClampedSwiGLU` times scales."""

    def __init__(
        self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False, limit: float = 7.0,
        alpha: float = 1.702, glu_linear_offset: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp)
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset

    def _activation(self, x: Tensor) -> Tensor:
        return clamped(self._halves(x), self.limit, self.alpha, self.glu_linear_offset)


class ScaledSReLU(_Scaled):
    """relu(x)² * scales; activation_recompute_in_mlp is a hint: the activation is made again in backward anyway."""

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()

    def _activation(self, x: Tensor) -> Tensor:
        return activation(x, "relu_squared")
