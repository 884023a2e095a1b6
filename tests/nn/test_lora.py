"""lora(): what a model computes with and without adapters, merged, frozen, compiled; errors."""

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import powertrain
from powertrain.models import build, configure
from powertrain.nn.lora import LoRALinear, lora_layers, merge_lora, without_lora
from powertrain.quant import Block, quantize_model

KINDS: dict[str, dict[str, Any]] = {
    "lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}, "dropout": {"dropout": 0.5}
}  # fmt: skip


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12, bias=False)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.down(torch.tanh(self.up(x)))))


def _trained(model: nn.Module) -> nn.Module:
    """Adapters as if they had been trained."""
    for layer in lora_layers(model).values():
        nn.init.normal_(layer.lora_B, std=0.3)
        if layer.lora_magnitude is not None:
            layer.lora_magnitude.data.mul_(1.3)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_changes_nothing(kind: str) -> None:
    model = _Block()
    x = torch.randn(3, 4, 12)
    expected = model(x)
    adapted = powertrain.lora(copy.deepcopy(model), rank=4, **KINDS[kind]).eval()
    torch.testing.assert_close(adapted(x), expected)
    assert set(lora_layers(adapted)) == {"up", "down"}
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    assert model.state_dict().keys() <= adapted.state_dict().keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_is_adapted(kind: str, dtype: torch.dtype) -> None:
    model = _trained(powertrain.lora(_Block(), rank=4, alpha=6, **KINDS[kind])).to(dtype).eval()
    x = torch.randn(3, 4, 12, dtype=dtype)
    expected = model(x)
    plain = merge_lora(copy.deepcopy(model))
    assert not lora_layers(plain) and not any("lora" in name for name in plain.state_dict())
    tolerance = {torch.bfloat16: 6e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(plain(x), expected, rtol=tolerance, atol=tolerance)
    assert not torch.allclose(expected, _base(model)(x), atol=1e-2)


class _Tied(nn.Module):
    """An output layer under a name of its own, and one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out, shared = nn.Embedding(7, 4), nn.Linear(4, 7), nn.Linear(4, 4)
        self.out.weight = self.words.weight
        self.layers = nn.Sequential(shared, nn.Tanh(), shared)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.layers(self.words(tokens)))


def test_output_layers_stay_and_a_layer_used_twice_has_one_adapter() -> None:
    model, tokens = _Tied(), torch.arange(7)
    adapted = _trained(powertrain.lora(model, rank=2))
    first, _, last = adapted.layers
    assert list(lora_layers(adapted)) == ["layers.0"] and first is last
    expected = adapted(tokens)
    torch.testing.assert_close(merge_lora(adapted)(tokens), expected)
    assert adapted.layers[0] is adapted.layers[2] and adapted.out.weight is adapted.words.weight
    given = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    given.get_output_embeddings = lambda: given[1]  # type: ignore[assignment]
    assert list(lora_layers(powertrain.lora(given))) == ["0"]


def test_rows_of_zeros_are_merged() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4)
    nn.init.zeros_(model[0].weight)
    expected = powertrain.lora(model, rank=2, dora=True)(x)
    torch.testing.assert_close(merge_lora(model)(x), expected)


def _base(model: nn.Module) -> Any:
    def call(x: Tensor) -> Tensor:
        with without_lora(model):
            return model(x)

    return call


def test_without_lora_is_the_base_also_after_an_error() -> None:
    model = _Block()
    x = torch.randn(2, 12)
    expected = model(x)
    adapted = _trained(powertrain.lora(model, rank=2))
    assert torch.equal(_base(adapted)(x), expected)
    with pytest.raises(KeyError), without_lora(adapted), without_lora(adapted):
        raise KeyError
    assert all(layer.enabled for layer in lora_layers(adapted).values())


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_gradients_are_autograds(kind: str) -> None:
    model = _trained(powertrain.lora(_Block(), rank=3, **KINDS[kind])).double()
    x = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    model(x).square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    up = lora_layers(model)["up"]
    names = ["lora_A", "lora_B"] + ["lora_magnitude"] * (kind == "dora")

    def loss(*values: Tensor) -> Tensor:
        replaced = dict(zip((f"up.{name}" for name in names), values, strict=True))
        return torch.func.functional_call(model, replaced, (x.detach(),)).square().sum()

    # DoRA's norm is a constant to gradients, so finite differences of A and B would not agree
    if kind == "lora":
        assert torch.autograd.gradcheck(loss, [getattr(up, name) for name in names])
    assert all(g is not None and g.abs().sum() > 0 for g in found.values()) and x.grad is not None


def test_dropout_is_the_adapters_alone() -> None:
    model = powertrain.lora(_Block(), rank=4, dropout=0.5)
    x = torch.randn(64, 12)
    assert torch.equal(model(x), model(x))  # lora_B is 0
    _trained(model)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_compile_and_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    model = _trained(powertrain.lora(_Block(), rank=4))
    x = torch.randn(6, 12)
    expected = torch.autograd.grad(model(x).sum(), list(_trainable(model)))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for call in (compiled, lambda x: checkpoint(model, x, use_reentrant=False)):
        torch.testing.assert_close(torch.autograd.grad(call(x).sum(), list(_trainable(model))), expected)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def test_on_the_meta_device_then_initialized() -> None:
    config = configure(architecture="llama", num_layers=2, hidden_size=32, intermediate_size=48, num_heads=2,
                       vocab_size=64, max_position_embeddings=32)  # fmt: skip
    tokens = torch.randint(0, 64, (2, 8))
    plain = build(config)
    adapted = powertrain.lora(build(config), rank=4, targets=["attention.qkv", "mlp.down"])
    for model in (plain, adapted):
        model.to_empty(device="cpu")
        model.init_weights(3)
    torch.testing.assert_close(adapted(tokens), plain(tokens))
    assert set(lora_layers(adapted)) == {f"layers.{n}.{m}" for n in range(2) for m in ("attention.qkv", "mlp.down")}
    adapted(tokens, tokens).backward()
    assert all(p.grad is not None for p in _trainable(adapted)) and adapted.embed.weight.grad is None


@pytest.mark.parametrize("adapter", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dora", [False, True])
def test_autocast_to_another_dtype_than_the_models(adapter: torch.dtype, dora: bool, device: torch.device) -> None:
    x, weight = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in ((6, 16), (24, 16)))
    trained = [torch.randn(s, device=device, dtype=adapter) for s in ((4, 16), (24, 4), (24,))][: 3 if dora else 2]
    half = [x.half(), weight.half(), *(t.half() if adapter is torch.bfloat16 else t for t in trained)]
    for t in (*trained, *half):
        t.requires_grad_()
    with torch.autocast(device.type, torch.float16):
        y = powertrain.lora_linear(x, weight, *trained[:2], magnitude=trained[2] if dora else None)
    same = powertrain.lora_linear(*half[:4], magnitude=half[4] if dora else None)
    assert y.dtype is torch.float16 and torch.equal(y, same)
    grads = torch.autograd.grad(y.sum(), trained)
    for grad, exact in zip(grads, torch.autograd.grad(same.sum(), half[2:]), strict=True):
        assert grad.dtype is adapter and torch.equal(grad, exact.to(adapter))


@pytest.mark.parametrize("padded", [False, True])
def test_pytorchs_encoders_evaluate_with_adapters(padded: bool) -> None:
    """Their fused function would read the weights alone."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    model = _trained(powertrain.lora(encoder, rank=2))
    x, mask = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]]) if padded else None
    trained = model(x, src_key_padding_mask=mask)
    with torch.no_grad():
        evaluated = model.eval()(x, src_key_padding_mask=mask)
    seen = torch.ones(2, 4, dtype=torch.bool) if mask is None else ~mask
    torch.testing.assert_close(evaluated[seen], trained[seen])
    torch.testing.assert_close(merge_lora(model)(x, src_key_padding_mask=mask)[seen], trained[seen])


