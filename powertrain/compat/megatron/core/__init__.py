"""megatron.core: fusions."""
