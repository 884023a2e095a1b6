"""torch.set_default_dtype(bfloat16): numbers that are float32 by their meaning stay so."""

from collections.abc import Iterator

import pytest
import torch

from powertrain.compat.apex import amp_C
from powertrain.compat.flash_attn.modules.mha import MHA, get_alibi_slopes
from powertrain.compat.transformer_engine import pytorch as te
from powertrain.compat.transformer_engine.common.recipe import DelayedScaling


@pytest.fixture(autouse=True)
def _bfloat16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_slopes_and_norms() -> None:
    slopes = MHA(48, 12, use_alibi=True, use_flash_attn=True).inner_attn.alibi_slopes
    assert slopes.tolist() == torch.tensor(get_alibi_slopes(12), dtype=torch.float32).tolist()
    norms = amp_C.multi_tensor_l2norm(1, torch.zeros(1, dtype=torch.int32), [[]])
    assert [norm.dtype for norm in norms] == [torch.float32] * 2


def test_delayed_scales_of_a_checkpoint() -> None:
    first, second = (te.Linear(32, 32, params_dtype=torch.float32, device="cpu") for _ in range(2))
    x = torch.randn(16, 32, dtype=torch.float32)
    for _ in range(2):
        with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
            first(x).sum().backward()
    second.load_state_dict(first.state_dict())
    for ours, theirs in zip(second.buffers(), first.buffers(), strict=True):
        assert ours.dtype is torch.float32 and torch.equal(ours, theirs)
