"""What the host spends: one eager rms_norm of 128x1024, one launch, and the first use in a new process."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from powertrain.ops import norm
from powertrain.testing.bench import host_us

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


def run() -> Iterator[str]:
    x, dy = (torch.randn(128, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w = torch.ones_like(x[0])
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    ops = {"powertrain": norm.rms_norm, "torch": lambda x, w: F.rms_norm(x, (1024,), w, 1e-6)}
    for name, op in ops.items():
        _step(op, *leaves, dy)
        times = (host_us(lambda op=op: op(x, w)), host_us(lambda op=op: _step(op, *leaves, dy)))
        yield f"rms_norm 128x1024, host, {name:12} forward {times[0]:6.1f} us, forward + backward {times[1]:6.1f} us"

    y, rstd = torch.empty_like(x), torch.empty(128, device="cuda")
    arguments = (x, None, w, None, y, None, None, rstd, 128, 1024, 1024, 0, 1e-6)
    constants = {"IS_LAYER": False, "ZERO_CENTERED": False, "ROUND_FIRST": False, "BLOCK_M": 4, "BLOCK_N": 1024}
    kernel = norm._norm_fwd_kernel
    for name, launch in {"powertrain": kernel[(32,)], "triton": kernel.jit[(32,)]}.items():
        launch(*arguments, **constants, num_warps=4)
        microseconds = host_us(lambda launch=launch: launch(*arguments, **constants, num_warps=4))
        yield f"one warm launch, host, {name:12} {microseconds:6.1f} us"

    with tempfile.TemporaryDirectory() as store:
        for state in ("cold", "warm"):
            command = [sys.executable, "-c", _FIRST_USE]
            environment = {**os.environ, "POWERTRAIN_STORE": store}
            first = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
            yield f"first rms_norm of a process, {state} store: {first} ms"
