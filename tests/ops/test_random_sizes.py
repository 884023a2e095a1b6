"""Launches of every op at random sizes, recorded for every arch: none may ask for what a compiler refuses."""

import random

import pytest
import torch

from benchmarks.ops.random_sizes import KINDS, _lora
from powertrain.runtime.errors import PowertrainError
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings

pytestmark = pytest.mark.skipif(settings().interpret, reason="nothing is recorded in the interpreter")


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("kind", dict.fromkeys(KINDS), ids=lambda kind: kind.__name__.removeprefix("_"))
def test_random_sizes(kind: object, arch: str) -> None:
    source = random.Random(f"{kind.__name__} {arch}")
    recorded = 0
    for _ in range(12):
        draw = kind(source)
        with record(arch) as wanted:
            call, leaves = draw.build("meta")
            try:
                out = call()
            except PowertrainError:
                # an op may refuse a size of an arch by name; a benchmark prints it
                continue
            outs = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None and t.requires_grad]
            if leaves:
                torch.autograd.grad(outs, leaves, [torch.empty_like(t) for t in outs], allow_unused=True)
        recorded += len(wanted)
    # adapters have a kernel for few rows on a GPU alone
    assert recorded or kind is _lora
