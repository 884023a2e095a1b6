"""flash_attn.bert_padding: padded batches to packed sequences and back."""

import torch
from torch import Tensor
from torch.nn import functional

from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def unpad_input(
    hidden_states: Tensor,  # [b, s, ...]
    attention_mask: Tensor,  # [b, s], nonzero: a token
    unused_mask: Tensor | None = None,  # [b, s], nonzero: kept in place, but not counted as used
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch in one row.

    Returns (tokens [total, ...], their indices in [b * s], cu_seqlens [b + 1] int32, max_seqlen, used lengths [b]
    int32), as flash-attn 2.6.2 and later; before, there were only the first four. Reads max_seqlen on the host.
    """
    op = "unpad_input"
    checks.shape(op, "attention_mask", attention_mask, hidden_states.shape[:2], "first dims of hidden_states")
    checks.shape(op, "unused_mask", unused_mask, attention_mask.shape, "that of attention_mask")
    # lengths without the unused rows: backward kernels need them apart from the packed ones
    used = attention_mask.sum(-1, dtype=torch.int32)
    # unused rows keep their place in the packed tensor, so that it has one shape from step to step
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    # int32, as flash-attn's kernels read them
    cu_seqlens = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    # the host needs the maximum for flash-attn's grid; ours ignores it, but it is a result of this function
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The other way: tokens [total, ...] at their indices in [batch, seqlen, ...], zeros elsewhere."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of `input` at the given indices."""
    # both have gradients in PyTorch; flash-attn writes autograd functions for them
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros [first_axis_dim, ...] with `values` in the rows at the given, distinct indices."""
    # new_zeros: rows of padding must be 0, their gradients too
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The rows at the given indices, and `input` for the residual."""
    return index_first_axis(input, indices), input


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tokens of rows that hold several sequences each, one behind the other.

    attention_mask_in_length [b, s]: the lengths of a row's sequences, then zeros ([2, 3, 0, 0, 0, 0]: tokens 0 to 4).
    Returns (tokens [total, ...], their indices in [b * s], cu_seqlens [sequences + 1] int32, max_seqlen).
    """
    checks.shape(
        "unpad_input_for_concatenated_sequences", "attention_mask_in_length", attention_mask_in_length,
        hidden_states.shape[:2], "first dims of hidden_states",
    )  # fmt: skip
    # the sum of a row's lengths is the row's number of tokens
    lengths = attention_mask_in_length.sum(-1)
    kept = torch.arange(hidden_states.shape[1], device=lengths.device) < lengths[:, None]
    indices = kept.flatten().nonzero().flatten()
    each = attention_mask_in_length[attention_mask_in_length > 0]
    cu_seqlens = functional.pad(each.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(each.max()) if each.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


__getattr__ = unknown(__name__)