def test_hooks_of_a_layer_stay() -> None:
    """A forward hook runs on the layer with an adapter, and on the layer into which the adapter is merged."""
    model = _Block()
    seen: list[torch.Size] = []
    handle = model.up.register_forward_hook(lambda layer, args, y: y * 2)
    model.up.register_full_backward_hook(lambda layer, dx, dy: seen.append(dy[0].shape))
    x = torch.randn(2, 12)
    exact = model(x)
    powertrain.lora(model, rank=2)
    torch.testing.assert_close(model(x), exact)
    model(x).sum().backward()
    assert len(seen) == 1
    merge_lora(model)
    torch.testing.assert_close(model(x), exact)
    handle.remove()
    assert not torch.allclose(model(x), exact)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"lora: targets must name layers of the model, such as \['up', 'down'"):
        powertrain.lora(_Block(), targets=["q_proj"])
    with pytest.raises(ValueError, match=r"targets must name layers of type nn\.Linear, got norm, LayerNorm"):
        powertrain.lora(_Block(), targets=["norm"])
    pruned = _Block()
    prune.l1_unstructured(pruned.up, "weight", 0.5)
    with pytest.raises(ValueError, match=r"targets must name layers whose weight is a parameter, got \['up'\]"):
        powertrain.lora(pruned)
    with pytest.raises(ValueError, match="lora: rank must be above 0, got 0"):
        powertrain.lora(_Block(), rank=0)
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\), got 1"):
        powertrain.lora(_Block(), dropout=1)
    with pytest.raises(ValueError, match="targets must name at least one layer, got none"):
        powertrain.lora(_Block(), targets=[])
    with pytest.raises(ValueError, match="targets must be a list of names"):
        powertrain.lora(_Block(), targets="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model must have no adapters yet"):
        powertrain.lora(powertrain.lora(_Block()))
    wrapped = _Block()
    # as PEFT does
    wrapped.up = nn.ModuleDict({"base_layer": wrapped.up, "lora_A": nn.Linear(12, 2)})  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"model must have no adapters yet, got \['up.base_layer'\]"):
        powertrain.lora(wrapped)
    with pytest.raises(ValueError, match=r"model must have an nn\.Linear inside to adapt, got Linear"):
        powertrain.lora(nn.Linear(3, 3))
    with pytest.raises(TypeError, match="merge_lora: model must be a Module, got 'model'"):
        merge_lora("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="merge_lora: model must have layers inside, got LoRALinear"):
        merge_lora(LoRALinear(nn.Linear(3, 3), 2, 1.0))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_that_are_only_stored_are_named_and_nothing_is_changed(dtype: torch.dtype) -> None:
    model = _Block()
    model.down.weight = nn.Parameter(model.down.weight.to(dtype), requires_grad=False)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"of 16 bits or more, got \['down, {name}'\]"):
        powertrain.lora(model)
    assert type(model.up) is nn.Linear and model.up.weight.requires_grad


