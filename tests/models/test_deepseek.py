"""DeepSeek: logits of transformers' DeepseekV3ForCausalLM, weights both ways, decoding from latents, balancing."""

import copy
import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from powertrain.models import build, configure
from powertrain.models.deepseek import Config, Model, from_hf_config, to_hf_config
from powertrain.models.huggingface import from_hf, to_hf
from powertrain.nn.lora import lora, without_lora
from powertrain.train.config.schema import RunConfig
from powertrain.train.data.packed import Sample
from powertrain.train.data.tokenizer import ByteTokenizer
from powertrain.train.ranks import Ranks
from powertrain.train.trainer import Trainer

SMALL: dict[str, Any] = {
    "architecture": "deepseek", "vocab_size": 97, "hidden_size": 48, "num_layers": 3, "num_heads": 4,
    "intermediate_size": 72, "moe_intermediate_size": 24, "num_experts": 8, "experts_per_token": 3,
    "num_shared_experts": 2, "first_dense_layers": 1, "num_groups": 4, "top_groups": 2, "routed_scaling_factor": 2.5,
    "q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "max_position_embeddings": 64, "init_std": 0.2,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip


def _model(device: torch.device | str = "cpu", **changes: Any) -> Model:
    model: Model = build(configure(**{**SMALL, **changes}), device=device)
    model.init_weights(1)
    for moe in model.moe_layers:
        moe.router.correction_bias.copy_(torch.linspace(-0.1, 0.1, SMALL["num_experts"]))
    return model


def _tokens(batch: int = 2, length: int = 17) -> Tensor:
    return torch.randint(0, SMALL["vocab_size"], (batch, length))


def _transformers(model: Model, dtype: torch.dtype = torch.float32) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(**to_hf_config(model.config), pad_token_id=None)
    theirs = transformers.DeepseekV3ForCausalLM(config).eval()
    theirs.set_experts_implementation("eager")  # the only one that takes float64
    with torch.no_grad():
        names = {name: p for name, p in theirs.state_dict().items()}
        for name, tensor in to_hf(model.config, model.state_dict().items()):
            _put(names, name, tensor)
    return theirs.to(dtype)


def _put(names: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    """Into transformers' modules, which pack the experts in memory."""
    if ".experts." not in name:
        names[name].copy_(tensor)
        return
    prefix, _, rest = name.partition("experts.")
    expert, kind, _ = rest.split(".")
    half = SMALL["moe_intermediate_size"]
    if kind == "down_proj":
        names[f"{prefix}experts.down_proj"][int(expert)].copy_(tensor)
    else:
        start = 0 if kind == "gate_proj" else half
        names[f"{prefix}experts.gate_up_proj"][int(expert), start : start + half].copy_(tensor)


@pytest.mark.parametrize(
    "changes",
    [{}, {"q_lora_rank": None, "attention_bias": True, "rope_interleaved": False}, {"rope_scaling": YARN}],
    ids=["v3", "no-q-latent", "yarn"],
)
def test_logits_of_transformers(changes: dict[str, Any]) -> None:
    model = _model(**changes).eval()
    tokens = _tokens()
    with torch.no_grad():
        exact = _transformers(model, torch.float64)(tokens).logits
        rough = _transformers(model)(tokens).logits
        ours = model(tokens)
    allowed = 2 * (rough - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= allowed


def test_safetensors_both_ways(tmp_path: Path) -> None:
    """A file written here is read by transformers, and one written by transformers is read here."""
    transformers = pytest.importorskip("transformers")
    model, tokens = _model().eval(), _tokens()
    tensors = {name: tensor.contiguous() for name, tensor in to_hf(model.config, model.state_dict().items())}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(model.config)))
    theirs = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path).eval()
    theirs.save_pretrained(tmp_path / "back")

    config = from_hf_config(json.loads((tmp_path / "back" / "config.json").read_text()))
    again: Model = build(config, device="cpu")
    again.load_state_dict(dict(from_hf(config, load_file(tmp_path / "back" / "model.safetensors"))))
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=1e-4)


def test_a_checkpoint_that_does_not_fit_is_named() -> None:
    model = _model()
    tensors = dict(to_hf(model.config, model.state_dict().items()))
    tensors["model.layers.3.embed_tokens.weight"] = torch.zeros(1)  # of the multi-token prediction layer
    assert dict(from_hf(model.config, tensors)).keys() == model.state_dict().keys()
    tensors["model.layers.0.mlp.gate_proj.weight_scale_inv"] = torch.zeros(1)
    del tensors["model.norm.weight"]
    with pytest.raises(
        ValueError, match=r"missing \['model.norm.weight'\], unknown \['model.layers.0.mlp.gate_proj.we"
    ):
        list(from_hf(model.config, tensors))


