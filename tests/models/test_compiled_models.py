"""torch.compile of whole models: one graph, whatever the sizes, with the eager loss and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import powertrain
from powertrain.models import build
from powertrain.models.registry import configure
from powertrain.nn import GatedMLP, RMSNorm
from powertrain.nn.attention import Context
from powertrain.nn.block import Block
from powertrain.nn.moe import MoE, Router

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_heads": 4, "max_position_embeddings": 32, "num_layers": 1}
EXPERTS = {"num_experts": 4, "experts_per_token": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "intermediate_size": 48, "num_kv_heads": 2, "qk_norm": True},
    "rotary": {"architecture": "gpt_neox", "parallel_residual": True},
    "alibi": {
        "architecture": "gpt_neox", "position_embedding": "alibi", "sliding_window": 8, "parallel_residual": True,
    },
    "sparse": {
        "architecture": "gpt_neox", "layer_types": ["sparse"], "sparsity": {"block": 4, "before": 1},
    },
    "experts": {"architecture": "gpt_neox", **EXPERTS},
    "deepseek": {
        "architecture": "deepseek", "intermediate_size": 48, "moe_intermediate_size": 16, "num_shared_experts": 1,
        "first_dense_layers": 0, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
        **EXPERTS,
    },
}  # fmt: skip


# rotary tables are in llama, experts in deepseek, and a parallel residual beside ALiBi
_COVERED = {"rotary", "experts"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in _COVERED else ()) for name in MODELS]
)
def test_one_graph_for_symbolic_sizes(name: str) -> None:
    model: Any = build(configure(**SIZES, **MODELS[name]))
    model.to_empty(device="cpu")
    model.init_weights(1)
    assert "num_experts" not in MODELS[name] or model.moe_layers
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    # sizes and the model's numbers, such as scales, are symbols
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for length in (18, 26):
        tokens = torch.randint(SIZES["vocab_size"], (2, length))
        losses = [function(tokens, tokens) for function in (compiled, model)]
        gradients = [torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) for loss in losses]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*gradients)
    # a length is a constant of sparse masks alone
    assert len(graphs) == (2 if name == "sparse" else 1)


def test_a_cache_is_made_and_filled_in_one_graph() -> None:
    model: Any = build(configure(**SIZES, **MODELS["llama"])).to_empty(device="cpu").eval()
    model.init_weights(1)

    def prompt(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cache = model.new_cache(2, 16)
        logits = model(tokens, cache=cache)
        return logits, cache.keys[0], cache.lengths

    with torch.no_grad():
        tokens = torch.randint(SIZES["vocab_size"], (2, 7))
        compiled = torch.compile(prompt, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(tokens), prompt(tokens))


def test_recomputed_experts() -> None:
    moe = MoE(Router(8, 4, 2), 8, 16)
    layer = Block(torch.nn.Linear(8, 8), moe, RMSNorm(8), RMSNorm(8))
    layer.attention.forward = lambda x, context: x  # type: ignore[method-assign]
    layer.recompute = "full"
    x, results = torch.randn(2, 6, 8), []
    functions: list[Any] = [layer, torch.compile(layer, fullgraph=True, backend="eager")]
    for function in functions:
        y, stream = function(x, None, Context())
        assert moe.balance_loss is not None
        loss = (y + stream).sum() + moe.balance_loss
        results.append((loss, torch.autograd.grad(loss, moe.router.weight)))
        # what is recomputed is not counted again
        assert moe.load.sum() == 2 * x[..., 0].numel()
        moe.load.zero_()
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("keeps_fp8", [False, True])
def test_a_default_that_two_checkpoints_read(keeps_fp8: bool) -> None:
    mlps = [GatedMLP(8, 16) for _ in range(2)]
    for mlp in mlps:
        mlp.keeps_fp8 = keeps_fp8

    def two(x: Tensor) -> Tensor:
        for mlp in mlps:
            x = checkpoint(mlp, x, use_reentrant=False)
        return x

    x = torch.randn(3, 8, requires_grad=True)
    # numbers are symbols, the limit of clamped_swiglu among them
    torch.testing.assert_close(torch.compile(two, fullgraph=True, dynamic=True, backend="eager")(x), two(x))


# `hinted` functions, those that fall back, by keyword and by position; a global float of the routers
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "dpo_loss": lambda x: x + powertrain.losses.dpo_loss(*x.unbind(1)[:4]).sum(),
    "layer_norm": lambda x: powertrain.layer_norm(x, None),
    "moe_route": lambda x: x + powertrain.moe_route(x, top_k=2, score="sigmoid", normalize=True)[0].sum(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_default_that_a_call_leaves_out(name: str) -> None:
    def two(x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(CALLS[name], x, use_reentrant=False)
        return x

    x = torch.randn(3, 8, requires_grad=True)
    torch.testing.assert_close(torch.compile(two, fullgraph=True, dynamic=True, backend="eager")(x), two(x))
