"""liger_kernel.transformers.moe on `powertrain.parallel.experts`."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from powertrain.compat.missing import unknown
from powertrain.ops.activations import swiglu
from powertrain.ops.conversion import cat
from powertrain.ops.grouped_gemm import grouped_gemm
from powertrain.ops.moe import moe_permute, moe_unpermute
from powertrain.parallel.experts import moe_experts
from powertrain.parallel.overlap import Overlap
from powertrain.runtime import checks

__all__ = ["LigerExpertParallelFusedMoe"]

_OP = "LigerExpertParallelFusedMoe"


class LigerExpertParallelFusedMoe(nn.Module):
    """The weighted sum of each token's experts, gated MLPs that are sharded over the ranks of a group in order.

    process_group: the ranks that share the experts; None: the default group, or this process alone if there is none.
    No parameters, and no set-up of buffers beforehand. Runs on GPUs, and on the CPU.
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.process_group = process_group

    def forward(
        self, hidden_states: Tensor, expert_indices: Tensor, expert_weights: Tensor, all_B: Tensor, all_C: Tensor,
        all_A: Tensor, num_experts: int,
    ) -> Tensor:  # fmt: skip
        """sum over j of weights[t, j] * A[e] (silu(B[e] x[t]) * C[e] x[t]), e the j-th expert of token t.

        Shapes: H hidden size, I intermediate size, E = num_experts in all on W ranks, k experts a token.
            hidden_states   [..., H]      float32, float16 or bfloat16 (float64 on the CPU)
            expert_indices  [..., k]      integers in [0, E)
            expert_weights  [..., k]      floating
            all_B, all_C    [E / W, I, H]  gate and up projections of this rank's experts, dtype of hidden_states
            all_A           [E / W, H, I]  down projections
        Returns [..., H]. Differentiable in hidden_states, expert_weights and the three weights.
        Memory: gate and up are packed into one weight at each call, a copy of both, and its gradient is unpacked.
        Collective over the group, as `powertrain.parallel.experts.moe_experts`; the host reads the rows' counts.
        Raises ValueError naming the argument.
        """
        # there too None means all ranks
        group = dist.group.WORLD if self.process_group is None and dist.is_initialized() else self.process_group
        self._check(hidden_states, expert_indices, expert_weights, all_B, all_C, all_A, num_experts, group)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        # leading dims mean nothing to routing
        experts, weights = (t.reshape(-1, t.shape[-1]) for t in (expert_indices, expert_weights))
        # one product reads a token's row once for gate and up
        gate_up = cat((all_B, all_C), 1)
        if group is not None and group.size() > 1:
            y = moe_experts(x, weights, experts.int(), gate_up, all_A, Overlap(group))
        else:
            rows, offsets, positions = moe_permute(x, experts.int(), num_experts)
            y = grouped_gemm(swiglu(grouped_gemm(rows, gate_up, offsets)), all_A, offsets)
            y = moe_unpermute(y, positions, weights)
        return y.view(hidden_states.shape)

    @staticmethod
    def _check(
        x: Tensor, experts: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, num_experts: int,
        group: ProcessGroup | None,
    ) -> None:  # fmt: skip
        ranks = 1 if group is None else group.size()
        good = not (experts.is_floating_point() or experts.is_complex() or experts.dtype is torch.bool)
        checks.require(good, _OP, "expert_indices", "be an integer tensor", checks.name(experts.dtype))
        checks.require(gate.dim() == 3, _OP, "all_B", "have shape [E / W, I, H]", list(gate.shape))
        mine, width, _ = gate.shape
        # an expert beyond the ranks' would have no weights
        good = num_experts == mine * ranks
        checks.require(good, _OP, "num_experts", f"be {mine * ranks}, all_B's {mine} on {ranks} ranks", num_experts)
        hidden = x.shape[-1]
        checks.shape(_OP, "all_B", gate, (mine, width, hidden), "last dim of hidden_states")
        checks.shape(_OP, "all_C", up, gate.shape, "shape of all_B")
        checks.shape(_OP, "all_A", down, (mine, hidden, width), "all_B with its last two dims exchanged")
        good = experts.dim() > 0 and experts.shape[:-1] == x.shape[:-1]
        must = f"have shape {[*x.shape[:-1]]} and k, as hidden_states without its last dim"
        checks.require(good, _OP, "expert_indices", must, list(experts.shape))
        checks.shape(_OP, "expert_weights", weights, experts.shape, "shape of expert_indices")
        for name, weight in (("all_B", gate), ("all_C", up), ("all_A", down)):
            must = f"have hidden_states' dtype {checks.name(x.dtype)}"
            checks.require(weight.dtype is x.dtype, _OP, name, must, checks.name(weight.dtype))


__getattr__ = unknown(__name__)
