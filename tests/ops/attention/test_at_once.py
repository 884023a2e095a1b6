"""The reference where lengths cannot be read: all sequences at once give what one after the other gives."""

import pytest
import torch

from powertrain.ops.attention.backends import reference
from powertrain.runtime.settings import settings
from tests.ops.attention.problems import CONFIGS, Config, make

pytestmark = pytest.mark.skipif(settings().interpret, reason="no kernel of ours in it")

WITH_LENGTHS = [config for config in CONFIGS if config.layout == "thd" or "lengths" in config.features]


@pytest.mark.parametrize("config", WITH_LENGTHS, ids=lambda config: config.name)
@pytest.mark.parametrize("seed", range(4))
def test_values_and_gradients(config: Config, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call, tensors, options = make(config, seed, torch.device("cpu"), torch.float64, 12)
    leaves = [x for x in tensors.values() if x is not None]
    found = []
    for at_once in (False, True):
        monkeypatch.setattr(reference, "is_traced", lambda x, now=at_once: now)
        out, lse = call(**tensors, **options, backend="reference")
        grads = torch.autograd.grad((out * out).sum() + lse.nan_to_num(neginf=0).sum(), leaves)
        found.append((out, lse, *grads))
    for one, all_ in zip(*found, strict=True):
        torch.testing.assert_close(all_, one)
