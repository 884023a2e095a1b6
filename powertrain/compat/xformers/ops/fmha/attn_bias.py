"""xFormers' attention biases: which keys a query sees, without a matrix.

Every class is a band (how far a query sees to the left and right, and from which corner positions count), and most are
that band in blocks: queries and keys are rows of one long sequence, cut into as many blocks each, and a query sees
keys of its own block only. Blocks of keys may be padded to one length, lie anywhere (gappy), or in pages.

`materialize` writes the matrix, 0 or -inf, for tests; `memory_efficient_attention` never does. Names, attributes and
constructors are xFormers'; biases of ours are plain objects, never tensors.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from operator import index
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from powertrain.ops.attention import MaskSpec
from powertrain.runtime import checks

Device = torch.device | str | None
_Self = TypeVar("_Self", bound="AttentionBias")
_Blocks = TypeVar("_Blocks", bound="BlockBias")
_PagedT = TypeVar("_PagedT", bound="PagedBias")


class Band(NamedTuple):
    """A query at position p sees keys p - left to p + right; -1: all of them."""

    left: int = -1
    right: int = -1
    bottom_right: bool = False  # the last query stands at the last key, else the first at the first

    def materialize(self, queries: int, keys: int, dtype: torch.dtype, device: Device) -> Tensor:
        """[queries, keys], 0 where a query sees a key and -inf elsewhere."""
        mask = MaskSpec(left=self.left, right=self.right, bottom_right=self.bottom_right)
        visible, _ = mask.materialize(queries, keys, device=device)
        return torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill(~visible[0, 0], -torch.inf)


class AttentionBias:
    """Types of `attn_bias` besides a tensor."""

    HOLDS_DENSE_TENSOR: ClassVar[bool] = False

    @property
    def band(self) -> Band:
        """Keys that a query sees, within its block if there are blocks."""
        raise NotImplementedError(f"{type(self).__name__} is no bias of its own: use a class derived from it")

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        """The bias as a tensor of `shape` [..., queries, keys]: 0 where a query sees a key, -inf elsewhere."""
        # expand, not repeat: every row of the batch is the same
        return self.band.materialize(shape[-2], shape[-1], dtype, device).expand(tuple(shape))

    def to(self: _Self, device: Device) -> _Self:
        """The same bias with its tensors on a device."""
        return self


class LowerTriangularMask(AttentionBias):
    """Causal: query i sees keys 0 to i (top left)."""

    def __init__(self, *, device: Device = None) -> None:
        # xFormers keeps an empty tensor there; ours holds none
        del device

    @property
    def band(self) -> Band:
        return Band(right=0)

    def add_bias(self, bias: Tensor) -> "LowerTriangularMaskWithTensorBias":
        """Causal with a bias added; gradients flow to `bias`."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Causal (top left) with a bias that broadcasts to the scores, as `attn_bias` itself may be."""

    HOLDS_DENSE_TENSOR = True

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        return super().materialize(shape, dtype, device) + self.bias.to(device=device, dtype=dtype)

    def add_bias(self, bias: Tensor) -> "LowerTriangularMaskWithTensorBias":
        return LowerTriangularMaskWithTensorBias(self.bias + bias)

    def to(self, device: Device) -> "LowerTriangularMaskWithTensorBias":
        return LowerTriangularMaskWithTensorBias(self.bias.to(device))


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal, the last query at the last key."""

    @property
    def band(self) -> Band:
        return Band(right=0, bottom_right=True)

    def make_local_attention(self, window_size: int) -> "LowerTriangularFromBottomRightLocalAttentionMask":
        """The same within a window."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal from the bottom right, `_window_size` keys at most."""

    _window_size: int

    def __post_init__(self) -> None:
        _at_least(type(self), "_window_size", self._window_size, 1)

    @property
    def band(self) -> Band:
        return Band(self._window_size - 1, 0, True)


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """A window of `window_left` keys before the query's own and `window_right` after it, from the bottom right."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        _at_least(type(self), "window_left", self.window_left, 0)
        _at_least(type(self), "window_right", self.window_right, 0)

    @property
    def band(self) -> Band:
        return Band(self.window_left, self.window_right, True)


@dataclass
class _SeqLenInfo:
    """Partition of a dim: block n is rows seqstart[n] to seqstart[n + 1]. Everything is there for host and device."""

    seqstart: Tensor  # [blocks + 1] int32
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    def to(self, device: Device) -> Any:
        # host and device hold the same numbers: the kernel reads one, shapes come from the other
        every = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: Any = {name: x.to(device) for name, x in every.items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """(first row, row after the last) of every block."""
        return iter(itertools.pairwise(self.seqstart_py))

    def lengths(self) -> list[int]:
        return [end - start for start, end in self.intervals()]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Device = None) -> "_SeqLenInfo":
        lengths = list(seqlens)
        starts = _starts(lengths)
        return _SeqLenInfo(_int32(starts, device), max(lengths, default=-1), min(lengths, default=-1), starts)

    def from_seqlens_inplace(self, seqlens: Iterable[int]) -> None:
        """Other lengths in the same memory, for a captured graph: as many, and none above max_seqlen."""
        lengths = list(seqlens)
        _fits("seqlens", lengths, len(self.seqstart_py) - 1, self.max_seqlen)
        # the same list and tensor objects: a captured CUDA graph has their addresses
        self.seqstart_py[:] = _starts(lengths)
        self.min_seqlen = min(lengths, default=-1)
        self.seqstart.copy_(torch.tensor(self.seqstart_py, dtype=torch.int32, device="cpu"))

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """[1, rows, ...] as one [n, length, ...] for each group of n blocks of equal length."""
        if x.shape[0] != 1 or x.shape[1] != self.seqstart_py[-1]:
            checks.fail("split", "x", f"have shape [1, {self.seqstart_py[-1]}, ...]", list(x.shape))
        counts = [1] * (len(self.seqstart_py) - 1) if batch_sizes is None else list(batch_sizes)
        ends = [self.seqstart_py[end] for end in _starts(counts)]
        rows = [b - a for a, b in itertools.pairwise(ends)]
        parts = zip(counts, x.split(rows, 1), strict=True)
        return [part.reshape(n, part.shape[1] // max(n, 1), *x.shape[2:]) for n, part in parts]


@dataclass
class _PaddedSeqLenInfo(_SeqLenInfo):
    """Blocks of `padding` rows, of which the first seqlen[n] are used."""

    seqlen: Tensor  # [blocks] int32
    seqlen_py: list[int]
    padding: int

    def intervals(self) -> Iterator[tuple[int, int]]:
        return ((start, start + n) for start, n in zip(self.seqstart_py, self.seqlen_py, strict=False))

    @classmethod
    def from_seqlens_padded(cls, seqlens: Sequence[int], padding: int, *, device: Device = None) -> "_PaddedSeqLenInfo":
        lengths = list(seqlens)
        _fits("kv_seqlen", lengths, len(lengths), padding)
        starts = [n * padding for n in range(len(lengths) + 1)]
        most, least = max(lengths, default=-1), min(lengths, default=-1)
        return cls(_int32(starts, device), most, least, starts, _int32(lengths, device), lengths, padding)

    def from_seqlens_padded_inplace(self, seqlens: Sequence[int]) -> None:
        """Other lengths in the same memory, for a captured graph: as many, and none above max_seqlen."""
        _fits("seqlens", list(seqlens), len(self.seqlen_py), self.max_seqlen)
        self.seqlen_py[:] = list(seqlens)
        self.seqlen.copy_(torch.tensor(self.seqlen_py, dtype=torch.int32, device="cpu"))

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        raise NotImplementedError("padded keys cannot be split; nearest: BlockDiagonalMask")


@dataclass
class _GappySeqInfo(_SeqLenInfo):
    """Blocks anywhere: seqlen[n] rows from seqstart[n] on. In a paged bias both count within the sequence's own pages,
    and seqlen[n] is where the sequence ends."""

    seqlen: Tensor  # [blocks] int32
    seqlen_py: list[int]

    def intervals(self) -> Iterator[tuple[int, int]]:
        return ((start, start + n) for start, n in zip(self.seqstart_py, self.seqlen_py, strict=False))

    @classmethod
    def from_seqlens_gappy(
        cls, seqstarts: Sequence[int], seqlens: Sequence[int], paged: bool, *, device: Device = None
    ) -> "_GappySeqInfo":
        starts, lengths = list(seqstarts), list(seqlens)
        blocks = len(starts) - (0 if paged else 1)
        if not lengths or blocks != len(lengths):
            checks.fail("BlockDiagonalGappyKeysMask", "kv_seqlen", f"have {blocks} lengths, at least 1", len(lengths))
        most, least = max(lengths), min(lengths)
        if not paged:
            _lie_in("BlockDiagonalGappyKeysMask", starts[:-1], lengths, starts[-1])
        if paged:
            # within the pages a length is an end; -1 stands for the last start, which `first_rows` drops
            lengths = [start + n for start, n in zip(starts, lengths, strict=True)]
            starts = [*starts, -1]
        return cls(_int32(starts, device), most, least, starts, _int32(lengths, device), lengths)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        raise NotImplementedError("gappy keys cannot be split; nearest: BlockDiagonalMask")


@dataclass
class BlockBias(AttentionBias):
    """A band in blocks."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: Any

    @property
    def band(self) -> Band:
        return Band()

    def to(self: _Blocks, device: Device) -> _Blocks:
        every = {f.name: getattr(self, f.name) for f in fields(self)}
        # queries and keys may share one object, and share one afterwards: `split` compares them with `is`
        moved = {id(x): x.to(device) for x in every.values() if hasattr(x, "to")}
        return replace(self, **{name: moved[id(x)] for name, x in every.items() if id(x) in moved})

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        rows, cols = self.q_seqinfo.seqstart_py[-1], self.k_seqinfo.seqstart_py[-1]
        # a block-diagonal mask is for exactly its rows
        if tuple(shape[-2:]) != (rows, cols):
            checks.fail(type(self).__name__, "shape", f"end in [{rows}, {cols}]", list(shape))
        bias = torch.full((rows, cols), -torch.inf, dtype=dtype, device=device)
        for (q0, q1), (k0, k1) in zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True):
            bias[q0:q1, k0:k1] = self.band.materialize(q1 - q0, k1 - k0, dtype, device)
        return bias.expand(tuple(shape))


