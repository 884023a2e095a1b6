"""flash_attn.losses.cross_entropy."""

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from powertrain.compat.flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["CrossEntropyLoss"]


class CrossEntropyLoss(nn.Module):
    """`cross_entropy_loss` with a reduction: "mean" over the rows that are not ignored, "sum" or "none"."""

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: ProcessGroup | None = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        checks.one_of("CrossEntropyLoss", "reduction", reduction, ("mean", "sum", "none"))
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.logit_scale, self.lse_square_scale = logit_scale, lse_square_scale
        # kept as an attribute only: nothing is written in place here
        self.inplace_backward, self.process_group = inplace_backward, process_group
        self.return_z_loss = return_z_loss

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """input [n, vocabulary], target [n]: the loss, with return_z_loss also the part that the z-loss is."""
        # one call gives both: the z-loss is part of the loss that it explains
        losses = cross_entropy_loss(
            input, target, precomputed_lse, self.label_smoothing, self.logit_scale, self.lse_square_scale,
            self.ignore_index, self.inplace_backward, self.process_group,
        )  # fmt: skip
        loss, z_loss = (self._reduced(x, target) for x in losses)
        return (loss, z_loss) if self.return_z_loss else loss

    def _reduced(self, losses: Tensor, target: Tensor) -> Tensor:
        if self.reduction == "none":
            return losses
        total = losses.sum()
        # the mean counts the rows that have a target, as torch.nn.CrossEntropyLoss
        return total if self.reduction == "sum" else total / (target != self.ignore_index).sum()


__getattr__ = unknown(__name__)
