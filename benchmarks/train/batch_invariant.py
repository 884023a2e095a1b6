"""`python -m benchmarks.train.batch_invariant`: bits of packed sequences on this GPU, then the cost of a forward.

Prints for each dtype how many comparisons of a sequence alone with the same in a padded and in a packed batch are
equal, inside `batch_invariant` and outside; then the time of a forward of two layers of Llama 8B's shape.
"""

import contextlib
import random

import torch
from torch import Tensor

import powertrain
from powertrain.models import build, configure
from powertrain.ops.linear_log_probs import linear_log_probs
from powertrain.testing.bench import measure
from tests.models.test_batch_invariant import packings, read


def _model(dtype: torch.dtype, hidden_size: int, num_layers: int, intermediate_size: int) -> torch.nn.Module:
    model = build(
        configure(
            architecture="llama", vocab_size=32000, hidden_size=hidden_size, num_layers=num_layers,
            num_heads=hidden_size // 128, num_kv_heads=hidden_size // 512, intermediate_size=intermediate_size,
            max_position_embeddings=8192, tie_embeddings=False,
        ),
        device="cuda",
    )  # fmt: skip
    model.init_weights(1)
    return model.to(dtype).eval()


@torch.no_grad()
def compare(dtype: torch.dtype, seed: int, context: contextlib.AbstractContextManager[None]) -> tuple[int, int]:
    """(equal, all) comparisons of states, logits and log-probabilities."""
    chance = random.Random(seed)
    model = _model(dtype, 1024, 2, 2816)
    lengths = [chance.randint(1, 700) for _ in range(6)]
    sequences = [torch.randint(1, 32000, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    equal = total = 0
    with context:
        alone = [read(model, s[None].cuda()) for s in sequences]
        for places, arguments in packings(sequences, chance):
            found = read(model, **{name: x.cuda() for name, x in arguments.items()})
            for number, row, first in places:
                for index, (one, all_) in enumerate(zip(alone[number], found, strict=True)):
                    stop = lengths[number] - (index == 2)
                    equal += torch.equal(one[0, :stop], all_[row, first : first + stop])
                    total += 1
    return equal, total


def main() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name, context in (("inside", powertrain.batch_invariant), ("outside", contextlib.nullcontext)):
            found = [compare(dtype, seed, context()) for seed in range(3)]
            print(f"{dtype} {name}: {sum(e for e, _ in found)} of {sum(t for _, t in found)} equal", flush=True)
    model = _model(torch.bfloat16, 4096, 2, 14336)
    tokens = torch.randint(0, 32000, (1, 8192), device="cuda")

    def log_probs(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear_log_probs(states, weight, tokens, bias=bias).log_probs

    @torch.no_grad()
    def forward() -> Tensor:
        found: Tensor = model(tokens, read=log_probs)
        return found

    def invariant() -> Tensor:
        with powertrain.batch_invariant():
            return forward()

    for _ in range(2):
        times = measure({"usual": forward, "invariant": invariant}, seconds=2.0)
        print(*(f"{name} {time.ms:.2f} ms ({time.spread:.2f})" for name, time in times.items()), flush=True)


if __name__ == "__main__":
    main()
