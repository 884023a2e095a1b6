"""xformers.checkpoint within a memory budget, beside plain PyTorch in float64, forward and backward."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powertrain.compat import xformers
from powertrain.compat.xformers import budget as budgets
from powertrain.compat.xformers.checkpoint import (
    NullTorchDispatchMode,
    ProfileMetadata,
    ProfileOperatorsTorchDispatchMode,
    VerboseTorchDispatchMode,
)
from tests.compat.plain import same, tensors

BUDGETS = [0, 0.1, 0.3, 0.5, 0.8, 0.99, 1]


class Block(nn.Module):
    """Attention and an MLP, with dropout, writes in place, running statistics and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 32), nn.Linear(32, 8)
        self.norm, self.stats = nn.LayerNorm(8), nn.BatchNorm1d(5)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        hidden = nn.functional.dropout(nn.functional.relu(self.up(x + mixed), inplace=True), 0.25)
        hidden = hidden.mul(2.0).add_(scale).clamp_(min=0.5)
        return self.stats(x + self.down(hidden).sin())


def _calls(wrapped: nn.Module, x: Tensor) -> int:
    """How many operators backward calls."""
    out = wrapped(x).sum()
    with VerboseTorchDispatchMode() as mode:
        out.backward()
    return len(mode.operators)


@pytest.mark.parametrize("budget", BUDGETS)
def test_budgets_beside_plain(budget: float) -> None:
    torch.manual_seed(0)
    module = Block().double()
    (x,) = tensors((3, 5, 8))
    wrapped = xformers.selective_checkpoint_wrapper(module, budget)

    def seeded(function: Callable[..., Tensor], x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return function(x, scale=0.3)

    same(lambda x, *_: seeded(wrapped, x), lambda x, *_: seeded(module, x), [x, *module.parameters()])
    # the next forward follows the same policy
    same(lambda x, *_: seeded(wrapped, x), lambda x, *_: seeded(module, x), [x, *module.parameters()])
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert wrapped.state_dict().keys() == module.state_dict().keys()


def test_a_larger_budget_makes_less_again() -> None:
    torch.manual_seed(0)
    (x,) = tensors((3, 5, 8))
    made = [_calls(xformers.selective_checkpoint_wrapper(Block().double(), budget), x) for budget in (0, 0.5, 1)]
    assert made[0] > made[1] > made[2]


def test_the_policy_of_a_function_keeps_what_fits_and_takes_longest() -> None:
    (x, weight) = tensors((64, 256), (256, 256))

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return ((x @ weight).neg() @ weight).sin().neg()

    policy = xformers.get_optimal_checkpoint_policy(function, x, weight, memory_budget=0.5)
    # four results of one size count, the last is free: two fit, the products
    assert policy.kept["aten.mm.default"] == [True, True]
    assert sum(itertools.chain(*policy.kept.values())) == 3 and policy.kept["aten.neg.default"] == [False, True]
    same(lambda *given: xformers.checkpoint(function, *given, policy_fn=policy), function, [x, weight])
    for wrong in (-0.1, 1.5):
        with pytest.raises(ValueError, match="memory_budget must be from 0 to 1, got "):
            xformers.get_optimal_checkpoint_policy(function, x, weight, memory_budget=wrong)
        with pytest.raises(ValueError, match="memory_budget must be from 0 to 1, got "):
            xformers.selective_checkpoint_wrapper(Block(), wrong)
    with pytest.raises(ValueError, match="memory_budget must be None beside policy_fn"):
        xformers.selective_checkpoint_wrapper(Block(), 0.5, policy)


def test_the_longest_set_is_the_best_of_all_sets() -> None:
    chance = random.Random(3)
    for _ in range(40):
        items = [(float(chance.randint(0, 6)), chance.random(), {index}) for index in range(9)]
        most = chance.uniform(0, 1.1) * sum(size for size, _, _ in items)
        best = max(
            sum(seconds for _, seconds, _ in some)
            for count in range(10)
            for some in itertools.combinations(items, count)
            if sum(size for size, _, _ in some) <= most
        )
        found = set().union(*budgets._longest(items, most))
        assert sum(items[index][0] for index in found) <= most
        assert sum(items[index][1] for index in found) == pytest.approx(best)


def test_many_results_are_thinned_within_the_budget() -> None:
    chance = random.Random(5)
    items = [(chance.random(), chance.random(), {index}) for index in range(300)]
    found = set().union(*budgets._longest(items, 75.0))
    assert sum(items[index][0] for index in found) <= 75.0
    # the fractional bound: the densest first
    room, bound = 75.0, 0.0
    for size, seconds, _ in sorted(items, key=lambda item: -item[1] / item[0]):
        bound += seconds * min(1.0, room / size)
        room -= min(room, size)
    assert sum(items[index][1] for index in found) > 0.98 * bound


def test_operators_are_measured() -> None:
    (x,) = tensors((16, 32))
    with ProfileOperatorsTorchDispatchMode(num_runs=2) as profile:
        y = x.t().mm(x).relu_()
        nn.functional.dropout(y, 0.5)
    product, relu = (next(one for one in profile.data if name in str(one.name)) for name in ("mm.", "relu_"))
    assert product.memory_used == 32 * 32 * 8 / 2**20 and product.time_taken > 0 and not product.inplace_info
    assert relu.memory_used == 0 and relu.inplace_info == (relu.curr_idx, product.curr_idx)
    assert relu.output_ids == product.output_ids and isinstance(product, ProfileMetadata)
    assert [one.is_view_like for one in profile.data if "aten.t." in str(one.name)] == [True]
    assert any(one.is_rand_op for one in profile.data)
    with NullTorchDispatchMode():
        assert torch.equal(x.t().mm(x).relu(), y)


def test_policies_of_names_and_policies_that_count() -> None:
    (x,) = tensors((4, 4))

    class EverySecond:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
            self.calls += 1
            return self.calls % 2 == 0

    function: Callable[..., Tensor] = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid()).double()
    operators = xformers.list_operators(function, x)
    assert torch.ops.aten.addmm.default in operators
    for policy in (EverySecond(), operators, ["aten.addmm.default", "aten.tanh.default"], []):
        same(
            lambda x, *_, policy=policy: xformers.checkpoint(function, x, policy_fn=policy),
            lambda x, *_: function(x), [x],
        )  # fmt: skip
