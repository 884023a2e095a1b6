"""liger_kernel.transformers.auto_model on `powertrain.patch`."""

from typing import Any

from powertrain.compat.missing import unknown
from powertrain.patching.patch import patch

__all__ = ["AutoLigerKernelForCausalLM"]


class AutoLigerKernelForCausalLM:
    """transformers' AutoModelForCausalLM, patched; attention stays as it is."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        # not attention: Liger leaves it to transformers
        patch(model, kinds=("loss", "mlp", "norm", "rotary"))
        return model


__getattr__ = unknown(__name__)
