"""`fp8_all_gather(model)`: FSDP2 gathers the weights of FP8 layers as FP8 bytes and scales.

Each rank quantizes its rows of a weight [N, K] before the all-gather; `fp8_linear` takes the gathered bytes. The scale
of an element is that of the whole weight, so results equal gathering first, bit for bit:

    row      a rank has whole rows: their scales are gathered beside them, 4 bytes a row
    block    so it is with blocks, where a rank's rows are a multiple of 128: 4 bytes for each 128x128
    tensor   the largest magnitudes of all weights are reduced at once, at the beginning of the model's forward

FSDP2 asks the sharded tensor of a parameter for `fsdp_pre_all_gather` and `fsdp_post_all_gather`. They are attributes
of that plain tensor, which copies and state dicts do not have; PyTorch's own tests set them so.
Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from powertrain.ops.fp8.formulas import DTYPES, GROUP, Copies, Quantized, magnitude_bits, padded, scale_of
from powertrain.ops.fp8.linear import GRANULARITIES
from powertrain.ops.fp8.quantize import block_scales, fp8_quantize
from powertrain.ops.shapes import cdiv
from powertrain.quant.gathered_weight import GatheredWeight
from powertrain.quant.linear import FP8Linear
from powertrain.quant.model import Part, Report
from powertrain.quant.recipe import Recipe
from powertrain.runtime import checks
from powertrain.runtime.positional import hinted


@hinted
def fp8_all_gather(model: nn.Module) -> Report:
    """Exchange the weights of a model's FP8 layers in FP8: about half the bytes of bfloat16. In place.

        model   sharded by `fully_shard` and quantized by `quantize_model`, on any device or on meta. Call the forward
                of this module, not of its parts: it begins by finding the scales of the weights
    Returns a Report: layers whose weights are gathered in FP8, and why others are not; those are gathered as before.
    `dequantize_model` undoes it too.

    Outputs, gradients and updates are those without it, bit for bit, but for block layers on which the report says
    otherwise, and with update_scales(group=None): the magnitudes of weights are always those of all ranks. Sharded
    parameters, their gradients and state dicts stay as they are; gradients are reduced in their own dtype.
    Inside a forward `layer.weight` holds the rounded values, and cannot be changed.
    Memory: a gathered weight takes one byte an element instead of two. Time: each gather quantizes the rank's rows;
    backward transposes the bytes instead of quantizing the transposed weight.
    Not for torch.compile, autocast (use MixedPrecisionPolicy) and shards on the CPU of a model on GPUs.
    Raises ValueError for a model without FP8 layers.
    """
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, FP8Linear)]
    checks.require(bool(layers), "fp8_all_gather", "model", "have FP8 layers, see quantize_model", "none")
    sharded, report, gathers = _sharded_weights(model), Report(), []
    for name, layer in layers:
        why = _why_not(layer, sharded.get(layer))
        if why:
            report.left.append(Part(name, why=why))
            continue
        report.quantized.append(Part(name, layer.recipe))
        if layer.gather is None:
            gathers.append(_Gather(layer, sharded[layer]))
    if gathers:
        wire = _Wire(gathers)
        # before FSDP's own hook, which gathers
        wire.hook = model.register_forward_pre_hook(wire.refresh, prepend=True)
    return report


def wire_bytes(N: int, K: int, recipe: Recipe, ranks: int) -> int:
    """Bytes of a weight [N, K] that `ranks` gather in FP8, scales and padding included."""
    rows = cdiv(N, ranks) * ranks
    scales = {"tensor": 0, "row": 4 * rows, "block": 4 * rows // GROUP * cdiv(cdiv(K, GROUP), 4) * 4}[recipe.by]
    return rows * padded(K) + scales


def why_not_shards(N: int, recipe: Recipe, ranks: int) -> str | None:
    """Why `ranks` cannot gather a weight of N rows in FP8, or None."""
    if ranks == 1:
        return "one rank has all of it: nothing is gathered"
    rows = cdiv(N, ranks)
    if recipe.by == "block" and rows % GROUP:
        return f"a rank has {rows} of its {N} rows, which must be a multiple of {GROUP}: ranks would share blocks"
    return None


class _Sharded(NamedTuple):
    """The weight of a layer: FSDP2's own record of it, and the module to which `fully_shard` was applied."""

    param: Any
    owner: FSDPModule


