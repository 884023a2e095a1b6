"""amp_C's and TransformerEngine's functions whose numbers are tensors: Adam, scale, the loss scale."""

import pytest
import torch
from torch import Tensor

from powertrain.compat.apex import amp_C
from powertrain.compat.transformer_engine.pytorch import optimizers

pytestmark = pytest.mark.usefixtures("on_cpu")
SIZES = ((5,), (2, 3), ())


def _lists(count: int, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    return [[torch.randn(size, dtype=dtype).abs() for size in SIZES] for _ in range(count)]


def _flat(lists: list[list[Tensor]]) -> list[Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("corrected", [0, 1])
def test_adam(mode: int, corrected: int) -> None:
    lists, lr, step = _lists(4), torch.tensor([0.1]), torch.tensor([3], dtype=torch.int32)
    expected = [[t.clone() for t in tensors] for tensors in lists]
    inv_scale, flag = torch.tensor([0.25]), torch.zeros(1, dtype=torch.int32)
    numbers = (0.8, 0.9, 1e-3)
    optimizers.multi_tensor_adam_capturable(
        1, torch.ones_like(flag), lists, lr, *numbers, step, mode, corrected, 0.3, inv_scale
    )
    # a set flag leaves all of them
    for one, other in zip(_flat(lists), _flat(expected), strict=True):
        assert torch.equal(one, other)
    optimizers.multi_tensor_adam_capturable(1, flag, lists, lr, *numbers, step, mode, corrected, 0.3, inv_scale)
    for g, p, m, v in zip(*expected, strict=True):
        g *= 0.25
        taken = g if mode else g + 0.3 * p
        m.mul_(0.8).add_(taken, alpha=0.2)
        v.mul_(0.9).add_(taken * taken, alpha=0.1)
        one, two = (1 - 0.8**3, 1 - 0.9**3) if corrected else (1, 1)
        update = (m / one) / ((v / two).sqrt() + 1e-3) + (0.3 * p if mode else 0)
        # the rate is a float32 tensor
        p.sub_(lr.double().squeeze() * update)
    for one, other in zip(_flat(lists), _flat(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_adam_with_masters() -> None:
    (masters,) = _lists(1, torch.float32)
    grads = [torch.randn(size).half() for size in SIZES]
    models = [w.half() for w in masters]
    moments = [[torch.zeros(size) for size in SIZES] for _ in range(2)]
    plain = [[g.float() for g in grads], [w.clone() for w in masters], *[[m.clone() for m in row] for row in moments]]
    numbers = (torch.tensor(0.1), 0.9, 0.99, 1e-8, torch.tensor(1), 1, 1, 0.1, torch.tensor(0.5))
    flag = torch.zeros(1, dtype=torch.int32)
    amp_C.multi_tensor_adam_capturable(1, flag, plain, *numbers)
    amp_C.multi_tensor_adam_capturable_master(1, flag, [grads, models, *moments, masters], *numbers)
    for one, other in zip([*masters, *_flat(moments)], [*plain[1], *plain[2], *plain[3]], strict=True):
        assert torch.equal(one, other)
    for model, master, g, wide in zip(models, masters, grads, plain[0], strict=True):
        assert torch.equal(model, master.half()) and torch.equal(g, wide.half())
    with pytest.raises(ValueError, match="tensor_lists must be 5 lists, got 4"):
        amp_C.multi_tensor_adam_capturable_master(1, flag, plain, *numbers)
    with pytest.raises(ValueError, match="tensor_lists must be 4 lists, got 3"):
        amp_C.multi_tensor_adam_capturable(1, flag, plain[:3], *numbers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scale_by_a_tensor(dtype: torch.dtype) -> None:
    (sources,) = _lists(1, dtype)
    results = [torch.empty_like(x) for x in sources]
    flag = torch.zeros(1, dtype=torch.int32)
    optimizers.multi_tensor_scale_tensor(1, flag, [sources, results], torch.tensor([0.3]))
    assert not flag
    for x, y in zip(sources, results, strict=True):
        assert torch.equal(y, (x.float() * 0.3).to(dtype))
    sources[1][0, 0] = torch.inf
    optimizers.multi_tensor_scale_tensor(1, flag, [sources, results], torch.tensor(0.3))
    assert flag


def test_loss_scale() -> None:
    scale = torch.tensor([8.0])
    growth, patience = torch.zeros(1, dtype=torch.int32), torch.full((1,), 2, dtype=torch.int32)
    seen = []
    # grows every 2 clean steps; the second overflow in a row, and each after it, backs off
    for overflow in (0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0):
        found = amp_C.update_scale_hysteresis(scale, growth, patience, torch.tensor([overflow]), 2.0, 0.5, 2, 2)
        assert found is scale
        seen.append((scale.item(), growth.item(), patience.item()))
    assert seen == [
        (8, 1, 2), (16, 0, 2), (16, 1, 2), (16, 0, 1), (16, 1, 2), (16, 0, 1), (8, 0, 0), (4, 0, -1), (4, 1, 2),
    ]  # fmt: skip
    largest = torch.tensor([3e38])
    amp_C.update_scale_hysteresis(largest, growth, patience, torch.zeros(1), 2.0, 0.5, 2, 2)
    assert largest.item() == pytest.approx(3e38) and growth.item() == 0
