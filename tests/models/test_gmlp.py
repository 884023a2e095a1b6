"""gMLP layers: loss and every gradient against plain PyTorch, first weights, recomputation, lengths, refusals."""

from typing import Any

import pytest
import torch

from powertrain.models import build, configure
from powertrain.models.flops import flops_per_token
from powertrain.models.generate import Sampler, generate
from powertrain.models.gpt_neox import to_hf_config
from powertrain.models.parallelize import check_context, check_tensor
from powertrain.models.pipeline import stages_of
from powertrain.ops.batch_invariance import batch_invariant
from tests.models.test_gpt_neox import check_against_plain, check_bfloat16_against_plain, gradients, make_model

FIELDS: dict[str, Any] = {"layer_types": ("gmlp",), "position_embedding": "none", "gmlp_attention_dim": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "gmlp": {},
    "amlp": {"layer_types": ("amlp",), "activation": "silu"},
    "rms": {"layer_types": ("amlp",), "norm": "rms_norm", "norm_bias": False, "intermediate_size": 48},
    # an attention layer takes a stream without a residual, and gives one with it
    "mixed": {"layer_types": ("gmlp", "attention", "amlp", "attention"), "num_layers": 4, "tie_embeddings": True},
    "mixed-last": {"layer_types": ("attention", "amlp"), "parallel_residual": True, "position_embedding": "rotary"},
}


def model_of(variant: str, **fields: Any) -> Any:
    """With spatial weights that count, above the diagonal too, where they must not."""
    model = make_model(**FIELDS | VARIANTS[variant] | fields)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("spatial.weight"):
                p.normal_(0, 0.2)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients(variant: str) -> None:
    check_against_plain(model_of(variant))


@pytest.mark.parametrize("variant", ["amlp", "mixed"])
def test_loss_and_gradients_in_bfloat16(variant: str) -> None:
    check_bfloat16_against_plain(model_of(variant))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputation_changes_no_gradient(dropout: float) -> None:
    model = model_of("mixed", hidden_dropout=dropout).train()
    expected = gradients(model, "none")
    for recompute in ("selective", "full"):
        for name, grad in gradients(model, recompute).items():
            assert torch.equal(grad, expected[name]), (recompute, name)


def test_no_position_sees_a_later_one() -> None:
    model = model_of("amlp").eval()
    tokens = torch.randint(0, 97, (1, 20))
    with torch.no_grad():
        whole = model(tokens)
        for length in (1, 7, 19):
            torch.testing.assert_close(model(tokens[:, :length]), whole[:, :length])


def test_first_weights() -> None:
    """A gate of 1 whatever the tokens; the tiny attention as nn.Linear begins; the others by the init methods."""
    config = configure(architecture="gpt_neox", vocab_size=64, hidden_size=256, num_layers=2, num_heads=4,
                       max_position_embeddings=16, init_method="small_init", output_init_method="wang_init",
                       **FIELDS | {"layer_types": ("amlp",)})  # fmt: skip
    model = build(config, device="cpu")
    model.init_weights(3)
    layer: Any = model.layers[1]
    assert not layer.spatial.weight.any() and (layer.spatial.bias == 1).all()
    assert (layer.gate_norm.weight == 1).all() and not layer.gate_norm.bias.any()
    stds = {"up": (2 / (5 * 256)) ** 0.5, "down": 2 / (2 * 256**0.5)}
    for name, std in stds.items():
        assert getattr(layer, name).weight.std().item() == pytest.approx(std, rel=0.03), name
    for linear, fan_in in ((layer.tiny_attention.qkv, 2048), (layer.tiny_attention.out, 8)):
        for p in (linear.weight, linear.bias):
            assert 0.7 * fan_in**-0.5 < p.abs().max() <= fan_in**-0.5


@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_is_the_full_forward(variant: str) -> None:
    """Greedy tokens of prompts of different lengths, each against forwards of the whole text so far."""
    model = model_of(variant).eval()
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
    found = generate(model, prompts, max_new_tokens=12, sampler=Sampler(temperature=0))
    for prompt, tokens in zip(prompts, found, strict=True):
        text = list(prompt)
        for token in tokens:
            with torch.no_grad():
                logits = model(torch.tensor([text]))[0, -1]
            assert token == logits.argmax(), (prompt, text)
            text.append(token)


