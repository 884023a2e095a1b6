"""AttentionProblem: the facts that decide which backend runs; AttentionCall: one call with its tensors."""

from dataclasses import dataclass, field
from math import ceil
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention.mask import MaskSpec, MaskTensors
from powertrain.runtime.target import Target

Layout = Literal["bshd", "bhsd", "sbhd", "thd", "bmghk"]
LAYOUTS: tuple[Layout, ...] = ("bshd", "bhsd", "sbhd", "thd", "bmghk")
SizeClass = Literal["decode", "short", "medium", "long"]


class Use(NamedTuple):
    """Advice to use another backend."""

    names: tuple[str, ...]
    verb: str = "use "  # "" behind advice that begins with the verb

    def __str__(self) -> str:
        return f"{self.verb}{' or '.join(self.names)}"


def use(*names: str, verb: str = "use ") -> Use:
    """Advice to use one of these backends."""
    return Use(names, verb)


@dataclass(init=False, unsafe_hash=True)
class Reason:
    """One unmet requirement of a backend, and the changes of which each one would meet it."""

    text: str  # "cuDNN takes head_dim_qk up to 128 on sm_80, got 192"
    # backends are advised by `use`, so that select.py can leave out those that do not support the call either
    changes: tuple[str | Use, ...]  # use("triton", "flash"), "a head dim of 128", "sm_90"

    def __init__(self, text: str, *changes: str | Use) -> None:
        self.text, self.changes = text, changes

    @property
    def fix(self) -> str:
        """ "use triton or flash, a head dim of 128, or sm_90"."""
        *others, last = map(str, self.changes)
        return f"{', '.join(others)}, or {last}" if others else last

    def __str__(self) -> str:
        return f"{self.text}: {self.fix}"


def size_class(n: int) -> int:
    """A size, rounded up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: as tiles are, whose rows are such numbers."""
    if n <= 2:
        return n
    above: int = 1 << (n - 1).bit_length()
    return above * 3 // 4 if 4 * n <= 3 * above else above


# a choice must not depend on exact lengths, or each new length would be a new decision
@dataclass(frozen=True)
class Lengths:
    """Facts of the sequence lengths that backends depend on: classes, never the lengths themselves.

    Packed sequences count as a batch of equal ones with as many tokens and as many pairs of query and key.
    """

    queries: int = 8192  # of a sequence: `size_class`, or one of four numbers where torch.compile has a symbol
    keys: int = 8192
    sequences: int = 2
    equal: bool = True  # as many queries as keys (thd: the same cu_seqlens)
    # cuDNN's dense-mask gradients are NaN in this case on sm_90 (pytorch/pytorch#196678)
    queries_mod_128_is_64: bool = False
    # cuDNN is not tried with dense masks over other numbers of keys
    keys_multiple_of_8: bool = True
    # other libraries' kernels are not called with empty tensors: `Limits.empty` is false for all of them
    empty: bool = False  # no queries, no keys or no batch
    # cuDNN refuses a single key (PyTorch's sdp_utils.cpp)
    single_key: bool = False
    # 65535 is the limit of a CUDA grid in its second and third dim; from 2^31 elements on int32 offsets overflow
    large: bool = False  # more than 65535 sequences, or 2^31 elements or more in query, key and value

    @property
    def size(self) -> SizeClass:
        """Up to 16, 1024, 4096 queries, or more."""
        n = self.queries
        return "decode" if n <= 16 else "short" if n <= 1024 else "medium" if n <= 4096 else "long"

    @property
    def few(self) -> bool:
        """Four keys or more to a query: kernels that split the keys pay off (docs/log/attention_hopper.md)."""
        return 4 * self.queries <= self.keys

    @staticmethod
    def facts(
        queries: int, keys: int, equal: bool | None, batch: int, elements: int, longest: int | None = None,
        compiling: bool = False, has_bias: bool = True,
    ) -> "_LengthFacts":  # fmt: skip
        """The fields as a tuple, which costs less to make and to look up. Packed sequences have a bound of their
        `longest`, 0 if it is not known; queries and keys are those of all."""
        # positional and in the order of the fields: this runs in every call, and a tuple is hashed faster than a
        # dataclass
        is_symbolic = compiling and not _are_static(queries, keys, batch, longest or 0)
        if is_symbolic and torch.compiler.is_exporting():
            return _exported(queries, keys, equal)
        classes = _symbolic if is_symbolic else _classes
        return (
            *classes(queries, keys, batch, longest),
            queries == keys if equal is None else equal,
            # without a bias no choice depends on these two, and torch.compile would guard them
            has_bias and queries % 128 == 64,
            not has_bias or keys % 8 == 0,
            not (queries and keys and batch),
            keys == 1,
            batch > 65535 or elements >= 2**31,
        )

    @staticmethod
    def of(
        queries: int, keys: int, *, equal: bool | None = None, batch: int = 1, elements: int = 0,
        longest: int | None = None,
    ) -> "Lengths":  # fmt: skip
        return Lengths(*Lengths.facts(queries, keys, equal, batch, elements, longest))


_LengthFacts = tuple[int, int, int, bool, bool, bool, bool, bool, bool]


def _are_static(*sizes: int) -> bool:
    """Whether a trace has these as numbers."""
    if not torch.compiler.is_compiling() and all(type(size) is int for size in sizes):
        return True  # a transform of torch.func in an eager call has no symbols
    # by its full name: the module takes 0.4 s to import, and is there where anything has symbols
    return all(torch.fx.experimental.symbolic_shapes.has_static_value(size) for size in sizes)


