"""vocab_parallel_linear_log_probs over simulated ranks, against the reference of the whole vocabulary."""

from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.nn.tensor_parallel.token_shards import even_rows
from powertrain.nn.tensor_parallel.vocab_log_probs import vocab_parallel_linear_log_probs
from powertrain.ops.linear_log_probs import LogProbs, Teacher, linear_log_probs_ref
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.simulated import World

T, D, E, V = 15, 8, 6, 24  # no number of ranks divides the tokens
OPTIONS: list[dict[str, Any]] = [
    {},
    {"entropy": True, "top_k": 3, "temperature": 0.6, "softcap": 2.0},
    {"beta": 0.0, "entropy": True},
    {"beta": 1.0},
    {"beta": 0.4, "temperature": 2.0, "softcap": 3.0},
]


def _inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {"x": (T, D), "weight": (V, D), "bias": (V,), "teacher_x": (T, E), "teacher_weight": (V, E)}
    made = {name: torch.randn(*shape, dtype=dtype) for name, shape in shapes.items()}
    target = torch.randint(0, V, (T,))
    target[3] = -100
    return {**made, "target": target}


def _teacher(x: Tensor, weight: Tensor, beta: float | None) -> Teacher | None:
    return None if beta is None else Teacher(x, weight, softcap=1.5, beta=beta)


def _sum(found: LogProbs) -> Tensor:
    """Of all results, with weights that tell the tokens apart."""
    weights = torch.linspace(0.5, 2.0, T)
    return sum((t * weights).sum() for t in found[:3] if t is not None)  # type: ignore[return-value]


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["shares", "all-tokens"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
def test_values_and_gradients(options: dict[str, Any], sequence_parallel: bool, ranks: int) -> None:
    options = dict(options)
    beta = options.pop("beta", None)
    inputs = _inputs(torch.float64)
    leaves = {name: inputs[name].clone().requires_grad_() for name in ("x", "weight", "bias")}
    teacher = _teacher(inputs["teacher_x"], inputs["teacher_weight"], beta)
    expected = linear_log_probs_ref(**leaves, target=inputs["target"], teacher=teacher, **options)
    _sum(expected).backward()

    def rank(overlap: Overlap) -> tuple[LogProbs, list[Tensor]]:
        part = lambda t: t.chunk(overlap.size)[overlap.rank].clone()  # noqa: E731
        share = lambda t: t.split(even_rows(T, overlap.size))[overlap.rank].clone() if sequence_parallel else t.clone()  # noqa: E731
        mine = [share(inputs["x"]), part(inputs["weight"]), part(inputs["bias"])]
        mine = [t.requires_grad_() for t in mine]
        taught = _teacher(share(inputs["teacher_x"]), part(inputs["teacher_weight"]), beta)
        found = vocab_parallel_linear_log_probs(
            mine[0], mine[1], inputs["target"], overlap, bias=mine[2], sequence_parallel=sequence_parallel,
            teacher=taught, **options,
        )  # fmt: skip
        _sum(found).backward()
        return found, [t.grad for t in mine]  # type: ignore[misc]

    world = World(ranks)
    results = world.run(rank)
    world.close()
    for index, (found, grads) in enumerate(results):
        for got, want in zip(found, expected, strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                torch.testing.assert_close(got, want)
        dx = leaves["x"].grad
        torch.testing.assert_close(grads[0], dx.split(even_rows(T, ranks))[index] if sequence_parallel else dx)
        torch.testing.assert_close(grads[1], leaves["weight"].grad.chunk(ranks)[index])
        torch.testing.assert_close(grads[2], leaves["bias"].grad.chunk(ranks)[index])


def test_errors_name_the_argument() -> None:
    world = World(2)

    def rank(overlap: Overlap) -> str:
        try:
            vocab_parallel_linear_log_probs(torch.randn(4, D), torch.randn(4, D), torch.zeros(6).long(), overlap)
        except ValueError as error:
            return str(error)
        return ""

    assert all("x must have 3 of target's 6 tokens" in message for message in world.run(rank))
    world.close()
