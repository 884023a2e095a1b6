"""FP8Linear: nn.Linear with its products in FP8; FP8State: the state that any layer keeps for them."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from powertrain.ops.fp8.current import new_states, repeated_share
from powertrain.ops.fp8.formulas import Copies
from powertrain.ops.fp8.linear import fp8_linear, quantized_weight
from powertrain.quant.gathered_weight import GatheredWeight
from powertrain.quant.recipe import Recipe, grad_format
from powertrain.quant.recipe import Tensor as TensorRecipe
from powertrain.runtime import checks
from powertrain.runtime.dispatch import in_functorch
from powertrain.runtime.hooks import has_own_forward

# of delayed scaling, float32. amax [3]: largest magnitudes of x, weight and dy since the last update;
# history [3, steps]: those of the steps before, the newest first; scale [3]: 0 where none is known yet
BUFFERS = ("fp8_amax", "fp8_amax_history", "fp8_scale")
# of current scaling by powers of two, [3, 4] int32: the last scales of x, weight and dy, and how often each has changed
# (ops/fp8/current.py). In no state dict: no result depends on it
LAST = "fp8_last"


class FP8State(nn.Module):
    """FP8 state of one linear layer: the recipe, buffers of delayed scaling, cached quantized copies of the weight.

    Delayed scaling has the buffers fp8_amax [3], fp8_amax_history [3, history] and fp8_scale [3]; a state dict without
    them loads too. They stay float32 whatever dtype the model is cast to. Largest magnitudes are recorded in training
    mode; a recomputed forward records the same ones. Current scaling by powers of two has the buffer fp8_last [3, 4],
    which is not saved.
    """

    recipe: Recipe
    fp8_amax: Tensor
    fp8_amax_history: Tensor
    fp8_scale: Tensor
    shares: bool = False  # its weight's copies are kept until they are dropped
    keeps: bool = False  # those of a frozen weight are kept until that changes
    copies: Copies | None = None
    # of the weight that `copies` are of: a weak reference, since another may come to its address, version and address
    _copied: tuple[Any, int, int] = (lambda: None, -1, -1)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy or pickle, without the cached quantized weight."""
        return {**{k: v for k, v in self.__dict__.items() if k != "_copied"}, "copies": None}

    def set_recipe(self, recipe: Recipe, device: torch.device) -> None:
        """Use `recipe` from now on. Delayed scaling gets its buffers, which keep their values; current scaling by
        powers of two gets a new `fp8_last`; others have none."""
        self.__dict__["recipe"] = recipe
        self.copies = None
        self._buffers.pop(LAST, None)
        # a buffer made inside a compiled graph would be its temporary; without one the results are the same
        if recipe.keeps_last and not torch.compiler.is_compiling():
            # an inference tensor could not be written in training
            with torch.inference_mode(False):
                self.register_buffer(LAST, new_states(3, device), persistent=False)
        if not (isinstance(recipe, TensorRecipe) and recipe.is_delayed):
            for name in BUFFERS:
                self._buffers.pop(name, None)
            return
        shapes = ((3,), (3, recipe.history), (3,))
        for name, shape in zip(BUFFERS, shapes, strict=True):
            before, now = self._buffers.get(name), torch.zeros(shape, dtype=torch.float32, device=device)
            if before is not None and not before.is_meta:
                known = before[..., : shape[-1]]  # the newest come first
                now[..., : known.shape[-1]] = known
            self.register_buffer(name, now)

    def repeats(self, role: int) -> Tensor | None:
        """Share of the quantizations of x (0), weight (1) or dy (2) that were repeated, as their scale differed from
        the last one: [1] float32 on the layer's device, or None if the recipe keeps no last scale."""
        last = getattr(self, LAST, None)
        return None if last is None else repeated_share(last[role])

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor | None) -> Tensor:
        """x Wᵀ + b by `fp8_linear` and the recipe."""
        recipe, is_delayed = self.recipe, self.recipe.is_delayed
        if not x.is_meta and any(buffer is not None and buffer.is_meta for buffer in self._buffers.values()):
            # a state dict without them has replaced the other tensors of the meta device (`assign=True`)
            self.set_recipe(recipe, x.device)
        if isinstance(weight, GatheredWeight):
            copies: Copies | None = self._gathered_copies(x, weight)
            weight = weight.stand_in()
        else:
            copies = self._shared_copies(x, weight)
        return fp8_linear(
            x, weight, bias, by=recipe.by, grad_format=grad_format(recipe),
            power_of_two=recipe.power_of_two, fast=recipe.fast, scales=self.fp8_scale if is_delayed else None,
            amaxes=self.fp8_amax if is_delayed and self.training else None, last=getattr(self, LAST, None),
            weight_copies=copies, main_grad=main_grad,
        )  # fmt: skip

    def _shared_copies(self, x: Tensor, weight: Tensor) -> Copies | None:
        # a transform's tensor has no address; FP8 products refuse it by name
        if torch.compiler.is_compiling() or in_functorch() or x.dtype is not weight.dtype:
            return None
        # an inference tensor has no version by which a change could be seen
        keeps = self.keeps and not weight.requires_grad and not weight.is_inference()
        if not self.shares and not keeps:
            return None
        if keeps and not self._are_of(weight):
            self.copies, self._copied = None, (ref(weight), weight._version, weight.data_ptr())
        if self.copies is None:
            # of a frozen weight by its own values: by delayed scales a resumed run would quantize it otherwise
            is_delayed = self.recipe.is_delayed and not keeps
            scale = self.fp8_scale[1:2] if is_delayed else None
            with torch.no_grad():
                self.copies = quantized_weight(
                    weight,
                    self.recipe.by,
                    power_of_two=self.recipe.power_of_two,
                    scale=scale,
                    last=getattr(self, LAST, None),
                )
                if is_delayed:
                    self._record_weight(self.copies)
        return self.copies

    def _are_of(self, weight: Tensor | None) -> bool:
        """Whether `copies` are of this weight, as it is now."""
        is_same = weight is not None and self._copied[0]() is weight
        return is_same and self._copied[1:] == (weight._version, weight.data_ptr())  # type: ignore[union-attr]

    def kept_copies(self) -> Copies | None:
        """Those of a frozen weight, if the next forward takes them: the weight has not changed."""
        return self.copies if self.keeps and self._are_of(self._copied[0]()) else None

    def _gathered_copies(self, x: Tensor, weight: GatheredWeight) -> Copies:
        autocast = torch.is_autocast_enabled(x.device.type)
        # the bytes of a frozen weight serve any dtype that autocast chooses
        if not (x.dtype is weight.dtype and not autocast) and not (weight.is_frozen and autocast):
            words = f"have the dtype of weights gathered in FP8, {checks.name(weight.dtype)}, without autocast"
            if weight.is_frozen:
                words = f"have the dtype of its frozen weight, {checks.name(weight.dtype)}"
            checks.fail("fp8_linear", "x", words, checks.name(x.dtype) + (" under autocast" if autocast else ""))
        copies = weight.copies()
        self._record_weight(copies)
        return copies

    @torch.no_grad()
    def _record_weight(self, copies: Copies) -> None:
        if self.recipe.is_delayed and self.training:
            amax = self.fp8_amax[1:2]
            amax.copy_(torch.maximum(amax, copies.amax))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "FP8State":
        before = {name: self._buffers[name] for name in (*BUFFERS, LAST) if name in self._buffers}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            now = self._buffers[name]
            assert buffer is not None and now is not None
            # a cast of the model is not one of its statistics; memory from the meta device holds none yet
            self._buffers[name] = (
                torch.zeros(buffer.shape, dtype=buffer.dtype, device=now.device)
                if buffer.is_meta
                else buffer.to(now.device)
            )
        self.copies = None
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # a checkpoint written before the layer was quantized has no statistics: 0, none known yet, is right
        missing = {name: b for name, b in self._buffers.items() if name in BUFFERS and prefix + name not in state_dict}
        state_dict.update({prefix + name: torch.zeros_like(b) for name, b in missing.items() if b is not None})
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name in missing:
            # the dictionary is the caller's
            del state_dict[prefix + name]


