"""Router, permute, unpermute, and a whole layer of experts, beside torch.compile of what one writes in PyTorch."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.nn.moe import MoE, Router
from powertrain.ops.moe import (
    moe_permute,
    moe_permute_ref,
    moe_route,
    moe_route_ref,
    moe_unpermute,
    moe_unpermute_ref,
)
from powertrain.testing.bench import measure, table

# tokens, experts, experts a token, hidden size, an expert's columns: DeepSeek-V2-Lite, and DeepSeek-V3 with its groups
LITE, V3 = (16384, 64, 6, 2048, 1408), (8192, 256, 8, 7168, 2048)
_V3_ROUTING: dict[str, Any] = {"score": "sigmoid", "normalize": True, "num_groups": 8, "top_groups": 4}


def _plain_layer(layer: MoE, x: Tensor) -> Tensor:
    """As one writes it: top-k, argsort, gather, grouped_mm, weighted index_add."""
    router, experts = layer.router, layer.experts
    scores = F.linear(x.float(), router.weight.float()).softmax(-1)
    weights, chosen = scores.topk(router.options["top_k"], -1)
    order = chosen.flatten().argsort(stable=True)
    tokens = order // chosen.shape[1]
    offsets = torch.bincount(chosen.flatten(), minlength=scores.shape[1]).cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(x[tokens], experts.gate_up.mT, offs=offsets).chunk(2, -1)
    rows = F.grouped_mm(F.silu(gate) * up, experts.down.mT, offs=offsets)
    return torch.zeros_like(x).index_add(0, tokens, (rows * weights.flatten()[order][:, None]).to(x.dtype))


def _pair(ours: Callable[..., Any], plain: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {"powertrain": ours, "torch.compile": torch.compile(plain, dynamic=False)}


def _both(name: str, found: dict[str, Callable[[], Any]], leaves: tuple[Tensor, ...], **rate: float) -> Iterator[str]:
    """Forward and backward of variants that give one tensor, first."""
    with torch.no_grad():
        yield table(f"{name} fwd", measure(found), **rate)

    def step(call: Callable[[], Any]) -> Any:
        y = call()
        y = y[0] if isinstance(y, tuple) else y
        return torch.autograd.grad(y, leaves, torch.ones_like(y))

    yield table(f"{name} fwd+bwd", measure({n: partial(step, f) for n, f in found.items()}))


def _ops(T: int, E: int, k: int, H: int, routing: dict[str, Any]) -> Iterator[str]:
    logits = torch.randn(T, E, device="cuda", requires_grad=True)
    found = _pair(partial(moe_route, top_k=k, **routing), partial(moe_route_ref, top_k=k, **routing))
    yield from _both(f"moe_route {T}x{E} top {k}", {n: partial(f, logits) for n, f in found.items()}, (logits,))
    weights, experts = (t.detach() for t in moe_route(logits, top_k=k, **routing))
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    moved = 2.0 * (1 + k) * T * H
    found = {n: partial(f, x, experts, E) for n, f in _pair(moe_permute, moe_permute_ref).items()}
    yield from _both(f"moe_permute {T}x{H} top {k}", found, (x,), num_bytes=moved)
    rows, _, positions = moe_permute(x.detach(), experts, E)
    rows.requires_grad_(), weights.requires_grad_()
    found = {n: partial(f, rows, positions, weights) for n, f in _pair(moe_unpermute, moe_unpermute_ref).items()}
    yield from _both(f"moe_unpermute {T}x{H} top {k}", found, (rows, weights), num_bytes=moved)


def _layer(T: int, E: int, k: int, H: int, size: int) -> Iterator[str]:
    with torch.device("cuda"):
        layer = MoE(Router(H, E, k, score="softmax"), H, size).bfloat16().eval()
    layer.router.options["normalize"] = False
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.02)
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    plain = partial(_plain_layer, layer)
    torch.testing.assert_close(layer(x), plain(x), rtol=0.05, atol=0.05 * layer(x).std().item())
    found = {n: partial(f, x) for n, f in (*_pair(layer, plain).items(), ("torch", plain))}
    yield from _both(f"layer {T} tokens {k} of {E}", found, (x, *layer.parameters()), flops=6.0 * T * k * H * size)


def run() -> Iterator[str]:
    yield from _ops(*LITE[:4], {})
    yield from _ops(*V3[:4], _V3_ROUTING)
    # few tokens, as in generating text
    yield from _ops(8, *V3[1:4], _V3_ROUTING)
    yield from _layer(*LITE)
