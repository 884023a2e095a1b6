"""RoPE of q and k, forward and backward, beside torch.compile and Liger."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import peer
from powertrain.ops.rope import rope, rope_qkv
from powertrain.ops.rope_table import RopeTable, rope_table
from powertrain.testing.bench import measure, table


def _plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    def rotate(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    return rotate(q), rotate(k)


B, S, H, K, D = 4, 4096, 32, 8, 128


def _ours(angles: RopeTable) -> dict[str, Any]:
    return {
        "powertrain": lambda q, k: rope(q, k, table=angles),
        "in place": lambda q, k: rope(q, k, table=angles, inplace=True),
    }


def _theirs(angles: RopeTable, dtype: torch.dtype) -> dict[str, Any]:
    compiled, liger = torch.compile(_plain, dynamic=False), peer("liger_kernel.ops.rope", "LigerRopeFunction")
    cos, sin = angles.cos[:, None], angles.sin[:, None]
    doubled = [torch.cat((t, t), -1).to(dtype)[None] for t in (angles.cos, angles.sin)]
    found = {
        "torch.compile": lambda q, k: compiled(q, k, cos, sin),
        "liger": liger and (lambda q, k: liger.apply(q.transpose(1, 2), k.transpose(1, 2), *doubled)),
    }
    return {name: function for name, function in found.items() if function is not None}


def _inputs(device: str) -> list[Tensor]:
    """q, k, and both with v in one tensor."""
    heads = H, K, H + 2 * K
    return [torch.randn(B, S, n, D, device=device, dtype=torch.bfloat16, requires_grad=True) for n in heads]


def launch() -> None:
    """Ours on meta tensors: for `ahead.build`."""
    angles, (q, k, qkv) = rope_table(D, S, device="meta"), _inputs("meta")
    calls = [lambda f=f: f(q.clone(), k.clone()) for f in _ours(angles).values()]
    calls.append(lambda: rope_qkv(qkv, table=angles, num_heads=H, num_kv_heads=K))
    for call in calls:
        outputs = call()
        torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])
        with torch.no_grad():
            call()


def run() -> Iterator[str]:
    angles, (q, k, qkv) = rope_table(D, S, device="cuda"), _inputs("cuda")
    variants, num_bytes = _ours(angles) | _theirs(angles, q.dtype), 2 * 2 * B * S * (H + K) * D
    label = f"rope B{B} S{S} H{H}/{K} D{D} bf16"
    with torch.no_grad():
        yield table(f"{label} fwd", measure({n: lambda f=f: f(q, k) for n, f in variants.items()}), num_bytes=num_bytes)
    # of copies: Liger's and ours in place overwrite what they are given, and a leaf is not overwritten
    outputs = {name: function(q.clone(), k.clone()) for name, function in variants.items()}
    grads = {name: [torch.randn_like(out) for out in outs] for name, outs in outputs.items()}
    backward = {
        name: lambda o=outs, g=grads[name]: torch.autograd.grad(o, (q, k), g, retain_graph=True)
        for name, outs in outputs.items()
    }
    yield table(f"{label} bwd", measure(backward), num_bytes=num_bytes)

    out = rope_qkv(qkv, table=angles, num_heads=H, num_kv_heads=K)
    grads = [torch.randn_like(t) for t in out]
    with torch.no_grad():
        packed = {"fwd": lambda: rope_qkv(qkv, table=angles, num_heads=H, num_kv_heads=K)}
        yield table(f"{label} packed", measure(packed), num_bytes=2 * 2 * qkv.numel())
    packed = {"bwd": lambda: torch.autograd.grad(out, qkv, grads, retain_graph=True)}
    yield table(f"{label} packed", measure(packed), num_bytes=2 * 2 * qkv.numel())
