"""TransformerEngine's names that only a GPU runs: modules captured as CUDA graphs, and CPU offload's copies."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powertrain.compat.transformer_engine import pytorch as te
from powertrain.compat.transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def layers(count: int) -> nn.ModuleList:
    torch.manual_seed(0)
    made = [te.LayerNormMLP(256, 512, params_dtype=torch.bfloat16) for _ in range(count)]
    return nn.ModuleList(made)


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), DelayedScaling()], ids=["bf16", "current", "delayed"])
def test_graphs_have_the_bits_of_eager_calls(recipe: Any) -> None:
    if recipe is not None and not te.is_fp8_available():
        pytest.skip("FP8 products begin with sm_89")
    plain, ours = layers(2), layers(2)
    shape = (64, 256)
    samples = tuple((torch.randn(shape, **BF16, requires_grad=True),) for _ in range(2))
    options = {} if recipe is None else {"enabled": True, "recipe": recipe}
    random = torch.cuda.get_rng_state()
    te.make_graphed_callables(tuple(ours), samples, **options)
    assert torch.equal(torch.cuda.get_rng_state(), random)
    for _step in range(3):
        x = torch.randn(shape, **BF16)
        results = []
        for model in (plain, ours):
            leaf = x.clone().requires_grad_()
            # two micro-batches: gradients are accumulated over replays
            for part in (1.0, 0.5):
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    h = leaf * part
                    for layer in model:
                        h = layer(h)
                h.float().square().mean().backward()
            results.append([leaf.grad, h.detach().clone(), *(p.grad.clone() for p in model.parameters())])
            for p in model.parameters():
                p.grad = None
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


def run(model: nn.ModuleList, x: Tensor, context: Any, synchronize: Any) -> Tensor:
    for layer in model:
        with context:
            x = layer(x)
        x = synchronize(x)
    return x


@pytest.mark.parametrize("retain", [False, True], ids=["", "retained"])
def test_offloaded_layers_have_the_same_bits(retain: bool) -> None:
    plain, ours = layers(4), layers(4)
    context = te.get_cpu_offload_context(True, 2, 4, retain_pinned_cpu_buffers=retain)
    for _step in range(4):
        x = torch.randn(4096, 256, **BF16)
        run(ours, x, *context).float().square().mean().backward()
        h = x
        for layer in plain:
            h = layer(h)
        h.float().square().mean().backward()
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


def test_offload_gives_memory_back() -> None:
    model, x = layers(6), torch.randn(32768, 256, **BF16)
    used = []
    for context in (te.get_cpu_offload_context(False), te.get_cpu_offload_context(True, 3, 6)):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = run(model, x, *context)
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated() - before)
        y.float().mean().backward()
        del y
    # three of six layers wait on the CPU; the last outputs of both are the same
    assert used[1] < 0.62 * used[0]
