"""liger_kernel.transformers.trainer.orpo_trainer: TRL's ORPOTrainer with the loss from hidden states."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from powertrain.compat.liger_kernel.chunked_loss.preference import LigerFusedLinearORPOLoss
from powertrain.compat.missing import unknown
from powertrain.ops.conversion import unsupported
from powertrain.runtime import checks

__all__ = ["LigerORPOTrainer"]

_OP = "LigerORPOTrainer"
_IGNORED = -100


def _trl_trainer() -> Any:
    """TRL's class, or one that says why there is none when it is made."""
    problem = ""
    # since TRL 0.29 only the first has it; before 0.26 only the second
    for module in ("trl.experimental.orpo", "trl.trainer"):
        try:
            return importlib.import_module(module).ORPOTrainer
        except (ImportError, AttributeError) as error:
            problem = problem or str(error)

    class Missing:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise ImportError(f"{_OP} is a subclass of TRL's ORPOTrainer: pip install trl ({problem})")

    return Missing


class LigerORPOTrainer(_trl_trainer()):  # type: ignore[misc]
    """TRL's ORPOTrainer, whose loss is `LigerFusedLinearORPOLoss`: no logits [2 pairs, T, V] in memory.

    Arguments are TRL's; its data, schedule and logged names too. The loss is computed where the model calls its output
    layer, whose weight is whole there under FSDP as well; the layer must be an nn.Linear (no adapter on it) and the
    model must return its result as it is: with a softcap, scale or bias added, training raises NotImplementedError.
    Raises ImportError when it is made and TRL cannot be imported.
    """

    def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(loss, the other results of `LigerFusedLinearORPOLoss`) of chosen and rejected completions, one forward."""
        # its copies on other GPUs would call this one's output layer
        model = model.module if isinstance(model, nn.DataParallel) else model
        pad = getattr(self, "label_pad_token_id", None)
        # an argument of TRL before 0.29, which had a setting for it
        padding = {} if pad is None else {"label_pad_token_id": pad}
        inputs = self.concatenated_inputs(
            batch, is_encoder_decoder=self.is_encoder_decoder, padding_value=self.padding_value,
            device=self.accelerator.device, **padding,
        )  # fmt: skip
        ignored, labels, mask = _IGNORED, inputs["concatenated_labels"], inputs["concatenated_attention_mask"]
        if pad is not None:
            ignored = pad
        more: dict[str, Any] = {"output_router_logits": True} if self.aux_loss_enabled else {}
        # the cross entropy counts the prompt too, the odds completions alone: TRL's definition
        everything = labels
        if self.is_encoder_decoder:
            more["decoder_input_ids"] = self._shift_right(labels)
        else:
            everything = inputs["concatenated_input_ids"].masked_fill(mask != 1, ignored)
        head = _OutputLayer(
            self.accelerator.unwrap_model(model), LigerFusedLinearORPOLoss(ignored, self.beta), labels, everything,
            shifted=not self.is_encoder_decoder,
        )  # fmt: skip
        with head:
            outputs = model(inputs["concatenated_input_ids"], attention_mask=mask, use_cache=False, **more)
        loss = head.loss_of(outputs.logits)
        if self.aux_loss_enabled:
            loss = loss + self.aux_loss_coef * outputs.aux_loss
        return loss, head.metrics

    def get_batch_loss_metrics(
        self, model: nn.Module, batch: dict[str, Any], train_eval: str = "train"
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss, and TRL's metrics of it: means over the ranks."""
        loss, found = self.concatenated_forward(model, batch)
        chosen, rejected, *logits, nll, better, worse, ratio, odds = found
        values = {
            "rewards/chosen": better, "rewards/rejected": worse, "rewards/accuracies": (better > worse).float(),
            "rewards/margins": better - worse, "logps/rejected": rejected, "logps/chosen": chosen,
            "logits/rejected": logits[1], "logits/chosen": logits[0], "nll_loss": nll, "log_odds_ratio": ratio,
            "log_odds_chosen": odds,
        }  # fmt: skip
        prefix = "eval_" if train_eval == "eval" else ""
        # TRL logs means over all ranks, though Liger's trainer does not
        gather = self.accelerator.gather_for_metrics
        return loss, {prefix + name: gather(value.detach()).mean().item() for name, value in values.items()}


class _OutputLayer:
    """While entered, the model's output layer returns the loss [1, 1, 1] of its input in place of logits."""

    def __init__(
        self, model: Any, criterion: LigerFusedLinearORPOLoss, labels: Tensor, everything: Tensor, shifted: bool
    ) -> None:
        layer = model.get_output_embeddings()
        # a hook of the wrapper gathers the weight before the layer inside is called
        self.layer = layer.module if isinstance(layer, FullyShardedDataParallel) else layer
        # an adapter's wrapper computes more than weight and bias
        if not isinstance(self.layer, nn.Linear):
            unsupported(
                _OP, "model's output layer", type(self.layer).__name__, "a model whose output layer is nn.Linear"
            )
        self.criterion, self.labels, self.everything, self.shifted = criterion, labels, everything, shifted
        self.loss: Tensor | None = None
        self.metrics: tuple[Tensor, ...] = ()

    def __enter__(self) -> None:
        # an attribute of the object: hooks of FSDP around the layer and the model run as ever
        self.layer.forward = self._forward

    def __exit__(self, *_: object) -> None:
        del self.layer.forward

    def _forward(self, hidden: Tensor) -> Tensor:
        labels, everything = self.labels, self.everything
        if self.shifted:
            hidden, labels, everything = hidden[:, :-1], labels[:, 1:], everything[:, 1:]
        weight, bias = self.layer.weight, self.layer.bias
        self.loss, found = self.criterion(weight, hidden, labels, bias, nll_target=everything)
        self.metrics = tuple(torch.as_tensor(value) for value in found)
        return self.loss.view(1, 1, 1)

    def loss_of(self, logits: Tensor) -> Tensor:
        """The loss that the model returned; by its graph, and not by `self.loss`, wrappers follow the backward."""
        checks.require(self.loss is not None, _OP, "model", "call its output layer once", "no call")
        assert self.loss is not None
        same = logits.numel() == 1 and torch.allclose(
            logits.detach().flatten().to(self.loss), self.loss.detach().view(1), rtol=1e-6, atol=0.0, equal_nan=True
        )
        if not same:
            unsupported(
                _OP, "model", "logits changed behind the output layer (softcap, scale, bias)", "TRL's ORPOTrainer"
            )
        return logits.view(())


__getattr__ = unknown(__name__)
