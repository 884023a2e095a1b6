"""Linear layers whose weight is sharded over the ranks of a group, with products overlapped with communication.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("shard", "tensor"))
    up = ColumnParallelLinear(4096, 16384, mesh["tensor"])       # rank r has rows of the weight: features out
    down = RowParallelLinear(16384, 4096, mesh["tensor"])        # rank r has columns of it: features in
    y = down(gelu(up(x)))                                        # x, y: this rank's tokens [t, 4096]

With sequence parallelism every rank holds some of the tokens between the two (token_shards.py): the first layer
gathers them, the second sums and scatters. Without it every rank holds all of them: the second sums, and so does the
first in backward. Weights are DTensors over the group, so FSDP2 and torch.distributed.checkpoint work on top: pass a
mesh's axis then, not an Overlap, because FSDP2 requires both axes in one mesh. `quantize_model` makes their products
FP8, with sequence parallelism; tokens are then sent in FP8.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from powertrain.nn.tensor_parallel.token_shards import even_rows, gather_tokens, move_rows
from powertrain.ops.batch_invariance import refuse_invariant
from powertrain.ops.shapes import acc_dtype
from powertrain.parallel.collective_matmul import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter, replicated_gemm
from powertrain.parallel.fp8_gather import fp8_all_gather_gemm
from powertrain.parallel.fp8_scatter import fp8_gemm_reduce_scatter
from powertrain.parallel.overlap import Overlap
from powertrain.quant.linear import TakesRecipe
from powertrain.quant.recipe import Recipe
from powertrain.runtime import checks
from powertrain.runtime.nodes import ON_ONE_RANK, once_differentiable
from powertrain.runtime.positional import hinted

Ranks = DeviceMesh | Overlap


def open_overlap(ranks: Ranks) -> tuple[Overlap, DeviceMesh]:
    """The `Overlap` and the one-axis mesh of a group, each made from the other if only one is given."""
    if isinstance(ranks, DeviceMesh):
        return Overlap(ranks), ranks
    if not isinstance(ranks, Overlap):
        checks.fail(
            "powertrain.nn.tensor_parallel.linear", "ranks", "be one axis of a DeviceMesh or an Overlap", repr(ranks)
        )
    device = "cuda" if ranks.transport.on_gpus else "cpu"
    return ranks, DeviceMesh.from_group(ranks.group, device, mesh_dim_names=("tensor",))


def shard_parameter(p: Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """A parameter that is equal on all ranks, as a DTensor with one shard per rank; meta tensors stay meta."""
    local = p.detach()
    if isinstance(placement, Shard):
        # DTensor's rule, torch.chunk's
        size = -(-p.shape[placement.dim] // mesh.size())
        start = min(mesh.get_local_rank() * size, p.shape[placement.dim])
        local = local.narrow(placement.dim, start, min(size, p.shape[placement.dim] - start))
    # a view would keep the whole parameter in memory on every rank
    local = local.clone(memory_format=torch.contiguous_format)
    whole = DTensor.from_local(local, mesh, [placement], run_check=False, shape=p.shape, stride=p.stride())
    return nn.Parameter(whole, requires_grad=p.requires_grad)


def replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make a module's own parameters replicated DTensors, in place."""
    for name, p in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, shard_parameter(p, mesh, Replicate()))


def local(p: Tensor) -> Tensor:
    """This rank's shard of a parameter, with the parameter's `main_grad` if there is one."""
    if not isinstance(p, DTensor):
        return p
    main_grad = getattr(p, "main_grad", None)
    if main_grad is None:
        return p.to_local()
    part: Tensor = _Local.apply(p)
    part.main_grad = main_grad.to_local() if isinstance(main_grad, DTensor) else main_grad  # type: ignore[attr-defined]
    return part


