"""Tensor parallelism for any model's nn.Linear layers: chosen by name, without changes in the model's code.

    parallelize_linears(model, mesh["tensor"], {"q_proj": "columns", "k_proj": "columns", "v_proj": "columns",
                                                "o_proj": "rows"})
    parallelize_linears(LlamaForCausalLM.from_pretrained(...), mesh["tensor"], sequence_parallel=True)

Every rank calls the model with the same inputs, has the same outputs, and differentiates the same loss. Column-parallel
layers of one parent that get the same tensor share one all-gather, or one sum in backward.

With sequence_parallel the residual stream between "enter" and "leave" is [1, t, D], a rank's share of the tokens, to
which norms and dropout are applied. Attention must still see the number of sequences: it is called with a placeholder
of the whole shape [B, S, D] without storage, in place of which its column-parallel layers read the share itself.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from torch import Tensor, nn

from powertrain.nn.tensor_parallel.linear import (
    ColumnParallelLinear,
    Ranks,
    RowParallelLinear,
    all_reduce_grad,
    columns,
    name_layers,
    open_overlap,
    replicate,
)
from powertrain.nn.tensor_parallel.token_shards import even_rows, gather_tokens, split_tokens
from powertrain.parallel.overlap import Overlap
from powertrain.runtime import checks
from powertrain.runtime.fused_encoders import call_layers
from powertrain.runtime.hooks import take_hooks
from powertrain.runtime.positional import hinted

Role = Literal["columns", "rows", "heads", "tokens", "attention", "enter", "leave"]

_LLAMA: dict[str, Role] = {
    "layers.0": "enter", "input_layernorm": "tokens", "self_attn": "attention", "q_proj": "columns",
    "k_proj": "columns", "v_proj": "columns", "o_proj": "rows", "post_attention_layernorm": "tokens",
    "gate_proj": "columns", "up_proj": "columns", "down_proj": "rows", "norm": "leave",
}  # fmt: skip
# config.model_type of transformers -> its plan
PLANS: dict[str, dict[str, Role]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "q_norm": "heads", "k_norm": "heads"},
    "gpt_neox": {
        "layers.0": "enter", "input_layernorm": "tokens", "attention": "attention", "query_key_value": "columns",
        "dense": "rows", "post_attention_layernorm": "tokens", "dense_h_to_4h": "columns", "dense_4h_to_h": "rows",
        "final_layer_norm": "leave",
    },
}  # fmt: skip
_OP = "parallelize_linears"


@hinted
def parallelize_linears(
    model: nn.Module, ranks: Ranks, plan: Mapping[str, Role] | None = None, *, sequence_parallel: bool = False
) -> None:
    """Shard a model's linear layers over the ranks, in place; weights must be equal on all ranks before.

    ranks   one axis of a DeviceMesh, or an Overlap
    plan    the end of a module's dotted name -> its role; None: the plan of the model's config.model_type (PLANS)
        columns, rows   an nn.Linear whose features out (in) are sharded
        heads           weights that each rank uses on its own heads (a norm of queries or keys)
            with sequence_parallel, else nothing:
        tokens          weights that each rank uses on its own tokens (a norm of the residual stream)
        attention       takes hidden states [B, S, D] first, and reads their shape
        enter, leave    the module before which tokens are sharded, and the one before which they are gathered again
    sequence_parallel   shard the tokens between these layers too; B * S of them, at least as many as ranks. A layer
            recomputed in backward (activation checkpointing) must be recomputed before a forward of another shape
    The layers' weights become DTensors, Shard(0) and Shard(1), norms' Replicate; other layers stay unchanged.
    Dropout: without sequence_parallel all ranks must draw alike in the residual stream (one seed), with it apart.
    Raises ValueError naming the plan's entry, or the size that the ranks do not divide.
    """
    overlap, mesh = open_overlap(ranks)
    plan = _plan_of(model, overlap.size) if plan is None else plan
    stream = _Stream(overlap) if sequence_parallel else None
    groups: dict[str, list[_Columns]] = {}
    matched = _matched(model, plan)
    # all of them first: a model that is refused stays as it was
    for name, module, role in matched:
        if role in ("columns", "rows"):
            _check_linear(name, module, role, overlap.size)
    for name, module, role in matched:
        match role:
            case "columns" | "rows":
                sharded = _shard_linear(model, name, module, role, ranks=mesh, sequence_parallel=sequence_parallel)
                if isinstance(sharded, _Columns):
                    groups.setdefault(name.rpartition(".")[0], []).append(sharded)
                elif stream is not None:
                    sharded.register_forward_hook(_as_one_sequence)
            case "heads":
                _own_weights(module, mesh)
            case "tokens" if stream is not None:
                _own_weights(module, mesh)
            case "attention" if stream is not None:
                module.register_forward_pre_hook(stream.stand_in, with_kwargs=True)
            case "enter" if stream is not None:
                module.register_forward_pre_hook(stream.enter, with_kwargs=True, prepend=True)
            case "leave" if stream is not None:
                module.register_forward_pre_hook(stream.leave, prepend=True)
    for layers in groups.values():
        shared = _Shared(layers, stream)
        for layer in layers:
            layer.shared = shared
    call_layers(model)
    name_layers(model)


def _plan_of(model: nn.Module, size: int) -> dict[str, Role]:
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in PLANS:
        checks.fail(_OP, "plan", f"be given for a model whose config.model_type is none of {', '.join(PLANS)}", kind)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = getattr(config, name, None)
        checks.require(value is None or value % size == 0, _OP, "ranks", f"divide config.{name} ({value})", size)
    return PLANS[kind]


def _matched(model: nn.Module, plan: Mapping[str, Role]) -> list[tuple[str, nn.Module, Role]]:
    """(name, module, role) of every module that an entry of the plan names, in the model's order."""
    must = "be a dictionary of the ends of modules' names and their roles"
    checks.require(isinstance(plan, Mapping), _OP, "plan", must, checks.described(plan))
    for end, role in plan.items():
        checks.one_of(_OP, f"plan's {end}", role, get_args(Role))
    matched, unused = [], dict(plan)
    for name, module in model.named_modules():
        for end, role in plan.items():
            if name == end or name.endswith(f".{end}"):
                matched.append((name, module, role))
                unused.pop(end, None)
    checks.require(not unused, _OP, "plan", "name modules that the model has", ", ".join(unused))
    return matched


