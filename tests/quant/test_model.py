"""quantize_model: what becomes FP8, same bits on every way there, state dicts, delayed scaling, undoing."""

import copy
import random
import re
from collections.abc import Callable
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from powertrain.nn.mlp import GatedMLP
from powertrain.ops.fp8.formulas import Quantized, dequantized, quantize_ref
from powertrain.ops.fp8.gated import fp8_gated_activation_ref
from powertrain.quant import (
    Block,
    FP8Linear,
    Part,
    Row,
    dequantize_model,
    fp8_all_gather,
    quantize_model,
    shared_weights,
    update_scales,
    watch,
)
from powertrain.quant import Tensor as TensorRecipe
from powertrain.quant.frozen import keep_frozen
from powertrain.quant.recipe import NAMES, Recipe, named
from powertrain.quant.scales import updated
from powertrain.runtime.target import Target

DELAYED = TensorRecipe(scale="delayed", history=3)
RECIPES = [TensorRecipe(), DELAYED, Row(), Block(), TensorRecipe(format="e4m3", power_of_two=False), Row("hybrid")]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r}-{r.format}")


class Mixture(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x) * self.gate(x).softmax(-1)[..., :1]


class Model(nn.Module):
    """Blocks of odd sizes, a router, a head tied to the embedding."""

    def __init__(self, width: int = 24, inner: int = 35) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        blocks = (nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width, bias=False)) for _ in "ab")
        self.blocks = nn.ModuleList(blocks)
        self.moe = Mixture(width)
        self.out = nn.Linear(width, 30, bias=False)
        self.out.weight = self.embed.weight
        self.recompute = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return F.cross_entropy(self.out(x + self.moe(x)).flatten(0, 1), tokens.flatten())


TOKENS = torch.arange(42).view(3, 14) * 7 % 30


def _grads(model: nn.Module, tokens: Tensor = TOKENS) -> list[Tensor]:
    model.zero_grad()
    loss = model(tokens)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_which_layers() -> None:
    model = Model()
    report = quantize_model(model, Row())
    assert [part.name for part in report.quantized] == [
        "blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2", "moe.experts.0",
    ]  # fmt: skip
    assert {part.name: part.why for part in report.left} == {
        "moe.gate": "keep has 'router'",
        "out": "keep has 'lm_head'",
    }
    assert "blocks.0.0: row" in str(report) and "out: stays, keep has 'lm_head'" in str(report)
    again = quantize_model(model, Block(), keep=["blocks.0.0", "moe.gate", "out"])
    assert not again.quantized
    assert "blocks.0.0: stays, it is in FP8 already (dequantize_model makes it plain)" in str(again)


@pytest.mark.parametrize(
    "keep, kept",
    [
        ("first_block", {"blocks.0.0", "blocks.0.2"}),
        (["last_block"], {"blocks.1.0", "blocks.1.2"}),
        (["*.2", "lm_head"], {"blocks.0.2", "blocks.1.2", "out"}),
        ((), set()),
    ],
)
def test_keep(keep: object, kept: set[str]) -> None:
    assert {part.name for part in quantize_model(Model(), Row(), keep=keep).left} == kept


def test_unknown_names_are_said_and_nothing_is_changed() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"quantize_model: keep must name layers, or be of lm_head, .*, got '\*.down'"):
        quantize_model(model, Row(), keep=["*.down", "*.2"])
    assert not any(isinstance(m, FP8Linear) for m in model.modules())


@pytest.mark.parametrize("recipe, got", [("row", "'row'"), (Row, "Row"), (None, "None")])
def test_what_is_no_recipe_is_said_and_nothing_is_changed(recipe: object, got: str) -> None:
    model = nn.Linear(64, 64)
    with pytest.raises(ValueError, match=rf"quantize_model: recipe must be Tensor\(\), .*, got {got}$"):
        quantize_model(model, recipe)  # type: ignore[arg-type]
    assert type(model) is nn.Linear


def test_an_unknown_name_leaves_an_earlier_recipe() -> None:
    model = Model()
    quantize_model(model, Row(), keep=["*.2"])
    with pytest.raises(ValueError, match="keep must name layers"):
        quantize_model(model, Block(), keep=["*.down"])
    assert isinstance(model.blocks[0][0], FP8Linear) and not isinstance(model.blocks[0][2], FP8Linear)


