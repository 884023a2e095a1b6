"""Llama, Mistral, Qwen: loss and every gradient against plain PyTorch, recomputation, presets' sizes."""

from typing import Any

import pytest
import torch

from powertrain.models import build, configure
from tests.models.test_gpt_neox import check_against_plain, check_bfloat16_against_plain, gradients, make_model

LLAMA = {"architecture": "llama", "intermediate_size": 44, "num_kv_heads": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6, "head_dim": 12},
    "qwen2": {"qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": True, "head_dim": 12, "num_kv_heads": 1, "norm_eps": 1e-6},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "activation": "geglu", "num_kv_heads": None},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_andgradients(variant: str) -> None:
    check_against_plain(make_model(**{**LLAMA, **VARIANTS[variant]}))


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_loss_and_gradients_in_bfloat16(variant: str) -> None:
    check_bfloat16_against_plain(make_model(**{**LLAMA, **VARIANTS[variant]}))


@pytest.mark.parametrize("variant", ["mistral", "qwen3"])
def test_recomputation_changes_no_gradient(variant: str) -> None:
    model = make_model(**{**LLAMA, **VARIANTS[variant]}).train()
    expected = gradients(model, "none")
    for recompute in ("selective", "full"):
        for name, grad in gradients(model, recompute).items():
            assert torch.equal(grad, expected[name]), (recompute, name)


# what their publishers count; llama-1b and llama-3b have a head of their own here
@pytest.mark.parametrize(
    "preset, count",
    [
        ("llama-1b", 1_235_814_400 + 128256 * 2048),
        ("llama-3b", 3_212_749_824 + 128256 * 3072),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("mistral-7b", 7_241_732_096),
        ("qwen3-0.6b", 596_049_920),
    ],
)
def test_presets(preset: str, count: int) -> None:
    assert build(configure(preset=preset)).num_parameters() == count


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_kv_heads": 3}, r"model.num_kv_heads must divide num_heads \(4\), got 3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "missing .*original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_scaling.rope_type must be default, .* got 'spiral'"),
        # without its type, or with another base than the model's, it was left out without a word
        ({"rope_scaling": {"factor": 8.0}}, "rope_type must be one of linear, .* with factor, got None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
         r"rope_scaling.rope_theta must be left out, or be model.rope_theta \(10000.0\), got 500000.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor must be a number above 0 .* 0"),
        ({"activation": "gelu"}, "activation"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(**{**LLAMA, **fields})
