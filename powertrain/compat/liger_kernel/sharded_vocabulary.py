"""The functions of liger_kernel.transformers.functional for a vocabulary that is sharded over ranks."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from powertrain.nn.tensor_parallel.vocab_log_probs import vocab_parallel_linear_log_probs
from powertrain.parallel.overlap import Overlap
from powertrain.runtime import checks


def liger_fused_linear_scaled_cross_entropy_tp(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    tp_group: ProcessGroup | None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    tiles_per_reduce: int = 1,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Each token's cross entropy against softmax(input @ weight.T / temperature), without the logits.

    Shapes: M tokens, H hidden size, V words in all on W ranks of tp_group (None: the default group).
        input   [M, H]      float32, float16 or bfloat16 (float64 on the CPU); the same on every rank, as target is
        weight  [V / W, H]  this rank's words, the same dtype
        target  [M]         integers in [0, V), or `ignore_index`
    Returns losses [M] float32 (float64 for float64), 0 where ignored, and with return_entropy (losses, entropies):
        the same on every rank. Every rank differentiates them: input's gradient is summed over ranks, weight's is of
        this rank's words. tiles_per_reduce (1, 2 or 4) changes speed there and nothing here.
    Memory: blocks of logits; saves the inputs and six floats a token. Sends the gradient of input and 16 bytes a
        token and rank. Collective: every rank calls it, in the same order.
    Raises ValueError naming the argument; a target out of range gives nan, on every rank.
    """
    op = "liger_fused_linear_scaled_cross_entropy_tp"
    checks.one_of(op, "tiles_per_reduce", tiles_per_reduce, (1, 2, 4))
    # the op below takes any leading dims, Liger's function rows alone
    checks.require(input.dim() == 2, op, "input", "have shape [M, H]", list(input.shape))
    checks.shape(op, "target", target, input.shape[:1], "[M] of input")
    if tp_group is None:
        checks.require(dist.is_initialized(), op, "tp_group", "be a group, or a default group be initialized", None)
        tp_group = dist.group.WORLD
    assert tp_group is not None
    results = vocab_parallel_linear_log_probs(
        input, weight, target, Overlap(tp_group), sequence_parallel=False, temperature=temperature,
        ignore_index=ignore_index, entropy=return_entropy,
    )  # fmt: skip
    # 0 and not -0.0 for ignored tokens, as there
    losses = 0.0 - results.log_probs
    return losses if results.entropy is None else (losses, results.entropy)
