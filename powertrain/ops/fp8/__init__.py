"""FP8: quantization, scaled matrix products, and a linear layer whose three products are FP8."""
