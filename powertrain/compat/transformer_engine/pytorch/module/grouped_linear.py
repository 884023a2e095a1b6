"""TransformerEngine's GroupedLinear, Fp8Padding and Fp8Unpadding on `grouped_gemm`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.module.base import ProductModule, default_init, results
from powertrain.compat.transformer_engine.pytorch.quantization import active
from powertrain.ops.conversion import stack, unsupported
from powertrain.ops.fp8.grouped import fp8_grouped_gemm
from powertrain.ops.grouped_gemm import grouped_gemm
from powertrain.quant.recipe import grad_format
from powertrain.runtime import checks, tracing

__all__ = ["Fp8Padding", "Fp8Unpadding", "GroupedLinear"]


class GroupedLinear(ProductModule):
    """Consecutive groups of rows, each times its own weight, in one product.

    Parameters: weight0, weight1, ... [out_features, in_features] and bias0, ... [out_features]. The weights are stacked
    in every forward: a copy of all of them.
    Under `autocast` with Float8BlockScaling its products are FP8. With a recipe by tensor they stay in 16 or 32 bits,
    which a line says once: grouped FP8 products have scales by row and by block.
    return_bias: (output, list of biases), the biases not added. Refused: single_grouped_weight, single_grouped_bias,
    fuse_wgrad_accumulation, and the arguments that `Linear` refuses. use_grouped_tensor is a hint.
    """

    def __init__(
        self,
        num_gemms: int,
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
        device: torch.device | str = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__(
            name=name, tp_group=tp_group, tp_size=tp_size, delay_wgrad_compute=delay_wgrad_compute,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, get_rng_state_tracker=get_rng_state_tracker,
            params_dtype=params_dtype, device=device,
        )  # fmt: skip
        for argument, value in (
            ("single_grouped_weight", single_grouped_weight),
            ("single_grouped_bias", single_grouped_bias),
            ("fuse_wgrad_accumulation", fuse_wgrad_accumulation),
        ):
            # each would put all experts into one tensor
            if value:
                unsupported("GroupedLinear", argument, value, "False")
        checks.require(num_gemms >= 1, "GroupedLinear", "num_gemms", "be at least 1", num_gemms)
        checks.one_of("GroupedLinear", "parallel_mode", parallel_mode, (None, "column", "row"))
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        init = default_init if init_method is None else init_method
        for i in range(num_gemms):
            self._parameter(f"weight{i}", (out_features, in_features), init, rng_tracker_name or "model-parallel-rng")
            if bias:
                self._parameter(f"bias{i}", (out_features,), nn.init.zeros_, None)
            else:
                # an empty tensor where there is no bias, as there
                setattr(self, f"bias{i}", torch.empty(0, **self._place))
        self.reset_parameters(defer_init=str(device) == "meta")

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        """[..., in_features] -> [..., out_features]; rows beyond the sum of m_splits are 0.

        m_splits  [num_gemms] rows of each group: a list, or a tensor on any device (one on the GPU is not read by the
                  host). out and dgrad_out are refused.
        """
        for argument, value in (("out", out), ("dgrad_out", dgrad_out)):
            if value is not None:
                unsupported("GroupedLinear", argument, list(value.shape), "None: a new tensor")
        # not get_parameter: FSDP and torch.func.functional_call put plain tensors in their places
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        x = self._input(inp, weights[0])
        # a list, or a tensor of any device
        splits = m_splits if isinstance(m_splits, Tensor) else torch.tensor(m_splits, device="cpu")
        checks.shape("GroupedLinear", "m_splits", splits, (self.num_gemms,), "num_gemms")
        rows = x.reshape(-1, self.in_features)
        # a tensor on the GPU is not checked: reading it would wait
        if splits.device.type == "cpu" and (total := int(splits.sum())) > rows.shape[0]:
            checks.fail("GroupedLinear", "m_splits", f"add up to at most {rows.shape[0]}, the rows of inp", total)
        # ends of the groups, as grouped_gemm reads them
        offsets = splits.cumsum(0).to(x.device, torch.int32, non_blocking=True)
        # experts are separate parameters there, so their checkpoints load; the copy is the price
        output = _product(rows, stack(weights), offsets)
        biases = [getattr(self, f"bias{i}").to(x.dtype) for i in range(self.num_gemms)]
        if self.use_bias and not self.return_bias:
            output = output + _of_rows(torch.stack(biases), offsets, rows.shape[0])
        return results(output.view(*x.shape[:-1], self.out_features), (self.return_bias, biases))


def _product(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    quantizing = active()
    if quantizing is None:
        return grouped_gemm(rows, weights, offsets)
    recipe = quantizing.recipe
    if recipe.by == "tensor":
        tracing.warn(
            "GroupedLinear: grouped FP8 products have scales by row and by block, not by tensor; it computes in the "
            "dtype of its input"
        )
        return grouped_gemm(rows, weights, offsets)
    return fp8_grouped_gemm(
        rows, weights, offsets, by=recipe.by, grad_format=grad_format(recipe), power_of_two=recipe.power_of_two
    )


def _of_rows(biases: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """The bias of every row's group [rows, N], 0 beyond the last group."""
    # the group of a row is the number of ends at or before it
    group = torch.bucketize(torch.arange(rows, device=offsets.device), offsets, right=True)
    # one row of zeros more: rows behind the last group
    none = biases.new_zeros(1, biases.shape[1])
    return torch.cat([biases, none])[group]


class Fp8Padding(nn.Module):
    """Rows of zeros after each group, up to a multiple of align_size (16 if None).

    Our products take groups of any size: only code that counts on padded groups needs it.
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        # TransformerEngine pads to 16 rows, to 32 for MXFP8 and 128 for NVFP4
        self.num_gemms, self.align_size = num_gemms, align_size or 16

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        """(inp [rows, features] with its padding, sizes of the padded groups)."""
        padded = _padded(self, m_splits)
        if padded == list(m_splits):
            return inp, m_splits
        place = _places(m_splits, padded, inp.device)
        # rows are copied to their places; zeros stay zeros through a product
        return inp.new_zeros(sum(padded), inp.shape[-1]).index_copy(0, place, inp), padded


class Fp8Unpadding(nn.Module):
    """The rows of each group without the padding that `Fp8Padding` added; m_splits are the sizes without it."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or 16

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        """[padded rows, features] -> [rows, features]."""
        padded = _padded(self, m_splits)
        return inp if padded == list(m_splits) else inp.index_select(0, _places(m_splits, padded, inp.device))


def _padded(module: Fp8Padding | Fp8Unpadding, m_splits: list[int]) -> list[int]:
    if len(m_splits) != module.num_gemms:
        checks.fail(type(module).__name__, "m_splits", f"have num_gemms {module.num_gemms} sizes", len(m_splits))
    return [-(-m // module.align_size) * module.align_size for m in m_splits]


def _places(m_splits: list[int], padded: list[int], device: torch.device) -> Tensor:
    """Where each row is among the padded ones."""
    places: list[int] = []
    start = 0
    for m, wide in zip(m_splits, padded, strict=True):
        places += range(start, start + m)
        start += wide
    # built on the host from a list of sizes, which is there already
    return torch.tensor(places, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


__getattr__ = unknown(__name__)
