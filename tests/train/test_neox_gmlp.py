"""GPT-NeoX configs and checkpoints with gMLP layers: keys, and a float64 model that computes from the very files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from powertrain.models.pickles import load_pickle
from powertrain.train.checkpoint.load import build_from, open_weights
from powertrain.train.checkpoint.neox import write
from powertrain.train.config.reader import read_config
from powertrain.train.config.yaml_source import ConfigError, UnsupportedConfig
from powertrain.train.mesh_shape import check_parallel
from tests.train.tiny_run import open_trainer

HIDDEN, LENGTH, VOCAB, DIM = 16, 12, 40, 4
KEYS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 2, "seq_length": LENGTH, "norm": "layernorm",
    "max_position_embeddings": LENGTH, "pos_emb": "none", "no_weight_tying": True, "gmlp_attn_dim": DIM,
    "attention_config": [[["gmlp", "amlp"], 1]], "make_vocab_size_divisible_by": 1, "bias_gelu_fusion": False,
}  # fmt: skip
REST: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4, "train_iters": 10, "data_path": "d", "tokenizer_type": "CharLevelTokenizer",
}  # fmt: skip


def _config(folder: Path, **keys: Any) -> Any:
    file = folder / "neox.yml"
    file.write_text(json.dumps(KEYS | REST | keys, indent=0))
    return read_config([file], world_size=1).config


@pytest.mark.parametrize(
    "kinds, layers, found",
    [
        ([[["gmlp"], "all"]], 12, ("gmlp",)),
        ([[["gmlp", "amlp"], 3]], 6, ("gmlp", "amlp")),
        ([[["flash"], 2], [["amlp"], 1]], 3, ("attention", "attention", "amlp")),
        (["global", "gmlp"] * 2, 4, ("attention", "gmlp")),
        ([[["flash"], 3], [["global"], 1]], 4, ("attention",)),
    ],
)
def test_attention_config(kinds: list[Any], layers: int, found: tuple[str, ...], tmp_path: Path) -> None:
    model = _config(tmp_path, attention_config=kinds, num_layers=layers, gmlp_attn_dim=48).model
    assert model.layer_types == found and model.ffn == 4 * HIDDEN
    assert model.gmlp_attention_dim == (64 if found == ("attention",) else 48)


def test_gates_are_as_long_as_a_sample(tmp_path: Path) -> None:
    assert _config(tmp_path, max_position_embeddings=64).model.max_position_embeddings == LENGTH
    with pytest.raises(
        ConfigError, match=r"max_position_embeddings must be seq_length \(12\) with gmlp layers, got 64"
    ):
        _config(tmp_path, max_position_embeddings=64, pos_emb="learned")


def test_widths(tmp_path: Path) -> None:
    """GPT-NeoX's gMLP layers have 4 * hidden_size whatever the key says."""
    assert _config(tmp_path, intermediate_size=8).model.ffn == 4 * HIDDEN
    mixed = {"attention_config": [[["flash", "gmlp"], 1]]}
    assert _config(tmp_path, **mixed, intermediate_size=64).model.ffn == 64
    with pytest.raises(UnsupportedConfig, match="intermediate_size is not supported at 32: gmlp layers have 64"):
        _config(tmp_path, **mixed, intermediate_size=32)


