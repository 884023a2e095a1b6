"""What the interpreter's bookkeeping remembers is what Triton computes each time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from powertrain.runtime.compile import interpreter_bookkeeping
from powertrain.runtime.settings import settings

pytestmark = pytest.mark.skipif(
    settings().interpret or not triton.__version__.startswith("3.6."),
    reason="compares with Triton's own: 3.6, where it is not installed already",
)

REPLACED = (
    (interpreter, "_get_np_dtype"),
    (interpreter, "_patch_builtin"),
    (interpreter.TritonSemantic, "broadcast_impl_value"),
    (interpreter.TritonSemantic, "to_tensor"),
    (tl.tuple, "__init__"),
    (tl.block_type, "__init__"),
    (tl.tensor, "__init__"),
)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Installs it until the test ends."""
    for owner, name in REPLACED:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(tl.tuple, "type", None, raising=False)
    monkeypatch.delattr(tl.tuple, "type")
    return interpreter_bookkeeping.install


def _facts_of_types() -> list[Any]:
    facts: list[Any] = []
    for element in (tl.float32, tl.int1, tl.bfloat16, tl.pointer_type(tl.float16)):
        for shape in ([16], tl.tuple([4, 8]), [4, tl.constexpr(8)], [1, 1, 2]):
            block = tl.block_type(element, shape)
            again = block.with_element_ty(tl.int64)
            x = tl.tensor(None, block)
            facts += [str(block), block.numel, list(block.shape), str(block.shape.type), str(again), again == block]
            facts += [[size.value for size in x.shape], x.numel.value, x.dtype, x.type is block, str(x.shape.type)]
            facts += [interpreter._get_np_dtype(block), interpreter._get_np_dtype(element)]
    scalar = tl.tensor(None, tl.int32)
    pair = tl.tuple([1, scalar], tl.core.tuple_type([tl.int32, tl.int32], ["first", "second"]))
    return [*facts, len(scalar.shape), scalar.numel.value, pair.second is scalar, str(pair.type)]


def test_types(install: Callable[[], None]) -> None:
    expected = _facts_of_types()
    install()
    assert _facts_of_types() == expected
    assert _facts_of_types() == expected  # remembered


@pytest.mark.parametrize(
    ("shape", "error"),
    [([], TypeError), ([3], ValueError), ([4, 2.0], TypeError), ([1 << 21], ValueError), ((4, 2), AssertionError)],
)
def test_shapes_that_are_refused(shape: Any, error: type[Exception], install: Callable[[], None]) -> None:
    with pytest.raises(error) as stock:
        tl.block_type(tl.int32, shape)
    install()
    tl.block_type(tl.int32, [4, 2])
    for _ in range(2):
        with pytest.raises(error) as found:
            tl.block_type(tl.int32, shape)
        assert str(found.value) == str(stock.value)


def _outer(x_ptr, y_ptr, z_ptr, N, M: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * M + tl.arange(0, M)
    j = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0)
    y = tl.load(y_ptr + j)[None, :].to(tl.float16)
    z = x[:, None] * 2 - y + tl.where(i[:, None] > j[None, :], 1.5, y)
    tl.store(z_ptr + i[:, None] * BLOCK + j[None, :], tl.exp(z.to(tl.float32)), mask=(i < N)[:, None])


def _interpreted() -> torch.Tensor:
    torch.manual_seed(0)
    x, y, z = torch.randint(-3, 4, (11,), dtype=torch.int32), torch.randn(8), torch.zeros(11, 8)
    interpreter.InterpretedFunction(_outer)[(3,)](x, y, z, 11, M=4, BLOCK=8)
    return z


def test_a_kernel(install: Callable[[], None]) -> None:
    """Casts, broadcasts both ways, masks, several programs and launches."""
    expected = _interpreted()
    assert expected.count_nonzero() == expected.numel()
    load = tl.load
    install()
    for _ in range(2):
        assert torch.equal(_interpreted(), expected)
        assert tl.load is load  # a launch leaves nothing replaced
