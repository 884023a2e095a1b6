"""megatron.core.fusions.fused_mla_yarn_rope_apply on `powertrain.rope`.

Megatron makes cos and sin [positions, 1, 1, emb_dim] with each pair's angle in both halves: the first half is read.
Pairs are neighbours in the input, (x[2i], x[2i + 1]); in the result they are i and i + emb_dim / 2, as there.
"""

from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.ops.conversion import cat, unsupported
from powertrain.ops.rope import rope
from powertrain.ops.rope_table import RopeTable
from powertrain.runtime import checks

__all__ = ["fused_apply_mla_rope_for_kv", "fused_apply_mla_rope_for_q"]


def fused_apply_mla_rope_for_q(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    qk_head_dim: int,
    emb_dim: int,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
) -> Tensor:
    """t [s, b, h, qk_head_dim + emb_dim], or packed [tokens, h, ...] with cu_seqlens_q; its last emb_dim turned.

    Returns a new tensor; there, t itself is overwritten. Use the one returned.
    """
    op = "fused_apply_mla_rope_for_q"
    _check(op, "t", t, qk_head_dim + emb_dim, emb_dim, cu_seqlens_q, cp_size, rotary_interleaved)
    kept, turning = t.split((qk_head_dim, emb_dim), -1)
    return cat((kept, _turned(turning, cos, sin, cu_seqlens_q)), -1)


def fused_apply_mla_rope_for_kv(
    kv: Tensor,
    k_pos_emb: Tensor,
    cos: Tensor,
    sin: Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """(key [s, b, h, k_dim + emb_dim], value [s, b, h, v_dim]) of kv [s, b, h, k_dim + v_dim] and k_pos_emb.

    k_pos_emb [s, b, 1, emb_dim] is turned and given to every head. With cu_seqlens_kv all are packed, [tokens, h, ...].
    """
    op = "fused_apply_mla_rope_for_kv"
    _check(op, "kv", kv, k_dim + v_dim, emb_dim, cu_seqlens_kv, cp_size, rotary_interleaved)
    checks.shape(op, "k_pos_emb", k_pos_emb, (*kv.shape[:-2], 1, emb_dim), "kv's tokens, 1, emb_dim")
    key, value = kv.split((k_dim, v_dim), -1)
    shared = _turned(k_pos_emb, cos, sin, cu_seqlens_kv).expand(*key.shape[:-1], emb_dim)
    return cat((key, shared), -1), value.contiguous()


def _check(
    op: str, name: str, x: Tensor, size: int, emb_dim: int, cu_seqlens: Tensor | None, cp_size: int, interleaved: bool
) -> None:
    dims = 4 if cu_seqlens is None else 3
    fits = x.dim() == dims and x.shape[-1] == size
    checks.require(fits, op, name, f"have {dims} dims, the last of them {size}", list(x.shape))
    checks.require(emb_dim % 2 == 0, op, "emb_dim", "be even", emb_dim)
    if cp_size > 1:
        unsupported(op, "cp_size", cp_size, "position_ids of powertrain.rope, the positions of this rank's tokens")
    if interleaved:
        # theirs asserts the same
        unsupported(op, "rotary_interleaved", True, "False: pairs are neighbours in the input either way")


def _turned(x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    # neighbours in the input are a pair there, halves of the head are one in `rope`
    pairs = x.shape[-1] // 2
    # the first of every pair, then the second
    halves = x.unflatten(-1, (pairs, 2)).mT.flatten(-2)
    # their tables repeat the angles for the second half
    tables = (angles.reshape(angles.shape[0], -1)[:, :pairs].float().contiguous() for angles in (cos, sin))
    turned = rope(
        halves, table=RopeTable(*tables), layout="sbhd" if cu_seqlens is None else "thd", cu_seqlens=cu_seqlens
    )
    assert isinstance(turned, Tensor)
    return turned


__getattr__ = unknown(__name__)
