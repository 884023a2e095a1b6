"""Connections between layers in place of x + f(x): hyper-connections and attention over depth, by PyTorch in float32.

Sources: Xie et al., arXiv:2512.24880 (manifold-constrained hyper-connections); arXiv:2603.15031 (attention residuals).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from powertrain.ops.conversion import stack
from powertrain.ops.shapes import acc_dtype
from powertrain.runtime import checks
from powertrain.runtime.dispatch import without_autocast

Coefficients = tuple[Tensor, Tensor, Tensor]


def liger_mhc_coeffs(
    x: Tensor,
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> Coefficients:
    """Coefficients of n residual streams, for each token from its own streams.

        z = (x flattened) phi / rms(x flattened), its columns the logits of pre [n], post [n] and res [n * n]
        h_pre = sigmoid(alpha_pre z + b) + pre_eps;   h_post = post_mult sigmoid(alpha_post z + b)
        h_res = softmax of rows of alpha_res z + b, then columns and rows divided by their sums, `tmax` times in all

        x      [..., n, C]            float16 or bfloat16; float32 with allow_fp32
        phi    [n C, n n + 2 n]       any floating dtype
        b      [n n + 2 n], alphas scalars
    Returns h_pre [..., n], h_post [..., n] and h_res [..., n (out), n (in)], float32.
    Raises ValueError naming the argument.
    """
    op = "liger_mhc_coeffs"
    checks.require(x.dim() >= 2, op, "x", "have shape [..., n, C]", list(x.shape))
    is_wide = x.dtype in (torch.float32, torch.float64)
    checks.require(
        allow_fp32 or not is_wide, op, "x", "be float16 or bfloat16 without allow_fp32", checks.name(x.dtype)
    )
    checks.require(tmax >= 1, op, "tmax", "be 1 or more", tmax)
    n, C = x.shape[-2:]
    M = n * n + 2 * n
    checks.shape(op, "phi", phi, (n * C, M), "[n C, n n + 2 n] of x")
    checks.shape(op, "b", b, (M,), "[n n + 2 n] of x")
    acc = acc_dtype(x.dtype)
    # autocast would round the product, whose logits pass through an exponential
    with without_autocast(x.device):
        flat = x.flatten(-2).to(acc)
        z = (flat @ phi.to(acc)) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
        pre, post, res = z.split((n, n, n * n), -1)
        b_pre, b_post, b_res = b.to(acc).split((n, n, n * n))
        h_pre = torch.sigmoid(pre * alpha_pre + b_pre) + pre_eps
        h_post = torch.sigmoid(post * alpha_post + b_post) * post_mult
        logits = (res * alpha_res + b_res).unflatten(-1, (n, n))
        return h_pre, h_post, _sinkhorn(logits, tmax, sinkhorn_eps)


def _sinkhorn(logits: Tensor, steps: int, eps: float) -> Tensor:
    """Nearly doubly stochastic matrices [..., n, n]; eps stands where Liger has it."""
    h = logits.softmax(-1) + eps
    h = h / (h.sum(-2, keepdim=True) + eps)
    for _ in range(steps - 1):
        h = h / (h.sum(-1, keepdim=True) + eps)
        h = h / (h.sum(-2, keepdim=True) + eps)
    return h


def liger_mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """sum of h_pre[i] x[i]: x [..., n, C], h_pre [..., n] -> [..., C] in x's dtype."""
    checks.shape("liger_mhc_pre", "h_pre", h_pre, x.shape[:-1], "shape of x but for the last dim")
    with without_autocast(x.device):
        wide = x.to(acc_dtype(x.dtype))
        return (h_pre.to(wide.dtype).unsqueeze(-2) @ wide).squeeze(-2).to(x.dtype)


def liger_mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """out[o] = sum of h_res[o, i] x[i] + h_post[o] f_out: x [..., n, C], f_out [..., C] -> [..., n, C] in x's dtype."""
    op, n = "liger_mhc_post_res", x.shape[-2]
    checks.shape(op, "f_out", f_out, (*x.shape[:-2], x.shape[-1]), "[..., C] of x")
    checks.shape(op, "h_post", h_post, x.shape[:-1], "[..., n] of x")
    checks.shape(op, "h_res", h_res, (*x.shape[:-1], n), "[..., n, n] of x")
    with without_autocast(x.device):
        wide = x.to(acc_dtype(x.dtype))
        added = h_post.to(wide.dtype).unsqueeze(-1) * f_out.to(wide.dtype).unsqueeze(-2)
        return (h_res.to(wide.dtype) @ wide + added).to(x.dtype)


def liger_mhc_apply(
    x: Tensor, f_out: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, *, return_x_in: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """`liger_mhc_post_res`; with return_x_in (that, `liger_mhc_pre`)."""
    x_out = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (x_out, liger_mhc_pre(x, h_pre)) if return_x_in else x_out


def liger_mhc_forward(
    x: Tensor,
    layer: Callable[[Tensor], Tensor],
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
    return_coeffs: bool = False,
) -> Tensor | tuple[Tensor, Coefficients]:
    """`layer` between n residual streams: `liger_mhc_coeffs`, `liger_mhc_pre`, layer, `liger_mhc_post_res`.

    The layer gets [..., C] in its first parameter's dtype, x's if it has none. With return_coeffs (that, coefficients).
    """
    h_pre, h_post, h_res = coefficients = liger_mhc_coeffs(
        x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32=allow_fp32, tmax=tmax, rms_eps=rms_eps,
        pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult,
    )  # fmt: skip
    first = next(iter(layer.parameters()), x) if isinstance(layer, torch.nn.Module) else x
    x_out = liger_mhc_post_res(x, layer(liger_mhc_pre(x, h_pre).to(first.dtype)), h_post, h_res)
    return (x_out, coefficients) if return_coeffs else x_out


def liger_attn_res(V: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float = 1e-6) -> Tensor:
    """Attention over N blocks' outputs, for each token: sum of softmax(w_query . rms_norm(V, w_norm)) V.

    V [N, ..., D], or N tensors [..., D]; w_query and w_norm [D]. Returns [..., D] in V's dtype.
    Raises ValueError naming the argument.
    """
    blocks = V if isinstance(V, Tensor) else stack(tuple(V))
    for name, weight in (("w_query", w_query), ("w_norm", w_norm)):
        checks.shape("liger_attn_res", name, weight, blocks.shape[-1:], "last dim of V")
    with without_autocast(blocks.device):
        wide = blocks.to(acc_dtype(blocks.dtype))
        rstd = torch.rsqrt(wide.square().mean(-1) + eps)
        # both weights in one: the normalized blocks are never made
        weights = (rstd * (wide @ (w_query.to(wide.dtype) * w_norm.to(wide.dtype)))).softmax(0)
        return (weights.unsqueeze(-1) * wide).sum(0).to(blocks.dtype)
