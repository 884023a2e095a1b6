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
    heads: int = 128, page_size: int = 0, dtype: torch.dtype = torch.bfloat16, arch: str = "sm_90",
    pages: int = 256, columns: int = 32, packed: int = 0, **options: Any,
) -> list[str]:  # fmt: skip
    """packed: queries in all, if they are packed."""
    rows = (pages, page_size) if page_size else (2, 4096)
    table = torch.empty(2, columns, dtype=torch.int32, device=META) if page_size else None
    if packed:
        options |= {"cu_seqlens_q": torch.empty(3, dtype=torch.int32, device=META), "max_seqlen_q": packed}
    shape = (packed,) if packed else (2, 1)
    with record(arch) as wanted:
        decode_attention(
            torch.empty(*shape, heads, 576, dtype=dtype, device=META),
            torch.empty(*rows, 1, 576, dtype=dtype, device=META),
            None,
            torch.empty(2, dtype=torch.int32, device=META),
            page_table=table,
            head_dim_v=512,
            **options,
        )
    return [spec.kernel.name for spec in wanted.specs]


@pytest.mark.parametrize("page_size", [0, 1, 3, 8, 16, 32, 48, 64, 192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hopper_serves(page_size: int, dtype: torch.dtype) -> None:
    assert HOPPER in _kernels(page_size=page_size, dtype=dtype)
    assert HOPPER in _kernels(page_size=page_size, dtype=dtype, packed=30)
    assert HOPPER in _kernels(page_size=page_size, dtype=dtype, num_splits=3)


@pytest.mark.parametrize(
    "options",
    [
        {"heads": 8},
        # 15 rows a sequence
        {"heads": 10, "packed": 3},
        {"page_size": 16, "columns": 0},
        # places of rows that are copied are 32 bits
        {"page_size": 1, "pages": 1 << 25},
        {"dtype": torch.float32},
        {"arch": "sm_80"},
        {"softcap": 30.0},
        {"window_size": (100, 0)},
        {"scale": -1.0},
    ],
)
def test_the_universal_kernel_serves(options: dict[str, Any]) -> None:
    assert HOPPER not in _kernels(**options)
