"""flash_attn.utils.generation: the state of inference that `flash_attn.modules.mha.MHA` takes."""

from dataclasses import dataclass, field

from torch import Tensor

from powertrain.compat.missing import unknown

__all__ = ["InferenceParams"]


@dataclass
class InferenceParams:
    """Sizes, positions and caches of a generation.

    seqlen_offset is the number of tokens in the caches, lengths_per_sample [batch] int32 that of each sequence;
    key_value_memory_dict maps a layer's index to its cache [max_batch_size, max_seqlen, 2, heads, head_dim].
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[int, Tensor] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Begin another generation; the caches stay."""
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


__getattr__ = unknown(__name__)
