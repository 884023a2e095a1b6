"""TransformerEngine's Linear and LayerNormLinear on `fp8_linear` and our norms."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.module.base import Norm, ProductModule, default_init, results
from powertrain.ops.conversion import cat, unsupported
from powertrain.runtime import checks

__all__ = ["LayerNormLinear", "Linear"]

Split = tuple[str, ...] | dict[str, int] | None


class _Projection(ProductModule):
    """One product, whose weight is one parameter or several below each other."""

    gemms = ("fp8",)

    def _projection_parameters(
        self, in_features: int, out_features: int, bias: bool, return_bias: bool, parallel_mode: str | None,
        parameters_split: Split, init_method: Callable[[Tensor], Any] | None, rng_tracker_name: str | None = None,
    ) -> None:  # fmt: skip
        op = type(self).__name__
        checks.one_of(op, "parallel_mode", parallel_mode, (None, "column", "row"))
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias, self.parallel_mode = bias, return_bias, parallel_mode
        sizes = _split_sizes(op, parameters_split, out_features)
        # a joined weight has no main_grad of its own
        if self.fuse_wgrad_accumulation and len(sizes) > 1:
            unsupported(op, "fuse_wgrad_accumulation", True, "False with parameters_split")
        self.weight_names = [f"{name}weight" for name in sizes]
        self.bias_names = [f"{name}bias" for name in sizes]
        init = default_init if init_method is None else init_method
        for name, size in zip(self.weight_names, sizes.values(), strict=True):
            # tensor-parallel shards are drawn from the tracker's state, biases are zeros
            self._parameter(name, (size, in_features), init, rng_tracker_name or "model-parallel-rng")
        for name, size in zip(self.bias_names, sizes.values(), strict=True):
            if bias:
                self._parameter(name, (size,), nn.init.zeros_, None)
            else:
                setattr(self, name, torch.empty(0, **self._place))
        self.reset_parameters(defer_init=str(self._place["device"]) == "meta")

    def _project(self, x: Tensor, is_first_microbatch: bool | None) -> tuple[Tensor, Tensor]:
        """The product, with the bias unless it is returned, and the bias (empty where there is none)."""
        # torch.cat of one tensor would copy the weight
        weight, bias = (_joined([getattr(self, name) for name in n]) for n in (self.weight_names, self.bias_names))
        if len(self.weight_names) > 1:
            is_first_microbatch = None  # a joined weight is another tensor each time
        added = bias if self.use_bias and not self.return_bias else None
        return self._product("fp8", x, weight, added, is_first_microbatch), bias.to(x.dtype)


def _split_sizes(op: str, split: Split, out_features: int) -> dict[str, int]:
    """Prefix of the parameters' names -> rows."""
    if split is None:
        return {"": out_features}
    sizes = dict(split) if isinstance(split, dict) else dict.fromkeys(split, out_features // max(1, len(split)))
    if not sizes or sum(sizes.values()) != out_features:
        checks.fail(op, "parameters_split", f"have sizes that add up to out_features {out_features}", split)
    # "query_" and "query" name the same parameter there
    named = {f"{name.rstrip('_')}_": size for name, size in sizes.items()}
    checks.require(len(named) == len(sizes), op, "parameters_split", "have names of different parameters", split)
    return named


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else cat(parts)


class Linear(_Projection):
    """x Wᵀ + b with TransformerEngine's names; FP8 under `autocast`.

    Parameters: weight [out_features, in_features] and bias [out_features]; with parameters_split, a tuple of names or
    a dictionary of names and sizes, query_weight, query_bias and so on, one product of all.
    return_bias: (x Wᵀ, bias), the bias not added. fuse_wgrad_accumulation: backward adds the weight's gradient to its
    attribute main_grad, and its grad stays None. is_first_microbatch: True quantizes the weight, False takes that
    quantized weight again; None quantizes it in each call.
    Tensor parallelism (tp_size, tp_group of several ranks), delay_wgrad_compute, fp8_output and fp8_grad are refused.
    What acts only there with several ranks is taken: sequence_parallel, parallel_mode, ub_*, symmetric_ar_type;
    save_original_input is a hint.
    Memory, numerics and errors of FP8: `fp8_linear`. Sizes need not be multiples of 16, as they must there.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Split = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            name=name, tp_group=tp_group, tp_size=tp_size, delay_wgrad_compute=delay_wgrad_compute,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, get_rng_state_tracker=get_rng_state_tracker,
            params_dtype=params_dtype, device=device,
        )  # fmt: skip
        self._projection_parameters(
            in_features, out_features, bias, return_bias, parallel_mode, parameters_split, init_method,
            rng_tracker_name,
        )  # fmt: skip

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:  # fmt: skip
        """[..., in_features] -> [..., out_features], or (that, bias)."""
        _refuse_fp8_tensors("Linear", fp8_output=fp8_output, fp8_grad=fp8_grad)
        x = self._input(inp, getattr(self, self.weight_names[0]))
        output, bias = self._project(x, is_first_microbatch)
        return results(output, (self.return_bias, bias))


class LayerNormLinear(Norm, _Projection):
    """norm(x) Wᵀ + b with TransformerEngine's names; FP8 under `autocast`.

    Parameters: layer_norm_weight [in_features], layer_norm_bias (of "LayerNorm"), and those of `Linear`.
    zero_centered_gamma multiplies by 1 + layer_norm_weight. Results: the output, then the bias with return_bias, then
    norm(x) with return_layernorm_output. Other arguments as of `Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Split = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            name=name, tp_group=tp_group, tp_size=tp_size, delay_wgrad_compute=delay_wgrad_compute,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, get_rng_state_tracker=get_rng_state_tracker,
            params_dtype=params_dtype, device=device,
        )  # fmt: skip
        self.return_layernorm_output = return_layernorm_output
        self._norm_parameters(in_features, eps, normalization, zero_centered_gamma)
        self._projection_parameters(
            in_features, out_features, bias, return_bias, parallel_mode, parameters_split, init_method
        )

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:  # fmt: skip
        """[..., in_features] -> [..., out_features], or a tuple that begins with it."""
        _refuse_fp8_tensors("LayerNormLinear", fp8_output=fp8_output, fp8_grad=fp8_grad)
        normed = self._norm(self._input(inp, self.layer_norm_weight))
        output, bias = self._project(normed, is_first_microbatch)
        return results(output, (self.return_bias, bias), (self.return_layernorm_output, normed))


def _refuse_fp8_tensors(op: str, **options: bool | None) -> None:
    for name, value in options.items():
        # an FP8 tensor between modules needs a class of its own that carries the scale
        if value:
            unsupported(op, name, value, "False: tensors between modules have 16 or 32 bits")


__getattr__ = unknown(__name__)
