"""liger_kernel.transformers.cross_entropy."""

from typing import Any

from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import CrossEntropyOutput, liger_cross_entropy
from powertrain.compat.missing import unknown

__all__ = ["LigerCrossEntropyLoss"]


class LigerCrossEntropyLoss(nn.Module):
    """`liger_cross_entropy` with its options."""

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        # by name, so that forward hands them on as they are
        self.options: dict[str, Any] = {
            "weight": weight,
            "ignore_index": ignore_index,
            "lse_square_scale": lse_square_scale,
            "label_smoothing": label_smoothing,
            "reduction": reduction,
            "softcap": softcap,
            "return_z_loss": return_z_loss,
            "return_token_accuracy": return_token_accuracy,
            "return_predicted_tokens": return_predicted_tokens,
        }

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        return liger_cross_entropy(_input, target, **self.options)


__getattr__ = unknown(__name__)
