"""Tests in float64 stay on the CPU, on a machine with a GPU too."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils._triton import has_triton


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[None]:
    """What is made without a device, as the other libraries do on the GPU, is made on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield
    # torch.compile asks once in a process, and would find no Triton for the GPU in later tests
    has_triton.cache_clear()
