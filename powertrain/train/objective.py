"""Objectives of training: `objective(batch, counted)` returns a micro-batch's share of the loss and of its metrics.

The shares of all micro-batches and ranks add up to the mean over the tokens, pairs or completions that count in the
global batch. The losses are those of powertrain/losses.py, on log-probabilities that the model's head gives.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from powertrain import losses
from powertrain.losses import mean_by_sequence, sum_by_sequence
from powertrain.models import build
from powertrain.models.sequence_sharding import normalize_labels
from powertrain.nn.lora import without_lora
from powertrain.ops.linear_log_probs import LogProbs, Teacher, linear_log_probs
from powertrain.train.checkpoint.load import Weights, build_from, fitted, kinds_at, open_weights
from powertrain.train.config.schema import RunConfig
from powertrain.train.data.completions import Format
from powertrain.train.data.loader import Batch, CompletionBatch
from powertrain.train.optim import DTYPES

# the fields that a record of data must have
FORMATS: dict[str, Format] = {
    "sft": "messages", "dpo": "pairs", "kto": "labels", "reward": "pairs", "policy": "advantages",
    "distill": "messages",
}  # fmt: skip
_AVERAGED = ("ipo", "simpo", "orpo")  # losses of log-probabilities a token, not of their sums


class Objective(Protocol):
    """metrics: names of the numbers beside the loss."""

    metrics: tuple[str, ...]

    def count(self, batch: Batch) -> Tensor:
        """The number of tokens, pairs or completions in the batch, float32 []."""

    def __call__(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        """(share of the loss [], share of the metrics [M]), of `counted` in the global batch."""


def make_objective(model: nn.Module, config: RunConfig, device: torch.device) -> Objective:
    """The objective of a run. Raises ValueError naming a key, FileNotFoundError for weights that are not there."""
    name = config.train.objective
    if name in ("pretrain", "sft"):
        return NextToken(model, config.train.z_loss)
    if name == "reward":
        return Reward(model, config)
    if name == "distill":
        return Distill(model, config, _teacher(config, device))
    ref = reference(model, config, device) if config.train.has_reference else None
    compared: dict[str, Callable[..., Objective]] = {"dpo": Preference, "kto": KTO, "policy": Policy}
    return compared[name](model, config, ref)


def has_frozen_copy(config: RunConfig) -> bool:
    """Whether a second model of this size is in memory: a reference. (A teacher may have another size.)"""
    return config.train.has_reference and (config.train.lora is None or config.train.reference is not None)


class NextToken:
    """Mean cross entropy of the labels that count; while training with the z-loss."""

    metrics: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, z_loss: float) -> None:
        self.model, self.z_loss = model, z_loss

    def count(self, batch: Batch) -> Tensor:
        return (batch.labels != -100).sum().float()

    def __call__(self, batch: Batch, counted: Tensor, stream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """stream: of a pipeline's last stage, the residual stream before it."""
        # the model divides by this batch's tokens; the share is by those of the global batch
        labels, weight = normalize_labels(batch.labels, counted)
        # an evaluation reports the language model's loss, as beside the load balancing loss
        z_loss = self.z_loss if self.model.training else 0.0
        loss = self.model(batch.tokens, labels, z_loss=z_loss, stream=stream, **batch.documents)
        return loss * weight, loss.new_empty(0)


def _completions(batch: Batch) -> CompletionBatch:
    assert batch.completions is not None
    return batch.completions


def _number(batch: Batch, value: float) -> Tensor:
    """A number on the batch's device, without a copy from the host, which would wait for the device."""
    return batch.tokens.new_full((), value, dtype=torch.float32)


def token_log_probs(model: nn.Module, batch: Batch, **options: Any) -> LogProbs:
    """`LogProbs` of the labels [B, S]; 0 where they do not count."""

    def read(states: Tensor, weight: Tensor, bias: Tensor | None) -> LogProbs:
        return linear_log_probs(states, weight, batch.labels, bias=bias, **options)

    log_probs: LogProbs = model(batch.tokens, read=read, **batch.documents)
    return log_probs


