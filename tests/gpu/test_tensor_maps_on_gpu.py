"""Tensor maps made on the host: tiles of views and at offsets, from any thread, in graphs."""

import threading

import pytest
import torch
from torch import Tensor

from powertrain.runtime.gluon_compat import gl, mbarrier, tma_load
from powertrain.runtime.launch import gluon_kernel
from powertrain.runtime.tensor_maps import takes_zero_strides, tensor_map
from tests.gpu.arch import ON_SM90

pytestmark = ON_SM90
CUDA = torch.device("cuda")


@gluon_kernel(archs=(90,))
def _read_kernel(x_desc, y_ptr, batch, row, column):
    """A tile [64, 64] of [batch, rows, columns] to y."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 64, 64], x_desc.dtype)
    tile = gl.allocate_shared_memory(x_desc.dtype, [1, 64, 64], layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, 64 * 64 * 2)
    tma_load(x_desc, [batch, row, column], bar, tile)
    mbarrier.wait(bar, 0)
    order: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [1, 4, 1], [2, 1, 0])
    r = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, order)))
    c = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, order)))
    place = gl.expand_dims(gl.expand_dims(r, 0), 2) * 64 + gl.expand_dims(gl.expand_dims(c, 0), 1)
    gl.store(y_ptr + place, tile.load(order))


def _read(x: Tensor, batch: int, row: int, column: int, offset: int = 0, rows: int | None = None) -> Tensor:
    y = torch.empty(64, 64, dtype=x.dtype, device=CUDA)
    shape = (x.shape[0], rows or x.shape[1], x.shape[2])
    _read_kernel[(1,)](tensor_map(x, shape, x.stride(), (1, 64, 64), offset), y, batch, row, column)
    return y


def _tile(x: Tensor, batch: int, row: int, column: int) -> Tensor:
    found = torch.zeros(64, 64, dtype=x.dtype, device=CUDA)
    inside = x[batch, row : row + 64, column : column + 64]
    found[: inside.shape[0], : inside.shape[1]] = inside
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_views(dtype: torch.dtype) -> None:
    """Slices, transposed dims, one batch entry with a stride of 0, ends of rows and columns: zeros outside."""
    whole = torch.randn(4, 200, 3, 96, device=CUDA, dtype=dtype)
    for x in (whole[:, :, 1], whole[1:3, 8:, 2, 8:], whole[2].transpose(0, 1), whole[0, :, 0].expand(1, -1, -1)):
        for batch, row, column in ((0, 0, 0), (x.shape[0] - 1, 128, 64), (0, 32, 8)):
            if row < x.shape[1] and column < x.shape[2]:
                assert torch.equal(_read(x, batch, row, column), _tile(x, batch, row, column))


def test_offsets() -> None:
    """A map that begins behind a tensor's first element, or ahead of it."""
    x = torch.randn(1, 256, 64, device=CUDA, dtype=torch.bfloat16)
    assert torch.equal(_read(x, 0, 0, 0, 64 * 64, 192), _tile(x, 0, 64, 0))
    later = x[:, 64:]
    assert torch.equal(_read(later, 0, 64, 0, -64 * 64, 256), _tile(x, 0, 64, 0))


def test_entries_that_are_the_same() -> None:
    if not takes_zero_strides(0):
        pytest.skip("this driver makes no such map: attention copies")
    x = torch.randn(1, 100, 64, device=CUDA, dtype=torch.bfloat16).expand(3, -1, -1)
    assert torch.equal(_read(x, 2, 40, 0), _tile(x, 2, 40, 0))


def test_threads_and_graphs() -> None:
    """A thread that has used no CUDA makes a map of sizes that nobody had; a graph reads its own tensor's values."""
    x = torch.randn(2, 328, 72, device=CUDA, dtype=torch.bfloat16)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(_read(x, 1, 300, 8)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], _tile(x, 1, 300, 8))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = _read(x, 1, 0, 0)
    x.normal_()
    graph.replay()
    assert torch.equal(y, _tile(x, 1, 0, 0))
