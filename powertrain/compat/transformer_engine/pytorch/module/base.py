"""Code shared by the modules with GEMMs: parameters, GEMMs by autocast's recipe, `_extra_state`."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.extra_state import Unreadable, delayed_buffers
from powertrain.compat.transformer_engine.pytorch.quantization import active, run_with
from powertrain.compat.userbuffers import destroy_ub, initialize_ub
from powertrain.ops.conversion import unsupported
from powertrain.ops.linear_cross_entropy import matmul_into
from powertrain.ops.norm import layer_norm, rms_norm
from powertrain.ops.shapes import as_rows
from powertrain.quant.linear import BUFFERS, FP8State
from powertrain.runtime import checks, tracing
from powertrain.runtime.dispatch import autocast_dtype, without_autocast
from powertrain.runtime.nodes import once_differentiable

__all__ = ["ProductModule", "destroy_ub", "initialize_ub"]

Init = Callable[[Tensor], Any]
# an empty state, as there for recipes without one
_NO_STATE = torch.empty(0, dtype=torch.uint8)


def default_init(weight: Tensor) -> None:
    """A normal distribution of standard deviation 0.023, as there."""
    nn.init.normal_(weight, 0.0, 0.023)


class ProductModule(nn.Module):
    """Base of the modules with products.

    `gemms` names the submodules that keep FP8's state, one a product. The state dict has the parameters, an empty
    `_extra_state`, and with DelayedScaling the buffers of `FP8State` under the submodules' names.
    """

    gemms: tuple[str, ...] = ()

    def __init__(
        self, *, name: str | None, tp_group: Any, tp_size: int, delay_wgrad_compute: bool,
        fuse_wgrad_accumulation: bool, get_rng_state_tracker: Callable[[], Any] | None,
        params_dtype: torch.dtype | None, device: torch.device | str,
    ) -> None:  # fmt: skip
        super().__init__()
        op = type(self).__name__
        # a group's size is a fact, tp_size a wish
        size = tp_size if tp_group is None else dist.get_world_size(tp_group)
        if size != 1:
            argument = "tp_size" if tp_group is None else "tp_group's size"
            unsupported(op, argument, size, "1, and powertrain.parallelize_linears on nn.Linear")
        # the weight's gradient would have to wait for a call that our backward does not know
        if delay_wgrad_compute:
            unsupported(op, "delay_wgrad_compute", True, "False: all gradients in one backward")
        self.name, self.tp_group, self.tp_size = name, tp_group, 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self._tracker = get_rng_state_tracker
        self._place: dict[str, Any] = {"device": device, "dtype": params_dtype}
        self._inits: dict[str, tuple[Init, str | None]] = {}
        for gemm in self.gemms:
            # a submodule holds the buffers, so that state dicts and .to() reach them
            self.add_module(gemm, FP8State())

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Takes no group, or one of a single rank."""
        if tp_group is not None and dist.get_world_size(tp_group) != 1:
            unsupported(type(self).__name__, "tp_group", tp_group, "powertrain.parallelize_linears on nn.Linear")
        self.tp_group = tp_group

    def _parameter(
        self, name: str, shape: tuple[int, ...], init: Init, tracker_name: str | None = "model-parallel-rng"
    ) -> None:
        """tracker_name: the random state of the tracker that `init` draws from; None: the usual one."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape, **self._place)))
        self._inits[name] = (init, tracker_name)

    @torch.no_grad()
    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize all parameters; not those on the meta device, or with defer_init."""
        for name, (init, tracker_name) in self._inits.items():
            parameter = getattr(self, name)
            if defer_init or parameter.is_meta:
                continue
            # generators by name: ranks of tensor parallelism initialize different shards
            drawn = self._tracker is not None and tracker_name is not None
            with self._tracker().fork(tracker_name) if drawn else nullcontext():  # type: ignore[misc]
                init(parameter)

    def _input(self, inp: Tensor, weight: Tensor) -> Tensor:
        """The input in the dtype of the products, whose last dim is that of the weight."""
        if inp.shape[-1:] != weight.shape[-1:]:
            checks.fail(type(self).__name__, "inp", f"have a last dim of {weight.shape[-1]}", list(inp.shape))
        x = in_autocast(inp)
        # TransformerEngine asserts the same: a silent cast would hide an unwrapped module
        if x is inp and inp.dtype is not weight.dtype and not is_autocast(inp):
            must = f"have the parameters' dtype {checks.name(weight.dtype)} outside of torch.autocast"
            checks.fail(type(self).__name__, "inp", must, checks.name(inp.dtype))
        return x

    def _product(
        self, gemm: str, x: Tensor, weight: Tensor, bias: Tensor | None, is_first_microbatch: bool | None
    ) -> Tensor:
        """x Wᵀ + b in FP8 under `autocast`, else in x's dtype."""
        # Megatron keeps main_grad on the parameter; without the flag the ordinary gradient is wanted
        main_grad = getattr(weight, "main_grad", None) if self.fuse_wgrad_accumulation else None
        quantizing = active()
        if quantizing is None:
            if main_grad is None:
                return F.linear(x, weight, bias)
            return _Accumulating.apply(x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype), main_grad)
        state = self.get_submodule(gemm)
        assert isinstance(state, FP8State)
        run_with(state, quantizing, x.device)
        # micro-batches of one step share the quantized weight only if the caller says which is the first
        state.shares = is_first_microbatch is not None
        if is_first_microbatch is not False:
            # the first micro-batch quantizes anew, for the optimizer has moved the weight
            state.copies = None
        return state.product(x, weight, bias, main_grad)

    def get_extra_state(self) -> Tensor:
        """Empty, as there for recipes without state: delayed scaling's tensors are buffers."""
        return _NO_STATE.clone()

    def set_extra_state(self, state: Any) -> None:
        """Read before, by `_load_from_state_dict`."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key = f"{prefix}_extra_state"
        # checkpoints of other libraries have no such key, and strict loading must pass
        is_missing = key not in state_dict
        state_dict.setdefault(key, _NO_STATE)
        for gemm in self.gemms:
            # delayed scales of the checkpoint are of its last step and are updated once, at the first run
            self.get_submodule(gemm).__dict__["is_loaded"] = f"{prefix}{gemm}.fp8_scale" in state_dict
        try:
            for gemm, buffers in zip(self.gemms, delayed_buffers(state_dict[key], len(self.gemms)), strict=False):
                state_dict.update({f"{prefix}{gemm}.{name}": tensor for name, tensor in buffers.items()})
        except Unreadable as error:
            # a warning: the weights are right, only the first step's scales differ
            tracing.warn(f"{key} of the checkpoint is ignored: {error}; delayed scaling starts with an empty history")
        self._expect_buffers(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if is_missing:
            del state_dict[key]

    def _expect_buffers(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Delayed scaling's buffers of a checkpoint, which a module that has not run with it yet has not."""
        device = next(self.parameters()).device
        for gemm in self.gemms:
            for name in BUFFERS:
                if (value := state_dict.get(f"{prefix}{gemm}.{name}")) is not None:
                    # registered before loading: load_state_dict fills what exists
                    buffer = torch.zeros(value.shape, dtype=torch.float32, device=device)
                    self.get_submodule(gemm).register_buffer(name, buffer)


