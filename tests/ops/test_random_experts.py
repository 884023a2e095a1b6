"""benchmarks/train/random_experts.py: its plain layers compute ours, trace in one graph, and every draw launches."""

import pytest
import torch

from benchmarks.train.random_experts import Draw, _input, _ours, draws, gathered, launch, plain
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings

GROUPS = dict(score="sigmoid", normalize=True, num_groups=4, top_groups=2)
ONE_GROUP = dict(score="softmax", normalize=False, num_groups=1, top_groups=1)


@pytest.mark.parametrize("other", [plain, gathered])
@pytest.mark.parametrize(
    ("kind", "routing", "shared"), [("swiglu", GROUPS, 64), ("gelu", ONE_GROUP, 0), ("relu_squared", ONE_GROUP, 64)]
)
def test_plain_layers_are_ours(kind, routing, shared, other) -> None:
    torch.manual_seed(0)
    draw = Draw(6, 16, 3, 64, 32, shared, kind, routing, True)
    layer, x = _ours(draw, "cpu").eval(), _input(draw, "cpu")
    traced = torch.compile(other, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        exact, found = layer(x).float(), traced(layer, x).float()
    assert (found - exact).norm() < 2e-2 * exact.norm()


@pytest.mark.skipif(settings().interpret, reason="nothing is recorded in the interpreter")
def test_draws_are_reproducible_and_launch() -> None:
    assert draws(8, 3) == draws(8, 3) != draws(8, 4)
    for seed in (1, 2, 3):
        with record("sm_90") as wanted:
            for draw in draws(8, seed):
                launch(draw)
        assert len(wanted)
