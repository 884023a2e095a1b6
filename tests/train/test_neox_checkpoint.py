"""GPT-NeoX's checkpoints: a plain float64 model that computes from the very files as GPT-NeoX does is the judge.

To 1e-5, since rotary tables are in float32.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from powertrain.models import configure
from powertrain.models.huggingface import shapes
from powertrain.models.pickles import load_pickle
from powertrain.train.checkpoint.load import build_from, open_weights
from powertrain.train.checkpoint.neox import NeoXCheckpoint, find, write
from powertrain.train.checkpoint.neox_config import to_neox_config
from powertrain.train.config.neox import model_fields
from powertrain.train.config.yaml_source import Source

LAYERS, HIDDEN, HEADS, VOCAB, LENGTH = 2, 32, 4, 96, 24
Shards = list[dict[str, Tensor]]
# the keys that a config has and a model does not need
REST = {
    "data-path": "data/nowhere", "vocab-file": "nowhere/vocab.json", "merge-file": "nowhere/merges.txt",
    "optimizer": {"type": "Adam", "params": {"lr": 6e-4}}, "train_micro_batch_size_per_gpu": 4, "train_batch_size": 512,
    "train-iters": 10, "zero_optimization": {"stage": 1}, "hostfile": "/mock_path",
}  # fmt: skip
KEYS: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "seq_length": LENGTH,
    "max_position_embeddings": LENGTH, "make_vocab_size_divisible_by": 1, "attention_config": [[["flash"], "all"]],
}  # fmt: skip
NEOX_20B = {
    "pos_emb": "rotary", "rotary-pct": 0.25, "gpt_j_residual": True, "no_weight_tying": True, "norm": "layernorm",
}  # fmt: skip
GPT2 = {"pos_emb": "learned", "bias_gelu_fusion": True, "norm": "layernorm"}
LLAMA = {
    "pos_emb": "rotary", "norm": "rmsnorm", "rms_norm_epsilon": 1e-8, "activation": "swiglu", "no_weight_tying": True,
    "intermediate_size": 120, "mlp_multiple_of": 8, "use_bias_in_attn_linear": False, "use_bias_in_mlp": False,
}  # fmt: skip
# keys, tensor-parallel ranks, pipe_parallel_size, the MLP's names
CASES: dict[str, tuple[dict[str, Any], int, int, str]] = {
    # each rank's biases of row-parallel layers are summed with parallel residuals
    "20b": (NEOX_20B, 2, 1, "dense_h_to_4h dense_4h_to_h"),
    "20b-one-file": ({**NEOX_20B, "gpt_j_tied": True}, 4, 0, "linear1 linear2"),
    "gpt2": (GPT2, 2, 0, "dense_h_to_4h dense_4h_to_h"),
    "gpt2-files": (GPT2, 1, 1, "linear1 linear2"),
    # 120 * 2 / 3 = 80 rows: 40 up and 40 gate, on each of two ranks 20 up, then 20 gate
    "llama": (LLAMA, 2, 1, "linear1 linear2"),
    "llama-gqa": ({**LLAMA, "num_kv_heads": 2}, 2, 1, "linear1 linear2"),
    "llama-apart": ({**LLAMA, "num_kv_heads": 1}, 1, 0, "w1 w2 w3"),
    "geglu-biases": ({**LLAMA, "activation": "geglu", "use_bias_in_mlp": True, "use_bias_in_attn_linear": True}, 2, 0,
                     "linear1 linear2"),
}  # fmt: skip


def _is_gated(keys: dict[str, Any]) -> bool:
    return keys.get("activation", "gelu") in ("swiglu", "geglu")


def _made(keys: dict[str, Any], ranks: int, mlp: str) -> dict[int, Shards]:
    """Random tensors of every layer, a dictionary per rank, with the shapes that GPT-NeoX gives them."""
    norm = ("scale",) if keys["norm"] == "rmsnorm" else ("weight", "bias")
    kv_heads = keys.get("num_kv_heads", HEADS)
    ffn = 40 if _is_gated(keys) else 4 * HIDDEN
    first = 2 * ffn if _is_gated(keys) and "w1" not in mlp else ffn
    one, two, *three = (f"mlp.{name}" for name in mlp.split())
    columns = {"attention.query_key_value": (HEADS + 2 * kv_heads) * HIDDEN // HEADS, one: first}
    columns |= {name: ffn for name in three}
    rows = {"attention.dense": HIDDEN, two: ffn}

    def norms(*names: str) -> Shards:
        copies = {f"{n}.{k}": torch.randn(HIDDEN) * 0.1 + (k != "bias") for n in names for k in norm}
        return [copies] * ranks

    def layer(rank: int, same: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {f"{name}.weight": torch.randn(size // ranks, HIDDEN) * 0.2 for name, size in columns.items()}
        found |= {f"{name}.weight": torch.randn(HIDDEN, size // ranks) * 0.2 for name, size in rows.items()}
        if keys.get("use_bias_in_mlp", True):
            found |= {f"{name}.bias": torch.randn(size // ranks) * 0.2 for name, size in columns.items()}
            biases = {f"{name}.bias": torch.randn(HIDDEN) * 0.2 for name in rows}
            # without parallel residuals they are added once, after the sum, and every rank has a copy
            found |= biases if keys.get("gpt_j_residual") else {n: same.setdefault(n, b) for n, b in biases.items()}
        return found

    def vocabulary(name: str) -> Shards:
        return [{f"{name}.weight": torch.randn(VOCAB // ranks, HIDDEN) * 0.2} for _ in range(ranks)]

    made = {0: vocabulary("word_embeddings"), LAYERS + 3: norms("norm")}
    if keys["pos_emb"] == "learned":
        positions = {"position_embeddings.weight": torch.randn(LENGTH, HIDDEN) * 0.2}
        made[0] = [shard | positions for shard in made[0]]
    for index in range(2, LAYERS + 2):
        both, same = norms("input_layernorm", "post_attention_layernorm"), {}
        made[index] = [norm | layer(rank, same) for rank, norm in enumerate(both)]
    if keys.get("no_weight_tying"):
        made[LAYERS + 4] = vocabulary("final_linear")
    return made


def _save(folder: Path, keys: dict[str, Any], made: dict[int, Shards], pipe: int, **client_state: Any) -> Path:
    step = folder / "global_step7"
    (step / "configs").mkdir(parents=True)
    ranks = len(made[0])
    sizes = {"pipe_parallel_size": pipe, "model_parallel_size": ranks}
    (step / "configs" / "model.yml").write_text(yaml.safe_dump({**KEYS, **keys, **sizes}))
    (step / "configs" / "local_setup.yml").write_text(yaml.safe_dump(REST))
    for rank in range(ranks):
        module = None
        if pipe:
            for index, shards in made.items():
                torch.save(dict(shards[rank]), step / f"layer_{index:02d}-model_{rank:02d}-model_states.pt")
        else:
            module = {f"sequential.{i}.{name}": t for i, shards in made.items() for name, t in shards[rank].items()}
        torch.save({"module": module, **client_state}, step / f"mp_rank_{rank:02d}_model_states.pt")
    (folder / "latest").write_text("global_step7")
    return step


def _norm(x: Tensor, shard: dict[str, Tensor], name: str) -> Tensor:
    if f"{name}.scale" in shard:
        return x / (x.norm(dim=-1, keepdim=True) * HIDDEN**-0.5 + 1e-8) * shard[f"{name}.scale"]
    return F.layer_norm(x, (HIDDEN,), shard[f"{name}.weight"], shard[f"{name}.bias"], 1e-5)


def _linear(x: Tensor, shard: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, shard[f"{name}.weight"], shard.get(f"{name}.bias"))


def _turned(x: Tensor, pct: float) -> Tensor:
    """Rotate-half on the first channels of [B, S, H, D]."""
    dim = int(x.shape[-1] * pct)
    angles = torch.outer(torch.arange(x.shape[1]).double(), 10000.0 ** -(torch.arange(0, dim, 2).double() / dim))
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
    front, rest = x[..., :dim], x[..., dim:]
    a, b = front.chunk(2, -1)
    return torch.cat([front * cos + torch.cat([-b, a], -1) * sin, rest], -1)


def _attention(x: Tensor, shard: dict[str, Tensor], keys: dict[str, Any], ranks: int) -> Tensor:
    """One rank's heads, before the output projection."""
    heads, dim, kv_heads = HEADS // ranks, HIDDEN // HEADS, keys.get("num_kv_heads", HEADS) // ranks
    mixed = _linear(x, shard, "attention.query_key_value")
    if kv_heads == heads:  # per head: query, key, value
        q, k, v = mixed.unflatten(-1, (heads, 3 * dim)).chunk(3, -1)
    else:  # all queries, all keys, all values of the rank
        parts = mixed.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in parts)
        k, v = (t.repeat_interleave(heads // kv_heads, 2) for t in (k, v))
    if keys["pos_emb"] == "rotary":
        q, k = (_turned(t, keys.get("rotary-pct", 1.0)) for t in (q, k))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


def _mlp(x: Tensor, shard: dict[str, Tensor], keys: dict[str, Any]) -> Tensor:
    """One rank's columns, before the output projection."""
    act: Callable[[Tensor], Tensor] = {
        "swiglu": F.silu, "geglu": F.gelu, "gelu": F.gelu
    }[keys.get("activation", "gelu")]  # fmt: skip
    if keys.get("bias_gelu_fusion"):
        return F.gelu(_linear(x, shard, _name(shard)), approximate="tanh")
    if "mlp.w1.weight" in shard:
        return act(_linear(x, shard, "mlp.w1")) * _linear(x, shard, "mlp.w3")
    h = _linear(x, shard, _name(shard))
    if _is_gated(keys):
        up, gate = h.chunk(2, -1)
        return act(gate) * up
    return act(h)


def _name(shard: dict[str, Tensor]) -> str:
    return "mlp.linear1" if "mlp.linear1.weight" in shard else "mlp.dense_h_to_4h"


def _summed(inputs: list[Tensor], shards: Shards, names: tuple[str, ...], keys: dict[str, Any]) -> Tensor:
    """A row-parallel projection: the sum over ranks, and the bias, which parallel residuals add on each of them."""
    name = next(n for n in names if f"{n}.weight" in shards[0])
    total = sum(F.linear(x, shard[f"{name}.weight"]) for x, shard in zip(inputs, shards, strict=True))
    biases = [shard.get(f"{name}.bias", torch.zeros(1)) for shard in shards]
    return total + (sum(biases) if keys.get("gpt_j_residual") else biases[0])


def _logits(made: dict[int, Shards], keys: dict[str, Any], tokens: Tensor) -> Tensor:
    layers = {i: [{n: t.double() for n, t in shard.items()} for shard in shards] for i, shards in made.items()}
    ranks = len(made[0])
    embedding = torch.cat([shard["word_embeddings.weight"] for shard in layers[0]])
    x = embedding[tokens]
    if keys["pos_emb"] == "learned":
        x = x + layers[0][0]["position_embeddings.weight"][: tokens.shape[1]]
    for index in range(2, LAYERS + 2):
        shards = layers[index]
        y = _norm(x, shards[0], "input_layernorm")
        attended = _summed([_attention(y, s, keys, ranks) for s in shards], shards, ("attention.dense",), keys)
        if not keys.get("gpt_j_residual"):
            x = x + attended
        if not keys.get("gpt_j_tied"):
            y = _norm(x, shards[0], "post_attention_layernorm")
        names = ("mlp.linear2", "mlp.dense_4h_to_h", "mlp.w2")
        fed = _summed([_mlp(y, shard, keys) for shard in shards], shards, names, keys)
        x = x + fed + (attended if keys.get("gpt_j_residual") else 0)
    x = _norm(x, layers[LAYERS + 3][0], "norm")
    head = torch.cat([s["final_linear.weight"] for s in layers[LAYERS + 4]]) if LAYERS + 4 in layers else embedding
    return F.linear(x, head)


def _tokens() -> Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH))


