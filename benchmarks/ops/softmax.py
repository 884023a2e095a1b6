"""Scaled softmax, upper-triangular and masked, forward and backward, beside torch.compile."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.softmax import scaled_softmax
from powertrain.testing.bench import measure, table


def _causal(x: Tensor) -> Tensor:
    index = torch.arange(x.shape[-1], device=x.device)
    return torch.softmax((x.float() * 0.1).masked_fill(index > index[:, None], float("-inf")), -1).to(x.dtype)


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((x.float() * 0.1).masked_fill(mask, float("-inf")), -1).to(x.dtype)


def run() -> Iterator[str]:
    x = torch.randn(4, 16, 2048, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.rand(4, 1, 2048, 2048, device="cuda") < 0.3
    dy, full, e = torch.randn_like(x), x.numel(), x.element_size()
    causal, masked = torch.compile(_causal, dynamic=False), torch.compile(_masked, dynamic=False)
    cases: dict[str, tuple[float, float, dict[str, Any]]] = {
        # what lies above the diagonal is written, not read
        "upper-triangular": (1.5 * full * e, 2 * full * e, {
            "powertrain": lambda x: scaled_softmax(x, scale=0.1, is_causal=True),
            "torch.compile": causal,
        }),
        "masked": (2 * full * e + mask.numel(), 3 * full * e, {
            "powertrain": lambda x: scaled_softmax(x, scale=0.1, mask=mask),
            "torch.compile": lambda x: masked(x, mask),
        }),
    }  # fmt: skip
    for name, (fwd_bytes, bwd_bytes, variants) in cases.items():
        with torch.no_grad():
            forward = measure({n: lambda f=f: f(x) for n, f in variants.items()})
        yield table(f"softmax {name} 64x2048x2048 bf16 fwd", forward, num_bytes=fwd_bytes)
        outputs = {n: f(x) for n, f in variants.items()}
        backward = measure(
            {n: lambda y=y: torch.autograd.grad(y, x, dy, retain_graph=True) for n, y in outputs.items()}
        )
        yield table(f"softmax {name} 64x2048x2048 bf16 bwd", backward, num_bytes=bwd_bytes)
