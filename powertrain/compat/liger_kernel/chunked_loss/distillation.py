"""Distillation from hidden states of student and teacher: hard loss (cross entropy) and soft loss, weighted.

Hidden states [N, D] and [N, E], weights [V, D] and [U, E], labels [N]. A teacher with more columns (U > V, a padded
vocabulary of the same tokenizer) meets student logits of 0 there. Both losses are divided by the number of labels
that are not ignore_index. The teacher gets no gradient.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from powertrain.compat.missing import unknown
from powertrain.ops.linear_log_probs import LogProbs, Teacher, linear_log_probs
from powertrain.ops.shapes import acc_dtype
from powertrain.runtime import checks

__all__ = ["LigerFusedLinearCosineSimilarityLoss", "LigerFusedLinearJSDLoss"]


class _Distillation(nn.Module):
    """weight_hard_loss * cross entropy + weight_soft_loss * `_soft`."""

    def __init__(
        self, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5,
        ignore_index: int = -100, temperature: float = 1.0, compiled: bool = True, chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        op = type(self).__name__
        checks.require(temperature > 0, op, "temperature", "be above 0", temperature)
        checks.require(chunk_size > 0, op, "chunk_size", "be positive", chunk_size)
        self.weight_hard_loss, self.weight_soft_loss, self.beta = weight_hard_loss, weight_soft_loss, beta
        self.ignore_index, self.temperature, self.compiled = ignore_index, temperature, compiled
        self.chunk_size, self.return_soft_hard_loss = chunk_size, return_soft_hard_loss

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The loss; with return_soft_hard_loss (loss, soft loss, hard loss), the latter without gradient."""
        self._check(student_input, student_weight, teacher_input, teacher_weight, true_labels)
        count = (true_labels != self.ignore_index).sum().clamp(min=1)
        student = student_input, student_weight, student_bias
        hard, soft = self._sums(student, (teacher_input, teacher_weight, teacher_bias), true_labels)
        hard, soft = hard / count, soft / count
        loss = self.weight_hard_loss * hard + self.weight_soft_loss * soft
        return (loss, soft.detach(), hard.detach()) if self.return_soft_hard_loss else loss

    def _check(self, x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, labels: Tensor) -> None:
        op = type(self).__name__
        checks.require(x.dim() == 2, op, "student_input", "have shape [N, D]", list(x.shape))
        checks.shape(op, "true_labels", labels, x.shape[:1], "first dim of student_input")
        fits = teacher_x.dim() == 2 and len(teacher_x) == len(x)
        checks.require(fits, op, "teacher_input", f"have shape [{len(x)}, E]", list(teacher_x.shape))
        few = weight.shape[0] <= teacher_weight.shape[0]
        must = f"have at least student_weight's {weight.shape[0]} rows"
        checks.require(few, op, "teacher_weight", must, teacher_weight.shape[0])

    def _sums(
        self, student: tuple[Tensor, Tensor, Tensor | None], teacher: tuple[Tensor, Tensor, Tensor | None],
        labels: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(hard, soft) losses, summed over the rows."""
        raise NotImplementedError

    def _log_probs(self, student: tuple[Tensor, Tensor, Tensor | None], labels: Tensor) -> LogProbs:
        x, weight, bias = student
        return linear_log_probs(x, weight, labels, bias=bias, ignore_index=self.ignore_index)


class LigerFusedLinearJSDLoss(_Distillation):
    """Soft loss: the generalized Jensen-Shannon divergence, beta KL(T | M) + (1 - beta) KL(S | M), by a `Teacher`.

    M is beta T + (1 - beta) S; beta 0 is KL(T | S), 1 KL(S | T). Rows with ignored labels are left out.
    """

    def _sums(
        self, student: tuple[Tensor, Tensor, Tensor | None], teacher: tuple[Tensor, Tensor, Tensor | None],
        labels: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        teacher_bias = None if teacher[2] is None else teacher[2].detach()
        detached = Teacher(teacher[0].detach(), teacher[1].detach(), teacher_bias, beta=self.beta)
        x, weight, bias = student
        more = teacher[1].shape[0] - weight.shape[0]
        wide = F.pad(weight, (0, 0, 0, more)) if more else weight
        wide_bias = bias if bias is None or not more else F.pad(bias, (0, more))
        result = linear_log_probs(
            x, wide, labels, bias=wide_bias, temperature=self.temperature, ignore_index=self.ignore_index,
            teacher=detached,
        )  # fmt: skip
        assert result.divergence is not None
        is_one = self.temperature == 1.0 and not more
        hard = result if is_one else self._log_probs(student, labels)
        return -hard.log_probs.sum(), result.divergence.sum()


class LigerFusedLinearCosineSimilarityLoss(_Distillation):
    """Soft loss: beta * (1 - cosine of student's and teacher's logits), of all rows, ignored labels included.

    Memory: the logits of chunk_size rows at a time, made again in backward. The temperature changes nothing in it.
    """

    def _sums(
        self, student: tuple[Tensor, Tensor, Tensor | None], teacher: tuple[Tensor, Tensor, Tensor | None],
        labels: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, weight, bias = student
        teacher_x, *head = (None if t is None else t.detach() for t in teacher)
        assert teacher_x is not None
        soft = [
            checkpoint(_distance, rows, weight, bias, other, *head, use_reentrant=False)
            for rows, other in zip(x.split(self.chunk_size), teacher_x.split(self.chunk_size), strict=True)
        ]
        total = torch.stack(soft).sum() if soft else x.sum() * 0
        return -self._log_probs(student, labels).log_probs.sum(), self.beta * total


def _distance(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
) -> Tensor:
    """Sum over the rows of 1 - cosine; the student's logits of columns that it has not are 0."""
    ours, theirs = F.linear(x, weight, bias), F.linear(teacher_x, teacher_weight, teacher_bias)
    acc = acc_dtype(ours.dtype)
    ours = F.pad(ours.to(acc), (0, theirs.shape[-1] - ours.shape[-1]))
    return (1 - F.cosine_similarity(ours, theirs.to(acc), dim=-1)).sum()


__getattr__ = unknown(__name__)
