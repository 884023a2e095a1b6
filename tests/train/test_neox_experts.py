"""GPT-NeoX configs and checkpoints with experts: keys, a float64 model that computes from the very files, runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from powertrain.models import configure
from powertrain.models.pickles import load_pickle
from powertrain.train.checkpoint.load import build_from, open_weights
from powertrain.train.checkpoint.neox import write
from powertrain.train.checkpoint.neox_config import to_neox_config
from powertrain.train.config.neox import model_fields
from powertrain.train.config.reader import Run, read_config
from powertrain.train.config.yaml_source import ConfigError, Source, UnsupportedConfig
from tests.train.tiny_run import open_trainer

HIDDEN, FFN, EXPERTS, VOCAB, HEADS = 16, 24, 4, 40, 2
KEYS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "seq_length": 12, "norm": "layernorm",
    "max_position_embeddings": 12, "pos_emb": "none", "no_weight_tying": True, "moe_num_experts": EXPERTS,
    "make_vocab_size_divisible_by": 1, "intermediate_size": FFN,
}  # fmt: skip
REST: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4, "train_iters": 10, "data_path": "d", "tokenizer_type": "CharLevelTokenizer",
}  # fmt: skip


def _read(folder: Path, **keys: Any) -> Run:
    file = folder / "neox.yml"
    file.write_text(json.dumps({k: v for k, v in (KEYS | REST | keys).items() if v is not None}, indent=0))
    return read_config([file], world_size=1)


def _fields(run: Run) -> dict[str, Any]:
    names = ("num_experts", "experts_per_token", "expert_interval", "router", "router_jitter",
             "expert_intermediate_size", "expert_activation", "expert_bias", "balance_loss")  # fmt: skip
    return {name: getattr(run.config.model, name) for name in names}


HEAD = {"num_experts": 4, "experts_per_token": 1, "expert_interval": 1, "router": "sinkhorn", "router_jitter": 0.0,
        "expert_intermediate_size": FFN, "expert_activation": "gelu", "expert_bias": False,
        "balance_loss": 0.0}  # fmt: skip
OLD = HEAD | {"expert_interval": 2, "router": "topk", "expert_intermediate_size": 4096,
              "expert_activation": "gelu_tanh", "expert_bias": True}  # fmt: skip


@pytest.mark.parametrize(
    "keys, found",
    [
        ({}, HEAD),
        ({"moe_router_type": "topk", "moe_top_k": 2, "moe_jitter_eps": 0.01, "moe_expert_interval": 2},
         HEAD | {"router": "topk", "experts_per_token": 2, "router_jitter": 0.01, "expert_interval": 2}),
        # the sinkhorn router never reads it
        ({"moe_jitter_eps": 0.01, "moe_lbl_in_fp32": True}, HEAD),
        # experts have no gate, and the width is not cut to two thirds
        ({"activation": "swiglu", "intermediate_size": 60}, HEAD | {"expert_activation": "silu",
                                                                    "expert_intermediate_size": 60}),
        # 4 * hidden_size in multiples of 256
        ({"intermediate_size": None}, HEAD | {"expert_intermediate_size": 256}),
        ({"moe_type": "megablocks", "moe_token_dropping": False, "enable_expert_tensor_parallelism": True}, OLD),
        ({"expert_interval": 1, "moe_loss_coeff": 0.2, "moe_top_k": 2, "moe_jitter_eps": 0.1, "gpt_j_residual": True},
         OLD | {"expert_interval": 1, "experts_per_token": 2, "router_jitter": 0.1}),
        ({"moe_num_experts": 1, "moe_top_k": 1, "moe_router_type": "topk"},
         HEAD | {"num_experts": 1, "router": "topk", "expert_intermediate_size": None, "expert_activation": None}),
    ],
)  # fmt: skip
def test_keys(keys: dict[str, Any], found: dict[str, Any], tmp_path: Path) -> None:
    assert _fields(_read(tmp_path, **keys)) == found


def test_what_the_table_says(tmp_path: Path) -> None:
    rows = {row.key: row for row in _read(tmp_path, moe_type="megablocks", moe_loss_coeff=0.5, moe_glu=True).table}
    assert "4096" in rows["moe_type"].explanation and rows["expert_interval"].value == 2
    assert "no gradient" in rows["moe_loss_coeff"].explanation and rows["moe_glu"].disposition == "ignored"
    rows = {row.key: row for row in _read(tmp_path).table}
    assert rows["moe_router_type"].value == "sinkhorn" and rows["moe_num_experts"].disposition == "changes numerics"


@pytest.mark.parametrize(
    "keys, error, words",
    [
        ({"moe_top_k": 5}, ConfigError, r"moe_top_k must be at most moe_num_experts \(4\), got 5"),
        ({"moe_num_experts": 0}, ConfigError, "moe_num_experts must be at least 1, got 0"),
        ({"moe_router_type": "hash"}, ConfigError, "moe_router_type must be one of sinkhorn, topk, got 'hash'"),
        ({"moe_jitter_eps": 1.5}, ConfigError, "moe_jitter_eps must be below 1, got 1.5"),
        ({"moe_type": "megablocks", "moe_router_type": "topk"}, ConfigError, "moe_type must not stand beside moe_rou"),
        ({"gpt_j_residual": True}, UnsupportedConfig, "leaves attention's result out of layers with experts"),
        ({"bias_gelu_fusion": True}, UnsupportedConfig, "bias_gelu_fusion .* set it to false: it fails"),
        ({"te_layernorm_mlp": True}, UnsupportedConfig, "te_layernorm_mlp .* leaves out the norm"),
        ({"mlp_type": "llama"}, UnsupportedConfig, "mlp_type is not supported at llama"),
        ({"moe_type": "deepspeed"}, UnsupportedConfig, "moe_type is not supported at deepspeed: use megablocks"),
        ({"moe_type": "megablocks", "moe_token_dropping": True}, UnsupportedConfig, "no token is dropped here"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], error: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        _read(tmp_path, **keys)


def _made(ranks: int) -> dict[int, list[dict[str, Tensor]]]:
    """Random tensors of each layer and tensor-parallel rank under GPT-NeoX's names; each rank has some experts."""

    def normed(*names: str) -> dict[str, Tensor]:
        return {f"{name}.{kind}": torch.randn(HIDDEN) for name in names for kind in ("weight", "bias")}

    def layer(shared: dict[str, Tensor]) -> dict[str, Tensor]:
        rows, inside = 3 * HIDDEN // ranks, EXPERTS // ranks * FFN
        return shared | {
            "attention.query_key_value.weight": torch.randn(rows, HIDDEN) * 0.3,
            "attention.query_key_value.bias": torch.randn(rows) * 0.3,
            "attention.dense.weight": torch.randn(HIDDEN, HIDDEN // ranks) * 0.3,
            "mlp.experts.mlp.w1": torch.randn(inside, HIDDEN) * 0.3,
            "mlp.experts.mlp.w2": torch.randn(inside, HIDDEN) * 0.3,
        }

    def split(name: str) -> list[dict[str, Tensor]]:
        return [{f"{name}.weight": t} for t in torch.randn(VOCAB, HIDDEN).chunk(ranks)]

    made = {0: split("word_embeddings"), 6: split("final_linear"), 5: [normed("norm")] * ranks}
    for index in (2, 3):
        shared = normed("input_layernorm", "post_attention_layernorm") | {"attention.dense.bias": torch.randn(HIDDEN)}
        shared["mlp.router.layer.weight"] = torch.randn(EXPERTS, HIDDEN)
        made[index] = [layer(shared) for _ in range(ranks)]
    return made


def _norm(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, (HIDDEN,), p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)


def _layer(shards: list[dict[str, Tensor]], x: Tensor, top_k: int) -> Tensor:
    """x [S, HIDDEN]: one layer, each rank's heads, then each token's experts one by one."""
    ranks, p = len(shards), shards[0]
    y, attended = _norm(p, "input_layernorm", x), p["attention.dense.bias"]
    for shard in shards:
        mixed = F.linear(y, shard["attention.query_key_value.weight"], shard["attention.query_key_value.bias"])
        q, k, v = mixed.unflatten(-1, (HEADS // ranks, -1)).transpose(0, 1).chunk(3, -1)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        attended = attended + heads @ shard["attention.dense.weight"].T
    x = x + attended
    y = _norm(p, "post_attention_layernorm", x)
    up, down = (torch.cat([s[f"mlp.experts.mlp.{n}"] for s in shards]).view(EXPERTS, FFN, HIDDEN) for n in ("w1", "w2"))
    rows = []
    for token in y:
        weights, experts = (token @ p["mlp.router.layer.weight"].T).softmax(-1).topk(top_k)
        outs = [w * (F.gelu(token @ up[e].T) @ down[e]) for w, e in zip(weights, experts.tolist(), strict=True)]
        rows.append(torch.stack(outs).sum(0))
    return x + torch.stack(rows)


def _logits(made: dict[int, list[dict[str, Tensor]]], tokens: Tensor, top_k: int) -> Tensor:
    wide = {i: [{n: t.double() for n, t in shard.items()} for shard in shards] for i, shards in made.items()}
    embed, head = (torch.cat([next(iter(s.values())) for s in wide[i]]) for i in (0, 6))
    rows = [_norm(wide[5][0], "norm", _layer(wide[3], _layer(wide[2], embed[r], top_k), top_k)) for r in tokens]
    return torch.stack(rows) @ head.T


def _save(folder: Path, made: dict[int, list[dict[str, Tensor]]], **keys: Any) -> Path:
    step = folder / "global_step7"
    (step / "configs").mkdir(parents=True)
    sizes = {"pipe_parallel_size": 1, "model_parallel_size": len(made[0])}
    (step / "configs" / "model.yml").write_text(yaml.safe_dump(KEYS | sizes | keys))
    for index, shards in made.items():
        for rank, tensors in enumerate(shards):
            torch.save(tensors, step / f"layer_{index:02d}-model_{rank:02d}-model_states.pt")
    torch.save({"module": None}, step / "mp_rank_00_model_states.pt")
    return step


@pytest.mark.parametrize("ranks, top_k", [(1, 1), (2, 2)])
def test_a_checkpoint_there_and_back(ranks: int, top_k: int, tmp_path: Path) -> None:
    """Logits from the files; written again, the same tensors under the same names, and the same config."""
    made = _made(ranks)
    step = _save(tmp_path / "theirs", made, moe_router_type="topk", moe_top_k=top_k)
    weights = open_weights(step)
    model = build_from(weights, "cpu", torch.float64).eval()
    tokens = torch.randint(0, VOCAB, (2, 9))
    with torch.no_grad():
        # the router computes its scores in float32
        torch.testing.assert_close(model(tokens), _logits(made, tokens, top_k), rtol=1e-5, atol=1e-4)
    written = write(tmp_path / "ours", weights.config, weights.tensors(), model_parallel_size=ranks)
    for index, shards in made.items():
        for rank, tensors in enumerate(shards):
            found = load_pickle(written / f"layer_{index:02d}-model_{rank:02d}-model_states.pt")
            assert found.keys() == tensors.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert open_weights(written).config == weights.config


def test_tensors_of_older_releases_are_named(tmp_path: Path) -> None:
    made = _made(1)
    for name in [n for n in made[2][0] if n.startswith("mlp.")]:
        made[2][0][name.replace("mlp.", "mlp.moe.", 1)] = made[2][0].pop(name)
    with pytest.raises(ValueError, match=r"layer 2 must have known tensors only, got \['mlp.moe.experts.mlp.w1"):
        open_weights(_save(tmp_path, made))


SIZES: dict[str, Any] = {
    "architecture": "gpt_neox", "vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 4,
    "intermediate_size": 256, "max_position_embeddings": 64, "num_experts": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"router": "sinkhorn"},
        {"router": "topk", "experts_per_token": 2, "router_jitter": 0.1, "expert_interval": 2},
        {"activation": "swiglu", "expert_activation": "silu", "expert_intermediate_size": 72},
    ],
)
def test_every_key_is_written(fields: dict[str, Any]) -> None:
    config: Any = configure(**SIZES, **fields)
    again: Any = configure(**model_fields(Source(values=to_neox_config(config))))
    names = ("num_experts", "experts_per_token", "expert_interval", "router", "router_jitter", "expert_ffn")
    assert [getattr(again, n) for n in names] == [getattr(config, n) for n in names]
    assert (again.expert_activation or again.activation) == (config.expert_activation or config.activation)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"expert_bias": True}, "expert_bias must be false with experts for GPT-NeoX, got true"),
        ({"parallel_residual": True}, "parallel_residual must be false with experts"),
        ({"expert_activation": "gelu_tanh"}, "expert_activation must be another with experts .*, got gelu_tanh"),
        ({"expert_interval": 2, "expert_activation": "relu"}, "expert_activation must be gelu with experts"),
        ({"expert_interval": 2, "expert_intermediate_size": 8}, "expert_intermediate_size must be 256 with experts"),
        ({"balance_loss": 0.5}, "balance_loss must be 0 with experts"),
    ],
)
def test_what_cannot_be_written(fields: dict[str, Any], words: str) -> None:
    config: Any = configure(**SIZES, **fields)
    with pytest.raises(ValueError, match=words):
        to_neox_config(config)


def test_a_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """Experts in every second layer, balanced by sinkhorn, recomputed in backward."""
    model = ("model.architecture=gpt_neox", "model.num_experts=4", "model.router=sinkhorn", "model.expert_interval=2",
             "train.activation_checkpointing=full", "schedule.decay_steps=6", "evaluation.every=0",
             "evaluation.at_end=false")  # fmt: skip

    def run(name: str, steps: int, *overrides: str) -> dict[str, Tensor]:
        (tmp_path / name).mkdir()
        trainer = open_trainer(tmp_path / name, *model, f"train.steps={steps}", *overrides, sinks=lambda _: [])
        first = {n: t.clone() for n, t in trainer.optimizer.tensors().items()}
        trainer.fit()
        trainer.close()
        tensors: dict[str, Tensor] = trainer.optimizer.tensors()
        # every expert learns
        moved = (tensors["model.layers.0.mlp.experts.up"] - first["model.layers.0.mlp.experts.up"]).abs()
        assert (moved.amax((1, 2)) > 0).all()
        return tensors

    expected = run("whole", 6)
    run("first", 3)
    found = run("again", 6, f"checkpoint.load={tmp_path}/first/run")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
