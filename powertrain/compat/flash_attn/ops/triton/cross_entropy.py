"""flash_attn.ops.triton.cross_entropy on `powertrain.cross_entropy`."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from powertrain.compat.missing import unknown
from powertrain.ops.cross_entropy import cross_entropy
from powertrain.ops.shapes import acc_dtype

__all__ = ["cross_entropy_loss"]


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Each row's loss, and the part of it that lse_square_scale * lse^2 is (without a gradient).

    Shapes: logits [n, vocabulary], labels [n]; with process_group the vocabulary is sharded over its ranks, in order.
    precomputed_lse and inplace_backward save time or memory there; they change no result and are not needed here.
    A logit_scale besides 1 makes a float32 copy of the logits.
    Returns (losses, z_losses), [n] float32.
    """
    # scaled here, because the kernel takes a softcap but no scale; a scale of 1 needs no pass. In float32, as
    # flash-attn does: in bfloat16 a logit of 30 would be off by 0.06, and the loss with it
    scaled = logits if logit_scale == 1.0 else logits.to(acc_dtype(logits.dtype)) * logit_scale
    if process_group is None or process_group.size() == 1:
        losses = cross_entropy(
            scaled, labels, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing,
            z_loss=lse_square_scale,
        )  # fmt: skip
    else:
        # here: one process needs nothing of tensor parallelism
        from powertrain.nn.tensor_parallel.vocab import vocab_parallel_cross_entropy
        from powertrain.parallel.overlap import Overlap

        losses = vocab_parallel_cross_entropy(
            scaled, labels, Overlap(process_group), ignore_index=ignore_index, reduction="none",
            label_smoothing=label_smoothing, z_loss=lse_square_scale,
        )  # fmt: skip
    if not lse_square_scale:
        return losses, torch.zeros_like(losses)
    with torch.no_grad():
        # float32 even for 16-bit logits, as the loss
        lse = torch.logsumexp(scaled.to(losses.dtype), -1)
        if process_group is not None and process_group.size() > 1:
            parts = [torch.empty_like(lse) for _ in range(process_group.size())]
            # each rank has a part of the vocabulary: the LSE of LSEs is that of all
            torch.distributed.all_gather(parts, lse, group=process_group)
            lse = torch.logsumexp(torch.stack(parts), 0)
        # ignored rows contribute no z-loss
        return losses, (lse_square_scale * lse.square()).masked_fill(labels == ignore_index, 0.0)


__getattr__ = unknown(__name__)