def test_gpus_where_fp8_cannot_win() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 128), nn.Linear(1024, 1024), nn.Linear(2048, 1024))
    report = quantize_model(model, Row(), target=Target.parse("H100"))
    assert [part.name for part in report.quantized] == ["0", "3"]
    assert "128x4096 is too narrow for FP8 to win: N K / (N + K) is 124, less than 670" in report.left[0].why
    report = quantize_model(nn.Sequential(nn.Linear(4096, 4096)), Row(), target=Target.parse("A100"))
    assert report.left[0].why == "sm_80 has no FP8 products"


def test_derived_classes_stay() -> None:
    class Adapter(nn.Linear):
        pass

    report = quantize_model(nn.Sequential(Adapter(8, 8)), Row())
    assert report.left[0].why == "it is a Adapter, not an nn.Linear"


class Wrapped(nn.Module):
    """A layer as PEFT wraps it: with an adapter, or with a copy that is trained whole."""

    def __init__(self, layer: nn.Linear, whole: bool = False) -> None:
        super().__init__()
        if whole:
            self.original_module, self.modules_to_save = layer, nn.ModuleDict({"default": copy.deepcopy(layer)})
        else:
            self.base_layer = layer
            self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})


def test_layers_that_peft_has_wrapped() -> None:
    """Heads and routers stay under their wrapped names too, which were quantized, as were adapters on a CPU."""
    model = nn.Module()
    model.up, model.lm_head = Wrapped(nn.Linear(8, 8)), Wrapped(nn.Linear(8, 8), whole=True)
    model.down, model.router = Wrapped(nn.Linear(8, 8)), Wrapped(nn.Linear(8, 8))
    model.proj = Wrapped(nn.Linear(8, 8))
    model.get_output_embeddings = lambda: model.proj  # type: ignore[assignment]
    report = quantize_model(model, Block(), keep=("lm_head", "router", "down"))
    assert [part.name for part in report.quantized] == ["up.base_layer"]
    left = {part.name: part.why for part in report.left}
    assert left["up.lora_A.default"] == left["router.lora_A.default"] == "it is part of an adapter"
    assert left["lm_head.original_module"] == left["lm_head.modules_to_save.default"] == "keep has 'lm_head'"
    assert left["proj.base_layer"] == "keep has 'lm_head'"
    assert (left["down.base_layer"], left["router.base_layer"]) == ("keep has 'down'", "keep has 'router'")


def test_a_forward_that_is_set_on_a_layer() -> None:
    """nn.Linear ran, though the report said FP8. One that was set in FP8 could not run after `dequantize_model`."""

    def double(layer: nn.Module) -> None:
        former = layer.forward
        layer.forward = lambda x: 2 * former(x)  # as accelerate's hooks do

    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(3, 8)
    double(model[0])
    (left,) = quantize_model(model, Block()).left
    assert left == Part("0", why="its forward was set on the instance, by another library")
    double(model[1])
    quantized = model(x)
    dequantize_model(model)
    torch.testing.assert_close(model(x), 2 * F.linear(model[0](x), model[1].weight, model[1].bias))
    assert not torch.equal(model(x), quantized)
    # what hooks leave behind that are taken off: the class's own method, or the one it had in FP8
    for layer, kind in ((model[0], nn.Linear), (model[1], FP8Linear)):
        layer.forward = MethodType(kind.forward, layer)  # type: ignore[attr-defined]
    assert len(quantize_model(model, Block()).quantized) == 2
    once = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    once.load_state_dict(model.state_dict())
    quantize_model(once, Block())
    assert torch.equal(model(x), once(x))


@every_recipe
def test_every_way_has_the_same_bits(recipe: Recipe) -> None:
    """Twice, recomputed, with shared weights, compiled; near the model without FP8, not equal to it."""
    torch.manual_seed(3)
    model = Model()
    exact = _grads(model)
    quantize_model(model, recipe)
    for step in range(2):
        eager = _grads(model)
        assert _same(eager, _grads(model))
        model.recompute = True
        assert _same(eager, _grads(model))
        model.recompute = False
        with shared_weights(model):
            assert _same(eager, _grads(model)) and _same(eager, _grads(model))
            assert model.blocks[0][0].copies is not None
        assert model.blocks[0][0].copies is None
        if step == 0:
            for ours, right in zip(eager, exact, strict=True):
                assert 0 < (ours - right).norm() <= 0.15 * right.norm()
        if step == 1:
            # a traced model, with scales that have been updated
            torch._dynamo.reset()
            assert _same(eager, _grads(torch.compile(model, fullgraph=True, backend="aot_eager")))
        update_scales(model)