class Reference:
    """Log-probabilities of the frozen model that the trained one is compared with, or those that the batch brings.

    model   None: freed, since every batch brings them (reference_cache.py)
    """

    def __init__(self, model: nn.Module, *, is_base: bool) -> None:
        self.model: nn.Module | None = model
        self.is_base = is_base

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        # values that an earlier pass has kept (reference_cache.py)
        if batch.reference is not None:
            return batch.reference
        assert self.model is not None
        if not self.is_base:
            return token_log_probs(self.model, batch).log_probs
        # the base of LoRA is the reference: no second model in memory
        with without_lora(self.model), _evaluating(self.model):
            return token_log_probs(self.model, batch).log_probs


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    # dropout would make the reference a random one
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


def reference(model: nn.Module, config: RunConfig, device: torch.device) -> Reference:
    """train.reference; else a LoRA's base; else a frozen copy of the weights that the run begins with.

    Made from files (or the seed), not from the model, so that a resumed run has the same one.
    """
    path = config.train.reference
    if path is None and config.train.lora is not None:
        return Reference(model, is_base=True)
    if path is None and config.checkpoint.load is not None and kinds_at(Path(config.checkpoint.load)):
        path = config.checkpoint.load
        if Path(path).resolve() in (config.checkpoint_folder().resolve(), config.folder().resolve()):
            raise ValueError(
                f"train.reference must name the weights that training began with, since checkpoint.load is the run's "
                f"own {path}, got none"
            )
    dtype = DTYPES[config.train.precision]
    if path is not None:
        weights = fitted(_weights("train.reference", path), config.model)
        return Reference(_frozen(build_from(weights, device, dtype)), is_base=False)
    copy = build(config.model)
    copy.to_empty(device=device)
    # weights depend on the seed and names only, so the copy needs no communication and no file
    copy.init_weights(config.train.seed)
    return Reference(_frozen(copy.to(dtype)), is_base=False)


def _teacher(config: RunConfig, device: torch.device) -> nn.Module:
    path = config.train.distill.teacher
    assert path is not None
    weights = _weights("train.distill.teacher", path)
    # more words than the student's would have no counterpart; fewer are filled up below
    if weights.config.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"train.distill.teacher must have at most the student's {config.model.vocab_size} rows of vocabulary, "
            f"got {weights.config.vocab_size}"
        )
    return _frozen(build_from(weights.with_vocabulary(config.model.vocab_size), device, DTYPES[config.train.precision]))


def _weights(key: str, path: str) -> Weights:
    try:
        return open_weights(Path(path)).need_head(key)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{key}: {error}") from None


def _frozen(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)


