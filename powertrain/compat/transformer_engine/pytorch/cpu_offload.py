"""transformer_engine.pytorch.cpu_offload: keeps layers' saved tensors in CPU memory until their backward.

    context, synchronize = get_cpu_offload_context(enabled=True, num_layers=2, model_layers=len(layers))
    for layer in layers:
        with context:
            x = layer(x)
        x = synchronize(x)

Copies run on a stream of their own, from and to pinned memory. Offloaded are tensors that autograd saves, on a GPU,
dense, of at least 262,144 elements, once each; parameters and those of `mark_not_offload` stay.
Memory: with equal layers of size M, (model_layers - num_layers) * M on the GPU, num_layers * M pinned.
"""

import weakref
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from powertrain.compat.missing import unknown
from powertrain.runtime import checks, tracing

__all__ = [
    "ManualOffloadSynchronizer", "get_cpu_offload_context", "is_cpu_offload_enabled", "mark_activation_offload",
    "mark_not_offload", "start_offload",
]  # fmt: skip

_OP = "get_cpu_offload_context"
# devices that tensors leave, and the least size that is worth a copy, as there
DEVICES = ("cuda",)
MIN_NUMEL = 256 * 1024


class _Active:
    contexts = 0


def is_cpu_offload_enabled() -> bool:
    """Whether a context of `get_cpu_offload_context` is entered."""
    return _Active.contexts > 0


def mark_not_offload(*tensors: Tensor | None) -> None:
    """These tensors stay on the GPU."""
    for tensor in tensors:
        if tensor is not None:
            tensor._powertrain_stays = True  # type: ignore[attr-defined]


def mark_activation_offload(*tensors: Tensor | None) -> None:
    """Nothing: every tensor that is large enough is offloaded."""


def start_offload(*tensors: Tensor | None, offload_base_tensor: bool = False) -> None:
    """Nothing: a layer's copies begin when the next layer does, and wait for all that was launched before."""


