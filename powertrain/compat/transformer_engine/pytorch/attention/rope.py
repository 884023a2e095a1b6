"""transformer_engine.pytorch's rotary functions on `powertrain.rope`."""

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.ops.conversion import unsupported
from powertrain.ops.rope import rope
from powertrain.ops.rope_table import RopeTable
from powertrain.runtime import checks

__all__ = ["RotaryPositionEmbedding", "apply_fused_qkv_rotary_pos_emb", "apply_rotary_pos_emb"]


class RotaryPositionEmbedding(nn.Module):
    """Angles of every position, [s, 1, 1, d] float32, each twice: d = dim * rotary_percent.

    Positions are divided by seq_len_interpolation_factor where pretrained_max_position_embeddings is given too; in a
    sequence of more than their product they end at pretrained_max_position_embeddings.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        self.interleaved, self.rotary_base = interleaved, rotary_base
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        # made on the GPU, as there
        device = "cuda" if torch.cuda.is_available() else None
        # persistent: TransformerEngine's buffer is in its state dicts
        self.register_buffer("inv_freq", _frequencies(dim, rotary_base, device))

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        # autocast would make positions bfloat16, which is not exact beyond 256
        with torch.autocast(self.inv_freq.device.type, enabled=False):
            inv_freq = self.inv_freq
            if inv_freq.dtype.itemsize < 4:
                # a converted module: its buffer is rounded, and in 16 bits positions would be too
                inv_freq = _frequencies(2 * len(inv_freq), self.rotary_base, inv_freq.device)
            at = torch.arange(max_seq_len, device=inv_freq.device, dtype=inv_freq.dtype) + offset
            trained, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
            # as there: one of the two alone interpolates nothing
            if factor is not None and trained is not None:
                longer = max_seq_len > trained * factor
                # interpolated to the trained length, further if the sequence is longer than the factor allows for
                at = at * (trained / max_seq_len if longer else 1 / factor)
            angles = torch.outer(at, inv_freq)
            doubled = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
            # each angle twice, in the order of the rotation
            return doubled[:, None, None]


def _frequencies(dim: int, base: float, device: torch.device | str | None) -> Tensor:
    channel = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
    return 1.0 / base ** (channel / dim)


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """t turned by the angles freqs [positions, 1, 1, d] of its positions; channels from d on pass.

    t is [s, b, h, dim] "sbhd", [b, s, h, dim] "bshd" or, with cu_seqlens, [tokens, h, dim] "thd"; start_positions [b
    or more] is added to the positions. fused is a hint: one kernel either way.
    """
    op = "apply_rotary_pos_emb"
    checks.one_of(op, "tensor_format", tensor_format, ("sbhd", "bshd", "thd"))
    if cp_size > 1:
        unsupported(op, "cp_size", cp_size, "position_ids of powertrain.rope, the positions of this rank's tokens")
    checks.require(
        (cu_seqlens is not None) == (tensor_format == "thd"), op, "cu_seqlens", 'be given for "thd", and only then',
        tensor_format,
    )  # fmt: skip
    batch = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else t.shape[tensor_format.index("b")]
    # longer in an InferenceParams, which has a place for max_batch_size sequences
    start: Tensor | int = 0 if start_positions is None else start_positions[:batch]
    turned = rope(
        t, table=table_of(freqs, interleaved), layout=tensor_format, interleaved=interleaved, offset=start,  # type: ignore[arg-type]
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    assert isinstance(turned, Tensor)
    return turned


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: list[int],
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys turned, and values, out of one projection.

    qkv is [s, b, groups, d] "sbhd" or [b, s, groups, d] "bshd": for each group its queries, its key and its value, of
    the sizes in qkv_split_arg_list. Returns q with as many heads of the key's size as there are, k, and v (a view).
    """
    op = "apply_fused_qkv_rotary_pos_emb"
    checks.one_of(op, "tensor_format", tensor_format, ("sbhd", "bshd"))
    checks.require(cu_seqlens is None, op, "cu_seqlens", "be None: the formats are dense", "a tensor")
    sizes = list(qkv_split_arg_list)
    fits = qkv.dim() == 4 and len(sizes) == 3 and sum(sizes) == qkv.shape[-1] and sizes[0] % sizes[1] == 0
    must = "be the sizes of queries, key and value in qkv's last dim, queries a multiple of the key"
    checks.require(fits, op, "qkv_split_arg_list", must, f"{sizes} for {list(qkv.shape)}")
    q, k, v = qkv.split(sizes, -1)
    # every group's heads, one group after the other
    q = q.unflatten(-1, (-1, sizes[1])).flatten(2, 3)
    options = {"start_positions": start_positions, "interleaved": interleaved, "cp_size": cp_size, "cp_rank": cp_rank}
    q, k = (apply_rotary_pos_emb(x, f, tensor_format, **options) for x, f in ((q, q_freqs), (k, k_freqs)))  # type: ignore[arg-type]
    return q, k, v


def table_of(freqs: Tensor, interleaved: bool) -> RopeTable:
    """cos and sin of angles [positions, 1, 1, d], each of which is there twice and once in the table."""
    angles = freqs[:, 0, 0].float()
    angles = angles[:, ::2] if interleaved else angles[:, : angles.shape[1] // 2]
    return RopeTable(angles.cos(), angles.sin())


__getattr__ = unknown(__name__)
