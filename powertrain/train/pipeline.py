"""Training in pipeline stages: torch.distributed.pipelining's schedules over the stages of a model.

Every rank reads the batches of its data-parallel coordinate itself; between stages only the residual stream and its
gradient are sent. Gradients of a step are accumulated and reduced over the shards once, after its last micro-batch.

The schedule is 1F1B: one forward, one backward (Narayanan et al., arXiv:2104.04473), interleaved with several stages a
rank. Zero-bubble schedules walk the autograd graph twice, which an op that computes both gradients in one backward
refuses.

The bubble is (p - 1) / (v m + p - 1) of a step's time, with p ranks, v stages a rank and m micro-batches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

from powertrain.models.causal_lm import CausalLM
from powertrain.models.pipeline import keep_layers, layers_of_stages, stages_of
from powertrain.nn.attention import Context
from powertrain.train.config.schema import RunConfig
from powertrain.train.data.loader import Batch
from powertrain.train.objective import NextToken
from powertrain.train.optim import DTYPES


def my_stages(model: CausalLM, config: RunConfig, rank: int) -> list[CausalLM]:
    """This rank's stages, on the meta device as `model` is; `model` itself keeps their modules alone, in place.

    rank   among those of the pipeline: it has the stages rank, rank + size, rank + 2 size ...
    Raises ValueError, the same on every rank, where adapters leave one with nothing to train.
    """
    parallel = config.parallel
    count = parallel.pipeline * parallel.virtual_stages
    parameters = sum(p.numel() for p in model.layers[0].parameters())
    of_stages = layers_of_stages(config.model, parameters, count)
    # of all ranks and not of this one: an error on one alone would leave the others waiting
    for each in range(parallel.pipeline):
        mine = [n for part in of_stages[each :: parallel.pipeline] for n in part]
        if not any(p.requires_grad for n in mine for p in model.layers[n].parameters()):
            raise ValueError(
                f"train.lora.targets must name layers of every pipeline rank, got none among {mine} of rank {each}"
            )
    layers = of_stages[rank :: parallel.pipeline]
    stages = stages_of(model, layers)
    keep_layers(model, [n for part in layers for n in part])
    return stages


class Pipeline:
    """This rank's stages, and the exchange with the others'.

    stages   of this rank, sharded over its mesh's other axes
    mesh     pipeline x ...: its ranks are in the order of their first stages
    """

    def __init__(self, stages: Sequence[CausalLM], config: RunConfig, device: torch.device, mesh: DeviceMesh) -> None:
        self.group, self.device = mesh["pipeline"].get_group(), device
        self._ends = _ends(mesh) if config.model.tie_embeddings else None
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._config = config
        self._dtype = DTYPES[config.train.precision]
        self._count = self.size * len(stages)
        policy = MixedPrecisionPolicy(self._dtype, DTYPES[config.train.reduce_dtype])
        self._stages = [_Stage(part, NextToken(part, config.train.z_loss)) for part in stages]
        for stage in self._stages:
            # the root of FSDP's units: PipelineStage defers the reduction of gradients of such a module alone
            fully_shard(stage, mesh=mesh["shard"], mp_policy=policy, reshard_after_forward=False)
        self._schedule: Any = None

    @property
    def has_last(self) -> bool:
        """Whether the loss is computed on this rank."""
        return self._stages[-1].part.is_last

    def step(self, micro_batches: list[Batch], counted: Tensor, scaled: Callable[[Tensor], Tensor]) -> Tensor:
        """Gradients of `scaled` (a micro-batch's share of the loss) are accumulated and reduced; returns the loss [] on
        every rank. counted: number of tokens that count in the global batch."""
        # the first batch tells the shapes that stages exchange
        if self._schedule is None:
            self._schedule = self._make_schedule(micro_batches[0])
        for stage in self._stages:
            stage.begin(micro_batches, counted, scaled)
        # on the host: torch cuts it into one for each micro-batch
        index = torch.arange(len(micro_batches), device="cpu")
        losses = {"target": index} if self.has_last else {}
        try:
            self._schedule.step(*[index] * (self.rank == 0), **losses, return_outputs=False)
        except RuntimeError as error:
            own = own_error(error)
            raise own from own.__cause__
        self._sum_tied_gradients()
        return self._loss()

    def forward(self, batch: Batch, counted: Tensor) -> Tensor:
        """One batch's share of the loss, on every rank; no gradients."""
        with torch.no_grad():
            for number, stage in enumerate(self._stages):
                index = self.rank + number * self.size
                stage.begin([batch], counted, lambda share: share)
                # the first stage gets the batch's number, as in a step: FSDP's root fails on a GPU without an argument
                stream = torch.zeros(1, dtype=torch.int64, device=self.device)
                if index:
                    stream = torch.empty(stage.shape_of(batch), dtype=self._dtype, device=self.device)
                    dist.recv(stream, group=self.group, group_src=(index - 1) % self.size)
                out = stage(stream)
                if index < self._count - 1:
                    dist.send(out.contiguous(), group=self.group, group_dst=(index + 1) % self.size)
        return self._loss()

    def _loss(self) -> Tensor:
        """That of the last stage, on every rank."""
        shares = self._stages[-1].shares
        loss = torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float32, device=self.device)
        # other stages add 0
        dist.all_reduce(loss, group=self.group)
        return loss

    def train(self, mode: bool) -> None:
        """Whether dropout drops."""
        for stage in self._stages:
            stage.train(mode)

    def counts(self, name: str) -> bool:
        """Whether this rank's gradient of the parameter counts in the norm of all: a tied embedding counts once."""
        return self._ends is None or self.rank == 0 or name != "embed.weight"

    def _sum_tied_gradients(self) -> None:
        """The first and the last stage each hold the tied embedding: its gradient is the sum of theirs."""
        for stage in self._stages:
            # stages in between have no embedding
            tied = self._ends is not None and (stage.part.is_first or stage.part.is_last)
            # beside adapters it is frozen
            if tied and stage.part.embed.weight.requires_grad:
                dist.all_reduce(stage.part.embed.weight.grad.to_local(), group=self._ends)

    def _make_schedule(self, batch: Batch) -> Any:
        device = self.device
        stages: list[Any] = []
        for number, stage in enumerate(self._stages):
            index = self.rank + number * self.size
            # on meta: only shape and dtype are read, to make the receive buffers
            stream = torch.empty(stage.shape_of(batch), dtype=self._dtype, device="meta", requires_grad=True)
            number_of = torch.empty(1, dtype=torch.int64, device="meta")
            loss = torch.empty((), device="meta", requires_grad=True)
            stages.append(
                PipelineStage(
                    stage,
                    index,
                    self._count,
                    device,
                    group=self.group,
                    input_args=stream if index else number_of,
                    output_args=loss if stage.part.is_last else stream,
                )
            )
        count = self._config.train.gradient_accumulation_steps
        options: dict[str, Any] = {"n_microbatches": count, "loss_fn": lambda loss, _: loss, "scale_grads": False}
        # the interleaved schedule wants several stages a rank, the other takes exactly one
        if len(stages) > 1:
            return ScheduleInterleaved1F1B(stages, **options)
        return Schedule1F1B(stages[0], **options)