def test_shared_weights_are_those_of_one_step() -> None:
    model = Model()
    quantize_model(model, Block())
    with shared_weights(model):
        before = _grads(model)
    with torch.no_grad():
        model.blocks[0][0].weight.data *= 2  # no version counter sees it
    after = _grads(model)
    assert not _same(before, after)
    with shared_weights(model):
        assert _same(after, _grads(model))


def test_weights_are_shared_until_the_outer_block_ends() -> None:
    model = Model()
    quantize_model(model, Block())
    layer = model.blocks[0][0]
    with shared_weights(model):
        _grads(model)
        first = layer.copies
        with shared_weights(model):
            _grads(model)
        _grads(model)
        assert first is not None and layer.copies is first
    assert layer.copies is None


def test_undone_while_weights_are_shared() -> None:
    """The plain layers got attributes of FP8 ones."""
    model = nn.Sequential(nn.Linear(8, 8))
    names = set(vars(model[0]))
    quantize_model(model, Block())
    with shared_weights(model):
        model(torch.randn(2, 8))
        dequantize_model(model)
    assert set(vars(model[0])) == names


@every_recipe
def test_undone(recipe: Recipe) -> None:
    model = Model()
    names, exact = list(model.state_dict()), _grads(model)
    parameters = [id(p) for p in model.parameters()]
    quantize_model(model, recipe)
    assert [id(p) for p in model.parameters()] == parameters
    assert recipe.is_delayed or list(model.state_dict()) == names
    dequantize_model(model)
    assert list(model.state_dict()) == names and _same(exact, _grads(model))
    assert type(model.blocks[0][0]) is nn.Linear and "recipe" not in vars(model.blocks[0][0])


