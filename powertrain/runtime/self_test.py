"""Self-test of a kernel: it runs once on each device before its first result is used."""

from collections.abc import Callable

import torch

from powertrain.runtime import tracing
from powertrain.runtime.dispatch import without_autocast
from powertrain.runtime.errors import CompileError, LaunchError
from powertrain.runtime.settings import settings


def failure(
    failures: dict[int | None, str | None],
    device: torch.device,
    test: Callable[[torch.device], str | None],
    otherwise: str,
) -> str | None:
    """Why a Gluon kernel must not be used on `device`, or None; remembered in `failures`.

    test       compares a small result and returns the defect, or None; called without autocast and gradients
    otherwise  "gemm: cuBLAS serves": for the warning if it fails
    """
    if settings().interpret:
        return "Gluon has no interpreter"
    if device.index in failures:
        return failures[device.index]
    if torch.cuda.is_current_stream_capturing():
        return "its self-test has not run on this device and cannot while a CUDA graph is captured"
    try:
        with torch.no_grad(), without_autocast(device):
            reason = test(device)
    except (CompileError, LaunchError) as error:
        reason = str(error)
    failures[device.index] = reason
    if reason:
        tracing.warn(f"{otherwise} {device} although the Hopper kernel is for it: {reason}")
    return reason
