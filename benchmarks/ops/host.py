"""What the host spends: repeated small calls of rms_norm, attention, decode; one launch; first use in a process."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from powertrain import attention, decode_attention
from powertrain.ops import norm, norm_fwd_kernels
from powertrain.testing.bench import Timing, host_us, note

# constants of the one launch that is timed: rows of 1024 columns
LAUNCH: dict[str, Any] = {
    "IS_LAYER": False, "ZERO_CENTERED": False, "ROUND_FIRST": False, "BLOCK_M": 4, "BLOCK_N": 1024, "BLOCK_TAIL": 0,
    "PERSISTENT": False, "num_warps": 4,
}  # fmt: skip
_FIRST_USE = """
import time, torch, powertrain.ops.norm as norm
x = torch.randn(128, 1024, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
start = time.perf_counter()
norm.rms_norm(x)
torch.cuda.synchronize()
print(f"{(time.perf_counter() - start) * 1e3:.0f}")
"""


def _step(op: object, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> None:
    x.grad = w.grad = None
    op(x, w).backward(dy)


def _attention() -> Iterator[str]:
    q = torch.randn(1, 128, 32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(1, 128, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    dout = torch.randn_like(q)
    with_heads_first = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    calls = {
        "powertrain": ((q, k, v), dout, lambda q, k, v: attention(q, k, v, is_causal=True)),
        "torch": (
            with_heads_first,
            dout.transpose(1, 2).contiguous(),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        ),
    }
    for name, (inputs, grad, op) in calls.items():
        detached = [x.detach() for x in inputs]

        def step(inputs: Any = inputs, grad: Any = grad, op: Any = op) -> None:
            torch.autograd.grad(op(*inputs), inputs, grad)

        times = (host_us(lambda op=op, detached=detached: op(*detached)), host_us(step))
        _note("attention 1x128, heads 32/8, host", name, *times)
        label = f"attention 1x128, heads 32/8, host, {name:12}"
        yield f"{label} forward {times[0]:6.1f} us, with backward {times[1]:6.1f} us"


def _decode() -> Iterator[str]:
    q = torch.randn(1, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 2048, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([2000], device="cuda", dtype=torch.int32)
    calls = {
        "powertrain": lambda: decode_attention(q, k, v, lengths),
        "torch": lambda: F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True),
    }
    for name, call in calls.items():
        spent = host_us(call)
        _note("decode, batch 1, 2048 keys, host", name, spent)
        yield f"decode, batch 1, 2048 keys, host, {name:12} {spent:6.1f} us"


def _note(label: str, name: str, *microseconds: float) -> None:
    for way, spent in zip(("forward", "with backward"), microseconds, strict=False):
        # the median of 15 batches; its spread is not kept, a tenth is usual
        note(f"{label}, {way}", name, Timing(spent / 1e3, 0.1, 0.0))


def run() -> Iterator[str]:
    x, dy = (torch.randn(128, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w = torch.ones_like(x[0])
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    ops = {"powertrain": norm.rms_norm, "torch": lambda x, w: F.rms_norm(x, (1024,), w, 1e-6)}
    for name, op in ops.items():
        _step(op, *leaves, dy)
        times = (host_us(lambda op=op: op(x, w)), host_us(lambda op=op: _step(op, *leaves, dy)))
        _note("rms_norm 128x1024, host", name, *times)
        yield f"rms_norm 128x1024, host, {name:12} forward {times[0]:6.1f} us, forward + backward {times[1]:6.1f} us"

    yield from _attention()
    yield from _decode()
    y, rstd = torch.empty_like(x), torch.empty(128, device="cuda")
    arguments = (x, None, w, None, y, None, None, rstd, 128, 1024, 1024, 0, 1e-6)
    kernel = norm_fwd_kernels._norm_fwd_kernel
    for name, launch in {"powertrain": kernel[(32,)], "triton": kernel.jit[(32,)]}.items():
        launch(*arguments, **LAUNCH)
        microseconds = host_us(lambda launch=launch: launch(*arguments, **LAUNCH))
        yield f"one warm launch, host, {name:12} {microseconds:6.1f} us"

    with tempfile.TemporaryDirectory() as store:
        for state in ("cold", "warm"):
            command = [sys.executable, "-c", _FIRST_USE]
            environment = {**os.environ, "POWERTRAIN_STORE": store}
            first = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
            yield f"first rms_norm of a process, {state} store: {first} ms"
