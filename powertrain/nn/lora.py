"""Low-rank adapters for the linear layers of any model: call `lora(model, rank=16)`, train, call `merge_lora(model)`.

Sources: Hu et al., arXiv:2106.09685 (LoRA); Kalajdzievski, arXiv:2312.03732 (rsLoRA); Liu et al., arXiv:2402.09353
(DoRA).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.ops.lora_linear import adapted_norm, add_adapter, few_tokens, lora_linear
from powertrain.quant.linear import FP8Linear, HasFP8State
from powertrain.runtime import checks
from powertrain.runtime.fused_encoders import call_layers, fuse_again
from powertrain.runtime.hooks import has_own_forward, take_hooks
from powertrain.runtime.positional import hinted


class Adapted(nn.Module):
    """A linear layer with an adapter: `LoRALinear`, or one whose weight is sharded (nn/tensor_parallel/lora.py)."""

    scale: float
    dropout: float
    enabled: bool
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude: nn.Parameter | None

    @property
    def rank(self) -> int:
        return self.lora_A.shape[0]


class LoRALinear(HasFP8State, Adapted):
    """x [..., K] -> x weightᵀ + bias + scale (dropout(x) lora_Aᵀ) lora_Bᵀ, [..., N]; computed by `lora_linear`.

    weight, bias    of the layer that it replaces, the same parameters under the same names
    lora_A [r, K], lora_B [N, r], lora_magnitude [N] (DoRA, else None)   in weight's dtype and on its device
    enabled         False: the layer alone
    fp8             FP8 products of weight (`quantize_model`), the adapter's in x's dtype; None: `lora_linear`
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float, *, dropout: float = 0.0, dora: bool = False) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scale, self.dropout, self.enabled = scale, dropout, True
        self.lora_A = nn.Parameter(self.weight.new_empty(rank, self.in_features))
        self.lora_B = nn.Parameter(self.weight.new_empty(self.out_features, rank))
        self.lora_magnitude = nn.Parameter(self.weight.new_empty(self.out_features)) if dora else None
        self.fp8 = None
        self.train(linear.training)
        # on the meta device there is nothing to fill; see `lora`
        if not self.weight.is_meta:
            self.reset_adapter()

    @torch.no_grad()
    def reset_adapter(self, generator: torch.Generator | None = None) -> None:
        """Initialize the adapter so that the layer's output is unchanged: lora_B 0, lora_A as nn.Linear's weight."""
        bound = 1 / math.sqrt(self.in_features)
        self.lora_A.uniform_(-bound, bound, generator=generator)
        # one factor is 0 so that the product is, and the other is not, so that gradients flow
        self.lora_B.zero_()
        self.reset_magnitude()

    @torch.no_grad()
    def reset_magnitude(self) -> None:
        """Set `magnitude` to the row norms of weight + scale lora_B lora_A, after either was loaded without it."""
        if self.lora_magnitude is not None:
            self.lora_magnitude.copy_(adapted_norm(self.weight, self.lora_A, self.lora_B, self.scale))

    def forward(self, x: Tensor) -> Tensor:
        # the magnitude too is the adapter's
        if not self.enabled:
            return self._frozen(x, self.bias)
        dropped = F.dropout(x, self.dropout) if self.dropout and self.training else None
        # with few tokens lora_linear would call no kernel of ours: its checks alone cost time of the host
        if self.fp8 is not None or few_tokens(x, self.weight):
            return add_adapter(
                self._frozen(x, None), self.weight, self.lora_A, self.lora_B, x if dropped is None else dropped,
                scale=self.scale, bias=self.bias, magnitude=self.lora_magnitude,
            )  # fmt: skip
        return lora_linear(
            x, self.weight, self.lora_A, self.lora_B, scale=self.scale, bias=self.bias, magnitude=self.lora_magnitude,
            x_adapter=dropped,
        )  # fmt: skip

    def _frozen(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.fp8 is None:
            return F.linear(x, self.weight, bias)
        return self.fp8.product(x, self.weight, bias, None)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """[N, K]: the weight of a plain layer that computes the same, in weight's dtype."""
        return merged(self.weight, self.lora_A, self.lora_B, self.scale, self.lora_magnitude)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, scale={self.scale:g}, dora={self.lora_magnitude is not None}"


@torch.no_grad()
def merged(weight: Tensor, A: Tensor, B: Tensor, scale: float, magnitude: Tensor | None) -> Tensor:
    """weight + scale B A, with rows of norm `magnitude` if that is given; computed in float32 or wider."""
    # in 16 bits the small product would be rounded before the weight is
    acc = torch.float64 if weight.dtype is torch.float64 else torch.float32
    whole = torch.addmm(weight.to(acc), B.to(acc), A.to(acc), alpha=scale)
    if magnitude is not None:
        # at least what `adapted_norm` gives for a row of zeros, which stays one
        norm = whole.norm(dim=1).clamp(min=math.sqrt(torch.finfo(acc).tiny))
        whole *= (magnitude.to(acc) / norm)[:, None]
    return whole.to(weight.dtype)


@hinted
def lora(
    model: nn.Module,
    *,
    rank: int = 16,
    alpha: float = 32.0,
    targets: Sequence[str] | Literal["all-linear"] = "all-linear",
    dropout: float = 0.0,
    rslora: bool = False,
    dora: bool = False,
) -> nn.Module:
    """Add an adapter to each linear layer of `model` that `targets` names, in place, and freeze everything else.

    rank, alpha   the adapter's product is multiplied by alpha / rank
    targets       ends of module names ("q_proj", "attention.qkv"), as PEFT takes them; "all-linear": every nn.Linear
                  but the model's head: `head`, `lm_head`, `embed_out`, `score` or `classifier`, the layer that
                  `model.get_output_embeddings()` gives, and all that share their weight with an embedding
    dropout       of the adapter's input, while training
    rslora        alpha / sqrt(rank) instead
    dora          a trained magnitude for every output
    The model's outputs are the same until the adapters are trained. The new parameters are MODULE.lora_A,
    MODULE.lora_B and MODULE.lora_magnitude; those of the model keep their names. On the meta device adapters are
    not initialized: `init_weights` of our models does it, for others `reset_adapter` of each layer.
    Returns the model. Raises ValueError naming the argument: targets that name no layer, or a layer of another kind,
    such as one in FP8 (call `quantize_model` after it) or whose forward was set on the instance.
    Memory: rank (K + N) parameters for a layer [N, K], with gradients and optimizer states for them alone.
    """
    checks.require(rank > 0, "lora", "rank", "be above 0", rank)
    checks.require(len(targets) > 0, "lora", "targets", "name at least one layer", "none")
    checks.require(0 <= dropout < 1, "lora", "dropout", "be in [0, 1)", dropout)
    checks.require(abs(alpha) < math.inf, "lora", "alpha", "be finite", alpha)
    if isinstance(targets, str) and targets != "all-linear":
        checks.fail("lora", "targets", 'be a list of names, or "all-linear"', repr(targets))
    # before the model changes: an error leaves it as it was
    chosen = _targets(model, targets)
    # one that pruning or weight norm computes anew would be lost
    computed = [name for name, layer in chosen.items() if not isinstance(layer.weight, nn.Parameter)]
    checks.require(not computed, "lora", "targets", "name layers whose weight is a parameter", computed[:3])
    # adapters are in the weight's dtype
    stored = [f"{name}, {checks.name(m.weight.dtype)}" for name, m in chosen.items() if not _is_computed_in(m.weight)]
    must = "name layers whose weight is floating point, of 16 bits or more"
    checks.require(not stored, "lora", "targets", must, stored[:3])
    check_forwards("lora", "targets", chosen)
    # before adapters are put in, whose parameters are to be trained
    model.requires_grad_(False)
    scale = alpha / (math.sqrt(rank) if rslora else rank)
    exchange(model, {m: LoRALinear(m, rank, scale, dropout=dropout, dora=dora) for m in chosen.values()})
    return model


def _is_computed_in(weight: Tensor) -> bool:
    return weight.is_floating_point() and weight.dtype.itemsize >= 2


def check_forwards(op: str, argument: str, layers: Mapping[str, nn.Module]) -> None:
    """Refuse layers whose `forward` was set on the instance (as accelerate's hooks do): a replacement would lose it."""
    others = [name for name, layer in layers.items() if not has_own_forward(layer, FP8Linear)]
    must = "have no layer whose forward was set on the instance, by another library"
    checks.require(not others, op, argument, must, others[:3])


def exchange(model: nn.Module, layers: Mapping[nn.Module, nn.Module]) -> None:
    """Replace layers under every name that they have in the model (`named_modules` gives one), and move their hooks."""
    for before, layer in layers.items():
        take_hooks(layer, before)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in layers:
                setattr(parent, name, layers[child])
    call_layers(model)
    fuse_again(model)


_HEADS = ("head", "lm_head", "embed_out", "score", "classifier")


def _heads(model: Any) -> set[nn.Module]:
    """The output layers of a model: by name, by transformers' method, or by a weight that is an embedding's."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    given = getattr(model, "get_output_embeddings", lambda: None)()
    linears = [(name.rpartition(".")[2], m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    return {m for name, m in linears if name in _HEADS or m is given or id(m.weight) in embeddings}


def _targets(model: nn.Module, targets: Sequence[str] | str) -> dict[str, nn.Linear]:
    modules = dict(model.named_modules())
    # PEFT's have the layer inside, by this name: its matrices would get adapters of ours
    adapted = [n for n, module in modules.items() if isinstance(module, LoRALinear) or n.endswith(".base_layer")]
    checks.require(not adapted, "lora", "model", "have no adapters yet", adapted[:3])
    if isinstance(targets, str):
        # the few layers that FP8 leaves in 16 bits would be all
        quantized = [name for name, module in modules.items() if isinstance(module, FP8Linear)]
        must = "not be in FP8 yet (call quantize_model after lora; dequantize_model undoes it)"
        checks.require(not quantized, "lora", "model", must, quantized[:3])
        heads = _heads(model)
        # a model that is such a layer itself has no name under which another could stand
        found = {n: m for n, m in modules.items() if n and type(m) is nn.Linear and m not in heads}
        checks.require(bool(found), "lora", "model", "have an nn.Linear inside to adapt", type(model).__name__)
        return found
    chosen: dict[str, nn.Linear] = {}
    for target in targets:
        named = {name: m for name, m in modules.items() if name == target or name.endswith(f".{target}")}
        # for the message: names that could be meant
        linears = [name for name, module in modules.items() if type(module) is nn.Linear]
        checks.require(bool(named), "lora", "targets", f"name layers of the model, such as {linears[:8]}", repr(target))
        for name, module in named.items():
            if type(module) is not nn.Linear:
                checks.fail("lora", "targets", "name layers of type nn.Linear", f"{name}, {type(module).__name__}")
            chosen[name] = module
    return chosen


@hinted
def lora_layers(model: nn.Module) -> dict[str, Adapted]:
    """The adapted layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


@hinted
def merge_lora(model: nn.Module) -> nn.Module:
    """Replace every adapted layer of `model` by an nn.Linear with the merged weight, in place; returns the model."""
    merged_layers: dict[nn.Module, nn.Module] = {}
    checks.require(not isinstance(model, Adapted), "merge_lora", "model", "have layers inside", type(model).__name__)
    check_forwards("merge_lora", "model", lora_layers(model))
    for name, layer in lora_layers(model).items():
        if not isinstance(layer, LoRALinear):
            checks.fail("merge_lora", "model", "not be sharded over tensor ranks", f"{name}, {type(layer).__name__}")
        # on meta: its parameters are replaced in the next line
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain.weight, plain.bias = nn.Parameter(layer.merged_weight(), layer.weight.requires_grad), layer.bias
        merged_layers[layer] = plain.train(layer.training)
    exchange(model, merged_layers)
    return model


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """Context in which the model computes without its adapters: a reference model without a copy of the weights."""
    # only those that are on, so that the end does not switch others on
    layers = [layer for layer in lora_layers(model).values() if layer.enabled]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True