class HasFP8State(nn.Linear):
    """Base class of adapted linear layers: their frozen weight is multiplied by `fp8.product` if `fp8` is not None.

    The weight is frozen, so it is quantized once, and again after it changed (not where FSDP shards it: its copies
    would undo the sharding). Two bytes an element beside the weight's own. PyTorch does not count writes
    through `weight.data`: call `torch.autograd.graph.increment_version(weight)` after them.
    """

    fp8: FP8State | None

    def set_fp8(self, recipe: Recipe | None) -> None:
        """Use `recipe` from now on; None: no FP8."""
        self.fp8 = None
        if recipe is None:
            _unfreeze(self)
        else:
            self.fp8 = FP8State()
            self.fp8.set_recipe(recipe, self.weight.device)
            self.fp8.keeps = not isinstance(self.weight, DTensor)


def _unfreeze(layer: nn.Linear) -> None:
    """Replace a weight that is stored in FP8 (`keep_frozen`) by a plain parameter of its values."""
    if isinstance(layer.weight, GatheredWeight) and layer.weight.is_frozen:
        layer.weight = nn.Parameter(layer.weight.rounded(), requires_grad=False)


class TakesRecipe(nn.Linear):
    """Base class of sharded linear layers, which apply `fp8_recipe` in their own forward."""

    fp8_recipe: Recipe | None = None  # None: no FP8

    def why_not_fp8(self, recipe: Recipe) -> str | None:
        """Why the layer's GEMMs cannot use a recipe, or None."""
        raise NotImplementedError

    def own_size(self) -> tuple[int, int]:
        """Features out and in of this rank's part."""
        raise NotImplementedError


class FP8Linear(FP8State, nn.Linear):
    """x Wᵀ + b by `fp8_linear` and a recipe. Weight, bias and state dict are nn.Linear's, and `FP8State`'s buffers.

    `quantize_model` converts layers to this class, `dequantize_model` back; the class is not constructed directly.
    """

    gather: Any = None  # how FSDP gathers its weight in FP8 (powertrain/quant/wire.py); None: as it does others

    @staticmethod
    def convert(linear: nn.Linear, recipe: Recipe) -> None:
        """Make `linear` an FP8Linear, in place: parameters, hooks and references to it stay."""
        if has_own_forward(linear, FP8Linear):
            # nn.Linear's would run
            linear.__dict__.pop("forward", None)
        linear.__class__ = FP8Linear
        assert isinstance(linear, FP8Linear)
        linear.set_recipe(recipe, linear.weight.device)

    def revert(self) -> None:
        """Make this layer an nn.Linear again, in place; delayed scaling's buffers are dropped."""
        if self.gather is not None:
            self.gather.undo()
        _unfreeze(self)
        self.copies = None
        for name in ("recipe", "shares", "keeps", "copies", "_copied", "gather"):
            self.__dict__.pop(name, None)
        for name in (*BUFFERS, LAST):
            self._buffers.pop(name, None)
            self._non_persistent_buffers_set.discard(name)
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        # a forward that was set on the instance meanwhile keeps this one
        if not isinstance(self, FP8Linear):
            return F.linear(x, self.weight, self.bias)
        return self.product(x, self.weight, self.bias, getattr(self.weight, "main_grad", None))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.recipe}"
