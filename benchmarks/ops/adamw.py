"""AdamW, clip_grad_norm_ and both together over 10⁹ float32 parameters, beside torch's fused and foreach ones."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.adamw import AdamW
from powertrain.ops.grad_norm import clip_grad_norm_
from powertrain.testing.bench import measure, table

COUNT, SIZE = 240, 4_194_304  # tensors of 2048 x 2048: 1.007e9 parameters


def _params(device: str) -> list[Tensor]:
    params = [torch.randn(2048, 2048, device=device, requires_grad=True) for _ in range(COUNT)]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def launch() -> None:
    """Ours on meta tensors: for `ahead.build`."""
    params = _params("meta")
    optimizer = AdamW(params)
    optimizer.step()
    optimizer.step(max_norm=1.0)
    clip_grad_norm_(params, 1.0)


def run() -> Iterator[str]:
    params = _params("cuda")
    optimizers: dict[str, Any] = {"powertrain": AdamW(params), "torch fused": torch.optim.AdamW(params, fused=True)}
    timings = measure({name: optimizer.step for name, optimizer in optimizers.items()})
    yield table("adamw 1e9 fp32", timings, num_bytes=28 * COUNT * SIZE)
    clips = {"powertrain": clip_grad_norm_, "torch": torch.nn.utils.clip_grad_norm_}
    yield table(
        "clip_grad_norm_ 1e9 fp32, norm within max_norm",
        measure({name: lambda f=f: f(params, 1e9) for name, f in clips.items()}),
        num_bytes=4 * COUNT * SIZE,  # ours reads once; torch multiplies by 1 as well
    )
    norm, calls = float(torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])), count()
    yield table(
        "clip_grad_norm_ 1e9 fp32, clipped by 0.1 % at every call",
        measure({name: lambda f=f: f(params, norm * 0.999 ** next(calls)) for name, f in clips.items()}),
        num_bytes=3 * 4 * COUNT * SIZE,
    )

    def clip_then_step(clip: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> None:
        clip(params, norm * 0.999 ** next(calls))
        optimizer.step()

    # bytes of a parameter: 4 for the norm and 28 for the update; clipping in a pass of its own moves 8 more
    yield table(
        "adamw clipping 1e9 fp32",
        measure(
            {
                "powertrain": lambda: optimizers["powertrain"].step(max_norm=norm * 0.5 * 0.999 ** next(calls)),
                "ours in two": lambda: clip_then_step(clip_grad_norm_, optimizers["powertrain"]),
                "torch": lambda: clip_then_step(torch.nn.utils.clip_grad_norm_, optimizers["torch fused"]),
            }
        ),
        num_bytes=32 * COUNT * SIZE,
    )
