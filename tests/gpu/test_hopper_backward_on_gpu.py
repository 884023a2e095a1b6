"""The Hopper backward against the judge of the universal one, in every layout and with every feature it takes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import triton_flash
from powertrain.ops.attention.hopper_backward import hopper_attention_bwd, why_not_backward
from powertrain.runtime import prebuild
from powertrain.runtime.recording import record
from tests.ops.attention.problems import CONFIGS, Config, errors, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="made for sm_90"
    ),
]
CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16)
SEEDS = range(12)
REFUSED = ("bias", "prefix", "documents", "chunk", "dropout", "expand_groups", "everything")
TAKEN = [
    config
    for config in CONFIGS
    if not any(feature.startswith(REFUSED) for feature in config.features)
    and config.layout != "bmghk"
    and max(config.head_dims) <= 128
    and not any(dim % 8 for dim in config.head_dims)
]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The universal backend differentiates by this backward; why it did not, call by call."""
    reasons: list[str | None] = []
    universal = triton_flash._attention_bwd_op.forward

    def either(dout: Any, dlse: Any, query: Any, key: Any, value: Any, *rest: Any) -> Any:
        reasons.append(why_not_backward(query, key, value, triton_flash._Args(*rest[3:])))
        call = universal if reasons[-1] else hopper_attention_bwd
        return call(dout, dlse, query, key, value, *rest)

    monkeypatch.setattr(triton_flash._attention_bwd_op, "forward", either)
    return reasons


def _differentiate(call: Any, tensors: dict[str, Tensor | None], options: dict[str, Any]) -> None:
    out, lse = call(**tensors, **options)
    torch.autograd.backward([out, lse], [torch.ones_like(out), torch.zeros_like(lse)])


def _largest(seed: int) -> int:
    return 400 if seed % 3 else 130


@pytest.mark.slow
@pytest.mark.parametrize("config", TAKEN, ids=lambda config: config.name)
def test_sweep(config: Config, taken: list[str | None]) -> None:
    """Sizes, lengths, strides and values at random; compiled ahead, all of a configuration at once."""
    with record() as wanted:
        for seed in SEEDS:
            call, tensors, options = make(config, seed, CUDA, DTYPES[seed % 2], _largest(seed))
            _differentiate(call, tensors, options | {"backend": "triton"})
    assert not prebuild.build(wanted.specs).failures
    bad = [
        f"{config.name}, seed {seed}, {DTYPES[seed % 2]}: {error}"
        for seed in SEEDS
        for error in errors(config, seed, CUDA, DTYPES[seed % 2], _largest(seed))
        if not error.ok
    ]
    assert not bad, "\n".join(bad)
    assert None in taken
