"""A step of generation in a CUDA graph: the GPU does not wait for the Python code of the layers."""

import torch
from torch import Tensor

from powertrain.models.causal_lm import CausalLM, Unsharded
from powertrain.nn.cache import KVCache
from powertrain.runtime import cuda_graphs, tracing


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
        self.conditions = cuda_graphs.Conditions(model)
        self._graph = torch.cuda.CUDAGraph()
        with cuda_graphs.capturing(self._graph, tokens.device):
            self._logits: Tensor = model(self._tokens, cache=cache)[:, -1]

    def __call__(self, tokens: Tensor) -> Tensor:
        self._tokens.copy_(tokens[:, None])
        self._graph.replay()
        # the next call writes to the same memory, and a sampler may keep the logits
        return self._logits.clone()


def _is_on_one_gpu(model: CausalLM) -> bool:
    return {x.device for x in model.parameters()} == {model.embed.weight.device} and model.embed.weight.is_cuda


def why_not(model: CausalLM) -> str | None:
    """Why the model's steps are not captured; None: nothing speaks against it beforehand."""
    if type(model.sharding) is not Unsharded or not (model.is_first and model.is_last):
        return "the model is sharded over ranks"
    if reason := cuda_graphs.why_not(model):
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
        reason = cuda_graphs.reason_of(error)
        tracing.warn(f"generate: steps are not captured in a CUDA graph, so each waits for its Python code: {reason}")
        return None