def test_a_forward_of_an_instance_is_not_lost() -> None:
    """As accelerate's hooks set it: the adapter's layer took its place without a word."""
    model = _Block()
    former = model.up.forward
    model.up.forward = lambda x: 2 * former(x)  # type: ignore[method-assign]
    for targets in (["up"], "all-linear"):
        with pytest.raises(ValueError, match=r"lora: targets must have no layer whose forward .* got \['up'\]"):
            powertrain.lora(model, targets=targets)  # type: ignore[arg-type]
    assert all(p.requires_grad for p in model.parameters())
    # as hooks leave it there that are taken off
    model.down.forward = MethodType(nn.Linear.forward, model.down)  # type: ignore[method-assign]
    powertrain.lora(model, targets=["down"])
    model.down.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"merge_lora: model must have no layer whose forward .* got \['down'\]"):
        merge_lora(model)


def test_adapters_come_before_fp8() -> None:
    """After it they were put beside the layers that FP8 had left alone, without a word."""
    model = _Block()
    quantize_model(model, Block(), keep="down")
    with pytest.raises(ValueError, match=r"lora: model must not be in FP8 yet .call quantize_model after lora"):
        powertrain.lora(model)
    assert list(lora_layers(powertrain.lora(model, targets=["down"]))) == ["down"]


def test_repr_says_rank_and_scale() -> None:
    assert "rank=4, scale=2" in repr(LoRALinear(nn.Linear(3, 5), 4, 2.0))


def test_no_tokens_keep_the_graph(device: torch.device) -> None:
    x, weight = torch.randn(2, 0, 16, device=device), torch.randn(24, 16, device=device)
    A, B = (torch.randn(s, device=device, requires_grad=True) for s in ((4, 16), (24, 4)))
    y = powertrain.lora_linear(x, weight, A, B)
    grads = torch.autograd.grad(y.sum(), (A, B))
    assert y.shape == (2, 0, 24) and not any(g.any() for g in grads)


def test_vmap_over_adapters_that_share_all_but_one_factor(device: torch.device) -> None:
    x, weight, A, many = (torch.randn(s, device=device) for s in ((3, 8), (6, 8), (2, 8), (4, 6, 2)))
    magnitude = torch.rand(6, device=device)

    def adapted(B: Tensor) -> Tensor:
        return powertrain.lora_linear(x, weight, A, B, magnitude=magnitude)

    with powertrain.disable("lora_linear"):
        torch.testing.assert_close(torch.vmap(adapted)(many), torch.stack([adapted(B) for B in many]))


def test_vmap_over_adapters_and_weights(device: torch.device) -> None:
    x = torch.randn(3, 8, device=device)
    many = [torch.randn(4, *size, device=device) for size in ((6, 8), (2, 8), (6, 2), (6,))]

    def adapted(weight: Tensor, A: Tensor, B: Tensor, magnitude: Tensor) -> Tensor:
        return powertrain.lora_linear(x, weight, A, B, magnitude=magnitude)

    with powertrain.disable("lora_linear"):
        expected = torch.stack([adapted(*one) for one in zip(*many, strict=True)])
        torch.testing.assert_close(torch.vmap(adapted)(*many), expected)
