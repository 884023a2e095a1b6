"""FP8 training of any model of nn.Linear: recipes, and their application from outside."""

from powertrain.runtime.lazy_exports import resolve

# public name -> its module, imported on first use
_PUBLIC = {
    "Tensor": "powertrain.quant.recipe",
    "Row": "powertrain.quant.recipe",
    "Block": "powertrain.quant.recipe",
    "FP8Linear": "powertrain.quant.linear",
    "quantize_model": "powertrain.quant.model",
    "dequantize_model": "powertrain.quant.model",
    "shared_weights": "powertrain.quant.model",
    "fp8_all_gather": "powertrain.quant.wire",
    "update_scales": "powertrain.quant.scales",
    "watch": "powertrain.quant.readings",
    "Reading": "powertrain.quant.readings",
    "Readings": "powertrain.quant.readings",
    "Report": "powertrain.quant.model",
    "Part": "powertrain.quant.model",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> object:
    return resolve(__name__, name, _PUBLIC)
