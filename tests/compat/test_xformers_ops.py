"""xformers.ops beside attention, and xformers.checkpoint, against plain PyTorch in float64, forward and backward."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powertrain.compat import xformers
from powertrain.compat.xformers import ops as xops
from powertrain.compat.xformers.info import print_info
from powertrain.compat.xformers.ops.fmha.attn_bias import BlockDiagonalCausalWithOffsetPaddedKeysMask
from powertrain.compat.xformers.ops.swiglu_op import swiglu_packed
from tests.compat.plain import same, tensors

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_rms_norm() -> None:
    x, y, w = tensors((3, 4, 16), (3, 4, 16), (16,))
    same(lambda x, w: xops.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (16,), w, 1e-5), [x, w])
    same(lambda x, y, w: xops.rms_norm_add(x * 1, y, w), lambda x, y, w: F.rms_norm(x + y, (16,), w, 1e-6), [x, y, w])
    module, total = xops.RMSNorm(16, include_weight=False), x.detach().clone()
    z = module.increment_and_forward_(total, y.detach())
    torch.testing.assert_close((total, z), ((x + y).detach(), F.rms_norm(x + y, (16,), None, 1e-6).detach()))
    assert set(xops.RMSNorm(16).state_dict()) == {"weight"}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_swiglu(bias: bool, packed: bool) -> None:
    (x,) = tensors((2, 3, 8))
    module = xops.SwiGLU(8, 12, 5, bias, _pack_weights=packed).double()
    assert {name.split(".")[0] for name in module.state_dict()} == ({"w12", "w3"} if packed else {"w1", "w2", "w3"})

    def expected(x: Tensor, *_: Tensor) -> Tensor:
        gate, up = module.w12(x).chunk(2, -1) if packed else (module.w1(x), module.w2(x))
        return module.w3(F.silu(gate) * up)

    same(lambda x, *_: module(x), expected, [x, *module.parameters()])
    if packed:
        weight, b = module.w12.weight.unflatten(0, (2, 12)), module.w12.bias.unflatten(0, (2, 12)) if bias else None
        torch.testing.assert_close(swiglu_packed(x, weight, b, module.w3.weight, module.w3.bias), expected(x))


def test_indexing() -> None:
    x, s, scaling = tensors((5, 3, 4), (2, 3, 4), (4,))
    index = torch.tensor([4, 1])
    for scale in (scaling, None):
        inputs = [x, s, *([] if scale is None else [scale])]
        same(
            lambda x, s, g=None: xops.scaled_index_add(x * 1, index, s, g, 0.5),
            lambda x, s, g=1.0: x.index_add(0, index, s * g, alpha=0.5), inputs,
        )  # fmt: skip
    target = x.detach().clone()
    assert xops.scaled_index_add(target, index, s.detach()) is target and not torch.equal(target, x)
    assert xops.scaled_index_add(x, index, s) is not x
    a, b = tensors((5, 3), (4, 2))
    indices = [torch.tensor([3, 0]), torch.tensor([1])]
    same(
        lambda a, b: xops.index_select_cat([a, b], indices),
        lambda a, b: torch.cat((a[indices[0]].flatten(), b[indices[1]].flatten())), [a, b],
    )  # fmt: skip


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_unbind_and_stack(dim: int) -> None:
    (x,) = tensors((3, 4, 5))
    parts = xops.unbind(x, dim)
    whole = xops.stack_or_none(parts, dim)
    assert whole is not None and whole.data_ptr() == x.data_ptr() and torch.equal(whole, x)
    same(lambda x: xops.stack_or_none(xops.unbind(x, dim), dim) * 2, lambda x: x * 2, [x])
    assert xops.stack_or_none([parts[0], parts[1].clone()], dim) is None
    assert xops.get_stack_strides(parts, dim) == x.stride() and xops.get_stack_strides(parts[:1], dim) is None
    assert xops.get_stack_strides((parts[1], parts[0]), dim) is None


def test_tiled_matmul() -> None:
    a = [tensors((2, 3), (2, 4)), tensors((5, 3), (5, 4))]
    b = [tensors((3, 6), (3, 1)), tensors((4, 6), (4, 1))]
    whole = torch.cat([torch.cat(row, 1) for row in a]) @ torch.cat([torch.cat(row, 1) for row in b])
    torch.testing.assert_close(torch.cat([torch.cat(row, 1) for row in xops.tiled_matmul(a, b)]), whole)
    with pytest.raises(ValueError, match="tiled_matmul: b must"):
        xops.tiled_matmul(a, b[:1])


@pytest.mark.parametrize("adjacents", [True, False])
@pytest.mark.parametrize("how", ["cache", "first", "seqpos", "groups"])
def test_rope_padded(adjacents: bool, how: str) -> None:
    # one sequence of 3 new tokens behind 2, one of a single token behind 4; room for 6 each
    bias = BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([3, 1], 6, [5, 5])
    heads = (2, 4) if how == "groups" else (4,)
    q, k, v = tensors((1, 4, *heads, 8), (1, 4, *heads, 8), (1, 4, *heads, 8), grad=False, dtype=torch.float32)
    caches = [torch.zeros(1, 12, *heads, 8) for _ in range(2)]
    positions = torch.tensor([2, 3, 4, 4])
    options = {}
    if how == "first":
        options["first_seqpos"] = torch.tensor([10, 20])
        positions = torch.tensor([12, 13, 14, 24])
    if how == "seqpos":
        options["seqpos"] = positions = torch.tensor([7, 1, 0, 3])

    def turned(x: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (4, 2)) if adjacents else x.unflatten(-1, (2, 4)).transpose(-1, -2)
        angle = (positions[:, None] / 2.0 * 50.0 ** (-torch.arange(4) / 4)).reshape(1, 4, *[1] * len(heads), 4)
        a, b = pairs.unbind(-1)
        out = torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)
        return out.flatten(-2) if adjacents else out.transpose(-1, -2).flatten(-2)

    out = xops.rope_padded(q, k, v, *caches, bias, theta=50.0, linear_scale=2.0, adjacents=adjacents, **options)
    torch.testing.assert_close(out, turned(q), rtol=1e-5, atol=1e-5)
    rows = [2, 3, 4, 10]
    torch.testing.assert_close(caches[0][:, rows], turned(k), rtol=1e-5, atol=1e-5)
    assert torch.equal(caches[1][:, rows], v) and caches[1].count_nonzero() == v.count_nonzero()


@pytest.mark.parametrize("budget", [None, 0, 1])
def test_checkpoint(budget: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Dropout(0.5)).double()
    (x,) = tensors((3, 4))
    wrapped = xformers.selective_checkpoint_wrapper(module, budget)

    def seeded(function: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return function(x)

    same(lambda x, *_: seeded(wrapped, x), lambda x, *_: seeded(module, x), [x, *module.parameters()])
    same(
        lambda x, *_: xformers.checkpoint(module[:3], x, policy_fn=[torch.ops.aten.addmm.default]),
        lambda x, *_: module[:3](x), [x, *module[:3].parameters()],
    )  # fmt: skip
    assert torch.ops.aten.addmm.default in xformers.list_operators(module, x)
    print_info()
    assert "memory_efficient_attention" in capsys.readouterr().out
