"""PEFT's adapter folders: names, values, both ways, and PEFT itself where it is installed."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import powertrain
from powertrain.models import ModelConfig, build, configure
from powertrain.models.peft import adapters_of, load_adapter, read_adapter, save_adapter, write_adapter
from powertrain.nn.lora import lora_layers
from powertrain.train.checkpoint.load import merged_tensors

SIZES: dict[str, Any] = dict(num_layers=2, hidden_size=32, num_heads=4, vocab_size=64, max_position_embeddings=32)
CONFIGS = {
    "llama": dict(architecture="llama", intermediate_size=48, num_kv_heads=2, **SIZES),
    "neox": dict(architecture="gpt_neox", **SIZES),
}
KINDS: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}}


def _model(kind: str, **options: Any) -> Any:
    return _trained(powertrain.lora(_fresh(kind), rank=4, alpha=6, **options))


def _fresh(kind: str) -> Any:
    model = build(configure(**CONFIGS[kind]), device="cpu")
    model.init_weights(0)
    return model.eval()


def _trained(model: nn.Module) -> Any:
    for layer in lora_layers(model).values():
        nn.init.normal_(layer.lora_B, std=0.3)
        if layer.lora_magnitude is not None:
            layer.lora_magnitude.data.mul_(1.3)
    return model


TOKENS = torch.arange(20).view(2, 10) * 3


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_written_and_read(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = _model(kind, **options)
    save_adapter(model, tmp_path, base="some/base", rslora="rslora" in options)
    again = load_adapter(_fresh(kind), tmp_path)
    assert torch.equal(again(TOKENS), model(TOKENS))
    before, after = adapters_of(model), adapters_of(again)
    assert before.keys() == after.keys()
    for name, adapter in before.items():
        assert torch.equal(adapter.A, after[name].A) and torch.equal(adapter.B, after[name].B)
        assert adapter.scale == pytest.approx(after[name].scale)
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    assert values["peft_type"] == "LORA" and values["base_model_name_or_path"] == "some/base"
    assert values["r"] == 4 and values["lora_alpha"] == pytest.approx(6)


def test_names_are_those_of_hugging_face(tmp_path: Path) -> None:
    save_adapter(_model("llama", targets=["attention.qkv"], dora=True), tmp_path)
    names = set(load_file(tmp_path / "adapter_model.safetensors"))
    prefix = "base_model.model.model.layers"
    kinds = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
    assert names == {f"{prefix}.{n}.self_attn.{x}_proj.{kind}" for n in range(2) for x in "qkv" for kind in kinds}


def test_different_adapters_of_queries_and_values(tmp_path: Path) -> None:
    """PEFT's usual targets: the key has none, and ranks differ; here they are one product."""
    save_adapter(_model("llama", targets=["attention.qkv"]), tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    tensors = {name: t for name, t in tensors.items() if "k_proj" not in name}
    for name in [name for name in tensors if "v_proj" in name]:
        shape = (3, 32) if "lora_A" in name else (tensors[name].shape[0], 3)
        tensors[name] = torch.randn(shape)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    values |= {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"v_proj": 12}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))

    model = load_adapter(_fresh("llama"), tmp_path)
    layer = lora_layers(model)["layers.1.attention.qkv"]
    assert layer.rank == 7
    from powertrain.models.llama import split_qkv

    delta = split_qkv(layer.scale * layer.lora_B @ layer.lora_A, 4, 2)
    prefix = "base_model.model.model.layers.1.self_attn"
    for letter, scale, part in zip("qkv", (6 / 4, 0.0, 12 / 3), delta, strict=True):
        A, B = (tensors.get(f"{prefix}.{letter}_proj.lora_{x}.weight", torch.zeros(1, 1)) for x in "AB")
        torch.testing.assert_close(part, (scale * B @ A).expand_as(part))


def _leave_out(folder: Path, *parts: str) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if not any(part in name for part in parts)}, file)


def test_magnitudes_of_queries_and_values(tmp_path: Path) -> None:
    """Keys without an adapter have the magnitude of their weight; the folder was refused."""
    from powertrain.models.llama import split_qkv

    base = _fresh("llama")
    save_adapter(_model("llama", targets=["attention.qkv"], dora=True), tmp_path)
    _leave_out(tmp_path, "k_proj")
    layer = lora_layers(load_adapter(_fresh("llama"), tmp_path))["layers.0.attention.qkv"]
    weight = base.get_submodule("layers.0.attention.qkv").weight.detach()
    key, plain = (split_qkv(w, 4, 2)[1] for w in (layer.merged_weight(), weight))
    torch.testing.assert_close(key, plain)
    # merged into a checkpoint's tensors, and written again for PEFT
    adapters = read_adapter(tmp_path, base.config)
    name = "layers.0.attention.qkv.weight"
    ((_, whole),) = merged_tensors(iter([(name, weight)]), adapters)
    torch.testing.assert_close(whole, layer.merged_weight())
    assert torch.equal(split_qkv(whole, 4, 2)[1], plain)
    before = load_file(tmp_path / "adapter_model.safetensors")
    write_adapter(tmp_path, base.config, adapters)
    after = load_file(tmp_path / "adapter_model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before if "magnitude" in n)
    _leave_out(tmp_path, "0.self_attn.q_proj.lora_magnitude")
    with pytest.raises(ValueError, match=r"all of .*q_proj, .*v_proj must have a magnitude, or none, got 1"):
        read_adapter(tmp_path, base.config)


def test_an_adapter_of_the_output_layer(tmp_path: Path) -> None:
    """PEFT writes the layer's own weight beside it; ours is no nn.Linear, but merged it can be."""
    model = _model("llama", targets=["attention.out"])
    save_adapter(model, tmp_path)
    file, prefix = tmp_path / "adapter_model.safetensors", "base_model.model.lm_head"
    A, B = torch.randn(4, 32), torch.randn(64, 4)
    tensors = load_file(file) | {f"{prefix}.lora_A.weight": A, f"{prefix}.lora_B.weight": B}
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"head must be an nn.Linear .* in the model, got a Head .powertrain convert"):
        load_adapter(_fresh("llama"), tmp_path)
    assert "head" in read_adapter(tmp_path, model.config)
    save_file(tensors | {f"{prefix}.base_layer.weight": torch.randn(64, 32)}, file)
    with pytest.raises(ValueError, match=r"must hold adapters alone, got .*base_layer.weight, .*layers=False"):
        load_adapter(_fresh("llama"), tmp_path)


