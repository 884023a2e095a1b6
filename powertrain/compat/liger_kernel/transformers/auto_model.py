"""liger_kernel.transformers.auto_model on `powertrain.patch`."""

from collections.abc import Callable
from typing import Any

from powertrain.compat.liger_kernel.transformers.monkey_patch import FLAGS, _apply_liger_kernel_to_instance
from powertrain.compat.missing import unknown

__all__ = ["AutoLigerKernelForCausalLM"]


class AutoLigerKernelForCausalLM:
    """transformers' AutoModelForCausalLM, patched; attention stays as it is. Liger's flags (rope, rms_norm, ...) choose
    the parts, the other keywords are transformers'."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        from transformers import AutoModelForCausalLM

        return _patched(AutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        from transformers import AutoModelForCausalLM

        return _patched(AutoModelForCausalLM.from_config, config, **kwargs)


def _patched(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    flags = {name: kwargs.pop(name) for name in FLAGS & kwargs.keys()}
    result = make(*args, **kwargs)
    # from_pretrained gives a tuple with output_loading_info=True
    _apply_liger_kernel_to_instance(result[0] if isinstance(result, tuple) else result, **flags)
    return result


__getattr__ = unknown(__name__)
