"""TransformerEngine's recipes under autocast, against their documented formulas with products in float64."""

import os
import pickle
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from powertrain.compat.transformer_engine import pytorch as te
from powertrain.compat.transformer_engine.common import recipe as recipes
from powertrain.compat.transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    QParams,
    quant_recipe,
)
from powertrain.compat.transformer_engine.pytorch import quantization
from powertrain.ops.fp8.grouped import fp8_grouped_gemm
from powertrain.quant import recipe as quant
from powertrain.runtime import tracing
from powertrain.runtime.target import Target

pytestmark = pytest.mark.usefixtures("on_cpu")
LARGEST = {"e4m3": (448.0, torch.float8_e4m3fn), "e5m2": (57344.0, torch.float8_e5m2)}


@pytest.fixture(autouse=True)
def no_layers_of_other_tests() -> None:
    quantization._State.delayed.clear()
    tracing.clear()


def rounded(x: Tensor, scale: Tensor, format: str) -> Tensor:
    """The float64 values of x * scale in a format, unscaled."""
    largest, dtype = LARGEST[format]
    return (x.float() * scale).clamp(-largest, largest).to(dtype).double() / scale.double()


def current(x: Tensor, format: str, power_of_two: bool) -> Tensor:
    """scale = max / amax of the tensor, its mantissa cleared on request."""
    scale = LARGEST[format][0] / x.float().abs().amax()
    return rounded(x, torch.exp2(scale.log2().floor()) if power_of_two else scale, format)


