"""Base class of decoders with experts: adds the load balancing loss to the language model's loss."""

from typing import Any

import torch
from torch import Tensor

from powertrain.models.causal_lm import CausalLM
from powertrain.nn.moe import MoE


class MixtureLM(CausalLM):
    """A CausalLM some of whose layers have experts; its config has `balance_loss`, the weight of that loss."""

    @property
    def moe_layers(self) -> list[MoE]:
        return [layer.mlp for layer in self.layers if isinstance(getattr(layer, "mlp", None), MoE)]

    def forward(self, tokens: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        """As CausalLM; while training the loss includes the load balancing loss of every layer of experts."""
        # the load balancing loss is of training only: evaluation reports the language model's loss
        loss = super().forward(tokens, labels, **options)
        weight = self.config.balance_loss  # type: ignore[attr-defined]
        if labels is None or not self.training or not weight:
            return loss
        losses: list[Any] = [m.balance_loss for m in self.moe_layers]
        if torch.is_grad_enabled() and any(m.router.weight.requires_grad and not balance.requires_grad
                                           for m, balance in zip(self.moe_layers, losses, strict=True)):  # fmt: skip
            raise RuntimeError(
                "model.balance_loss must be 0 where layers of experts run without gradients, as in a checkpoint with "
                f"use_reentrant=True (use_reentrant=False, or a layer's `recompute`, keeps them), got {weight}"
            )
        return loss + weight * torch.stack(losses).sum()

    def init_weights(self, seed: int) -> None:
        super().init_weights(seed)
        for moe in self.moe_layers:
            # a buffer, which the initialization of parameters leaves as the meta device made it
            moe.load.zero_()