@pytest.mark.parametrize("key, value", [("hidden_act", "gelu"), ("model_type", "llama"), ("scoring_func", "softmax")])
def test_a_config_that_cannot_be_honoured_is_named(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"config.json: {key} must be .*, got '{value}'"):
        from_hf_config({**to_hf_config(_model().config), key: value})


def test_presets_are_what_transformers_calls_deepseek_v3() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = from_hf_config(transformers.DeepseekV3Config().to_dict())
    ours = configure(preset="deepseek-v3")
    different = {name for name, value in ours if value != getattr(theirs, name)}
    assert different == {"max_position_embeddings", "rope_scaling"}
    model = build(ours)
    assert round(model.num_parameters() / 1e9) == 671


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_groups": 3}, r"model.num_groups must divide num_experts \(8\)"),
        ({"top_groups": 5}, r"model.top_groups must be at most num_groups \(4\), got 5"),
        ({"experts_per_token": 5}, "model.experts_per_token must be at most 4, the experts of 2 groups, got 5"),
        ({"qk_rope_head_dim": 7}, "model.qk_rope_head_dim must be even, got 7"),
    ],
)
def test_configs_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**{**SMALL, **changes})


@pytest.mark.parametrize("q_lora_rank", [None, 32])
def test_decoding_from_latents_equals_the_whole_forward(q_lora_rank: int | None) -> None:
    """A prompt, then tokens one by one and two at once: the absorbed projections give the same logits."""
    model, tokens = _model(q_lora_rank=q_lora_rank).eval(), _tokens(2, 12)
    with torch.no_grad():
        expected = model(tokens)
        cache = model.new_cache(2, 16)
        assert cache.keys[0].shape == (2, 16, 1, 24 + 8) and cache.values[0] is None
        steps = [model(tokens[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 8), (8, 12))]
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-4, atol=1e-4)


class _Around(nn.Module):
    """As other libraries' adapters: `weight` is the inner layer's."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.inner, self.more = linear, nn.Linear(linear.in_features, linear.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.more(x)


@pytest.mark.parametrize("kind", ["lora", "dora", "around"])
def test_decoding_with_an_adapter(kind: str) -> None:
    """kv_up is multiplied into queries and results: its adapter was left out there, by generation alone."""
    model, tokens = _model().eval(), _tokens(2, 9)
    base = copy.deepcopy(model)
    if kind == "around":
        for layer in model.layers:
            layer.attention.kv_up = _Around(layer.attention.kv_up)
    else:
        lora(model, rank=4, dora=kind == "dora")
        for name, p in model.named_parameters():
            if "lora_B" in name or "lora_magnitude" in name:
                nn.init.normal_(p, std=0.1)

    def check(of: Model) -> None:
        cache = model.new_cache(2, 9)
        steps = [model(part, cache=cache) for part in tokens.split((5, 1, 3), 1)]
        torch.testing.assert_close(torch.cat(steps, 1), of(tokens), rtol=1e-4, atol=1e-4)

    with torch.no_grad():
        check(model)
        with without_lora(model):
            check(model if kind == "around" else base)


def test_packed_documents_do_not_see_each_other() -> None:
    model, tokens = _model().eval(), _tokens(1, 12)
    documents = torch.tensor([[0] * 5 + [1] * 7], dtype=torch.int32)
    positions = torch.tensor([[*range(5), *range(7)]])
    with torch.no_grad():
        packed = model(tokens, document_ids=documents, position_ids=positions)
        by_starts = model(
            tokens, document_starts=torch.tensor([0, 5, 12, 12], dtype=torch.int32), position_ids=positions
        )
        alone = torch.cat((model(tokens[:, :5]), model(tokens[:, 5:])), 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(by_starts, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_balancing_loss_reaches_the_routers(recompute: str) -> None:
    model, tokens = _model(balance_loss=10.0), _tokens()
    for layer in model.layers:
        layer.recompute = recompute
    model.train()
    labels = tokens.roll(-1, 1)
    loss = model(tokens, labels)
    loss.backward()
    plain = model.eval()(tokens, labels)
    balance = sum(m.balance_loss for m in model.moe_layers)
    torch.testing.assert_close(loss, plain + 10.0 * balance)
    weight = model.moe_layers[0].router.weight
    with_balance = weight.grad.clone()
    model.zero_grad()
    model(tokens, labels).backward()
    assert (with_balance - weight.grad).norm() > 0.1 * weight.grad.norm()


def test_profiler_ranges_need_not_recur() -> None:
    """FSDP's hooks around experts make one more in backward than in the forward behind an evaluation."""
    model, tokens = _model(), _tokens()
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        for _ in range(calls):
            with torch.profiler.record_function("a range"):
                pass

    layer = model.layers[1]
    layer.recompute = "selective"
    layer.mlp.experts.register_forward_pre_hook(hook)
    model.train()(tokens, tokens).backward()
    assert calls == 2


