"""Generation by a CUDA graph of a step: the tokens and bits of steps without one, and what takes no graph."""

from typing import Any
from unittest import mock

import pytest
import torch

from powertrain.models import build, configure, generate
from powertrain.models.generate import Sampler, complete, stream
from powertrain.models.step_graph import StepGraph, why_not
from powertrain.runtime import tracing
from tests.models.test_generate import MODELS, PROMPTS, SIZES

pytestmark = pytest.mark.gpu
MORE: dict[str, dict[str, Any]] = {
    "amlp": {"layer_types": ["amlp", "attention"], "gmlp_attention_dim": 8},
    "experts": {"num_experts": 4, "experts_per_token": 2},
    # odd widths of an MLP and of the vocabulary
    "odd": {"intermediate_size": 171, "vocab_size": 101},
    "wide-heads": {**MODELS["mistral"], "hidden_size": 128, "head_dim": 64},
}


def _model(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    model = build(configure(**{**SIZES, **{**MODELS, **MORE}[name]}), device="cuda")
    model.init_weights(1)
    return model.to(dtype).eval()


def _rows(model: Any, sampler: Sampler, captures: bool = True) -> list[tuple[list[int], list[float]]]:
    with mock.patch.object(generate, "capture", wraps=generate.capture) as capture:
        if not captures:
            capture.side_effect = lambda *_: None
        rows = complete(model, PROMPTS, max_new_tokens=20, sampler=sampler)
        assert capture.call_count == 1
    return [(row.tokens, row.logprobs) for row in rows]


@pytest.mark.parametrize("name", [*MODELS, *MORE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_bits(name: str, dtype: torch.dtype) -> None:
    model = _model(name, dtype)
    assert why_not(model) is None
    tracing.clear()
    for options in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}):
        assert _rows(model, Sampler(**options)) == _rows(model, Sampler(**options), captures=False)
    assert not [event for event in tracing.trace() if event.kind == "warning"]


def test_two_at_once() -> None:
    """Each has a cache and a graph of its own, on the same model."""
    model = _model("mistral")
    alone = [torch.stack(list(stream(model, prompts, max_new_tokens=18, sampler=Sampler(temperature=0))))
             for prompts in ([[5, 6]], [[1, 2, 3, 4, 5, 6]])]  # fmt: skip
    first, second = (stream(model, prompts, max_new_tokens=18, sampler=Sampler(temperature=0))
                     for prompts in ([[5, 6]], [[1, 2, 3, 4, 5, 6]]))  # fmt: skip
    found = [*zip(first, second, strict=True)]
    for each, other in zip(alone, zip(*found, strict=True), strict=True):
        assert torch.equal(each, torch.stack(other))


def test_code_that_waits_for_the_gpu_is_not_captured() -> None:
    model = _model("gpt3")
    sampler = Sampler(temperature=0)
    expected = _rows(model, sampler)
    norm = model.norm

    class Waits(torch.nn.Module):
        def forward(self, x: torch.Tensor, *rest: Any) -> Any:
            assert x.sum().item() == x.sum().item()
            return norm(x, *rest)

    model.norm = Waits()
    before = torch.cuda.current_stream()
    tracing.clear()
    # the steps go on without a graph, from where the capture failed
    assert _rows(model, sampler) == expected
    warnings = [event.text for event in tracing.trace() if event.kind == "warning"]
    assert len(warnings) == 1 and "not captured in a CUDA graph" in warnings[0]
    assert torch.cuda.current_stream() == before
    # a capture that failed leaves the generator as in a capture
    assert torch.rand(8, device="cuda").unique().numel() > 1
    model.norm = norm
    assert _rows(model, sampler) == expected


def test_hooks_and_autocast_take_no_graph() -> None:
    model = _model("gpt3", torch.float32)
    called: list[int] = []
    handle = model.layers[0].register_forward_hook(lambda *_: called.append(1))
    next(iter(stream(model, PROMPTS, max_new_tokens=20)))
    before = len(called)
    assert len(list(stream(model, PROMPTS, max_new_tokens=20))) == 20 and len(called) - before == 20
    assert "layers.0 has hooks" in str(why_not(model))
    handle.remove()
    with torch.autocast("cuda", torch.bfloat16):
        assert "autocast" in str(why_not(model))
        assert len(list(stream(model, PROMPTS, max_new_tokens=20))) == 20


def test_memory_is_given_back() -> None:
    model = _model("mistral")
    sampler = Sampler(temperature=0)
    _rows(model, sampler)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        _rows(model, sampler)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_a_step_graph_is_a_step() -> None:
    model = _model("pythia")
    tokens = torch.tensor(PROMPTS[1:2], device="cuda")
    caches = [model.new_cache(1, 32) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(tokens, cache=cache)
            model(tokens[:, :1], cache=cache)
        step = StepGraph(model, caches[0], tokens[:, 0])
        for token in (3, 5, 7):
            given = torch.tensor([token], device="cuda")
            assert torch.equal(step(given), model(given[:, None], cache=caches[1])[:, -1])
    assert all(torch.equal(a, b) for a, b in zip(caches[0].keys, caches[1].keys, strict=True))
    assert caches[0].lengths.tolist() == caches[1].lengths.tolist() == [len(PROMPTS[1]) + 4]
