"""Sections of a config for fine-tuning: adapters, and the settings of each objective's loss."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from powertrain.train.config.section import Above0, FilePath, NonNegative, Positive, Section

ObjectiveName = Literal["pretrain", "sft", "dpo", "kto", "reward", "policy", "distill"]
# 0.5 or more would teach the opposite
Smoothing = Annotated[float, Field(ge=0, lt=0.5)]


class LoRAConfig(Section):
    """Low-rank adapters; the other weights are frozen. powertrain.nn.lora has the formulas.

    targets   ends of module names such as attention.qkv; None: every linear layer but the head
    dropout   of the adapters' inputs
    rslora    the adapter is scaled by alpha / sqrt(rank) instead of alpha / rank
    dora      a trained magnitude for each output
    """

    rank: Positive = 16
    alpha: Above0 = 32.0
    targets: Annotated[tuple[str, ...] | None, Field(min_length=1)] = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    rslora: bool = False
    dora: bool = False


class PreferenceConfig(Section):
    """Objective dpo, on pairs. powertrain.losses documents the losses.

    loss              dpo, robust, ipo: with a reference; simpo, cpo, orpo: without
    beta              of all; powertrain.losses has its meaning and its usual value for each loss
    label_smoothing   share of wrong labels assumed; not with ipo and orpo
    gamma             the margin of simpo
    nll_weight        weight of the chosen completions' cross entropy, averaged over the tokens of a micro-batch;
                      None: 1 for cpo and orpo, else 0
    reference_free    dpo, robust and ipo: the reference's log-probabilities are 0 (GPT-NeoX's dpo_reference_free)
    """

    loss: Literal["dpo", "robust", "ipo", "simpo", "cpo", "orpo"] = "dpo"
    beta: Above0 = 0.1
    label_smoothing: Smoothing = 0.0
    gamma: NonNegative = 1.0
    nll_weight: Annotated[float | None, Field(ge=0)] = None
    reference_free: bool = False

    @model_validator(mode="after")
    def _smoothed(self) -> "PreferenceConfig":
        # their formulas have no place for it
        if self.label_smoothing and self.loss in ("ipo", "orpo"):
            raise ValueError(
                f"train.preference.label_smoothing must be 0 for loss {self.loss}, got {self.label_smoothing:g}"
            )
        return self


class KTOConfig(Section):
    """Objective kto, on completions with a label. powertrain.losses.kto_loss has the formula.

    beta                 strength of the pull towards the reference
    desirable_weight     weight of the loss of completions whose label is true
    undesirable_weight   weight of the loss of those whose label is false
    """

    beta: Above0 = 0.1
    desirable_weight: NonNegative = 1.0
    undesirable_weight: NonNegative = 1.0


class RewardConfig(Section):
    """Objective reward, on pairs.

    center   weight of (chosen + rejected)^2, which pulls the mean reward towards 0
    """

    center: NonNegative = 0.0


class PolicyConfig(Section):
    """Objective policy, on completions with advantages. powertrain.losses.policy_loss has the formula.

    ratio       token: one ratio of probabilities for each token (GRPO, DAPO); sequence: one for each completion (GSPO)
    average     sequence: the mean over completions of their means; token: the mean over all tokens (DAPO)
    clip_low, clip_high   the ratio is clipped to [1 - clip_low, 1 + clip_high]
    kl_weight   weight of the divergence from the reference; 0: no reference is made
    kl          its estimate, k1, k2, k3 or abs, as policy_loss defines them
    """

    ratio: Literal["token", "sequence"] = "token"
    average: Literal["sequence", "token"] = "sequence"
    clip_low: NonNegative = 0.2
    clip_high: NonNegative = 0.2
    kl_weight: NonNegative = 0.0
    kl: Literal["k1", "k2", "k3", "abs"] = "k3"


class DistillConfig(Section):
    """Objective distill.

    teacher       a checkpoint with the student's vocabulary: a run's, Hugging Face's or GPT-NeoX's
    beta          0: forward KL, 1: reverse KL, between: generalized Jensen-Shannon divergence
    temperature   divides the logits of both models
    """

    teacher: FilePath | None = None
    beta: Annotated[float, Field(ge=0, le=1)] = 0.0
    temperature: Above0 = 1.0
