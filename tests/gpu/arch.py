"""Marks of tests that one GPU architecture runs: `pytestmark = ON_SM90`."""

import pytest
import torch

ON_SM90 = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="made for sm_90"
    ),
]
