"""An op's functions as a plain `torch.autograd.Function`, for inputs that no kernel of ours supports."""

from collections.abc import Callable
from typing import Any

import torch

from powertrain.runtime.nodes import once_differentiable


def plain_function(
    name: str, forward: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> type[torch.autograd.Function]:
    """The autograd.Function of the three functions that the `Op` called `name` takes; it is differentiated once."""
    run, differentiate = forward, once_differentiable(name)(backward)

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = run(*args)
            setup_context(ctx, args, output)
            return output

        backward = staticmethod(differentiate)

    return Plain
