"""Attention in a neighborhood of each token, and a convolution over attention probabilities."""

import torch
from torch import Tensor
from torch.nn import functional as F

from powertrain.compat.liger_kernel.simplex import liger_sparsemax
from powertrain.ops.attention import attention
from powertrain.ops.softmax import scaled_softmax
from powertrain.runtime import checks

Pair = int | tuple[int, int]


def liger_fused_neighborhood_attention(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: int = 7, dilation: int = 1, scale: float | None = None
) -> Tensor:
    """Attention of each token to the kernel_size tokens around it, `dilation` apart, by `powertrain.attention`.

        query, key, value  [B, H, S, D]
        kernel_size        odd; query i sees key j if |i - j| <= (kernel_size // 2) dilation, a multiple of dilation
        scale              None: 1 / sqrt(D)
    Returns [B, H, S, D]. Memory: no scores; with a dilation a copy of query, key and value.
    Raises ValueError naming the argument.
    """
    op, S = "liger_fused_neighborhood_attention", query.shape[-2]
    checks.require(query.dim() == 4, op, "query", "have shape [B, H, S, D]", list(query.shape))
    checks.shape(op, "key", key, query.shape, "shape of query")
    checks.shape(op, "value", value, query.shape, "shape of query")
    checks.require(kernel_size > 0 and kernel_size % 2 == 1, op, "kernel_size", "be odd and positive", kernel_size)
    checks.require(dilation >= 1, op, "dilation", "be 1 or more", dilation)
    reach = (kernel_size // 2, kernel_size // 2)
    by_token = [x.transpose(1, 2) for x in (query, key, value)]
    # tokens of one remainder by the dilation see each other alone: a sequence of their own, in which they are neighbors
    parts = [
        attention(*(x[:, start::dilation] for x in by_token), window_size=reach, scale=scale)
        for start in range(min(dilation, S))
    ]
    if len(parts) == 1:
        return parts[0].transpose(1, 2)
    order = torch.cat([torch.arange(start, S, dilation, device=query.device) for start in range(len(parts))])
    return torch.cat(parts, 1)[:, order.argsort()].transpose(1, 2)


def liger_multi_token_attention(
    scores: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    sparse: bool = False,
) -> Tensor:
    """A convolution over causal attention probabilities, causal again: tril(conv2d(softmax(causal scores))).

        scores        [B, C, L, L]
        weight, bias  of torch.nn.functional.conv2d, as stride, padding, dilation and groups; its result must be square
        sparse        sparsemax instead of softmax
    Softmax in one kernel, the convolution by PyTorch. Raises ValueError naming the argument.
    Source: Golovneva et al., arXiv:2504.00927.
    """
    op = "liger_multi_token_attention"
    is_square = scores.dim() == 4 and scores.shape[-1] == scores.shape[-2]
    checks.require(is_square, op, "scores", "have shape [B, C, L, L]", list(scores.shape))
    if sparse:
        L = scores.shape[-1]
        later = torch.ones(L, L, dtype=torch.bool, device=scores.device).triu(1)
        probabilities = liger_sparsemax(scores.masked_fill(later, -torch.inf))
    else:
        probabilities = scaled_softmax(scores, is_causal=True)
    out = F.conv2d(probabilities, weight, bias, stride, padding, dilation, groups)
    good = out.shape[-1] == out.shape[-2]
    checks.require(good, op, "weight, stride, padding and dilation", "give a square result", list(out.shape))
    return out.tril()
