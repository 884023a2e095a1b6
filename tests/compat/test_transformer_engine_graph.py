"""make_graphed_callables around a capture that runs eagerly: arguments, modes, states. GPU tests capture indeed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powertrain.compat.transformer_engine import pytorch as te
from powertrain.compat.transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from powertrain.compat.transformer_engine.pytorch import graph, quantization


class Calls:
    """In place of torch's function: it runs each module three times, and calls are counted."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.replays = 0
        self.capturing: list[bool] = []

    def __call__(self, modules: Any, args: Any, warmups: int, allow_unused: bool, **options: Any) -> Any:
        self.given = [args, warmups, allow_unused, options]
        self.capturing.append(graph.is_graph_capturing())
        for module, values in zip(modules, args, strict=True):
            for _ in range(warmups):
                module(*values)
        torch.rand(3)

        def replay(module: nn.Module) -> Any:
            def run(*values: Tensor) -> Any:
                self.replays += 1
                return module(*values)

            return run

        return tuple(replay(module) for module in modules)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", made)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    monkeypatch.setattr(quantization, "_target", lambda: None)
    quantization._State.delayed.clear()
    return made


def test_replays_in_the_mode_of_the_capture(calls: Calls) -> None:
    module, x, sample = te.Linear(8, 4, device="cpu"), torch.randn(5, 8), torch.randn(5, 8)
    expected, random = module(x), torch.get_rng_state()
    order: list[str] = []
    again = te.make_graphed_callables(
        module, (sample,), 2, True, pool="pool", pre_warmup_hook=lambda: order.append("before"),
        post_warmup_hook=lambda: order.append("after"),
    )  # fmt: skip
    assert again is module and order == ["before", "after"] and calls.capturing == [True]
    assert calls.given[1:] == [2, True, {"pool": "pool"}] and not graph.is_graph_capturing()
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(module(x), expected) and calls.replays == 1
    assert torch.equal(module.eval()(x), expected) and calls.replays == 1
    assert list(module.state_dict()) == ["weight", "bias", "_extra_state"]


def test_keywords_are_those_of_the_sample(calls: Calls) -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor, shift: Tensor) -> Tensor:
            return x * scale + shift

    x, scale, shift = torch.randn(3, 4).unbind()
    modules = te.make_graphed_callables((Sum(), Sum()), ((x,), (x,)), sample_kwargs={"shift": shift, "scale": scale})
    for module in modules:
        assert torch.equal(module(x, scale=scale, shift=shift), x * scale + shift)
        with pytest.raises(TypeError, match=r"captured with the keywords \['scale', 'shift'\], got \['scale'\]"):
            module(x, scale=scale)
    assert calls.replays == 2


def test_fp8_of_some_modules_and_its_state_is_as_before(calls: Calls) -> None:
    one, two = (te.Linear(64, 32, device="cpu") for _ in range(2))
    x = torch.randn(32, 64)
    plain = two(x)
    with te.autocast(recipe=DelayedScaling()):
        one(x).sum().backward()
    before = {name: value.clone() for name, value in one.state_dict().items()}
    te.make_graphed_callables(
        (one, two), ((4 * x,), (4 * x,)), enabled=(True, False), recipe=DelayedScaling(),
    )  # fmt: skip
    for name, value in one.state_dict().items():
        assert torch.equal(value, before[name]), name
    with te.autocast(recipe=DelayedScaling()):
        y = one(x)
        assert torch.equal(two(x), plain)
    # e4m3's rounding is seen, and no more
    assert 0 < (y - torch.nn.functional.linear(x, one.weight, one.bias)).norm() < 0.1 * y.norm()
    assert calls.replays == 2


def test_gradients_of_parameters_are_copies(calls: Calls) -> None:
    for copies in (True, False):
        module = nn.Linear(4, 4)
        te.make_graphed_callables(module, (torch.randn(2, 4),), clone_param_grads_on_return=copies)
        kept = torch.randn(4, 4)
        hooks = module.weight._backward_hooks or {}
        assert len(hooks) == copies
        for hook in hooks.values():
            assert torch.equal(hook(kept), kept) and hook(kept).data_ptr() != kept.data_ptr()


def test_older_names(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, seen = te.Linear(64, 32, device="cpu"), (torch.randn(32, 64),), []
    true = graph.quantizing_of
    monkeypatch.setattr(graph, "quantizing_of", lambda *given: seen.append(given) or true(*given))
    recipe = Float8CurrentScaling()
    te.make_graphed_callables(module, x, fp8_enabled=True, fp8_recipe=recipe, fp8_weight_caching=False)
    assert seen == [(recipe, None)]
    with pytest.raises(ValueError, match="fp8_recipe is the older name of recipe"):
        te.make_graphed_callables(module, x, fp8_recipe=recipe, recipe=recipe)


def test_refusals(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.Linear(4, 4), torch.randn(2, 4)
    for name, value in (
        ("calibrating", True), ("cache_quantized_params", True), ("retain_graph_in_backward", True), ("_order", [1]),
        ("_num_layers_per_chunk", [1]), ("_reuse_graph_input_output_buffers", True), ("capture_time_hooks", [{}]),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=name):
            te.make_graphed_callables(module, (x,), **{name: value})
    with pytest.raises(TypeError, match=r"modules must be torch\.nn\.Modules, got function"):
        te.make_graphed_callables(lambda x: x, (x,))
    with pytest.raises(ValueError, match="enabled must be one, or a tuple of 1, got 2"):
        te.make_graphed_callables(module, (x,), enabled=(True, False))
    with pytest.raises(TypeError, match="enabled must be of bool, got int"):
        te.make_graphed_callables(module, (x,), enabled=1)
    with pytest.raises(ValueError, match="sample_args must have 2 tuples, got 1"):
        te.make_graphed_callables((module, module), ((x,),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="CUDA graphs need a GPU"):
        te.make_graphed_callables(module, (x,))
