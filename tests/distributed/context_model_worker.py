"""`python -m tests.distributed.context_model_worker OUT`, one rank of test_context: models whole and spread.

Writes to OUT.RANK, for every case, how far loss, logits and gradients are from those of one rank in float64.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powertrain.models import build, configure
from powertrain.models.sequence_sharding import ContextSharding
from powertrain.parallel.context.api import context_parallel

_SMALL = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
# every way that a model's layers know of positions
MODELS: dict[str, dict[str, Any]] = {
    "rotary": {**_SMALL, "architecture": "gpt_neox", "rotary_pct": 0.5},
    "alibi": {**_SMALL, "architecture": "gpt_neox", "position_embedding": "alibi", "parallel_residual": True},
    "learned": {**_SMALL, "architecture": "gpt_neox", "position_embedding": "learned", "tie_embeddings": True},
    "window": {**_SMALL, "architecture": "llama", "intermediate_size": 48, "num_kv_heads": 2, "sliding_window": 9},
    "qk_norm": {**_SMALL, "architecture": "llama", "intermediate_size": 48, "num_kv_heads": 2, "qk_norm": True},
}
LENGTH = 37


def batch(packed: bool, length: int) -> tuple[dict[str, Tensor], Tensor]:
    tokens = torch.randint(0, 61, (2, length))
    labels = torch.randint(0, 61, (2, length))
    labels[0, : length // 3] = -100
    given = {"tokens": tokens}
    if packed:
        lengths = [[20, 1, 16], [37]]
        given["document_ids"] = torch.stack([torch.repeat_interleave(torch.tensor(x)) for x in lengths]).int()
        given["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in x]) for x in lengths])
    return given, labels


def results(model: Any, given: dict[str, Tensor], labels: Tensor) -> list[Tensor]:
    """Loss, logits, and the gradients of all parameters, averaged over the ranks as FSDP does."""
    loss = model(**given, labels=labels)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    for grad in grads:
        dist.all_reduce(grad)
    with torch.no_grad():
        logits = model(**given)
    return [loss.detach(), logits, *(grad / dist.get_world_size() for grad in grads)]


def error_of(name: str, packed: bool = False, length: int = LENGTH) -> float:
    torch.manual_seed(3)
    model = build(configure(**MODELS[name]))
    model.to_empty(device="cpu")
    model.init_weights(7)
    model.double()
    given, labels = batch(packed, length)
    alone = results(model, given, labels)
    assert dist.group.WORLD is not None
    model.sharding = ContextSharding(context_parallel(dist.group.WORLD))
    together = results(model, given, labels)
    return max((x - y).abs().max().item() for x, y in zip(together, alone, strict=True))


def main(out: str) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # and memory that nobody has written is NaN
    dist.init_process_group("gloo")
    errors = {f"{name}-{packed}": error_of(name, packed) for name in MODELS for packed in (False, True)}
    errors["one-token"] = error_of("rotary", length=1)  # the other rank has none
    torch.save(errors, f"{out}.{dist.get_rank()}")
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads now and then abort a process that ends while they let go of tensors


if __name__ == "__main__":
    main(sys.argv[1])
