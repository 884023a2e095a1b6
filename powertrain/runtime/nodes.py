"""Autograd nodes of an op: one that runs its forward, and one that replays a recording of it."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from powertrain.runtime import replay
from powertrain.runtime.stages import Stage

Backward = Callable[..., Any]

# what errors name instead of a way to differentiate that kernels do not have
PLAIN = '`with powertrain.disable(...):` (of attention backend="reference"; FP8 has none) takes plain PyTorch'
ON_ONE_RANK = "one rank alone can, by plain PyTorch"  # of functions that send


class _NoDoubleBackward(torch.autograd.Function):
    """Passes gradients through; differentiating them once more raises an error that names the alternative.

    Takes every tensor that gradients depend on, so that the autograd graph leads here from every input.
    """

    @staticmethod
    def forward(
        ctx: Any, name: str, instead: str, grads: tuple[Tensor | None, ...], *sources: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.name, ctx.instead = name, instead
        return tuple(None if g is None else g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"{ctx.name}: double backward is not implemented; {ctx.instead}")


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
        # create_graph=True is rare, and the backward itself may refuse it
        whole = replay.modes_active() or isinstance(ctx, _ReadOnce)
        signature = None if whole else replay.signature_of((*saved, *grads, *ctx.held))
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
    # the name that grad_fn and profilers show is taken when the class is made
    methods = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(name)(gradients))}
    function = type(f"powertrain_{name}", (torch.autograd.Function,), methods)
    # torch.autograd.Function.apply spends 5 us on functorch, which calls the packet (runtime/dispatch.py)
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


class _ReadOnce:
    """A context that unpacks its saved tensors once: torch.utils.checkpoint raises at the second reading."""

    def __init__(self, ctx: Any) -> None:
        self.__dict__.update(_ctx=ctx, saved_tensors=ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


def once_differentiable(name: str, instead: str = PLAIN) -> Callable[[Backward], Backward]:
    """Decorator of an autograd.Function's `backward` that has no graph of its own: differentiating the gradients once
    more raises an error, which names what there is instead.

    Unlike torch.autograd.function.once_differentiable, whose graph does not lead back to the function's inputs: where
    the gradients of these are asked for, as `torch.autograd.functional.hessian` does, it gives zeros without a word.
    """

    def decorate(gradients: Backward) -> Backward:
        @functools.wraps(gradients)
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            try:
                # a compiled backward cannot be differentiated either: AOTAutograd says so
                if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                    return gradients(ctx, *grads)
                once = _ReadOnce(ctx)
                # autograd turns gradients on for create_graph=True; our backward would then record its own graph
                with torch.no_grad():
                    out = gradients(once, *grads)
            except RuntimeError:
                if any(g is not None and _is_batched(g) for g in grads):
                    raise NotImplementedError(_NO_BATCHES.format(name=name, instead=instead)) from None
                raise
            sources = [t for t in (*once.saved_tensors, *grads) if t is not None and t.requires_grad]
            # a gradient that depends on nothing that was saved (see `refuse_graph`) is no constant either
            sources = sources or [torch.empty(0, device="cpu", requires_grad=True)]
            one = not isinstance(out, tuple)
            out = _NoDoubleBackward.apply(name, instead, (out,) if one else out, *sources)
            return out[0] if one else out

        return backward

    return decorate


def refuse_graph(ctx: Any, name: str, instead: str = PLAIN) -> None:
    """In a backward whose gradients depend on inputs that were not saved (they were made in forward, say):
    NotImplementedError if they are asked for with create_graph=True. No graph leads from them to these inputs, so a
    second differentiation would leave out a term without a word."""
    by_library = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if by_library or isinstance(getattr(ctx, "_node", ctx), _ReadOnce):
        raise NotImplementedError(f"{name}: create_graph=True and double backward are not implemented; {instead}")


_NO_BATCHES = (
    "{name}: is_grads_batched and vmap of a backward are not implemented; ask for one gradient after the other; "
    "{instead}"
)


def _is_batched(x: Tensor) -> bool:
    of_functorch: bool = torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)
    return of_functorch
