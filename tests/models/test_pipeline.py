"""Layers of pipeline stages, and stages one after the other beside the whole model."""

from typing import Any

import pytest
import torch

from powertrain.models import build
from powertrain.models.pipeline import keep_layers, largest_share, layers_of_stages, stages_of
from powertrain.models.registry import configure

_SIZES = {"vocab_size": 61, "hidden_size": 32, "num_heads": 4, "max_position_embeddings": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "intermediate_size": 48},
    "neox": {"architecture": "gpt_neox", "position_embedding": "learned", "tie_embeddings": True},
    "parallel": {"architecture": "gpt_neox", "parallel_residual": True, "position_embedding": "rotary"},
}


def _built(name: str, layers: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Any:
    model = build(configure(**MODELS[name], **_SIZES, num_layers=layers))
    model.to_empty(device=device)
    model.init_weights(3)
    return model.to(dtype)


@pytest.mark.parametrize("stages", [1, 2, 3, 7])
@pytest.mark.parametrize("layers", [7, 8, 13, 48])
@pytest.mark.parametrize("vocabulary", [64, 50257, 256000])
def test_every_layer_is_in_one_stage(stages: int, layers: int, vocabulary: int) -> None:
    config = configure(
        architecture="llama", **{**_SIZES, "vocab_size": vocabulary}, intermediate_size=48, num_layers=layers
    )
    found = layers_of_stages(config, 12 * 32 * 32, stages)
    assert [n for part in found for n in part] == list(range(layers)) and all(len(part) for part in found)
    if stages > 1:
        # no other number of layers in the last stage makes the slowest one faster
        head = vocabulary * 32 / (12 * 32 * 32)
        slowest = [max(-(-(layers - last) // (stages - 1)), last + head) for last in range(1, layers - stages + 2)]
        assert max(*map(len, found[:-1]), len(found[-1]) + head) == min(slowest)


def test_more_stages_than_layers() -> None:
    config = configure(architecture="llama", **_SIZES, intermediate_size=48, num_layers=3)
    with pytest.raises(
        ValueError, match=r"parallel.pipeline \* parallel.virtual_stages must be at most model.num_layers"
    ):
        layers_of_stages(config, 1000, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_stages_have_the_models_bits(name: str, count: int, dtype: torch.dtype, device: torch.device) -> None:
    """The stream that is sent is rounded as the next norm rounds it; gradients too."""
    model = _built(name, 5, dtype, device)
    tokens = torch.randint(61, (2, 11), generator=torch.Generator().manual_seed(0)).to(device)
    exact = model(tokens, tokens)
    exact.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    stages = stages_of(model, layers_of_stages(model.config, 1 << 20, count))
    names = [n for stage in stages for n, _ in stage.named_parameters()]
    assert set(names) == set(grads) and len(names) == len(grads) + model.config.tie_embeddings
    sent: list[torch.Tensor] = []
    stream = None
    for stage in stages[:-1]:
        out = stage(tokens, stream=stream)
        stream = out.detach().requires_grad_()
        sent += [out, stream]
    loss = stages[-1](tokens, tokens, stream=stream)
    loss.backward()
    for out, received in reversed(list(zip(sent[::2], sent[1::2], strict=True))):
        out.backward(received.grad)
    assert torch.equal(loss, exact)
    for n, p in model.named_parameters():
        # a tied embedding's gradient is the sum of two
        assert torch.equal(p.grad, grads[n]) or n == "embed.weight", n


def test_a_stage_keeps_names_and_leaves_the_rest() -> None:
    model = _built("llama", 6)
    whole = {n for n, _ in model.named_parameters()}
    first, *_, last = stages_of(model, layers_of_stages(model.config, 1 << 20, 3))
    assert {n.split(".")[0] for n, _ in first.named_parameters()} == {"embed", "layers"}
    assert {n.split(".")[0] for n, _ in last.named_parameters()} == {"layers", "norm", "head"}
    assert {n for n, _ in model.named_parameters()} == whole
    assert 0.3 < largest_share(model, 3) < 0.5 and largest_share(model, 1) == 1
    with_positions = _built("neox", 4)
    layer = sum(p.numel() for p in with_positions.layers[0].parameters())
    parts = stages_of(with_positions, layers_of_stages(with_positions.config, layer, 2))
    # the first stage, with the learned positions; the tied embedding is in both
    largest = sum(p.numel() for p in parts[0].parameters())
    assert {n.split(".")[0] for n, _ in parts[0].named_parameters()} == {"embed", "positions", "layers"}
    assert largest_share(with_positions, 2) == largest / with_positions.num_parameters()
    # each of two ranks has two of four stages
    assert 0.5 <= largest_share(model, 2, 2) < 0.7
    keep_layers(model, [1, 4])
    assert {n.split(".")[1] for n, _ in model.named_parameters()} == {"1", "4"}
