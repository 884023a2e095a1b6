"""The parts of TRL's ORPOTrainer that LigerORPOTrainer calls, a model for it, and ORPO in plain PyTorch."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, HIDDEN, PAIRS, LENGTH, BETA = 11, 8, 3, 6, 0.2


class Trainer:
    """As TRL since 0.29, or as before, with a setting for ignored labels."""

    def __init__(self, *, pad: int | None = None, encoder_decoder: bool = False, aux: bool = False) -> None:
        self.accelerator = SimpleNamespace(
            device=torch.device("cpu"), unwrap_model=lambda m: getattr(m, "module", m), gather_for_metrics=lambda t: t
        )
        self.is_encoder_decoder, self.aux_loss_enabled, self.aux_loss_coef = encoder_decoder, aux, 0.3
        self.beta, self.padding_value = BETA, 0
        if pad is not None:
            self.label_pad_token_id = pad

    def concatenated_inputs(self, batch: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
        assert options["padding_value"] == 0 and options["is_encoder_decoder"] is self.is_encoder_decoder
        assert options.get("label_pad_token_id") == getattr(self, "label_pad_token_id", None)
        return {f"concatenated_{name}": value for name, value in batch.items()}

    def _shift_right(self, labels: Tensor) -> Tensor:
        return labels.roll(1, -1).clamp(min=0)


class Result(NamedTuple):
    """A tuple, in which FSDP and DDP find the tensors."""

    logits: Tensor
    aux_loss: Tensor | None


class Model(nn.Module):
    """Tokens -> logits; each position sees those before it, and `cap` is a softcap behind the output layer."""

    def __init__(self, cap: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head: nn.Module = nn.Linear(HIDDEN, VOCAB)
        self.cap = cap

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor, attention_mask: Tensor, use_cache: bool, **more: Any) -> Any:
        x = self.embedding(tokens) * attention_mask[..., None]
        if "decoder_input_ids" in more:
            x = self.embedding(more["decoder_input_ids"]) + x.mean(1, keepdim=True)
        logits = self.head(torch.tanh(self.body(x)).cumsum(1))
        aux = x.square().mean() if more.get("output_router_logits") else None
        return Result(self.cap * torch.tanh(logits / self.cap) if self.cap else logits, aux)


def made(pad: int = -100) -> dict[str, Tensor]:
    """Chosen rows above rejected ones; a prompt of 2, and padding at the end of two rows."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCAB, (2 * PAIRS, LENGTH), generator=g)
    mask = torch.ones_like(ids)
    mask[1, -2:] = mask[-1, -1:] = 0
    labels = ids.masked_fill(mask == 0, pad)
    labels[:, :2] = pad
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def plain(trainer: Trainer, model: Model, batch: dict[str, Tensor], pad: int) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics) from all logits."""
    ids, mask, labels = (batch[name] for name in ("input_ids", "attention_mask", "labels"))
    more: dict[str, Any] = {"output_router_logits": trainer.aux_loss_enabled}
    everything = ids.masked_fill(mask == 0, pad)
    if trainer.is_encoder_decoder:
        more["decoder_input_ids"], everything = trainer._shift_right(labels), labels
    logits, aux = model(ids, mask, False, **more)
    if not trainer.is_encoder_decoder:
        logits, labels, everything = logits[:, :-1], labels[:, 1:], everything[:, 1:]
    log_p = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    kept = labels != pad
    chosen, rejected = ((log_p * kept).sum(-1) / kept.sum(-1)).chunk(2)
    nll = F.cross_entropy(logits[:PAIRS].flatten(0, 1), everything[:PAIRS].flatten(), ignore_index=pad)
    odds = chosen - rejected - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp())
    ratio = F.logsigmoid(odds)
    loss = nll - BETA * ratio.mean()
    metrics = {
        "rewards/chosen": BETA * chosen, "rewards/rejected": BETA * rejected,
        "rewards/accuracies": (chosen > rejected).float(), "rewards/margins": BETA * (chosen - rejected),
        "logps/rejected": rejected, "logps/chosen": chosen, "logits/rejected": logits[PAIRS:],
        "logits/chosen": logits[:PAIRS], "nll_loss": nll, "log_odds_ratio": ratio, "log_odds_chosen": odds,
    }  # fmt: skip
    return loss if aux is None else loss + trainer.aux_loss_coef * aux, metrics


def loaded(**modules: Any) -> ModuleType:
    """A copy of the module, imported while TRL's modules are these."""
    name = "powertrain.compat.liger_kernel.transformers.trainer.orpo_trainer"
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # None: importing it raises ModuleNotFoundError
    there = {key: modules.get(key.rpartition(".")[2]) for key in ("trl.experimental.orpo", "trl.trainer")}
    with patch.dict(sys.modules, there):  # type: ignore[arg-type]
        spec.loader.exec_module(module)
    return module
