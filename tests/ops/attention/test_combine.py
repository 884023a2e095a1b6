"""combine, by batch and packed, beside the formula; memory behind its results and partial results is poisoned."""

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import combine as module
from powertrain.ops.attention.combine import combine
from tests.torch_setup import HAS_GPU, INTERPRET

pytestmark = pytest.mark.skipif(not (HAS_GPU or INTERPRET), reason="kernels run on a GPU or in the interpreter")


def _within(shape: tuple[int, ...], device: torch.device, fill: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A tensor in the middle of NaN, and the memory it lies in."""
    count = int(torch.Size(shape).numel())
    memory = torch.full((3 * count,), torch.nan, device=device)
    inner = memory[count : 2 * count].view(shape)
    if fill is not None:
        inner.copy_(fill)
    return inner, memory


TILES = ((4, 1, 2, 4), (4, 1, 4, 4), (4, 1, 8, 4), (1, 16, 1, 2), (1, 32, 1, 4), (1, 64, 1, 8), (2, 2, 2, 1))


@pytest.mark.parametrize("seed", range(20))
def test_batches_and_packed_rows(seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tile of so few rows, and with those of more."""
    if seed >= 6:
        monkeypatch.setattr(module, "rows_of", lambda rows, splits: module.Rows(*TILES[seed % len(TILES)]))
    draw = torch.Generator().manual_seed(seed)

    def pick(*values: int) -> int:
        return values[int(torch.randint(len(values), (), generator=draw))]

    packed, splits, queries = seed % 2 == 0, pick(1, 2, 5, 130), pick(1, 3, 7)
    batch, heads, dims = 1 if packed else pick(1, 2, 3), pick(1, 2, 3, 6, 8), pick(8, 24, 130)
    values = torch.randn(splits, batch, queries, heads, dims, generator=draw)
    lses = torch.randn(splits, batch, heads, queries, generator=draw) * 3
    lses[torch.rand(lses.shape, generator=draw) < 0.3] = -torch.inf
    values[(lses == -torch.inf).transpose(2, 3)] = torch.nan  # a part without keys leaves anything
    sinks = torch.randn(heads, generator=draw) if pick(0, 1) else None

    partial, _ = _within((*values.shape,), device, values.to(device))
    shape = lses.shape if not packed else (splits, heads, queries)
    partial_lse, _ = _within((*shape,), device, lses.view(shape).to(device))
    out, around_out = _within((batch, queries, heads, dims), device)
    lse, around_lse = _within((*shape[1:],), device)
    combine(partial, partial_lse, None if sinks is None else sinks.to(device), out, lse, out.stride()[:3])

    every = lses if sinks is None else torch.cat([lses, sinks[None, None, :, None].expand(1, *lses.shape[1:])])
    total = every.double().logsumexp(0)  # [B, H, S]
    weights = (lses.double() - total.masked_fill(total == -torch.inf, 0.0)).exp()
    exact = (values.nan_to_num().double() * weights.transpose(2, 3)[..., None]).sum(0)
    torch.testing.assert_close(out.cpu().double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.cpu().double().view(total.shape), total, atol=1e-5, rtol=1e-5)
    for memory, inner in ((around_out, out), (around_lse, lse)):
        assert memory.isnan().sum() == memory.numel() - inner.numel()
