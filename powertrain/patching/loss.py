"""Training loss of Hugging Face causal language models without their logits.

Only a call in training mode with labels is replaced; it returns `logits=None`. Evaluation, generation, calls without
labels and those of PEFT's CPT, which reads the logits, run the old forward.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.ops.linear_cross_entropy import linear_cross_entropy
from powertrain.patching.replace import is_plain_linear
from powertrain.runtime import checks

KIND = "loss"
# arguments of a causal language model's own forward, which the base model does not take
_OWN = {"self", "labels", "logits_to_keep", "kwargs", "return_dict", "output_router_logits"}
_SPREAD = 10.0  # standard deviation of the logits that candidates are judged with: a softcap of 30 shows there


def why_not(model: Any) -> str | None:
    """Why this model's forward is not that of a causal language model, or None."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    parameters = inspect.signature(type(model).forward).parameters
    # classification heads have labels too, without an output embedding
    if not {"labels", "input_ids"} <= parameters.keys() or not hasattr(model, "get_output_embeddings"):
        return "no causal language model: its forward takes no labels beside input_ids"
    # transformers picks a loss by the model's class name; others shift or weight differently
    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        return f"its loss is {getattr(getattr(model, 'loss_function', None), '__name__', 'its own')}"
    head, base = model.get_output_embeddings(), _base(model)
    if not is_plain_linear(head):
        return f"its head is a {type(head).__name__} with sharded, quantized or hooked weights"
    if head.weight.is_meta:
        return "its weights are on the meta device; patch the model once they are loaded"
    if base is None or head not in list(model.children()):
        return "its head is not beside its base model"
    if head.weight.is_inference():
        return "its weights were made in torch.inference_mode, and cannot be trained"
    # an argument that the base model does not take would have to be interpreted by us
    taken = inspect.signature(type(base).forward).parameters
    if missing := parameters.keys() - _OWN - taken.keys():
        return f"its base model takes no {', '.join(sorted(missing))}"
    return None


def _base(model: Any) -> nn.Module | None:
    """The part of the model that gives the hidden states, or None."""
    # base_model_prefix is an empty string unless the class sets it
    base = getattr(model, model.base_model_prefix, None) or getattr(model, "model", None)
    return base if isinstance(base, nn.Module) else None


def find(model: Any) -> tuple[str, Callable[..., Any]] | str:
    """(name, forward) of what computes this model's loss from its hidden states, or why nothing does."""
    reason = "its loss is another function of the hidden states"
    for name, options in _epilogues(model):
        fused = _Loss(**options)
        difference = _difference(model, fused)
        if isinstance(difference, str):
            return difference
        # the fused loss sums in another order: 8 roundings of the model's dtype
        if difference <= 8 * torch.finfo(model.get_output_embeddings().weight.dtype).eps:
            names = tuple(inspect.signature(type(model).forward).parameters)[1:]
            return name, _forward(fused, model.loss_function, names)
    return reason


def _epilogues(model: Any) -> list[tuple[str, dict[str, float]]]:
    """Numbers of the config that scale or cap logits, then neither."""
    # multimodal configs keep the text model's numbers one level down
    config = model.config.get_text_config()
    found: list[tuple[str, dict[str, float]]] = []
    for key, value in sorted(vars(config).items()):
        if not isinstance(value, int | float) or isinstance(value, bool) or not value or "logit" not in key:
            # Gemma 2: final_logit_softcapping; Cohere: logit_scale; Granite: logits_scaling, which divides, hence both
            # directions
            continue
        if "cap" in key:
            found.append((f"linear_cross_entropy, softcap {value:g}", {"softcap": float(value)}))
        elif "scal" in key:
            found += [
                (f"linear_cross_entropy, logits times {scale:g}", {"scale": scale})
                for scale in (float(value), 1 / value)
            ]
    # no scale is tried last: a model with an unused number in its config must still match
    return [*found, ("linear_cross_entropy", {})]