def own_error(error: RuntimeError) -> BaseException:
    """The error of a stage's forward or backward, the cause of torch's, which prints the stage's tensors."""
    is_torchs = "failed to run" in str(error).lower()
    return error.__cause__ if is_torchs and error.__cause__ is not None else error


def _ends(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of the ranks with the first and the last stage of this rank's pipeline; None on those in between."""
    own_group = None
    for pipeline in mesh.mesh.flatten(1).T.tolist():
        # every rank makes every group, in the same order
        group = dist.new_group([pipeline[0], pipeline[-1]])
        if dist.get_rank() in (pipeline[0], pipeline[-1]):
            own_group = group
    return own_group


class _Stage(nn.Module):
    """A stage as torch.distributed.pipelining calls it: once for each micro-batch of a step, in their order."""

    def __init__(self, part: CausalLM, objective: NextToken) -> None:
        super().__init__()
        self.part, self._objective = part, objective
        self.shares: list[Tensor] = []  # of the loss, by the last stage

    def begin(self, batches: list[Batch], counted: Tensor, scaled: Callable[[Tensor], Tensor]) -> None:
        """The next calls are for these batches."""
        self._batches, self._counted, self._scaled = iter(batches), counted, scaled
        self.shares = []

    def forward(self, received: Tensor) -> Tensor:
        """received: the residual stream of the stage before; by the first stage the number of the micro-batch."""
        batch = next(self._batches)
        stream = None if self.part.is_first else received
        if not self.part.is_last:
            out: Tensor = self.part(batch.tokens, stream=stream, **batch.documents)
            if torch.is_grad_enabled() and not out.requires_grad:
                # a first stage without adapters: torch asks for the gradient of its output all the same
                out.requires_grad_()
            return out
        share, _ = self._objective(batch, self._counted, stream=stream)
        # detached: the sum is reported, and the graph ends with the micro-batch
        self.shares.append(share.detach())
        return self._scaled(share)

    def shape_of(self, batch: Batch) -> tuple[int, ...]:
        """Shape of the residual stream of a batch: [B, S, D], or that of this rank's tokens."""
        sharding, tokens = self.part.sharding, batch.tokens
        packed = Context(batch.position_ids, batch.document_ids, document_starts=batch.document_starts)
        sharding.context(tokens, packed)
        return *sharding.local_part(tokens, tokens).shape, self.part.config.hidden_size
