"""Hugging Face folders: logits and greedy tokens of transformers, the same bits both ways, and what is refused."""

import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from powertrain.models import ModelConfig, build, configure
from powertrain.models.generate import Sampler, generate
from powertrain.models.huggingface import from_hf, from_hf_config, open_tensors, read_config, to_hf, to_hf_config, write
from powertrain.testing.numerics import check

# odd vocabulary; heads that share keys; ffn that is no multiple of anything
SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
GQA = {"num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "neox": ("GPTNeoX", {}),
    "neox-sequential": ("GPTNeoX", {
        "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new", "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 1.0},
    }),
    "llama": ("Llama", {**GQA, "rope_parameters": LLAMA3}),
    "llama-biases": ("Llama", {
        "attention_bias": True, "mlp_bias": True, "head_dim": 24, "hidden_act": "gelu", "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    }),
    "llama-yarn": ("Llama", {**GQA, "rope_parameters": YARN}),
    "llama-dynamic": ("Llama", {**GQA, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("Mistral", {**GQA, "sliding_window": 7, "head_dim": 24}),
    "mistral-full": ("Mistral", {**GQA, "sliding_window": None}),
    "qwen2": ("Qwen2", GQA),
    "qwen2-window": ("Qwen2", {**GQA, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
    "qwen3": ("Qwen3", {**GQA, "head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3", {**GQA, "head_dim": 16, "attention_bias": True, "rms_norm_eps": 1e-5}),
    "deepseek": ("DeepseekV3", {
        "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "q_lora_rank": 32, "kv_lora_rank": 24,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
    }),
}  # fmt: skip


def _theirs(case: str) -> Any:
    transformers = pytest.importorskip("transformers")
    kind, changes = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**copy.deepcopy({**SIZES, **changes}))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    if kind == "DeepseekV3":
        model.set_experts_implementation("eager")  # the only one that takes float64
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:  # norms and biases that count
                p.copy_(torch.randn_like(p) * 0.1 + (name.endswith("norm.weight")))
    return model


def _loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    config = read_config(folder)
    model = build(config, device="cpu")
    model.load_state_dict(dict(from_hf(config, open_tensors(folder))))
    return model.to(dtype).eval()


def _tokens() -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (2, 24))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_bits(case: str, tmp_path: Path) -> None:
    """Theirs read here: their logits. Written here: the bits of their file, and their class reads it."""
    transformers = pytest.importorskip("transformers")
    theirs = _theirs(case)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, tokens = _loaded(tmp_path / "theirs"), {"tokens": _tokens()}
    exact = copy.deepcopy(theirs).double()
    with torch.no_grad():
        check(ours, _logits(theirs), _logits(exact), tokens, backward=False)
        ids = theirs.generate(tokens["tokens"], max_new_tokens=6, do_sample=False)[:, 24:]
    assert generate(ours, tokens["tokens"].tolist(), max_new_tokens=6, sampler=Sampler(temperature=0)) == ids.tolist()

    (tmp_path / "ours").mkdir()
    write(tmp_path / "ours", ours.config, ours.state_dict().items())
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert {_renamed(name) for name in first} == {_renamed(name) for name in second}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    # a Mistral without a window is a Llama
    assert type(again) is (transformers.LlamaForCausalLM if case == "mistral-full" else type(theirs))
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    with torch.no_grad():
        torch.testing.assert_close(again(tokens["tokens"]).logits, theirs(tokens["tokens"]).logits)


def _renamed(name: str) -> str:
    return name.replace("embed_out.", "lm_head.")


def _logits(model: Any) -> Callable[..., Tensor]:
    return lambda tokens: model(tokens).logits


@pytest.mark.parametrize("case", ["neox", "llama", "mistral", "qwen2", "qwen3"])
def test_logits_in_bfloat16(case: str, tmp_path: Path) -> None:
    theirs = _theirs(case).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    exact = copy.deepcopy(theirs).double()
    ours = _loaded(tmp_path, torch.bfloat16)
    with torch.no_grad():
        check(ours, _logits(theirs), _logits(exact), {"tokens": _tokens()}, backward=False)


# transformers 4 has rope_theta and rope_scaling, 5 has rope_parameters; both must mean the same
@pytest.mark.parametrize(
    "old, new",
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
            {"rope_parameters": LLAMA3},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": None}},
            {"rope_parameters": {**YARN, "original_max_position_embeddings": 64}},
        ),
        (
            {"rope_theta": 1e4, "original_max_position_embeddings": 16, "rope_scaling": {"type": "yarn", "factor": 4}},
            {"rope_parameters": YARN},
        ),
    ],
)  # fmt: skip
def test_both_spellings_of_rotary(old: dict[str, Any], new: dict[str, Any]) -> None:
    values = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    first, second = from_hf_config({**values, **old}), from_hf_config({**values, **new})
    assert first == second and first.rope_theta == new["rope_parameters"]["rope_theta"]
    written = to_hf_config(first)
    # a config of ours may have either spelling: `type` was written beside a rope_type default
    spelled = first.rope_scaling and {"type" if k == "rope_type" else k: v for k, v in first.rope_scaling.items()}
    assert to_hf_config(first.model_copy(update={"rope_scaling": spelled})) == written
    without_new = {k: v for k, v in written.items() if k != "rope_parameters"}
    without_old = {k: v for k, v in written.items() if k not in ("rope_theta", "rope_scaling")}
    assert from_hf_config(without_new) == from_hf_config(without_old) == from_hf_config(written)


def test_neox_spellings_of_4_and_5() -> None:
    values = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", **SIZES}
    old = from_hf_config({**values, "rotary_pct": 0.5, "rotary_emb_base": 5e3})
    new = from_hf_config({**values, "rope_parameters": {"rope_theta": 5e3, "partial_rotary_factor": 0.5}})
    assert old == new and (old.rotary_pct, old.rope_theta) == (0.5, 5e3)
    bare: Any = from_hf_config(values)
    assert (bare.rotary_pct, bare.parallel_residual) == (0.25, True)


_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6, **SIZES,
}  # fmt: skip
_QWEN = {**_LLAMA, **GQA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_NEOX = {**_LLAMA, "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}


@pytest.mark.parametrize(
    "values, changes, message",
    [
        (_LLAMA, {"architectures": ["BertForMaskedLM"]}, "architectures must name one of GPTNeoXFor.*got 'BertFor"),
        (_LLAMA, {"architectures": None}, "architectures must name one of .*, got None"),
        (_LLAMA, {"hidden_act": "mish"}, "hidden_act must be one of silu, .*, got 'mish'"),
        (_LLAMA, {"attention_dropout": 0.1}, "attention_dropout must be 0.0, got 0.1"),
        (_LLAMA, {"pretraining_tp": 2}, "pretraining_tp must be 1, got 2"),
        (_LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0, got 0.5"),
        (_LLAMA, {"sliding_window": 8}, "sliding_window must be None, got 8"),
        (_LLAMA, {"rms_norm_eps": None}, "rms_norm_eps must be given, got none"),
        (_LLAMA, {"quantization_config": {"bits": 4}}, "quant_method must be fp8 or compressed-tensors .*, got None"),
        (_LLAMA, {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "longrope is not supported"),
        (_LLAMA, {"rope_scaling": {"type": "ntk3", "factor": 2.0}}, "rope_type must be default, .*, got 'ntk3'"),
        (_LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1}}, r"unknown \['alpha'\]"),
        (
            _LLAMA,
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}},
            r"dynamic must have original_max_position_embeddings equal to max_position_embeddings \(64\), got 16",
        ),
        (_LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one set for all layers, got one for"),
        (_QWEN, {"use_sliding_window": True, "max_window_layers": 1}, r"layer_types .* \['full_att.*', 'sliding"),
        (_QWEN, {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        (_NEOX, {"hidden_act": "mish"}, "hidden_act must be one of gelu, .* got 'mish'"),
        (_NEOX, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling must be null for gpt_neox"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_named(values: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    from_hf_config(values)
    with pytest.raises(ValueError, match=message):
        from_hf_config({**values, **changes})


def test_defaults_are_those_of_the_classes() -> None:
    """A config.json may leave out what its class has a default for."""
    transformers = pytest.importorskip("transformers")
    for kind in ("Mistral", "Qwen2", "Qwen3", "Llama", "GPTNeoX"):
        whole = getattr(transformers, f"{kind}Config")(num_attention_heads=32, hidden_size=4096).to_dict()
        whole["architectures"] = [f"{kind}ForCausalLM"]
        needed = ("architectures", "model_type", "rms_norm_eps", "rope_parameters", *SIZES)
        bare = {name: value for name, value in whole.items() if name in needed}
        assert from_hf_config(bare) == from_hf_config(whole), kind


@pytest.mark.parametrize("missing", ["q_lora_rank", "n_group", "vocab_size"])
def test_deepseek_needs_its_sizes(missing: str) -> None:
    transformers = pytest.importorskip("transformers")
    values = {**transformers.DeepseekV3Config().to_dict(), "architectures": ["DeepseekV3ForCausalLM"]}
    from_hf_config(values)
    del values[missing]
    with pytest.raises(ValueError, match=f"{missing} must be given, .*got none"):
        from_hf_config(values)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"position_embedding": "alibi"}, "position_embedding must be rotary, got alibi"),
        ({"sliding_window": 8}, "sliding_window must be null, got 8"),
        ({"norm": "rms_norm"}, "norm must be layer_norm, got rms_norm .* or model.norm_bias must be false, got true"),
        ({"activation": "swiglu"}, "activation must be gelu .* got swiglu .* or model.norm must be rms_norm"),
    ],
)  # fmt: skip
def test_models_that_transformers_has_not(fields: dict[str, Any], message: str) -> None:
    config = configure(architecture="gpt_neox", vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, **fields)
    with pytest.raises(ValueError, match=message):
        to_hf_config(config)
    llama = configure(architecture="llama", vocab_size=32, hidden_size=16, num_layers=1, num_heads=2,
                      intermediate_size=32, qkv_bias=True, qk_norm=True)  # fmt: skip
    with pytest.raises(ValueError, match=r"qkv_bias, out_bias, .* got True, False, False, True and None"):
        to_hf_config(llama)


def _small(**fields: Any) -> Any:
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
    model = build(configure(**{"architecture": "gpt_neox", **sizes, **fields}), device="cpu")
    model.init_weights(1)
    return model.eval()


@pytest.mark.parametrize(
    "fields, kind",
    [
        ({"parallel_residual": True, "shared_norm": True}, "GPTNeoXForCausalLM"),
        ({"norm": "rms_norm", "norm_bias": False, "activation": "swiglu", "num_kv_heads": 2, "attention_bias": False,
          "mlp_bias": False, "intermediate_size": 88}, "LlamaForCausalLM"),
        ({"norm": "rms_norm", "norm_bias": False, "activation": "swiglu", "num_kv_heads": 2, "attention_bias": False,
          "mlp_bias": False, "sliding_window": 5}, "MistralForCausalLM"),
    ],
    ids=["shared-norm", "llama", "mistral"],
)  # fmt: skip
def test_gpt_neox_configs_that_are_another_class(fields: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """One norm for both halves becomes two equal ones; a Llama trained from a GPT-NeoX YAML becomes a Llama."""
    transformers = pytest.importorskip("transformers")
    model, tokens = _small(**fields), torch.randint(0, 96, (2, 20))
    write(tmp_path, model.config, model.state_dict().items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == kind
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(_loaded(tmp_path)(tokens), expected, rtol=1e-4, atol=1e-4)


def test_shards_have_an_index_and_are_read_one_tensor_at_a_time(tmp_path: Path) -> None:
    model = _small(tie_embeddings=False)
    write(tmp_path, model.config, model.state_dict().items(), shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == 4 * model.num_parameters()
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert name in opened.keys() and opened.metadata() == {"format": "pt"}
    found = open_tensors(tmp_path)
    assert found["embed_out.weight"] is not found["embed_out.weight"]  # not kept
    for name, tensor in from_hf(model.config, found):
        assert torch.equal(model.state_dict()[name], tensor), name
    # safetensors 0.8 makes files that their owner alone may read
    modes = {(tmp_path / name).stat().st_mode for name in (*files, "config.json")}
    assert len(modes) == 1, modes


def test_written_in_half_the_bytes(tmp_path: Path) -> None:
    model = _small()
    write(tmp_path, model.config, model.state_dict().items(), dtype=torch.bfloat16, eod=3)
    values = json.loads((tmp_path / "config.json").read_text())
    assert (values["torch_dtype"], values["eos_token_id"]) == ("bfloat16", 3)
    for name, tensor in to_hf(model.config, model.state_dict().items()):
        assert torch.equal(open_tensors(tmp_path)[name], tensor.to(torch.bfloat16))


def _written(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    model = _small()
    write(folder, model.config, model.state_dict().items())
    return model.config, load_file(folder / "model.safetensors")


def test_pickles_are_read_without_executing_them(tmp_path: Path) -> None:
    config, tensors = _written(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    buffers = {f"gpt_neox.layers.0.attention.{name}": torch.ones(4) for name in ("bias", "rotary_emb.inv_freq")}
    old = {**tensors, **buffers}
    torch.save(old, tmp_path / "pytorch_model.bin")
    loaded = dict(from_hf(config, open_tensors(tmp_path)))
    assert torch.equal(loaded["embed.weight"], tensors["gpt_neox.embed_in.weight"])
    torch.save({**tensors, "hook": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin must hold tensors.*would execute pathlib"):
        open_tensors(tmp_path)
    torch.save({**tensors, "step": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin must be a dictionary of tensors"):
        open_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no zip, no pickle")
    with pytest.raises(ValueError, match=r"pytorch_model.bin must"):
        open_tensors(tmp_path)


def _without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["gpt_neox.final_layer_norm.bias"]
    save_file({**tensors, "adapter.weight": torch.zeros(1)}, folder / "model.safetensors")


def _with_another_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "embed_out.weight": torch.zeros(96, 31)}, folder / "model.safetensors")


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**60))


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _index_that_leaves(folder: Path) -> None:
    _no_weights(folder)
    index = {"weight_map": {"x": "../other/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _index_of_nothing(folder: Path) -> None:
    _no_weights(folder)
    (folder / "model.safetensors.index.json").write_text("{}")


def _no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


@pytest.mark.parametrize(
    "damage, error, message",
    [
        (_without_a_tensor, ValueError, r"missing \['gpt_neox.final_layer_norm.bias'\], unknown \['adapter.weight'\]"),
        (_with_another_shape, ValueError, r"embed_out.weight must make head.weight \[96, 32\], got \[96, 31\]"),
        (_cut, ValueError, "model.safetensors must be a safetensors file"),
        (_huge_header, ValueError, "model.safetensors must be a safetensors file"),
        (_no_weights, FileNotFoundError, "must hold model.safetensors, or an index"),
        (_index_that_leaves, ValueError, "weight_map must name files beside it, got '../other/model.safetensors'"),
        (_index_of_nothing, ValueError, "must be an index with a weight_map"),
        (_no_json, ValueError, "config.json must be JSON"),
        (_a_list, ValueError, "config.json must hold an object, got list"),
    ],
)
def test_damaged_folders(
    damage: Callable[[Path], None], error: type[Exception], message: str, tmp_path: Path
) -> None:  # fmt: skip
    _written(tmp_path)
    damage(tmp_path)
    with pytest.raises(error, match=message):
        _loaded(tmp_path)


@pytest.mark.parametrize("hidden_size, share", [(40, 0.5), (32, 0.4), (36, 1.0), (32, 0.1)])
def test_an_odd_number_of_rotary_channels_is_written_as_the_even_one_that_turns(
    hidden_size: int, share: float, tmp_path: Path
) -> None:
    """transformers does not round down; nor does it compute a model with half a pair."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
    config = configure(**{**sizes, "architecture": "gpt_neox", "hidden_size": hidden_size, "rotary_pct": share})
    ours = build(config, device="cpu").eval()
    ours.init_weights(1)
    write(tmp_path, config, ours.state_dict().items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).float().eval()
    tokens = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    again: Any = read_config(tmp_path)
    assert again.turned == config.turned  # type: ignore[attr-defined]
    values = json.loads((tmp_path / "config.json").read_text())
    for key in ("rotary_pct", "partial_rotary_factor"):
        values[key] = values["rope_parameters"][key] = 3 / (hidden_size // 4)
    with pytest.raises(
        ValueError, match=r"rotary_pct must turn an even number of a head's \d+ channels, .* which is 3"
    ):
        from_hf_config(values)


def test_an_odd_number_of_channels_that_no_class_turns() -> None:
    config = configure(
        architecture="gpt_neox", vocab_size=96, hidden_size=36, num_layers=2, num_heads=4, norm="rms_norm",
        norm_bias=False, activation="swiglu", mlp_bias=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"hidden_size / num_heads must be even for a LlamaForCausalLM.* got 9"):
        to_hf_config(config)
    sizes = {"architecture": "llama", "vocab_size": 96, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    for fields, name in (
        ({"hidden_size": 36}, "hidden_size / num_heads"),
        ({"hidden_size": 32, "head_dim": 5}, "head_dim"),
    ):
        with pytest.raises(ValueError, match=rf"model\.{name} must be even, since channels turn in pairs"):
            configure(**{**sizes, **fields})