@dataclass
class BlockDiagonalMask(BlockBias):
    """Queries of a block see all keys of it: sequences of any lengths in one row."""

    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls: type[_Blocks], q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Device = None
    ) -> _Blocks:
        """From the lengths of queries and keys; keys as queries if not given."""
        q_seqlen = _whole(cls, "q_seqlen", q_seqlen)
        kv_seqlen = None if kv_seqlen is None else _whole(cls, "kv_seqlen", kv_seqlen)
        # one object where the lengths are equal: `split` is allowed only then
        q_seqinfo = k_seqinfo = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        if kv_seqlen is not None and kv_seqlen != q_seqlen:
            _as_many(cls, q_seqlen, kv_seqlen)
            k_seqinfo = _SeqLenInfo.from_seqlens(kv_seqlen, device=device)
        return cls(q_seqinfo=q_seqinfo, k_seqinfo=k_seqinfo)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple["BlockDiagonalMask", Tensor]:
        """From tensors [b, length, ...]: the bias, and the tensors in one row [1, sum of b * length, ...]."""
        bias, row, _, _ = cls.from_tensor_lists_qkv(tensors, tensors)
        # one object, for `split` asks for identity
        bias.k_seqinfo = bias.q_seqinfo
        return bias, row

    @classmethod
    def from_tensor_lists_qkv(
        cls, tensors_q: Sequence[Tensor], tensors_k: Sequence[Tensor], tensors_v: Sequence[Tensor] | None = None
    ) -> tuple["BlockDiagonalMask", Tensor, Tensor, Tensor | None]:
        """From lists of queries, keys and values: the bias, and each list in one row."""
        _as_many(cls, tensors_q, tensors_k)
        lists = (tensors_q, tensors_k, tensors_v)
        lengths = [[x.shape[1] for x in one for _ in range(x.shape[0])] for one in lists if one is not None]
        device = tensors_q[0].device if tensors_q else None
        bias = cls.from_seqlens(lengths[0], lengths[1], device=device)
        bias._batch_sizes = [x.shape[0] for x in tensors_q]
        q, k, v = (None if one is None else torch.cat([x.flatten(0, 1)[None] for x in one], 1) for one in lists)
        assert q is not None and k is not None
        return bias, q, k, v

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        """A row of queries, or of results, as the tensors it was made of."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        """A row of keys or values as the tensors it was made of."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The inverse of `from_tensor_list`."""
        same = self.q_seqinfo is self.k_seqinfo
        checks.require(
            same, type(self).__name__, "tensor", "go to split_queries or split_kv", "other keys than queries"
        )
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def make_causal(self) -> "BlockDiagonalCausalMask":
        """Causal in each block, from its top left."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> "BlockDiagonalCausalFromBottomRightMask":
        """Causal in each block, from its bottom right."""
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> "BlockDiagonalCausalLocalAttentionMask":
        """Causal within a window, from each block's top left."""
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> "BlockDiagonalCausalLocalAttentionFromBottomRightMask":
        """Causal within a window, from each block's bottom right."""
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Causal in each block, from its top left."""

    @property
    def band(self) -> Band:
        return Band(right=0)


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Causal in each block, from its bottom right; no block has more queries than keys."""

    def __post_init__(self) -> None:
        for n, (queries, keys) in enumerate(zip(self.q_seqinfo.lengths(), self.k_seqinfo.lengths(), strict=True)):
            if keys < queries:
                checks.fail(type(self).__name__, "kv_seqlen", f"be at least {queries} in block {n}", keys)

    @property
    def band(self) -> Band:
        return Band(right=0, bottom_right=True)


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Causal in each block from its top left, `_window_size` keys at most; every query sees one."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        _at_least(type(self), "_window_size", self._window_size, 1)
        for n, (queries, keys) in enumerate(zip(self.q_seqinfo.lengths(), self.k_seqinfo.lengths(), strict=True)):
            if queries - self._window_size >= keys:
                must = f"let every one of block {n}'s {queries} queries see one of its {keys} keys"
                checks.fail(type(self).__name__, "_window_size", must, self._window_size)

    @property
    def band(self) -> Band:
        return Band(self._window_size - 1, 0)


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """Causal in each block from its bottom right, `_window_size` keys at most."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(type(self), "_window_size", self._window_size, 1)

    @property
    def band(self) -> Band:
        return Band(self._window_size - 1, 0, True)


@dataclass
class BlockDiagonalPaddedKeysMask(BlockBias):
    """Keys in blocks padded to one length, as a KV cache holds them; queries see the used ones."""

    k_seqinfo: _PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls: type[_Blocks],
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: None = None,
        *,
        device: Device = None,
    ) -> _Blocks:
        """From the lengths of queries and keys, and the capacity of each block of keys."""
        return cls(**_padded(cls, q_seqlen, kv_padding, kv_seqlen, causal_diagonal, device))

    def make_local_attention(self, window_left: int, window_right: int) -> "BlockDiagonalLocalAttentionPaddedKeysMask":
        """The same in a window to both sides, from the bottom right of the used keys."""
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)

    def make_paged(
        self, block_tables: Tensor, page_size: int, paged_type: type["PagedBlockDiagonalPaddedKeysMask"]
    ) -> "PagedBlockDiagonalPaddedKeysMask":
        """The same lengths with keys in pages."""
        capacity = _capacity(paged_type, block_tables, page_size, len(self.k_seqinfo.seqlen_py))
        # the new capacity must hold the longest sequence
        _fits("kv_seqlen", self.k_seqinfo.seqlen_py, len(self.k_seqinfo.seqlen_py), capacity)
        k_seqinfo = replace(self.k_seqinfo, padding=capacity)
        return _paged(self, paged_type, k_seqinfo, block_tables, page_size)


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The same, causal from the bottom right of the used keys."""

    causal_diagonal: None = None  # xFormers keeps the name and reads it no more

    def __post_init__(self) -> None:
        _no_diagonal(type(self), self.causal_diagonal)

    @property
    def band(self) -> Band:
        return Band(right=0, bottom_right=True)


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The same, in a window to both sides from the bottom right of the used keys."""

    window_left: int
    window_right: int

    @property
    def band(self) -> Band:
        return Band(self.window_left, self.window_right, True)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
        *,
        device: Device = None,
    ) -> "BlockDiagonalLocalAttentionPaddedKeysMask":
        """`from_seqlens` with the window."""
        infos = _padded(cls, q_seqlen, kv_padding, kv_seqlen, None, device)
        return cls(**infos, window_left=window_left, window_right=window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The same, causal from the bottom right of the used keys, `_window_size` keys at most."""

    _window_size: int

    def __post_init__(self) -> None:
        # a band of -1 keys before the query's own would be one without an end
        _at_least(type(self), "_window_size", self._window_size, 1)

    @property
    def band(self) -> Band:
        return Band(self._window_size - 1, 0, True)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_size: int,
        *,
        device: Device = None,
    ) -> "BlockDiagonalCausalLocalAttentionPaddedKeysMask":
        """`from_seqlens` with the window."""
        return cls(**_padded(cls, q_seqlen, kv_padding, kv_seqlen, None, device), _window_size=window_size)