class _Saved:
    """One tensor: on its device, in the CPU's memory, or both while a copy runs."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.copy: Tensor | None = None
        self.device = tensor.device

    def leave(self, kept: Tensor | None) -> None:
        assert self.tensor is not None
        fits = kept is not None and kept.shape == self.tensor.shape and kept.stride() == self.tensor.stride()
        if fits and kept is not None and kept.dtype is self.tensor.dtype:
            self.copy = kept
        else:
            self.copy = torch.empty_like(self.tensor, device="cpu", pin_memory=self.device.type == "cuda")
        self.copy.copy_(self.tensor, non_blocking=True)


class _Layer:
    """The tensors that one forward of a layer saved."""

    def __init__(self, stream: "_Stream", buffers: list[Tensor] | None) -> None:
        # the graph owns them: what its backward has used is freed at once
        self._saved: list[weakref.ref[_Saved]] = []
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], _Saved] = weakref.WeakValueDictionary()
        self._stream, self._buffers = stream, buffers
        self.state = "here"

    def push(self, tensor: Tensor) -> Tensor | _Saved:
        if not _is_offloadable(tensor):
            return tensor
        geometry = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        key = tensor.untyped_storage().data_ptr(), tensor._version, *geometry
        saved = self._known.get(key)
        if saved is None:
            # detached: the graph that saves it would else hold itself
            self._known[key] = saved = _Saved(tensor.detach())
            self._saved.append(weakref.ref(saved))
        return saved

    def _all(self) -> list[_Saved]:
        return [saved for one in self._saved if (saved := one()) is not None]

    def pop(self, packed: Tensor | _Saved) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self.state in ("leaving", "away"):
            self.start_reload()
        if self.state == "returning":
            self._stream.wait()
            self.state = "here"
            self._done_with_copies()
        assert packed.tensor is not None
        return packed.tensor

    def start_offload(self) -> None:
        """Copies to the CPU begin, after all that was launched so far."""
        if self.state != "here" or not self._all():
            return
        with self._stream.after_all():
            for index, one in enumerate(self._all()):
                kept = self._buffers[index] if self._buffers is not None and index < len(self._buffers) else None
                one.leave(kept)
        self._stream.mark()
        self.state = "leaving"

    def release(self) -> None:
        """The memory on the GPU is given back, once the copies are done."""
        if self.state == "leaving":
            self._stream.wait()
            for one in self._all():
                one.tensor = None
            self._known.clear()
            self.state = "away"

    def start_reload(self) -> None:
        """Copies back begin; a layer whose memory is still there keeps it."""
        if self.state == "leaving":
            self._stream.wait()
            self.state = "here"
            self._done_with_copies()
        if self.state != "away":
            return
        # allocated for the stream of the computation, which is the one that frees them
        for one in self._all():
            assert one.copy is not None
            one.tensor = torch.empty_like(one.copy, device=one.device, pin_memory=False)
        with self._stream.after_all():
            for one in self._all():
                assert one.tensor is not None and one.copy is not None
                one.tensor.copy_(one.copy, non_blocking=True)
        self._stream.mark()
        self.state = "returning"

    def _done_with_copies(self) -> None:
        if self._buffers is not None:
            self._buffers[:] = [one.copy for one in self._all() if one.copy is not None]
        for one in self._all():
            one.copy = None


class _Stream:
    """The stream of copies and the end of a layer's; without a GPU, where nothing runs beside, None."""

    def __init__(self, stream: Any = None) -> None:
        self._stream, self._event = stream, None

    def after_all(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def mark(self) -> None:
        self._event = self._stream.record_event() if self._stream is not None else None

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class _Synchronizer:
    """Which layers leave, when they have left and when they return, by the number of the layer."""

    def __init__(self, num_layers: int, retain_pinned_cpu_buffers: bool = False, offload_stream: Any = None) -> None:
        self.num_layers = num_layers
        if offload_stream is None and torch.cuda.is_available():
            offload_stream = torch.cuda.Stream()
        self._stream = offload_stream
        self._buffers: list[list[Tensor]] | None = None
        if retain_pinned_cpu_buffers:
            self._buffers = [[] for _ in range(num_layers)]
        self._layers: list[_Layer] = []

    def forward_begins(self) -> tuple[list[_Layer], int]:
        """The layers of this forward so far, and the number of the one that begins."""
        if len(self._layers) == self.num_layers:
            self._layers = []
        number = len(self._layers)
        buffers = None if self._buffers is None else self._buffers[number]
        self._layers.append(_Layer(_Stream(self._stream), buffers))
        return self._layers, number

    def backward_begins(self, layers: list[_Layer], number: int) -> None:
        """Before the backward of a layer."""


class _Scheduled(_Synchronizer):
    """The first `offloaded` layers leave when the next begins."""

    def __init__(self, num_layers: int, offloaded: int, retain: bool) -> None:
        super().__init__(num_layers, retain)
        self._offloaded, self._ahead = offloaded, num_layers - offloaded

    def forward_begins(self) -> tuple[list[_Layer], int]:
        layers, number = super().forward_begins()
        if 0 < number <= self._offloaded:
            layers[number - 1].start_offload()
        if number >= self._ahead:
            layers[number - self._ahead].release()
        return layers, number

    def backward_begins(self, layers: list[_Layer], number: int) -> None:
        returning = number - self._ahead + 1
        if 0 <= returning < self._offloaded:
            layers[returning].start_reload()


class ManualOffloadSynchronizer(_Synchronizer):
    """The third result of get_cpu_offload_context(manual_synchronization=True): layers leave and return by calls.

    Layers are those of the newest forward. One without calls stays; one that is not back when its backward needs it
    returns then.
    """

    def start_offload_layer(self, layer_id: int) -> None:
        """Its copies to the CPU begin."""
        self._layer(layer_id).start_offload()

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """The stream waits for these copies, and the layer's memory on the GPU is given back."""
        self._layer(layer_id).release()

    def start_reload_layer(self, layer_id: int) -> None:
        """Its copies back begin."""
        self._layer(layer_id).start_reload()

    def _layer(self, layer_id: int) -> _Layer:
        known = 0 <= layer_id < len(self._layers)
        checks.require(known, type(self).__name__, "layer_id", f"be of 0 to {len(self._layers) - 1}", layer_id)
        return self._layers[layer_id]


class _Context(ContextDecorator):
    """Entered around each layer; `synchronize` takes its output."""

    def __init__(self, synchronizer: _Synchronizer) -> None:
        self._synchronizer = synchronizer
        self._hooks: saved_tensors_hooks | None = None
        self._now: tuple[list[_Layer], int] | None = None

    def __enter__(self) -> "_Context":
        if self._hooks is not None:
            raise RuntimeError(f"{_OP}: the context is entered already")
        layers, number = self._now = self._synchronizer.forward_begins()
        layer = layers[number]
        self._hooks = saved_tensors_hooks(layer.push, layer.pop)
        self._hooks.__enter__()
        _Active.contexts += 1
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._hooks is not None
        hooks, self._hooks = self._hooks, None
        _Active.contexts -= 1
        hooks.__exit__(*error)

    def synchronize(self, tensor: Tensor) -> Tensor:
        """The layer's output, the backward of which is the layer's. Raises ValueError if it needs no gradient."""
        checks.require(tensor.requires_grad, _OP, "tensor", "require a gradient", False)
        if self._now is None or self._hooks is not None:
            raise RuntimeError(f"{_OP}: the second result takes a layer's output after the context has ended")
        now, synchronizer = self._now, self._synchronizer
        assert tensor.grad_fn is not None
        tensor.grad_fn.register_prehook(lambda _: synchronizer.backward_begins(*now))
        return tensor


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple[Any, ...]:
    """(context, function of a layer's output), with manual_synchronization also a `ManualOffloadSynchronizer`.

        num_layers                 how many layers, from the first, leave; fewer than model_layers
        model_layers               how often the context is entered in a forward
        retain_pinned_cpu_buffers  pinned memory is kept for the next forward
        offload_stream             of copies, only with manual_synchronization
    Weights are not offloaded, as there; double_buffering is a hint. Without `enabled`, or with weights alone, the
    context does nothing. Raises ValueError naming the argument.
    """
    checks.require(
        not enabled or offload_weights or offload_activations, _OP, "offload_activations", "be True if enabled", False
    )
    if offload_weights and enabled:
        tracing.warn("get_cpu_offload_context: offload_weights has no effect; FSDP2 has CPUOffloadPolicy")
    if not enabled or not offload_activations:
        return (nullcontext(), _same, None) if manual_synchronization else (nullcontext(), _same)
    if manual_synchronization:
        manual = ManualOffloadSynchronizer(model_layers, retain_pinned_cpu_buffers, offload_stream)
        context = _Context(manual)
        return context, context.synchronize, manual
    checks.require(offload_stream is None, _OP, "offload_stream", "be None but for manual_synchronization", "a stream")
    count = model_layers - 1 if num_layers is None else num_layers
    must = f"be of 1 to model_layers - 1 = {model_layers - 1}"
    checks.require(0 < count < model_layers, _OP, "num_layers", must, count)
    context = _Context(_Scheduled(model_layers, count, retain_pinned_cpu_buffers))
    return context, context.synchronize


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _is_offloadable(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.numel() < MIN_NUMEL or tensor.device.type not in DEVICES:
        return False
    if getattr(tensor, "_powertrain_stays", False) or isinstance(tensor._base, nn.Parameter):
        return False
    # a tensor with gaps would come back with other strides than the backward was told
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


__getattr__ = unknown(__name__)
