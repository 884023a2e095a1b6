"""Sharding of a model's tokens over context-parallel ranks: each reads the batch and keeps its part of every sequence.

Losses are equal on every rank; each differentiates its own part of them, times the number of ranks, so the average over
the ranks of a parameter's gradients is the gradient of that loss (FSDP computes it).
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powertrain.models.causal_lm import Unsharded
from powertrain.nn.attention import Context
from powertrain.ops.shapes import document_starts
from powertrain.parallel.context.api import ContextParallel
from powertrain.parallel.context.sharding import Sharding

_CACHED_LENGTHS = 16  # sequence lengths whose shardings are cached


class ContextSharding(Unsharded):
    """Tokens [B, S] of a batch as [B, n]; where they are packed documents, all of them one behind the other, as [1, n].

    cp      the ranks
    inner   sharding of a rank's tokens: they may also be sharded over tensor ranks

    Document boundaries are computed on the host, which waits for the ids once per batch that has them.
    """

    def __init__(self, cp: ContextParallel, inner: Unsharded | None = None) -> None:
        self.cp, self.inner = cp, inner or Unsharded()
        # bounded: each cached sharding holds index tensors on the device, as long as the sequence
        self._of_length = lru_cache(_CACHED_LENGTHS)(cp.sharding)
        self._sharding: Sharding | None = None  # of the batch in work

    def context(self, tokens: Tensor, context: Context) -> Context:
        if context.cache is not None:
            raise NotImplementedError("CausalLM: cache must be None under context parallelism, got a KVCache")
        # computed once a batch: labels and positions are cut the same way
        self._sharding = sharding = self._sharding_of(tokens, context)
        positions = context.position_ids
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        # attention alone needs other ranks' tokens
        inner = Context(self._part(positions, tokens), across=partial(_attend, self.cp, sharding))
        return self.inner.context(self._part(tokens, tokens), inner)

    def local_part(self, x: Tensor, tokens: Tensor) -> Tensor:
        part = self._part(tokens, tokens)
        # positions are this rank's already
        return self.inner.local_part(x if x.shape == part.shape != tokens.shape else self._part(x, tokens), part)

    def before_layers(self, x: Tensor) -> Tensor:
        return self.inner.before_layers(x)

    def after_layers(self, x: Tensor) -> Tensor:
        return self.inner.after_layers(x)

    def gather_states(self, states: Tensor, tokens: Tensor) -> Tensor:
        states = self.inner.gather_states(states, self._part(tokens, tokens))
        assert self._sharding is not None
        if self._sharding.is_packed:
            return self.cp.unshard(states[0], self._sharding, dim=0).unflatten(0, tokens.shape)
        return self.cp.unshard(states, self._sharding, dim=1)

    def loss(self, mean_loss: Callable[..., Tensor], states: Tensor, labels: Tensor) -> Tensor:
        part, weight = normalize_labels(self._part(labels, labels), (labels != -100).sum())
        loss = self.inner.loss(mean_loss, states, part) * (weight * self.cp.world_size)
        if not part.numel():
            # a rank without a token: the mean of none is nan, even times zero. The head has run, as FSDP wants it to
            loss = loss.nan_to_num(0.0)
        return mean_of_ranks(loss, self.cp.peers.group)

    def _sharding_of(self, tokens: Tensor, context: Context) -> Sharding:
        starts = context.document_starts
        if starts is None and context.document_ids is not None:
            starts = document_starts(context.document_ids)
        if starts is not None:
            # without the empty documents at the end
            return self.cp.sharding(cu_seqlens=starts.cpu().unique_consecutive())
        # the same lengths come in every step, documents do not
        return self._of_length(tokens.shape[1])

    def _part(self, x: Tensor, tokens: Tensor) -> Tensor:
        """This rank's part of an x [B, S] or [S]."""
        sharding = self._sharding
        assert sharding is not None
        x = x.expand_as(tokens)
        if sharding.is_packed:
            # packed documents are one row
            return sharding.shard(x.flatten(), dim=0)[0][None]
        return sharding.shard(x, dim=1)[0]


def _attend(cp: ContextParallel, sharding: Sharding, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    if sharding.is_packed:
        return cp.attention(q[0], k[0], v[0], sharding, **options)[None]
    return cp.attention(q, k, v, sharding, **options)


def normalize_labels(labels: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Labels for a mean loss, and the weight of that mean: its share of `total` counted labels.

    Without any counted label the mean and its gradients would be nan, even times zero; all labels count then, with
    weight 0.
    """
    count = (labels != -100).sum()
    # torch.where on the device: reading the count would wait for it
    return torch.where(count > 0, labels, 0), count / total.clamp(min=1)


def mean_of_ranks(loss: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean over the ranks of a group; the gradient passes unchanged."""
    mean: Tensor = _MeanOfRanks.apply(loss, group)
    return mean


class _MeanOfRanks(torch.autograd.Function):
    """The mean over the ranks of a group; the gradient goes through unchanged."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: dist.ProcessGroup) -> Tensor:
        # cloned: the caller's loss must stay its own
        total = loss.clone()
        dist.all_reduce(total, group=group)
        return total / dist.get_world_size(group)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
        # each rank differentiates its own part; the mean is only reported
        return dloss, None
