"""Forward and backward of a micro-batch as CUDA graphs, in runs whose GPU waits for the Python code of the layers.

Python takes about 1 ms a layer, forward and backward, however little work a layer has; a graph is launched at once.
One graph makes the gradients of a step: of its first micro-batch. Others add to them: one for each signature (shapes)
of a batch, as packed completions differ in number. A step whose first micro-batch has another signature than the graph
that makes gradients begins with zeros. Kernels, their order and dropout's random numbers are those of the Python code;
so are all bits where kernels are deterministic.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.nn.moe import MoE
from powertrain.quant.linear import FP8State
from powertrain.runtime import cuda_graphs
from powertrain.train.data.loader import Batch
from powertrain.train.reporting.timers import Moment

# forward and backward of a micro-batch: (batch, units that count in the global batch) -> (loss, metrics), detached
Compute = Callable[[Batch, Tensor], tuple[Tensor, Tensor]]
Signature = tuple[object, ...]
_FIRST_WATCHED = 4  # step of the process: the first ones compile, and the third is profiled (kernel_profile.py)
_STEPS_THAT_WAIT = 3  # in a row, before graphs are captured
_MOST_SIGNATURES = 64  # that have graphs; the driver keeps some MiB for each


class _Graph:
    """A micro-batch's forward and backward, captured for batches of one signature.

    pool   of another graph, whose memory it may use: no two are replayed at once
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], compute: Compute, batch: Batch, counted: Tensor,
        pool: Any,
    ) -> None:  # fmt: skip
        self._batch, self._counted = batch.each(torch.clone), counted.clone()
        self._conditions = cuda_graphs.Conditions(model)
        states = [module for module in model.modules() if isinstance(module, FP8State)]
        # each graph quantizes the weights: a copy that another one has made may be of the step before
        shared = [(state, state.copies) for state in states if state.shares]
        for state, _ in shared:
            state.copies = None
        _forget_losses(model)
        try:
            self.graph, self._results = _captured(compute, self._batch, self._counted, pool)
        except BaseException:
            for state in states:
                # of a frozen weight that the capture has quantized they hold nothing
                state.copies = None
            raise
        finally:
            for state, copies in shared:
                state.copies = copies
            _forget_losses(model)
        # in the graph's memory: each replay writes there
        self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        # FP8 copies of frozen weights, which the graph reads
        self._copies = [(state, state.kept_copies()) for state in states if state.keeps]

    def holds(self) -> bool:
        """Whether a replay still computes what Python would."""
        return self._conditions.hold() and all(state.kept_copies() is copies for state, copies in self._copies)

    def zero_gradients(self) -> None:
        """Those in the graph's memory, which become the parameters' own."""
        for p, gradient in self._gradients:
            p.grad = gradient
        torch._foreach_zero_([gradient for _, gradient in self._gradients])

    def __call__(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        for target, source in zip(self._batch.tensors, batch.tensors, strict=True):
            target.copy_(source)
        self._counted.copy_(counted)
        self.graph.replay()
        for p, gradient in self._gradients:
            p.grad = gradient
        loss, metrics = self._results
        # the next replay writes to the same memory
        return loss.clone(), metrics.clone()


def _captured(
    compute: Compute, batch: Batch, counted: Tensor, pool: Any
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
    graph = torch.cuda.CUDAGraph()
    with cuda_graphs.capturing(graph, counted.device, pool=pool):
        results = compute(batch, counted)
    return graph, results


def _forget_losses(model: nn.Module) -> None:
    """Gradients are added up on the stream of the oldest forward that is alive, which must not be another one's."""
    for part in model.modules():
        if isinstance(part, MoE):
            part.balance_loss = None


def _signature(batch: Batch) -> Signature:
    """Equal for batches that take the same way through the model."""
    absent = [x is None for x in (*batch, *(batch.completions or ()))]
    return *absent, *((x.shape, x.dtype) for x in batch.tensors)


def _why_not_memory(device: torch.device) -> str | None:
    """A graph takes about as much as PyTorch keeps for the micro-batches in Python, which evaluations go on to use."""
    needed = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0]
    if needed <= free:
        return None
    return f"a graph takes about {needed / 2**30:.1f} GiB of the GPU's memory, and {free / 2**30:.1f} are free"


class MicroBatchGraphs:
    """Replays a run's micro-batches, once the GPU was found to wait for Python in a few steps.

    why_not   why no micro-batch of this run is captured, or None
    note      prints a line for the user
    A signature is captured when it comes for the second time: Python computes the first, and compiles what it needs.
    Memory: that of a micro-batch's forward and backward, beside what PyTorch keeps for those in Python. All graphs
    share it.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], compute: Compute, note: Callable[[str], None],
        why_not: str | None,
    ) -> None:  # fmt: skip
        self.model, self.parameters, self.compute, self.note = model, parameters, compute, note
        self.why_not = why_not
        self._device = parameters[0].device
        self._steps = self._waits = 0
        self.is_wanted = False
        self._said: set[str] = set()
        self._computed: Moment | None = None
        self._documents = 0  # entries of document_starts, the most so far
        self._drop()

    def _drop(self) -> None:
        self._seen: set[Signature] = set()  # by Python
        # makes the gradients of a step, and its signature
        self._first: _Graph | None = None
        self._first_signature: Signature | None = None
        self._adding: dict[Signature, _Graph] = {}  # to the gradients that `_first` has made
        self._has_gradients = False  # whether this step's, so far, are in the memory of `_first`

    def __call__(self, batch: Batch, counted: Tensor, *, is_first: bool) -> tuple[Tensor, Tensor] | None:
        """The loss and metrics of a micro-batch, its gradients in the parameters; None: Python must compute it."""
        if not self.is_wanted or self.why_not is not None:
            return None
        if self._has_more_documents(batch):
            self._drop()
            self._seen.add(_signature(batch))
            return None
        batch = self._padded(batch)
        graph = self._graph_for(batch, counted, is_first)
        self._has_gradients = graph is not None
        return None if graph is None else graph(batch, counted)

    def mark_computed(self) -> None:
        """Called when the host has queued the last micro-batch of a step."""
        if not self.is_wanted and self.why_not is None:
            self._computed = Moment(self._device)

    def end_step(self) -> None:
        """Called when the host has queued the optimizer's step: a GPU that has no backward left waits for the host."""
        computed, self._computed = self._computed, None
        if computed is None:
            return
        self._steps += 1
        is_waiting = computed.is_over() and self._steps >= _FIRST_WATCHED
        self._waits = self._waits + 1 if is_waiting else 0
        self.is_wanted = self._waits >= _STEPS_THAT_WAIT

    def _has_more_documents(self, batch: Batch) -> bool:
        """Than all before: Python computes it, and compiles what that needs, before a graph has as many."""
        starts = batch.document_starts
        if starts is None or len(starts) <= self._documents:
            return False
        self._documents = len(starts)
        return True

    def _padded(self, batch: Batch) -> Batch:
        """With as many documents as the longest list so far, empty ones at the end: a graph has one number of them."""
        starts = batch.document_starts
        if starts is None or len(starts) == self._documents:
            return batch
        padded = F.pad(starts, (0, self._documents - len(starts)), value=batch.tokens.numel())
        return batch._replace(document_starts=padded)

    def _graph_for(self, batch: Batch, counted: Tensor, is_first: bool) -> _Graph | None:
        # gradients of the Python code lie where no graph adds to them
        if not (is_first or self._has_gradients):
            return None
        signature = _signature(batch)
        graph = self._captured(signature, is_first)
        if graph is not None and not graph.holds():
            self._drop()
            self._seen.add(signature)
            return None
        if graph is None and not self._is_due(signature):
            return None
        if is_first and self._first is not None and signature != self._first_signature:
            self._first.zero_gradients()
        return graph or self._capture(batch, counted, signature, is_first)

    def _captured(self, signature: Signature, is_first: bool) -> _Graph | None:
        return self._first if is_first and signature == self._first_signature else self._adding.get(signature)

    def _is_due(self, signature: Signature) -> bool:
        """Whether to capture a signature that has no graph."""
        if signature not in self._seen and len(self._seen) < _MOST_SIGNATURES:
            self._seen.add(signature)
            return False
        if signature not in self._seen:
            self._say(f"micro-batches of more than {_MOST_SIGNATURES} shapes: those of the others stay in Python")
        return signature in self._seen

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.note(text)

    def _capture(self, batch: Batch, counted: Tensor, signature: Signature, is_first: bool) -> _Graph | None:
        makes_gradients = is_first and self._first is None
        reason = self._why_not_now(makes_gradients)
        had_gradients = [p.grad is not None for p in self.parameters]
        if reason is None:
            try:
                return self._new(batch, counted, signature, makes_gradients)
            except Exception as error:
                # an error of the code itself comes again where Python computes the micro-batch
                reason = cuda_graphs.reason_of(error)
        for p, had in zip(self.parameters, had_gradients, strict=True):
            if not had:
                # a capture that failed may have made one, and computes none
                p.grad = None
        self.why_not = reason
        self._say(f"each micro-batch waits for its Python code, since it is not captured in a CUDA graph: {reason}")
        return None

    def _why_not_now(self, makes_gradients: bool) -> str | None:
        # those on tensors, which a replay does not call either
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters):
            return "a parameter has hooks, which a graph does not call"
        # the others use the memory of the graph that makes gradients
        return cuda_graphs.why_not(self.model) or (_why_not_memory(self._device) if makes_gradients else None)

    def _new(self, batch: Batch, counted: Tensor, signature: Signature, makes_gradients: bool) -> _Graph:
        pool = None if self._first is None else self._first.graph.pool()
        graph = _Graph(self.model, self.parameters, self.compute, batch, counted, pool)
        if makes_gradients:
            self._first, self._first_signature = graph, signature
            self._say("the GPU waited for Python, so micro-batches are replayed from CUDA graphs from this step on")
        else:
            self._adding[signature] = graph
        return graph
