"""A mixture of experts in place of an MLP: router, routed experts by grouped GEMM, shared experts."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from powertrain.nn.attention import Context
from powertrain.nn.mlp import GatedMLP
from powertrain.nn.tensor_parallel.linear import local, shard_parameter
from powertrain.nn.token_choice import TokenChoiceRouter
from powertrain.nn.weights import drawn
from powertrain.ops.activations import Activation, activation, gated_activation
from powertrain.ops.moe import (
    Score,
    check_choice,
    moe_load_balancing_loss,
    moe_permute,
    moe_route,
    moe_unpermute,
    moe_update_bias_,
)
from powertrain.parallel.experts import spread_experts
from powertrain.parallel.overlap import Overlap
from powertrain.quant.grouped import GroupedProducts
from powertrain.quant.recipe import Block, Row
from powertrain.runtime import checks
from powertrain.runtime.dispatch import without_autocast
from powertrain.runtime.positional import hinted


class Router(nn.Module):
    """x [..., hidden_size] -> (logits [..., E] float32, weights [T, k] float32, experts [T, k] int32), T tokens in all.

    Options are those of `moe_route`. The product is float32 whatever the weights are, and the correction bias stays
    float32 when the module is cast: its steps of 1e-3 would be lost in 16 bits.
    """

    correction_bias: Tensor

    @hinted
    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: Score = "sigmoid",
        normalize: bool = True,
        scaling_factor: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
    ) -> None:
        super().__init__()
        checks.sizes("Router", hidden_size=hidden_size, num_experts=num_experts)
        check_choice("Router", num_experts, top_k, score, scaling_factor, num_groups, top_groups)
        self.weight = drawn(num_experts, hidden_size)
        self.register_buffer("correction_bias", torch.zeros(num_experts, dtype=torch.float32))
        self.options: dict[str, Any] = {
            "top_k": top_k, "score": score, "normalize": normalize, "scaling_factor": scaling_factor,
            "num_groups": num_groups, "top_groups": top_groups,
        }  # fmt: skip
        self.expert_weights_per_token = num_experts * hidden_size

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        checks.last_dim("Router", "x", x, self.weight.shape[1])
        # autocast would compute the product in 16 bits, and close scores would choose other experts
        with without_autocast(x.device):
            logits = F.linear(x.float(), self.weight.float())
        weights, experts = moe_route(logits.flatten(0, -2), self.correction_bias, **self.options)
        return logits, weights, experts

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        before = self.correction_bias
        super()._apply(fn, recurse)
        if self.correction_bias.dtype is not torch.float32:
            # from the one before the cast, which has lost its low bits
            self.correction_bias = before.to(self.correction_bias.device)
        return self


class Experts(GroupedProducts):
    """Rows sorted by expert -> the same, each expert a gated MLP: down[e](silu(gate) * up), gate and up packed.

    After `shard` each rank keeps some of the experts, and rows are sent to theirs (powertrain/parallel/experts.py), in
    FP8 with a `wire` (powertrain/nn/fp8_dispatch.py).
    """

    overlap: Overlap | None = None
    wire: Row | Block | None = None

    @hinted
    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        checks.sizes("Experts", hidden_size=hidden_size, intermediate_size=intermediate_size, num_experts=num_experts)
        self.gate_up = drawn(num_experts, 2 * intermediate_size, hidden_size)
        self.down = drawn(num_experts, hidden_size, intermediate_size)
        self.expert_weights_per_token = top_k * 3 * intermediate_size * hidden_size

    def shard(self, mesh: DeviceMesh, *, transport: str = "auto") -> None:
        """Keep this rank's experts, the weights being DTensors over one axis of a mesh. In place, on meta or not.

        Raises ValueError if the ranks do not divide the experts.
        """
        count = self.gate_up.shape[0]
        good = count % mesh.size() == 0
        checks.require(good, "Experts", "num_experts", f"be a multiple of the {mesh.size()} ranks", count)
        self.overlap = Overlap(mesh, transport=transport)
        self.gate_up, self.down = (
            shard_parameter(self.gate_up, mesh, Shard(0)),
            shard_parameter(self.down, mesh, Shard(0)),
        )

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        if self.overlap is not None:
            gate_up, down = local(self.gate_up), local(self.down)
            return spread_experts(rows, offsets, gate_up, down, self.overlap, wire=self.wire)
        hidden = gated_activation(self.grouped(rows, self.gate_up, offsets), "swiglu")
        return self.grouped(hidden, self.down, offsets)

    def grouped_weights(self) -> dict[str, tuple[int, int, int]]:
        return {name: tuple(getattr(self, name).shape) for name in ("gate_up", "down")}

    def why_not_fp8(self) -> str | None:
        return None if self.overlap is None else "experts spread over ranks compute in 16 bits"


class PlainExperts(GroupedProducts):
    """Rows sorted by expert -> the same, each expert an MLP without a gate: down[e](act(up[e](x)))."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, *, kind: Activation
    ) -> None:
        super().__init__()
        op = "PlainExperts"
        checks.sizes(op, hidden_size=hidden_size, intermediate_size=intermediate_size, num_experts=num_experts)
        self.kind = kind
        self.up = drawn(num_experts, intermediate_size, hidden_size)
        self.down = drawn(num_experts, hidden_size, intermediate_size)
        self.expert_weights_per_token = top_k * 2 * intermediate_size * hidden_size

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        hidden = activation(self.grouped(rows, self.up, offsets), self.kind)
        return self.grouped(hidden, self.down, offsets)

    def grouped_weights(self) -> dict[str, tuple[int, int, int]]:
        return {name: tuple(getattr(self, name).shape) for name in ("up", "down")}


