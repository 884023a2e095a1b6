"""Context parallelism: attention over a sequence whose tokens are sharded over several ranks.

    cp = context_parallel(mesh["cp"])
    sharding = cp.sharding(seq_length)                       # or cp.sharding(cu_seqlens=...) for packed documents
    tokens, labels = sharding.shard(tokens, labels, dim=1)   # balanced; everything but attention is local from here on
    out = cp.attention(q, k, v, sharding, is_causal=True)    # q and k rotated by sharding.position_ids()
    logits = cp.unshard(logits, sharding, dim=1)             # where the whole sequence is wanted again

Three modes, chosen by bytes (`choose_mode`): "all_gather" and "ring" bring keys and values to the queries while
attention runs on those already received (point_to_point.py) and merge the parts in float32 by their LSE; "all_to_all"
exchanges tokens for heads, and each rank computes some heads for the whole sequence.

Source: Liu et al., arXiv:2310.01889 (ring); Jacobs et al., arXiv:2309.14509 (Ulysses).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from numbers import Integral
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from powertrain.ops.attention import attention, varlen_attention
from powertrain.ops.attention.arguments import MaskArguments, check_qkv, lower_mask
from powertrain.ops.attention.layouts import from_bshd, to_bshd
from powertrain.ops.attention.problem import Layout
from powertrain.parallel.context.block_attention import Mask
from powertrain.parallel.context.point_to_point import ContextGroup, all_gather_rows, to_heads, to_tokens
from powertrain.parallel.context.ring import RingAttention
from powertrain.parallel.context.sharding import Sharding
from powertrain.runtime import checks
from powertrain.runtime.dispatch import cast_by_autocast

Mode = Literal["ring", "all_gather", "all_to_all"]
_MODES: tuple[Mode, ...] = ("ring", "all_gather", "all_to_all")
_LAYOUTS = ("bshd", "bhsd", "sbhd", "thd")

# an H200's attention and its NVLink bandwidth from a peer, both measured: FLOP per byte to hide a transfer
# the FLOPs that an H200 does while a byte arrives
FLOPS_PER_BYTE = 550e12 / 370e9
# bytes of all keys and values above which a ring is used: its memory does not grow with the number of ranks
GATHERED_BYTES = 2 << 30


@dataclass(frozen=True)
class Choice:
    """A mode, the reason for it, and why each other one is not possible."""

    mode: Mode
    why: str
    bytes_received: dict[Mode, int]  # by each rank, forward and backward
    impossible: dict[Mode, str]

    def __str__(self) -> str:
        lines = [f"{self.mode}: {self.why}"]
        for mode in _MODES:
            note = self.impossible.get(mode, "possible")
            megabytes = self.bytes_received[mode] / 1e6
            lines.append(f"  {mode:10} {megabytes:10.1f} MB received, forward and backward  {note}")
        return "\n".join(lines)


def choose_mode(
    num_tokens: int,
    world_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    *,
    element_size: int = 2,
    batch: int = 1,
    impossible: dict[Mode, str] | None = None,
) -> Choice:
    """The mode for a sequence of `num_tokens` over `world_size` ranks.

    With W ranks, S tokens of all sequences, H heads, K key heads, D and E channels of a key and a value, e bytes an
    element, a rank receives, forward and backward,

        ring, all_gather    (W - 1) (S / W) K (D + E) (2 e + 4)         keys and values twice, dk and dv in float32
                                                                        (float64's in float64: 8 for 4)
        all_to_all          2 (W - 1) / W (S / W) (H + K') (D + E) e    K' = lcm(K, W): key heads that are repeated

    The first are hidden behind attention if a rank's tokens S / W are at least 2 (K / H) `FLOPS_PER_BYTE`, so there
    only possible modes count: all_gather, or ring if the keys and values of all ranks are above `GATHERED_BYTES`.
    With fewer tokens the one that receives fewer bytes is taken.
    Raises ValueError if no mode is possible, with each one's reason.
    """
    impossible = impossible or {}
    rows, channels = -(-num_tokens // world_size) * batch, sum(head_dims)
    others = world_size - 1
    ring_bytes = others * rows * num_kv_heads * channels * (2 * element_size + max(4, element_size))
    heads = num_heads + lcm(num_kv_heads, world_size)
    all_to_all_bytes = 2 * others * rows * heads * channels * element_size // world_size
    received: dict[Mode, int] = {"ring": ring_bytes, "all_gather": ring_bytes, "all_to_all": all_to_all_bytes}
    # all ranks' keys and values together, which all_gather holds
    gathered = num_tokens * batch * num_kv_heads * channels * element_size
    enough = 2 * num_kv_heads / num_heads * FLOPS_PER_BYTE
    # they receive the same bytes; all_gather waits less, ring holds less memory
    moving: Mode = "ring" if gathered > GATHERED_BYTES else "all_gather"
    if moving in impossible:
        moving = "ring" if moving == "all_gather" else "all_gather"
    if moving in impossible and "all_to_all" in impossible:
        reasons = "; ".join(f"{mode}: {impossible[mode]}" for mode in _MODES)
        checks.fail("context_parallel", "mode", "be possible for these arguments", reasons)

    def chosen(mode: Mode, why: str) -> Choice:
        return Choice(mode, why, received, impossible)

    if moving in impossible:
        return chosen("all_to_all", f"the others cannot: {impossible[moving]}")
    # enough tokens a rank: attention takes longer than the transfer, so its bytes cost nothing
    if rows >= enough:
        return chosen(moving, f"{rows} tokens a rank hide its transfers ({enough:.0f} do)")
    if "all_to_all" in impossible or ring_bytes <= all_to_all_bytes:
        return chosen(moving, f"{rows} tokens a rank do not hide transfers ({enough:.0f} do), and it has fewest bytes")
    return chosen(
        "all_to_all", f"{rows} tokens a rank do not hide transfers ({enough:.0f} do), and it has fewest bytes"
    )


class ContextParallel:
    """Attention over sequences that are sharded over the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # ranks are counted within the group, not in the world
        self.peers = ContextGroup(group)

    @property
    def rank(self) -> int:
        return self.peers.rank

    @property
    def world_size(self) -> int:
        return self.peers.world_size

    def sharding(self, seq_length: int | None = None, *, cu_seqlens: Tensor | Sequence[int] | None = None) -> Sharding:
        """The sharding of a sequence, or of packed documents. All ranks must pass the same arguments.

        seq_length   of every sequence of a dense batch: any, no multiple of anything
        cu_seqlens   [documents + 1], ascending from 0: documents one behind the other, of any lengths, 0 among them;
                     tokens behind the last one belong to none (name them as a document of their own). Read by the
                     host: a CPU tensor or a list costs no synchronization
        """
        op = "sharding"
        if (seq_length is None) == (cu_seqlens is None):
            checks.fail(op, "seq_length", "be given, or else cu_seqlens", "both" if seq_length is not None else "none")
        if seq_length is not None:
            if isinstance(seq_length, bool) or not (isinstance(seq_length, int) and seq_length >= 0):
                checks.fail(op, "seq_length", "be an integer of at least 0", repr(seq_length))
            # cut on the host from lengths alone: every rank computes the same
            return Sharding([seq_length], self.world_size, self.rank, is_packed=False)
        assert cu_seqlens is not None
        starts = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
        good = bool(starts) and all(isinstance(start, Integral) for start in starts)
        lengths = [stop - start for start, stop in pairwise(starts)] if good else []
        if not good:
            checks.fail(op, "cu_seqlens", "be integers, one dimension of them", checks.described(cu_seqlens))
        if starts[0] != 0 or any(length < 0 for length in lengths):
            checks.fail(op, "cu_seqlens", "ascend from 0", starts if len(starts) < 20 else f"{starts[:20]} ...")
        return Sharding(lengths, self.world_size, self.rank, is_packed=True)

    def unshard(self, x: Tensor, sharding: Sharding, *, dim: int = 1) -> Tensor:
        """The whole sequence along `dim`, from all ranks' tokens there: the inverse of `sharding.shard`, to the bit.

        Without gradients: differentiate before it, or compute a loss per rank and sum those.
        """
        op = "unshard"
        if x.requires_grad and torch.is_grad_enabled():
            # the gradient would have to be summed over ranks that each have a loss
            checks.fail(op, "x", "not require a gradient (use .detach())", "one that does")
        self._check_sharding(op, sharding)
        checks.require(x.shape[dim] == sharding.length(), op, "x", f"have {sharding.length()} tokens", x.shape[dim])
        rows = x.movedim(dim, 0).contiguous()
        if self.world_size > 1 and not x.is_cuda:
            self.peers.begin(op, f"{op} of {x.dtype}, {list(rows.shape[1:])} a token, {sharding.described()}")
        rows = all_gather_rows(self.peers, rows, sharding)
        return rows.index_select(0, sharding.order(x.device)).movedim(0, dim).contiguous()

    # sends and receives are not traced: torch.compile breaks the graph here
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sharding: Sharding,
        *,
        is_causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        chunk_size: int = 0,
        prefix_lengths: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
        layout: Layout | None = None,
        mode: Mode | Literal["auto"] = "auto",
    ) -> Tensor:
        """Attention of this rank's queries to all ranks' keys. Differentiable; every rank must call it.

        Shapes: B batch, n tokens of this rank (`sharding.length()`), H heads (a multiple of K key heads), D and E
            head dims. For layout None, dense: query [B, n, H, D], key [B, n, K, D], value [B, n, K, E] ("bshd"; also
            "bhsd" and "sbhd"); packed: [n, H, D], [n, K, D], [n, K, E] ("thd").
        is_causal to scale   those of `powertrain.attention`, positions being those of the whole sequence or document
            chunk_size, prefix_lengths   mode all_to_all only
            window_size, alibi_slopes    of packed documents mode all_to_all only
            sinks       every rank gets its own queries' share of their gradient, as it does of any other parameter's
        dropout_p   0: the dropped elements would depend on the number of ranks
        mode        "auto": see `choose_mode`; `explain` gives the choice and the reason
            ring        keys and values are passed from rank to rank; memory O(n) a rank
            all_gather  each is received from its owner, unless the mask hides it from this rank. O(all keys)
            all_to_all  H must be a multiple of the ranks; key heads are repeated until they are
        Returns out as query, with E for D.
        Numerics: parts are merged, and dq, dk, dv summed, in float32, each part rounded once to query's dtype, in an
            order that does not depend on time. float64 stays float64. Under autocast, the three are cast.
        Saved for backward: this rank's query, key, value, out and LSE; by all_to_all attention's, of its heads.
        Raises ValueError naming the argument, the expected value and the given one.
        """
        op = "context_parallel.attention"
        query, key, value = cast_by_autocast(query, key, value)
        layout = self._check_call(op, query, key, value, sharding, layout, dropout_p)
        options = dict(
            is_causal=is_causal, window_size=window_size, chunk_size=chunk_size, prefix_lengths=prefix_lengths,
            alibi_slopes=alibi_slopes, softcap=softcap, sinks=sinks, scale=scale,
        )  # fmt: skip
        # chosen from sizes that all ranks share
        choice = self._choose(op, query, key, value, sharding, layout, options, mode)
        # one rank has the whole sequence
        if self.world_size == 1:
            return _whole(query, key, value, sharding, layout, options)
        self._compare(choice.mode, layout, sharding, (query, key, value), options)
        if choice.mode == "all_to_all":
            return self._by_heads(query, key, value, sharding, layout, options)
        # one layout below: sequence in dim 1, or rows of packed documents
        if layout != "thd":
            query, key, value = (to_bshd(x, layout) for x in (query, key, value))
        # one band says both; blocks are cut by it whatever the mask is called
        left, right = window_size[0], 0 if is_causal else window_size[1]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
        slopes = None if alibi_slopes is None else alibi_slopes.to(dtype)
        mask = Mask(left, right, float(softcap or 0.0), float(scale), slopes)
        out: Tensor = RingAttention.apply(query, key, value, sinks, self.peers, sharding, mask, choice.mode == "ring")
        return out if layout == "thd" else from_bshd(out, layout, query)

    def explain(
        self, query: Tensor, key: Tensor, value: Tensor, sharding: Sharding, *, layout: Layout | None = None,
        mode: Mode | Literal["auto"] = "auto", **options: Any,
    ) -> Choice:  # fmt: skip
        """The mode of `attention` with these arguments, and the reason; nothing is computed or sent. `str`: a table."""
        op = "context_parallel.explain"
        layout = self._check_call(op, query, key, value, sharding, layout, options.pop("dropout_p", 0.0))
        return self._choose(op, query, key, value, sharding, layout, options, mode)

    def _check_sharding(self, op: str, sharding: Sharding) -> None:
        got = (sharding.rank, sharding.world_size)
        if got != (self.rank, self.world_size):
            must = f"be made by this object's sharding(), for rank {self.rank} of {self.world_size}"
            checks.fail(op, "sharding", must, f"one for rank {got[0]} of {got[1]}")

    def _compare(
        self, mode: Mode, layout: Layout, sharding: Sharding, tensors: Sequence[Tensor], options: dict[str, Any]
    ) -> None:
        """On the CPU, raise CollectiveMismatch where ranks' calls differ: gloo would end the process, not the call."""
        if tensors[0].is_cuda:
            return
        query, key, value = tensors
        sizes = check_qkv("context_parallel.attention", query, key, value, layout)
        # of tensors whether they are there: a rank may have slopes that require no gradient
        given = {k: "a tensor" if isinstance(x, Tensor) else x for k, x in options.items() if x is not None}
        self.peers.begin(
            f"attention by {mode}",
            f"attention by {mode} of {query.dtype} ({layout}), batch {sizes.batch}, heads {sizes.heads} and "
            f"{sizes.kv_heads} of {query.shape[-1]} and {value.shape[-1]}, {sharding.described()}, "
            + ", ".join(f"{name} {x}" for name, x in given.items()),
        )

    def _check_call(
        self, op: str, query: Tensor, key: Tensor, value: Tensor, sharding: Sharding, layout: Layout | None,
        dropout_p: float,
    ) -> Layout:  # fmt: skip
        self._check_sharding(op, sharding)
        layout = layout or ("thd" if sharding.is_packed else "bshd")
        allowed = ("thd",) if sharding.is_packed else _LAYOUTS[:3]
        checks.one_of(op, "layout", layout, allowed)
        sizes = check_qkv(op, query, key, value, layout)
        for name, tokens in (("query", sizes.queries), ("key", sizes.keys)):
            must = f"have the {sharding.length()} tokens that the sharding gives rank {self.rank}"
            checks.require(tokens == sharding.length(), op, name, must, tokens)
        if dropout_p != 0:
            checks.fail(op, "dropout_p", "be 0 (dropped elements would depend on the number of ranks)", dropout_p)
        return layout

    def _choose(
        self, op: str, query: Tensor, key: Tensor, value: Tensor, sharding: Sharding, layout: Layout,
        options: dict[str, Any], mode: Mode | Literal["auto"],
    ) -> Choice:  # fmt: skip
        checks.one_of(op, "mode", mode, (*_MODES, "auto"))
        sizes = check_qkv(op, query, key, value, layout)
        checked = {name: x for name, x in options.items() if name != "scale"}
        # batch arguments become document arguments there
        if sharding.is_packed:
            # masks are checked by documents, of which a packed batch has several
            sizes = sizes._replace(batch=len(sharding.bounds))
        lower_mask(op, sizes, MaskArguments(**checked), query.dtype)
        impossible = _impossible(options, sharding, sizes.heads, self.world_size)
        batch = 1 if sharding.is_packed else sizes.batch
        choice = choose_mode(
            sharding.num_tokens, self.world_size, sizes.heads, sizes.kv_heads, (query.shape[-1], value.shape[-1]),
            element_size=query.element_size(), batch=batch, impossible=impossible,
        )  # fmt: skip
        if mode == "auto":
            return choice
        if mode in impossible:
            checks.fail(op, "mode", "be possible for these arguments", f"{mode!r}: {impossible[mode]}")
        return Choice(mode, "as asked", choice.bytes_received, impossible)

    def _by_heads(
        self, query: Tensor, key: Tensor, value: Tensor, sharding: Sharding, layout: Layout, options: dict[str, Any]
    ) -> Tensor:
        """All tokens of some heads, as [S, B, heads, channels]."""
        world_size, rank = self.world_size, self.rank
        if layout == "thd":
            query, key, value = (x[:, None] for x in (query, key, value))
        else:
            query, key, value = (to_bshd(x, layout).transpose(0, 1) for x in (query, key, value))
        # each rank needs a whole number of key heads
        repeats = lcm(key.shape[2], world_size) // key.shape[2]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
        q, k, v = to_heads(self.peers, (query, key, value), sharding)
        heads = q.shape[2]
        own = slice(rank * heads, (rank + 1) * heads)
        # slopes and sinks of this rank's heads
        options = {**options, **{name: _own(options.get(name), own) for name in ("alibi_slopes", "sinks")}}
        if layout == "thd":
            out = _whole(q[:, 0], k[:, 0], v[:, 0], sharding, "thd", options)[:, None]
        else:
            out = _whole(q, k, v, sharding, "sbhd", options)
        out = to_tokens(self.peers, out, sharding)
        return out[:, 0] if layout == "thd" else from_bshd(out.transpose(0, 1), layout, query)


def context_parallel(group: dist.ProcessGroup | DeviceMesh) -> ContextParallel:
    """Context parallelism over a process group, or over a mesh of one axis such as `mesh["cp"]`. See the module.

    Any backend that sends tensors of the device in use: NCCL, gloo. Nothing is sent before the first call.
    Raises ValueError for a mesh of several axes, and for what is no group.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or f"{group.ndim} axes"
            checks.fail("context_parallel", "group", 'be a mesh of one axis, such as mesh["cp"]', f"one of {names}")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        checks.fail("context_parallel", "group", "be a ProcessGroup or a DeviceMesh of one axis", repr(group))
    return ContextParallel(group)


def _impossible(options: dict[str, Any], sharding: Sharding, num_heads: int, world_size: int) -> dict[Mode, str]:
    """Why modes cannot compute a call."""
    impossible: dict[Mode, str] = {}
    left, right = options.get("window_size", (-1, -1))
    right = 0 if options.get("is_causal") else right
    for unmet, reason in (
        (options.get("chunk_size", 0) > 0, "chunk_size needs whole sequences"),
        (options.get("prefix_lengths") is not None, "prefix_lengths need whole sequences"),
        (sharding.is_packed and (left >= 0 or right > 0), "window_size needs whole documents where they are packed"),
        (sharding.is_packed and options.get("alibi_slopes") is not None, "alibi_slopes need whole packed documents"),
    ):
        if unmet:
            impossible["ring"] = impossible["all_gather"] = reason
    if num_heads % world_size:
        impossible["all_to_all"] = f"{num_heads} heads are no multiple of {world_size} ranks"
    return impossible


def _whole(
    q: Tensor, k: Tensor, v: Tensor, sharding: Sharding, layout: Layout, options: dict[str, Any]
) -> Tensor:  # fmt: skip
    """Attention of whole sequences on one rank."""
    if layout == "thd":
        # lengths are known to the host, so nothing is read back
        starts = torch.tensor(sharding.starts, dtype=torch.int32, device=q.device)
        longest = sharding.max_length
        out: Tensor = varlen_attention(q, k, v, starts, max_seqlen_q=longest, max_seqlen_k=longest, **options)
        return out
    out = attention(q, k, v, layout=layout, **options)
    return out


def _own(x: Tensor | None, heads: slice) -> Tensor | None:
    """The given heads of a per-head tensor [H] or [B, H]."""
    return None if x is None else x[..., heads]