def test_balance_moves_the_bias_against_the_load() -> None:
    model = _model(bias_update_rate=0.5).train()
    before = [m.router.correction_bias.clone() for m in model.moe_layers]
    model(_tokens(), _tokens())
    loads = [m.load.clone() for m in model.moe_layers]
    assert all(load.sum() == 2 * 17 * 3 for load in loads)
    model.balance()
    for moe, load, bias in zip(model.moe_layers, loads, before, strict=True):
        torch.testing.assert_close(moe.router.correction_bias - bias, 0.5 * torch.sign(load.float().mean() - load))
        assert not moe.load.any()


def test_balance_evens_out_the_loads() -> None:
    """Aux-free balancing alone: a router that sends everything to few experts is corrected within some steps."""
    model = _model(bias_update_rate=0.02, num_groups=1, top_groups=1).train()
    tokens = _tokens(4, 64)

    def worst() -> float:
        with torch.no_grad():
            model(tokens, tokens)
        return max((m.load.max() / m.load.float().mean()).item() for m in model.moe_layers)

    first = worst()
    for _ in range(60):
        model.balance()
        last = worst()
    assert first > 1.5 and last < 1.2


def test_training_in_bfloat16_keeps_the_bias_in_float32() -> None:
    model = _model()
    bias = model.moe_layers[0].router.correction_bias.clone()
    model.to(torch.bfloat16)
    router = model.moe_layers[0].router
    assert router.weight.dtype is torch.bfloat16 and router.correction_bias.dtype is torch.float32
    assert torch.equal(router.correction_bias, bias)
    model.train()(_tokens(), _tokens()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_meta_build_then_empty_then_weights() -> None:
    model: Model = build(configure(**SMALL))
    assert next(model.parameters()).is_meta
    model.to_empty(device="cpu")
    model.init_weights(1)
    other: Model = build(configure(**SMALL), device="cpu")
    other.init_weights(1)
    for name, tensor in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert not any(m.load.any() for m in model.moe_layers)


class _Samples:
    """Documents of counting numbers, the same ones every time."""

    def __len__(self) -> int:
        return 64

    def sample(self, index: int) -> Any:
        tokens = (np.arange(17, dtype=np.int64) * (1 + index % 5) + index) % SMALL["vocab_size"]
        return Sample(tokens[:-1], tokens[1:], None)


def test_training_resumes_with_the_biases(tmp_path: Path) -> None:
    """Six steps at once, and three, a checkpoint, three: the same bits, routers' biases included."""

    def trainer(folder: str, steps: int) -> Trainer:
        config = RunConfig(
            model=configure(**SMALL, balance_loss=0.01),
            data={"train": "quickstart", "num_workers": 0},
            train={"steps": steps, "seq_length": 16, "micro_batch_size": 4, "precision": "fp32"},
            optimizer={"lr": 3e-3},
            schedule={"kind": "constant"},
            checkpoint={"folder": str(tmp_path / folder), "asynchronous": False},
            evaluation={"every": 0},
        )
        return Trainer(
            config,
            Ranks(torch.device("cpu")),
            SimpleNamespace(train=_Samples(), validation=None, test=None, tokenizer=ByteTokenizer(), identity=""),
        )

    whole = trainer("whole", 6)
    whole.fit()
    half = trainer("half", 3)
    half.fit()
    half.save()
    half.checkpoints.wait()
    rest = trainer("half", 6)
    assert rest.resume()
    rest.fit()
    expected, found = whole.model.state_dict(), rest.model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any(m.router.correction_bias.any() for m in whole.model.moe_layers)


def _sharded_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init{world}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    model: Model = build(configure(**SMALL, balance_loss=0.1, bias_update_rate=0.1))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    model.to_empty(device="cpu")
    model.init_weights(1)
    tokens = torch.randint(0, SMALL["vocab_size"], (4, 17), generator=torch.Generator().manual_seed(0))
    mine = tokens.chunk(world)[rank]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        loss = model(mine, mine.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.balance(dist.group.WORLD)
        dist.all_reduce(loss := loss.detach() / world)
    if rank == 0:
        biases = torch.stack([moe.router.correction_bias for moe in model.moe_layers])
        torch.save({"loss": loss, "biases": biases}, f"{folder}/{world}.pt")
    # what holds the group goes first: gloo's threads must not outlive the interpreter, which then aborts
    del model, optimizer, loss, module, mesh
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_sharded_ranks_equal_one(tmp_path: Path) -> None:
    """FSDP2 on gloo: the loss after three steps, and the biases, which follow the loads of both."""
    for world in (1, 2):
        torch.multiprocessing.spawn(_sharded_rank, (world, str(tmp_path)), nprocs=world)
    one, two = (torch.load(tmp_path / f"{world}.pt", weights_only=True) for world in (1, 2))
    torch.testing.assert_close(two["loss"], one["loss"], rtol=1e-5, atol=1e-5)
    assert torch.equal(two["biases"], one["biases"]) and one["biases"].any()
