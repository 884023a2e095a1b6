"""What torch.compile guards of the lengths: a graph serves all batches that the choice does not depend on."""

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from powertrain.ops.attention.api import _constant
from powertrain.ops.attention.problem import Lengths


def _graphs(queries: int) -> int:
    """Of batches of 2 * 8 to 400 * 8 pairs of sequence and head."""
    torch._dynamo.reset()
    counter = CompileCounter()

    @torch.compile(backend=counter, dynamic=True, fullgraph=True)
    def ask(query: Tensor) -> Tensor:
        batch, length, heads, _ = query.shape
        facts = Lengths.facts(length, length, None, batch, query.numel(), heads)
        return query + sum(_constant(fact) is True for fact in facts)

    for batch in (3, 5, 300, 400):
        ask(torch.zeros(batch, queries, 8, 8))
    return counter.frame_count


def test_crowds_divide_graphs_of_few_queries_only() -> None:
    assert _graphs(20) == 1
    assert _graphs(10) == 2
