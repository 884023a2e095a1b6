"""`batch_invariant`: a forward pass in which a token's bits depend on its own sequence alone.

Libraries choose kernels, tiles and splits by the size of a batch, so the order of a token's sums changes with the
tokens around it. Inside the context every step of a forward has one order:

    F.linear              `row_invariant_linear_`: one tile, whatever the number of rows
    attention             by sequence: our kernel's tiles count from its beginning (attention/invariant.py)
    norms, activations, rope, embeddings    as always: their kernels compute each row by itself
    linear_log_probs      as with batch_invariant=True

Source of the problem and of the remedy: He and Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference"
(2025).
"""

import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from powertrain.ops.shapes import as_rows, broadcasts
from powertrain.runtime import checks
from powertrain.runtime.dispatch import cast_by_autocast, disable
from powertrain.runtime.sharding import is_dtensor

# products in which cuBLAS or a kernel for large sizes has a part; disabled, these ops call F.linear
_FUSED = ("linear_activation", "lora_linear")
_entered = 0
# gemm/row_invariant.py, imported at the first entry: attention, which asks here, does not need its kernels
_row_invariant: Any = None


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Context in which a token's results have the same bits for any other tokens in the batch, and any packing.

    It holds for the forward of our models, and of others made of nn.Linear, our `attention` and ops that compute rows
    by themselves: states, logits and log-probabilities of a sequence are equal alone, in a padded batch and in packed
    rows (document_ids, or varlen_attention). A trainer and a sampler that computes whole sequences then agree exactly.
    Gradients are sums over tokens, so they are deterministic as before but not independent of the batch; so are mean
    losses. With dropout each token draws by its place in the batch.

    Bits are equal on one kind of device with one version of PyTorch and of Powertrain, not between kinds. Linear layers
    do not use cuBLAS, attention no backend but ours. The number of sequences is read from document_ids by the host. On
    a CPU without kernels rows and queries are computed one at a time: correct and slow. There it holds for states,
    logits and log-probabilities, not for entropies and divergences.

    The context is of the calling thread; ops of other threads may meanwhile take the same, slower ways. Calls that have
    no such order raise NotImplementedError: decoding with a KV cache, mixture of experts, gMLP, FP8, tensor
    parallelism, attention that is not causal self-attention or has a bias, a prefix, chunks or sinks.
    """
    global _entered, _row_invariant
    _row_invariant = importlib.import_module("powertrain.ops.gemm.row_invariant")
    # `disable` tells what is remembered about calls that they may go another way, on entry and at the end
    with disable(*_FUSED), _Products():
        _entered += 1
        try:
            yield
        finally:
            _entered -= 1


def is_batch_invariant() -> bool:
    """Whether a `batch_invariant` context is entered."""
    return _entered > 0


def rows_apart(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """function(*tensors), of plain PyTorch; inside `batch_invariant` called for each row [..., N] separately.

    On a CPU PyTorch computes the last elements of a tensor by scalar code, whose exp and erf round otherwise.
    """
    first = next(t for t in tensors if t is not None)
    if not is_batch_invariant() or first.dim() < 2 or first.is_meta or not first.numel():
        return function(*tensors)
    rows = (itertools.repeat(None) if t is None else as_rows(t).unbind() for t in tensors)
    y = torch.stack([function(*row) for row in zip(*rows)])  # noqa: B905 - repeat has no end
    return y.view(*first.shape[:-1], y.shape[-1])


def refuse_invariant(what: str, instead: str) -> None:
    """Raise NotImplementedError inside `batch_invariant`: `what` has no fixed order of sums."""
    if _entered:
        raise NotImplementedError(f"batch_invariant must not be entered for {what}; {instead}")


class _Products(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (_linear if func is F.linear else func)(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if is_dtensor(input) or is_dtensor(weight):
        refuse_invariant("linear layers of DTensors (tensor parallelism)", "use replicas or FSDP")
    input, weight, bias = cast_by_autocast(input, weight, bias)
    if input.shape[-1] != weight.shape[-1]:
        checks.fail("linear", "input", f"have a last dim of {weight.shape[-1]}, weight's", input.shape[-1])
    N = weight.shape[0]
    checks.same_dtype("linear", "input", input, weight=weight)
    if bias is not None:
        fits = bias.dim() < 2 and broadcasts((bias.numel(),), (N,))
        checks.require(fits, "linear", "bias", f"have {N} elements", list(bias.shape))
        bias = bias.expand(N)
    y: Tensor = _row_invariant.RowInvariantLinear.apply(as_rows(input), weight, bias)
    return y.view(*input.shape[:-1], N)
