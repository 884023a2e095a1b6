"""Static check of a run: shapes, memory, kernels and attention backend, for any GPU, without training.

One training step is taken on the meta device, which computes nothing and needs no GPU; kernels that it would launch are
recorded for the GPU asked about (runtime/recording.py), and the tensors that autograd saves are counted.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from powertrain.models import build
from powertrain.models.pipeline import largest_share
from powertrain.ops.attention.explain import Explanation, explain_attention
from powertrain.ops.linear_log_probs import Teacher, linear_log_probs
from powertrain.parallel.experts import record_experts
from powertrain.quant.recipe import Block, Row
from powertrain.runtime.recording import record
from powertrain.runtime.target import Target
from powertrain.train import fp8
from powertrain.train.config.schema import RunConfig
from powertrain.train.model_setup import add_trained_parts
from powertrain.train.objective import has_frozen_copy
from powertrain.train.optim import DTYPES, Optimizer, state_bytes

if TYPE_CHECKING:
    from powertrain.runtime.compile.service import Spec

# GB of the makers' data sheets; the longest name that a target's begins with counts
_MEMORY_GB = {
    "T4": 16, "TITAN RTX": 24, "RTX 2080": 8, "RTX 2080 Ti": 11, "Quadro RTX 8000": 48, "A100": 40, "A100 80GB": 80,
    "A800": 40, "A800 80GB": 80, "A30": 24, "A10": 24, "A10G": 24, "A16": 16, "A2": 16, "A40": 48, "RTX A4000": 16,
    "RTX A5000": 24, "RTX A6000": 48, "RTX 3060": 12, "RTX 3070": 8, "RTX 3080": 10, "RTX 3080 12GB": 12,
    "RTX 3080 Ti": 12, "RTX 3090": 24, "L4": 24, "L40": 48, "L20": 48, "RTX 6000 Ada": 48, "RTX 4060": 8,
    "RTX 4070": 12, "RTX 4070 Ti Super": 16, "RTX 4080": 16, "RTX 4090": 24, "H20": 96, "H100": 80, "H100 NVL": 94,
    "H800": 80, "H200": 141, "GH200": 96, "GH200 144GB": 144, "B200": 192, "GB200": 192, "B300": 288, "GB300": 288,
    "RTX 5070": 12, "RTX 5070 Ti": 16, "RTX 5080": 16, "RTX 5090": 32, "RTX PRO 6000 Blackwell": 96,
    "DGX Spark": 128, "GB10": 128,
}  # fmt: skip
_EXAMPLES = {
    75: "T4",
    80: "A100",
    86: "RTX 3090",
    89: "RTX 4090",
    90: "H100",
    100: "B200",
    103: "B300",
    120: "RTX 5090",
    121: "DGX Spark",
}


@dataclass(frozen=True)
class Memory:
    """An estimate of one GPU's memory in bytes, by purpose; `activations` by checkpointing mode.

    Of `parallel.tensor` ranks each has its share of all of them: of heads, MLP columns and, between those, of tokens.
    Of `parallel.context` ranks each has its share of the activations, and one layer's keys and values of all.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: dict[str, int]
    mode: str

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations[self.mode]


@dataclass(frozen=True)
class Group:
    """Parameters of the same role and shape: their name with the layer's number as *, shape, how many, elements."""

    name: str
    shape: tuple[int, ...]
    count: int
    elements: int


@dataclass
class Finding:
    """One GPU: its backends, and unsupported features (`problems`, which fail the lint)."""

    target: Target
    attention: Explanation | None
    kernels: "list[Spec]"
    memory_bytes: int | None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    groups: tuple[Group, ...]
    memory: Memory
    findings: tuple[Finding, ...]

    @property
    def parameters(self) -> int:
        return sum(group.elements for group in self.groups)

    @property
    def passed(self) -> bool:
        return not any(finding.problems for finding in self.findings)


