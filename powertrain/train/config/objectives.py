"""Sections of a config for training after pretraining: adapters, and the settings of each objective's loss."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from powertrain.train.config.section import Above0, NonNegative, Positive, Section

ObjectiveName = Literal["pretrain", "sft", "dpo", "kto", "reward", "policy", "distill"]
Smoothing = Annotated[float, Field(ge=0, lt=0.5)]


class LoRAConfig(Section):
    """targets  ends of module names such as attention.qkv; None: every linear layer but the head
    rslora      alpha / sqrt(rank) instead of alpha / rank;   dora: a magnitude for every output
    """

    rank: Positive = 16
    alpha: Above0 = 32.0
    targets: tuple[str, ...] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    rslora: bool = False
    dora: bool = False


class PreferenceConfig(Section):
    """Of objective dpo, on pairs. powertrain.losses documents the losses.

    loss        dpo, robust, ipo: with a reference; simpo, cpo, orpo: without
    beta, label_smoothing   of all but ipo and orpo, which take no smoothing;   gamma: of simpo
    nll_weight  adds so much of the chosen completions' mean loss a token; None: 1 for cpo and orpo, else 0
    reference_free   of dpo, robust and ipo: the reference is 0 (GPT-NeoX's dpo_reference_free)
    """

    loss: Literal["dpo", "robust", "ipo", "simpo", "cpo", "orpo"] = "dpo"
    beta: Above0 = 0.1
    label_smoothing: Smoothing = 0.0
    gamma: NonNegative = 1.0
    nll_weight: Annotated[float | None, Field(ge=0)] = None
    reference_free: bool = False

    @model_validator(mode="after")
    def _smoothed(self) -> "PreferenceConfig":
        if self.label_smoothing and self.loss in ("ipo", "orpo"):
            raise ValueError(f"label_smoothing must be 0 for loss {self.loss}, got {self.label_smoothing:g}")
        return self


class KTOConfig(Section):
    beta: Above0 = 0.1
    desirable_weight: NonNegative = 1.0
    undesirable_weight: NonNegative = 1.0


class RewardConfig(Section):
    """center: weight of (chosen + rejected)^2, which pulls rewards towards 0"""

    center: NonNegative = 0.0


class PolicyConfig(Section):
    """ratio  of each token (GRPO, DAPO), or of each completion (GSPO);   average: over completions, or over all tokens
    clip_low, clip_high   of the ratio, below and above 1
    kl_weight   of the divergence from the reference; 0: there is no reference
    """

    ratio: Literal["token", "sequence"] = "token"
    average: Literal["sequence", "token"] = "sequence"
    clip_low: NonNegative = 0.2
    clip_high: NonNegative = 0.2
    kl_weight: NonNegative = 0.0


class DistillConfig(Section):
    """teacher  a checkpoint with the student's vocabulary: a run's, Hugging Face's or GPT-NeoX's
    beta        0: forward KL, 1: reverse KL, between: generalized Jensen-Shannon divergence
    """

    teacher: str | None = None
    beta: Annotated[float, Field(ge=0, le=1)] = 0.0
    temperature: Above0 = 1.0
