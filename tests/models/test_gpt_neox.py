"""GPT-NeoX models: loss and every gradient against plain PyTorch, dropout, recomputation, first weights, documents."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from powertrain.models import build, configure, presets
from powertrain.testing.numerics import check, evaluate
from powertrain.train.data.loader import document_starts, positions
from tests.models.plain import plain_logits, plain_loss

SIZES: dict[str, Any] = {
    "architecture": "gpt_neox", "vocab_size": 97, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
    "max_position_embeddings": 32, "init_method": "normal", "output_init_method": "normal", "init_std": 0.2,
}  # fmt: skip
# what GPT-NeoX YAML files combine
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt3": {"position_embedding": "learned", "tie_embeddings": True, "activation": "gelu_tanh"},
    "pythia": {"parallel_residual": True, "rotary_pct": 0.25},
    "gptj": {"parallel_residual": True, "shared_norm": True, "rotary_pct": 0.5, "attention_bias": False},
    "alibi": {"position_embedding": "alibi", "activation": "relu", "norm_bias": False},
    "alibi-window": {"position_embedding": "alibi", "sliding_window": 5, "num_kv_heads": 1},
    "llama": {"norm": "rms_norm", "norm_bias": False, "activation": "swiglu", "intermediate_size": 44,
              "num_kv_heads": 2, "attention_bias": False, "mlp_bias": False},
    "mistral": {"norm": "rms_norm", "norm_bias": False, "activation": "geglu", "num_kv_heads": 2, "sliding_window": 6},
    "no-positions": {"position_embedding": "none", "activation": "relu_squared", "mlp_bias": False},
}  # fmt: skip


def make_model(**fields: Any) -> Any:
    """With biases and norms that count."""
    model = build(configure(**{**SIZES, **fields}), device="cpu")
    model.init_weights(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p += torch.randn_like(p) * 0.1
    return model


def _tokens(length: int = 21) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 97, (2, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def check_against_plain(model: Any) -> None:
    """The loss, and its gradient for every parameter."""
    tokens, labels = _tokens()
    config = model.config
    tensors = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}

    def ours(**p: Any) -> Tensor:
        return functional_call(model, p, (tokens, labels))

    def plain(**p: Any) -> Tensor:
        return plain_loss(config, p, tokens, labels)

    # sums in another order cost some roundings in float32
    check(ours, plain, plain, tensors, slack=8)


def check_bfloat16_against_plain(model: Any) -> None:
    """Logits and every gradient. The judge's rule for root mean squares: after two layers in bfloat16 the largest error
    of a tensor is luck, by a factor of two either way, and the mean is not.
    """
    tokens, _ = _tokens()
    model.to(torch.bfloat16)
    tensors = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    seen = (torch.randn(*tokens.shape, SIZES["vocab_size"]),)

    def ours(**p: Any) -> Tensor:
        return functional_call(model, p, (tokens,))

    def plain(**p: Any) -> Tensor:
        return plain_logits(model.config, p, tokens)

    runs = (
        evaluate(ours, tensors, seen),
        evaluate(plain, tensors, seen),
        evaluate(plain, tensors, seen, torch.float64),
    )
    found, rough, exact = ({"logits": out[0].detach(), **grads} for out, grads in runs)
    assert found.keys() == exact.keys()
    for name, truth in exact.items():
        error, allowed = ((t[name].double() - truth).square().mean().sqrt().item() for t in (found, rough))
        rounding = torch.finfo(torch.bfloat16).eps * truth.square().mean().sqrt().item()
        assert error <= 2 * allowed + rounding, (name, error, allowed)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients(variant: str) -> None:
    check_against_plain(make_model(**VARIANTS[variant]))


@pytest.mark.parametrize("variant", ["pythia", "gpt3", "llama"])
def test_loss_and_gradients_in_bfloat16(variant: str) -> None:
    check_bfloat16_against_plain(make_model(**VARIANTS[variant]))


def gradients(model: Any, recompute: str) -> dict[str, Tensor]:
    for layer in model.layers:
        layer.recompute = recompute
    model.zero_grad()
    torch.manual_seed(3)
    tokens, labels = _tokens()
    model(tokens, labels).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("variant", ["pythia", "gpt3", "llama"])
def test_recomputation_changes_no_gradient(variant: str, dropout: float) -> None:
    """Dropout draws the same numbers again, too."""
    model = make_model(**VARIANTS[variant], hidden_dropout=dropout, attention_dropout=dropout).train()
    expected = gradients(model, "none")
    for recompute in ("selective", "full"):
        for name, grad in gradients(model, recompute).items():
            assert torch.equal(grad, expected[name]), (recompute, name)


@pytest.mark.parametrize("fields", [{"hidden_dropout": 0.3}, {"attention_dropout": 0.3}], ids=["hidden", "attention"])
@pytest.mark.parametrize("parallel", [False, True])
def test_dropout(fields: dict[str, float], parallel: bool) -> None:
    """The same bits for a seed, others for another, none in evaluation."""
    model = make_model(parallel_residual=parallel, **fields)
    plain = make_model(parallel_residual=parallel)
    plain.load_state_dict(model.state_dict())
    tokens, labels = _tokens()

    def loss(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(tokens, labels).detach()

    model.train()
    assert torch.equal(loss(1), loss(1)) and not torch.equal(loss(1), loss(2))
    mean = torch.stack([loss(seed) for seed in range(20)]).mean()
    model.eval()
    assert torch.equal(loss(1), loss(2)) and torch.equal(loss(1), plain(tokens, labels))
    assert (mean - loss(1)).abs() < 0.5 * loss(1)


def test_documents_do_not_see_each_other() -> None:
    model = make_model(**VARIANTS["pythia"]).eval()
    tokens = torch.randint(0, 97, (1, 12))
    documents = torch.tensor([[0] * 5 + [1] * 7], dtype=torch.int32)
    positions = torch.tensor([[*range(5), *range(7)]])
    with torch.no_grad():
        packed = model(tokens, document_ids=documents, position_ids=positions)
        alone = torch.cat((model(tokens[:, :5]), model(tokens[:, 5:])), 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["pythia", "alibi"])
def test_document_starts_are_document_ids(variant: str) -> None:
    """Random documents in three rows: starts give the logits and gradients of ids."""
    model, draws = make_model(**VARIANTS[variant]), np.random.default_rng(0)
    ids = np.sort(draws.integers(0, 4, (3, 12)), axis=1).astype(np.int32)
    documents, starts = torch.from_numpy(ids), torch.from_numpy(document_starts(ids))
    places, tokens = torch.from_numpy(positions(ids)), torch.randint(0, 97, (3, 12))
    losses = [
        model(tokens, tokens, position_ids=places, **given)
        for given in ({"document_ids": documents}, {"document_starts": starts})
    ]
    grads = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


def test_labels_left_out_do_not_count() -> None:
    model = make_model().eval()
    tokens, labels = _tokens()
    half = labels.clone()
    half[1] = -100
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, half), model(tokens[:1], labels[:1]))


def test_logits_at_one_position_of_each_row() -> None:
    model, (tokens, _) = make_model().eval(), _tokens()
    at = torch.tensor([3, 20])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, logits_at=at), model(tokens)[torch.arange(2), at])


BIG = {"hidden_size": 256, "num_heads": 4, "num_layers": 4, "vocab_size": 512, "init_std": 0.02}


@pytest.mark.parametrize(
    "method, std",
    [
        ("normal", 0.02),
        ("scaled_normal", 0.02 / 8**0.5),
        ("single_residual_scaled_normal", 0.02 / 4**0.5),
        ("small_init", (2 / (5 * 256)) ** 0.5),
        ("wang_init", 2 / (4 * 256**0.5)),
        ("xavier_normal", (2 / (256 + 768)) ** 0.5),
        ("xavier_uniform", (2 / (256 + 768)) ** 0.5),
    ],
)
def test_first_weights(method: str, std: float) -> None:
    """Standard deviations of queries, keys and values [768, 256]; outputs have a method of their own."""
    model: Any = build(configure(**{**SIZES, **BIG, "init_method": method}), device="cpu")
    model.init_weights(1)
    weight = model.layers[1].attention.qkv.weight
    # 196608 draws: one in 1/600 of the deviation
    assert abs(weight.std().item() / std - 1) < 0.01 and abs(weight.mean().item()) < 0.02 * std
    assert abs(model.layers[1].mlp.down.weight.std().item() / 0.02 - 1) < 0.01
    assert abs(model.layers[1].attention.out.weight.std().item() / 0.02 - 1) < 0.02
    assert not torch.equal(model.layers[0].attention.qkv.weight, weight)
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    assert all((p == 1).all() for name, p in model.named_parameters() if name.endswith("norm.weight"))


def test_orthogonal_first_weights() -> None:
    model: Any = build(configure(**{**SIZES, **BIG, "init_method": "orthogonal"}), device="cpu")
    model.init_weights(1)
    weight = model.layers[0].attention.qkv.weight
    torch.testing.assert_close(weight.T @ weight, torch.eye(256), rtol=1e-4, atol=1e-4)


def test_first_weights_depend_on_seed_and_name_alone() -> None:
    """Not on the number of layers, on what was drawn before, or on being built on the meta device."""
    first, second = (build(configure(**{**SIZES, "num_layers": n})) for n in (2, 3))
    for model, before in ((first, 0), (second, 5)):
        torch.manual_seed(before)
        model.to_empty(device="cpu")
        model.init_weights(7)
    found = second.state_dict()
    assert all(torch.equal(found[name], t) for name, t in first.state_dict().items())
    again = first.embed.weight.clone()
    first.init_weights(8)
    assert not torch.equal(first.embed.weight, again)


# Biderman et al., arXiv:2304.01373; the model cards have the numbers of parameters
@pytest.mark.parametrize(
    "preset, count",
    [
        ("pythia-70m", 70_426_624),
        ("pythia-160m", 162_322_944),
        ("pythia-410m", 405_334_016),
        ("pythia-1.4b", 1_414_647_808),
        ("pythia-6.9b", 6_857_302_016),
    ],
)
def test_presets(preset: str, count: int) -> None:
    assert build(configure(preset=preset)).num_parameters() == count


def test_every_preset_can_be_built_on_the_meta_device() -> None:
    for preset, (architecture, _) in presets().items():
        config = configure(preset=preset)
        assert config.architecture == architecture and build(config).embed.weight.is_meta


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"shared_norm": True}, "model.shared_norm must be false without model.parallel_residual, got true"),
        ({"num_heads": 5}, r"model.hidden_size must be a multiple of num_heads \(5\), got 32"),
        ({"num_kv_heads": 3}, r"model.num_kv_heads must divide num_heads \(4\), got 3"),
        ({"activation": "mish"}, "activation"),
        ({"rotary_pct": 1.5}, "rotary_pct"),
        ({"hidden_dropout": 1.0}, "hidden_dropout"),
        ({"hiden_size": 1}, "hiden_size"),
        ({"architecture": "gpt5"}, "model.architecture must be one of gpt_neox, llama, deepseek, got 'gpt5'"),
        ({"preset": "pythia-1b"}, "model.preset must be one of .*, got 'pythia-1b'"),
    ],
)
def test_configs_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(**{**SIZES, **fields})


def test_a_vocabulary_must_be_known_to_build() -> None:
    with pytest.raises(ValueError, match=r"model.vocab_size must be known to build the model, got 0"):
        build(configure(**{**SIZES, "vocab_size": 0}))


@pytest.mark.parametrize("method", ["xavier_normal", "xavier_uniform", "orthogonal", "normal"])
def test_a_gated_first_layer_is_drawn_as_one_matrix(method: str) -> None:
    """GPT-NeoX has up and gate in one [2 ffn, hidden] matrix, on which the spread of these values depends."""
    config = configure(
        architecture="gpt_neox", vocab_size=64, hidden_size=256, num_layers=1, num_heads=4, max_position_embeddings=32,
        activation="swiglu", intermediate_size=384, init_method=method, output_init_method="normal",
    )  # fmt: skip
    model = build(config, device="cpu")
    model.init_weights(1)
    weights = dict(model.named_parameters())
    up, gate = (next(w for n, w in weights.items() if n.endswith(f"mlp.{k}.weight")).detach() for k in ("up", "gate"))
    assert not torch.equal(up, gate)
    both = torch.cat([up, gate])
    spread = {"normal": 0.02, "orthogonal": 768**-0.5}.get(method, (2 / (256 + 768)) ** 0.5)
    assert both.std().item() == pytest.approx(spread, rel=0.02)
    if method == "orthogonal":
        torch.testing.assert_close(both.T @ both, torch.eye(256), rtol=1e-4, atol=1e-4)
