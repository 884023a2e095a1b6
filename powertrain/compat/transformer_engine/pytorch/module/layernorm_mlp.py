"""TransformerEngine's LayerNormMLP on `linear_activation`, `fp8_linear` and our norms."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.distributed import checkpoint as recomputed
from powertrain.compat.transformer_engine.pytorch.module.base import Norm, default_init, results
from powertrain.compat.transformer_engine.pytorch.quantization import active
from powertrain.ops.activations import activation as plain_activation
from powertrain.ops.activations import gated_activation
from powertrain.ops.conversion import unsupported
from powertrain.ops.gemm.linear_activation import linear_activation
from powertrain.runtime import checks

__all__ = ["LayerNormMLP"]

# their name -> ours. Their GELU is the tanh approximation
# quick GELU is x * sigmoid(1.702 x)
_PLAIN = {"gelu": "gelu_tanh", "qgelu": "quick_gelu", "relu": "relu", "srelu": "relu_squared", "silu": "silu"}
_GATED = {
    "geglu": "geglu_tanh", "qgeglu": "quick_geglu", "reglu": "reglu", "sreglu": "relu_squared_glu", "swiglu": "swiglu",
    "clamped_swiglu": "clamped_swiglu",
}  # fmt: skip


class LayerNormMLP(Norm):
    """fc2(act(fc1(norm(x)))) with TransformerEngine's names; both products are FP8 under `autocast`.

    Parameters: layer_norm_weight [hidden_size], layer_norm_bias (of "LayerNorm"), fc1_weight [F, hidden_size],
    fc1_bias, fc2_weight [hidden_size, ffn_hidden_size], fc2_bias. F is ffn_hidden_size, or twice that for gated
    activations, the gate first.
    activation: "gelu" (tanh), "qgelu", "relu", "srelu", "silu", or gated "geglu", "glu", "qgeglu", "reglu", "sreglu",
    "swiglu", "clamped_swiglu" with activation_params limit and alpha. checkpoint: everything after the norm is
    recomputed in backward. seq_length and micro_batch_size are hints. Results: the output, then fc2's bias, not added,
    with return_bias, then norm(x) with return_layernorm_output. Other arguments as of `Linear`.
    Outside of `autocast` fc1 and the activation are `linear_activation`.
    """

    gemms = ("fc1_fp8", "fc2_fp8")
    fc1_weight: Tensor
    fc1_bias: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        super().__init__(
            name=name, tp_group=tp_group, tp_size=tp_size, delay_wgrad_compute=delay_wgrad_compute,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, get_rng_state_tracker=get_rng_state_tracker,
            params_dtype=params_dtype, device=device,
        )  # fmt: skip
        checks.one_of("LayerNormMLP", "activation", activation, (*_PLAIN, *_GATED, "glu"))
        self.activation, self.activation_params = activation, _parameters(activation, activation_params)
        self.use_bias, self.return_bias, self.checkpoint = bias, return_bias, checkpoint
        self.return_layernorm_output = return_layernorm_output
        self._norm_parameters(hidden_size, eps, normalization, zero_centered_gamma)
        # gate and up are one weight there
        wide = ffn_hidden_size if activation in _PLAIN else 2 * ffn_hidden_size
        for layer, shape, init in (
            ("fc1", (wide, hidden_size), init_method),
            ("fc2", (hidden_size, ffn_hidden_size), output_layer_init_method),
        ):
            self._parameter(f"{layer}_weight", shape, default_init if init is None else init)
            if bias:
                self._parameter(f"{layer}_bias", shape[:1], nn.init.zeros_, None)
            else:
                # an empty tensor where there is no bias, as there
                setattr(self, f"{layer}_bias", torch.empty(0, **self._place))
        self.reset_parameters(defer_init=str(device) == "meta")

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """[..., hidden_size] -> the same, or a tuple that begins with it."""
        normed = self._norm(self._input(inp, self.layer_norm_weight))
        # without gradients nothing is saved, so nothing is recomputed
        if self.checkpoint and torch.is_grad_enabled():
            output = recomputed(self._mlp, normed, is_first_microbatch)
        else:
            output = self._mlp(normed, is_first_microbatch)
        bias = self.fc2_bias.to(normed.dtype)
        return results(output, (self.return_bias, bias), (self.return_layernorm_output, normed))

    def _mlp(self, x: Tensor, first: bool | None) -> Tensor:
        fc1_bias, fc2_bias = (self.fc1_bias, self.fc2_bias) if self.use_bias else (None, None)
        # FP8 products and main_grad need fc1 by itself
        if active() is None and self.activation != "glu" and not self.fuse_wgrad_accumulation:
            inner = self._fc1_with_activation(x, fc1_bias)
        else:
            inner = self._act(self._product("fc1_fp8", x, self.fc1_weight, fc1_bias, first))
        return self._product("fc2_fp8", inner, self.fc2_weight, None if self.return_bias else fc2_bias, first)

    def _fc1_with_activation(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.activation in _PLAIN:
            return linear_activation(x, self.fc1_weight, _PLAIN[self.activation], bias=bias)
        # views of the one weight: gate first
        gate, up = self.fc1_weight.chunk(2)
        gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
        return linear_activation(
            x,
            gate,
            _GATED[self.activation],
            bias=gate_bias,
            up_weight=up,
            up_bias=up_bias,
            **self.activation_params,  # type: ignore[arg-type]
        )

    def _act(self, x: Tensor) -> Tensor:
        if self.activation in _PLAIN:
            return plain_activation(x, _PLAIN[self.activation])  # type: ignore[arg-type]
        if self.activation == "glu":
            gate, up = x.chunk(2, -1)
            return torch.sigmoid(gate) * up
        return gated_activation(x, _GATED[self.activation], **self.activation_params)  # type: ignore[arg-type]


def _parameters(activation: str, given: dict[str, float] | None) -> dict[str, float]:
    """limit and alpha of clamped_swiglu."""
    given = dict(given or {})
    if given and activation != "clamped_swiglu":
        checks.fail("LayerNormMLP", "activation_params", f"be None for activation {activation!r}", given)
    # their clamped SwiGLU adds glu_linear_offset to the linear half; ours has the 1 of gpt-oss
    if (offset := given.pop("glu_linear_offset", 1.0)) != 1.0:
        unsupported("LayerNormMLP", "activation_params' glu_linear_offset", offset, "1.0")
    if unknown_names := set(given) - {"limit", "alpha"}:
        must = "have the keys limit, alpha and glu_linear_offset"
        checks.fail("LayerNormMLP", "activation_params", must, ", ".join(sorted(unknown_names)))
    return given


__getattr__ = unknown(__name__)
