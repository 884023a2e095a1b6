"""TransformerEngine's FP8 quantizers: data, scales and values by their formulas, in every layout, and their errors.

scripts/te_recipe_tests.py runs TransformerEngine's own tests of them.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.compat.transformer_engine import pytorch as te

pytestmark = pytest.mark.usefixtures("on_cpu")
E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
FP8 = {E4M3: (torch.float8_e4m3fn, 448.0), E5M2: (torch.float8_e5m2, 57344.0)}


def last_first(x: Tensor) -> Tensor:
    return x.movedim(-1, 0).contiguous() if x.dim() else x


def scaled(x: Tensor, scale: Tensor, kind: Any) -> Tensor:
    dtype, limit = FP8[kind]
    return (x.float() * scale).clamp(-limit, limit).to(dtype).view(torch.uint8)


# no row, one row, a number, sizes that fill no block and no 16 bytes
SHAPES = ((), (5,), (1, 1), (3, 7), (2, 3, 20), (130, 257), (0, 8))


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_scale(kind: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16)
    limit = FP8[kind][1]
    current = te.Float8CurrentScalingQuantizer(kind, "cpu")
    made = current(x)
    amax = x.float().abs().amax() if x.numel() else torch.tensor(0.0)
    scale = torch.full_like(amax, limit).div(amax) if amax > 0 else torch.tensor(1.0)
    assert current.scale.item() == scale.item() and current.amax.item() == amax.item()
    given, seen = torch.tensor([12.0]), torch.zeros(1)
    delayed = te.Float8Quantizer(given, seen, kind)
    for q, by in ((made, scale), (delayed(x), given)):
        data = scaled(x, by.view(()), kind)
        assert torch.equal(q._data, data) and torch.equal(q._transpose, last_first(data))
        # of nothing it is 1, whatever scale is given
        assert q._scale_inv.item() == (1 / by if x.numel() else 1.0)
        values = (data.view(FP8[kind][0]).float() * q._scale_inv).view(shape)
        assert torch.equal(q.dequantize(), values.bfloat16()) and torch.equal(q.dequantize(dtype=torch.float32), values)
        assert q.shape == q.size() == x.shape and q.dtype is torch.bfloat16 and q.device == x.device
        assert q.get_usages() == {"rowwise": True, "columnwise": True}
        q.update_usage(rowwise_usage=False)
        assert q._data is None and q.shape == x.shape and torch.equal(q.dequantize(dtype=torch.float32), values)
    assert seen.item() == amax.item()


def test_a_delayed_scale_keeps_the_largest_magnitude() -> None:
    scale, amax = torch.tensor([2.0]), torch.zeros(1)
    quantizer = te.Float8Quantizer(scale, amax, E4M3, columnwise=False)
    for value, largest in ((3.0, 3.0), (-5.0, 5.0), (1.0, 5.0)):
        quantizer(torch.tensor([value, 0.5]))
        assert amax.item() == largest
    quantizer.calibrate(torch.tensor([0.25, -1.5]))
    assert amax.item() == 1.5
    scale.fill_(4.0)
    assert quantizer(torch.ones(2)).dequantize(dtype=torch.float32).tolist() == [1.0, 1.0]
    # saturates
    assert quantizer(torch.tensor([200.0, 1.0])).dequantize().tolist() == [112.0, 1.0]


def test_powers_of_two_epsilon_and_nan() -> None:
    x = torch.tensor([[0.001, -0.002]])
    assert te.Float8CurrentScalingQuantizer(E4M3, "cpu", force_pow_2_scales=True)(x)._scale_inv.item() == 2.0**-17
    quantizer = te.Float8CurrentScalingQuantizer(E4M3, "cpu", amax_epsilon=0.5)
    assert quantizer(x)._scale_inv.item() == pytest.approx(0.5 / 448) and quantizer.amax.item() == pytest.approx(0.002)
    assert quantizer(torch.tensor([[1.0, 2.0]]))._scale_inv.item() == pytest.approx(2 / 448)
    strange = quantizer(torch.tensor([[torch.nan, 2.0]]))
    assert strange._scale_inv.item() == 1.0 and strange.dequantize().isnan().tolist() == [[True, False]]


def test_all_ranks_share_a_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(amax: Tensor, op: Any, group: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX and group == "ranks"
        amax.clamp_(min=8.0)

    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    quantizer = te.Float8CurrentScalingQuantizer(
        E4M3, "cpu", with_amax_reduction=True, amax_reduction_group="ranks", columnwise=False
    )
    assert quantizer(torch.tensor([[1.0, 2.0]]))._scale_inv.item() == pytest.approx(1 / 56)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("shape", [(3, 7), (2, 70, 260), (129, 128)], ids=str)
def test_blocks(shape: tuple[int, ...], dim: int, power_of_two: bool) -> None:
    x = torch.randn(shape) * torch.logspace(-3, 3, shape[-1])
    quantizer = te.Float8BlockQuantizer(
        E4M3, rowwise=True, columnwise=True, force_pow_2_scales=power_of_two, block_scaling_dim=dim
    )
    made = quantizer(x)
    assert made._rowwise_data.shape == x.shape
    assert made._columnwise_data.shape == quantizer.get_columnwise_shape(shape) == last_first(x).shape
    rows = x.reshape(-1, shape[-1])
    for columnwise, values in ((False, rows), (True, rows.T)):
        scale = made._columnwise_scale_inv if columnwise else made._rowwise_scale_inv
        data = made._columnwise_data if columnwise else made._rowwise_data
        assert tuple(scale.shape) == quantizer.get_scale_shape(shape, columnwise)
        height = 128 if dim == 2 else 1
        found = data.reshape(values.shape).view(torch.float8_e4m3fn).float()
        for row in range(0, values.shape[0], height):
            for column in range(0, values.shape[1], 128):
                block = values[row : row + height, column : column + 128]
                inverse = scale[row // 128, column // 128] if dim == 2 else scale[column // 128, row]
                exact = block.abs().amax() / 448
                assert exact <= inverse * (1 + 1e-6) and inverse <= exact * (2 if power_of_two else 1 + 1e-6)
                assert not power_of_two or torch.frexp(inverse).mantissa == 0.5
                error = (found[row : row + height, column : column + 128] * inverse - block).abs()
                # half a step of three mantissa bits, or of the smallest number
                assert (error <= block.abs() / 16 + inverse * 2**-10).all()
    both = made.dequantize()
    for usage in ({"columnwise_usage": False}, {}):
        assert torch.equal(made.dequantize(), both), usage
        made.update_usage(**usage)
    if dim == 2:
        made.update_usage(columnwise_usage=True)
        made.update_usage(rowwise_usage=False)
        assert torch.equal(made.dequantize(), both)
    else:
        with pytest.raises(ValueError, match="columnwise_usage must be asked of the quantizer"):
            made.update_usage(columnwise_usage=True)


@pytest.mark.parametrize(
    "quantizer",
    [
        te.Float8CurrentScalingQuantizer(E4M3, "cpu"),
        te.Float8Quantizer(torch.tensor([2.0]), torch.zeros(1), E5M2),
        te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    ],
    ids=lambda q: type(q).__name__,
)
def test_memory_is_used_again(quantizer: Any) -> None:
    x, y = torch.randn(2, 5, 20, dtype=torch.bfloat16)
    out = quantizer.make_empty(x.shape, dtype=torch.bfloat16)
    memory = out.get_data_tensors()
    assert quantizer.update_quantized(x, out) is out and out.get_data_tensors()[0] is memory[0]
    assert torch.equal(out.dequantize(), quantizer(x).dequantize())
    before = [getattr(out, name).clone() for name in out.parts]
    out.quantize_(y, noop_flag=torch.ones(1))
    assert all(torch.equal(getattr(out, name), old) for name, old in zip(out.parts, before, strict=True))
    assert out.quantize_(y, noop_flag=torch.zeros(1)) is quantizer.quantize(y, out=out)
    for name, part in zip(out.parts, (getattr(quantizer(y), name) for name in out.parts), strict=True):
        assert torch.equal(getattr(out, name), part)
    # what is not there is not made
    narrow = quantizer.copy()
    narrow.set_usage(columnwise=False)
    rows = narrow.make_empty(x.shape)
    assert quantizer.update_quantized(x, rows).get_usages() == {"rowwise": True, "columnwise": False}
    assert quantizer.get_usages()["columnwise"] and "rowwise_usage=True" in repr(quantizer)
    assert [q.shape for q in quantizer.multi_quantize([x, y])] == [x.shape, y.shape]
    assert type(out).__name__ in repr(out)


def test_saved_for_backward() -> None:
    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, q: Any) -> Tensor:
            saved, ctx.tensor_objects = te.prepare_for_saving(x, q, None)
            ctx.save_for_backward(*saved)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, q, nothing = te.restore_from_func_ctx(ctx)
            assert nothing is None and ctx.tensor_objects is None
            return grad * q.dequantize() + 0 * x, None

    x = torch.randn(3, 4, requires_grad=True)
    q = te.Float8CurrentScalingQuantizer(E4M3, "cpu")(x)
    values = q.dequantize()
    Times.apply(x, q).sum().backward()
    assert torch.equal(x.grad, values) and not values.requires_grad
    saved, objects = te.prepare_for_saving(q, x)
    restored, rest = te.restore_from_saved(objects, [*saved, values], return_saved_tensors=True)
    assert restored == [q, x] and rest == [values]
    with pytest.raises(AttributeError, match="ctx must have tensor_objects"):
        te.restore_from_func_ctx(object())


def test_data_that_is_fp8_already() -> None:
    data = torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)
    quantizer = te.Float8Quantizer(torch.tensor([4.0]), torch.zeros(1), E4M3)
    assert quantizer.create_tensor_from_data(data).dequantize().tolist() == [0.25, -0.5]
    storage = te.Float8TensorStorage(data=data.view(torch.uint8), fp8_scale_inv=torch.ones(1), fp8_dtype=7)
    assert storage.dequantize().tolist() == [1.0, -2.0]
    with pytest.raises(ValueError, match="quantizer must be given to quantize again"):
        storage.quantize_(torch.ones(2))


def test_errors() -> None:
    one, both = torch.ones(1), {"rowwise": True, "columnwise": True}
    quantizer = te.Float8CurrentScalingQuantizer(E4M3, "cpu", columnwise=False)
    cases: list[tuple[Any, str]] = [
        (lambda: te.Float8Quantizer(one, one, te.DType.kByte), "fp8_dtype must be DType.kFloat8E4M3 or .*E5M2, got"),
        (lambda: te.Float8Quantizer(one, one, "e4m3"), "fp8_dtype must be DType.kFloat8E4M3 or .*E5M2, got e4m3"),
        (lambda: te.Float8Quantizer(torch.ones(2), one, E4M3), "Float8Quantizer: scale must be float32 of one element"),
        (lambda: quantizer(torch.ones(2, dtype=torch.int32)), "tensor must be float32, float16 or bfloat16, got int32"),
        (lambda: quantizer.update_quantized(one, quantizer(torch.ones(2))), r"dst must have src's shape \[1\], got"),
        (lambda: quantizer.update_quantized(one, one), "dst must be a Float8TensorStorage, got Tensor"),
        (lambda: quantizer.make_empty((2,), requires_grad=True), "requires_grad must be False: a storage has no grad"),
        (lambda: quantizer.create_tensor_from_data(one), "data.dtype must be one of"),
        (lambda: te.Float8BlockQuantizer(E4M3, **both, block_scaling_dim=3), r"block_scaling_dim must be one of 1, 2"),
    ]  # fmt: skip
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(NotImplementedError, match=r"Float8BlockQuantizer: amax_epsilon = 0.1 is not supported"):
        te.Float8BlockQuantizer(E4M3, **both, amax_epsilon=0.1)
    q = quantizer(torch.ones(2, 3))
    q.update_usage(columnwise_usage=True, rowwise_usage=False)
    with pytest.raises(ValueError, match="rowwise_usage must be False: there is only the transpose"):
        q.update_usage(rowwise_usage=True)