@dataclass
class BlockDiagonalGappyKeysMask(BlockBias):
    """Keys in blocks anywhere: block n has kv_seqlen[n] keys from kv_seqstarts[n] on."""

    k_seqinfo: _GappySeqInfo

    @classmethod
    def from_seqlens(
        cls: type[_Blocks],
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        *,
        device: Device = None,
    ) -> _Blocks:
        """From the lengths of queries, and starts and lengths of keys; one start more is where the keys end."""
        return cls(**_gappy(cls, q_seqlen, kv_seqstarts, kv_seqlen, device))

    def make_paged(
        self,
        block_tables: Tensor,
        page_size: int,
        notional_padding: int,
        paged_type: type["PagedBlockDiagonalGappyKeysMask"],
    ) -> "PagedBlockDiagonalGappyKeysMask":
        """The same with keys in pages, if block n lay in rows n * notional_padding and on."""
        info = self.k_seqinfo
        capacity = _capacity(paged_type, block_tables, page_size, len(info.seqlen_py))
        # positions of pages must begin at a page
        if notional_padding % page_size:
            checks.fail("make_paged", "notional_padding", f"be a multiple of page_size {page_size}", notional_padding)
        starts = [start - n * notional_padding for n, start in enumerate(info.seqstart_py[:-1])]
        _lie_in("make_paged", starts, info.seqlen_py, capacity)
        k_seqinfo = _GappySeqInfo.from_seqlens_gappy(starts, info.seqlen_py, True, device=info.seqstart.device)
        return _paged(self, paged_type, k_seqinfo, block_tables, page_size)