class _Local(torch.autograd.Function):
    """`DTensor.to_local` that keeps an absent gradient (it is in main_grad) absent: torch 2.11 would return zeros."""

    @staticmethod
    def forward(ctx: Any, p: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = p.device_mesh, p.placements
        ctx.set_materialize_grads(False)
        return p.to_local()

    @staticmethod
    def backward(ctx: Any, dp: Tensor | None) -> Tensor | None:
        return None if dp is None else DTensor.from_local(dp, ctx.mesh, ctx.placements, run_check=False)


def all_reduce_grad(p: Tensor) -> Tensor:
    """A replicated parameter whose gradient is all-reduced, for ranks that apply it to their own tokens or heads."""
    param: Tensor = _AllReduceGrad.apply(p) if isinstance(p, DTensor) else p
    return param


class _AllReduceGrad(torch.autograd.Function):
    """Forward as `DTensor.to_local`; backward returns the gradient's sum over the mesh's one axis, never a Partial.

    The sum is taken in float32 and rounded once.
    """

    @staticmethod
    def forward(ctx: Any, p: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = p.device_mesh, p.placements
        return p.to_local()

    @staticmethod
    @once_differentiable("tensor parallelism", ON_ONE_RANK)
    def backward(ctx: Any, dp: Tensor) -> Tensor:
        # float32 for the sum over ranks: it is rounded once
        total = dp.to(acc_dtype(dp.dtype), memory_format=torch.contiguous_format, copy=True)
        # a traced graph knows functional collectives only
        if torch.compiler.is_compiling():
            parts = DTensor.from_local(total, ctx.mesh, [Partial()], run_check=False)
            return parts.redistribute(placements=ctx.placements).to(dp.dtype)
        dist.all_reduce(total, group=ctx.mesh.get_group())
        return DTensor.from_local(total.to(dp.dtype), ctx.mesh, ctx.placements, run_check=False)


class _ShardedLinear(TakesRecipe):
    """Base class of column- and row-parallel layers: construction, repr, FP8."""

    _weight_dim: int
    bias: nn.Parameter | None  # type: ignore[assignment]
    label: str = ""  # the layer's name in the model, for messages
    sequence_parallel: bool

    def __init__(self, in_features: int, out_features: int, ranks: Ranks, *, bias: bool, **factory: Any) -> None:
        checks.sizes(type(self).__name__, in_features=in_features, out_features=out_features)
        super().__init__(in_features, out_features, bias=bias, **factory)
        self.overlap, mesh = open_overlap(ranks)
        name, count = (("out_features", out_features), ("in_features", in_features))[self._weight_dim]
        good = count % self.overlap.size == 0
        checks.require(good, type(self).__name__, name, f"be a multiple of {self.overlap.size} ranks", count)
        self._shard(self, mesh)

    def _shard(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        self.weight = shard_parameter(linear.weight, mesh, Shard(self._weight_dim))
        if linear.bias is not None:
            self.bias = shard_parameter(linear.bias, mesh, Replicate() if self._weight_dim else Shard(0))

    @classmethod
    def from_linear(cls, linear: nn.Linear, ranks: Ranks, **options: Any) -> Any:
        """A layer with the weights of an nn.Linear that is equal on every rank, or on the meta device."""
        size = (linear.in_features, linear.out_features)
        layer = cls(*size, ranks, bias=linear.bias is not None, device="meta", dtype=linear.weight.dtype, **options)
        layer._shard(linear, cast(DTensor, layer.weight).device_mesh)
        return layer.train(linear.training)

    def extra_repr(self) -> str:
        fp8 = "" if self.fp8_recipe is None else f", fp8={self.fp8_recipe}"
        return f"{super().extra_repr()}, ranks={self.overlap.size}{fp8}"

    def why_not_fp8(self, recipe: Recipe) -> str | None:
        if recipe.is_delayed:
            return "it is sharded over ranks, whose products have no delayed scaling: use recipe tensor"
        return None if self.sequence_parallel else "it is sharded over ranks without sequence parallelism"

    def own_size(self) -> tuple[int, int]:
        size = [self.out_features, self.in_features]
        size[self._weight_dim] //= self.overlap.size
        return size[0], size[1]


class ColumnParallelLinear(_ShardedLinear):
    """x wᵀ + b with w sharded by output features: each rank computes some of them.

    Shapes: K features in, N out, W ranks; T tokens in all, t on this rank.
        x   [t, K] or [..., K], flattened; without sequence parallelism all T tokens
        y   [T, N / W]; [T, N] with gather_output; without sequence parallelism in x's leading dims
    ranks               one axis of a DeviceMesh, or an Overlap
    sequence_parallel   x is this rank's tokens; else every rank has all of them, and x's gradient is summed over ranks
    gather_output       all features on every rank; every rank then computes the same
    weight [N, K], bias [N]: DTensors, Shard(0). First values are nn.Linear's of the same generator, whatever W.
    Raises ValueError naming the argument if the ranks do not divide N.
    """

    _weight_dim = 0

    @hinted
    def __init__(
        self,
        in_features: int,
        out_features: int,
        ranks: Ranks,
        *,
        bias: bool = True,
        sequence_parallel: bool = True,
        gather_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, ranks, bias=bias, device=device, dtype=dtype)
        self.sequence_parallel, self.gather_output = sequence_parallel, gather_output

    def forward(self, x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """`shape` as `columns` takes it: without it every rank must have equally many tokens."""
        return columns(x, self, shape=shape)[0]

    def added(self, x: Tensor, rows: Sequence[int] | None) -> Tensor | None:
        """What an adapter adds to the result, [T, N / W], from this rank's tokens [t, K]; `rows` of each rank."""
        return None


class RowParallelLinear(_ShardedLinear):
    """x wᵀ + b with w sharded by input features: the ranks' products are summed; b is added once.

    Shapes: K features in, N out, W ranks; T tokens in all.
        x   [..., K / W], T tokens in the leading dims; [..., K] without input_is_parallel
        y   [t, N], this rank's share of the tokens (even_rows); without sequence parallelism [..., N], all of them
    input_is_parallel   x has this rank's features; else every rank has all and takes its own
    weight [N, K]: a DTensor, Shard(1); bias [N]: Replicate. The rest as ColumnParallelLinear.
    """

    _weight_dim = 1

    @hinted
    def __init__(
        self,
        in_features: int,
        out_features: int,
        ranks: Ranks,
        *,
        bias: bool = True,
        sequence_parallel: bool = True,
        input_is_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, ranks, bias=bias, device=device, dtype=dtype)
        self.sequence_parallel, self.input_is_parallel = sequence_parallel, input_is_parallel

    def forward(self, x: Tensor) -> Tensor:
        _check_tokens(type(self).__name__, x)
        refuse_invariant("linear layers under tensor parallelism", "use replicas or FSDP")
        if not self.input_is_parallel:
            x = _own_features(x, self.overlap)
        tokens, bias = x.flatten(0, -2), None if self.bias is None else local(self.bias)
        if self.sequence_parallel:
            rows = even_rows(tokens.shape[0], self.overlap.size)
            operands, name = (tokens, local(self.weight), self.overlap), _named(self)
            if self.fp8_recipe is None:
                y = gemm_reduce_scatter(*operands, bias=bias, rows=rows, layer=name)
            else:
                y = fp8_gemm_reduce_scatter(*operands, self.fp8_recipe, bias=bias, rows=rows, layer=name)
            more = self.added(tokens, rows)
            return y if more is None else y + more
        y = gemm_all_reduce(tokens, local(self.weight), self.overlap, bias=bias, layer=_named(self))
        return y.unflatten(0, x.shape[:-1])

    def added(self, x: Tensor, rows: Sequence[int]) -> Tensor | None:
        """What an adapter adds to the result, [t, N], from all tokens [T, K / W]; `rows` of each rank."""
        return None


class ReplicatedLinear(nn.Linear):
    """x wᵀ + b for a rank's own tokens [..., K]: the weight is replicated and its gradient all-reduced."""

    @classmethod
    def from_linear(cls, linear: nn.Linear, ranks: Ranks) -> "ReplicatedLinear":
        """A layer with the weights of an nn.Linear that is equal on every rank, or on the meta device."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, "meta", linear.weight.dtype)
        for name, p in linear.named_parameters():
            layer.register_parameter(name, shard_parameter(p, open_overlap(ranks)[1], Replicate()))
        return layer.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, all_reduce_grad(self.weight), None if self.bias is None else all_reduce_grad(self.bias))


def _named(*layers: _ShardedLinear) -> str:
    """Layer names for messages; empty under torch.compile, where a name would force one graph per layer."""
    return "" if torch.compiler.is_compiling() else ", ".join(layer.label for layer in layers if layer.label)


def name_layers(model: nn.Module) -> None:
    """Give parallel layers their names in the model."""
    for name, module in model.named_modules():
        if isinstance(module, _ShardedLinear):
            module.label = name


def of_all_tokens(x: Tensor, layer: nn.Module, shape: Sequence[int] | None = None) -> Tensor:
    """All ranks' tokens [*shape, K] of x [t, K], as `columns(x, layer, shape=shape)` gathers them; x for other layers.

    For uses of x beside a column-parallel layer: each rank's gradient is a part, and the parts are summed.
    """
    if not isinstance(layer, ColumnParallelLinear) or not layer.sequence_parallel:
        return x
    rows = None if shape is None else even_rows(torch.Size(shape).numel(), layer.overlap.size)
    tokens = gather_tokens(x.flatten(0, -2), layer.overlap, rows, gradient="parts")
    return tokens if shape is None else tokens.unflatten(0, tuple(shape))


def columns(x: Tensor, *layers: nn.Module, shape: Sequence[int] | None = None) -> list[Tensor]:
    """Results of several layers of the same x: up to three column-parallel ones share one gather of its tokens.

    shape   of all ranks' tokens, evenly sharded: leading dims of the results. None: [T], with equal counts on all ranks
    Layers of other kinds are called one after the other.
    """
    first = layers[0]
    if not isinstance(first, ColumnParallelLinear):
        return [layer(x) for layer in layers]
    for layer in layers:
        kind = isinstance(layer, ColumnParallelLinear) and layer.sequence_parallel == first.sequence_parallel
        checks.require(kind, "columns", "layers", "all be ColumnParallelLinear like the first", type(layer).__name__)
    _check_tokens(type(first).__name__, x)
    refuse_invariant("linear layers under tensor parallelism", "use replicas or FSDP")
    linears = cast(tuple[ColumnParallelLinear, ...], layers)
    tokens, overlap = x.flatten(0, -2), first.overlap
    if first.sequence_parallel:
        rows = None if shape is None else even_rows(torch.Size(shape).numel(), overlap.size)
        ys = _gathered(tokens, linears, rows)
        more = [layer.added(tokens, rows) for layer in linears]
        ys = [y if add is None else y + add for y, add in zip(ys, more, strict=True)]
        leading = (ys[0].shape[0],) if shape is None else tuple(shape)
    else:
        weights, biases = _operands(linears)
        ys = replicated_gemm(tokens, weights, overlap, bias=biases, layer=_named(*linears))
        leading = tuple(x.shape[:-1])
    whole = (_all_features(y, overlap) if layer.gather_output else y for y, layer in zip(ys, linears, strict=True))
    return [y.view(*leading, y.shape[-1]) for y in whole]


def _operands(layers: Sequence["ColumnParallelLinear"]) -> tuple[list[Tensor], list[Tensor | None]]:
    return (
        [local(layer.weight) for layer in layers],
        [None if layer.bias is None else local(layer.bias) for layer in layers],
    )


def _gathered(tokens: Tensor, layers: Sequence["ColumnParallelLinear"], rows: Sequence[int] | None) -> list[Tensor]:
    """GEMMs of all ranks' tokens; layers with the same recipe (or none) share one gather."""
    made: dict[int, Tensor] = {}
    for recipe in dict.fromkeys(layer.fp8_recipe for layer in layers):
        indices = [i for i, layer in enumerate(layers) if layer.fp8_recipe == recipe]
        alike = [layers[i] for i in indices]
        (weights, biases), overlap, name = _operands(alike), alike[0].overlap, _named(*alike)
        if recipe is None:
            ys = all_gather_gemm(tokens, weights, overlap, bias=biases, rows=rows, layer=name)
        else:
            ys = fp8_all_gather_gemm(tokens, weights, overlap, recipe, biases=biases, rows=rows, layer=name)
        made |= dict(zip(indices, ys, strict=True))
    return [made[i] for i in range(len(layers))]


def _check_tokens(name: str, x: Tensor) -> None:
    checks.require(x.dim() > 1, name, "x", "be [..., features], with a dim of tokens", list(x.shape))


def _all_features(y: Tensor, overlap: Overlap) -> Tensor:
    """All-gather of features: [T, n] of each rank -> [T, W n] on all ranks."""
    rows = (y.shape[1],) * overlap.size
    return move_rows(y.T, "gather", "slice", overlap, rows).T.contiguous()


def _own_features(x: Tensor, overlap: Overlap) -> Tensor:
    """This rank's slice of features: [..., K] on all ranks -> [..., K / W]."""
    features = x.flatten(0, -2).T
    return move_rows(features, "slice", "gather", overlap).T.unflatten(0, x.shape[:-1])