def test_patterns_are_regular_expressions(tmp_path: Path) -> None:
    """A key that is no name was left out, and its layers had the default's scale."""
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)), nn.Linear(6, 8))
    save_adapter(powertrain.lora(copy.deepcopy(model), rank=2, alpha=2), tmp_path)
    file = tmp_path / "adapter_config.json"
    patterns = {r"0\..*": 6, "^1": 10, "1": 14}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"alpha_pattern": patterns}))
    scales = {name: layer.scale for name, layer in lora_layers(load_adapter(model, tmp_path)).items()}
    assert scales == {"0.0": 3, "0.1": 3, "1": 5}


def test_a_model_of_others_keeps_its_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    adapted = _trained(powertrain.lora(copy.deepcopy(model), rank=2, targets=["0", "2"]))
    save_adapter(adapted, tmp_path)
    assert "base_model.model.0.lora_A.weight" in load_file(tmp_path / "adapter_model.safetensors")
    x = torch.randn(4, 6)
    assert torch.equal(load_adapter(model, tmp_path)(x), adapted(x))


def test_errors_name_file_and_key(tmp_path: Path) -> None:
    model = _model("llama")
    save_adapter(model, tmp_path)
    good = json.loads((tmp_path / "adapter_config.json").read_text())
    for change, message in (
        ({"peft_type": "IA3"}, "adapter_config.json: peft_type must be 'LORA'"),
        ({"bias": "all"}, "bias must be 'none' or absent, got 'all'"),
        ({"r": 8}, "must have rank 8 as adapter_config.json says, got 4"),
        ({"lora_alpha": None}, "lora_alpha must be a number above 0"),
        ({"init_lora_weights": "pissa_niter_4"}, "adapter_config.json: init_lora_weights must be a start that leaves"),
        ({"init_lora_weights": "olora"}, "init_lora_weights must be .*, got 'olora'; PEFT's save_pretrained"),
        ({"alora_invocation_tokens": [5, 6]}, r"alora_invocation_tokens must be null or absent, got \[5, 6\]"),
        ({"rank_pattern": {"(": 4}}, r"rank_pattern must hold regular expressions, got '\('"),
        ({"alpha_pattern": {"q_proj": "3"}}, "alpha_pattern must hold numbers above 0, got '3' for 'q_proj'"),
        ({"alpha_pattern": [3]}, r"alpha_pattern must be an object, got \[3\]"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(good | change))
        with pytest.raises(ValueError, match=message):
            load_adapter(_fresh("llama"), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(good))
    with pytest.raises(ValueError, match="must hold adapters of layers that gpt_neox has"):
        load_adapter(_fresh("neox"), tmp_path)
    with pytest.raises(ValueError, match="the model must have adapters to be written"):
        save_adapter(_fresh("llama"), tmp_path / "none")
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"must hold adapter_model\.safetensors"):
        load_adapter(_fresh("llama"), tmp_path)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_peft_computes_the_same(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Our folder read by PEFT over the same model of transformers, and a folder that PEFT wrote read by us."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from powertrain.models.huggingface import write

    base = _fresh(kind)
    config: ModelConfig = base.config
    (tmp_path / "base").mkdir()
    write(tmp_path / "base", config, base.state_dict().items())
    model = _model(kind, **options)
    save_adapter(model, tmp_path / "ours", rslora="rslora" in options)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    read = peft.PeftModel.from_pretrained(theirs, tmp_path / "ours")
    torch.testing.assert_close(read(TOKENS).logits, model(TOKENS), rtol=1e-4, atol=1e-4)

    targets = {"llama": ["q_proj", "v_proj", "down_proj"], "neox": ["query_key_value", "dense_h_to_4h"]}[kind]
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, use_rslora="rslora" in options, use_dora="dora" in options
    )
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval(), settings).eval()
    for name, p in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.3)
    made.save_pretrained(tmp_path / "theirs")
    loaded = load_adapter(_fresh(kind), tmp_path / "theirs")
    torch.testing.assert_close(loaded(TOKENS), made(TOKENS).logits, rtol=1e-4, atol=1e-4)
