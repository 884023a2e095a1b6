"""xformers.ops.swiglu_op on `powertrain.linear_activation`: gate and up, and their product, in one kernel on Hopper."""

from torch import Tensor, nn
from torch.nn import functional as F

from powertrain.compat.missing import unknown
from powertrain.ops.gemm.linear_activation import linear_activation
from powertrain.ops.gemm.padded_mlp import has_odd_width, padded_mlp
from powertrain.runtime import checks

__all__ = ["SwiGLU", "SwiGLUOp", "swiglu", "swiglu_packed"]


class SwiGLUOp:
    """The choice of an implementation there; here there is one, and only None is taken."""


def swiglu(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    w3: Tensor,
    b3: Tensor | None,
    *,
    op: SwiGLUOp | None = None,
) -> Tensor:
    """(silu(x w1^T + b1) * (x w2^T + b2)) w3^T + b3.

    Shapes: x [..., in], w1 and w2 [hidden, in], w3 [out, hidden], biases [hidden], [hidden], [out] or None.
    """
    # op chooses an implementation there
    checks.require(op is None, "swiglu", "op", "be None: there is one implementation", op)
    if has_odd_width(x, w1, w2, w3, b1, b2, b3):
        return padded_mlp(x, w1, "swiglu", w3, bias=b1, up_weight=w2, up_bias=b2, down_bias=b3)
    hidden = linear_activation(x, w1, "swiglu", bias=b1, up_weight=w2, up_bias=b2)
    return F.linear(hidden, w3, b3)


def swiglu_packed(
    x: Tensor, w1w2: Tensor, b1b2: Tensor | None, w3: Tensor, b3: Tensor | None, *, op: SwiGLUOp | None = None
) -> Tensor:
    """`swiglu` with w1w2 [2, hidden, in] and b1b2 [2, hidden]."""
    b1, b2 = (None, None) if b1b2 is None else b1b2.unbind(0)
    w1, w2 = w1w2.unbind(0)
    return swiglu(x, w1, b1, w2, b2, w3, b3, op=op)


class SwiGLU(nn.Module):
    """`swiglu` with its weights: w12 (gate over up) and w3, or w1, w2 and w3 with _pack_weights=False."""

    w12: nn.Linear | None

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        *,
        _pack_weights: bool = True,
    ) -> None:
        super().__init__()
        hidden_features = hidden_features or in_features
        if _pack_weights:
            self.w12 = nn.Linear(in_features, 2 * hidden_features, bias)
        else:
            self.w12 = None
            self.w1 = nn.Linear(in_features, hidden_features, bias)
            self.w2 = nn.Linear(in_features, hidden_features, bias)
        self.w3 = nn.Linear(hidden_features, out_features or in_features, bias)
        self.in_features, self.hidden_features = in_features, hidden_features
        self.out_features = out_features or in_features
        self.op: SwiGLUOp | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.w12 is None:
            one, two = self.w1, self.w2
            return swiglu(x, one.weight, one.bias, two.weight, two.bias, self.w3.weight, self.w3.bias, op=self.op)
        # a view of the packed weight
        weight = self.w12.weight.unflatten(0, (2, -1))
        bias: Tensor | None = self.w12.bias
        bias = None if bias is None else bias.unflatten(0, (2, -1))
        return swiglu_packed(x, weight, bias, self.w3.weight, self.w3.bias, op=self.op)


__getattr__ = unknown(__name__)