class MoE(nn.Module):
    """x [..., S, hidden_size] -> the same: the sum of each token's experts, weighted, and of the shared ones.

        router             see Router and TokenChoiceRouter
        shared_size        columns of the shared experts, which are one MLP; 0: none
        kind               swiglu: `Experts`; an activation without a gate: `PlainExperts`
        bias               one more parameter [hidden_size], added to every token's result
    While training it counts `load` [E] int64, the assignments since `balance`, and keeps `balance_loss`, that of the
    last forward (`moe_load_balancing_loss` of each sequence), differentiable. Around the module itself
    torch.utils.checkpoint counts twice. Transforms of torch.func take its buffers as arguments while training, since
    `load` is written, as BatchNorm's are.
    """

    load: Tensor

    @hinted
    def __init__(
        self,
        router: Router | TokenChoiceRouter,
        hidden_size: int,
        intermediate_size: int,
        *,
        shared_size: int = 0,
        kind: Activation | Literal["swiglu"] = "swiglu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        checks.one_of("MoE", "kind", kind, ("swiglu", *get_args(Activation)))
        width = router.weight.shape[1]
        if width != hidden_size:
            checks.fail("MoE", "router", f"take hidden_size {hidden_size}", width)
        sizes = hidden_size, intermediate_size, router.weight.shape[0], router.options["top_k"]
        self.router: Any = router
        self.experts: Any = Experts(*sizes) if kind == "swiglu" else PlainExperts(*sizes, kind=kind)
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None
        self.shared = GatedMLP(hidden_size, shared_size) if shared_size else None
        # not in checkpoints: it is zero after each optimizer step, and only then is one written
        self.register_buffer("load", torch.zeros(sizes[2], dtype=torch.int64), persistent=False)
        self.balance_loss: Tensor | None = None
        self.register_load_state_dict_post_hook(_count_from_zero)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, without the last forward's loss: PyTorch refuses to copy tensors of a graph."""
        return {**self.__dict__, "balance_loss": None}

    def forward(self, x: Tensor, context: Context = Context()) -> Tensor:  # noqa: B008
        checks.tensor("MoE", "x", x)
        checks.require(x.dim() > 1, "MoE", "x", "be [..., S, hidden_size]", list(x.shape))
        logits, weights, experts = self.router(x)
        rows, offsets, positions = moe_permute(x.flatten(0, -2), experts, self.load.shape[0])
        y = moe_unpermute(self.experts(rows, offsets), positions, weights).view_as(x)
        if self.training:
            per_sequence = experts.view(*x.shape[:-1], experts.shape[-1])
            balance_loss = moe_load_balancing_loss(logits, per_sequence, score=self.router.options["score"])
            assignments = offsets.diff(prepend=offsets.new_zeros(1))
            if context.routed is None:
                self.keep(balance_loss, assignments)
            else:
                context.routed.extend((balance_loss, assignments))
        if self.bias is not None:
            y = y + self.bias
        return y if self.shared is None else y + self.shared(x, context)

    def keep(self, balance_loss: Tensor, assignments: Tensor) -> None:
        """Store the balance loss of a training forward and add its assignments to `load`."""
        self.balance_loss = balance_loss
        self.load += assignments

    @torch.no_grad()
    def balance(self, rate: float, group: ProcessGroup | None = None) -> None:
        """Update the correction bias towards an even load and reset the counts; called after an optimizer step.

        group   the process group whose ranks saw other tokens; None: this rank alone
        """
        if group is not None:
            # the bias stays equal on all ranks only if all of them see one load
            torch.distributed.all_reduce(self.load, group=group)
        moe_update_bias_(self.router.correction_bias, self.load, rate)
        self.load.zero_()


def _count_from_zero(moe: MoE, keys: Any) -> None:
    """Make `load` real after `load_state_dict(assign=True)` on a meta module: it is not in the state dict."""
    device = moe.router.weight.device
    if moe.load.is_meta and device.type != "meta":
        moe.load = torch.zeros_like(moe.load, device=device)
