"""TransformerEngine's LayerNorm and RMSNorm on our norms."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.module.base import in_autocast, is_autocast
from powertrain.ops.norm import layer_norm, rms_norm
from powertrain.runtime import checks

__all__ = ["LayerNorm", "RMSNorm"]


class _Norm(nn.Module):
    rms: bool

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: torch.device | str = "cuda",
        dtype: torch.dtype | None = None,
        sm_margin: int | dict[str, int] = 0,  # a hint
    ) -> None:
        super().__init__()
        # hidden_size is the older name
        size = hidden_size if normalized_shape is None else normalized_shape
        if size is None:
            raise ValueError(f"{type(self).__name__}: normalized_shape must be given, got None")
        shape = torch.Size((size,) if isinstance(size, int) else size)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        # dtype is the newer name of params_dtype
        dtype = params_dtype if dtype is None else dtype
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if not self.rms:
            self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()
        for parameter in self.parameters():
            # Megatron's gradient all-reduce for sequence parallelism looks for this attribute
            setattr(parameter, "sequence_parallel", bool(sequence_parallel))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if not self.rms:
            nn.init.zeros_(self.bias)

    def reset_layer_norm_parameters(self) -> None:
        self.reset_parameters()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)  # of TransformerEngine's checkpoints; a norm has no FP8 state
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, inp: Tensor) -> Tensor:
        shape, op = self.weight.shape, type(self).__name__
        if inp.shape[inp.dim() - len(shape) :] != shape:
            checks.fail(op, "inp", f"end in the dims {list(shape)}", list(inp.shape))
        # as there: autocast's dtype, outside of it the weight's, in the wider of both until then
        x = in_autocast(inp)
        result = x.dtype if is_autocast(inp) else self.weight.dtype
        # our kernels normalize the last dim
        x = x.to(torch.promote_types(x.dtype, result)).flatten(inp.dim() - len(shape))
        weight = self.weight.flatten()
        if self.rms:
            y = rms_norm(x, weight, eps=self.eps, zero_centered=self.zero_centered_gamma)
        else:
            y = layer_norm(x, weight, self.bias.flatten(), eps=self.eps, zero_centered=self.zero_centered_gamma)
        assert isinstance(y, Tensor)
        return y.view(inp.shape).to(result)


class LayerNorm(_Norm):
    """Layer norm over the last dims; zero_centered_gamma multiplies by 1 + weight.

    The result has the weight's dtype, under torch.autocast that of it. Parameters are made on the GPU, as there.
    """

    rms = False


class RMSNorm(_Norm):
    """Root-mean-square norm over the last dims; zero_centered_gamma multiplies by 1 + weight.

    Dtypes as of `LayerNorm`.
    """

    rms = True


__getattr__ = unknown(__name__)
