"""liger_kernel.transformers.fused_ce_tvd."""

from torch import Tensor, nn

from powertrain.compat.liger_kernel.row_blocks import total_variation
from powertrain.compat.missing import unknown
from powertrain.ops.cross_entropy import cross_entropy
from powertrain.runtime import checks

__all__ = ["LigerFusedCETVDLoss"]


class LigerFusedCETVDLoss(nn.Module):
    """(cross entropy [N], total variation distance [N]) of logits, float32, not reduced.

    forward takes student_logits and teacher_logits [N, V] and target [N]; both terms of rows of `ignore_index` are 0,
    and so is their gradient. No gradient of the teacher. Saved are the logits and a few bytes a row; what is V wide in
    float32 is of a block of rows. Raises ValueError naming the argument.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        op = "LigerFusedCETVDLoss"
        checks.require(student_logits.dim() == 2, op, "student_logits", "have shape [N, V]", list(student_logits.shape))
        checks.shape(op, "teacher_logits", teacher_logits, student_logits.shape, "shape of student_logits")
        checks.shape(op, "target", target, student_logits.shape[:1], "[N] of student_logits")
        loss = cross_entropy(student_logits, target, ignore_index=self.ignore_index, reduction="none")
        return loss, total_variation(student_logits, teacher_logits, target != self.ignore_index)


__getattr__ = unknown(__name__)