@pytest.mark.parametrize("padded", [False, True])
def test_pytorchs_encoders_evaluate_in_fp8(padded: bool) -> None:
    """Their fused function would read the weights alone."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), 2)
    x, mask = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]]) if padded else None
    seen = torch.ones(2, 4, dtype=torch.bool) if mask is None else ~mask
    with torch.no_grad():
        exact = encoder.eval()(x, src_key_padding_mask=mask)
        quantize_model(encoder, Row())
        trained = encoder.train()(x, src_key_padding_mask=mask)
        evaluated = encoder.eval()(x, src_key_padding_mask=mask)
        torch.testing.assert_close(evaluated[seen], trained[seen])
        assert not torch.allclose(evaluated[seen], exact[seen], atol=1e-4)
        dequantize_model(encoder)
        assert torch.equal(encoder(x, src_key_padding_mask=mask), exact)
    stored = Quantized(torch.ones(12, 16).to(torch.float8_e4m3fn), torch.ones(12))
    keep_frozen(encoder.requires_grad_(False), {"layers.0.linear1.weight": stored})
    assert [layer.activation_relu_or_gelu for layer in encoder.layers] == [0, 1]


@every_recipe
def test_copies_and_state_dicts(recipe: Recipe) -> None:
    plain = Model()
    model = copy.deepcopy(plain)
    quantize_model(model, recipe)
    _grads(model)
    update_scales(model)
    right = _grads(model)
    assert _same(right, _grads(copy.deepcopy(model)))
    other = Model()
    quantize_model(other, recipe)
    other.load_state_dict(model.state_dict())  # strictly
    assert _same(right, _grads(other))
    other.load_state_dict(plain.state_dict())  # strictly too: what is unknown starts anew
    assert _same(_grads(other), _grads(_quantized(plain, recipe)))


def _quantized(model: nn.Module, recipe: Recipe) -> nn.Module:
    model = copy.deepcopy(model)
    quantize_model(model, recipe)
    return model


def test_statistics_stay_float32_and_survive_casts() -> None:
    model = _quantized(Model(), DELAYED)
    _grads(model)
    update_scales(model)
    layer = model.blocks[0][0]
    scales = layer.fp8_scale.clone()
    model.bfloat16()
    assert layer.weight.dtype is torch.bfloat16 and torch.equal(layer.fp8_scale, scales)
    model.float()
    assert torch.equal(layer.fp8_scale, scales)


def test_from_the_meta_device() -> None:
    with torch.device("meta"):
        model = Model()
    quantize_model(model, DELAYED)
    model.to_empty(device="cpu")
    assert not model.blocks[0][0].fp8_scale.any() and not model.blocks[0][0].fp8_amax_history.any()


@every_recipe
@pytest.mark.parametrize("quantized", [True, False])
def test_state_in_place_of_the_meta_devices(recipe: Recipe, quantized: bool) -> None:
    """The last scales are in no state dict, delayed ones in none of a plain model: they stayed on the meta device."""
    plain = Model()
    source = _quantized(plain, recipe)
    with torch.device("meta"):
        model = Model()
    quantize_model(model, recipe)
    state = copy.deepcopy(source if quantized else plain).state_dict()
    model.load_state_dict(state, assign=True)
    # assigned apart, they are tied no more
    model.out.weight = model.embed.weight
    model.requires_grad_()
    assert _same(_grads(model), _grads(source))
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_delayed_scales_follow_the_magnitudes() -> None:
    model = _quantized(nn.Sequential(nn.Linear(16, 16)), DELAYED)
    layer, x = model[0], torch.ones(4, 16)
    for step, size in enumerate((4.0, 1.0, 1.0, 1.0, 1.0)):
        model(x * size).sum().backward()
        assert layer.fp8_amax[0] == size and layer.fp8_amax[2] == 1
        update_scales(model)
        largest = 4.0 if step < 3 else 1.0  # a history of 3 steps
        assert layer.fp8_scale[0] == 2.0 ** torch.tensor(448 / largest).log2().floor()
        assert not layer.fp8_amax.any()


def test_evaluation_and_frozen_layers() -> None:
    """Nothing is recorded in evaluation; a layer whose weight is frozen still passes gradients."""
    model = _quantized(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), DELAYED)
    model.eval()
    model(torch.ones(2, 16)).sum().backward()
    assert not any(layer.fp8_amax.any() for layer in model)
    model.train()
    model[1].weight.requires_grad_(False)
    model.zero_grad()
    model(torch.ones(2, 16)).sum().backward()
    assert model[1].weight.grad is None and model[0].weight.grad is not None
    with torch.no_grad():
        assert not model(torch.ones(2, 16)).requires_grad


@pytest.mark.parametrize("seed", range(20))
def test_the_update_by_its_definition(seed: int) -> None:
    """Against plain Python, with amax 0, inf and NaN among them."""
    r = random.Random(seed)
    recipe = TensorRecipe(
        scale="delayed", history=r.choice((1, 2, 5)), most_recent=r.random() < 0.5, margin=r.choice((0, 2)),
        power_of_two=r.random() < 0.5, format=r.choice(("hybrid", "e4m3")),
    )  # fmt: skip
    kinds = (0.0, float("inf"), float("nan"), 1e-30, 3.0, 1e20)
    history, scale = torch.zeros(1, 3, recipe.history), torch.zeros(1, 3)
    past: list[list[float]] = []
    kept = [0.0] * 3
    for _ in range(7):
        amaxes = [r.choice(kinds) for _ in range(3)]
        history, scale = updated(torch.tensor([amaxes]), history, scale, recipe)
        past.insert(0, [a if a < float("inf") else 0.0 for a in amaxes])
        for role, most in enumerate((448.0, 448.0, 448.0 if recipe.format == "e4m3" else 57344.0)):
            window = past[:1] if recipe.most_recent else past[: recipe.history]
            largest = max(step[role] for step in window)
            if largest > 0:
                kept[role] = torch.tensor(most).div(largest).item() * 2.0**-recipe.margin
                if recipe.power_of_two:
                    kept[role] = 2.0 ** torch.tensor(kept[role], dtype=torch.float64).log2().floor().item()
            assert scale[0, role].item() == pytest.approx(kept[role], rel=1e-6)


def test_main_grad_of_a_layer() -> None:
    model = nn.Sequential(nn.Linear(16, 24, bias=False))
    x = torch.randn(5, 16)
    quantize_model(model, Row())
    model(x).square().sum().backward()
    grad = model[0].weight.grad.clone()
    model.zero_grad()
    model[0].weight.main_grad = torch.ones(24, 16)
    model(x).square().sum().backward()
    assert model[0].weight.grad is None
    torch.testing.assert_close(model[0].weight.main_grad - 1, grad, rtol=1e-5, atol=1e-5)


def test_nan_and_scale_buffers_name_their_layer() -> None:
    """A NaN in a scale gives NaN in that layer's output, and not before."""
    model = _quantized(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), DELAYED)
    model[1].fp8_scale.fill_(float("nan"))
    assert model[0](torch.ones(2, 16)).isfinite().all() and model(torch.ones(2, 16)).isnan().all()