@dataclass
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """The same, causal from the bottom right of each block."""

    @property
    def band(self) -> Band:
        return Band(right=0, bottom_right=True)


@dataclass
class BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask(BlockDiagonalGappyKeysMask):
    """The same, in a window to both sides from the bottom right of each block (MSLK's)."""

    window_left: int
    window_right: int

    @property
    def band(self) -> Band:
        return Band(self.window_left, self.window_right, True)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
        *,
        device: Device = None,
    ) -> "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask":
        """`from_seqlens` with the window."""
        infos = _gappy(cls, q_seqlen, kv_seqstarts, kv_seqlen, device)
        return cls(**infos, window_left=window_left, window_right=window_right)


@dataclass
class PagedBias(BlockBias):
    """Keys in pages: sequence n has those of block_tables[n], in that order. K is [1, pages * page_size, ...]."""

    block_tables: Tensor  # [blocks, pages per sequence] int32
    page_size: int

    def first_rows(self) -> Tensor | None:
        """Start of each sequence within its pages, [blocks] on the device, or None if at 0."""
        return None

    def spans(self) -> list[tuple[int, int]]:
        """(first position, position after the last) of every sequence within its pages."""
        return [(0, n) for n in self.k_seqinfo.seqlen_py]

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        rows = self.q_seqinfo.seqstart_py[-1]
        checks.require(shape[-2] == rows, type(self).__name__, "shape", f"have {rows} queries", list(shape))
        bias = torch.full((rows, shape[-1]), -torch.inf, dtype=dtype, device=device)
        table = self.block_tables.to(device).long()
        for n, ((q0, q1), (k0, k1)) in enumerate(zip(self.q_seqinfo.intervals(), self.spans(), strict=True)):
            position = torch.arange(k0, k1, device=device)
            # positions to rows of the cache, through the page table
            cols = table[n, position // self.page_size] * self.page_size + position % self.page_size
            bias[q0:q1, cols] = self.band.materialize(q1 - q0, k1 - k0, dtype, device)
        return bias.expand(tuple(shape))


@dataclass
class PagedBlockDiagonalPaddedKeysMask(PagedBias):
    """`BlockDiagonalPaddedKeysMask` with keys in pages."""

    k_seqinfo: _PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls: type[_PagedT],
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Device = None,
    ) -> _PagedT:
        """From the lengths of queries and keys, and the pages."""
        kv_seqlen = _whole(cls, "kv_seqlen", kv_seqlen)
        capacity = _capacity(cls, block_tables, page_size, len(kv_seqlen))
        infos = _padded(cls, q_seqlen, capacity, kv_seqlen, None, device)
        return cls(**infos, block_tables=block_tables, page_size=page_size)