def blocks(x: Tensor, height: int, format: str, power_of_two: bool) -> Tensor:
    """current, of height x 128 elements each."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], height):
        for j in range(0, x.shape[1], 128):
            part = (slice(i, i + height), slice(j, j + 128))
            out[part] = current(x[part], format, power_of_two)
    return out


def close(ours: Tensor | None, expected: Tensor) -> None:
    assert ours is not None
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max()))


@pytest.mark.parametrize("form", [Format.HYBRID, Format.E4M3])
@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("blockwise", [False, True])
@pytest.mark.parametrize("shape", [(5, 24, 17), (33, 160, 130)])
def test_current_and_block_scaling(form: Format, power: bool, blockwise: bool, shape: tuple[int, int, int]) -> None:
    """The three products of a linear layer. Sizes: odd ones, and ones with partial blocks."""
    M, K, N = shape
    if blockwise:
        recipe: Any = Float8BlockScaling(use_f32_scales=not power, fp8_format=form)
    else:
        recipe = Float8CurrentScaling(use_power_2_scales=power, fp8_format=form)
    layer = te.Linear(K, N, device="cpu")
    x, dy = torch.randn(M, K, requires_grad=True), torch.randn(M, N) * 1e-3
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(dy)
    w, grad = layer.weight.detach(), "e4m3" if form is Format.E4M3 else "e5m2"
    given = x.detach()
    if blockwise:
        qx, qxt = blocks(given, 1, "e4m3", power), blocks(given.T, 1, "e4m3", power)
        qw, qdy, qdyt = blocks(w, 128, "e4m3", power), blocks(dy, 1, grad, power), blocks(dy.T, 1, grad, power)
    else:
        qx, qw, qdy = (current(t, f, power) for t, f in ((given, "e4m3"), (w, "e4m3"), (dy, grad)))
        qxt, qdyt = qx.T, qdy.T
    close(y, qx @ qw.T + layer.bias.double())
    close(x.grad, qdy @ qw)
    close(layer.weight.grad, qdyt @ qxt.T)
    close(layer.bias.grad, dy.double().sum(0))


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_delayed_scaling(algorithm: Any, margin: int) -> None:
    """Steps with magnitudes that rise and fall, one of zeros: scales of a step are those of the steps before."""
    recipe = DelayedScaling(margin=margin, amax_history_len=3, amax_compute_algo=algorithm)
    layer = te.Linear(8, 6, bias=False, device="cpu")
    seen: list[list[float]] = [[], [], []]
    scales: list[Tensor | None] = [None, None, None]
    for step, size in enumerate([1.0, 30.0, 0.5, 0.0, 0.25, 2.0]):
        x, dy = (torch.randn(4, 8) * size).requires_grad_(), torch.randn(4, 6) * (size + 0.1)
        with te.autocast(recipe=recipe):
            y = layer(x)
        y.backward(dy)
        operands = (x.detach(), layer.weight.detach(), dy)
        formats = ("e4m3", "e4m3", "e5m2")
        q = []
        for role, (operand, format) in enumerate(zip(operands, formats, strict=True)):
            window = seen[role][-3:] if algorithm == "max" else seen[role][-1:]
            if window and max(window) > 0:
                scales[role] = LARGEST[format][0] / torch.tensor(max(window)) / 2**margin
            known = scales[role]
            q.append(current(operand, format, False) if known is None else rounded(operand, known, format))
            seen[role].append(float(operand.abs().amax()))
        close(y, q[0] @ q[1].T)
        close(x.grad, q[2] @ q[1])
        close(layer.weight.grad, q[2].T @ q[0])
        with torch.no_grad():
            layer.weight -= 0.1 * torch.randn(6, 8)
        layer.weight.grad = None
        torch.testing.assert_close(layer.fp8.fp8_amax, torch.tensor([s[-1] for s in seen]), msg=f"step {step}")
    with te.autocast(recipe=recipe), torch.no_grad():
        layer.eval()(torch.full((1, 8), 1e6))
    assert float(layer.fp8.fp8_amax[0]) < 1e3  # evaluation records nothing


def layers() -> list[tuple[nn.Module, tuple[Any, ...]]]:
    x = torch.randn(6, 2, 16, requires_grad=True)
    options: dict[str, Any] = {"device": "cpu"}
    return [
        (te.LayerNormLinear(16, 24, **options), (x,)),
        (te.LayerNormLinear(16, 24, parameters_split=("a", "b"), **options), (x,)),
        (te.LayerNormMLP(16, 24, activation="swiglu", **options), (x,)),
        (te.LayerNormMLP(16, 24, activation="gelu", normalization="RMSNorm", **options), (x,)),
        (te.TransformerLayer(16, 24, 2, hidden_dropout=0.0, attention_dropout=0.0, **options), (x,)),
    ]


RECIPES = [DelayedScaling(amax_history_len=2), Float8CurrentScaling(), Float8BlockScaling()]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)


def run(module: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    module.zero_grad()
    y = module(*args)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


@every_recipe
def test_every_module_is_near_its_16_bit_self(recipe: Any) -> None:
    """FP8 changes results, by no more than its rounding explains; disabled regions inside do not change."""
    for module, args in layers():
        plain = run(module, args)
        with te.autocast(recipe=recipe):
            quantized = run(module, args)
            with te.autocast(enabled=False):
                inner = run(module, args)
        assert all(torch.equal(a, b) for a, b in zip(plain, inner, strict=True))
        assert len(plain) == len(quantized) and not torch.equal(plain[0], quantized[0])
        # gradients together: those of a key's bias are 0 but for rounding
        for a, b in ((plain[:1], quantized[:1]), (plain[1:], quantized[1:])):
            before, after = (torch.cat([t.flatten() for t in ts]) for ts in (a, b))
            error = float((before - after).norm() / before.norm())
            assert 0 < error < 0.1, (type(module).__name__, error)


@every_recipe
def test_same_bits(recipe: Any) -> None:
    """Recomputed, compiled, with the quantized weight of the first micro-batch, and from a checkpoint."""
    for module, args in layers()[:3]:
        x = args[0]
        with te.autocast(recipe=recipe):
            run(module, args)  # scales of a first step are found
        with te.autocast(recipe=recipe):
            reference = run(module, args)
            module.zero_grad()
            y = te.checkpoint(module, x)
            assert torch.equal(y, reference[0])
            shared = [module(x, is_first_microbatch=first) for first in (True, False)]
            assert all(torch.equal(y, reference[0]) for y in shared)
        y.square().sum().backward()
        found = [p.grad for p in module.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(found, reference[1:], strict=True))
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        with te.autocast(recipe=recipe):
            eager = module(x)
            assert torch.equal(compiled(x), eager)
        torch.testing.assert_close(compiled(x), module(x))


def test_graphs_inside_and_outside_of_autocast() -> None:
    """Each is compiled for itself, whichever is first."""
    module, args = layers()[0]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    plain = compiled(args[0])
    recipe = Float8CurrentScaling()
    with te.autocast(recipe=recipe):
        eager = run(module, args)[0]
        assert torch.equal(compiled(args[0]), eager) and not torch.equal(eager, plain)
    assert torch.equal(compiled(args[0]), plain)


def test_a_resumed_run_has_the_same_bits() -> None:
    """From its first step on: the magnitudes of the last step before are in the checkpoint."""
    recipe = DelayedScaling(amax_history_len=2)
    batches = [torch.randn(4, 2, 16) * 2.0**i for i in (0, 3, -2, 1, -1)]

    def steps(module: nn.Module, some: list[Tensor]) -> list[Tensor]:
        outputs = []
        for x in some:
            with te.fp8_autocast(fp8_recipe=recipe):
                y = module(x)
            (y * 2.0 ** len(outputs)).square().sum().backward()
            outputs.append(y.detach())
        return outputs

    whole, first, second, other = (layers()[1][0] for _ in range(4))
    for module in (first, other):
        module.load_state_dict(whole.state_dict())
    expected = steps(whole, batches)
    steps(first, batches[:2])
    second.load_state_dict(first.state_dict())
    resumed = steps(second, batches[2:])
    assert all(torch.equal(a, b) for a, b in zip(resumed, expected[2:], strict=True))
    assert not torch.equal(steps(other, batches[2:])[0], resumed[0])  # without the scales


def test_compiled_before_its_first_step() -> None:
    layer = te.Linear(4, 6, device="cpu")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with te.autocast(recipe=DelayedScaling()), pytest.raises(RuntimeError, match=r"first forward .* must be eager"):
        compiled(torch.ones(2, 4))


def test_scales_are_reduced_over_the_group(tmp_path: Any) -> None:
    """One rank: the group is asked, with reduce_amax only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        for reduce in (True, False):
            with te.autocast(recipe=DelayedScaling(reduce_amax=reduce)):
                asked = quantization.active()
            assert asked is not None and (asked.group is dist.group.WORLD) == reduce
        layer = te.Linear(4, 6, device="cpu")
        for _ in range(2):
            with te.autocast(recipe=DelayedScaling()):
                layer(torch.ones(2, 4)).sum().backward()
        assert float(layer.fp8.fp8_amax_history[0, 0]) == 1
    finally:
        dist.destroy_process_group()


