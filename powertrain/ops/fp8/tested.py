"""Self-test of the FP8 kernels: before their first use on a device they are compared with their formulas."""

from collections.abc import Callable

import torch

from powertrain.runtime import recording, self_test
from powertrain.runtime.errors import WarmUpFirst
from powertrain.runtime.target import Target


def serves(
    tested: dict[int | None, str | None],
    device: torch.device,
    op: str,
    test: Callable[[torch.device], str | None],
    otherwise: str = "plain PyTorch is used",
) -> bool:
    """Whether a device has FP8 and `test` found no defect there; it runs once, and `tested` keeps the finding.

    op         its name, in the warning of a defect
    test       returns the defect of a small result, or None
    otherwise  the replacement of the kernels, in the same warning
    Raises WarmUpFirst if the test would have to run while a CUDA graph is captured: the slower way, captured unnoticed,
    would be replayed for good.
    """
    if not Target.of(device).has_fp8:
        return False
    # nothing to compare: no GPU, or launches that are recorded instead of run
    if device.type != "cuda" or recording.state.recording is not None:
        return True
    if device.index not in tested and torch.cuda.is_current_stream_capturing():
        raise WarmUpFirst(f"{op} would have to be tested on {device} inside graph capture: run the call once before")
    return self_test.failure(tested, device, test, f"{op}: {otherwise}") is None