@pytest.mark.parametrize(
    "keys, error, words",
    [
        ({"model_parallel_size": 2}, ConfigError, "model_parallel_size is not supported at 2: use 1 with gmlp"),
        ({"activation": "swiglu"}, ConfigError, "activation must have no gate with gmlp layers, got swiglu"),
        ({"mlp_type": "llama", "activation": "silu"}, ConfigError, "must have no gate with gmlp layers, got silu"),
        ({"gmlp_attn_dim": 0}, ConfigError, "gmlp_attn_dim must be above 0, got 0"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], error: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        _config(tmp_path, **keys)


@pytest.mark.parametrize(
    "section, values, words",
    [
        ("parallel", {"context": 2}, "parallel.context must be 1 with gmlp layers"),
        ("parallel", {"tensor": 2}, "parallel.tensor must be 1 with gmlp layers"),
        ("data", {"document_mask": True}, "data.document_mask must be false with gmlp layers"),
        ("train", {"objective": "sft"}, "train.objective must be pretrain with gmlp layers"),
        ("train", {"batch_invariant": True}, "train.batch_invariant must be false with gmlp layers"),
    ],
)
def test_runs_that_gates_cannot_serve(section: str, values: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = _config(tmp_path)
    config = config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
    with pytest.raises((ValueError, NotImplementedError), match=words):
        check_parallel(config, 2 if section == "parallel" else 1)


def _made() -> dict[int, dict[str, Tensor]]:
    """Random tensors under GPT-NeoX's names, layer by layer, with the biases that it never adds."""
    ffn = 4 * HIDDEN
    sizes = {"norm": (HIDDEN,), "input_linear": (2 * ffn, HIDDEN), "sgu.norm": (ffn,), "sgu.proj": (LENGTH, LENGTH)}
    tiny = {"sgu.attn.proj_qkv": (3 * DIM, 2 * ffn), "sgu.attn.proj_ffn": (ffn, DIM)}

    def layer(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        weights = {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
        return weights | {f"{name}.bias": torch.randn(shape[0]) * 0.3 for name, shape in shapes.items()}

    last = {"output_linear": (HIDDEN, ffn)}
    made = {0: {"word_embeddings.weight": torch.randn(VOCAB, HIDDEN)}, 2: layer({**sizes, **last})}
    made[3] = layer({**sizes, **tiny, **last})
    return made | {5: layer({"norm": (HIDDEN,)}), 6: {"final_linear.weight": torch.randn(VOCAB, HIDDEN)}}


def _layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """x [B, S, HIDDEN]: megatron/model/gmlp.py with the sequence's length where it takes the batch's."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)

    u = F.gelu(norm("norm", x) @ p["input_linear.weight"].mT)
    value, gate = u.chunk(2, -1)
    n = x.shape[1]
    weight, bias = p["sgu.proj.weight"][:n, :n].tril(), p["sgu.proj.bias"][:n]
    gate = F.linear(norm("sgu.norm", gate).mT, weight, bias).mT
    if "sgu.attn.proj_qkv.weight" in p:
        q, k, v = linear("sgu.attn.proj_qkv", u).chunk(3, -1)
        scores = (q @ k.mT * DIM**-0.5).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        gate = gate + linear("sgu.attn.proj_ffn", scores.softmax(-1) @ v)
    return (gate * value) @ p["output_linear.weight"].mT


def _logits(made: dict[int, dict[str, Tensor]], tokens: Tensor) -> Tensor:
    made = {i: {n: t.double() for n, t in layer.items()} for i, layer in made.items()}
    x = made[0]["word_embeddings.weight"][tokens]
    x = _layer(made[3], _layer(made[2], x))
    return (
        F.layer_norm(x, (HIDDEN,), made[5]["norm.weight"], made[5]["norm.bias"], 1e-5)
        @ made[6]["final_linear.weight"].mT
    )


def _save(folder: Path, made: dict[int, dict[str, Tensor]]) -> Path:
    step = folder / "global_step7"
    (step / "configs").mkdir(parents=True)
    (step / "configs" / "model.yml").write_text(yaml.safe_dump(KEYS | {"pipe_parallel_size": 1}))
    for index, tensors in made.items():
        torch.save(tensors, step / f"layer_{index:02d}-model_00-model_states.pt")
    torch.save({"module": None}, step / "mp_rank_00_model_states.pt")
    return step


def test_a_checkpoint_there_and_back(tmp_path: Path) -> None:
    """Logits from the files; written again, the same tensors under the same names, unused biases 0."""
    made = _made()
    step = _save(tmp_path / "theirs", made)
    weights = open_weights(step)
    model = build_from(weights, "cpu", torch.float64).eval()
    tokens = torch.randint(0, VOCAB, (2, LENGTH))
    for length in (LENGTH, 5):
        with torch.no_grad():
            torch.testing.assert_close(
                model(tokens[:, :length]), _logits(made, tokens[:, :length]), rtol=1e-9, atol=1e-9
            )
    written = write(tmp_path / "ours", weights.config, weights.tensors())
    for index, tensors in made.items():
        found = load_pickle(written / f"layer_{index:02d}-model_00-model_states.pt")
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            unused = name in ("input_linear.bias", "output_linear.bias")
            assert torch.equal(found[name], torch.zeros_like(tensor) if unused else tensor), name
    again = open_weights(written).config
    assert again == weights.config


def test_a_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """An aMLP layer behind an attention layer, recomputed in backward."""
    model = ("model.architecture=gpt_neox", "model.layer_types=[attention,amlp]", "train.activation_checkpointing=full",
             "schedule.decay_steps=6", "evaluation.every=0", "evaluation.at_end=false")  # fmt: skip

    def run(name: str, steps: int, *overrides: str) -> dict[str, Tensor]:
        (tmp_path / name).mkdir()
        trainer = open_trainer(tmp_path / name, *model, f"train.steps={steps}", *overrides, sinks=lambda _: [])
        trainer.fit()
        trainer.close()
        assert trainer.progress.step == steps
        tensors: dict[str, Tensor] = trainer.optimizer.tensors()
        return tensors

    expected = run("whole", 6)
    run("first", 3)
    found = run("again", 6, f"checkpoint.load={tmp_path}/first/run")
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert expected["model.layers.1.spatial.weight"].tril(-1).any()


def test_what_cannot_be_written(tmp_path: Path) -> None:
    weights = open_weights(_save(tmp_path / "theirs", _made()))
    with pytest.raises(ValueError, match="model_parallel_size must be 1 with gmlp layers, got 2"):
        write(tmp_path / "two", weights.config, weights.tensors(), model_parallel_size=2)
    narrow = weights.config.model_copy(update={"intermediate_size": 8})
    with pytest.raises(ValueError, match="intermediate_size must be 64 with gmlp layers for GPT-NeoX, got 8"):
        write(tmp_path / "narrow", narrow, weights.tensors())


def test_a_tensor_that_is_not_known(tmp_path: Path) -> None:
    made = _made()
    made[2]["sgu.attn.proj_qkv.weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"layer 2 must have known tensors only, got \['sgu.attn.proj_qkv.weight'\]"):
        open_weights(_save(tmp_path, made))
