"""Attention as one would write it in PyTorch, for comparison."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def attend(
    q: Tensor,  # [b, sq, h, d]
    k: Tensor,  # [b, sk, hk, d]
    v: Tensor,  # [b, sk, hk, dv]
    bias: Tensor | None = None,  # broadcasts to [b, h, sq, sk]; bool: True sees
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [b, sq, h, dv], lse [b, h, sq]); 0 and -inf for a query that sees no key."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s.masked_fill(~bias, -torch.inf) if bias.dtype is torch.bool else s + bias
    blind = (s == -torch.inf).all(-1, keepdim=True)
    s = s.masked_fill(blind, 0.0)
    lse = torch.logsumexp(s.masked_fill(blind, -torch.inf), -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[None, :, None])
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).masked_fill(blind, 0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def band(
    queries: int, keys: int, *, causal: bool = False, left: int = -1, right: int = -1, top_left: bool = False
) -> Tensor:
    """[queries, keys] bool, True where a query sees a key, element by element."""
    offset = 0 if top_left else keys - queries
    right = 0 if causal else right
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        for j in range(keys):
            seen[i, j] = (left < 0 or j >= i + offset - left) and (right < 0 or j <= i + offset + right)
    return seen


def tensors(*shapes: Sequence[int], grad: bool = True, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(*shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def same(ours: Callable[..., Tensor], expected: Callable[..., Tensor], inputs: Sequence[Tensor | None]) -> None:
    """Results and the gradients of all inputs that want one agree, in float64."""
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    results = []
    for function in (ours, expected):
        out = function(*inputs)
        weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).cos()
        grads = torch.autograd.grad((out * weights).sum(), leaves) if leaves else ()
        results.append((out, *grads))
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
