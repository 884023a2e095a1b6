"""megatron.core: fusions and tensor_parallel."""
