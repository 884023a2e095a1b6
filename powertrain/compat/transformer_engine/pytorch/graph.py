"""transformer_engine.pytorch.graph: modules captured as CUDA graphs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.common.recipe import Recipe
from powertrain.compat.transformer_engine.pytorch.quantization import Quantizing, quantizing_of, restored
from powertrain.ops.conversion import unsupported
from powertrain.quant.linear import FP8State
from powertrain.runtime import checks

__all__ = ["graph_pool_handle", "is_graph_capturing", "make_graphed_callables"]

_OP = "make_graphed_callables"
_DEPRECATED = {
    "fp8_enabled": "enabled", "fp8_calibrating": "calibrating", "fp8_recipe": "recipe",
    "fp8_group": "amax_reduction_group", "fp8_weight_caching": "cache_quantized_params",
}  # fmt: skip
# arguments that only their neutral value is taken of, and the nearest alternative
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "calibrating": (False, "recipe, with enabled=True"),
    "cache_quantized_params": (False, "weights are quantized in each replay"),
    "retain_graph_in_backward": (False, "one backward of each forward"),
    "_order": (None, "one capture of each module"),
    "_num_layers_per_chunk": (None, "one capture of each module"),
    "_reuse_graph_input_output_buffers": (False, "buffers of each graph"),
    "capture_time_hooks": (None, "pre_warmup_hook and post_warmup_hook"),
}


class _Capture:
    active = False


def is_graph_capturing() -> bool:
    """Whether `make_graphed_callables` is warming up or capturing."""
    return _Capture.active


def graph_pool_handle() -> Any:
    """torch.cuda.graph_pool_handle()."""
    return torch.cuda.graph_pool_handle()


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: Any = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    enabled: Any = None,
    calibrating: bool | None = None,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: Any = None,
    _num_layers_per_chunk: Any = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None,
    capture_time_hooks: Any = None,
) -> Any:
    """The modules, their forward and backward replayed as CUDA graphs by torch.cuda.make_graphed_callables.

        modules, sample_args   nn.Modules and a tuple of tensors each, or one module and its tuple
        sample_kwargs          a dictionary of tensors each, or one; a call then gives the same keywords
        enabled, recipe, amax_reduction_group
                               of which modules (a bool, or one each) products are FP8, and how: as of `autocast`,
                               inside which the replays belong. Delayed scales are updated when it begins, eagerly
        clone_param_grads_on_return
                               parameters' gradients are copies, not the graph's own buffers, which the next
                               replay overwrites
    The fp8_ arguments are the older names of others. FP8's largest magnitudes and scales, and the random states of
    CPU and GPU, are after it as before. A module in another mode (train, eval) than at capture runs eagerly.
    Raises ValueError and TypeError naming the argument, NotImplementedError for _order and its kin, calibrating,
    cache_quantized_params, retain_graph_in_backward and capture_time_hooks; RuntimeError without a GPU.
    """
    given = dict(locals())
    options = _renamed({name: given[name] for name in (*_DEPRECATED, *_DEPRECATED.values())})
    _refuse({**given, **options})
    is_one = not isinstance(modules, tuple)
    callables = (modules,) if is_one else modules
    args = (sample_args,) if is_one else tuple(sample_args)
    keywords = _each("sample_kwargs", {} if sample_kwargs is None else sample_kwargs, len(callables), dict)
    wanted = False if options["enabled"] is None else options["enabled"]
    quantized = _each("enabled", wanted, len(callables), bool)
    _check(callables, args)
    quantizing = quantizing_of(options["recipe"], options["amax_reduction_group"]) if any(quantized) else None
    inner = [
        _Call(module, tuple(kwargs), quantizing if is_fp8 else None)
        for module, kwargs, is_fp8 in zip(callables, keywords, quantized, strict=True)
    ]
    surfaces = tuple((*one, *kwargs.values()) for one, kwargs in zip(args, keywords, strict=True))
    with _capturing(callables, pre_warmup_hook, post_warmup_hook):
        graphed = torch.cuda.make_graphed_callables(
            tuple(inner), surfaces, num_warmup_iters, allow_unused_input, **({} if pool is None else {"pool": pool})
        )
    for module, call, replay in zip(callables, inner, graphed, strict=True):
        _replace(module, call, replay)
        if clone_param_grads_on_return:
            _copy_gradients(module)
    return callables[0] if is_one else callables


class _Call(nn.Module):
    """A module's eager forward under its autocast, keywords' values after the positional ones."""

    def __init__(self, module: nn.Module, keywords: tuple[str, ...], quantizing: Quantizing | None) -> None:
        super().__init__()
        self.module, self.keywords, self.quantizing = module, keywords, quantizing
        # not the module's call: that will be the replay
        self._eager = module.forward
        self.training = module.training

    def forward(self, *values: Tensor) -> Any:
        count = len(values) - len(self.keywords)
        with restored(self.quantizing):
            return self._eager(*values[:count], **dict(zip(self.keywords, values[count:], strict=True)))


def _replace(module: nn.Module, call: _Call, replay: Any) -> None:
    """The module's forward is the replay from now on, in the mode that it was captured in."""
    keywords, captured, eager = call.keywords, module.training, module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if module.training != captured:
            return eager(*args, **kwargs)
        if set(kwargs) != set(keywords):
            must = f"{type(module).__name__}: was captured with the keywords {sorted(keywords)}"
            raise TypeError(f"{must}, got {sorted(kwargs)}")
        return replay(*args, *(kwargs[name] for name in keywords))

    # as torch does with the forward of a module it has captured
    object.__setattr__(module, "forward", forward)


