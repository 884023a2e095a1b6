"""An op's functions as one of autograd's outside the op, where no kernel of ours serves."""

from collections.abc import Callable
from typing import Any

import torch


def plain_function(
    forward: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> type[torch.autograd.Function]:
    """The autograd.Function of the three functions that an `Op` takes; it is differentiated once."""

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = run(*args)
            setup_context(ctx, args, output)
            return output

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *grads: Any) -> Any:
            return differentiate(ctx, *grads)

    run, differentiate = forward, backward
    return Plain