def _sharded_weights(model: nn.Module) -> dict[nn.Module, _Sharded]:
    sharded: dict[nn.Module, _Sharded] = {}
    for owner in model.modules():
        if not isinstance(owner, FSDPModule):
            continue
        state: Any = owner._get_fsdp_state()
        # PyTorch 2.11 has one group of parameters a module, later versions a list
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        params = [param for group in groups if group is not None for param in group.fsdp_params]
        sharded |= {p._module_info.module: _Sharded(p, owner) for p in params if p._module_info.param_name == "weight"}
    return sharded


def _why_not(layer: FP8Linear, sharded: _Sharded | None) -> str | None:
    """Why a layer's weight is not gathered in FP8, or None."""
    if sharded is None:
        return "FSDP2 does not shard its weight"
    param = sharded.param
    if param._module_info.shared_modules:
        return "its weight is another module's too"
    if param.is_dtensor or param.fsdp_placement.dim != 0:
        return "its weight is not sharded by rows alone"
    if param.offload_to_cpu:
        return "its shards are on the CPU"
    ranks = getattr(param.mesh_info, "shard_mesh_size", 1)
    after = param.post_forward_mesh_info
    if getattr(after, "shard_mesh_size", ranks) != ranks:
        return "after the forward it is sharded over fewer ranks (reshard_after_forward)"
    return why_not_shards(layer.out_features, layer.recipe, ranks)


