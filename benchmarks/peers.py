"""The peers that are installed here: each is a function or None. See benchmarks/README.md for how to get them."""

import importlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
from torch import Tensor


def peer(module: str, name: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


def set_up_torch_compile() -> None:
    # its backward, too, is timed with retain_graph
    torch._functorch.config.donated_buffer = False
    # a function is compiled for each size; beyond the limit, 8 by default, it would run uncompiled
    torch._dynamo.config.recompile_limit = 64


def flash_3() -> Any:
    """FlashAttention-3's operators, from the shared library that FLASH_3_LIBRARY names, or None."""
    library = os.environ.get("FLASH_3_LIBRARY")
    if library is None:
        return None
    torch.ops.load_library(library)
    return torch.ops.flash_attn_3


class Flash3(torch.autograd.Function):
    """FlashAttention-3's own operators, once `flash_3()` has loaded them. q, k, v [B, S, H, D], or [T, H, D] of packed
    sequences that begin at `starts`; left: of a causal window, or -1. Compiled graphs break here, as with its own
    package."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int,
        starts: Tensor | None = None, longest: int | None = None, softcap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        ctx.options = {
            "cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest,
            "softmax_scale": scale, "is_causal": causal and left < 0, "window_size_left": left,
            "window_size_right": 0 if causal else -1, "softcap": softcap,
        }  # fmt: skip
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, **ctx.options)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = map(torch.empty_like, (q, k, v))
        torch.ops.flash_attn_3.bwd(grad.contiguous(), q, k, v, out, lse, dq, dk, dv, **ctx.options)
        return dq, dk, dv, *[None] * 6


@torch.library.custom_op("powertrain_benchmarks::flash_3", mutates_args=())
def _flash_3_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, softmax_scale=q.shape[-1] ** -0.5, is_causal=True)
    return out, lse


@torch.library.custom_op("powertrain_benchmarks::flash_3_backward", mutates_args=())
def _flash_3_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    options = {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": True}
    torch.ops.flash_attn_3.bwd(grad.contiguous(), q, k, v, out, lse, dq, dk, dv, **options)
    return dq, dk, dv


@_flash_3_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(batch, heads, length, dtype=torch.float32)


@_flash_3_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


_flash_3_forward.register_autograd(
    lambda ctx, grad, _: _flash_3_backward(grad, *ctx.saved_tensors), setup_context=_keep
)


def flash_3_op() -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """FlashAttention-3's causal attention of q [B, S, H, D] and k, v [B, S, Hkv, D] as an op, at which compiled graphs
    do not break, or None."""
    return None if flash_3() is None else lambda q, k, v: _flash_3_forward(q, k, v)[0]


def missing() -> list[str]:
    """The opponents that are not here, with how each is found."""
    packages = {"liger_kernel": "liger-kernel", "quack": "quack-kernels", "cut_cross_entropy": "cut-cross-entropy"}
    found = [f"{name} (package {package})" for name, package in packages.items() if find_spec(name) is None]
    return found + (
        [] if os.environ.get("FLASH_3_LIBRARY") else ["FlashAttention-3 (FLASH_3_LIBRARY names its library)"]
    )
