"""Hugging Face transformers on our attention.

    from powertrain.compat import huggingface
    huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="powertrain")

`powertrain.patch(model)` does this and more for a model that is loaded already. powertrain/patching/attention.py says
which masks are computed without being read.
"""

from powertrain.patching.attention import attention_forward, attention_mask, register

__all__ = ["attention_forward", "attention_mask", "register"]