class _Gather:
    """How one layer's weight is gathered."""

    scale: Tensor | None = None  # by tensor: [1]
    scale_inv: Tensor | None = None
    largest: Tensor | None = None  # magnitude

    def __init__(self, layer: FP8Linear, sharded: _Sharded) -> None:
        self.layer, self.param, self.owner = layer, sharded.param, sharded.owner
        self.wire: _Wire
        layer.gather = self
        self._forget()
        self.attach()

    @property
    def local(self) -> Tensor:
        """This rank's rows, as FSDP holds them."""
        rows: Tensor = self.param.sharded_param._local_tensor
        return rows

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gathered weight."""
        dtype: torch.dtype = self.owner._get_fsdp_state()._mp_policy.param_dtype or self.local.dtype
        return dtype

    def attach(self) -> None:
        """Give the sharded tensor FSDP's two functions, unless it has them; FSDP may have replaced it."""
        if self.local.is_meta or hasattr(self.local, "fsdp_pre_all_gather"):
            return
        # FSDP pads a shard of fewer rows than the others' by a new tensor, at the first forward; so it does that now
        self.param.reset_sharded_param()
        rows: Any = self.local
        is_whole = self.param.sharded_size == self.param.padded_sharded_param_size
        # with the longer signature FSDP refuses scales beside a shard that it has padded, with the shorter it does not
        rows.fsdp_pre_all_gather = self.pre_all_gather if is_whole else self.pre_all_gather_padded
        rows.fsdp_post_all_gather = self.post_all_gather
        self.param._init_extensions()

    def undo(self) -> None:
        """Restore the gather in the model's dtype."""
        self.layer.gather = None
        self._forget()
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            self.local.__dict__.pop(name, None)
        self.wire.leave(self)

    def _forget(self) -> None:
        """Shard the weight, and let FSDP make its memory for gathered weights anew, of another dtype."""
        self.owner.reshard()
        self.param.__dict__.pop("_unsharded_param", None)
        self.param.all_gather_outputs = []

    def pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """FSDP's protocol: the tensors that are gathered, one dimension 0 for each rank's rows."""
        return self._inputs(), None

    def pre_all_gather_padded(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        return self._inputs(), None

    @torch.no_grad()
    def _inputs(self) -> tuple[Tensor, ...]:
        recipe, (R, K) = self.layer.recipe, self.param.padded_sharded_param_size
        if recipe.by == "tensor" and self.scale is None:
            self.wire.find_scales()
        rows = self.local.to(self.dtype)
        by = GRANULARITIES[recipe.by][1]
        copies = fp8_quantize(rows, by, power_of_two=recipe.power_of_two, scale=self.scale, columns=False)
        data = copies.data.view(torch.uint8)
        if rows.shape[0] < R:
            data = torch.cat([data, data.new_zeros((R - rows.shape[0], data.shape[1]))])
        return data, *self._gathered_scales(copies, R, K)

    def _gathered_scales(self, copies: Copies, R: int, K: int) -> tuple[Tensor, ...]:
        """Those of this rank's R rows, of which the last may be padding."""
        by, scale_inv = self.layer.recipe.by, copies.scale_inv
        if by == "tensor":
            return ()
        if by == "row":
            return (torch.cat([scale_inv, scale_inv.new_ones(R - scale_inv.shape[0])]),)
        # with their padding, so that the gathered ones are as products read them
        whole = block_scales(scale_inv, R, K)._base
        assert whole is not None
        whole.fill_(1.0)
        whole[: scale_inv.shape[0], : scale_inv.shape[1]] = scale_inv
        return (whole,)

    def post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """FSDP's protocol: the weight, of views of gathered tensors; `out`, the same weight gathered again."""
        N, K = self.layer.out_features, self.layer.in_features
        data = outputs[0].view(DTYPES["e4m3"])[:N]
        match self.layer.recipe.by:
            case "tensor":
                assert self.scale_inv is not None
                scale_inv = self.scale_inv
            case "row":
                scale_inv = outputs[1][:N]
            case _:
                scale_inv = outputs[1][: cdiv(N, GROUP), : cdiv(K, GROUP)]
        quantized = Quantized(data, scale_inv)
        if out is None:
            return GatheredWeight(quantized, self.largest, (N, K), param_dtype), ()
        out.quantized, out.largest = quantized, self.largest
        return None


class _Wire:
    """The gathers of one model: those by tensor find their scales together."""

    hook: Any = None

    def __init__(self, gathers: Iterable[_Gather]) -> None:
        self.gathers = list(gathers)
        for gather in self.gathers:
            gather.wire = self

    def refresh(self, *_: Any) -> None:
        """Before a forward: for weights that changed or were replaced."""
        for gather in self.gathers:
            gather.attach()
        self.find_scales()

    def leave(self, gather: _Gather) -> None:
        self.gathers.remove(gather)
        if not self.gathers:
            self.hook.remove()

    @torch.no_grad()
    def find_scales(self) -> None:
        """Scales by tensor, in one reduction for all layers that share ranks and a recipe."""
        alike: dict[Any, list[_Gather]] = defaultdict(list)
        for gather in self.gathers:
            if gather.layer.recipe.by == "tensor":
                key = gather.param.mesh_info.shard_process_group, gather.layer.recipe, gather.dtype
                alike[key].append(gather)
        for (group, recipe, _), gathers in alike.items():
            amaxes = _largest(gathers)
            # as integers NaN is above all, which reductions of floats do not promise
            dist.all_reduce(amaxes.view(torch.int32), op=dist.ReduceOp.MAX, group=group)
            scales = scale_of(amaxes, "e4m3", recipe.power_of_two)
            if recipe.is_delayed:
                known = torch.stack([gather.layer.fp8_scale[1] for gather in gathers])
                scales = torch.where(known == 0, scales, known)
            # 16 bytes apart, as products may want their pointers
            apart = scales.new_empty((3, len(gathers), 4))
            apart[..., 0] = torch.stack([scales, 1.0 / scales, amaxes])
            for index, gather in enumerate(gathers):
                gather.scale, gather.scale_inv, gather.largest = apart[:, index, :1].unbind()


def _largest(gathers: list[_Gather]) -> Tensor:
    """The largest magnitudes of this rank's rows, rounded as the rows are before they are quantized; float32."""
    rows = [gather.local for gather in gathers]
    # a rank may have no rows of a small weight
    norms = iter(torch._foreach_norm([t for t in rows if t.numel()], torch.inf))
    largest = torch.stack([next(norms) if t.numel() else t.new_zeros(()) for t in rows])
    return magnitude_bits(largest.to(gathers[0].dtype).float()).view(torch.float32)