@pytest.mark.parametrize("case", CASES)
def test_logits_of_gpt_neox(case: str, tmp_path: Path) -> None:
    keys, ranks, pipe, mlp = CASES[case]
    made, tokens = _made(keys, ranks, mlp), _tokens()
    _save(tmp_path, keys, made, pipe)
    weights = open_weights(tmp_path)
    assert weights.kind == "neox" and weights.config.vocab_size == VOCAB
    model = build_from(weights, torch.device("cpu"), torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), _logits(made, keys, tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pipe, ranks", [(1, 1), (1, 2), (0, 2)])
@pytest.mark.parametrize("case", ["20b", "20b-one-file", "gpt2", "llama-gqa", "geglu-biases"])
def test_written_and_read_again(case: str, pipe: int, ranks: int, tmp_path: Path) -> None:
    """The same bits and the same model, for any number of ranks; and GPT-NeoX would compute the same from it."""
    keys, made_ranks, made_pipe, mlp = CASES[case]
    _save(tmp_path / "first", keys, _made(keys, made_ranks, mlp), made_pipe)
    first = open_weights(tmp_path / "first")
    step = write(tmp_path / "second", first.config, first.tensors(), pipe_parallel_size=pipe, model_parallel_size=ranks)
    second = open_weights(step)
    assert second.config == first.config
    expected = dict(first.tensors())
    for name, tensor in second.tensors():
        assert torch.equal(tensor, expected[name]), name
    written = yaml.safe_load((step / "configs" / "config.yml").read_text())
    assert (written["pipe_parallel_size"], written["model_parallel_size"]) == (pipe, ranks)
    tokens = _tokens()
    made = {i: _files_of(step, i, ranks, pipe) for i in (0, *range(2, LAYERS + 2), LAYERS + 3)}
    made |= {LAYERS + 4: _files_of(step, LAYERS + 4, ranks, pipe)} if keys.get("no_weight_tying") else {}
    with torch.no_grad():
        model = build_from(first, torch.device("cpu"), torch.float64)
        torch.testing.assert_close(_logits(made, keys, tokens), model(tokens), rtol=1e-5, atol=1e-5)


def _files_of(step: Path, index: int, ranks: int, pipe: int) -> Shards:
    if pipe:
        files = [step / f"layer_{index:02d}-model_{rank:02d}-model_states.pt" for rank in range(ranks)]
        return [torch.load(file, weights_only=True) for file in files]
    modules = [torch.load(step / f"mp_rank_{r:02d}_model_states.pt", weights_only=True)["module"] for r in range(ranks)]
    prefix = f"sequential.{index}."
    return [{n.removeprefix(prefix): t for n, t in m.items() if n.startswith(prefix)} for m in modules]


def _small(folder: Path, pipe: int = 1, ranks: int = 2, **client_state: Any) -> tuple[Path, dict[int, Shards]]:
    made = _made(NEOX_20B, ranks, "linear1 linear2")
    return _save(folder, NEOX_20B, made, pipe, **client_state), made


def test_copies_that_drifted_apart_are_averaged(tmp_path: Path) -> None:
    """As GPT-NeoX's own converter does."""
    made = _made(NEOX_20B, 2, "linear1 linear2")
    made[LAYERS + 3] = [{"norm.weight": torch.full((HIDDEN,), v), "norm.bias": torch.zeros(HIDDEN)} for v in (1.0, 2.0)]
    _save(tmp_path, NEOX_20B, made, 1)
    assert torch.equal(dict(open_weights(tmp_path).tensors())["norm.weight"], torch.full((HIDDEN,), 1.5))


def test_states_of_random_generators_are_no_obstacle(tmp_path: Path) -> None:
    """GPT-NeoX saves NumPy's beside the weights, and plain values."""
    state = np.random.RandomState(0).get_state()
    _small(
        tmp_path, pipe=0, np_rng_state=state, random_rng_state=(3, (1, 2), None), args={"num_layers": 2}, iteration=7
    )
    assert open_weights(tmp_path).config.num_layers == LAYERS


def test_rotary_buffers_are_left_out(tmp_path: Path) -> None:
    step, made = _small(tmp_path)
    for rank in range(2):
        extra = {"attention.rotary_emb.inv_freq": torch.ones(4)}
        torch.save(made[2][rank] | extra, step / f"layer_02-model_{rank:02d}-model_states.pt")
    assert "layers.0.attention.qkv.weight" in dict(open_weights(tmp_path).tensors())


def test_which_step(tmp_path: Path) -> None:
    """`latest` says it; without it, the highest number."""
    step, _ = _small(tmp_path)
    step.rename(tmp_path / "global_step9")
    (tmp_path / "global_step10").mkdir()
    (tmp_path / "latest").write_text("global_step9\n")
    assert find(tmp_path) == tmp_path / "global_step9"
    (tmp_path / "latest").write_text("../elsewhere")
    assert find(tmp_path) == tmp_path / "global_step10"
    (tmp_path / "latest").unlink()
    (tmp_path / "global_step10").rmdir()
    assert find(tmp_path) == find(tmp_path / "global_step9") == tmp_path / "global_step9"
    assert find(tmp_path / "nowhere") is None


class _LossScaler:
    """Stands for DeepSpeed's, which it pickles beside fp16 weights."""


def _add(step: Path, **changes: Any) -> None:
    torch.save({"module": {}, **changes}, step / "mp_rank_00_model_states.pt")


def _zero3(step: Path) -> None:
    _add(step)
    torch.save({}, step / "zero_pp_rank_0_mp_rank_00_model_states.pt")


def _foreign_module(step: Path) -> None:
    _add(step, module={"transformer.wte.weight": torch.zeros(1)})


def _edit(step: Path, key: str, value: Any) -> None:
    file = step / "configs" / "model.yml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), key: value}))


def _unknown_tensor(step: Path) -> None:
    torch.save(
        {"norm.weight": torch.ones(HIDDEN), "norm.gain": torch.ones(1)}, step / "layer_05-model_01-model_states.pt"
    )


def _lost_tensor(step: Path) -> None:
    for rank in range(2):
        torch.save({"norm.weight": torch.ones(HIDDEN)}, step / f"layer_05-model_{rank:02d}-model_states.pt")


def _no_configs(step: Path) -> None:
    for file in (step / "configs").iterdir():
        file.unlink()


@pytest.mark.parametrize(
    "pipe, damage, error, message",
    [
        (0, lambda step: _add(step, optimizer=_LossScaler()), ValueError,
         r"mp_rank_00_model_states.pt must hold tensors .* would execute tests.train.test_neox_checkpoint._LossScaler"),
        (0, _zero3, ValueError, r"must hold weights under `module`.*\(ZeRO 3\): DeepSpeed's zero_to_fp32.py"),
        (0, _foreign_module, ValueError, "module must hold sequential.LAYER.NAME, got transformer.wte.weight"),
        (0, lambda step: (step / "mp_rank_00_model_states.pt").write_bytes(b"PK"), ValueError, "_states.pt must"),
        (1, lambda step: (step / "layer_03-model_01-model_states.pt").unlink(), ValueError,
         "must hold every layer of 2 tensor-parallel ranks, got not all of 3"),
        (1, lambda step: _edit(step, "num_layers", 3), ValueError, r"layers must be \[0, 2, 3, 4, 6, 7\].*got \[0"),
        (1, lambda step: _edit(step, "no_weight_tying", False), ValueError, r"no_weight_tying False\), got .*6\]"),
        (1, lambda step: _edit(step, "intermediate_size", 96), ValueError,
         r"mlp.up.weight must be \[96, 32\] by its config, got \[128, 32\]"),
        (1, lambda step: _edit(step, "num_kv_heads", 2), ValueError,
         r"query_key_value must have 32 rows on each rank \(num_kv_heads 2\), got 48"),
        (1, lambda step: _edit(step, "pos_emb", "sinusoidal"), NotImplementedError, "pos_emb is not supported at sin"),
        (1, lambda step: _edit(step, "hiden_size", 1), ValueError, "hiden_size: unknown key; did you mean hidden_size"),
        (1, _unknown_tensor, ValueError, r"layer 5 must have known tensors only, got \['norm.gain'\]"),
        (1, _lost_tensor, ValueError, "must hold norm.bias, got norm.weight"),
        (1, _no_configs, FileNotFoundError, r"must hold the YAML files of the training \(or name them: --config"),
    ],
)  # fmt: skip
def test_damaged_folders(
    pipe: int, damage: Callable[[Path], None], error: type[Exception], message: str, tmp_path: Path
) -> None:
    step, _ = _small(tmp_path, pipe)
    damage(step)
    with pytest.raises(error, match=message):
        list(open_weights(tmp_path).tensors())


def test_configs_may_be_elsewhere(tmp_path: Path) -> None:
    step, _ = _small(tmp_path)
    (step / "configs").rename(tmp_path / "elsewhere")
    files = sorted((tmp_path / "elsewhere").iterdir())
    assert NeoXCheckpoint(step, files).config.parallel_residual
    assert open_weights(tmp_path, configs=files).config.rotary_pct == 0.25


@pytest.mark.parametrize(
    "fields",
    [
        {"activation": "gelu_tanh", "position_embedding": "alibi", "tie_embeddings": True},
        {"activation": "reglu", "norm": "rms_norm", "norm_bias": False, "num_kv_heads": 2, "sliding_window": 9},
        {"parallel_residual": True, "shared_norm": True, "rotary_pct": 0.5, "rope_theta": 5e3, "mlp_bias": False},
        {"position_embedding": "learned", "hidden_dropout": 0.1, "attention_dropout": 0.2},
        {"activation": "swiglu", "intermediate_size": 88, "init_method": "normal", "output_init_method": "wang_init"},
    ],
)  # fmt: skip
def test_every_model_key_is_written(fields: dict[str, Any]) -> None:
    """What `to_neox_config` says is read as the same model."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
    config: Any = configure(architecture="gpt_neox", **{**sizes, **fields})
    again = configure(**model_fields(Source(values=to_neox_config(config))))
    assert again == config.model_copy(update={"intermediate_size": config.ffn})


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"activation": "quick_gelu"}, "model.activation must be one of gelu, .* for GPT-NeoX, got quick_gelu"),
        ({"norm_bias": False}, "model.norm_bias must be true with layer_norm for GPT-NeoX, .*got false"),
        ({"norm": "rms_norm"}, "model.norm_bias must be false with rms_norm for GPT-NeoX, got true"),
        ({"architecture": "llama", "intermediate_size": 64, "qk_norm": True}, "model.qk_norm must be false .*got true"),
        ({"architecture": "llama", "intermediate_size": 64, "qkv_bias": True}, "model.out_bias must be true"),
        ({"architecture": "llama", "intermediate_size": 64, "head_dim": 16}, "model.head_dim must be 8 .*got 16"),
        ({"architecture": "deepseek", "intermediate_size": 64, "moe_intermediate_size": 8, "num_experts": 2,
          "experts_per_token": 1}, "architecture must be gpt_neox or llama for GPT-NeoX, got deepseek"),
    ],
)  # fmt: skip
def test_what_gpt_neox_has_not(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_layers": 1, "num_heads": 4}
    config = configure(**{"architecture": "gpt_neox", **sizes, **fields})
    with pytest.raises(ValueError, match=message):
        write(tmp_path, config, [])


@pytest.mark.parametrize("sizes, message", [
    ({"model_parallel_size": 3}, r"model_parallel_size must divide model.num_kv_heads \(4\), got 3"),
    ({"pipe_parallel_size": 2}, "pipe_parallel_size must be 0 or 1"),
])  # fmt: skip
def test_sizes_that_cannot_be_written(sizes: dict[str, int], message: str, tmp_path: Path) -> None:
    config = configure(architecture="gpt_neox", vocab_size=96, hidden_size=32, num_layers=1, num_heads=4)
    with pytest.raises(ValueError, match=message):
        write(tmp_path, config, [], **sizes)


def _slopes_there(heads: int) -> list[float]:
    """AliBi._get_slopes of GPT-NeoX, from its facts."""
    power = 2 ** math.floor(math.log2(heads))
    first = 2.0 ** (-8.0 / power)
    slopes = [first ** (i + 1) for i in range(power)]
    return slopes if power == heads else slopes + _slopes_there(2 * power)[::2][: heads - power]


@pytest.mark.parametrize("heads, ranks, pipe", [(4, 1, 1), (4, 2, 0), (6, 2, 1)])
def test_alibi_slopes_are_written_and_read(heads: int, ranks: int, pipe: int, tmp_path: Path) -> None:
    """A buffer that GPT-NeoX loads strictly, each rank its heads."""
    config: Any = configure(
        architecture="gpt_neox", vocab_size=96, hidden_size=8 * heads, num_layers=2, num_heads=heads,
        max_position_embeddings=64, position_embedding="alibi",
    )  # fmt: skip
    tensors = {name: torch.randn(t.shape) for name, t in shapes(config).items()}
    step = write(tmp_path, config, tensors.items(), pipe_parallel_size=pipe, model_parallel_size=ranks)
    name = "attention.alibi_embed.slopes"
    found = []
    for rank in range(ranks):
        if pipe:
            found.append(load_pickle(step / f"layer_03-model_{rank:02d}-model_states.pt")[name].clone())
        else:
            module = load_pickle(step / f"mp_rank_{rank:02d}_model_states.pt")["module"]
            found.append(module[f"sequential.3.{name}"])
    torch.testing.assert_close(torch.cat(found), torch.tensor(_slopes_there(heads)))
    again = {key: tensor.clone() for key, tensor in NeoXCheckpoint(step).tensors()}
    assert all(torch.equal(again[key], tensor) for key, tensor in tensors.items())
    if pipe:
        file = step / "layer_03-model_00-model_states.pt"
        layer = {key: tensor.clone() for key, tensor in load_pickle(file).items()}  # it maps the file
        torch.save({**layer, name: layer[name] * 2}, file)
        with pytest.raises(ValueError, match="slopes of layer 3 must be ALiBi's own"):
            NeoXCheckpoint(step)