def _check_linear(name: str, module: nn.Module, role: Role, size: int) -> None:
    """Raise ValueError naming the plan's entry for a layer that cannot be sharded over `size` ranks."""
    # the sharded layer replaces this one: it would lose what a subclass adds, or the mask of a pruned weight
    if type(module) is not nn.Linear:
        checks.fail(_OP, f"plan's {name}", "be an nn.Linear to be sharded", type(module).__name__)
    is_parameter = isinstance(module.weight, nn.Parameter)
    checks.require(is_parameter, _OP, f"plan's {name}", "have a weight that is a parameter", "a computed one")
    features = "out_features" if role == "columns" else "in_features"
    count = getattr(module, features)
    checks.require(count % size == 0, _OP, f"plan's {name}", f"have {features} that {size} ranks divide", count)


def _shard_linear(model: nn.Module, name: str, module: Any, role: Role, **options: Any) -> Any:
    kind = _Columns if role == "columns" else RowParallelLinear
    sharded = kind.from_linear(module, options.pop("ranks"), **options)
    take_hooks(sharded, module)
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, sharded)
    return sharded


class _Columns(ColumnParallelLinear):
    """One of several layers of a parent, computed together with the others."""

    shared: "_Shared"

    def forward(self, x: Tensor, shape: Any = None) -> Tensor:
        return self.shared.output_of(self, x)


class _Shared:
    """Layers called in sequence with the same x: the first call computes the results of all.

    If they are called with different tensors, each computes its own result from then on.
    """

    def __init__(self, layers: list[_Columns], stream: "_Stream | None") -> None:
        self.layers, self.stream = layers, stream
        self.is_shared = 1 < len(layers) <= 3
        self.x: Tensor | None = None
        self.outputs: dict[int, Tensor] = {}

    def output_of(self, layer: _Columns, x: Tensor) -> Tensor:
        if not self.is_shared:
            return self._columns(x, layer)[0]
        # by identity: equal values in another tensor may belong to another autograd graph
        if self.x is not x or id(layer) not in self.outputs:
            if self.outputs:
                self.is_shared, self.x, self.outputs = False, None, {}
                return self._columns(x, layer)[0]
            self.x = x
            self.outputs = dict(zip(map(id, self.layers), self._columns(x, *self.layers), strict=True))
        y = self.outputs.pop(id(layer))
        if not self.outputs:
            self.x = None
        return y

    def _columns(self, x: Tensor, *layers: _Columns) -> list[Tensor]:
        if self.stream is None:
            return columns(x, *layers)
        return columns(self.stream.share_of(x), *layers, shape=self.stream.shape)


class _Stream:
    """State of the tokens between "enter" and "leave": shape, this rank's shard, and the placeholder for attention."""

    def __init__(self, overlap: Overlap) -> None:
        self.overlap = overlap
        self.shape: tuple[int, int] = (0, 0)
        self.stand: Tensor | None = None
        self.share: Tensor | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """[B, S, D], the same on every rank -> [1, t, D]."""

        def split(hidden: Tensor) -> Tensor:
            self.shape = (hidden.shape[0], hidden.shape[1])
            least, got = self.overlap.size, self.shape[0] * self.shape[1]
            checks.require(got >= least, _OP, "tokens", f"be at least one for each of {least} ranks", got)
            return split_tokens(hidden.flatten(0, 1), self.overlap)[None]

        return _with_hidden(split, args, kwargs)

    def leave(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """[1, t, D] -> [B, S, D] on every rank."""
        rows = even_rows(self.shape[0] * self.shape[1], self.overlap.size)
        return (gather_tokens(args[0][0], self.overlap, rows).unflatten(0, self.shape), *args[1:])

    def stand_in(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def stand(hidden: Tensor) -> Tensor:
            self.share = hidden
            # one element expanded: the shape without its memory
            self.stand = hidden.new_empty(()).expand(*self.shape, hidden.shape[-1])
            return self.stand

        return _with_hidden(stand, args, kwargs)

    def share_of(self, x: Tensor) -> Tensor:
        """The tensor represented by x: this rank's share of the tokens."""
        if x is not self.stand:
            return x
        assert self.share is not None
        return self.share


def _with_hidden(change: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with the hidden states (the first argument, or one by name) replaced."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _as_one_sequence(module: nn.Module, args: Any, y: Tensor) -> Tensor:
    return y[None]


def _own_weights(module: nn.Module, mesh: Any) -> None:
    """Replicate a module's weights, applied to each rank's own tokens or heads: gradients are all-reduced."""
    replicate(module, mesh)
    module.register_forward_pre_hook(_show_local)
    module.register_forward_hook(_hide_local, always_call=True)


def _show_local(module: nn.Module, args: Any) -> None:
    # attribute lookup takes the instance's dict before nn.Module's parameters of that name
    module.__dict__.update({name: all_reduce_grad(p) for name, p in module.named_parameters(recurse=False)})


def _hide_local(module: nn.Module, args: Any, y: Any) -> None:
    for name, _ in module.named_parameters(recurse=False):
        module.__dict__.pop(name, None)
