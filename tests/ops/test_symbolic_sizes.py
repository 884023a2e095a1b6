"""torch.compile(dynamic=True) of every op: one graph, whatever the number of rows, sequences or tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import attention
from powertrain.ops.cases import Case, cases

# of batch-invariant products a CPU computes every row by itself
CASES = [case for case in cases() if "invariant" not in case.label]


def _tensors(case: Case, more: int) -> dict[str, Tensor | None]:
    return case.inputs((case.tiny[0] + more, *case.tiny[1:]), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_one_graph(case: Case) -> None:
    # graphs of the cases before count as recompilations of one function
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(case.run, backend=backend, dynamic=True, fullgraph=True)
    # sizes that no other dim has: equal ones are one symbol
    for more in (22, 30):
        compiled(**_tensors(case, more))
    assert len(graphs) == 1


def test_a_mask_of_constant_sizes_beside_symbolic_ones() -> None:
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()

    def run(x: Tensor) -> Any:
        return attention(x, x, x, attn_bias=mask)

    x = torch.randn(2, 6, 2, 16)
    for batch in (x, x[:1], torch.cat((x, x))):
        torch.testing.assert_close(torch.compile(run, dynamic=True, fullgraph=True, backend="eager")(batch), run(batch))
