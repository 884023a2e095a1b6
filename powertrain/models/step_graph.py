"""A step of generation in a CUDA graph: the GPU does not wait for the Python code of the layers."""

import torch
from torch import Tensor
from torch.nn.modules import module

from powertrain.models.causal_lm import CausalLM, Unsharded
from powertrain.nn.cache import KVCache
from powertrain.runtime import tracing


class StepGraph:
    """logits [B, V] = graph(tokens [B] int64): `model(tokens[:, None], cache=cache)[:, -1]`, the same bits.

    The cache advances at each call. The logits are the same memory at each call. Parameters are read where they were
    when the graph was made. Made behind a step of the same shapes, which has compiled the kernels.
    Memory: what one step allocates.
    """

    def __init__(self, model: CausalLM, cache: KVCache, tokens: Tensor) -> None:
        self._tokens = tokens[:, None].clone()
        # alive as long as the graph, which holds addresses alone
        self._read = [*model.parameters(), *model.buffers(), cache]
        self._graph = torch.cuda.CUDAGraph()
        # other threads may go on with their own work on the GPU
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits: Tensor = model(self._tokens, cache=cache)[:, -1]

    def __call__(self, tokens: Tensor) -> Tensor:
        self._tokens.copy_(tokens[:, None])
        self._graph.replay()
        return self._logits


def why_not(model: CausalLM) -> str | None:
    """Why the model's steps are not captured; None: nothing speaks against it beforehand."""
    if type(model.sharding) is not Unsharded or not (model.is_first and model.is_last):
        return "the model is sharded over ranks"
    if module._global_forward_hooks or module._global_forward_pre_hooks:
        return "modules have global forward hooks, which a graph does not call"
    for name, part in model.named_modules():
        if part._forward_hooks or part._forward_pre_hooks:
            return f"{name or 'the model'} has forward hooks, which a graph does not call"
        if part._compiled_call_impl is not None:
            return f"{name or 'the model'} is compiled by torch.compile"
    if torch.is_autocast_enabled("cuda"):
        return "autocast's copies of parameters end with its context"
    if not all(x.is_cuda for x in model.parameters()):
        return "not all parameters are on a GPU"
    return "the stream is being captured already" if torch.cuda.is_current_stream_capturing() else None


def capture(model: CausalLM, cache: KVCache, tokens: Tensor) -> StepGraph | None:
    """The graph of the next steps; None where it is known beforehand (an event of the log) or found (a warning) that
    the model's code cannot be captured."""
    if reason := why_not(model):
        tracing.event("generate", f"generate: steps are not captured in a CUDA graph: {reason}")
        return None
    try:
        return StepGraph(model, cache, tokens)
    except RuntimeError as error:
        # code that waits for the GPU, as a user's module may
        reason = str(error).splitlines()[0]
        tracing.warn(f"generate: steps are not captured in a CUDA graph, so each waits for its Python code: {reason}")
        return None