class Norm(ProductModule):
    """A module that begins with a norm: parameters layer_norm_weight and, of a LayerNorm, layer_norm_bias."""

    layer_norm_weight: Tensor
    layer_norm_bias: Tensor | None

    def _norm_parameters(self, size: int, eps: float, normalization: str, zero_centered_gamma: bool) -> None:
        checks.one_of(type(self).__name__, "normalization", normalization, ("LayerNorm", "RMSNorm"))
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        # stored as w - 1
        first = nn.init.zeros_ if zero_centered_gamma else nn.init.ones_
        self._parameter("layer_norm_weight", (size,), first, None)
        if normalization == "LayerNorm":
            self._parameter("layer_norm_bias", (size,), nn.init.zeros_, None)
        else:
            self.layer_norm_bias = None

    def _norm(self, x: Tensor) -> Tensor:
        options: dict[str, Any] = {"eps": self.eps, "zero_centered": self.zero_centered_gamma}
        norm = rms_norm if self.normalization == "RMSNorm" else layer_norm
        y = norm(x, self.layer_norm_weight, self.layer_norm_bias, **options)
        assert isinstance(y, Tensor)
        return y


def is_autocast(x: Tensor) -> bool:
    """Whether torch.autocast casts x, or has cast it."""
    return autocast_dtype(x) is not None


def in_autocast(x: Tensor) -> Tensor:
    """x in the dtype of torch.autocast; itself outside of it."""
    return x.to(autocast_dtype(x) or x.dtype)


def results(output: Tensor, *more: tuple[bool, Any]) -> Any:
    """The output, and those of the others that are asked for: alone, or as a tuple."""
    others = tuple(value for wanted, value in more if wanted)
    return (output, *others) if others else output


class _Accumulating(torch.autograd.Function):
    """x Wᵀ + b; the weight's gradient is added to main_grad, in its dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = main_grad
        with without_autocast(x.device):
            return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable("fuse_wgrad_accumulation", "without it the layer can be differentiated twice")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_dx, need_dw, need_db, _ = ctx.needs_input_grad
        with without_autocast(dy.device):
            dx = dy @ weight if need_dx else None
            if need_dw:
                # added in place and in main_grad's dtype: float32 sums over micro-batches
                matmul_into(as_rows(dy).T, as_rows(x), ctx.main_grad, add=True)
            # None for the weight: its gradient is in main_grad
            return dx, None, as_rows(dy).sum(0) if need_db else None, None


__getattr__ = unknown(__name__)
