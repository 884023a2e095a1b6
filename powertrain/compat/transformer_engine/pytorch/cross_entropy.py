"""transformer_engine.pytorch.cross_entropy on `powertrain.cross_entropy`."""

from torch import Tensor
from torch.distributed import ProcessGroup

from powertrain.compat.flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from powertrain.compat.missing import unknown
from powertrain.ops.cross_entropy import cross_entropy

__all__ = ["parallel_cross_entropy"]


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: ProcessGroup | None = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    overwrite_input: bool = False,
    _input: Tensor | None = None,
) -> Tensor:
    """The loss of inp [b, s, vocabulary / ranks] against target [b, s], float32: [b, s], or [] with reduce_loss.

    reduce_loss: the mean over all tokens that are not ignored, 0 where all are. is_cg_capturable and overwrite_input
    are hints: it can always be captured, and the input stays as it is.
    """
    # the keyword's older name
    inp = inp if _input is None else _input
    # not the op's mean, which is nan where all tokens are ignored
    count = (target != ignore_idx).sum().clamp(min=1) if reduce_loss else 1
    if dist_process_group is None or dist_process_group.size() == 1:
        loss = cross_entropy(
            inp, target, ignore_index=ignore_idx, reduction="sum" if reduce_loss else "none",
            label_smoothing=label_smoothing,
        )  # fmt: skip
        return loss / count if reduce_loss else loss
    losses, _ = cross_entropy_loss(
        inp.flatten(0, -2), target.flatten(), label_smoothing=label_smoothing, ignore_index=ignore_idx,
        process_group=dist_process_group,
    )  # fmt: skip
    # the mean over all tokens of all ranks' vocabulary shards: the losses are whole on each rank
    return losses.sum() / count if reduce_loss else losses.view(target.shape)


__getattr__ = unknown(__name__)
