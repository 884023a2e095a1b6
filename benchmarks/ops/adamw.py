"""AdamW and clip_grad_norm_ over 10⁹ float32 parameters, beside torch's fused and foreach ones."""

from collections.abc import Iterator

import torch

from powertrain.ops.adamw import AdamW, clip_grad_norm_
from powertrain.testing.bench import measure, table

COUNT, SIZE = 240, 4_194_304  # tensors of 2048 x 2048: 1.007e9 parameters


def run() -> Iterator[str]:
    params = [torch.randn(2048, 2048, device="cuda", requires_grad=True) for _ in range(COUNT)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizers = {"powertrain": AdamW(params), "torch fused": torch.optim.AdamW(params, fused=True)}
    timings = measure({name: optimizer.step for name, optimizer in optimizers.items()})
    yield table("adamw 1e9 fp32", timings, num_bytes=28 * COUNT * SIZE)
    clips = {"powertrain": clip_grad_norm_, "torch": torch.nn.utils.clip_grad_norm_}
    # 12 bytes: within max_norm the second pass, which torch makes, does nothing
    yield table(
        "clip_grad_norm_ 1e9 fp32",
        measure({name: lambda f=f: f(params, 1e9) for name, f in clips.items()}),
        num_bytes=4 * COUNT * SIZE,
    )
