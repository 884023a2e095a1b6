"""What Python does around graphs of a step of generation: a stand-in for PyTorch's graphs computes on this CPU."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import powertrain
from powertrain.models import build, configure, generate, step_graph
from powertrain.models.causal_lm import CausalLM
from powertrain.models.generate import Sampler, complete, stream
from powertrain.models.step_graph import why_not
from powertrain.ops.attention import decode_op, step_schedule
from powertrain.runtime import cuda_graphs, tracing
from powertrain.runtime.recording import record
from tests.models.test_generate import MODELS, PROMPTS, SIZES, _model


class Graph:
    """Calls of a model that were captured, which write to the memory of the captured result when they are replayed."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


@contextmanager
def capturing(graph: Graph, **options: Any) -> Iterator[None]:
    forward = CausalLM.forward

    def captured(model: CausalLM, *args: Any, cache: Any) -> Tensor:
        states = [x for x in (*cache.keys, *cache.values, *cache.gates, cache.lengths) if x is not None]
        before = [x.clone() for x in states]
        result = forward(model, *args, cache=cache)
        # nothing is computed while it is captured
        for x, value in zip(states, before, strict=True):
            x.copy_(value)
        graph.calls.append(lambda: result.copy_(forward(model, *args, cache=cache)))
        return result

    CausalLM.forward = captured
    try:
        yield
    finally:
        CausalLM.forward = forward


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Those that are made."""
    made: list[Graph] = []

    def new() -> Graph:
        made.append(Graph())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", new)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda_graphs, "_stream", lambda device: None)
    monkeypatch.setattr(step_graph, "_is_on_one_gpu", lambda model: True)
    return made


GREEDY = Sampler(temperature=0)


def _tokens(model: Any, count: int = 18) -> list[list[int]]:
    return [tokens.tolist() for tokens in stream(model, PROMPTS, max_new_tokens=count, sampler=GREEDY)]


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17])
def test_from_16_tokens_on(graphs: list[Graph], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(**MODELS["mistral"])
    found = _tokens(model, count)
    assert len(found) == count and len(graphs) == (count >= 16)
    monkeypatch.setattr(generate, "capture", lambda *_: None)
    assert found == _tokens(model, count)


def test_a_sampler_may_keep_the_logits(graphs: list[Graph]) -> None:
    model, kept, copies = _model(), [], []

    def sampler(logits: Tensor) -> Tensor:
        kept.append(logits)
        copies.append(logits.clone())
        return logits.argmax(-1)

    list(stream(model, PROMPTS, max_new_tokens=18, sampler=sampler))
    assert len(graphs) == 1 and all(map(torch.equal, kept, copies))


@contextmanager
def _hook(model: Any) -> Iterator[None]:
    handle = model.layers[0].register_forward_hook(lambda *_: None)
    yield
    handle.remove()


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


CONTEXTS = {
    "disable": lambda model: powertrain.disable("rope"),
    "a mode": lambda model: Mode(),
    "a mode of functions": lambda model: BaseTorchFunctionMode(),
    "hooks": _hook,
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_what_comes_meanwhile_is_seen(graphs: list[Graph], name: str) -> None:
    model = _model(**MODELS["mistral"])
    expected = _tokens(model)
    calls = stream(model, PROMPTS, max_new_tokens=18, sampler=GREEDY)
    found = [next(calls).tolist() for _ in range(5)]
    graphs[-1].replay = lambda: pytest.fail("the graph goes on")  # type: ignore[method-assign]
    with CONTEXTS[name](model):
        found.append(next(calls).tolist())
    assert found + [tokens.tolist() for tokens in calls] == expected


def test_two_at_once_one_given_up_and_an_error_of_the_sampler(graphs: list[Graph]) -> None:
    model = _model(**MODELS["pythia"])
    expected = _tokens(model)
    first, second = (stream(model, PROMPTS, max_new_tokens=18, sampler=GREEDY) for _ in range(2))
    assert [(a.tolist(), b.tolist()) for a, b in zip(first, second, strict=True)] == [(x, x) for x in expected]
    given_up = stream(model, PROMPTS, max_new_tokens=18, sampler=GREEDY)
    assert [next(given_up).tolist() for _ in range(7)] == expected[:7]
    del given_up
    steps = iter(range(6))

    def fails(logits: Tensor) -> Tensor:
        if next(steps) == 5:
            raise KeyError("of the sampler")
        return logits.argmax(-1)

    with pytest.raises(KeyError, match="of the sampler"):
        complete(model, PROMPTS, max_new_tokens=18, sampler=fails)
    assert _tokens(model) == expected


def test_a_capture_that_fails(graphs: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning has the first of two errors, one without a text by its kind; the steps go on in Python."""
    model = _model()
    expected = _tokens(model)

    @contextmanager
    def failing(graph: Graph, **options: Any) -> Iterator[None]:
        try:
            raise NotImplementedError
        finally:
            raise RuntimeError("the capture was ended")
        yield

    monkeypatch.setattr(torch.cuda, "graph", failing)
    tracing.clear()
    assert _tokens(model) == expected
    assert [event.text for event in tracing.trace() if event.kind == "warning"] == [
        "generate: steps are not captured in a CUDA graph, so each waits for its Python code: NotImplementedError"
    ]


def test_modes_and_forwards_on_the_instance(graphs: list[Graph]) -> None:
    model = _model()
    assert why_not(model) is None
    with torch.device("cpu"):
        assert why_not(model) is None
    for mode in (Mode(), BaseTorchFunctionMode()):
        with mode:
            assert why_not(model) == "a mode of PyTorch's is active, which sees no operators of a graph"
    model.norm.forward = lambda *args: type(model.norm).forward(model.norm, *args)
    assert why_not(model) == "norm has a forward of its own, set on the instance, which a graph does not call"


def test_a_reason_is_noted_once() -> None:
    model = _model()
    tracing.clear()
    for _ in range(3):
        _tokens(model)
    assert len([event for event in tracing.trace() if event.kind == "generate"]) == 1


@pytest.mark.parametrize("name, count", [("pythia", 1), ("mistral", 1), ("deepseek", 1), ("amlp", 2)])
def test_layers_of_a_step_share_one_list(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of splits is made once in each captured step for each kind of attention."""
    shared: list[Any] = []
    monkeypatch.setattr(step_schedule, "_capture", lambda x: (0, 1))
    monkeypatch.setattr(
        step_schedule, "share", lambda *arguments: shared.append(decode_op.share(*arguments)) or shared[-1]
    )
    fields = {"amlp": {"layer_types": ["amlp", "attention", "amlp"], "gmlp_attention_dim": 16}, **MODELS}[name]
    model = build(configure(**{**SIZES, "num_layers": 3, **fields}), device="meta").to(torch.bfloat16).eval()
    cache = model.new_cache(3, 32)
    cache.is_empty = False
    with torch.no_grad(), record("H200"):
        for step in (1, 2):
            model(torch.empty(3, 1, dtype=torch.int64, device="meta"), cache=cache)
            assert len(shared) == step * count and shared[-1].entries is not None


def test_a_cache_of_inference_mode_goes_on_outside_of_it() -> None:
    """Its lengths count writes, as a DecodeSchedule needs them; they could not be written to outside."""
    model, tokens = _model(), torch.tensor([[1, 2], [3, 4]])
    with torch.inference_mode():
        cache = model.new_cache(2, 8)
        model(tokens, cache=cache)
    with torch.no_grad():
        found = model(tokens, cache=cache)
        assert cache.lengths.tolist() == [4, 4]
        torch.testing.assert_close(found, model(tokens.repeat(1, 2))[:, 2:])
