"""A step of generation in a CUDA graph: the GPU does not wait for the Python code of the layers."""

import threading
from functools import cache as remembered

import torch
from torch import Tensor
from torch.nn.modules import module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from powertrain.models.causal_lm import CausalLM, Unsharded
from powertrain.nn.cache import KVCache
from powertrain.runtime import invalidation, tracing
from powertrain.runtime.hooks import has_own_forward

# PyTorch captures one graph at a time in a process
_capturing = threading.Lock()


@remembered
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Where graphs are captured: one for each device, as cuBLAS keeps memory for each stream that it has run on."""
    return torch.cuda.Stream(device)


class StepGraph:
    """logits [B, V] = graph(tokens [B] int64): `model(tokens[:, None], cache=cache)[:, -1]`, the same bits.

    The cache advances at each call. Parameters are read where they were when the graph was made. Made behind a step of
    the same shapes, which has compiled the kernels.
    Memory: what one step allocates.
    """

    def __init__(self, model: CausalLM, cache: KVCache, tokens: Tensor) -> None:
        self._tokens = tokens[:, None].clone()
        parts = list(model.modules())
        # alive as long as the graph, which holds addresses alone: with the attributes FP8 copies of weights, too
        self._read = [*model.parameters(), *model.buffers(), *(dict(vars(part)) for part in parts), cache]
        self._hooks = [*_GLOBAL_HOOKS, *(hooks for part in parts for hooks in _hooks(part))]
        self._epoch = invalidation.epoch
        self._graph = torch.cuda.CUDAGraph()
        device = tokens.device
        # the outer stream: torch.cuda.graph leaves its own the current one where the capture fails
        outer = torch.cuda.stream(torch.cuda.current_stream(device))
        # other threads may go on with their own work on the GPU
        graph = torch.cuda.graph(self._graph, stream=_stream(device), capture_error_mode="thread_local")
        with _capturing, outer, graph:
            self._logits: Tensor = model(self._tokens, cache=cache)[:, -1]

    def is_valid(self) -> bool:
        """Whether nothing has come since that a graph does not see: hooks, modes, settings such as `disable`."""
        return self._epoch is invalidation.epoch and not (any(self._hooks) or _why_not_now())

    def __call__(self, tokens: Tensor) -> Tensor:
        self._tokens.copy_(tokens[:, None])
        self._graph.replay()
        # the next call writes to the same memory, and a sampler may keep the logits
        return self._logits.clone()


_GLOBAL_HOOKS = module._global_forward_hooks, module._global_forward_pre_hooks


def _hooks(part: torch.nn.Module) -> tuple[object, object]:
    return part._forward_hooks, part._forward_pre_hooks


def _why_not_now() -> str | None:
    """Why a graph must not replace the Python code of a step under the modes that are active now, or None."""
    if torch.is_autocast_enabled("cuda"):
        return "autocast's copies of parameters end with its context"
    # a default device is a mode, too
    others = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    if others or torch._C._len_torch_dispatch_stack():
        return "a mode of PyTorch's is active, which sees no operators of a graph"
    return None


def _is_on_one_gpu(model: CausalLM) -> bool:
    return {x.device for x in model.parameters()} == {model.embed.weight.device} and model.embed.weight.is_cuda


def why_not(model: CausalLM) -> str | None:
    """Why the model's steps are not captured; None: nothing speaks against it beforehand."""
    if type(model.sharding) is not Unsharded or not (model.is_first and model.is_last):
        return "the model is sharded over ranks"
    if any(_GLOBAL_HOOKS):
        return "modules have global forward hooks, which a graph does not call"
    for name, part in model.named_modules():
        if any(_hooks(part)):
            return f"{name or 'the model'} has forward hooks, which a graph does not call"
        if part._compiled_call_impl is not None:
            return f"{name or 'the model'} is compiled by torch.compile"
        if not has_own_forward(part):
            return f"{name or 'the model'} has a forward of its own, set on the instance, which a graph does not call"
    if reason := _why_not_now():
        return reason
    if not _is_on_one_gpu(model):
        return "not all parameters are on one GPU"
    return "the stream is being captured already" if torch.cuda.is_current_stream_capturing() else None


def capture(model: CausalLM, cache: KVCache, tokens: Tensor) -> StepGraph | None:
    """The graph of the next steps; None where it is known beforehand (an event of the log) or found (a warning) that
    the model's code cannot be captured."""
    if reason := why_not(model):
        text = f"generate: steps are not captured in a CUDA graph: {reason}"
        if tracing.first(text):
            tracing.event("generate", text)
        return None
    try:
        return StepGraph(model, cache, tokens)
    except RuntimeError as error:
        # code that waits for the GPU, as a user's module may; of two errors the second is that the capture has failed
        first = error.__context__ or error
        reason = (str(first).splitlines() or [type(first).__name__])[0]
        tracing.warn(f"generate: steps are not captured in a CUDA graph, so each waits for its Python code: {reason}")
        return None
