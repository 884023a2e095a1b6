"""The device mesh shape of a config, and settings that it does not support; needs no process group."""

import math
from typing import Any

from powertrain.models.config import as_yaml
from powertrain.models.parallelize import check_context, check_expert, check_pipeline, check_tensor
from powertrain.models.pipeline import layers_of_stages
from powertrain.train.config.schema import ParallelConfig, RunConfig


def mesh_shape(parallel: ParallelConfig, world_size: int) -> tuple[int, int, int, int, int]:
    """pipeline x replicate x shard x context x tensor of so many processes. Raises ValueError naming the keys."""
    replicate, shard, context, tensor = parallel.replicate, parallel.shard, parallel.context, parallel.tensor
    model = parallel.pipeline * context * tensor
    if parallel.strategy == "ddp":
        if shard > 1:
            raise ValueError(f"parallel.shard must be 1 with parallel.strategy ddp, got {shard}")
        shard = 1
        if replicate == 1:
            _check_divides({}, parallel, world_size)
            replicate = world_size // model
    elif shard == -1:
        _check_divides({"replicate": replicate}, parallel, world_size)
        shard = world_size // (replicate * model)
    if replicate * shard * model != world_size:
        raise ValueError(
            "parallel.pipeline * replicate * shard * context * tensor must be the number of processes, "
            f"{world_size}, got {parallel.pipeline} * {replicate} * {shard} * {context} * {tensor}"
        )
    return parallel.pipeline, replicate, shard, context, tensor


def _check_divides(outer: dict[str, int], parallel: ParallelConfig, world_size: int) -> None:
    """Raise ValueError naming the keys above 1 whose product does not divide the number of processes."""
    sizes = {"pipeline": parallel.pipeline, **outer, "context": parallel.context, "tensor": parallel.tensor}
    sizes = {f"parallel.{name}": size for name, size in sizes.items() if size > 1}
    if world_size % math.prod(sizes.values()):
        got = " * ".join(map(str, sizes.values()))
        raise ValueError(f"{' * '.join(sizes)} must divide the number of processes, {world_size}, got {got}")


def fewest_ranks(parallel: ParallelConfig) -> int:
    """The smallest number of processes whose mesh has these sizes."""
    shard = parallel.expert if parallel.shard == -1 else parallel.shard
    return parallel.pipeline * parallel.replicate * shard * parallel.context * parallel.tensor


def check_parallel(config: RunConfig, world_size: int) -> None:
    """Raise ValueError, naming the key, if so many processes cannot train this model as config.parallel says."""
    pipeline, _, shard, context, tensor = mesh_shape(config.parallel, world_size)
    if config.parallel.expert > 1:
        check_expert(config.model, config.parallel.expert, shard, tensor)
    _check_objective(config, world_size, context, tensor)
    if getattr(config.model, "has_gmlp", False):
        _check_gmlp(config, context)
    if config.train.batch_invariant:
        _check_batch_invariant(config, context, tensor)
    if pipeline > 1:
        _check_pipeline(config)
    elif config.parallel.virtual_stages > 1:
        raise ValueError(
            f"parallel.virtual_stages must be 1 without parallel.pipeline, got {config.parallel.virtual_stages}"
        )
    if tensor > 1:
        check_tensor(config.model, tensor)
    if context > 1:
        check_context(config.model, context)
        if config.train.seq_length < context:
            raise ValueError(
                f"parallel.context must be at most train.seq_length ({config.train.seq_length}), got {context}"
            )
        _check_documents(config, context, tensor)
    _check_tokens(config, context, tensor)


def _is_packed(config: RunConfig) -> bool:
    """Whether batches tell documents of different lengths apart."""
    return config.data.document_mask or config.train.objective == "sft"


def _check_documents(config: RunConfig, context: int, tensor: int) -> None:
    """Raise ValueError, naming the key, if attention needs whole documents and ranks cannot divide its heads."""
    model: Any = config.model
    packed = "data.document_mask" if config.data.document_mask else f"train.objective {config.train.objective}"
    heads, window = model.num_heads // tensor, getattr(model, "sliding_window", None)
    for key, is_there in (
        ("model.position_embedding alibi", getattr(model, "position_embedding", "") == "alibi"),
        (f"model.sliding_window {window}", window is not None),
    ):
        if _is_packed(config) and is_there and heads % context:
            of_rank = "model.num_heads" if tensor == 1 else "model.num_heads / parallel.tensor"
            raise ValueError(f"parallel.context must divide {of_rank} ({heads}) with {key} and {packed}, got {context}")