def lint(config: RunConfig, targets: list[Target], *, world_size: int = 1) -> Report:
    """Everything that can be known of a run before it starts. Raises ValueError where the model refuses its config."""
    model = build(config.model)
    add_trained_parts(model, config)
    activations = _activations(config, model)
    share, gathered = config.parallel.tensor * config.parallel.context, _gathered_keys(config, model)
    shares = {mode: size // share + gathered for mode, size in activations.items()}
    memory = _memory(config, model, shares, world_size)
    findings = tuple(_finding(config, model, target, memory, world_size) for target in targets)
    return Report(tuple(_groups(model)), memory, findings)


def record_step(config: RunConfig, target: Target, *, world_size: int = 1, layers: int | None = None) -> "list[Spec]":
    """The kernels that one training step launches on `target`: a step on meta tensors, whose launches are recorded.

    world_size   above 1 the optimizer updates float32 weights, of which the model has 16-bit copies
    layers       build only so many; the layers of a dense model launch the same kernels
    """
    if layers is not None:
        config = _with_layers(config, layers)
    with record(target) as wanted:
        model = _model(config)
        optimizer = Optimizer(model, config.optimizer, config.train)
        _narrow(model, config)
        if world_size == 1 and config.train.gradient_accumulation_steps > 1:
            for p in model.parameters():
                # as the trainer does
                p.grad_dtype = torch.float32
        optimizer.scaled(_loss(model, config)).backward()
        if config.parallel.expert > 1:
            _record_experts(model, config)
        if world_size > 1:
            masters = _model(config)
            optimizer = Optimizer(masters, config.optimizer, config.train)
            for p in masters.parameters():
                p.grad = torch.empty_like(p)
        optimizer.step(config.optimizer.lr)
    return wanted.specs


def _record_experts(model: Any, config: RunConfig) -> None:
    tokens = config.train.micro_batch_size * config.train.seq_length
    for moe in model.moe_layers:
        gate_up, down, top_k = moe.experts.gate_up, moe.experts.down, moe.router.options["top_k"]
        rows = gate_up.new_empty((tokens * top_k, down.shape[1]))
        recipe = fp8.recipe_of(config.fp8)
        wire = recipe if config.fp8.wire == "fp8" and isinstance(recipe, Row | Block) else None
        record_experts(rows, gate_up, down, config.parallel.expert, wire)


def memory_of(target: Target) -> int | None:
    """Bytes of a card's memory, by its name; None: not known."""
    name = _EXAMPLES.get(target.arch, "") if target.name.startswith("sm_") else target.name
    # "H100 80GB HBM3" begins with H100; "H100 NVL", longer, has another size
    fitting = [known for known in _MEMORY_GB if name == known or name.startswith(f"{known} ")]
    return _MEMORY_GB[max(fitting, key=len)] * 10**9 if fitting else None


def _with_layers(config: RunConfig, layers: int) -> RunConfig:
    model = config.model.model_copy(update={"num_layers": min(layers, config.model.num_layers)})
    return config.model_copy(update={"model": model})


def _model(config: RunConfig) -> Any:
    model: Any = build(config.model).train()
    fp8.quantize_part(model, config.fp8, Target.of(torch.device("meta")))
    for block in model.layers:
        block.recompute = config.train.activation_checkpointing
    return model


def _narrow(model: nn.Module, config: RunConfig) -> None:
    model.to(DTYPES[config.train.precision])


def _loss(model: nn.Module, config: RunConfig) -> Tensor:
    objective = config.train.objective
    # a pair of answers, chosen and rejected, is two rows
    rows = config.train.micro_batch_size * (2 if objective in ("dpo", "reward") else 1)
    shape = (rows, config.train.seq_length)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    packed: dict[str, Tensor] = {}
    if config.data.document_mask or objective != "pretrain":
        starts = torch.empty(max(16, 2 * rows), dtype=torch.int32, device="meta")
        # as a batch gives them: sparse layers read the ids
        packed = {"document_ids": tokens.int(), "document_starts": starts, "position_ids": tokens}
    if objective in ("pretrain", "sft"):
        return model(tokens, tokens, z_loss=config.train.z_loss, **packed)
    return model(tokens, read=partial(_completion_loss, config, tokens), **packed)


def _completion_loss(config: RunConfig, labels: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A value whose kernels are those of the objective's log-probabilities, those of its reference among them."""
    objective, teacher, temperature = config.train.objective, None, 1.0
    if objective == "reward":
        return states.sum()
    if objective == "distill":
        teacher = Teacher(states.detach(), weight.detach(), beta=config.train.distill.beta)
        temperature = config.train.distill.temperature
    with torch.no_grad():
        # the reference's log-probabilities, which need no gradient
        linear_log_probs(states, weight, labels, bias=bias)
    found = linear_log_probs(
        states, weight, labels, bias=bias, entropy=objective in ("policy", "distill"), teacher=teacher,
        temperature=temperature,
    )  # fmt: skip
    return found.log_probs.sum() if found.divergence is None else found.divergence.sum()


def _groups(model: nn.Module) -> list[Group]:
    groups: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    for name, p in model.named_parameters():
        star = ".".join("*" if part.isdigit() else part for part in name.split("."))
        groups[star, tuple(p.shape)] += 1
    return [Group(name, shape, n, n * torch.Size(shape).numel()) for (name, shape), n in groups.items()]


def _activations(config: RunConfig, model: nn.Module) -> dict[str, int]:
    """Bytes kept for backward in each checkpointing mode; measured on a few layers, the rest are like the last.

    none        everything autograd saves
    selective   outputs of matrix products and of attention, and each layer's input; one layer while it is recomputed
    full        each layer's input; one layer while it is recomputed
    """
    # the difference between one layer more and one less is a layer of the last kind, without embedding, head and loss
    layers, measured = config.model.num_layers, _kinds_of_layers(model)
    some, more = (_saved(_with_layers(config, n)) for n in (measured, measured + 1))
    each = _Saved(more.everything - some.everything, more.products - some.products)
    everything = some.everything + (layers - measured) * each.everything
    products = some.products + (layers - measured) * each.products
    outside = max(everything - layers * each.everything, 0)
    # x and the residual
    inputs = layers * 2 * _stream_bytes(config)
    return {
        "none": everything,
        "selective": outside + inputs + products + max(each.everything - each.products, 0),
        "full": outside + inputs + each.everything,
    }


def _gathered_keys(config: RunConfig, model: nn.Module) -> int:
    """Bytes of the keys and values of all context ranks, with gradients in float32, while one attention needs them."""
    module = _first_attention(model)
    if config.parallel.context == 1 or module is None:
        return 0
    heads = getattr(module, "num_kv_heads", module.num_heads) // config.parallel.tensor
    tokens = config.train.micro_batch_size * config.train.seq_length
    return tokens * heads * sum(module.head_dims) * (DTYPES[config.train.precision].itemsize + 4)


def _first_attention(model: nn.Module) -> Any:
    return next((module for module in model.modules() if hasattr(module, "head_dims")), None)


@dataclass(frozen=True)
class _Saved:
    everything: int
    products: int


def _stream_bytes(config: RunConfig) -> int:
    tokens = config.train.micro_batch_size * config.train.seq_length
    return tokens * config.model.hidden_size * DTYPES[config.train.precision].itemsize


def _saved(config: RunConfig) -> _Saved:
    """Bytes that one forward saves, without weights: each storage once."""
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"activation_checkpointing": "none"})},
    )
    products = 0

    def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal products
        products += output.numel() * output.element_size()

    with record(Target.parse("sm_80")):
        model = _model(config)
        _narrow(model, config)
        # autograd saves the weights of products too; they are counted among the weights, not the activations
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        storages: dict[int, Any] = {}

        def keep(t: Tensor) -> Tensor:
            # by storage: several views of one tensor occupy its memory once
            storages.setdefault(t.untyped_storage()._cdata, t.untyped_storage())
            return t

        hooks = [m.register_forward_hook(count) for m in model.layers.modules() if isinstance(m, nn.Linear)]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = _loss(model, config)
        assert loss.requires_grad and hooks
    everything = sum(storage.nbytes() for key, storage in storages.items() if key not in weights)
    return _Saved(everything, products + config.model.num_layers * _stream_bytes(config))