def test_recipes_as_ours() -> None:
    assert quant_recipe(DelayedScaling(), "") == quant.Tensor(scale="delayed", power_of_two=False)
    assert quant_recipe(Float8CurrentScaling(fp8_format=Format.E4M3), "") == quant.Tensor(
        format="e4m3", power_of_two=False
    )
    slow = Float8CurrentScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=True))
    assert quant_recipe(slow, "") == quant.Tensor(power_of_two=False, fast=False)
    assert quant_recipe(Float8BlockScaling(), "") == quant.Block()
    assert Format.HYBRID.value.max_bwd == 57344 and Float8BlockScaling.float8_block_scaling()
    assert DelayedScaling.delayed() and DelayedScaling.float8_per_tensor_scaling() and not DelayedScaling.mxfp8()


def test_variables_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1")
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    assert quant_recipe(Float8CurrentScaling(), "") == quant.Tensor()
    assert quant_recipe(Float8BlockScaling(), "") == quant.Block(power_of_two=False)


def changed(recipe: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(recipe, name, value)
    return recipe


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (DelayedScaling(fp8_dpa=True), "DelayedScaling: fp8_dpa = True"),
        (Float8CurrentScaling(fp8_mha=True), "Float8CurrentScaling: fp8_mha = True"),
        (DelayedScaling(amax_compute_algo=max), "amax_compute_algo = <built-in"),
        (DelayedScaling(scaling_factor_compute_algo=max), "scaling_factor_compute_algo ="),
        (Float8CurrentScaling(backward_override="dequantized"), "backward_override = 'dequantized'"),
        (Float8CurrentScaling(fp8_gemm_dgrad=MMParams(use_split_accumulator=False)), "fp8_gemm_dgrad ="),
        (Float8BlockScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=False)), "fp8_gemm_fprop ="),
        (Float8BlockScaling(x_block_scaling_dim=2), "x_block_scaling_dim = 2"),
        (Float8BlockScaling(w_block_scaling_dim=1), "w_block_scaling_dim = 1"),
        (changed(Float8CurrentScaling(), fp8_quant_bwd_grad=QParams(power_2_scale=True)), "fp8_quant_bwd_grad ="),
        (changed(Float8CurrentScaling(), fp8_quant_fwd_inp=QParams(amax_epsilon=1.0)), "fp8_quant_fwd_inp ="),
        (recipes.MXFP8BlockScaling(), "recipe = MXFP8BlockScaling is not supported on the CPU"),
        (recipes.NVFP4BlockScaling(), "recipe = NVFP4BlockScaling is not supported on the CPU"),
        (recipes.CustomRecipe(qfactory=max), "recipe = CustomRecipe is not supported"),
    ],
)  # fmt: skip
def test_refused_by_name(recipe: Any, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        te.autocast(recipe=recipe)
    te.autocast(enabled=False, recipe=recipe)


def test_bad_values_and_uses() -> None:
    for recipe in ("delayed", DelayedScaling):
        with pytest.raises(ValueError, match=r"autocast: recipe must be an object of a class of .*common.recipe, got"):
            te.autocast(recipe=recipe)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"fp8_format must be Format.E4M3 or Format.HYBRID, got Format.E5M2"):
        te.autocast(recipe=DelayedScaling(fp8_format=Format.E5M2))
    with pytest.raises(ValueError, match="amax_compute_algo must be one of 'max', 'most_recent', got 'mean'"):
        te.autocast(recipe=DelayedScaling(amax_compute_algo="mean"))  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="calibrating = True"):
        te.autocast(enabled=False, calibrating=True)
    context = te.autocast()
    with context, pytest.raises(RuntimeError, match="entered already"), context:
        pass
    with pytest.raises(KeyError), te.autocast():
        raise KeyError
    assert quantization.active() is None and quantization._State.open == 0