class Preference:
    """Pairs of a chosen and a rejected completion, with one of powertrain.losses.

    nll: cross entropy of the chosen completions, averaged over the tokens of a micro-batch
    """

    metrics: tuple[str, ...] = ("rewards_chosen", "rewards_rejected", "margin", "accuracy", "nll")

    def __init__(self, model: nn.Module, config: RunConfig, reference: Reference | None) -> None:
        self.model, self.options, self.reference = model, config.train.preference, reference
        # the papers of these two add the cross entropy; the others have none
        usual = 1.0 if self.options.loss in ("cpo", "orpo") else 0.0
        self.nll_weight = usual if self.options.nll_weight is None else self.options.nll_weight

    def count(self, batch: Batch) -> Tensor:
        return _number(batch, len(_completions(batch).values) / 2)

    def __call__(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        sequence, total = _completions(batch).sequence, len(_completions(batch).values)
        by_sequence = mean_by_sequence if self.options.loss in _AVERAGED else sum_by_sequence
        ref = None if self.reference is None else by_sequence(self.reference(batch), sequence, total)
        tokens = token_log_probs(self.model, batch).log_probs
        chosen, rejected = by_sequence(tokens, sequence, total).chunk(2)
        ref_chosen, ref_rejected = (torch.zeros_like(chosen),) * 2 if ref is None else ref.chunk(2)
        # chosen completions are the first half; -1 is a prompt or padding
        of_chosen = (sequence >= 0) & (sequence < total // 2)
        nll = -torch.where(of_chosen, tokens, 0.0).sum() / of_chosen.sum()
        each = self._loss(chosen, rejected, ref_chosen, ref_rejected) + self.nll_weight * nll
        with torch.no_grad():
            better, worse = self.options.beta * (chosen - ref_chosen), self.options.beta * (rejected - ref_rejected)
            metrics = (better, worse, better - worse, (better > worse).float(), nll.expand_as(better))
        return each.sum() / counted, torch.stack([m.detach().sum() for m in metrics]) / counted

    def _loss(self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
        options, with_ref = self.options, (chosen, rejected, ref_chosen, ref_rejected)
        beta, smoothing = options.beta, options.label_smoothing
        if options.loss in ("dpo", "robust"):
            return losses.dpo_loss(*with_ref, beta=beta, label_smoothing=smoothing, robust=options.loss == "robust")
        if options.loss == "ipo":
            return losses.ipo_loss(*with_ref, beta=beta)
        if options.loss == "simpo":
            return losses.simpo_loss(chosen, rejected, beta=beta, gamma=options.gamma, label_smoothing=smoothing)
        if options.loss == "cpo":
            return losses.cpo_loss(chosen, rejected, beta=beta, label_smoothing=smoothing)
        return losses.orpo_loss(chosen, rejected, beta=beta)


class KTO:
    """Completions that are desirable or not. The reference point of each half of a micro-batch is the other half's
    divergence, as in GPT-NeoX; with one completion it is 0. reward: positive where the model agrees with the label."""

    metrics: tuple[str, ...] = ("reward", "accuracy", "kl")

    def __init__(self, model: nn.Module, config: RunConfig, reference: Reference | None) -> None:
        assert reference is not None
        self.model, self.options, self.reference = model, config.train.kto, reference

    def count(self, batch: Batch) -> Tensor:
        return _number(batch, len(_completions(batch).values))

    def __call__(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        sequence, values, _ = _completions(batch)
        total = len(values)
        ref = sum_by_sequence(self.reference(batch), sequence, total)
        given = sum_by_sequence(token_log_probs(self.model, batch).log_probs, sequence, total)
        ratio, half = (given - ref).detach(), total // 2
        kl = torch.zeros_like(ratio)
        if half:
            # the other half's, so that no completion is compared with itself
            kl[:half], kl[half:] = ratio[half:].mean().clamp(min=0), ratio[:half].mean().clamp(min=0)
        options, desirable = self.options, values > 0
        each = losses.kto_loss(
            given, ref, desirable, kl, beta=options.beta, desirable_weight=options.desirable_weight,
            undesirable_weight=options.undesirable_weight,
        )  # fmt: skip
        reward = options.beta * ratio * torch.where(desirable, 1.0, -1.0)
        metrics = torch.stack([reward.sum(), (reward > 0).float().sum(), kl.sum()])
        return each.sum() / counted, metrics / counted


class Reward:
    """Rewards of pairs, read by the value head where the last token of a completion is predicted."""

    metrics: tuple[str, ...] = ("rewards_chosen", "rewards_rejected", "margin", "accuracy")

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        self.model, self.center = model, config.train.reward.center

    def count(self, batch: Batch) -> Tensor:
        return _number(batch, len(_completions(batch).values) / 2)

    def __call__(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        sequence, total = _completions(batch).sequence.flatten(), len(_completions(batch).values)
        places = torch.arange(len(sequence), device=sequence.device)
        # by comparison and not by counting: nothing is read by the host
        member = sequence == torch.arange(total, device=sequence.device)[:, None]
        # positions in the flat batch: packed rows hold several completions
        last = torch.where(member, places, -1).amax(1)  # [C]
        model: Any = self.model

        def read(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return model.value(states.flatten(0, 1)[last])[:, 0].float()

        rewards = model(batch.tokens, read=read, **batch.documents)
        chosen, rejected = rewards.chunk(2)
        each = losses.reward_loss(chosen, rejected, center=self.center)
        with torch.no_grad():
            metrics = (chosen, rejected, chosen - rejected, (chosen > rejected).float())
        return each.sum() / counted, torch.stack([m.detach().sum() for m in metrics]) / counted


class Policy:
    """Sampled completions with given advantages. Where the sampler's log-probabilities are not known, the ratio is 1.

    kl: estimate of the divergence from the reference, without one from the sampler
    """

    metrics: tuple[str, ...] = ("ratio", "clipped", "kl", "entropy")

    def __init__(self, model: nn.Module, config: RunConfig, reference: Reference | None) -> None:
        self.model, self.options, self.reference = model, config.train.policy, reference

    def count(self, batch: Batch) -> Tensor:
        if self.options.average == "token":
            return (_completions(batch).sequence >= 0).sum().float()
        return _number(batch, len(_completions(batch).values))

    def __call__(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        options, (sequence, values, sampled) = self.options, _completions(batch)
        ref = None if self.reference is None else self.reference(batch)
        current = token_log_probs(self.model, batch, entropy=True)
        # NaN stands for a sampler's value that is not known
        old = torch.where(sampled.isnan(), current.log_probs.detach(), sampled)
        loss = losses.policy_loss(
            current.log_probs, old, values, sequence, ratio=options.ratio, average=options.average,
            clip=(options.clip_low, options.clip_high), ref_log_probs=ref, kl_weight=options.kl_weight, kl=options.kl,
            divisor=counted,
        )  # fmt: skip
        with torch.no_grad():
            assert current.entropy is not None
            log_ratio = current.log_probs - old
            if options.ratio == "sequence":  # the loss clips one ratio for each sequence
                log_ratio = mean_by_sequence(log_ratio, sequence, len(values))[sequence.clamp(min=0)]
            ratio = log_ratio.exp()
            clipped = (ratio < 1 - options.clip_low) | (ratio > 1 + options.clip_high)
            # exp(d) - d - 1 is an estimate of the divergence that is never negative
            behind = (old if ref is None else ref) - current.log_probs
            metrics = (ratio, clipped.float(), behind.exp() - behind - 1, current.entropy)
        return loss, torch.stack([self._sum(m.detach(), sequence, len(values)) for m in metrics]) / counted

    def _sum(self, values: Tensor, sequence: Tensor, count: int) -> Tensor:
        if self.options.average == "token":
            return torch.where(sequence >= 0, values, 0.0).sum()
        return mean_by_sequence(values, sequence, count).sum()


class Distill:
    """Divergence from a teacher over the tokens of completions; nll: of the labels, at the same temperature."""

    metrics: tuple[str, ...] = ("nll", "entropy")

    def __init__(self, model: nn.Module, config: RunConfig, teacher: nn.Module) -> None:
        self.model, self.options, self.teacher = model, config.train.distill, teacher

    def count(self, batch: Batch) -> Tensor:
        return (_completions(batch).sequence >= 0).sum().float()

    def __call__(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            states, head, bias = self.teacher(
                batch.tokens, read=lambda states, weight, bias: (states, weight, bias), **batch.documents
            )
        teacher = Teacher(states, head, bias, beta=self.options.beta)
        student = token_log_probs(
            self.model, batch, teacher=teacher, temperature=self.options.temperature, entropy=True
        )
        assert student.divergence is not None and student.entropy is not None
        loss = losses.distillation_loss(student.divergence, _completions(batch).sequence, divisor=counted)
        return loss, torch.stack([-student.log_probs.detach().sum(), student.entropy.detach().sum()]) / counted
