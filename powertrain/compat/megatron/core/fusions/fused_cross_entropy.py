"""megatron.core.fusions.fused_cross_entropy on `powertrain.cross_entropy`."""

from torch import Tensor
from torch.distributed import ProcessGroup

from powertrain.compat.flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from powertrain.compat.missing import unknown

__all__ = ["fused_vocab_parallel_cross_entropy"]


def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Each token's loss, float32, without a reduction: logits [s, b, vocabulary / ranks], target [s, b].

    tp_group: the ranks that share the vocabulary, in order; None: one rank.
    """
    rows = vocab_parallel_logits.flatten(0, -2)
    losses, _ = cross_entropy_loss(rows, target.flatten(), label_smoothing=0.0, process_group=tp_group)
    return losses.view(target.shape)


__getattr__ = unknown(__name__)
