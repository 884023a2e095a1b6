"""The universal backend: our own Triton kernels, for every problem on every GPU.

Forward: triton/forward.py. Backward: triton/backward.py, two kernels without atomics (dk and dv per block of keys, dq
per block of queries), so it is deterministic. Saved for backward: the inputs, out, and lse, float32 [b, h, sq].

Memory beyond inputs and results: backward 8 * b * h * sq bytes (lse in base 2, and delta), and where tiles are read
through descriptors 384 to 768 bytes a program, each of 64 or more rows of a head.
FLOPs: forward 2 * pairs * (dqk + dv) per head, backward 2 * pairs * (3 * dqk + 2 * dv) useful, and one product of each
kind more for computing scores twice, where pairs counts the (query, key) pairs that the mask lets through.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from powertrain.ops.attention import autograd
from powertrain.ops.attention.problem import AttentionCall, AttentionProblem, Reason, use
from powertrain.ops.attention.triton.backward import attention_backward
from powertrain.ops.attention.triton.forward import attention_forward
from powertrain.runtime.settings import settings


def why_not(problem: AttentionProblem) -> Iterator[Reason]:
    """Every unmet requirement of these kernels."""
    if problem.dtype is torch.float64:
        yield Reason("triton takes no float64, it computes in float32", use("reference", "chunked"), "float32")
    if problem.target is None and not settings().interpret:
        yield Reason("it runs on a GPU only, got the CPU", use("cpu", "chunked"), "move the tensors to a GPU")


backward_why_not = why_not
backward_op = autograd.backward_op("attention_bwd", attention_backward)
_forward_op = autograd.forward_op("attention", attention_forward, {"triton": backward_op})


def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable."""
    return autograd.apply(_forward_op, call, "triton")
