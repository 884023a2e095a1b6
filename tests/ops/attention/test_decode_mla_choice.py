"""Which kernel serves a decoding call over an MLA cache; the Hopper kernel's results are tests/gpu's."""

from typing import Any

import pytest
import torch

from powertrain.ops.attention.decode import decode_attention
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings

META = torch.device("meta")
HOPPER = "_hopper_decode_mla_kernel"
pytestmark = pytest.mark.skipif(settings().interpret, reason="Gluon has no interpreter")


def _kernels(
    heads: int = 128, page_size: int = 0, dtype: torch.dtype = torch.bfloat16, arch: str = "sm_90", **options: Any
) -> list[str]:
    rows = (256, page_size) if page_size else (2, 4096)
    table = torch.empty(2, 32, dtype=torch.int32, device=META) if page_size else None
    with record(arch) as wanted:
        decode_attention(
            torch.empty(2, 1, heads, 576, dtype=dtype, device=META),
            torch.empty(*rows, 1, 576, dtype=dtype, device=META),
            None,
            torch.empty(2, dtype=torch.int32, device=META),
            page_table=table,
            head_dim_v=512,
            **options,
        )
    return [spec.kernel.name for spec in wanted.specs]


@pytest.mark.parametrize("page_size", [0, 16, 32, 64, 192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hopper_serves(page_size: int, dtype: torch.dtype) -> None:
    assert HOPPER in _kernels(page_size=page_size, dtype=dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"heads": 8},
        {"page_size": 1},
        {"page_size": 48},
        {"dtype": torch.float32},
        {"arch": "sm_80"},
        {"softcap": 30.0},
        {"window_size": (100, 0)},
        {"scale": -1.0},
    ],
)
def test_the_universal_kernel_serves(options: dict[str, Any]) -> None:
    assert HOPPER not in _kernels(**options)
