"""The universal kernels against the judge: every mask, layout and head dim, forward and backward."""

import pytest
import torch

from tests.ops.attention.problems import CONFIGS, Config, errors

pytestmark = pytest.mark.kernels


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_values_and_gradients(config: Config, device: torch.device) -> None:
    number = CONFIGS.index(config)
    largest = 40 if max(config.head_dims) <= 128 else 18
    bad = [e for e in errors(config, number, device, DTYPES[number % 3], largest) if not e.ok]
    assert not bad
