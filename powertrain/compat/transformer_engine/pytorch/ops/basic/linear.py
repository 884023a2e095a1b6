"""Linear layers as operations; their products are FP8 under `autocast`."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.module import linear as module
from powertrain.ops.conversion import unsupported

__all__ = ["BasicLinear", "Linear"]


class Linear(module.Linear):
    """x Wᵀ + b as transformer_engine.pytorch.Linear has it, FP8 under `autocast`; initialized as torch.nn.Linear.

    The bias begins at 0, as there. accumulate_into_main_grad: backward adds the weight's gradient to its attribute
    main_grad. Checkpoints have weight and bias; theirs, basic_ops.0.weight and basic_ops.1.bias, are read too.
    Tensor parallelism is refused: powertrain.parallelize_linears.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        if tensor_parallel_mode is not None:
            op = type(self).__name__
            unsupported(op, "tensor_parallel_mode", tensor_parallel_mode, "powertrain.parallelize_linears")
        super().__init__(
            in_features, out_features, fuse_wgrad_accumulation=accumulate_into_main_grad,
            get_rng_state_tracker=rng_state_tracker_function, init_method=_as_in_torch, bias=bias, params_dtype=dtype,
            device=torch.get_default_device() if device is None else device,
        )  # fmt: skip

    def forward(self, input: Tensor) -> Any:  # type: ignore[override]
        """[..., in_features] -> [..., out_features]."""
        return super().forward(input)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for theirs, ours in (("basic_ops.0.weight", "weight"), ("basic_ops.1.bias", "bias")):
            if f"{prefix}{theirs}" in state_dict:
                state_dict[f"{prefix}{ours}"] = state_dict.pop(f"{prefix}{theirs}")
        for index in (0, 1):
            # of recipes with state; `ProductModule` reads the one of a module only
            state_dict.pop(f"{prefix}basic_ops.{index}._extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


class BasicLinear(Linear):
    """`Linear` without bias; userbuffers_options are refused."""

    def __init__(
        self, in_features: int, out_features: int, *, userbuffers_options: dict[str, Any] | None = None, **options: Any
    ) -> None:
        if userbuffers_options is not None:
            unsupported("BasicLinear", "userbuffers_options", userbuffers_options, "initialize_ub")
        if "bias" in options:
            raise TypeError("BasicLinear: bias is not an argument; Linear has one")
        super().__init__(in_features, out_features, bias=False, **options)


def _as_in_torch(weight: Tensor) -> None:
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


__getattr__ = unknown(__name__)
