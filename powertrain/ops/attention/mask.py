"""MaskSpec: the properties of an attention mask, whatever other libraries call it; MaskTensors: the tensors it needs.

Query i of a sequence has the position p = i, or p = i + keys - queries if the mask is aligned bottom right. It sees
key j when all of these hold:

    p - left <= j <= p + right      (a negative bound: no bound; right = 0 is causal)
    p // chunk == j // chunk        (chunk > 0)
    or, whatever those two say, j < prefix[batch]
    the documents of i and j are equal and not negative
    bias[..., i, j], if it is boolean

and its score is

    s = scale * q.k;   s = softcap * tanh(s / softcap);   s -= slope[head] * |p - j|;   s += bias[..., i, j]

A sink is one more score per head in the softmax's denominator, with no value. A row that sees nothing gives 0, its LSE
is -inf (the sink's score with a sink) and its gradients are 0.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

BiasKind = Literal["none", "bool", "float"]


# hashable: a MaskSpec is part of the key of decisions and a constant of traced graphs
@dataclass(frozen=True)
class MaskSpec:
    """The properties of a mask: hashable, without tensors and without lengths."""

    # a negative bound rather than infinity: kernels add bounds to int32 positions
    left: int = -1  # keys before its own position that a query sees; -1: all
    right: int = -1  # keys after it; -1: all, 0: causal
    # flash-attn from 2.1 and cross attention over a cache align bottom right; PyTorch's is_causal and xFormers'
    # LowerTriangularMask top left
    bottom_right: bool = False  # the last query stands at the last key, else the first at the first
    chunk: int = 0  # positions of one chunk see each other; 0: no chunks
    prefix: bool = False  # keys below a length per batch are seen by all
    documents: bool = False  # ids per position, equal to see each other
    bias: BiasKind = "none"
    # separate from `bias`: most backends can add a bias, few can differentiate it
    bias_grad: bool = False
    alibi: bool = False
    # 0 and not None, for kernels get it as a float argument
    softcap: float = 0.0  # 0: none
    sinks: bool = False

    @property
    def is_positional(self) -> bool:
        """Positions matter, so the alignment matters if the numbers of queries and keys differ."""
        # full attention with a prefix or documents is the same under both alignments
        return self.left >= 0 or self.right >= 0 or self.chunk > 0 or self.alibi

    @property
    def is_causal(self) -> bool:
        return self.right == 0

    @property
    def has_window(self) -> bool:
        return self.left >= 0 or self.right > 0

    def sees(self, p: Tensor, j: Tensor) -> Tensor:
        """Whether position p sees key j by bounds and chunks alone; p and j broadcast."""
        # one boolean matrix that broadcasts: the reference applies every rule by itself, which keeps it readable as the
        # specification
        visible = torch.ones(torch.broadcast_shapes(p.shape, j.shape), dtype=torch.bool, device=p.device)
        if self.left >= 0:
            visible = visible & (j >= p - self.left)
        if self.right >= 0:
            visible = visible & (j <= p + self.right)
        if self.chunk:
            # floor and not truncation: positions are negative where bottom-right alignment has more queries than keys
            visible = visible & (p.div(self.chunk, rounding_mode="floor") == j // self.chunk)
        return visible

    def materialize(
        self,
        num_queries: int,
        num_keys: int,
        tensors: "MaskTensors | None" = None,
        *,
        rows: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor | None]:
        """(visible, added) for one sequence length: bool [b|1, h|1, queries, keys], and the term added to the capped
        scores, in `dtype` and broadcastable to the same, or None. `rows`: of these queries only.

        O(queries * keys) memory."""
        tensors = tensors or MaskTensors()
        given = next((t for t in tensors if t is not None), None)
        # on the device of whichever tensor the mask has, for a mask of plain numbers has none
        device = given.device if device is None and given is not None else device
        rows = (0, num_queries) if rows is None else rows
        i = torch.arange(*rows, device=device)[:, None]
        j = torch.arange(num_keys, device=device)[None, :]
        p = i + (num_keys - num_queries if self.bottom_right else 0)
        visible = self.sees(p, j)[None, None]
        if tensors.prefix is not None:
            # a prefix is visible whatever window and chunk say (the formula's "or"), so it is applied after them
            visible = visible | (j < tensors.prefix[:, None, None, None])
        return self.add(visible, p - j, tensors, None, dtype, rows)

    def add(
        self,
        visible: Tensor,  # bool [b|1, 1, queries, keys]: by position
        distance: Tensor,  # p - j, broadcasts to the same
        tensors: "MaskTensors",
        sequence: Tensor | None,  # [1|b, queries] number of each query's sequence; None: one per batch entry
        dtype: torch.dtype,
        rows: tuple[int | None, int | None] = (None, None),
    ) -> tuple[Tensor, Tensor | None]:
        """(visible, added) with documents, ALiBi and the bias."""
        if tensors.query_documents is not None and tensors.key_documents is not None:
            # query ids are cut to the rows asked for, key ids are not: every chunk of queries sees all keys
            ids, others = tensors.query_documents[:, None, slice(*rows), None], tensors.key_documents[:, None, None, :]
            # negative ids mark padding: two padded positions have equal ids and must not see each other
            visible = visible & (ids == others) & (ids >= 0)
        added = None
        if tensors.alibi_slopes is not None:
            slopes = tensors.alibi_slopes.to(dtype)
            if slopes.dim() == 1:
                slopes = slopes.view(1, -1, 1, 1)
            elif sequence is None:
                # [batch, heads] of a dense batch: one row of slopes per batch entry
                slopes = slopes[:, :, None, None]
            else:
                # packed: the batch dim is 1, and each query's slopes are those of its own sequence
                slopes = slopes[sequence].transpose(1, 2)[..., None]
            added = -slopes * distance.abs()
        if tensors.bias is not None:
            # a bias of one row is broadcast over the queries and must not be sliced by them
            bias = tensors.bias[:, :, slice(*rows)] if tensors.bias.shape[2] > 1 else tensors.bias
            if bias.dtype is torch.bool:
                visible = visible & bias
            else:
                added = bias.to(dtype) if added is None else added + bias
        return visible, added


class MaskTensors(NamedTuple):
    """The tensors of a mask, on the device of the queries."""

    prefix: Tensor | None = None  # [b] int32
    query_documents: Tensor | None = None  # [b, queries] int32
    key_documents: Tensor | None = None  # [b, keys] int32
    bias: Tensor | None = None  # [b|1, h|1, queries|1, keys] bool (True: sees) or floating point
    alibi_slopes: Tensor | None = None  # [h] or [b, h] float32; float64 beside queries in float64
    sinks: Tensor | None = None  # [h] floating point

    # the reference computes sequence by sequence where lengths differ
    def of_batch(self, n: int) -> "MaskTensors":
        """The tensors of batch entry n, with a batch dim of 1."""

        def one(x: Tensor | None) -> Tensor | None:
            # broadcast tensors have one entry for all
            return x if x is None or x.shape[0] == 1 else x[n : n + 1]

        slopes = self.alibi_slopes
        return self._replace(
            prefix=one(self.prefix),
            query_documents=one(self.query_documents),
            key_documents=one(self.key_documents),
            bias=one(self.bias),
            # slopes [heads] have no batch dim
            alibi_slopes=slopes if slopes is None or slopes.dim() == 1 else one(slopes),
        )

    def cut(self, num_queries: int, num_keys: int) -> "MaskTensors":
        """The tensors of the first `queries` queries and `keys` keys."""
        bias = self.bias
        if bias is not None:
            bias = bias[..., : num_queries if bias.shape[2] > 1 else 1, :num_keys]
        return self._replace(
            query_documents=None if self.query_documents is None else self.query_documents[:, :num_queries],
            key_documents=None if self.key_documents is None else self.key_documents[:, :num_keys],
            bias=bias,
        )