@dataclass
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """`BlockDiagonalCausalWithOffsetPaddedKeysMask` with keys in pages."""

    @property
    def band(self) -> Band:
        return Band(right=0, bottom_right=True)


@dataclass
class PagedBlockDiagonalCausalLocalPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """`BlockDiagonalCausalLocalAttentionPaddedKeysMask` with keys in pages (MSLK's)."""

    _window_size: int = 0

    @property
    def band(self) -> Band:
        _at_least(type(self), "_window_size", self._window_size, 1)
        return Band(self._window_size - 1, 0, True)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        window_size: int,
        page_size: int,
        *,
        device: Device = None,
    ) -> "PagedBlockDiagonalCausalLocalPaddedKeysMask":
        """`from_seqlens` with the window."""
        return replace(
            cls.from_seqlens(q_seqlen, kv_seqlen, block_tables, page_size, device=device), _window_size=window_size
        )


@dataclass
class PagedBlockDiagonalGappyKeysMask(PagedBias):
    """`BlockDiagonalGappyKeysMask` with keys in pages: starts count within each sequence's own pages."""

    k_seqinfo: _GappySeqInfo

    def first_rows(self) -> Tensor:
        return self.k_seqinfo.seqstart[:-1]

    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self.k_seqinfo.seqstart_py, self.k_seqinfo.seqlen_py, strict=False))

    @classmethod
    def from_seqlens(
        cls: type[_PagedT],
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Device = None,
    ) -> _PagedT:
        """From the lengths of queries, starts and lengths of keys within their pages, and the pages."""
        kv_seqstarts, kv_seqlen = _whole(cls, "kv_seqstarts", kv_seqstarts), _whole(cls, "kv_seqlen", kv_seqlen)
        capacity = _capacity(cls, block_tables, page_size, len(kv_seqlen))
        device = block_tables.device if device is None else device
        infos = _gappy(cls, q_seqlen, kv_seqstarts, kv_seqlen, device, paged=True)
        _lie_in("PagedBlockDiagonalGappyKeysMask", kv_seqstarts, kv_seqlen, capacity)
        return cls(**infos, block_tables=block_tables, page_size=page_size)