def _memory(config: RunConfig, model: Any, activations: dict[str, int], world_size: int) -> Memory:
    """Memory of one rank. One process: 16-bit weights and fp32 masters; sharded: fp32 shards, gathered in 16 bits."""
    parallel, train = config.parallel, config.train
    share = largest_share(model, parallel.pipeline, parallel.virtual_stages)
    elements = sum(p.numel() for p in model.parameters()) * share / parallel.tensor
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) * share / parallel.tensor
    width = DTYPES[train.precision].itemsize
    ranks = max(world_size // parallel.tensor // parallel.pipeline, 1)
    shards = ranks // parallel.replicate if parallel.shard < 0 else parallel.shard * parallel.context
    shards = 1 if parallel.strategy == "ddp" else shards
    moments = state_bytes(config.optimizer)
    if world_size == 1:
        # an fp32 model is its own master
        master = 4 if width < 4 else 0
        # sums over micro-batches are float32, so that small ones are not lost in 16 bits
        gradient = 4 if train.gradient_accumulation_steps > 1 else width
        sizes = (elements * width, trained * gradient, trained * (master + moments))
    elif parallel.strategy == "ddp":
        sizes = (elements * (4 + (width if width < 4 else 0)), trained * 4, trained * moments)
    else:
        layers: Any = model.layers
        # with reshard_after_forward two layers are whole at once: one computes while the next is gathered
        layer = max(sum(p.numel() for p in block.parameters()) for block in layers) / parallel.tensor
        gathered = 2 * layer if parallel.reshard_after_forward else elements
        # between micro-batches FSDP2 keeps a rank's gradients whole, in the dtype that they are summed in
        kept = trained * DTYPES[train.reduce_dtype].itemsize if train.gradient_accumulation_steps > 1 else 0
        sizes = (elements * 4 / shards + gathered * width, trained * 4 / shards + kept, trained * moments / shards)
    weights, gradients, optimizer = (int(size) for size in sizes)
    # whole on every rank
    if has_frozen_copy(config):
        weights += int(elements * parallel.tensor * width)
    return Memory(weights, gradients, optimizer, activations, train.activation_checkpointing)


def _finding(config: RunConfig, model: nn.Module, target: Target, memory: Memory, world_size: int) -> Finding:
    kernels = record_step(config, target, world_size=world_size, layers=_kinds_of_layers(model))
    finding = Finding(target, explain_run_attention(config, model, target.name), kernels, memory_of(target))
    if config.train.precision == "bf16" and not target.has_bf16:
        finding.problems.append(f"{target.name} has no bfloat16 arithmetic: train.precision fp16 or fp32")
    if finding.attention is not None and finding.attention.chosen is None:
        finding.problems.append("no attention backend serves this model; the table below gives each one's needs")
    if finding.memory_bytes is None:
        finding.notes.append(f"the memory of {target.name} is not known, so whether the estimate fits is not checked")
    elif memory.total > finding.memory_bytes:
        fits = [mode for mode, size in memory.activations.items() if _total(memory, size) <= finding.memory_bytes]
        advice = f"train.activation_checkpointing {fits[0]} would fit" if fits else "shard over more GPUs"
        finding.problems.append(
            f"about {gib(memory.total)} are needed, {target.name} has {gib(finding.memory_bytes)}: {advice}"
        )
    if not target.has_tensor_core_dot:
        finding.notes.append(f"Triton reaches no tensor cores on sm_{target.arch}: PyTorch's own kernels come first")
    return finding


def _total(memory: Memory, activations: int) -> int:
    return memory.weights + memory.gradients + memory.optimizer + activations


def _kinds_of_layers(model: Any) -> int:
    """Number of layers up to the last one that differs from its predecessor (dense ones, then experts)."""
    shapes = [[tuple(p.shape) for p in layer.parameters()] for layer in model.layers]
    return max((i + 1 for i in range(len(shapes)) if i == 0 or shapes[i] != shapes[i - 1]), default=1)


def explain_run_attention(config: RunConfig, model: nn.Module, arch: str) -> Explanation | None:
    """Backend of the first attention, on a GPU by its name or arch, or on the "cpu"; None: there is no attention."""
    module = _first_attention(model)
    if module is None:
        return None
    (head_dim_qk, head_dim_v), tensor = module.head_dims, config.parallel.tensor
    kv_heads = getattr(module, "num_kv_heads", module.num_heads)
    arguments: dict[str, Any] = {"is_causal": True}
    if getattr(module, "window", (-1, -1)) != (-1, -1):
        arguments["window_size"] = module.window
    sparsity = getattr(module, "sparsity", None)
    if sparsity is not None:
        arguments["attn_bias"] = "bool"
    if getattr(module, "alibi", False):
        arguments["alibi_slopes"] = True
    if config.data.document_mask or config.train.objective != "pretrain":
        # documents are packed sequences, but not beside a mask
        arguments |= {"layout": "thd"} if sparsity is None else {"document_ids": True}
    # sparse layers drop out of the result
    if getattr(module, "dropout", 0.0) and sparsity is None:
        arguments["dropout_p"] = module.dropout
    return explain_attention(
        arch=arch, dtype=DTYPES[config.train.precision], head_dim_qk=head_dim_qk, head_dim_v=head_dim_v,
        num_heads=module.num_heads // tensor, num_kv_heads=kv_heads // tensor, batch=config.train.micro_batch_size,
        queries=config.train.seq_length, **arguments,
    )  # fmt: skip


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
