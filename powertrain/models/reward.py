"""Reward models: a language model with a linear layer `value` [1, hidden_size] on its head's input.

In Hugging Face they are the classes ForSequenceClassification with one label, whose layer is called `score` and which
have no output layer.
"""

from typing import Any

import torch
from torch import Tensor, nn

from powertrain.runtime import checks

VALUE = "value.weight"


def add_value_head(model: nn.Module, device: torch.device | str = "meta", dtype: torch.dtype | None = None) -> None:
    """`model.value` [1, hidden_size]: the reward of a token's state."""
    config: Any = model.config
    model.add_module("value", nn.Linear(config.hidden_size, 1, bias=False, device=device, dtype=dtype))


@torch.no_grad()
def rewards(model: nn.Module, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The reward of each row of tokens [B, S], read at its last token: float32 [B].

    lengths   [B] tokens of each row, the rest is padding; None: all
    Training reads the state that predicts the last token, so a text whose end token was trained on is given without it.
    Raises ValueError for a model without a value head, and for other lengths.
    """
    last = tokens.new_full((len(tokens),), tokens.shape[1]) if lengths is None else lengths
    checks.shape("rewards", "lengths", last, tokens.shape[:1], "the rows of tokens")
    checks.integers("rewards", "lengths", last)
    checks.indices("rewards", "lengths", last, tokens.shape[1] + 1, first=1)
    return token_rewards(model, tokens).gather(1, last.long()[:, None] - 1)[:, 0]


def token_rewards(model: Any, tokens: Tensor) -> Tensor:
    """The reward at every token [B, S], float32."""
    if not hasattr(model, "value"):
        raise ValueError("rewards: model must have a value head (objective reward), got none")
    values: Tensor = model(tokens, read=lambda states, weight, bias: model.value(states)[..., 0].float())
    return values


class NoHead(nn.Module):
    """In place of the output layer that a reward model of Hugging Face does not have."""

    def forward(self, states: Tensor, labels: Tensor | None = None, *, z_loss: float = 0.0, read: Any = None) -> Any:
        if read is None:
            raise ValueError("model must have an output layer for logits and losses, got a reward model without one")
        return read(states, None, None)