@dataclass
class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    """`BlockDiagonalCausalWithOffsetGappyKeysMask` with keys in pages."""

    @property
    def band(self) -> Band:
        return Band(right=0, bottom_right=True)


VARLEN_BIASES = (
    BlockDiagonalMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
)


def _starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    return starts


def _int32(numbers: Sequence[int], device: Device) -> Tensor:
    """On `device`, the current GPU by default if there is one. The copy does not wait for the GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else torch.device(device)
    # pinned, so that the copy to the GPU does not wait
    host = torch.tensor(numbers, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _whole(cls: type, argument: str, numbers: Iterable[Any]) -> list[int]:
    """Lengths or starts, also of NumPy and of tensors, as Python's integers."""
    try:
        found = [index(n) for n in numbers]
    except TypeError:
        # refused below
        found = [-1]
    if not all(0 <= n < 2**31 for n in found):
        checks.fail(cls.__name__, argument, "be a sequence of integers of at least 0", checks.described(numbers))
    return found


def _capacity(cls: type, block_tables: Tensor, page_size: int, blocks: int) -> int:
    """The rows that pages of checked tables have for each block."""
    name = cls.__name__
    checks.tensor(name, "block_tables", block_tables)
    if block_tables.is_nested or block_tables.dim() != 2 or block_tables.shape[0] != blocks:
        must = f"have shape [{blocks}, pages], as there are blocks of keys"
        checks.fail(name, "block_tables", must, checks.described(block_tables))
    checks.integers(name, "block_tables", block_tables)
    # no size of a type that compares with numbers but counts nothing
    if not isinstance(page_size, Integral) or not 1 <= page_size < 2**31:
        checks.fail(name, "page_size", "be an integer of at least 1", checks.described(page_size))
    return block_tables.shape[1] * int(page_size)