@pytest.mark.parametrize("variant", ["amlp", "mixed"])
def test_several_tokens_behind_a_cache(variant: str) -> None:
    """Logits in three parts, sequences of different lengths, are those of one forward."""
    model = model_of(variant).eval()
    tokens = torch.randint(0, 97, (2, 14))
    with torch.no_grad():
        whole = model(tokens)
        cache = model.new_cache(2, 20)
        model(tokens[:, :6], cache=cache, lengths=torch.tensor([6, 4], dtype=torch.int32))
        for start, stop in ((0, 3), (3, 8)):
            rows = torch.stack([tokens[0, 6 + start : 6 + stop], tokens[1, 4 + start : 4 + stop]])
            found = model(rows, cache=cache)
            torch.testing.assert_close(found[0], whole[0, 6 + start : 6 + stop], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found[1], whole[1, 4 + start : 4 + stop], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_cache_with_more_rows_than_there_are_positions() -> None:
    model = model_of("amlp").eval()
    tokens = torch.randint(0, 97, (2, 9))
    cache = model.new_cache(2, model.config.max_position_embeddings + 5)
    found = torch.cat([model(part, cache=cache) for part in tokens.split((4, 5), 1)], 1)
    torch.testing.assert_close(found, model(tokens), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_rows_behind_a_cache_are_not_written() -> None:
    """One row of the batch is full before the other; its padding fits nowhere (it was an IndexError)."""
    model = model_of("gmlp").eval()
    tokens, cache = torch.randint(0, 97, (2, 9)), model.new_cache(2, 9)
    model(tokens[:, :8], cache=cache, lengths=torch.tensor([8, 5], dtype=torch.int32))
    rows = torch.stack([tokens[0, [8, 0, 0]], tokens[1, 5:8]])
    found = model(rows, cache=cache, lengths=torch.tensor([1, 3], dtype=torch.int32))
    whole = model(tokens)
    torch.testing.assert_close(found[0, :1], whole[0, 8:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], whole[1, 5:8], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_more_tokens_behind_a_cache_than_positions() -> None:
    model = model_of("gmlp").eval()
    cache = model.new_cache(1, 40)
    model(torch.zeros(1, 31, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match=r"SpatialGating: positions behind the cache must be in \[0, 32\), got 32"):
        model(torch.zeros(1, 2, dtype=torch.long), cache=cache)


def test_a_stage_passes_the_stream_on() -> None:
    """Cut behind a gMLP layer, and behind an attention layer."""
    model = model_of("mixed", tie_embeddings=False).eval()
    tokens = torch.randint(0, 97, (2, 9))
    with torch.no_grad():
        for cut in (1, 2, 3):
            first, last = stages_of(model, [range(cut), range(cut, 4)])
            torch.testing.assert_close(last(tokens, stream=first(tokens)), model(tokens), rtol=0, atol=0)


def test_flops_count_the_gates() -> None:
    """6 per token and channel of the gate for half of the positions, and both products of the tiny attention."""
    for variant, channels in (("gmlp", 128), ("amlp", 128 + 2 * 8)):
        model = model_of(variant)
        per_position = (flops_per_token(model, 32) - flops_per_token(model, 0)) / 32
        assert per_position == pytest.approx(6 * 2 * channels / 2), variant


def test_what_it_cannot_do_is_refused() -> None:
    model = model_of("mixed").eval()
    tokens = torch.zeros(1, 12, dtype=torch.long)
    with pytest.raises(NotImplementedError, match=r"context.document_ids must be None, got <class .torch.Tensor"):
        model(tokens, document_ids=torch.zeros(1, 12, dtype=torch.int32))
    # the spatial weights go by places in the row: these were ignored
    with pytest.raises(NotImplementedError, match=r"context.position_ids must be None, got <class .torch.Tensor"):
        model(tokens, position_ids=torch.arange(12)[None] + 3)
    with pytest.raises(NotImplementedError, match=r"context.document_starts must be None, got <class .torch.Tensor"):
        model(tokens, document_starts=torch.tensor([0, 5, 12], dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="must not be entered for gMLP layers"), batch_invariant():
        model(tokens)
    with pytest.raises(ValueError, match="a sequence must have at most 32 tokens, got 33"):
        model(torch.zeros(1, 33, dtype=torch.long))
    with pytest.raises(ValueError, match=r"parallel\.tensor must be 1 with gmlp layers"):
        check_tensor(model.config, 2)
    # ranks mixed the positions of their own parts of a sequence, a loss of another model
    with pytest.raises(ValueError, match=r"parallel\.context must be 1 with gmlp layers .* got 2"):
        check_context(model.config, 2)
    with pytest.raises(ValueError, match=r"layer_types must be \[attention\]"):
        to_hf_config(model.config.model_copy(update={"position_embedding": "rotary"}))


@pytest.mark.parametrize(
    "fields, words",
    [
        (
            {"layer_types": ("gmlp", "attention", "gmlp")},
            "layer_types must have a number of kinds that divides num_layers",
        ),
        ({"layer_types": ()}, "layer_types"),
        ({"layer_types": ("mamba",)}, "layer_types"),
        ({"activation": "swiglu"}, "activation must have no gate with gmlp layers, got swiglu"),
        ({"gmlp_attention_dim": 0}, "gmlp_attention_dim"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], words: str) -> None:
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 97}
    with pytest.raises(ValueError, match=words):
        configure(architecture="gpt_neox", **sizes, **FIELDS | fields)