class _Loss:
    """hidden states [B, S, D], labels -> loss, as transformers' ForCausalLMLoss of head(hidden)."""

    def __init__(self, softcap: float | None = None, scale: float = 1.0) -> None:
        self.softcap, self.scale = softcap, scale
        self.output_class: Any = dict  # that the model's forward returns
        self.output_fields: frozenset[str] = frozenset()

    def returns(self, output_class: Any) -> None:
        names = {field.name for field in dataclasses.fields(output_class)}
        # the model's own class is returned, so that trainers find the fields they index by position
        self.output_class, self.output_fields = output_class, frozenset(names - {"loss", "logits"})

    def __call__(
        self,
        head: nn.Linear,
        hidden: Tensor,
        labels: Tensor | None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        # transformers shifts inside the loss: the label of position i is token i + 1
        name, given = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
        assert given is not None
        shape = hidden.shape[:-1]
        checks.require(given.numel() == shape.numel(), "forward", name, f"have shape {list(shape)}", list(given.shape))
        if shift_labels is None:
            # padded with ignore_index, so that the last position has no label and no row must be cut out of hidden
            shift_labels = nn.functional.pad(given, (0, 1), value=ignore_index)[..., 1:]
        bias: Tensor | None = head.bias
        if self.scale != 1.0:
            # the scale is of the logits, and so of the bias in them
            hidden, bias = hidden * self.scale, None if bias is None else bias * self.scale
        loss = linear_cross_entropy(
            hidden, head.weight, shift_labels.to(hidden.device).reshape(shape), bias=bias,
            # transformers divides by num_items_in_batch itself, which with gradient accumulation is not this batch's
            # count
            ignore_index=ignore_index, softcap=self.softcap, reduction="mean" if num_items_in_batch is None else "sum",
        )  # fmt: skip
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch


def _forward(fused: _Loss, theirs: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """The model's forward; `names` are those of its arguments, in order."""

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | options if args else options
        labels = given.get("labels")
        # asked first: this is the call of each generated token
        if labels is None or not (self.training and torch.is_grad_enabled()):
            return type(self).forward(self, *args, **options)
        head, base = self.get_output_embeddings(), _base(self)
        keep = given.get("logits_to_keep", 0)
        # each line is a case in which the caller may want more than a loss, or whose parts are not those that were
        # compared
        if (
            # an argument twice or too many: Python's own error
            len(given) < len(args) + len(options)
            or not (isinstance(keep, int) and keep == 0)
            or given.get("return_dict") is False
            or given.get("output_router_logits") or getattr(self.config, "output_router_logits", False)
            or base is None or not is_plain_linear(head)
            # the model's attribute may be set to a function of the user's
            or self.loss_function is not theirs
            or _is_weighed_by_peft(given)
        ):  # fmt: skip
            return type(self).forward(self, *args, **options)
        options = {name: value for name, value in given.items() if name not in _OWN}
        outputs = base(**options)
        loss_options = {n: options[n] for n in ("num_items_in_batch", "ignore_index", "shift_labels") if n in options}
        loss = fused(head, outputs.last_hidden_state, labels, **loss_options)
        return fused.output_class(loss=loss, **{n: v for n, v in outputs.items() if n in fused.output_fields})

    return forward


def _is_weighed_by_peft(given: dict[str, Any]) -> bool:
    """Whether PEFT's CPT calls: it weighs the tokens' losses itself, by the logits, and says so in no argument."""
    # it gives embeddings; frames cannot be traced by torch.compile
    if given.get("inputs_embeds") is None or torch.compiler.is_compiling():
        return False
    frame = sys._getframe(1)
    # nn.Module's two, and those of hooks and of accelerate, lie between
    for _ in range(10):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_name == "_cpt_forward":
            return True
    return False


def _difference(model: Any, fused: _Loss) -> float | str:
    """Relative difference of loss and of its gradient from the model's own, on random hidden states; or why not.

    The base model is not run: for the time of the call it returns those hidden states.
    """
    head, base = model.get_output_embeddings(), _base(model)
    assert base is not None
    weight = head.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    hidden = torch.randn((2, 6, head.in_features), generator=generator, device=weight.device)
    with torch.no_grad():
        # spread wide enough that a softcap or scale changes the loss visibly
        hidden *= _SPREAD / nn.functional.linear(hidden.to(weight.dtype), weight, head.bias).float().std()
    hidden = hidden.to(weight.dtype).requires_grad_()
    labels = torch.randint(head.out_features, (2, 6), generator=generator, device=weight.device)
    # ignored labels at two positions show a wrong shift
    labels[0, 2], labels[1, 5] = -100, -100
    former = base.__dict__.get("forward")
    trained = weight.requires_grad
    # the head and the loss are compared; running all layers would only add time
    base.forward = lambda *args, **options: _hidden_states(hidden)
    try:
        # or its gradient, as large as the weight, would be made too
        weight.requires_grad_(False)
        with torch.enable_grad():
            outputs = type(model).forward(model, input_ids=torch.zeros_like(labels), labels=labels)
            fused.returns(type(outputs))
            losses = outputs.loss, fused(head, hidden, labels)
            grads = [torch.autograd.grad(loss, hidden)[0].float() for loss in losses]
    except Exception as error:
        return f"its forward does not run on hidden states alone: {str(error).splitlines()[0][:80]}"
    finally:
        weight.requires_grad_(trained)
        del base.forward
        # a forward of the instance, of accelerate for instance, is put back
        if former is not None:
            base.forward = former
    old, new = (loss.detach() for loss in losses)
    apart = (new - old).abs() / old.abs(), (grads[0] - grads[1]).norm() / grads[0].norm()
    return max(float(value) for value in apart)


def _hidden_states(hidden: Tensor) -> Any:
    """An output of a base model with every field that a causal language model may read."""
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    class Outputs(BaseModelOutputWithPastAndCrossAttentions):
        router_logits = None

        # some heads index the output, some use its attributes
        def __getitem__(self, index: Any) -> Any:
            return hidden if index == 0 else super().__getitem__(index)

    return Outputs(last_hidden_state=hidden)