@pytest.mark.parametrize(("card", "has"), [("A100", False), ("RTX 4090", True), ("H100", True), ("B200", True)])
def test_what_is_available(card: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert te.is_fp8_available() is False
    assert te.is_fp8_available(return_reason=True) == (False, "there is no GPU; FP8 is emulated on the CPU")
    target = Target.parse(card)
    monkeypatch.setattr(quantization, "_target", lambda: target)
    assert te.is_fp8_available() is has and te.is_fp8_block_scaling_available() is has
    for asked in (te.is_mxfp8_available, te.is_nvfp4_available):
        found = asked(return_reason=True)
        assert isinstance(found, tuple) and not found[0] and f"sm_{target.arch}" in found[1]
    assert isinstance(te.get_default_recipe(), Float8CurrentScaling if card == "B200" else DelayedScaling)
    assert te.is_bf16_available()
    if not has:
        with pytest.raises(RuntimeError, match="autocast: sm_80 has no FP8 products; they begin with sm_89"):
            te.autocast()


def test_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with te.fp8_model_init(enabled=True):
            layer = te.GroupedLinear(2, 4, 6, params_dtype=torch.bfloat16, device="cpu")
        assert layer.get_parameter("weight0").dtype is torch.bfloat16
        with te.autocast():
            layer(torch.ones(3, 4, dtype=torch.bfloat16), [1, 2])
    said = capsys.readouterr().err
    assert said.count("quantized_model_init: parameters stay in params_dtype") == 1
    assert said.count("GroupedLinear: grouped FP8 products have scales by row and by block, not by tensor") == 1


def test_grouped_linear_by_block() -> None:
    """The bits of `fp8_grouped_gemm` with the recipe's formats and scales; without autocast those of `grouped_gemm`."""
    layer = te.GroupedLinear(2, 24, 40, bias=False, device="cpu")
    x = torch.randn(9, 24, requires_grad=True)
    with te.autocast(recipe=Float8BlockScaling()):
        y = layer(x, [4, 5])
    y.square().sum().backward()
    ours, weight = x.detach().requires_grad_(), torch.stack([layer.weight0, layer.weight1]).detach().requires_grad_()
    offsets = torch.tensor([4, 9], dtype=torch.int32)
    right = fp8_grouped_gemm(ours, weight, offsets)
    right.square().sum().backward()
    assert torch.equal(y, right) and torch.equal(x.grad, ours.grad) and torch.equal(layer.weight1.grad, weight.grad[1])
    assert not torch.equal(layer(x, [4, 5]), right)


def test_main_grad() -> None:
    layer = te.Linear(4, 6, fuse_wgrad_accumulation=True, device="cpu")
    layer.weight.main_grad = torch.ones(6, 4)
    with te.autocast(recipe=Float8CurrentScaling()):
        layer(torch.ones(8, 4)).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.weight.main_grad, torch.full((6, 4), 9.0))


