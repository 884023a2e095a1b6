"""Gradients in a step: their norm, clipping, fp16's loss scale, the update, and the skip of a bad step.

With AdamW nothing here waits for the device: clipping and unscaling are one factor that it multiplies gradients by as
it reads them, and a step whose gradients are not finite changes nothing, which it decides on the device too.
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from powertrain.ops.adamw import AdamW
from powertrain.ops.grad_norm import clip_factor, global_norm
from powertrain.train.config.schema import MAX_SCALE, LossScale, OptimizerConfig, TrainConfig
from powertrain.train.update_rules import KINDS, TorchRule, make_rule

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Stepped(NamedTuple):
    """Results of one step on the device: the gradient norm before clipping, and 1.0 if the step was skipped."""

    grad_norm: Tensor
    skipped: Tensor


class Stages(Protocol):
    """A pipeline as an optimizer sees it. group: its ranks."""

    group: dist.ProcessGroup

    def counts(self, name: str) -> bool:
        """Whether this rank's gradient of the parameter counts in the norm of all: a shared one counts once."""


class Scaler:
    """fp16's loss scale, kept on the device. GPT-NeoX's (DeepSpeed's) rules.

    A step with inf or nan uses up `hysteresis`; when that is gone each further one halves the scale, down to
    `minimum`. `window` good steps one after the other double it and restore the hysteresis.
    """

    def __init__(self, config: LossScale, device: torch.device) -> None:
        self.config = config
        start = 2.0**config.initial_power if config.static is None else config.static
        self.scale, self.good, self.patience = (
            torch.tensor(value, dtype=torch.float32, device=device) for value in (start, 0.0, float(config.hysteresis))
        )

    def update(self, skipped: Tensor) -> None:
        if self.config.static is not None:
            return
        bad = skipped > 0
        # tensors and `where`, no branch: the host does not wait to learn whether the step was skipped
        lower = bad & (self.patience <= 1)
        # in place: the kernel of the next step reads these very addresses
        self.scale.copy_(torch.where(lower, (self.scale / 2).clamp(min=self.config.minimum), self.scale))
        self.patience.copy_(torch.where(bad & ~lower, self.patience - 1, self.patience))
        self.good.copy_(torch.where(bad, 0.0, self.good + 1))
        grow = self.good >= self.config.window
        self.scale.copy_(torch.where(grow, (self.scale * 2).clamp(max=MAX_SCALE), self.scale))
        self.patience.copy_(torch.where(grow, float(self.config.hysteresis), self.patience))
        self.good.copy_(torch.where(grow, 0.0, self.good))

    def tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good": self.good, "patience": self.patience}


class Optimizer:
    """AdamW, or another rule (update_rules.py), over a model's parameters as a run's configuration wants it.

    Parameters in 16 bits (one process) have a float32 master; float32 ones (FSDP casts them itself) are their own.
    Norms and biases have no weight decay unless `decay_norms_and_biases`.
    pipeline   of stages: the gradients' norm is that of all of them
    """

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, train: TrainConfig, pipeline: Stages | None = None
    ) -> None:
        self.pipeline = pipeline
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.model = model
        self.max_norm = train.gradient_clipping
        matrices = [p for p in self.parameters if p.dim() > 1 or config.decay_norms_and_biases]
        others = [p for p in self.parameters if not (p.dim() > 1 or config.decay_norms_and_biases)]
        groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": config.weight_decay}]
        groups += [{"params": others, "weight_decay": 0.0}] if others else []
        self.rule: AdamW | TorchRule
        if config.kind == "adamw":
            self.rule = AdamW(
                groups, config.lr, config.betas, config.eps, master_weights=True,
                state_dtype=torch.bfloat16 if config.state_dtype == "bf16" else None,
            )  # fmt: skip
            self.kinds = KINDS["adamw"]
        else:
            self.rule = make_rule(groups, config)
            self.kinds = self.rule.kinds
        device = self.parameters[0].device
        self.scaler = Scaler(train.loss_scale, device) if train.precision == "fp16" else None

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss if self.scaler is None else loss * self.scaler.scale

    def step(self, lr: float) -> Stepped:
        """Clip, update every parameter that has a gradient, forget the gradients."""
        norm = self._norm()
        if self.scaler is not None:
            # gradients are still multiplied by fp16's scale; the norm that is reported and clipped is not
            norm = norm / self.scaler.scale
        skipped = (~norm.isfinite()).float()
        if isinstance(self.rule, TorchRule):
            self.rule.set_rate(lr)
        else:
            for group in self.rule.param_groups:
                group["lr"] = lr
        # tensors, read by the kernel: clipping, unscaling and the skip need neither the host nor a pass of their own
        self.rule.found_inf = skipped  # type: ignore[union-attr]
        self.rule.step(grad_factor=self._factor(norm))
        self.rule.zero_grad()
        if self.scaler is not None:
            self.scaler.update(skipped)
        return Stepped(norm, skipped)

    def _factor(self, norm: Tensor) -> Tensor | None:
        """The factor that clips and unscales the gradients, or None if there is none."""
        factor = clip_factor(norm, self.max_norm) if self.max_norm else None
        if self.scaler is None:
            return factor
        return (torch.ones_like(norm) if factor is None else factor) / self.scaler.scale

    def _norm(self) -> Tensor:
        if self.pipeline is None:
            return global_norm(p.grad for p in self.parameters if p.grad is not None)
        named = zip(self.names, self.parameters, strict=True)
        return global_norm(
            (p.grad for name, p in named if p.grad is not None and self.pipeline.counts(name)), self.pipeline.group
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs, by name, live: float32 weights, moments, step counts, loss scale."""
        self.rule.init_state()
        trained = set(self.names)
        # what no gradient reaches: the biases of routers, weights that are frozen beside adapters
        by_name = {f"model.{name}": t for name, t in self.model.state_dict().items() if name not in trained}
        for name, p in zip(self.names, self.parameters, strict=True):
            state = self.rule.state[p]
            # float32 masters, so that a checkpoint loses nothing and loads in any precision
            by_name[f"model.{name}"] = state.get("master", p.detach())
            by_name |= {f"{kind}.{name}": state[kind] for kind in self.kinds}
            if "step" in state:
                by_name[f"step.{name}"] = state["step"].reshape(1)
        if self.scaler is not None:
            by_name |= {f"scaler.{name}": t.reshape(1) for name, t in self.scaler.tensors().items()}
        return by_name

    @torch.no_grad()
    def weights_from_masters(self) -> None:
        """After `tensors()` were loaded into: round the masters to the weights the model computes with."""
        if isinstance(self.rule, TorchRule):
            self.rule.loaded()
        for p in self.parameters:
            if "master" in self.rule.state[p]:
                p.copy_(self.rule.state[p]["master"])


def state_bytes(config: OptimizerConfig) -> float:
    """Bytes of state for each parameter's value, the master left out."""
    if config.kind == "adamw":
        return 2 * DTYPES[config.state_dtype].itemsize
    if config.kind == "adamw8bit":
        # a scale of 4 bytes for each block
        return 2 * (1 + 4 / 256)
    return 4.0 if config.kind == "lion" or config.momentum else 0.0
