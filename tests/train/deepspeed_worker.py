"""One rank that trains a small model with GPT-NeoX's names by DeepSpeed on the CPU, and saves its checkpoint.

python deepspeed_worker.py ENGINE FOLDER, under torchrun: FOLDER/global_step5, and FOLDER/live.pt with the masters and
moments of every parameter as DeepSpeed held them. The model takes GPT-NeoX's place: names and order of parameters are
what DeepSpeed sees of it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

HIDDEN, LAYERS, VOCAB, LENGTH, STEPS = 32, 2, 96, 8, 5
KINDS = ("exp_avg", "exp_avg_sq")
Live = dict[str, dict[str, Tensor]]


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, HIDDEN)

    @property
    def word_embeddings_weight(self) -> Tensor:
        return self.word_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.word_embeddings(tokens)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.query_key_value(x).chunk(3, -1)[2])


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.linear1(x).relu())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.post_attention_layernorm, self.mlp = nn.LayerNorm(HIDDEN), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.final_linear = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.final_linear(x)


class Wrapper(nn.Module):
    """Layers of pipe_parallel_size 0; those that GPT-NeoX makes of functions have no parameters."""

    def __init__(self) -> None:
        super().__init__()
        layers = [Embed(), nn.Identity(), *(Layer() for _ in range(LAYERS)), nn.Identity(), Norm(), Head()]
        self.sequential = nn.Sequential(*layers)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.sequential(tokens)


class Schedule:
    """Stands for AnnealingLR."""

    def __init__(self) -> None:
        self.num_iters = 0

    def step(self, *_: Any) -> None:
        self.num_iters += 1

    def get_lr(self) -> list[float]:
        return [1e-3]

    def state_dict(self) -> dict[str, Any]:
        return {"start_lr": 1e-3, "min_lr": 0.0, "warmup_iter": 0.0, "end_iter": 100, "decay_style": "constant",
                "num_iters": self.num_iters}  # fmt: skip


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
        yield tokens, tokens


def pipeline(tied: bool) -> PipelineModule:
    """Two stages."""

    def logits(embed: Embed, x: Tensor) -> Tensor:
        return x @ embed.word_embeddings.weight.T

    first = TiedLayerSpec("embed", Embed, tied_weight_attr="word_embeddings_weight") if tied else LayerSpec(Embed)
    last = LayerSpec(Head)
    if tied:
        last = TiedLayerSpec("embed", Embed, forward_fn=logits, tied_weight_attr="word_embeddings_weight")
    specs = [first, lambda x: x, *(LayerSpec(Layer) for _ in range(LAYERS)), lambda x: x, LayerSpec(Norm), last]
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=1)
    return PipelineModule(specs, topology=topology, loss_fn=loss_of, partition_method="type:Layer")


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """With and without weight decay, as GPT-NeoX's get_params_for_weight_decay_optimization."""
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                groups[isinstance(module, nn.LayerNorm) or name == "bias"]["params"].append(p)
    return groups


def options(precision: str, stage: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    if stage:
        config["zero_optimization"] = {"stage": stage}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
        if stage == 1:  # the bf16 engine
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def live_of(engine: Any, adam: torch.optim.Optimizer) -> Live:
    """Masters and moments as DeepSpeed holds them, whole."""
    optimizer, names = engine.optimizer, {p: n for n, p in engine.module.named_parameters()}
    live: Live = {}
    if hasattr(optimizer, "single_partition_of_fp32_groups"):  # ZeRO 1 and 2
        for flat, group in zip(
            optimizer.single_partition_of_fp32_groups, optimizer.round_robin_bit16_groups, strict=True
        ):
            for kind, part in {
                "master": flat.detach(),
                **{k: optimizer.optimizer.state[flat][k] for k in KINDS},
            }.items():
                parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, part.contiguous())
                for p, value in zip(group, optimizer.unflatten(torch.cat(parts), group), strict=True):
                    live.setdefault(names[p], {})[kind] = value.clone()
    elif hasattr(optimizer, "bf16_groups"):
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for p, name in names.items():
            live[name] = {kind: safe_get_full_optimizer_state(p, kind).clone() for kind in KINDS}
            live[name]["master"] = safe_get_full_fp32_param(p).clone()
    else:
        masters = {p: p for p in names}
        if hasattr(optimizer, "fp32_groups"):  # 16 bits without ZeRO
            for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                masters |= dict(zip(low, high, strict=True))
        for p, name in names.items():
            state = adam.state[masters[p]]
            live[name] = {"master": masters[p].detach().clone(), **{kind: state[kind].clone() for kind in KINDS}}
    return live


def main(name: str, folder: Path) -> None:
    precision, stage, *layout = name.split("-")
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = pipeline("tied" in layout) if layout else Wrapper()
    adam = torch.optim.AdamW(groups_of(model), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adam, lr_scheduler=Schedule(), config=options(precision, int(stage))
    )
    stream = batches(0 if layout else dist.get_rank())
    for _ in range(STEPS):
        if layout:
            engine.train_batch(data_iter=stream)
        else:
            tokens, _ = next(stream)
            engine.backward(loss_of(engine(tokens), tokens))
            engine.step()
    found: list[Any] = [None, None]
    dist.all_gather_object(found, live_of(engine, adam))
    engine.save_checkpoint(str(folder), tag=f"global_step{STEPS}", client_state={"iteration": STEPS})
    if dist.get_rank() == 0:
        torch.save({**found[0], **found[1]}, folder / "live.pt")
        keys = {
            "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 4, "seq_length": LENGTH,
            "max_position_embeddings": LENGTH, "make_vocab_size_divisible_by": 1, "pos_emb": "rotary",
            "no_weight_tying": "tied" not in layout, "pipe_parallel_size": 2 if layout else 0,
        }  # fmt: skip
        configs = folder / f"global_step{STEPS}" / "configs"
        configs.mkdir(exist_ok=True)
        (configs / "config.yml").write_text(yaml.safe_dump(keys))
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
