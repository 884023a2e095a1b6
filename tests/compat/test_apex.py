"""Apex's modules and functions against plain PyTorch in float64, forward and backward."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from powertrain.compat.apex import amp_C
from powertrain.compat.apex.fused_dense import FusedDense, FusedDenseGeluDense
from powertrain.compat.apex.mlp import MLP
from powertrain.compat.apex.mlp.mlp import mlp_function
from powertrain.compat.apex.multi_tensor_apply import multi_tensor_applier
from powertrain.compat.apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from powertrain.compat.apex.normalization.fused_layer_norm import fused_layer_norm, fused_rms_norm_affine
from powertrain.compat.apex.optimizers import FusedAdam, FusedSGD
from tests.compat.plain import same, tensors

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.mark.parametrize("shape", [12, (3, 4)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_norms(shape: Any, affine: bool) -> None:
    size = (shape,) if isinstance(shape, int) else shape
    (x,) = tensors((5, *size))
    for cls, plain in ((FusedLayerNorm, F.layer_norm), (FusedRMSNorm, F.rms_norm)):
        module = cls(shape, elementwise_affine=affine).double()
        for parameter in module.parameters():
            parameter.data.normal_()
        assert set(module.state_dict()) <= {"weight", "bias"}
        arguments = tuple(p for p in (module.weight, getattr(module, "bias", None)) if p is not None)
        same(lambda x, *_, m=module: m(x), lambda x, *a, p=plain: p(x, size, *a, eps=1e-5), [x, *arguments])
    same(lambda x: fused_layer_norm(x, size), lambda x: F.layer_norm(x, size, eps=1e-6), [x])
    with pytest.raises(ValueError, match="input must end in the dims"):
        fused_rms_norm_affine(x, x[0], (7,))


def test_mixed_norms_give_the_weights_dtype() -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    for cls, mixed in ((FusedLayerNorm, MixedFusedLayerNorm), (FusedRMSNorm, MixedFusedRMSNorm)):
        assert cls(8)(x).dtype is torch.bfloat16
        assert mixed(8)(x).dtype is torch.float32 and mixed(8).to(torch.bfloat16)(x.float()).dtype is torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert mixed(8)(x.float()).dtype is torch.bfloat16
        with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="elementwise_affine"):
            mixed(8, elementwise_affine=False)


def test_dense() -> None:
    (x,) = tensors((2, 3, 8))
    one, two = FusedDense(8, 5).double(), FusedDenseGeluDense(8, 16, 4).double()
    same(lambda x, *_: one(x), lambda x, w, b: F.linear(x, w, b), [x, one.weight, one.bias])
    expected = lambda x, a, b, c, d: F.linear(F.gelu(F.linear(x, a, b), approximate="tanh"), c, d)  # noqa: E731
    same(lambda x, *_: two(x), expected, [x, two.weight1, two.bias1, two.weight2, two.bias2])


def _lists(count: int, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    return [[torch.randn(n, dtype=dtype) for n in (3, 1, 7)] for _ in range(count)]


def test_scale_and_axpby() -> None:
    (x, y, out), flag = _lists(3), torch.zeros(1, dtype=torch.int32)
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [x, out], 0.5)
    for a, b in zip(x, out, strict=True):
        torch.testing.assert_close(a * 0.5, b)
    multi_tensor_applier(amp_C.multi_tensor_axpby, flag, [x, y, out], 2.0, -3.0, -1)
    for a, b, c in zip(x, y, out, strict=True):
        torch.testing.assert_close(2 * a - 3 * b, c)
    assert flag.item() == 0
    for bad in (torch.inf, torch.nan):
        for checked, expected in ((0, 0), (1, 1), (-1, 1)):
            broken, flag = [y[0], y[1].clone(), y[2]], torch.zeros(1, dtype=torch.int32)
            broken[1][0] = bad
            multi_tensor_applier(amp_C.multi_tensor_axpby, flag, [x, broken, out], 1.0, 1.0, checked)
            assert flag.item() == expected
        flag = torch.zeros(1, dtype=torch.int32)
        multi_tensor_applier(amp_C.multi_tensor_scale, flag, [broken, [t.half() for t in out]], 1.0)
        assert flag.item() == 1
    with pytest.raises(ValueError, match="tensor_lists must be 2 lists"):
        multi_tensor_applier(amp_C.multi_tensor_scale, flag, [x], 1.0)


def test_norms_of_lists() -> None:
    (x, out), flag = _lists(2), torch.zeros(1, dtype=torch.int32)
    total, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [x], True)
    torch.testing.assert_close(total, torch.cat(x).norm()[None])
    torch.testing.assert_close(each, torch.stack([t.norm() for t in x]))
    assert multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [x])[1].numel() == 0
    # the norms are of the inputs there
    scaled, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm_scale, flag, [x, out], 0.25)
    torch.testing.assert_close((scaled, torch.cat(out)), (total, torch.cat(x) * 0.25))
    same_place, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm_scale, flag, [out, out], 2.0)
    torch.testing.assert_close((same_place, torch.cat(out)), (total * 0.25, torch.cat(x) * 0.5))
    unscaled, _ = multi_tensor_applier(amp_C.multi_tensor_unscale_l2norm, flag, [x], torch.tensor([0.5]).double())
    torch.testing.assert_close(unscaled, total * 0.5)
    assert flag.item() == 0
    # of one dtype and the other, in both orders
    for mixed in ([x[0].float(), x[1]], [x[1], x[0].float()]):
        total, _ = amp_C.multi_tensor_l2norm(1, flag, [mixed])
        torch.testing.assert_close(total, torch.cat(x[:2]).norm()[None], rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_norms_of_lists_flag_what_is_not_finite(bad: float) -> None:
    for name, more in (
        ("multi_tensor_l2norm", ()),
        ("multi_tensor_l2norm_mp", ()),
        ("multi_tensor_l2norm_scale", (1.0,)),
        ("multi_tensor_unscale_l2norm", (torch.ones(1),)),
    ):
        flag, x = torch.zeros(1, dtype=torch.int32), [torch.ones(2), torch.tensor([bad])]
        lists = [x, [torch.ones_like(t) for t in x]] if name == "multi_tensor_l2norm_scale" else [x]
        norm, _ = getattr(amp_C, name)(1, flag, lists, *more)
        assert flag.item() == 1 and not norm.isfinite(), name


def test_lists_without_elements_and_in_place() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    amp_C.multi_tensor_scale(1, flag, [[], []], 2.0)
    amp_C.multi_tensor_axpby(1, flag, [[], [], []], 2.0, 1.0, -1)
    x, empty = torch.ones(2), torch.zeros(0)
    amp_C.multi_tensor_scale(1, flag, [[empty, x], [empty, x]], 2.0)
    amp_C.multi_tensor_axpby(1, flag, [[empty, x], [empty, x], [empty, x]], 2.0, 1.0, -1)
    assert x.tolist() == [6.0, 6.0]
    amp_C.multi_tensor_novograd(1, flag, [[empty]] * 3, torch.zeros(1), 0.1, 0.9, 0.9, 1e-8, 1, 1, 0.0, 1, 1, 0)
    # the inputs are finite, the results that replace them are not: only inputs set the flag
    big = torch.full((2,), 1e38)
    amp_C.multi_tensor_scale(1, flag, [[big], [big]], 10.0)
    wide = torch.full((2,), 1e300, dtype=torch.float64)
    amp_C.multi_tensor_scale(1, flag, [[wide], [wide]], 1.0)
    assert flag.item() == 0 and big.isinf().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sgd_of_16_bit_lists_computes_in_float32(dtype: torch.dtype) -> None:
    g, p, m = (torch.randn(512).to(dtype) for _ in range(3))
    wide = [t.double() for t in (g, p, m)]
    arguments = (0.3, 0.9, 0.1, 0.1, True, False, False)
    for lists in ([[g], [p], [m]], [[t] for t in wide]):
        amp_C.multi_tensor_sgd(1, torch.zeros(1, dtype=torch.int32), lists, *arguments)
    # rounded once: float64 may round some the other way than float32, by at most one bit
    assert (p == wide[1].to(dtype)).float().mean() > 0.99 and (m == wide[2].to(dtype)).float().mean() > 0.99


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        x = torch.ones(2, 4)
        for module in (
            FusedLayerNorm(4),
            MixedFusedRMSNorm(4),
            FusedDense(4, 4),
            FusedDenseGeluDense(4, 6, 4),
            MLP([4, 4]),
        ):
            assert module(x).is_meta


def test_autocast_leaves_float64() -> None:
    x = torch.randn(2, 4).double()
    for module in (FusedLayerNorm(4).double(), FusedDenseGeluDense(4, 6, 4).double()):
        expected = module(x)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("activation", ["none", "relu", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
def test_mlp(activation: str, bias: bool) -> None:
    module = MLP([8, 5, 3], bias, activation).double()
    act = {"none": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid}[activation]
    expected = lambda x, a, c, b=None, d=None: act(F.linear(act(F.linear(x, a, b)), c, d))  # noqa: E731
    same(lambda x, *_: module(x), expected, [*tensors((2, 4, 8)), *module.weights, *module.biases])
    assert list(module.state_dict()) == (
        ["weight_0", "bias_0", "weight_1", "bias_1"] if bias else ["weight_0", "weight_1"]
    )


def test_mlp_of_given_weights() -> None:
    module = MLP([8, 5, 3]).double()
    (x,) = tensors((2, 8))
    given = {name: value.detach() * 2 for name, value in module.named_parameters()}
    expected = torch.relu(x @ given["weight_0"].T + given["bias_0"]) @ given["weight_1"].T + given["bias_1"]
    torch.testing.assert_close(torch.func.functional_call(module, given, (x,)), torch.relu(expected))


def test_mlp_begins_as_theirs_casts_and_refuses() -> None:
    torch.manual_seed(0)
    module = MLP([400, 600])
    # 240000 and 600 draws: their deviation is known to 0.2 % and 3 %
    assert module.weights[0].std().item() == pytest.approx((2 / 1000) ** 0.5, rel=0.01)
    assert module.biases[0].std().item() == pytest.approx((1 / 600) ** 0.5, rel=0.15)
    with pytest.raises(ValueError, match="activation must be one of 'none', 'relu', 'sigmoid', got 'gelu'"):
        MLP([4, 4], activation="gelu")
    with torch.autocast("cpu", torch.bfloat16):
        assert MLP([4, 4])(torch.ones(2, 4)).dtype is torch.bfloat16
    with pytest.raises(ValueError, match="mlp_sizes must be two sizes or more"):
        MLP([4])
    with pytest.raises(ValueError, match="args must be an input, weights and as many biases, got 2 tensors"):
        mlp_function(1, 1, torch.ones(4), torch.ones(4, 4))
    with pytest.raises(ValueError, match="activation must be one of 0, 1, 2"):
        mlp_function(0, 3, torch.ones(4), torch.ones(4, 4))


@pytest.mark.parametrize("mode", [0, 1])
def test_adam_of_lists(mode: int) -> None:
    cls = torch.optim.AdamW if mode else torch.optim.Adam
    parameters = [torch.nn.Parameter(t) for t in _lists(1)[0]]
    plain = cls(parameters, lr=0.1, weight_decay=0.3)
    ours = [p.detach().clone() for p in parameters]
    means, squares = ([torch.zeros_like(p) for p in ours] for _ in range(2))
    for step in range(1, 4):
        grads = _lists(1)[0]
        for p, g in zip(parameters, grads, strict=True):
            p.grad = g.clone()
        plain.step()
        lists, arguments = [grads, ours, means, squares], (0.1, 0.9, 0.999, 1e-8, step, mode, 1, 0.3)
        multi_tensor_applier(amp_C.multi_tensor_adam, torch.ones(1, dtype=torch.int32), lists, *arguments)
        multi_tensor_applier(amp_C.multi_tensor_adam, torch.zeros(1, dtype=torch.int32), lists, *arguments)
    for p, q in zip(parameters, ours, strict=True):
        torch.testing.assert_close(p.detach(), q)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}])
def test_sgd(options: dict[str, Any]) -> None:
    parameters, others = ([torch.nn.Parameter(t.clone()) for t in _lists(1)[0]] for _ in range(2))
    ours = [p.detach().clone() for p in parameters]
    for p, q in zip(parameters, others, strict=True):
        q.data.copy_(p)
    buffers = [torch.zeros_like(p) for p in ours]
    plain, module = torch.optim.SGD(parameters, 0.1, **options), FusedSGD(others, 0.1, **options)
    for step in range(3):
        grads = _lists(1)[0]
        for p, q, g in zip(parameters, others, grads, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        plain.step()
        module.step()
        given = options.get("weight_decay", 0.0), options.get("momentum", 0.0), 0.0, 0.1, options.get("nesterov", False)
        flag = torch.zeros(1, dtype=torch.int32)
        multi_tensor_applier(amp_C.multi_tensor_sgd, flag, [grads, ours, buffers], *given, step == 0, False, 1.0)
    for p, q, r in zip(parameters, others, ours, strict=True):
        torch.testing.assert_close((q.detach(), r), (p.detach(), p.detach()))


def test_fused_adam() -> None:
    parameters, others = ([torch.nn.Parameter(torch.randn(5).double()) for _ in range(2)] for _ in range(2))
    for p, q in zip(parameters, others, strict=True):
        q.data.copy_(p)
    groups = [{"params": others[:1], "weight_decay": 0.5}, {"params": others[1:], "lr": 0.01}]
    plain = torch.optim.AdamW(
        [{"params": parameters[:1], "weight_decay": 0.5}, {"params": parameters[1:], "lr": 0.01}], 0.1, weight_decay=0.0
    )
    ours = FusedAdam(groups, lr=0.1)
    for _ in range(3):
        for p, q in zip(parameters, others, strict=True):
            p.grad = torch.randn(5).double()
            q.grad = p.grad.clone()
        plain.step()
        ours.step()
    for p, q in zip(parameters, others, strict=True):
        torch.testing.assert_close(p, q)
    ours.load_state_dict(ours.state_dict())
    ours.zero_grad()
    assert others[0].grad is None
    FusedAdam(others, adam_w_mode=False)
    for dtype, states in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        p = torch.nn.Parameter(torch.ones(2, dtype=dtype))
        p.grad = torch.ones_like(p)
        adam = FusedAdam([p])
        adam.step()
        adam.load_state_dict(adam.state_dict())
        assert adam.state[p]["exp_avg"].dtype is adam.state[p]["exp_avg_sq"].dtype is states
    # what a state dict or a scheduler brings into a group is refused too
    theirs = ours.state_dict()
    theirs["param_groups"][0]["bias_correction"] = False
    with pytest.raises(NotImplementedError, match="bias_correction = False"):
        ours.load_state_dict(theirs)
    plain_adam = FusedAdam(others, adam_w_mode=False)
    with pytest.raises(NotImplementedError, match="adam_w_mode = False"):
        plain_adam.load_state_dict(FusedAdam(others, weight_decay=0.1).state_dict())
    plain_adam.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(NotImplementedError, match="adam_w_mode = False"):
        plain_adam.step()
    for refused in ({"adam_w_mode": False, "weight_decay": 0.1}, {"bias_correction": False}, {"amsgrad": True}):
        with pytest.raises(NotImplementedError, match=next(iter(refused))):
            FusedAdam(others, **refused)
