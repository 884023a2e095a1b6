"""Layers of experts on a GPU: no host synchronisation, graphs whose routing changes, a whole model beside the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

import powertrain
from powertrain.models import build, configure
from powertrain.nn.moe import MoE, Router
from tests.cuda_graph import captured

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SMALL: dict[str, Any] = {
    "architecture": "deepseek", "vocab_size": 512, "hidden_size": 256, "num_layers": 3, "num_heads": 4,
    "intermediate_size": 512, "moe_intermediate_size": 128, "num_experts": 16, "experts_per_token": 4,
    "num_shared_experts": 1, "num_groups": 4, "top_groups": 2, "q_lora_rank": 128, "kv_lora_rank": 128,
    "max_position_embeddings": 512, "init_std": 0.05,
}  # fmt: skip


def _layer(dtype: torch.dtype = torch.bfloat16) -> MoE:
    with CUDA:
        layer = MoE(Router(256, 16, 4, num_groups=4, top_groups=2), 256, 128, shared_size=128)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.05)
    return layer.to(dtype)


def _step(layer: MoE, x: Tensor) -> list[Tensor]:
    y = layer(x)
    return [y, *torch.autograd.grad(y.float().square().sum() + layer.balance_loss, (x, *layer.parameters()))]


def test_no_host_synchronisation() -> None:
    layer, x = _layer(), torch.randn(2, 300, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    _step(layer, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _step(layer, x)
        layer.balance(1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_follows_the_routing() -> None:
    layer, x = _layer().eval(), torch.randn(300, 256, device=CUDA, dtype=torch.bfloat16)
    with torch.no_grad():
        graph, y = captured(lambda: layer(x))
        for scale in (1.0, -3.0):
            x.copy_(torch.randn_like(x) * scale)
            graph.replay()
            assert torch.equal(y, layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_layer_equals_plain_pytorch(dtype: torch.dtype) -> None:
    layer = _layer(dtype).train()
    x = torch.randn(2, 300, 256, device=CUDA, dtype=dtype, requires_grad=True)
    ours = _step(layer, x)
    with powertrain.disable("all"):
        plain = _step(layer, x)
    for a, b in zip(ours, plain, strict=True):
        assert (a - b).float().norm() < 0.02 * b.float().norm()


def test_model_trains_and_decodes() -> None:
    model = build(configure(**SMALL), device=CUDA)
    model.init_weights(1)
    model.to(torch.bfloat16)
    tokens = torch.randint(0, 512, (2, 96), device=CUDA)
    optimizer = powertrain.AdamW(model.parameters(), 2e-3, master_weights=True)
    losses = []
    for _ in range(20):
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.balance()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    model.eval()
    with torch.no_grad():
        expected = model(tokens)
        cache = model.new_cache(2, 128)
        found = torch.cat([model(tokens[:, a:b], cache=cache) for a, b in ((0, 64), (64, 65), (65, 96))], 1)
    assert (found - expected).float().norm() < 0.03 * expected.float().norm()
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.95