def _check_tokens(config: RunConfig, context: int, tensor: int) -> None:
    """Raise ValueError, naming the key, if a tensor rank may have no token of a micro-batch."""
    rows, length = config.train.micro_batch_size, config.train.seq_length
    # context ranks share each sequence evenly; documents, all of them together
    tokens = rows * length // context if _is_packed(config) else rows * (length // context)
    if tokens < tensor:
        per_rank = "" if context == 1 else f" of one of {context} context ranks"
        raise ValueError(
            f"parallel.tensor must be at most the tokens of a micro-batch{per_rank} ({tokens}; "
            f"train.micro_batch_size, train.seq_length), got {tensor}"
        )


def _check_pipeline(config: RunConfig) -> None:
    """Raise ValueError, or NotImplementedError, naming the key, for what pipeline stages cannot train."""
    parallel, train = config.parallel, config.train
    check_pipeline(config.model, parallel.pipeline)
    layers_of_stages(config.model, 1, parallel.pipeline * parallel.virtual_stages)
    micro_batches = train.gradient_accumulation_steps
    if micro_batches < parallel.pipeline or (parallel.virtual_stages > 1 and micro_batches % parallel.pipeline):
        raise ValueError(
            f"train.gradient_accumulation_steps must be at least parallel.pipeline ({parallel.pipeline}), and with "
            f"virtual_stages a multiple of it, got {micro_batches}"
        )
    for key, is_there in (
        (f"train.objective {train.objective}", train.objective not in ("pretrain", "sft")),
        # its scales are reduced over all ranks, layer by layer
        ("fp8.recipe tensor-delayed", config.fp8.recipe == "tensor-delayed"),
        # ranks judge a layer's readings together, and stages have different layers
        ("fp8.watch", config.fp8.watch > 0),
        ("first_block or last_block in fp8.keep", bool({"first_block", "last_block"} & set(config.fp8.keep))),
        ("evaluation.tasks", bool(config.evaluation.tasks)),
        (
            "documents of different lengths in parallel.context",
            parallel.context > 1 and _is_packed(config),
        ),
    ):
        if is_there:
            raise NotImplementedError(f"parallel.pipeline must be 1 with {key}, got {parallel.pipeline}")


def _check_batch_invariant(config: RunConfig, context: int, tensor: int) -> None:
    """Raise NotImplementedError, naming the key, for what has no order of sums that batches leave as it is."""
    model = config.model
    dropout = max(getattr(model, name, 0.0) for name in ("hidden_dropout", "attention_dropout"))
    for key, is_there in (
        (f"parallel.tensor {tensor}", tensor > 1),
        (f"parallel.context {context}", context > 1),
        (f"fp8.recipe {config.fp8.recipe}", config.fp8.recipe != "none"),
        (f"model.architecture {model.architecture}", model.architecture not in ("gpt_neox", "llama")),
        (f"dropout {dropout:g} in the model", dropout > 0),
        (f"model.num_experts {getattr(model, 'num_experts', 1)}", getattr(model, "num_experts", 1) > 1),
        ("sparse layers (model.layer_types)", getattr(model, "sparsity", None) is not None),
    ):
        if is_there:
            raise NotImplementedError(f"train.batch_invariant must be false with {key}, got true")


def _check_gmlp(config: RunConfig, context: int) -> None:
    """Raise NotImplementedError, naming the key, for runs in which gMLP layers cannot mix positions."""
    for key, value, wanted in (
        ("parallel.context", context, 1),
        ("train.objective", config.train.objective, "pretrain"),
        ("data.document_mask", config.data.document_mask, False),
        ("train.batch_invariant", config.train.batch_invariant, False),
    ):
        if value != wanted:
            must = f"must be {as_yaml(wanted)} with gmlp layers (model.layer_types)"
            raise NotImplementedError(f"{key} {must}, got {as_yaml(value)}")


def _check_objective(config: RunConfig, world_size: int, context: int, tensor: int) -> None:
    """Raise NotImplementedError, naming the key, for what training after pretraining does not do yet."""
    train, name = config.train, config.train.objective
    if name not in ("pretrain", "sft") and context > 1:
        raise NotImplementedError(f"parallel.context must be 1 for train.objective {name}, got {context}")
    model = config.model.architecture
    if train.lora is not None and tensor > 1 and model not in ("gpt_neox", "llama"):
        raise NotImplementedError(f"parallel.tensor must be 1 with train.lora and model {model}, got {tensor}")
    if train.lora is not None and train.lora.dora and world_size > 1:
        raise NotImplementedError(f"train.lora.dora must be false with several ranks, got true on {world_size}")
