"""torch.compile(dynamic=True) of every op: one graph, whatever the number of rows, sequences or tokens; torch.export of
every op with symbolic sizes, where a guard on one is an error."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from powertrain.ops.attention import attention
from powertrain.ops.cases import Case, cases
from tests.torch_setup import HAS_GPU, INTERPRET, SLOW_IN_INTERPRETER

# of batch-invariant products a CPU computes every row by itself
CASES = [case for case in cases() if "invariant" not in case.label]
_FIRST = {case.op: case.id for case in reversed(CASES)}.values()
# plain PyTorch on a CPU is traced for an op's first case; the later ones, whose options are Python of the kernels'
# launches, are traced where those are
_MARKED = [
    pytest.param(c, id=c.id, marks=() if HAS_GPU or INTERPRET or c.id in _FIRST else pytest.mark.slow) for c in CASES
]


class _Traced(Exception):
    """In place of a call's results. An op's first case runs the graph in its second call, with sizes that it was not
    traced with; the others ask whether that call would trace another."""


def _tensors(case: Case, more: int) -> dict[str, Tensor | None]:
    return case.inputs((case.tiny[0] + more, *case.tiny[1:]), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("case", _MARKED)
def test_one_graph(case: Case) -> None:
    # graphs of the cases before count as recompilations of one function
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []
    runs = HAS_GPU or case.id in _FIRST

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        calls: list[int] = []

        def run(*given: Any) -> Any:
            calls.append(len(given))
            if len(calls) == 1 or not runs:
                raise _Traced
            return graph(*given)

        return run

    compiled = torch.compile(case.run, backend=backend, dynamic=True, fullgraph=True)
    # sizes that no other dim has: equal ones are one symbol
    with pytest.raises(_Traced):
        compiled(**_tensors(case, 22))
    with contextlib.nullcontext() if runs else pytest.raises(_Traced):
        compiled(**_tensors(case, 30))
    assert len(graphs) == 1


class _Exported(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor | None) -> Any:
        return self.function(*tensors)


@pytest.mark.parametrize(
    "case",
    # a guard is in the code that both runs share: the interpreter's traces of kernels take twice as long
    [pytest.param(c, id=c.id, marks=pytest.mark.slow if INTERPRET or c.id not in _FIRST else ()) for c in CASES],
)
def test_exports(case: Case) -> None:
    first, second = _tensors(case, 22), _tensors(case, 30)
    plain = {name: None if x is None else x.detach() for name, x in first.items()}
    # tensors of other sizes in both are symbolic there
    dynamic = tuple(
        None if x is None else {i: Dim.DYNAMIC for i in range(x.dim()) if x.shape[i] != second[name].shape[i]}  # type: ignore[union-attr]
        for name, x in first.items()
    )
    module = _Exported(lambda *tensors: case.run(**dict(zip(first, tensors, strict=True))))
    exported = torch.export.export(module, tuple(plain.values()), dynamic_shapes=(dynamic,), strict=False)
    right = case.run(**second)
    torch.testing.assert_close(exported.module()(*second.values()), right)


@pytest.mark.parametrize(
    "options, strict",
    [
        pytest.param(*values, marks=SLOW_IN_INTERPRETER)
        for values in (
            ({"is_causal": True}, True),
            ({"is_causal": True}, False),
            ({"is_causal": True, "window_size": (4, 0)}, False),
        )
    ],
)
def test_attention_of_any_length_exports(options: dict[str, Any], strict: bool) -> None:
    if not strict and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 guards the order of two strides, of keys that heads share")
    q, kv = torch.randn(2, 10, 4, 16), torch.randn(2, 10, 2, 16)
    module = _Exported(lambda q, k: attention(q, k, k, **options))
    sizes = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=512)}
    exported = torch.export.export(module, (q, kv), dynamic_shapes=((sizes, sizes),), strict=strict)
    for batch, length in ((3, 17), (1, 66)):
        q, kv = torch.randn(batch, length, 4, 16), torch.randn(batch, length, 2, 16)
        torch.testing.assert_close(exported.module()(q, kv), attention(q, kv, kv, **options))


@pytest.mark.parametrize("length", [pytest.param(6, marks=SLOW_IN_INTERPRETER)])
def test_a_mask_of_constant_sizes_beside_symbolic_ones(length: int) -> None:
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()

    def run(x: Tensor) -> Any:
        return attention(x, x, x, attn_bias=mask)

    x = torch.randn(2, length, 2, 16)
    for batch in (x, x[:1], torch.cat((x, x))):
        torch.testing.assert_close(torch.compile(run, dynamic=True, fullgraph=True, backend="eager")(batch), run(batch))
