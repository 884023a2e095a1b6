"""megatron.core.fusions."""
