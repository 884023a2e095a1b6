"""liger_kernel.transformers.vocab_parallel_cross_entropy."""

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from powertrain.compat.flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from powertrain.compat.missing import unknown
from powertrain.ops.conversion import unsupported
from powertrain.runtime import checks

__all__ = ["LigerVocabParallelCrossEntropy"]

_OP = "LigerVocabParallelCrossEntropy"


class LigerVocabParallelCrossEntropy(nn.Module):
    """Each token's cross entropy, float32 [S, B], of logits whose vocabulary is sharded over the ranks of a group.

    label_smoothing_formula: "pytorch", or "megatron", whose smoothing leaves out the target (a K / (K - 1) for a, K
    words in all). label_smoothing_mode "partition", whose loss differs from rank to rank, raises with several ranks.
    Raises ValueError naming the argument.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "none",
        label_smoothing_formula: str = "pytorch",
        label_smoothing_mode: str = "global",
    ) -> None:
        super().__init__()
        checks.one_of(_OP, "reduction", reduction, ("none",))
        checks.require(0.0 <= label_smoothing < 1.0, _OP, "label_smoothing", "be in [0, 1)", label_smoothing)
        checks.one_of(_OP, "label_smoothing_formula", label_smoothing_formula, ("pytorch", "megatron"))
        checks.one_of(_OP, "label_smoothing_mode", label_smoothing_mode, ("global", "partition"))
        self.ignore_index, self.label_smoothing, self.reduction = ignore_index, label_smoothing, reduction
        self.label_smoothing_formula, self.label_smoothing_mode = label_smoothing_formula, label_smoothing_mode

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: ProcessGroup | None = None) -> Tensor:
        """vocab_parallel_logits [S, B, V / ranks], target [S, B] in [0, V); tp_group None: one rank."""
        shape = vocab_parallel_logits.shape
        checks.require(len(shape) == 3, _OP, "vocab_parallel_logits", "have shape [S, B, V]", list(shape))
        checks.shape(_OP, "target", target, shape[:2], "[S, B] of vocab_parallel_logits")
        ranks = 1 if tp_group is None else tp_group.size()
        if ranks > 1 and self.label_smoothing and self.label_smoothing_mode == "partition":
            unsupported(_OP, "label_smoothing_mode", "partition", '"global"')
        smoothing, words = self.label_smoothing, shape[-1] * ranks
        if self.label_smoothing_formula == "megatron":
            smoothing = smoothing * words / (words - 1)
        losses, _ = cross_entropy_loss(
            vocab_parallel_logits.flatten(0, 1), target.flatten(), label_smoothing=smoothing,
            ignore_index=self.ignore_index, process_group=tp_group,
        )  # fmt: skip
        return losses.view(target.shape)

    def extra_repr(self) -> str:
        return f"label_smoothing={self.label_smoothing}, formula={self.label_smoothing_formula!r}"


__getattr__ = unknown(__name__)
