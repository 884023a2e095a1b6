"""apply_liger_kernel_to_* on `powertrain.patch`.

Given `model`, it is patched. Without, models of that type are patched from then on as `from_pretrained` and
`from_config` make them; one that is made by its class's constructor is not. What `powertrain.patch` cannot replace
without changing the results it leaves, and attention stays as it is, as there. With cross_entropy=True the model keeps
its own loss, of logits that its outputs have.
"""

import difflib
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import nn

from powertrain.compat.missing import unknown
from powertrain.patching.patch import patch

_TYPES = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v4",
    "exaone4",
    "falcon_h1",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "glm4",
    "glm4v",
    "glm4v_moe",
    "gpt_oss",
    "granite",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "instance",
    "internvl",
    "llama",
    "llama4",
    "llava",
    "ministral",
    "mistral",
    "mixtral",
    "mllama",
    "muse_glimmer",
    "nemotron",
    "olmo2",
    "olmo3",
    "paligemma",
    "phi3",
    "pixtral",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smollm3",
    "smolvlm",
)
__all__ = ["MODEL_TYPE_TO_APPLY_LIGER_FN", *(f"apply_liger_kernel_to_{name}" for name in _TYPES)]

# their flag -> kind of part; a flag that is not given is on, as most are there
# flags of parts that only some models have are ignored where the model has none
_KINDS = {
    "rope": "rotary",
    "rms_norm": "norm",
    "layer_norm": "norm",
    "swiglu": "mlp",
    "geglu": "mlp",
    "fused_linear_cross_entropy": "loss",
}
FLAGS = {*_KINDS, "cross_entropy", "relu_squared"}
_wanted: dict[str, list[str]] = {}  # model type -> kinds


def _apply(model_type: str, model: nn.Module | None = None, **flags: bool) -> None:
    """Patch `model`, or models of this type that are made later. Flags are Liger's: rope, rms_norm, swiglu, ..."""
    # a TypeError there too: the part that a misspelled flag should leave as it is would be replaced
    for flag in flags.keys() - FLAGS:
        near = difflib.get_close_matches(flag, FLAGS, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(FLAGS))}, model"
        raise TypeError(f"apply_liger_kernel_to_{model_type}: unknown flag {flag}{hint}")
    # a set: several flags name one kind
    wanted = {kind for flag, kind in _KINDS.items() if flags.get(flag, True)}
    # either flag may switch norms off; a model has one of the two
    if not flags.get("rms_norm", flags.get("layer_norm", True)):
        wanted.discard("norm")
    if not flags.get("swiglu", flags.get("geglu", True)):
        wanted.discard("mlp")
    # there one or the other, and this one is chosen by those who read the logits, which the fused loss has not
    if flags.get("cross_entropy"):
        wanted.discard("loss")
    kinds = sorted(wanted)
    if model is not None:
        patch(model, kinds=kinds)
        return
    _wanted[model_type] = kinds
    # once, for all types
    _watch()


def _watch() -> None:
    from transformers import PreTrainedModel

    for name in ("from_pretrained", "_from_config"):
        # the underlying function: a bound classmethod would lose the subclass
        made = PreTrainedModel.__dict__[name].__func__
        # applied twice, models would be patched twice
        if not hasattr(made, "_powertrain"):
            setattr(PreTrainedModel, name, classmethod(_patching(made)))


def _patching(made: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(made)
    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = made(cls, *args, **kwargs)
        # from_pretrained gives a tuple with output_loading_info=True
        model = result[0] if isinstance(result, tuple) else result
        kinds = _wanted.get(model.config.model_type)
        if kinds is not None:
            patch(model, kinds=kinds)
        return result

    setattr(make, "_powertrain", True)
    return make


def _apply_liger_kernel_to_instance(model: nn.Module, **flags: bool) -> None:
    """Patch `model`: what transformers' `use_liger_kernel` calls. Unknown flags are left out, as there."""
    # transformers' Trainer calls this name for use_liger_kernel=True
    _apply("", model, **_known(flags))


def _apply_liger_kernel(model_type: str, **flags: bool) -> None:
    """Patch models of this type that are made later. Unknown flags are left out, as there."""
    _apply(model_type, None, **_known(flags))


def _known(flags: dict[str, bool]) -> dict[str, bool]:
    return {flag: value for flag, value in flags.items() if flag in FLAGS}


MODEL_TYPE_TO_APPLY_LIGER_FN = {model_type: partial(_apply, model_type) for model_type in _TYPES}
# generated: the functions differ in the model type only
globals().update({f"apply_liger_kernel_to_{name}": apply for name, apply in MODEL_TYPE_TO_APPLY_LIGER_FN.items()})


__getattr__ = unknown(__name__)