def test_a_scale_is_never_zero_which_says_that_none_is_known() -> None:
    recipe = TensorRecipe(scale="delayed", history=1, margin=200)
    _, scales = updated(torch.ones(1, 3), torch.zeros(1, 3, 1), torch.zeros(1, 3), recipe)
    assert (scales > 0).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"history": 2.5}, "Tensor: history must be an integer, got 2.5"),
        ({"margin": "1"}, "Tensor: margin must be an integer, got '1'"),
        ({"power_of_two": "no"}, "Tensor: power_of_two must be True or False, got 'no'"),
        ({"scale": "last"}, "Tensor: scale must be one of 'current', 'delayed', got 'last'"),
    ],
)
def test_a_recipe_refuses_fields_of_another_kind(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        TensorRecipe(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda: quantize_model(nn.Linear(4, 4), Row(), target="H100"),
        lambda: quantize_model(nn.Linear(4, 4), Row(), keep=None),
        lambda: dequantize_model([nn.Linear(4, 4)]),
        lambda: update_scales([nn.Linear(4, 4)]),
        lambda: fp8_all_gather("model"),
        lambda: shared_weights("model").__enter__(),
        lambda: watch("model").__enter__(),
    ],
)
def test_arguments_of_another_kind_are_named(call: Callable[[], object]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^\w+: (model|target|keep) must be a"):
        call()


def test_frozen_weights_are_kept_all_or_none() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)).requires_grad_(False)
    wrong = {f"{i}.weight": Quantized(torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(16)) for i in range(2)}
    with pytest.raises(ValueError, match=r"1\.weight must have shape \[8, 16\]"):
        keep_frozen(model, wrong)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]


def test_recipes_by_name_and_value() -> None:
    assert [str(named(name)) for name in NAMES] == list(NAMES)
    assert named("row") == Row() and hash(named("block")) == hash(Block()) and Row() != Row("hybrid")
    with pytest.raises(ValueError, match=r"recipe: name must be one of 'tensor', 'tensor-delayed', .*, got 'mxfp8'"):
        named("mxfp8")
    for wrong in (lambda: TensorRecipe(scale="last"), lambda: Row("e5m2"), lambda: TensorRecipe(history=0)):
        with pytest.raises(ValueError, match="must be"):
            wrong()


def test_gates_kept_in_fp8() -> None:
    """The MLP of its formula: activation of rounded gate and up; half the bytes of these are saved; undone."""
    mlp = nn.ModuleDict({"mlp": GatedMLP(32, 48), "lm_head": nn.Linear(32, 8)}).bfloat16()
    report = quantize_model(mlp, Row(), keep="fp8")
    assert report.kept == ["mlp"] and "mlp: keeps gate and up in FP8" in str(report)
    assert [part.name for part in report.left] == ["lm_head"]
    x = torch.randn(20, 32).bfloat16().requires_grad_()
    module = mlp["mlp"]
    expected = module.down(fp8_gated_activation_ref(module.gate(x), module.up(x)))
    assert torch.equal(module(x), expected)
    with watch(mlp) as readings:
        module(x)
    kept = {reading.layer: reading for reading in readings.list() if reading.role == "kept"}
    assert kept.keys() == {"mlp.gate", "mlp.up"}
    gate = module.gate(x).float()
    rounded = dequantized(quantize_ref(gate, "group", "e4m3").rows, 48)
    assert kept["mlp.gate"].error == pytest.approx(((rounded - gate).norm() / gate.norm()).item(), rel=1e-4)
    assert 0.001 < kept["mlp.gate"].error < 0.05
    dequantize_model(mlp)
    assert not module.keeps_fp8
    sizes = {}
    for keep in (("lm_head",), "fp8"):
        quantize_model(mlp, Row(), keep=keep)
        saved: dict[int, int] = {}
        with saved_tensors_hooks(lambda t, saved=saved: saved.update({t.data_ptr(): t.nbytes}) or t, lambda t: t):
            module(x)
        sizes[keep] = sum(saved.values())
        dequantize_model(mlp)
    # gate and up in 4 bytes, then in 2 and one scale each for a row's 48; PyTorch's activation on a CPU saves more
    assert sizes[("lm_head",)] - sizes["fp8"] >= 20 * 48 * 2 - 2 * 4 * 20
    left = quantize_model(nn.Sequential(nn.Linear(8, 8)), Row(), keep="fp8").left
    assert [part.why for part in left] == ["keep has 'fp8', but no gated MLP of ours has gate and up in FP8"]
