"""Autograd's nodes of an op: the one that runs its forward whole, and the one that repeats a recording of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from powertrain.runtime import replay
from powertrain.runtime.stages import Stage

Backward = Callable[..., tuple[Tensor | None, ...]]


class _NoDoubleBackward(torch.autograd.Function):
    """Passes gradients through; differentiating them once more raises an error that names the alternative.

    Takes every tensor that gradients depend on, so that the autograd graph leads here from every input.
    """

    @staticmethod
    def forward(ctx: Any, name: str, grads: tuple[Tensor | None, ...], *sources: Tensor) -> tuple[Tensor | None, ...]:
        ctx.name = name
        return tuple(None if g is None else g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.name}: double backward is not implemented; use `with powertrain.disable(...):` around the forward "
            "to differentiate plain PyTorch twice"
        )


def whole(
    name: str,
    run: Callable[[tuple[Any, ...]], Any],
    backward: Backward,
    setup_context: Callable[..., None],
    num_results: int | None,
) -> Any:
    """`apply(*arguments)`, differentiated by `backward`."""

    def forward(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        output = run(args)
        setup_context(ctx, args, output)
        # saved-only outputs are not returned: each output costs autograd about 2 us
        return output if num_results is None else output[:num_results]

    return _apply(name, forward, backward)


def replayed(name: str, backward: Backward) -> Any:
    """`apply(stage, *tensors)` of a recorded forward (runtime/stages.py). Its backward is recorded and replayed too."""
    routes = replay.Table(f"{name}'s backward", replay.route)

    def forward(ctx: Any, stage: Stage, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.stage = stage
        return stage.forward(ctx, *tensors)

    def gradients(ctx: Any, *grads: Tensor | None) -> Any:
        # once: torch.utils.checkpoint raises at the second reading
        saved = ctx.saved_tensors
        signature = None if replay.modes_active() else replay.signature_of((*saved, *grads, *ctx.held))
        if signature is None:
            return _whole_backward(ctx, backward, saved, grads)
        # a stage is of one set of options, so it stands for them in the key
        key = signature.key, ctx.needs_input_grad, ctx.stage
        route = routes.find(key)
        if route is not None:
            return route.run(signature.tensors)
        return routes.record(key, signature, lambda: _whole_backward(ctx, backward, saved, grads))

    return _apply(name, forward, gradients)


class _Context:
    """The op's context of a replayed forward, for a backward that goes the whole way."""

    def __init__(self, node: Any, saved: tuple[Tensor, ...]) -> None:
        stage: Stage = node.stage
        self._node: Any
        self.__dict__.update(stage.attributes(node.held), _node=node)
        self.__dict__.update(saved_tensors=stage.saved(saved), needs_input_grad=stage.needs(node.needs_input_grad))
        self.__dict__.update(getattr(node, "written", {}))

    def __setattr__(self, name: str, value: Any) -> None:
        """Kept for a second backward: cross_entropy notes that its gradient was given away, and refuses one."""
        self.__dict__[name] = value
        self._node.written = {**getattr(self._node, "written", {}), name: value}
        active = replay.recorder()
        if active is not None:
            active.failure = "its backward changes its context"


def _whole_backward(ctx: Any, backward: Backward, saved: tuple[Tensor, ...], grads: tuple[Any, ...]) -> Any:
    return ctx.stage.gradients(backward(_Context(ctx, saved), *grads))


def _apply(name: str, forward: Callable[..., Any], gradients: Backward) -> Any:
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return gradients(ctx, *grads)
        # autograd turns gradients on for create_graph=True; our backward would then record its own graph
        with torch.no_grad():
            out = gradients(ctx, *grads)
        sources = [t for t in (*ctx.saved_tensors, *grads) if t is not None and t.requires_grad]
        # a gradient made in forward depends on nothing that was saved: without a source a second differentiation would
        # take it for a constant and give zeros without a word
        sources = sources or [torch.empty(0, requires_grad=True)]
        return _NoDoubleBackward.apply(name, out, *sources)

    # the name that grad_fn and profilers show is taken when the class is made
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(f"powertrain_{name}", (torch.autograd.Function,), methods)
    # torch.autograd.Function.apply spends 5 us on functorch, which calls the packet (runtime/dispatch.py)
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]
