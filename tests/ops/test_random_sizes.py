"""Records the launches of every op at random sizes, for every arch: a compiler must accept the options of each."""

import random

import pytest

from benchmarks.ops.random_sizes import KINDS, _lora, launch
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings

pytestmark = pytest.mark.skipif(settings().interpret, reason="nothing is recorded in the interpreter")


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("kind", dict.fromkeys(KINDS), ids=lambda kind: kind.__name__.removeprefix("_"))
def test_random_sizes(kind: object, arch: str) -> None:
    source = random.Random(f"{kind.__name__} {arch}")
    with record(arch) as wanted:
        for _ in range(12):
            launch(kind(source))
    # lora_linear has a kernel for few rows of CUDA tensors alone
    assert len(wanted) or kind is _lora
