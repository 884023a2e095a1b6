"""`quantize_model(model, recipe)`: make the linear layers of any model FP8, in place; `dequantize_model` undoes it."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from powertrain.quant.grouped import GroupedProducts, why_not_grouped
from powertrain.quant.kept import KeepsGates
from powertrain.quant.linear import FP8Linear, HasFP8State, TakesRecipe
from powertrain.quant.recipe import Recipe
from powertrain.runtime import checks
from powertrain.runtime.fused_encoders import call_layers, fuse_again
from powertrain.runtime.hooks import has_own_forward
from powertrain.runtime.positional import hinted
from powertrain.runtime.target import Target

# words that `keep` may have beside patterns
GROUPS = ("lm_head", "router", "first_block", "last_block", "fp8")
_HEADS = {"lm_head", "head", "embed_out", "output_projection"}
_ROUTERS = {"router", "gate"}
# how PEFT names a layer that it has wrapped, behind the layer's own name
_WRAPPED = re.compile(r"(\.base_layer|\.original_module|\.modules_to_save\.[^.]+)+$")
# N K / (N + K) of a weight [N, K] below which FP8 cannot win on sm_90, however many tokens there are: by the rates of
# cost.py its products save 6 N K (1/804 - 1/1458) / 1e12 seconds a token, and quantizing x and dy moves 6 (N + K)
# bytes a token at 2.4e12 a second. They meet at 747; a tenth less, as rates differ by that much between runs
LEAST_WIDTH = 670


@dataclass(frozen=True)
class Part:
    """One linear layer of a report: its name, and its recipe or the reason why it is not quantized."""

    name: str
    recipe: Recipe | None = None
    why: str = ""


@dataclass
class Report:
    """Layers that a function changed, `quantized`, and those it `left`, in the order of the model's modules.

    kept   gated MLPs that keep gate and up in FP8
    """

    quantized: list[Part] = field(default_factory=list)
    left: list[Part] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{part.name}: {part.recipe}" for part in self.quantized]
        lines += [f"{name}: keeps gate and up in FP8" for name in self.kept]
        return "\n".join(lines + [f"{part.name}: stays, {part.why}" for part in self.left])


@hinted
def quantize_model(
    model: nn.Module,
    recipe: Recipe,
    *,
    keep: Iterable[str] = ("lm_head", "router"),
    target: Target | None = None,
) -> Report:
    """Compute the products of a model's nn.Linear layers, and of experts, in FP8. In place; parameters are kept.

        model    any nn.Module, on any device, before or after `fully_shard`; before torch.compile
        recipe   `Tensor()`, `Row()` or `Block()` of powertrain.quant
        keep     layers that stay as they are: "lm_head" (output layers, and all that share their weight with an
                 embedding), "router" (of experts), "first_block" and "last_block" (of the longest nn.ModuleList), and
                 patterns of module names such as "*.down_proj". "fp8" holds no layer back: our gated MLPs
                 (powertrain.nn.GatedMLP) whose gate and up are quantized keep the results of these in FP8 for backward.
                 keep="fp8" alone adds that to the default
        target   the GPU for which layers are chosen; None: the GPU of the weights
    Returns a Report: which layers were quantized, which were left and why. `dequantize_model(model)` undoes it.

    A layer with an adapter (powertrain.lora) has its frozen weight's product in FP8, the adapter's in its own dtype.
    Our experts (`powertrain.nn.moe.Experts`), unless they are spread over ranks, compute by `Row()` or `Block()` in
    calls whose number of rows makes that faster by expectation (`powertrain explain fp8`), in 16 bits in others.
    Layers sharded over tensor ranks (`parallelize`, ColumnParallelLinear) compute by `Tensor()` with the current scale,
    `Row()` or `Block()` if they have sequence parallelism; their rows are sent in FP8.
    Also left: other classes derived from nn.Linear; PEFT's adapters, whose layers are named as without them in `keep`;
    layers whose forward was set on the instance; on a GPU, layers too narrow for FP8 to be faster; on a GPU without FP8
    products, all layers. On the CPU FP8 is emulated, for tests.
    The state dict does not change, except that delayed scaling adds its buffers (`FP8Linear`); one without them loads.
    Memory: activations are saved in one byte an element instead of two. A weight is quantized in every forward and, its
    transpose, in every backward; see `shared_weights`.
    Raises ValueError for an entry of keep that names no layer, and for a recipe or model that is none.
    """
    got = recipe.__name__ if isinstance(recipe, type) else repr(recipe)
    checks.require(isinstance(recipe, Recipe), "quantize_model", "recipe", "be Tensor(), Row() or Block()", got)
    checks.require(isinstance(model, nn.Module), "quantize_model", "model", "be an nn.Module", type(model).__name__)
    if keep == "fp8":
        keep = ("lm_head", "router", "fp8")
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    matched = set(GROUPS)
    report = Report()
    facts = _Facts(model)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | GroupedProducts):
            continue
        # first: an entry of keep may name a layer that is in FP8 already
        why = _kept(name, module, keep, facts, matched)
        if _is_quantized(module):
            why = "it is in FP8 already (dequantize_model makes it plain)"
        if why := why or _why_wrapped(name, module, facts) or _why_not(module, recipe, target):
            report.left.append(Part(name, why=why))
            continue
        if isinstance(module, GroupedProducts | TakesRecipe):
            module.fp8_recipe = recipe
        elif isinstance(module, HasFP8State):
            module.set_fp8(recipe)
        else:
            FP8Linear.convert(module, recipe)
        report.quantized.append(Part(name, recipe))
    if "fp8" in keep:
        _keep_gates(model, report)
    if unknown := [entry for entry in keep if entry not in matched]:
        _refuse(model, report, unknown)
    call_layers(model)
    return report


@hinted
def dequantize_model(model: nn.Module) -> None:
    """Undo `quantize_model`: every layer is what it was, with the weights it has now."""
    for module in list(model.modules()):
        _revert(module)
        if isinstance(module, KeepsGates):
            module.keeps_fp8 = False
    fuse_again(model)


def _refuse(model: nn.Module, report: Report, unknown: list[str]) -> None:
    """Restore the layers that were replaced, and raise ValueError for entries of keep that name no layer."""
    for part in report.quantized:
        _revert(model.get_submodule(part.name))
    for name in report.kept:
        model.get_submodule(name).keeps_fp8 = False  # type: ignore[assignment]
    must = f"name layers, or be of {', '.join(GROUPS)}"
    checks.fail("quantize_model", "keep", must, ", ".join(map(repr, unknown)))


def _keep_gates(model: nn.Module, report: Report) -> None:
    """Make gated MLPs whose gate and up are quantized save these in FP8 for backward."""
    for name, module in model.named_modules():
        halves: list[Any] = [getattr(module, half, None) for half in ("gate", "up")]
        if isinstance(module, KeepsGates) and all(map(_is_quantized, halves)):
            module.keeps_fp8 = True
            report.kept.append(name)
    if not report.kept:
        report.left.append(Part("gated MLPs", why="keep has 'fp8', but no gated MLP of ours has gate and up in FP8"))


def _is_quantized(module: nn.Module) -> bool:
    if isinstance(module, GroupedProducts | TakesRecipe):
        return module.fp8_recipe is not None
    return isinstance(module, FP8Linear) or (isinstance(module, HasFP8State) and module.fp8 is not None)


def _revert(module: nn.Module) -> None:
    if isinstance(module, FP8Linear):
        module.revert()
    elif isinstance(module, HasFP8State):
        module.set_fp8(None)
    elif isinstance(module, GroupedProducts | TakesRecipe):
        module.fp8_recipe = None


@contextmanager
def shared_weights(model: nn.Module) -> Iterator[None]:
    """Context of one optimizer step: each weight is quantized once, in its first forward, for all micro-batches.

    For gradient accumulation: nothing may change the weights inside. Costs two bytes an element of the weights while it
    lasts. Layers whose weights FSDP shards quantize each time, as those bytes would undo the sharding (with
    `fp8_all_gather` in each gather); so does compiled code, which cannot know which call is the first.
    Raises ValueError for a model that is no nn.Module.
    """
    checks.require(isinstance(model, nn.Module), "shared_weights", "model", "be an nn.Module", type(model).__name__)
    layers = [m for m in model.modules() if isinstance(m, FP8Linear) and not isinstance(m.weight, DTensor)]
    # those of a block around this one share until it ends
    layers = [m for m in layers if not m.shares]
    for layer in layers:
        layer.shares = True
    try:
        yield
    finally:
        for layer in layers:
            # one that was undone inside has neither
            if isinstance(layer, FP8Linear):
                layer.shares, layer.copies = False, None


class _Facts:
    """Properties of a model: tied weights, modules with experts, its blocks, its output layer."""

    def __init__(self, model: nn.Module) -> None:
        self.embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        names = {name for name, _ in model.named_modules()}
        self.with_experts = {name.rpartition(".")[0] for name in names if name.rpartition(".")[2] == "experts"}
        lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        none: tuple[str, Any] = ("", ())
        longest: tuple[str, Any] = max(lists, key=lambda pair: len(pair[1]), default=none)
        self.blocks, self.last = longest[0], len(longest[1]) - 1
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        # PEFT's wrapper has the layer inside
        self.head = set(head.modules()) if isinstance(head, nn.Module) else set()
        # its adapters stand beside the layer, each under one name of these
        self.adapted = {name.removesuffix(".base_layer") for name in names if name.endswith(".base_layer")}


def _kept(name: str, module: nn.Module, keep: tuple[str, ...], facts: _Facts, matched: set[str]) -> str | None:
    """Why `keep` excludes a layer, or None; all entries that match the layer are added to `matched`."""
    plain = _WRAPPED.sub("", name)
    parent, _, own = plain.rpartition(".")
    block = re.match(rf"{re.escape(facts.blocks)}\.(\d+)(\.|$)", name) if facts.blocks else None
    groups = {
        "lm_head": own in _HEADS or id(getattr(module, "weight", None)) in facts.embeddings or module in facts.head,
        "router": own in _ROUTERS and (own == "router" or parent in facts.with_experts),
        "first_block": block is not None and int(block[1]) == 0,
        "last_block": block is not None and int(block[1]) == facts.last,
    }
    fitting = [entry for entry in keep if groups.get(entry, False) or _fits(entry, name, plain)]
    matched.update(fitting)
    return f"keep has {fitting[0]!r}" if fitting else None


def _fits(entry: str, *names: str) -> bool:
    return any(fnmatchcase(name, entry) for name in names)


def _why_wrapped(name: str, module: nn.Module, facts: _Facts) -> str | None:
    """Why a layer that another library added or wrapped is not quantized, or None."""
    parents = [name[: dot.start()] for dot in re.finditer(r"\.", name)]
    if any(parent in facts.adapted and not name.startswith(f"{parent}.base_layer") for parent in parents):
        return "it is part of an adapter"
    # it would run as before: the method that is kept inside is nn.Linear's
    is_set = type(module) is nn.Linear and not has_own_forward(module, FP8Linear)
    return "its forward was set on the instance, by another library" if is_set else None


def _why_not(module: nn.Linear | GroupedProducts, recipe: Recipe, target: Target | None) -> str | None:
    """Why a layer is not quantized, or None."""
    if isinstance(module, GroupedProducts):
        device = next(module.parameters()).device
        if target is None and device.type == "cuda":
            target = Target.of(device)
        return why_not_grouped(module, recipe, target)
    size = (module.out_features, module.in_features)
    if isinstance(module, TakesRecipe):
        if why := module.why_not_fp8(recipe):
            return why
        size = module.own_size()
    elif type(module) is not nn.Linear and not isinstance(module, HasFP8State):
        # FSDP's own class for a layer that is sharded by itself among them
        return f"it is a {type(module).__name__}, not an nn.Linear"
    if not module.weight.is_floating_point() or module.weight.dtype.itemsize < 2:
        return f"its weight is {checks.name(module.weight.dtype)}"
    if target is None and module.weight.device.type == "cuda":
        target = Target.of(module.weight.device)
    return None if target is None else why_not_width(*size, target)


def why_not_width(N: int, K: int, target: Target) -> str | None:
    """Why a weight [N, K] is not quantized on `target`, or None."""
    if not target.has_fp8:
        return f"sm_{target.arch} has no FP8 products"
    width = N * K / max(1, N + K)
    if width < LEAST_WIDTH:
        return f"{N}x{K} is too narrow for FP8 to win: N K / (N + K) is {width:.0f}, less than {LEAST_WIDTH}"
    return None