def _refuse(given: dict[str, Any]) -> None:
    for name, (neutral, nearest) in _UNSUPPORTED.items():
        if given[name] is not None and given[name] != neutral:
            unsupported(_OP, name, given[name], nearest)


def _check(callables: tuple[Any, ...], args: tuple[Any, ...]) -> None:
    checks.require(len(args) == len(callables), _OP, "sample_args", f"have {len(callables)} tuples", len(args))
    for module in callables:
        if not isinstance(module, nn.Module):
            raise TypeError(f"{_OP}: modules must be torch.nn.Modules, got {type(module).__name__}")
    if not torch.cuda.is_available():
        raise RuntimeError(f"{_OP}: CUDA graphs need a GPU, and there is none")


def _copy_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(Tensor.clone)


def _renamed(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their newer names."""
    options = {name: given[name] for name in _DEPRECATED.values()}
    for old, new in _DEPRECATED.items():
        if given[old] is not None:
            if given[new] is not None:
                raise ValueError(f"{_OP}: {old} is the older name of {new}; give one of them")
            options[new] = given[old]
    return options


def _each(name: str, value: Any, count: int, kind: type) -> tuple[Any, ...]:
    """A value for each module: those of a tuple, or one for all."""
    values: Sequence[Any] = value if isinstance(value, tuple) else (value,) * count
    checks.require(len(values) == count, _OP, name, f"be one, or a tuple of {count}", len(values))
    for one in values:
        if not isinstance(one, kind):
            raise TypeError(f"{_OP}: {name} must be of {kind.__name__}, got {type(one).__name__}")
    return tuple(values)


@contextmanager
def _capturing(
    modules: Sequence[nn.Module], before: Callable[[], Any] | None, after: Callable[[], Any] | None
) -> Iterator[None]:
    """FP8's buffers and the random states are restored, however many forwards are made inside."""
    states = [state for module in modules for state in module.modules() if isinstance(state, FP8State)]
    saved = [{name: buffer.clone() for name, buffer in state.named_buffers(recurse=False)} for state in states]
    random = torch.get_rng_state(), torch.cuda.get_rng_state()
    if before is not None:
        before()
    _Capture.active = True
    try:
        yield
    finally:
        _Capture.active = False
        torch.set_rng_state(random[0])
        torch.cuda.set_rng_state(random[1])
        for state, buffers in zip(states, saved, strict=True):
            for name, buffer in state.named_buffers(recurse=False):
                buffer.copy_(buffers[name]) if name in buffers else buffer.zero_()
    if after is not None:
        after()


__getattr__ = unknown(__name__)