def _at_least(cls: type, argument: str, got: int, least: int) -> None:
    checks.require(got >= least, cls.__name__, argument, f"be at least {least}", got)


def _as_many(cls: type, queries: Sequence[Any], keys: Sequence[Any]) -> None:
    if len(queries) != len(keys):
        checks.fail(cls.__name__, "kv_seqlen", f"have as many blocks as queries, {len(queries)}", len(keys))


def _fits(argument: str, lengths: list[int], count: int, most: int) -> None:
    if len(lengths) != count or any(n > most for n in lengths):
        checks.fail("attn_bias", argument, f"be {count} lengths of at most {most}", lengths)


def _lie_in(op: str, starts: Sequence[int], lengths: Sequence[int], rows: int) -> None:
    for n, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length < 0 or start < 0 or start + length > rows:
            checks.fail(op, f"block {n}", f"lie in its {rows} rows", f"rows {start} to {start + length}")


def _no_diagonal(cls: type, causal_diagonal: None) -> None:
    if causal_diagonal is not None:
        checks.fail(cls.__name__, "causal_diagonal", "be None (masks align bottom right)", causal_diagonal)


def _padded(
    cls: type, q_seqlen: Sequence[int], padding: int, kv_seqlen: Sequence[int], diagonal: None, device: Device
) -> dict[str, Any]:
    q_seqlen, kv_seqlen = _whole(cls, "q_seqlen", q_seqlen), _whole(cls, "kv_seqlen", kv_seqlen)
    _as_many(cls, q_seqlen, kv_seqlen)
    _no_diagonal(cls, diagonal)
    return {
        "q_seqinfo": _SeqLenInfo.from_seqlens(q_seqlen, device=device),
        "k_seqinfo": _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, padding, device=device),
    }


def _gappy(
    cls: type,
    q_seqlen: Sequence[int],
    kv_seqstarts: Sequence[int],
    kv_seqlen: Sequence[int],
    device: Device,
    *,
    paged: bool = False,
) -> dict[str, Any]:
    q_seqlen, kv_seqlen = _whole(cls, "q_seqlen", q_seqlen), _whole(cls, "kv_seqlen", kv_seqlen)
    kv_seqstarts = _whole(cls, "kv_seqstarts", kv_seqstarts)
    _as_many(cls, q_seqlen, kv_seqlen)
    return {
        "q_seqinfo": _SeqLenInfo.from_seqlens(q_seqlen, device=device),
        "k_seqinfo": _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, paged, device=device),
    }


def _paged(bias: BlockBias, paged_type: type[_PagedT], k_seqinfo: Any, block_tables: Tensor, page_size: int) -> _PagedT:
    """The blocks of `bias` with keys in pages, seen as `paged_type` says, within the window of `bias` if it has one."""
    # the paged class of a window takes it as a field
    options = {"_window_size": bias.band.left + 1} if "_window_size" in {f.name for f in fields(paged_type)} else {}
    return paged_type(bias.q_seqinfo, k_seqinfo, block_tables, page_size, **options)