def _symbolic(queries: int, keys: int, batch: int, longest: int | None) -> tuple[int, int, int]:
    # torch.compile guards each comparison of a symbolic size and compiles once for each outcome: so there are few
    n = 16 if queries <= 16 else 512 if queries <= 1024 else 2048 if queries <= 4096 else 8192
    return n, 4 * n if 4 * queries <= keys else n, _TOKENS // n


def _exported(queries: int, keys: int, equal: bool | None) -> _LengthFacts:
    """Facts that hold for all lengths, since torch.export forbids guards on sizes: where a fact may or may not hold, it
    has the value that excludes more backends."""
    if equal is None:
        equal = torch.fx.experimental.symbolic_shapes.statically_known_true(queries == keys)
    n = 2048
    return n, n, _TOKENS // n, equal, True, False, False, True, True


def _classes(queries: int, keys: int, batch: int, longest: int | None) -> tuple[int, int, int]:
    """Classes of queries and keys of a sequence, and of the number of sequences."""
    if longest is None or not batch:
        return size_class(queries), size_class(keys), size_class(batch)
    mean, longest = queries / batch, min(longest, queries)
    # between 2 * mean - longest and longest, evenly: the sum of squares is that of so many of this length
    length = min(mean + (longest - mean) ** 2 / (3 * mean), longest) if longest > mean > 0 else mean
    n = size_class(ceil(length))
    return n, size_class(ceil(n * keys / max(1, queries))), size_class(ceil(queries / max(1, n)))


_TOKENS = 16384  # of a batch whose sizes are symbols


# frozen and without tensors: the problem is a dictionary key, and explain_attention makes one for a GPU that is not
# there
@dataclass(frozen=True)
class AttentionProblem:
    """Facts of an attention, without tensors: all that a policy may depend on. Equal problems get equal answers."""

    dtype: torch.dtype
    head_dim_qk: int
    head_dim_v: int
    target: Target | None  # None: the CPU
    mask: MaskSpec = field(default_factory=MaskSpec)
    layout: Layout = "bshd"
    # defaults describe a common dense call, so that tests and `powertrain explain` name only the facts they vary
    num_heads: int = 16
    num_kv_heads: int = 16
    lengths: Lengths = field(default_factory=Lengths)
    # kernels of other libraries take cu_seqlens alone, which say nothing about unused rows between sequences
    has_key_lengths: bool = False  # sequences end before their storage does (padded cu_seqlens, lengths per batch)
    # only the universal kernels read such keys: a backward that stores dk once per row would lose the other sequences'
    # shares
    has_unordered_keys: bool = False  # or have starts and lengths of keys that may lie anywhere, also in two of them
    dropout: bool = False
    dropout_seeded: bool = False  # the caller gave the seed: only our Philox will do
    needs_grad: bool = True
    # PyTorch's public SDPA returns no LSE, its internal ops do
    needs_lse: bool = False
    needs_lse_grad: bool = False
    deterministic: bool = False
    # TMA and 16-byte vector loads require it; other alignments take pointer loads
    aligned: bool = True  # base addresses and strides are multiples of 16 bytes
    # some backends read lengths on the host, which a trace cannot do
    compiling: bool = False  # torch.compile is tracing
    tf32: bool = False  # float32, and PyTorch's settings allow TF32 (runtime/float32_products.py)

    @property
    def arch(self) -> int:
        """90 for sm_90; 0 for the CPU."""
        return 0 if self.target is None else self.target.arch

    @property
    def where(self) -> str:
        """ "sm_90" or "cpu", to begin a reason with."""
        return "cpu" if self.target is None else f"sm_{self.target.arch}"

    @property
    def is_grouped(self) -> bool:
        return self.num_heads != self.num_kv_heads


class Sizes(NamedTuple):
    """Sizes by the shapes of query, key and value; packed, queries and keys are the tokens of all sequences."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int


class Varlen(NamedTuple):
    """Where the sequences of a thd layout lie, or how long those of a batch are. int32 on the device of the queries.

    Dense layouts have no starts. `used` lengths are given where a sequence ends before its storage does. Starts ascend,
    and a sequence ends before the next begins; those of keys need not if they are `unordered`, which have lengths.
    """

    query_starts: Tensor | None = None  # [batch + 1]: sequence n begins at row query_starts[n]
    key_starts: Tensor | None = None
    query_used: Tensor | None = None  # [batch]
    key_used: Tensor | None = None
    # 0: not given; the number of all tokens is the bound then (backends/sdpa.py)
    max_queries: int = 0  # an upper bound, known to the host
    max_keys: int = 0
    unordered: bool = False


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One checked call. Tensors stand as the caller gave them; `layout` names their dims.

    query  bshd [b, sq, h, dqk], bhsd [b, h, sq, dqk], sbhd [sq, b, h, dqk], thd [tq, h, dqk], bmghk [b, sq, g, h, dqk]
    key    the same with sk and KV heads (h a multiple of them); bmghk: query's g and h, stride 0 where expanded
    value  as key with dv. The output has the query's layout, with dv; LSE is float32, natural logarithm, [b, h, sq], in
           thd [h, tq], in bmghk [b, g, h, sq]
    """

    query: Tensor
    key: Tensor
    value: Tensor
    layout: Layout
    mask: MaskSpec
    tensors: MaskTensors
    varlen: Varlen
    scale: float
    dropout_p: float
    dropout_seed: Tensor | None  # [2] int64 on the device; backends of ours draw keep from it, None: nothing is dropped
    return_lse: bool
    deterministic: bool
    sizes: Sizes

    @property
    def has_lengths(self) -> bool:
        """Sequences differ in length, and only the device knows how."""
        # a dense layout with seqused is variable too, so "packed" alone does not tell
        return self.layout == "thd" or self.varlen.query_used is not None or self.varlen.key_used is not None