# -- _extra_state


class FakeFormat(Enum):
    HYBRID = (448, 57344)


class FakeRecipe:
    def __init__(self) -> None:
        self.fp8_format, self.margin = FakeFormat.HYBRID, 0


class Harmful:
    """Its pickle makes a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def extra_state(state: dict[str, Any], protocol: int = 4) -> Tensor:
    """As TransformerEngine writes it: a pickled dictionary, with a recipe of its own module."""
    module = ModuleType("transformer_engine.common.recipe")
    named = {"DelayedScaling": FakeRecipe, "Format": FakeFormat}
    before = {name: (made.__module__, made.__qualname__) for name, made in named.items()}
    with pytest.MonkeyPatch.context() as patch:
        for part in ("transformer_engine", "transformer_engine.common"):
            patch.setitem(sys.modules, part, ModuleType(part))
        patch.setitem(sys.modules, module.__name__, module)
        for name, made in named.items():
            setattr(module, name, made)
            made.__module__, made.__qualname__ = module.__name__, name
        data = pickle.dumps(state, protocol=protocol)
        for name, made in named.items():
            made.__module__, made.__qualname__ = before[name]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def delayed_state(gemms: int, steps: int = 4) -> dict[str, Any]:
    forward, backward = 3 * gemms, 2 * gemms
    return {
        "recipe": FakeRecipe(),
        "scale_fwd": torch.arange(1.0, forward + 1),
        "amax_history_fwd": torch.arange(float(steps * forward)).view(steps, forward),
        "scale_bwd": torch.arange(1.0, backward + 1) + 100,
        "amax_history_bwd": torch.arange(float(steps * backward)).view(steps, backward) + 100,
        "extra_fp8_variables": {"num_gemms": gemms, "names": ("a", 1)},
    }


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_extra_state_of_delayed_scaling(protocol: int) -> None:
    module = te.LayerNormMLP(4, 6, device="cpu")
    state = module.state_dict() | {"_extra_state": extra_state(delayed_state(2), protocol)}
    module.load_state_dict(state)
    for gemm, first, grad in (("fc1_fp8", 0, 0), ("fc2_fp8", 3, 2)):
        found = module.get_submodule(gemm)
        assert found.fp8_scale.tolist() == [first + 1, first + 2, grad + 101]
        # row 0 is the running step, the last row the newest
        assert found.fp8_amax.tolist() == [first, first + 1, grad + 100]
        assert found.fp8_amax_history[0].tolist() == [first + 18, first + 12, first + 6, 0]
        assert found.fp8_amax_history[2].tolist() == [grad + 112, grad + 108, grad + 104, 0]
    with te.autocast(recipe=DelayedScaling(amax_history_len=2)):
        module(torch.ones(2, 4))
    assert module.get_submodule("fc2_fp8").fp8_scale.tolist() == [4, 5, 103]
    assert module.get_submodule("fc1_fp8").fp8_amax_history[0].tolist() == [18, 12]


def test_extra_state_is_not_executed(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module = te.Linear(4, 6, device="cpu")
    whole = extra_state(delayed_state(1))
    bad: list[tuple[Any, str]] = [
        (extra_state(delayed_state(1) | {"more": Harmful(str(tmp_path / "made"))}), "it names posix.mkdir"),
        (extra_state({"f": print}), "it names builtins.print"),
        (whole[:-9], "it cannot be parsed"),
        (torch.zeros(5), "it is a Tensor, not a tensor of bytes"),
        (SimpleNamespace(), "it is a SimpleNamespace"),
        (extra_state(delayed_state(1) | {"scale_bwd": None}), "its scales have unexpected shapes"),
    ]
    for state, reason in bad:
        tracing.clear()
        module.load_state_dict(module.state_dict() | {"_extra_state": state})
        said = capsys.readouterr().err
        assert reason in said and said.count("\n") == 1, (reason, said)
    assert not (tmp_path / "made").exists() and "fp8_scale" not in module.fp8._buffers
    for nothing in (torch.empty(0, dtype=torch.uint8), extra_state({}), None):
        module.load_state_dict(module.state_dict() | {"_extra_state": nothing})
    assert not capsys.readouterr().err
